"""The gated delta rule: that chunks are tokens, that calls go on where others ended, and edges."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.linear_attention.prefill import long_heads, prefill_config
from ferrum_triton.kernels.linear_attention.sequences import layout_of
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close, tolerance
from tests.harness import BACKENDS, clone, expected

both = pytest.mark.parametrize("backend_name", BACKENDS)
KERNELS = [name for name in BACKENDS if name != "cpu"]
on_kernels = pytest.mark.parametrize("backend_name", KERNELS)
INF, NAN = float("inf"), float("nan")
DELTA = ("gdn_decode", "gdn_prefill")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["by_key", "by_value"])
def form(request):
    """Either form in which a launch goes from chunk to chunk."""
    config = {"CHUNK_WARPS": 4, "CHUNK_REGISTERS": 0, "num_warps": 4, "num_stages": 2}
    config |= {"BLOCK_V": 64 if request.param else 32, "BY_VALUE": request.param}
    with prefill_config.forced(config):
        yield


def delta(backend, seq_lens, dtype=torch.float16, seed=0, heads=(1, 2), width=16, **axes):
    """Arguments of a call: sequences of these lengths, as a model would have them."""
    make = TensorFactory(dtype, backend.device, seed)
    return OPS["gdn_prefill"].make_sample(
        make,
        num_k_heads=heads[0],
        group_size=heads[1],
        head_k_dim=width,
        head_v_dim=width,
        seq_lens=tuple(seq_lens),
        **axes,
    )


def tokens_of(arguments, start, end):
    """The arguments of a call for some tokens of one sequence, which shares its states."""
    per_token = {name: arguments[name][start:end] for name in ("q", "k", "v", "g", "beta")}
    return {**arguments, **per_token, "cu_seqlens": None}


def check(op, got, arguments, want, left):
    """Hold a result and the states against the reference's, in the dtype of the values."""
    assert_close(got, want[0].to(got.device), name=op)
    states = arguments["states"].to(got.dtype)
    assert_close(states, left["states"].to(got.device), name=f"{op} states")


@pytest.mark.parametrize(("width", "alike", "most"), [(1, True, 20), (16, False, 4)])
def test_keys_that_are_alike_leave_little_of_16_bits(width, alike, most):
    """Where nothing decays, tokens undo one another's changes: docs/linear-attention.md."""
    backend, worst = get_backend("interpret"), 0.0
    for seed in range(40):
        arguments = delta(backend, [64], seed=seed, heads=(1, 1), width=width)
        arguments["g"].zero_()
        names = ("beta", "k") if alike else ("beta",)
        arguments |= {name: arguments[name][:1].expand_as(arguments[name]) for name in names}
        want, left = expected(OPS["gdn_decode"], {**arguments, "kept_slots": None})
        got = backend.gdn_prefill(**arguments)
        rtol, atol = tolerance(got.dtype)
        for found, exact in ((got, want[0]), (arguments["states"], left["states"])):
            error = (found.double() - exact).abs() / (atol + rtol * exact.abs())
            worst = max(worst, error.max().item())
    assert worst < most


@pytest.mark.usefixtures("form")
@on_kernels
@pytest.mark.parametrize("length", [1, 2, 15, 63, 64, 65, 127, 129, 200, 1000])
def test_chunks_are_tokens(backend_name, length):
    backend = get_backend(backend_name)
    arguments = delta(backend, [length], seed=length, decay=0.1)
    want, left = expected(OPS["gdn_decode"], {**arguments, "kept_slots": None})
    got = backend.gdn_prefill(**arguments)
    check("gdn_prefill", got, arguments, want, left)


@pytest.mark.usefixtures("form")
@on_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_sequence_among_short_ones(backend_name, dtype):
    backend = get_backend(backend_name)
    arguments = delta(backend, [3, 0, 4999, 70], dtype, heads=(1, 1), decay=0.02, hostile=False)
    want, left = expected(OPS["gdn_prefill"], arguments)
    got = backend.gdn_prefill(**arguments)
    check("gdn_prefill", got, arguments, want, left)


