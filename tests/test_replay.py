"""Replays have the bits of ordinary calls, and what they cannot do is left alone."""

import re

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver

from ferrum_triton.backends.door import make_door
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.errors import InputError
from ferrum_triton.kernels import compiled, jit, replay
from ferrum_triton.kernels.jit import kernel, record_launches
from ferrum_triton.kernels.quant.products import MANY
from ferrum_triton.kernels.rehearsal import NotReplayable, Passed, Scalar, ScalarUsed, rehearse
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory
from tests.fake_gpu import STREAM, fake_gpu  # noqa: F401
from tests.harness import as_tuple, bits, clone, place, sample, tensors, typical_axes

load_kernels("interpret")

KERNEL_OPS = [op for op in OPS.values() if "triton" in op.impls]

# What is never replayed, and why.
LEFT_ALONE = {
    "embedding_lookup": "its ids are on the host",
    "gemm_quant_moe_id_gate_up_silu": "of weights as files have them it is torch's to round",
    "mlp_quant_moe_id": "it calls gemm_quant_moe_id_gate_up_silu",
}
SHAPE = re.compile(r"/n\d+k\d+")


def by_id(ops):
    return [pytest.param(op, id=op.name) for op in ops]


def door_of(op, device="cpu", launcher=None):
    return make_door(op, launcher or op.impls["triton"], device, replays=True)


def kinds_of(door):
    """What became of each kind of call: True of one that is replayed."""
    admitted = door.__globals__.get("admitted", {})
    return [is_replayed(known) for known in admitted.values()]


def is_replayed(known):
    if isinstance(known, replay._ByValue):
        return all(map(is_replayed, known._table.values()))
    return known is not False and not isinstance(known, replay.Trial)


def assert_same(op, door, arguments):
    """A call through the door does what the launcher does alone."""
    ours, theirs = dict(arguments), clone(arguments)
    ours |= {k: place(v, "plain").tensor for k, v in tensors(arguments).items() if k in op.mutates}
    got = as_tuple(door(**ours))
    want = as_tuple(op.impls["triton"](**theirs))
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype)
        assert torch.equal(bits(g), bits(w))
    for name in op.mutates:
        if ours[name] is not None:
            assert torch.equal(bits(ours[name]), bits(theirs[name]))


@pytest.mark.parametrize("op", by_id(KERNEL_OPS))
def test_replays_have_the_bits_of_ordinary_calls(op):
    """Two calls as a rule make a replay; the third has other data at other addresses."""
    door = door_of(op)
    dtype = op.dtypes[-1]
    arguments = [sample(op, dtype, "cpu", seed, **typical_axes(op)) for seed in range(3)]
    scalars = {k: v for k, v in arguments[0].items() if isinstance(v, float)}
    for call in arguments[:2]:
        door(**clone(call | scalars))
    if op.name in LEFT_ALONE:
        assert not any(kinds_of(door)), f"{op.name} is replayed after all"
    else:
        assert kinds_of(door) == [True]
    assert_same(op, door, arguments[2] | scalars)
    assert op.name in LEFT_ALONE or len(kinds_of(door)) == 1


def test_integers_may_change_from_call_to_call():
    op = OPS["kv_cache_append_head_major"]
    door = door_of(op)
    new = torch.randn(2, 1, 16)
    caches = torch.zeros(2, 2, 8, 16)
    for cache_len in (0, 1, 2, 5, 7):
        door(caches[0], caches[1], new, new + 1, cache_len)
        assert torch.equal(caches[0, :, cache_len], new[:, 0])
        assert torch.equal(caches[1, :, cache_len], new[:, 0] + 1)
    assert not caches[:, :, 3:5].any()
    assert kinds_of(door) == [True]
    with pytest.raises(InputError, match="cache_len"):  # a check at every call, replayed or not
        door(caches[0], caches[1], new, new, 8)


def test_truth_values_are_no_integers_that_may_change():
    op = OPS["kv_cache_append_head_major"]
    arguments = sample(op, torch.float32, "cpu", 0, **typical_axes(op))
    assert rehearse(op.impls["triton"], arguments, frozenset()).steps
    with pytest.raises(NotReplayable, match="bool"):
        rehearse(op.impls["triton"], arguments | {"cache_len": True}, frozenset())


def test_integers_that_launchers_look_at_have_replays_of_their_own():
    op = OPS["copy_slice"]
    door = door_of(op)
    src = torch.arange(16.0)
    for src_offset in (0, 3, 0, 3, 0, 3, 5):
        dst = torch.zeros(4)
        door(src, dst, src_offset, 1, 2)
        assert torch.equal(dst, torch.tensor([0.0, src_offset, src_offset + 1, 0.0]))
    (known,) = door.__globals__["admitted"].values()
    assert sorted(map(is_replayed, known._table.values())) == [False, True, True]


