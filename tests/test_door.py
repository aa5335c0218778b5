"""The checked entry of every op: what it refuses, at a shape's first call and at later ones."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from ferrum_triton import InputError, get_backend
from ferrum_triton.backends import door as door_module
from ferrum_triton.backends.door import make_door
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.contract import LEAST
from ferrum_triton.overlap import overlap, overlaps_itself
from ferrum_triton.quant import quantize_rows
from ferrum_triton.quant.planes import to_planes
from ferrum_triton.registry import OPS
from tests.harness import BACKENDS, as_tuple, clone, sample, tensors, typical_axes

load_kernels("interpret")
EACH = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items()])


def drawn(op, backend, dtype=torch.float32):
    dtype = dtype if dtype in op.dtypes else op.dtypes[0]
    return sample(op, dtype, backend.device, 1, **typical_axes(op))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


@EACH
def test_a_gradient_is_refused_and_not_lost(op, backend):
    door, good = getattr(backend, op.name), drawn(op, backend)
    door(**clone(good))  # of the same shapes, so that its key is known
    for name, value in tensors(good).items():
        if not value.is_floating_point():
            continue
        wanted = clone(good) | {name: value.clone().requires_grad_()}
        for call in (door, op) if backend.name != "interpret" else (door,):
            with pytest.raises(InputError, match="requires grad") as error:
                call(**wanted)
            assert error.value.argument == name
        with torch.no_grad():
            if name not in op.mutates:
                door(**wanted)
        with torch.inference_mode():
            door(**clone(good))


@EACH
def test_what_is_written_counts_as_changed(op, backend):
    door, arguments = getattr(backend, op.name), drawn(op, backend)
    written = [arguments[name] for name in op.mutates if arguments[name] is not None]
    outs = {}
    if op.has_out:
        made = as_tuple(op.fake(**clone(arguments)))
        outs["out"] = made if op.num_outputs > 1 else made[0]
        written += made
    versions = [t._version for t in written]
    door(**arguments, **outs)
    assert written
    assert all(t._version > old for t, old in zip(written, versions, strict=True))


def test_a_backward_through_what_was_overwritten_is_refused(backend):
    leaf = torch.ones(2, 8, device=backend.device, requires_grad=True)
    kept = leaf.exp()  # whose backward multiplies by the result
    with torch.no_grad():
        backend.scale_inplace(kept, 3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_tracing_refuses_what_a_call_does():
    def norm(x, weight):
        return torch.ops.ferrum.rms_norm(x, weight)

    x, weight = torch.randn(2, 8), torch.ones(8)
    traced = torch.compile(norm, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(x, weight), norm(x, weight))
    for bad, message in (
        ((x, torch.ones(7)), "weight is of shape"),
        ((x.requires_grad_(), weight), "requires grad"),
    ):
        torch.compiler.reset()
        with pytest.raises(Exception, match=message):
            traced(*bad)


WRONG_TYPES = {
    int: ("2", 2.0, None, True, torch.tensor(2)),
    float: ("2", None, True, torch.tensor(2.0)),
    bool: (1, None, "yes"),
    str: (1, None),
    int | None: ("2", 2.0, False),
    float | None: ("2", True),
}


@EACH
def test_scalars_of_another_type_are_refused_at_every_call(op, backend):
    door, good = getattr(backend, op.name), drawn(op, backend)
    for _ in range(2):
        door(**clone(good))
        for name, parameter in op.signature.parameters.items():
            for wrong in WRONG_TYPES.get(parameter.annotation, ()):
                arguments = clone(good) | {name: wrong}
                before = clone(arguments)
                with pytest.raises(InputError) as error:
                    door(**arguments)
                assert error.value.argument == name
                for mutated in op.mutates:
                    if isinstance(before[mutated], Tensor):
                        assert torch.equal(
                            arguments[mutated].nan_to_num(), before[mutated].nan_to_num()
                        )


@EACH
def test_floats_are_in_range_at_every_call(op, backend):
    names = [name for name in op.signature.parameters if name in LEAST]
    door, good = getattr(backend, op.name), drawn(op, backend)
    for name in names:
        door(**clone(good))
        for wrong in (float("nan"), float("inf"), -float("inf"), 10**400):
            with pytest.raises(InputError, match="finite") as error:
                door(**clone(good) | {name: wrong})
            assert error.value.argument == name
        if LEAST[name] == 0:
            with pytest.raises(InputError, match="0 or more"):
                door(**clone(good) | {name: -1e-6})


def test_ids_of_the_host_are_integers(backend):
    table = torch.randn(5, 8, device=backend.device)
    assert backend.embedding_lookup(table, [4, 0]).shape == (2, 8)
    for wrong in (3.0, "3", None, True, 5, -1):
        with pytest.raises(InputError, match="ids"):
            backend.embedding_lookup(table, [0, wrong])
    for wrong in (None, 3, {0}, iter([0])):
        with pytest.raises(InputError, match="a list of integers"):
            backend.embedding_lookup(table, wrong)


@EACH
def test_an_output_over_an_input_is_refused_or_right(op, backend):
    """Exactly over it where the op says so, and never shifted."""
    good = drawn(op, backend)
    if not op.has_out or op.num_outputs > 1:
        return
    door = getattr(backend.debug(), op.name)
    (want,) = as_tuple(door(**clone(good)))
    if want.numel() == 0:
        return
    for name, value in tensors(good).items():
        if value.dtype != want.dtype or value.numel() < 2:
            continue
        memory = want.new_empty(want.numel() + value.numel() + 1)
        placed = memory[: value.numel()].view(value.shape).copy_(value)
        for shift in (0, 1):
            end = memory[shift : shift + want.numel()].view(want.shape)
            arguments = clone(good) | {name: placed}
            if shift == 0 and name in op.contract.over and value.shape == want.shape:
                torch.testing.assert_close(door(**arguments, out=end), want, equal_nan=True)
                placed.copy_(value)
                continue
            with pytest.raises(InputError, match="memory") as error:
                door(**arguments, out=end)
            assert error.value.argument == "out"


@EACH
def test_what_is_written_in_place_overlaps_no_input(op, backend):
    good = drawn(op, backend)
    door = getattr(backend.debug(), op.name)
    for name in op.mutates:
        value = good[name]
        for other_name, other in tensors(good).items():
            same = value is not None and other.dtype == value.dtype and other_name != name
            if not same or not other.numel() or not value.numel():
                continue
            memory = value.new_empty(value.numel() + other.numel())
            placed = memory[: value.numel()].view(value.shape).copy_(value)
            begin = value.numel() - 1
            shifted = memory[begin : begin + other.numel()].view(other.shape).copy_(other)
            with pytest.raises(InputError, match="memory") as error:
                door(**clone(good) | {name: placed, other_name: shifted})
            assert error.value.argument in (name, other_name)


def test_which_layouts_overlap():
    memory = torch.zeros(4, 6, 8)
    left, right = memory[..., :4], memory[..., 4:]
    for a, b, want in (
        (left, right, False),
        (memory[:2], memory[2:], False),
        (memory[:, :3], memory[:, 3:], False),
        (memory[:3], memory[2:], True),
        (memory[..., :5], memory[..., 4:], True),
        (left, left, True),
        (left[:1], right, False),
        (memory[0, 0], memory[0, :, 4:], True),
        (memory[::2], memory[1::2], False),
        (memory.transpose(0, 1)[..., :4], right, False),
        (memory[:0], memory, False),
        (memory, torch.zeros(3), False),
    ):
        assert overlap(a, b) == want and overlap(b, a) == want
    assert overlaps_itself(memory[:1].expand(4, 6, 8))
    assert overlaps_itself(memory.flatten().as_strided((4, 4), (2, 1)))
    assert not overlaps_itself(memory.permute(2, 0, 1)) and not overlaps_itself(left)


def test_overlap_is_never_missed():
    """Against the elements' addresses, for views drawn at random."""
    random = torch.Generator().manual_seed(0)
    memory = torch.zeros(60)
    false_alarms = 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            sizes, steps = torch.randint(1, 4, (2,), generator=random), torch.randint(
                0, 8, (2,), generator=random
            )  # fmt: skip
            start = int(torch.randint(0, 30, (), generator=random))
            views.append(memory.as_strided(sizes.tolist(), steps.tolist(), start))
        places = [
            {
                view.storage_offset() + i * view.stride(0) + j * view.stride(1)
                for i in range(view.size(0))
                for j in range(view.size(1))
            }
            for view in views
        ]
        found = overlap(*views)
        if places[0] & places[1]:
            assert found
        false_alarms += found and not places[0] & places[1]
        assert overlaps_itself(views[0]) or len(places[0]) == views[0].numel()
    assert false_alarms < 1000