@pytest.mark.usefixtures("form")
@pytest.mark.gpu
@pytest.mark.parametrize("seq_lens", [(4096,), (1, 777, 64, 2000)])
def test_a_model_s_heads(seq_lens):
    """The kernel by chunks against the one by tokens, which computes in float32."""
    backend = get_backend("cuda")
    heads = {"heads": (16, 2), "width": 128}
    arguments = delta(backend, seq_lens, torch.bfloat16, decay=0.05, **heads)
    tokens = clone(arguments)
    want = backend.gdn_decode(**tokens)
    got = backend.gdn_prefill(**arguments)
    assert_close(got, want)
    assert_close(arguments["states"].bfloat16(), tokens["states"])


@both
@pytest.mark.parametrize("op", DELTA)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_value_heads_in_turns_by_key_heads(backend_name, op, group):
    """What heads give is the same wherever they stand, once each has its key head."""
    backend, heads = get_backend(backend_name), 2 * group
    arguments = delta(backend, [70], heads=(2, group))
    turns = torch.arange(heads).view(2, group).T.flatten()  # 0, group, 1, group + 1, ...
    other = {**arguments, "states": arguments["states"][:, turns], "tiled_values": True}
    other |= {name: arguments[name][:, turns] for name in ("v", "g", "beta")}
    want, got = (getattr(backend, op)(**case) for case in (arguments, other))
    assert torch.equal(got, want[:, turns])
    assert torch.equal(other["states"], arguments["states"][:, turns])


@both
@limits(max_examples=6)
@given(cuts=st.lists(st.integers(0, 150), max_size=3), chunked=st.booleans())
def test_a_sequence_in_any_parts(backend_name, cuts, chunked):
    """Calls for parts of a sequence, by chunks or by tokens, are one call for all of it."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [150], decay=0.05)
    want, left = expected(OPS["gdn_prefill"], arguments)
    bounds = [0, *sorted(cuts), 150]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        call = backend.gdn_prefill if chunked != bool(i % 2) else backend.gdn_decode
        parts.append(call(**tokens_of(arguments, start, end)))
    check("parts", torch.cat(parts), arguments, want, left)


@both
@limits(max_examples=6)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), width=st.sampled_from([1, 2, 4]))
def test_a_convolution_in_any_parts(backend_name, cuts, width):
    backend = get_backend(backend_name)
    make = TensorFactory(torch.float32, backend.device, width)
    x, weight = make.randn(40, 24), make.randn(24, width)
    states, slots = make.randn(3, width - 1, 24), make.ints(1, 2, 1)
    whole = states.clone()
    want = backend.causal_conv1d(x, weight, whole, slots)
    bounds = [0, *sorted(cuts), 40]
    parts = [
        backend.causal_conv1d(x[start:end], weight, states, slots)
        for start, end in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(parts), want)
    assert torch.equal(states, whole), "inputs are kept as they are"


@both
@pytest.mark.parametrize("op", DELTA)
def test_nothing_is_remembered_of_what_is_forgotten(backend_name, op):
    """With g = -inf a token sees itself alone: y = query_scale · β (k · q) v, and S = k ⊗ β v."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [70], heads=(1, 1))
    arguments["g"].fill_(-INF)
    y = getattr(backend, op)(**arguments)
    q, k, v, beta = (arguments[name].double() for name in ("q", "k", "v", "beta"))
    scale = 16**-0.5
    assert_close(y, scale * beta[..., None] * (k * q).sum(dim=-1, keepdim=True) * v)
    last = k[-1, 0][:, None] * beta[-1, 0] * v[-1, 0]
    slot = arguments["slots"].long()
    assert_close(arguments["states"][slot][0, 0].to(y.dtype), last)


@both
@pytest.mark.parametrize("op", DELTA)
def test_a_state_that_is_only_asked(backend_name, op):
    """With β = 0 and g = 0 it stays as it is, not by a bit another, and y = query_scale · Sᵀ q."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [70], heads=(1, 1))
    arguments["g"].zero_()
    arguments["beta"].zero_()
    before = arguments["states"].clone()
    y = getattr(backend, op)(**arguments)
    assert torch.equal(arguments["states"], before)
    state = before[arguments["slots"].long()][0, 0].double()
    assert_close(y[:, 0], 16**-0.5 * arguments["q"][:, 0].double() @ state)


@both
@pytest.mark.parametrize("op", DELTA)
def test_a_key_that_comes_again_has_its_last_value(backend_name, op):
    """With β = 1 and g = 0 a state says v of k, whatever it said before: keys all alike."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [100], heads=(1, 1))
    key = torch.zeros(16)
    key[3] = 1.0
    for name in ("q", "k"):
        arguments[name].copy_(key.expand(100, 1, 16))
    arguments["g"].zero_()
    arguments["beta"].fill_(1.0)
    y = getattr(backend, op)(**arguments)
    assert_close(y, 16**-0.5 * arguments["v"].double())