def test_values_of_integers_are_forgotten_before_they_grow_without_bound(monkeypatch):
    monkeypatch.setattr(replay, "MAX_VALUES", 3)
    door = door_of(OPS["copy_slice"])
    src, dst = torch.arange(16.0), torch.zeros(4)
    for src_offset in (*range(9), 2, 2, 2):
        door(src, dst, src_offset)
        assert dst[0] == src_offset
    (known,) = door.__globals__["admitted"].values()
    assert len(known._table) <= 3


def test_floats_are_told_apart_by_value_sign_and_type():
    door = door_of(OPS["scale_inplace"])
    x = torch.tensor([1.0, -2.0, 3.0])
    for scale in (0.0, -0.0, 2.0, 0, 2, float("inf")) * 3:
        y, z = x.clone(), x.clone()
        door(y, scale)
        OPS["scale_inplace"].impls["triton"](z, scale)
        assert torch.equal(bits(y), bits(z)), scale
    assert kinds_of(door) == [True] * 6


def test_scalars_of_another_type_are_refused_after_good_calls():
    for replays in (False, True):
        door = make_door(OPS["rms_norm"], OPS["rms_norm"].impls["triton"], "cpu", replays=replays)
        x, weight = torch.randn(2, 8), torch.randn(8)
        for _ in range(3):
            door(x, weight, 1e-6)
        for eps in (None, "small", torch.ones(1), torch.ones(2), [1e-6]):
            with pytest.raises(InputError, match="eps"):
                door(x, weight, eps)
        door = make_door(OPS["split_qkv"], OPS["split_qkv"].impls["triton"], "cpu", replays=replays)
        for _ in range(3):
            door(torch.randn(2, 24), 8, 8)
        with pytest.raises(InputError, match="kv_dim"):
            door(torch.randn(2, 24), 8, 8.0)


def test_new_scalars_are_not_checked_in_full_again(monkeypatch):
    op = OPS["scale_inplace"]
    door = door_of(op)
    door(torch.ones(3), 1.0)
    monkeypatch.setattr(op.contract, "check", lambda *_: pytest.fail("checked again"))
    for scale in range(1, 9):
        x = torch.ones(3)
        door(x, scale / 8)
        assert x[0] == scale / 8


def test_misaligned_tensors_have_replays_of_their_own():
    door = door_of(OPS["rms_norm"])
    weight = torch.randn(8)
    flat = torch.randn(64)
    for start in (0, 1, 2, 0, 1, 2, 4, 5):  # multiples of 4 bytes
        x = flat[start : start + 16].view(2, 8)
        want = OPS["rms_norm"].impls["triton"](x, weight)
        assert torch.equal(door(x, weight), want)
    assert kinds_of(door) == [True] * 3


def test_outputs_that_are_passed_are_written_and_returned():
    for name in ("rms_norm", "split_qkv"):
        op = OPS[name]
        door = door_of(op)
        for seed in range(4):
            arguments = sample(op, torch.float32, "cpu", seed, **typical_axes(op))
            want = as_tuple(op.impls["triton"](**arguments))
            outs = tuple(torch.full_like(w, torch.nan) for w in want)
            out = outs if len(outs) > 1 else outs[0]
            assert door(**arguments, out=out) is out
            assert all(map(torch.equal, outs, want))
        assert kinds_of(door) == [True]


def test_outputs_are_new_at_every_call():
    door = door_of(OPS["rms_norm"])
    x, weight = torch.randn(2, 8), torch.ones(8)
    outs = [door(x * i, weight) for i in range(1, 5)]
    assert len({out.data_ptr() for out in outs}) == 4


def test_what_observes_launches_sees_them():
    door = door_of(OPS["rms_norm"])
    x, weight = torch.randn(2, 8), torch.ones(8)
    with record_launches() as recorded:
        for _ in range(3):
            door(x, weight)
    assert len(recorded) == 3
    assert kinds_of(door) == [False]  # and none was rehearsed
    for _ in range(3):
        door(x, weight)
    assert kinds_of(door) == [True]
    with record_launches() as recorded:
        door(x, weight)
    assert len(recorded) == 1