def test_rows_of_a_matrix_in_planes_are_refused(backend):
    planes = to_planes(quantize_rows(torch.randn(16, 256), "Q4_K"), "Q4_K").to(backend.device)
    a = torch.randn(2, 256, device=backend.device)
    assert backend.gemv_quant(a, planes, "Q4_K:planes").shape == (2, 16)
    with pytest.raises(InputError, match="8 of the 16 rows"):
        backend.gemv_quant(a, planes[:8], "Q4_K:planes")
    whole = to_planes(quantize_rows(torch.randn(8, 256), "Q4_K"), "Q4_K").to(backend.device)
    assert backend.gemv_quant(a, whole, "Q4_K:planes").shape == (2, 8)  # of that shape, and whole
    with pytest.raises(InputError, match="8 of the 16 rows"):
        backend.gemv_quant(a, planes[:8], "Q4_K:planes")
    stack = torch.stack((planes, planes))
    assert backend.gemv_quant(a, stack[1], "Q4_K:planes").shape == (2, 16)
    shifted = torch.empty(planes.numel() + 1, dtype=torch.uint8, device=planes.device)[1:]
    shifted = shifted.view(planes.shape).copy_(planes)
    with pytest.raises(InputError, match="multiples of 16"):
        backend.gemv_quant(a, shifted, "Q4_K:planes")