@both
@pytest.mark.parametrize("op", DELTA)
@pytest.mark.parametrize("gate", [-40.0, -5.0, -1e-6])
def test_gates_near_their_ends(backend_name, op, gate):
    """Some tokens that nearly forget among others that forget nothing; β of 0 and 1 among them."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [130, 1, 64])
    arguments["g"].fill_(-0.01)
    arguments["g"][::7] = gate
    arguments["beta"][::5] = 1.0
    arguments["beta"][::3] = 0.0
    declared = OPS[op]
    if op == "gdn_decode":
        arguments["kept_slots"] = None
    want, left = expected(declared, arguments)
    got = getattr(backend, op)(**arguments)
    check(op, got, arguments, want, left)


def test_ten_thousand_tokens_do_not_drift():
    """The definition in float32 against itself in float64."""
    backend = get_backend("cpu")
    arguments = delta(backend, [10_000], torch.float32, heads=(1, 1), width=8, decay=0.01)
    arguments["kept_slots"] = None
    want, left = expected(OPS["gdn_decode"], arguments)
    got = backend.gdn_decode(**arguments)
    assert_close(got, want[0])
    assert_close(arguments["states"], left["states"])


@pytest.mark.usefixtures("form")
@both
@pytest.mark.parametrize("op", ["gdn_decode", "gdn_prefill", "causal_conv1d", "gdn_prepare"])
def test_nan_stays_in_its_sequence(backend_name, op):
    """Neither another's results nor its state see it, and slots of nobody stay as they are."""
    backend = get_backend(backend_name)
    seq_lens, declared = (5, 66, 2), OPS[op]
    make = TensorFactory(torch.float16, backend.device, 1)
    axes = {"seq_lens": seq_lens, "num_k_heads": 1, "group_size": 2, "head_k_dim": 16}
    axes |= {"head_v_dim": 16, "width": 4, "num_channels": 24}
    sizes = {"causal_conv1d": ("width", "num_channels")}.get(
        op, ("num_k_heads", "group_size", "head_k_dim", "head_v_dim")
    )
    sizes += ("width",) if op == "gdn_prepare" else ()
    arguments = declared.make_sample(
        make, seq_lens=seq_lens, hostile=False, **{name: axes[name] for name in sizes}
    )
    poisoned = clone(arguments)
    for name in ("q", "k", "v", "g", "beta", "x", "qkv", "a", "b"):
        if name in poisoned:
            poisoned[name][5:71] = NAN
    clean = getattr(backend, op)(**arguments)
    dirty = getattr(backend, op)(**poisoned)
    pairs = [(clean, dirty)] if isinstance(clean, torch.Tensor) else zip(clean, dirty, strict=True)
    for good, bad in pairs:
        assert torch.equal(good[:5], bad[:5]) and torch.equal(good[71:], bad[71:])
        assert bad[5:71].isnan().all()
    slots = arguments["slots"].long()
    for seq in (0, 2):
        assert torch.equal(arguments["states"][slots[seq]], poisoned["states"][slots[seq]])
    assert poisoned["states"][slots[1]].isnan().any()


@both
@pytest.mark.parametrize("op", DELTA)
def test_slots_of_nobody(backend_name, op):
    """No state is written for a slot out of range, for no tokens, or for a negative position."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [3, 0, 2, 4, 5], with_offsets=True)
    states = arguments["states"]
    arguments["slots"].copy_(torch.tensor([-1, 3, 1, 2, 5]))
    arguments["pos_offsets"].copy_(torch.tensor([7, 7, -1, 0, 9]))
    before = states.clone()
    y = getattr(backend, op)(**arguments)
    for slot in (0, 1, 3, 4):
        assert torch.equal(states[slot], before[slot])
    assert not torch.equal(states[2], before[2])
    # All of them began from zeros, as if there were no states.
    bare = {**arguments, "states": None, "slots": None, "pos_offsets": None}
    assert_close(y, getattr(backend, op)(**bare))


@both
@pytest.mark.parametrize("op", DELTA)
def test_tokens_of_nobody(backend_name, op):
    """Behind the last sequence, of which there need be none, they change nothing."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [5])
    before = arguments["states"].clone()
    call = getattr(backend, op)
    none = {"slots": arguments["slots"][:0], "cu_seqlens": arguments["cu_seqlens"][:1]}
    assert call(**{**arguments, **none}).shape == arguments["v"].shape
    assert torch.equal(arguments["states"], before)
    bounds = torch.tensor([0, 2], dtype=torch.int32, device=backend.device)
    got = call(**{**clone(arguments), "cu_seqlens": bounds})[:2]
    assert torch.equal(got, call(**tokens_of(arguments, 0, 2)))