def test_scratch_memory_may_be_empty():
    def launcher(x, *, out=None):
        y = OPS["gelu"].impls["triton"](x, out=out)
        _add_length_kernel.launch((1,), x.new_empty(0), y, 0, 1, BLOCK=8)
        return y

    door = door_of(OPS["gelu"], launcher=launcher)
    x = torch.randn(8)
    for _ in range(3):
        assert torch.equal(door(x), OPS["gelu"].impls["triton"](x))
    assert kinds_of(door) == [True]


def test_replays_are_forgotten_when_asked():
    calls = []

    def launcher(x, *, out=None):
        calls.append(1)
        return OPS["gelu"].impls["triton"](x, out=out)

    door = door_of(OPS["gelu"], launcher=launcher)
    x = torch.randn(2, 8)
    for _ in range(5):
        door(x)
    assert len(calls) == 3  # twice in earnest, once as a rehearsal
    jit.forget_replays()
    assert kinds_of(door) == []
    door(x)
    assert len(calls) == 4


def test_a_decision_about_forgotten_calls_is_dropped():
    def launcher(x, *, out=None):
        if calls:
            jit.forget_replays()  # as if launchers chose otherwise from here on
        calls.append(1)
        return OPS["gelu"].impls["triton"](x, out=out)

    calls = []
    door = door_of(OPS["gelu"], launcher=launcher)
    for _ in range(2):
        door(torch.ones(4))
    assert kinds_of(door) == []


@pytest.mark.parametrize(
    "peculiar",
    [
        lambda x, calls: x.sum().item(),
        lambda x, calls: x + 1,
        lambda x, calls: x.T.contiguous(),
        lambda x, calls: x.tolist(),
        lambda x, calls: torch.tensor([1.0]),
        lambda x, calls: torch.empty(3, device="meta"),
        lambda x, calls: bool(x[0, 0] > 0),
        lambda x, calls: x.clone(),
        lambda x, calls: x.numpy(),
        lambda x, calls: x.fill_(float(x[0, 0])),
        lambda x, calls: OPS["gelu"].impls["triton"](x) if len(calls) % 2 else None,
    ],
)
def test_launchers_that_do_more_than_launch_are_asked_every_time(peculiar):
    calls = []

    def launcher(x, *, out=None):
        calls.append(1)
        peculiar(x, calls)
        return OPS["gelu"].impls["triton"](x, out=out)

    door = door_of(OPS["gelu"], launcher=launcher)
    for _ in range(4):
        x = torch.randn(2, 8)
        assert torch.equal(door(x), OPS["gelu"].impls["triton"](x))
    assert kinds_of(door) == [False]


def test_scalars_are_handed_on_or_refused():
    scalar = Scalar("length")
    for use in (
        bool,
        int,
        float,
        str,
        hash,
        lambda s: s + 1,
        lambda s: 1 - s,
        lambda s: s == 0,
        lambda s: s > 0,
        lambda s: range(s),
        lambda s: isinstance(s, int),
        lambda s: {s: 1},
        lambda s: f"{s}",
        lambda s: [0][s],
        lambda s: max(s, 1),
    ):
        with pytest.raises(ScalarUsed, match="length"):
            use(scalar)


@kernel(dynamic=["length"])
def _add_length_kernel(y_ptr, x_ptr, n, length, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + length, mask=i < n)


def test_scalars_reach_kernels_only_where_code_does_not_depend_on_them():
    def launch(x, length, *, sized=0, block=8):
        y = torch.empty_like(x)
        _add_length_kernel.launch((1,), y, x, sized or 8, length, BLOCK=block)
        return y

    x = torch.randn(8)
    (step,) = rehearse(launch, {"x": x, "length": 5}, frozenset()).steps
    assert step.args[3] == Passed("length")
    for wrong in ({"sized": 8}, {"block": 8}):
        with pytest.raises(ScalarUsed):
            rehearse(launch, {"x": x, "length": 5} | wrong, frozenset())
    with pytest.raises(NotReplayable, match="Tensor"):  # one that is no argument's
        rehearse(
            lambda y: _add_length_kernel.launch((1,), y, x, 8, 1, BLOCK=8), {"y": x}, frozenset()
        )


def bench_cases():
    params, seen = [], set()
    for op in KERNEL_OPS:
        for case in op.bench:
            kind = SHAPE.sub("", f"{op.name}/{case.id}")
            # Beyond these, weights are decoded for torch's own product.
            if kind not in seen and op.name != "embedding_lookup":
                seen.add(kind)
                params.append(pytest.param(op, case, id=f"{op.name}/{case.id}"))
    return params