def test_negative_views_are_refused(backend):
    x, weight = torch.randn(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    doors = [backend.debug().rms_norm]
    if backend.device.type != "cuda":  # where the first call of those shapes and strides tells
        backend.rms_norm(x, weight)
        doors.append(backend.rms_norm)
    for door in doors:
        with pytest.raises(InputError, match="negative view"):
            door(torch._neg_view(x), weight)


def test_forward_gradients_are_refused_and_not_lost(backend):
    x, weight = torch.randn(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    backend.rms_norm(x, weight)
    with forward_ad.dual_level():
        backend.rms_norm(x, weight)  # of which nothing is differentiated
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (backend.rms_norm, torch.ops.ferrum.rms_norm):
            with pytest.raises(InputError, match="x is a tensor that requires grad"):
                call(dual, weight, 1e-6)


def test_tensors_without_memory_are_refused(backend):
    x, weight = torch.randn(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    backend.rms_norm(x, weight)
    with FakeTensorMode() as mode, pytest.raises(InputError, match="x is a FakeTensor"):
        backend.rms_norm(mode.from_tensor(x), mode.from_tensor(weight))


def test_numbers_that_no_kernel_takes_are_refused(backend):
    q = torch.randn(1, 2, 4, 64, device=backend.device)
    for name, value in (
        ("softmax_scale", 1e39),
        ("softmax_scale", 10**400),
        ("pos_offset", 2**63),
        ("sliding_window", 2**70),
    ):
        with pytest.raises(InputError) as error:
            backend.flash_attention(q, q, q, **{name: value})
        assert error.value.argument == name


def test_debugging_checks_calls_of_known_shapes(backend):
    x, weight = torch.randn(4, 8, device=backend.device), torch.ones(8, device=backend.device)
    memory = torch.zeros(5, 8, device=backend.device)
    door = backend.debug().rms_norm
    door(x, weight, out=memory[1:])
    with pytest.raises(InputError, match="memory"):
        door(memory[:4], weight, out=memory[1:])


def test_out_is_what_the_call_returns(backend):
    x, weight = torch.randn(2, 8, device=backend.device), torch.ones(8, device=backend.device)
    for wrong in ((torch.empty_like(x),), [torch.empty_like(x)], 1):
        with pytest.raises(InputError, match="allowed: a tensor\\."):
            backend.rms_norm(x, weight, out=wrong)
    logits = torch.randn(2, 8, device=backend.device)
    for wrong in (logits, (logits,), (logits, logits, 1)):
        with pytest.raises(InputError, match="a tuple of 3 tensors"):
            backend.route_topk_softmax(logits, 2, out=wrong)


def test_columns_of_out_lie_side_by_side_where_there_are_two(backend):
    x, apart = torch.randn(3, 2, device=backend.device), torch.empty(3, 4, device=backend.device)
    weight = torch.ones(2, device=backend.device)
    with pytest.raises(InputError, match="stride 1 in the last dimension"):
        backend.rms_norm(x, weight, out=apart[:, ::2])
    one = backend.rms_norm(x[:, :1], weight[:1], out=apart[:, ::2][:, :1])
    assert torch.equal(one, backend.rms_norm(x[:, :1], weight[:1]))


def test_threads_take_turns_in_the_interpreter():
    backend = get_backend("interpret")
    draws = [torch.randn(3, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    weight = torch.ones(32)
    want = [backend.rms_norm(x, weight) for x in draws]
    got = [None] * len(draws)

    def work(first):
        for i in range(first, len(draws), 2):
            for _ in range(5):
                got[i] = backend.rms_norm(draws[i], weight)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(g is not None and torch.equal(g, w) for g, w in zip(got, want, strict=True))


@EACH
def test_doors_that_replay_know_calls_by_as_much(op):
    """The same refusals, of known shapes, by the door of a GPU."""
    if "triton" not in op.impls:
        return
    door = make_door(op, op.impls["triton"], "cpu", replays=True)
    good = drawn(op, get_backend("interpret"))
    for _ in range(3):
        door(**clone(good))
    for name, value in tensors(good).items():
        if value.is_floating_point():
            with pytest.raises(InputError, match="requires grad"):
                door(**clone(good) | {name: value.clone().requires_grad_()})
    for name in op.signature.parameters:
        if name in LEAST:
            with pytest.raises(InputError, match="finite"):
                door(**clone(good) | {name: float("nan")})


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_layouts_of_one_shape_are_told_apart(device_type):
    """On a GPU, but for steps that nobody takes."""
    parts = door_module._tensor_key("x", False, device_type)

    def known_by(x):
        return tuple(eval(part, {"x": x}) for part in parts)

    square, row = torch.randn(8, 8), torch.randn(1, 8)
    alike = [square.T, torch.randn(8, 16)[:, :8], torch.randn(8, 32)[:, ::4], torch.randn(8)[None]]
    keys = [known_by(x.expand(8, 8)) for x in (square, *alike)]
    assert len(set(keys)) == len(keys)
    assert known_by(square) == known_by(square.clone())
    stepped = torch.as_strided(row, (1, 8), (100, 1))
    assert (known_by(stepped) == known_by(row)) == (device_type == "cuda")


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_checks_are_of_each_stride_and_dtype(backend_name):
    """Calls of the shapes of a good one before, which differ from it in strides or a dtype."""
    backend = get_backend(backend_name)
    x, weight = torch.randn(8, 8), torch.ones(8)
    every_other = torch.ones(16)[::2]
    for _ in range(2):  # the second good call finds the first one's key
        backend.rms_norm(x, weight)
    wrong = ((x.T, weight), (x, every_other), (x.long(), weight), (x, weight.long()))
    for arguments in wrong:
        with pytest.raises(InputError, match=r"rms_norm: (x|weight) is"):
            backend.rms_norm(*arguments)


def test_tensors_of_two_devices_are_refused():
    """Of one type: what a machine with two GPUs has."""
    on = [SimpleNamespace(device=torch.device("cuda", i)) for i in range(2)]
    contract = OPS["rms_norm"].contract
    contract._check_device("weight", on[0], on[0], "cuda")
    with pytest.raises(InputError, match="weight is on cuda:1; allowed: on cuda:0"):
        contract._check_device("weight", on[1], on[0], "cuda")