def test_programs_are_for_sequences_that_may_be_long():
    """One prompt beside a hundred decodes is not a hundred prompts."""
    assert long_heads(8 * 4096, 8, 32) == 256
    assert long_heads(2048 + 100, 101, 32) == 32
    assert long_heads(300, 1, 32) == long_heads(300, 3, 32) == 32


def test_blocks_of_one_sequence_are_as_many_as_it_fills():
    for num_tokens in (1, 63, 64, 65, 5000):
        layout = layout_of(num_tokens, None, None, None, None)
        assert layout.blocks(num_tokens, 64) == -(-num_tokens // 64)


@both
def test_states_that_are_kept_are_those_of_single_steps(backend_name):
    """Guesses verified: the state after each is there, and the one before them all untouched."""
    backend = get_backend(backend_name)
    arguments = delta(backend, [4, 2], torch.float32)
    slots = arguments["slots"]
    base = arguments["states"]
    kept = torch.arange(2, 8, dtype=torch.int32, device=base.device)
    kept[4] = -1
    states = torch.cat((base, base.new_zeros(6, *base.shape[1:])))
    together = {**arguments, "states": states, "kept_slots": kept}
    y = backend.gdn_decode(**together)
    assert torch.equal(states[:2], base)
    for first, count, seq in ((0, 4, 0), (4, 2, 1)):
        one = {**arguments, "states": base.clone(), "slots": slots[seq : seq + 1]}
        for i in range(first, first + count):
            assert_close(y[i : i + 1], backend.gdn_decode(**tokens_of(one, i, i + 1)))
            if kept[i] >= 0:
                assert_close(states[int(kept[i])], one["states"][int(slots[seq])])
    assert not states[6].any()


@both
@pytest.mark.parametrize("width", [2, 4])
def test_inputs_that_are_kept_are_those_of_single_steps(backend_name, width):
    backend = get_backend(backend_name)
    make = TensorFactory(torch.float32, backend.device, 3)
    x, weight = make.randn(5, 8), make.randn(8, width)
    states = make.randn(7, width - 1, 8)
    slots, kept = make.ints(2, 3, 1), torch.tensor([0, 1, 4, 5, 6], device=x.device)
    one = states[2:3].clone()
    y = backend.causal_conv1d(x, weight, states, slots, kept_slots=kept)
    assert torch.equal(states[2], one[0])
    for i in range(5):
        step = backend.causal_conv1d(x[i : i + 1], weight, one, torch.zeros_like(slots))
        torch.testing.assert_close(y[i : i + 1], step)
        assert torch.equal(states[kept[i]], one[0])


def test_a_copied_slot_goes_its_own_way():
    backend = get_backend("cpu")
    arguments = delta(backend, [6, 6])
    states, slots = arguments["states"], arguments["slots"].tolist()
    backend.copy_slice(states[slots[0]], states[slots[1]])
    assert torch.equal(states[0], states[1])
    backend.gdn_decode(**arguments)
    assert not torch.equal(states[0], states[1])


@both
@pytest.mark.parametrize("op", ["gdn_decode", "gdn_prefill", "causal_conv1d", "gdn_prepare"])
def test_a_slot_that_comes_twice_is_refused_for_debugging(backend_name, op):
    backend = get_backend(backend_name).debug()
    axes = {"num_channels": 8, "width": 4}
    if op != "causal_conv1d":
        axes = {"num_k_heads": 1, "group_size": 1, "head_k_dim": 16, "head_v_dim": 16}
        axes |= {"width": 4} if op == "gdn_prepare" else {}
    make = TensorFactory(torch.float16, backend.device, 0)
    arguments = OPS[op].make_sample(make, seq_lens=(1, 1, 1), hostile=False, **axes)
    getattr(backend, op)(**arguments)
    arguments["slots"].copy_(torch.tensor([1, -1, 1]))
    with pytest.raises(InputError, match="slots is holding 1 more than once"):
        getattr(backend, op)(**arguments)
    arguments["slots"].copy_(torch.tensor([-1, -1, 1]))
    getattr(backend, op)(**arguments)


@pytest.mark.parametrize(
    ("size", "room", "by_chunks"),
    [(16, 16, True), (128, 160, True), (24, 24, False), (48, 48, False), (16, 24, False)],
)
def test_chunks_are_for_heads_in_whole_units(size, room, by_chunks):
    """Of a power of two, and as far apart from token to token."""
    make = {"dtype": torch.bfloat16, "device": "meta"}
    wide = torch.empty(70, 1, room, **make)
    gates = torch.empty(70, 1, dtype=torch.float32, device="meta")
    heads = (wide[..., :size], wide[..., :size], torch.empty(70, 1, 16, **make))
    with record_launches((9, 0)) as launches:
        OPS["gdn_prefill"].impls["triton"](*heads, gates, gates)
    chunks = {"_gdn_chunk_kernel", "_gdn_scan_kernel"}
    assert {x.kernel.name for x in launches} == (chunks if by_chunks else {"_gdn_decode_kernel"})


BAD = {
    "states": lambda a: {"states": a["states"][:, :, :-1]},
    "v": lambda a: {"v": a["v"][:, :1].expand(-1, 3, -1).contiguous()} | wider(a),
    "slots": lambda a: {"slots": None},
    "cu_seqlens": lambda a: {"cu_seqlens": a["cu_seqlens"][:-1]},
    "pos_offsets": lambda a: {"pos_offsets": a["slots"][:1]},
}


def wider(arguments):
    """Gates and states of three value heads, for two key heads."""
    names = ("g", "beta", "states")
    return {name: arguments[name][:, :1].repeat_interleave(3, dim=1) for name in names}


@pytest.mark.parametrize("op", DELTA)
@pytest.mark.parametrize("argument", BAD)
def test_what_does_not_fit_is_refused(op, argument):
    backend = get_backend("cpu")
    arguments = delta(backend, [3, 2], heads=(2, 1))
    before = arguments["states"].clone()
    with pytest.raises(InputError) as error:
        getattr(backend, op)(**arguments | BAD[argument](arguments))
    assert error.value.argument == argument
    assert torch.equal(arguments["states"], before)


@both
def test_gates_in_place(backend_name):
    backend = get_backend(backend_name)
    make = TensorFactory(torch.bfloat16, backend.device, 0)
    values, gate, residual = make.randn(5, 4, 16), make.randn(5, 4, 2, 16), make.randn(5, 4, 16)
    beside = gate[:, :, 1]  # as beside a head's queries
    want = values.double() * beside.double().sigmoid()
    assert_close(backend.sigmoid_gate(values, beside), want)
    own, token = values.clone(), make.randn(5, 4, 1)
    assert backend.sigmoid_gate(own, beside, out=own) is own
    assert_close(own, want)
    want = residual.double() + values.double() * token.double().sigmoid()
    backend.sigmoid_gate(values, token, residual, out=residual)
    assert_close(residual, want)


@both
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtypes", list(itertools.permutations(FLOATS, 2)))
def test_a_gate_of_another_dtype(backend_name, dtypes, per_token):
    """It is not rounded to the values' own, which might not have it at all."""
    backend = get_backend(backend_name)
    of_values, of_gate = dtypes
    values = TensorFactory(of_values, backend.device, 0).randn(5, 4, 16)
    gate = TensorFactory(of_gate, backend.device, 1).randn(5, 4, 1 if per_token else 16, scale=3.0)
    gate[0], gate[1] = 70000.0, -INF  # in float16 infinite
    want = values.double() * gate.double().sigmoid()
    got = backend.sigmoid_gate(values, gate)
    assert got.dtype == of_values
    assert_close(got, want)
    assert torch.equal(got[0], values[0]) and not got[1].any()
    for dtype in {of_values, torch.float32}:
        residual = TensorFactory(dtype, backend.device, 2).randn(5, 4, 16)
        added = residual.double() + want
        assert backend.sigmoid_gate(values, gate, residual, out=residual) is residual
        assert_close(residual, added)