@pytest.mark.parametrize(("op", "case"), bench_cases())
def test_replays_hand_the_c_launcher_what_ordinary_calls_do(op, case, fake_gpu):  # noqa: F811
    """At every size that is measured, on a GPU that notes what it is given."""
    made = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    try:
        door = make_door(op, op.impls["triton"], "cuda")
        for _ in range(4):  # two more where the launcher looks at integers
            door(**fake_gpu.arguments(made))
    except NotReplayable:  # torch multiplies, by dense weights or by many that were decoded
        assert {"b", "router"} & made.keys() or case.axes["m"] >= MANY
        return
    assert kinds_of(door) == [True]

    arguments = fake_gpu.arguments(made)
    calls = []
    for call in (door, op.impls["triton"]):
        fake_gpu.calls.clear()
        result = as_tuple(call(**arguments))
        calls.append([*fake_gpu.calls, ("returns", tuple(t.data_ptr() for t in result))])
    replayed, ordinary = calls
    given = {t.data_ptr() >> 48 for t in tensors(arguments).values()}
    moved = {}
    for ours, theirs in zip(replayed, ordinary, strict=True):
        assert ours[0] == theirs[0]
        assert_same_values(ours[1], theirs[1], given, moved)
    assert len({*moved.values()}) == len(moved), "two pieces of memory have become one"


def assert_same_values(ours, theirs, given, moved):
    """Equal, but for addresses in memory that the call allocated, which are equal after a move."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, tuple) and isinstance(b, tuple):
            assert_same_values(a, b, given, moved)
        elif type(a) is int and type(b) is int and b > 1 << 48 and b >> 48 not in given | {0}:
            assert moved.setdefault(b, a) == a
        elif a is not None or b != 0:  # a pointer that is None is a constexpr
            assert (type(a), a) == (type(b), b)


def test_a_replay_runs_on_its_tensors_device_and_stream(fake_gpu, monkeypatch):  # noqa: F811
    current, entered = [0], []

    class OnDevice:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(compiled, "current_device", lambda: current[0])
    door = make_door(OPS["gelu"], OPS["gelu"].impls["triton"], "cuda")
    x = torch.empty(2, 64, device="meta")
    for _ in range(2):
        door(fake_gpu.tensor(x))
    current[0] = 1
    fake_gpu.calls.clear()
    door(fake_gpu.tensor(x))
    assert entered == [0] and current == [1]
    ((name, args),) = fake_gpu.calls
    assert (name, args[:4]) == ("_activation_kernel", (1, 1, 1, STREAM))


def test_integers_beyond_32_bits_go_to_another_binary(fake_gpu):  # noqa: F811
    door = make_door(
        OPS["kv_cache_append_head_major"], OPS["kv_cache_append_head_major"].impls["triton"], "cuda"
    )
    capacity = 1 << 33
    cache = torch.empty(1, capacity, 16, dtype=torch.float16, device="meta")
    new = torch.empty(1, 1, 16, dtype=torch.float16, device="meta")
    functions = []
    for cache_len in (1, 2, 3, 1 << 32, (1 << 32) + 1, 4):
        fake_gpu.calls.clear()
        door(*map(fake_gpu.tensor, (cache, cache, new, new)), cache_len)
        ((_, args),) = fake_gpu.calls
        assert cache_len in args
        functions.append(args[4])
    short, long = functions[0], functions[3]
    assert functions == [short, short, short, long, long, short] and short != long


def test_profilers_see_replayed_launches(fake_gpu, monkeypatch):  # noqa: F811
    watched = []
    door = make_door(OPS["gelu"], OPS["gelu"].impls["triton"], "cuda")
    x = torch.empty(2, 64, device="meta")
    for _ in range(3):
        door(fake_gpu.tensor(x))
    assert kinds_of(door) == [True]
    monkeypatch.setattr(fake_gpu, "compile", lambda *_: watched.append("by Triton"))
    knobs.runtime.launch_enter_hook.add(print)
    try:
        door(fake_gpu.tensor(x))
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert watched == ["by Triton"]
    door(fake_gpu.tensor(x))
    assert watched == ["by Triton"]


def test_tensor_maps_are_encoded_once_an_address(monkeypatch):
    asked = []

    class Maps(compiled.TensorMaps):
        def __missing__(self, address):
            asked.append(address)
            return super().__missing__(address)

    maps = Maps("encoding", (4, 8), (8, 1), "zero")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda d, _: [d.base.data_ptr()])
    assert [maps[n] for n in (16, 32, 16, 32)] == [16, 32, 16, 32]
    assert asked == [16, 32]
    for n in range(1000):
        assert maps[n] == n
    assert len(maps) <= compiled.MAX_TENSOR_MAPS
