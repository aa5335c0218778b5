"""The properties every op has on every backend, drawn from its declaration."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from ferrum_triton import InputError, get_backend
from ferrum_triton.registry import OPS
from tests.harness import (
    ALL_OPS,
    BACKENDS,
    CONTIGUOUS_ONLY,
    DISTINCT_ROWS,
    as_tuple,
    assert_call_matches,
    check_edge_values,
    check_matches_reference,
    clone,
    expected,
    in_planes,
    place_far_apart,
    sample,
    smallest_axes,
    tensors,
    typical_axes,
)

EACH = pytest.mark.parametrize("op", ALL_OPS)


def each(chosen):
    """The ops of a property that not all have."""
    return pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in chosen])


def row_axis(op):
    return next(
        (axis for axis in ("num_tokens", "num_rows", "batch", "m") if axis in op.axes), None
    )


# Ops of which every pair of a token and an expert is interpreted for every few rows: either are
# many. test_moe_planes.py has many pairs meet several tiles of rows.
FEW = ({"num_tokens": (0, 2, 1)}, {"n": (1, 5)})
INTERPRETED = {
    "gemm_quant_moe_id": FEW,
    "gemm_quant_moe_id_gate_up_silu": FEW,
    "mlp_quant_moe_id": FEW[:1],
}
# What is traced operation by operation, and defined token by token: several sequences of them.
TRACED = {
    "flash_attention": {"batch": 2, "q_len": 2},
    "paged_decode_attention": {"batch": 2, "q_len": 2},
    "paged_varlen_attention": {"q_lens": (2, 1)},
    "gdn_decode": {"seq_lens": (2, 1)},
    "gdn_prefill": {"seq_lens": (2, 1)},
}


# What torch checks of an op, but that inputs are left as they are, which it compares by arithmetic:
# of float8 it has none, and test_matches_reference looks at their bits.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OF_FLOAT8 = {name: {"test_utils": CHECKS} for name in OPS if "fp8" in name}


def traced_sample(op, seed):
    return sample(op, torch.float32, "cpu", seed, **typical_axes(op) | TRACED.get(op.name, {}))


# Not those whose tensors are one row of elements, and not the one that takes ids as a list.
ROWED = [op for op in OPS.values() if row_axis(op) and op.name != "embedding_lookup"]


@EACH
@pytest.mark.parametrize("backend_name", BACKENDS)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_matches_reference(op, backend_name, data, seed):
    """Any shape, dtype and stride gives the reference's result, and touches nothing else."""
    choices = INTERPRETED.get(op.name, ({},)) if backend_name == "interpret" else ({},)
    narrowed = data.draw(st.sampled_from(choices), label="narrowed")
    check_matches_reference(get_backend(backend_name), op, data, seed, **narrowed)


@EACH
@pytest.mark.parametrize("backend_name", BACKENDS)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_edge_values(op, backend_name, data, seed):
    """Infinities, NaN, denormals and the largest values come out where the reference has them."""
    check_edge_values(get_backend(backend_name), op, data, seed)


@EACH
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_smallest_call(op, backend_name):
    """A result of one element is computed, and no empty one."""
    backend = get_backend(backend_name)
    for dtype in op.dtypes:
        arguments = sample(op, dtype, backend.device, 0, **smallest_axes(op))
        want, left = expected(op, arguments)
        got = as_tuple(getattr(backend, op.name)(**arguments))
        assert_call_matches(op, got, arguments, want, left)


@each(ROWED)
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_rows_are_independent(op, backend_name):
    """What one row holds cannot change another row's result, not by a bit."""
    backend = get_backend(backend_name)
    axis = row_axis(op)
    axes = typical_axes(op) | {axis: 3}
    row_dims = _row_dims(op, axis, axes)
    first = sample(op, torch.float32, backend.device, 1, **axes)
    second = clone(first)
    other = sample(op, torch.float32, backend.device, 2, **axes)
    for name, dim in row_dims.items():
        second[name] = other[name].clone()
        second[name].select(dim, 1).copy_(first[name].select(dim, 1))
    assert row_dims
    results = [as_tuple(getattr(backend, op.name)(**arguments)) for arguments in (first, second)]
    results = [
        (*outs, *(a[name] for name in op.mutates if name in row_dims))
        for outs, a in zip(results, (first, second), strict=True)
    ]
    compared = 0
    for a, b in zip(*results, strict=True):
        dims = [d for d in range(a.dim()) if a.shape[d] == 3]
        if not dims:
            continue
        compared += 1
        assert any(torch.equal(a.select(d, 1), b.select(d, 1)) for d in dims)
        assert not torch.equal(a, b), "the other rows were changed, so their results must be"
    assert compared or op.mutates


def _row_dims(op, axis, axes):
    """The dimension of each tensor argument that runs over ``axis``."""
    dims = {}
    for name, spec in op.contract.specs.items():
        if spec.text.startswith(("cache", "float[...]")):
            continue  # a pool, whose pages every row may read
        if spec.any_leading:
            dims[name] = 0
        elif axis in spec.dims:
            dims[name] = spec.dims.index(axis)
    present = tensors(sample(op, torch.float32, "cpu", 0, **axes))
    # Where rows go is not a row's content.
    places = ("slots", "positions", *DISTINCT_ROWS.get(op.name, ()))
    return {n: d for n, d in dims.items() if n in present and n not in places}


@each(op for name, op in OPS.items() if name not in CONTIGUOUS_ONLY)
@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_offsets_past_int32(op, backend_name):
    """Rows more than 2^31 elements apart: any 32-bit offset would read or write elsewhere.

    Of most things there are three: a stride between two is itself too large for 32 bits, and what
    is multiplied by it is widened without a kernel's doing.
    """
    backend = get_backend(backend_name)
    axes = {name: 3 if value == 2 else value for name, value in typical_axes(op).items()}
    near = sample(op, torch.float16, backend.device, 3, **axes)
    want, left = expected(op, near)
    spread = [
        (name, dim)
        for name, tensor in tensors(near).items()
        for dim in range(tensor.dim() - 1)
        if tensor.shape[dim] > 1 and not in_planes(near, name)
    ]
    for name, dim in spread:
        arguments = clone(near)
        arguments[name] = place_far_apart(arguments[name], dim)
        got = as_tuple(getattr(backend, op.name)(**arguments))
        assert_call_matches(op, got, arguments, want, left)
    for i, dim in ((i, d) for i, t in enumerate(want) for d in range(t.dim() - 1)):
        if want[i].shape[dim] > 1 and op.has_out:
            arguments = clone(near)
            outs = [torch.empty_like(t) for t in as_tuple(op.fake(**clone(near)))]
            outs[i] = place_far_apart(outs[i], dim)
            door = getattr(backend, op.name)
            door(**arguments, out=tuple(outs) if len(outs) > 1 else outs[0])
            assert_call_matches(op, tuple(outs), arguments, want, left)


@EACH
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_bad_tensors_are_refused(op, backend_name):
    """A wrong dtype, rank, size, stride or type raises InputError, and nothing is written."""
    backend = get_backend(backend_name)
    good = sample(op, torch.float32, backend.device, 5, **typical_axes(op))
    door = getattr(backend, op.name)
    door(**clone(good))  # what was admitted once does not make what differs admissible
    refused = 0
    for name, value in tensors(good).items():
        spec = op.contract.specs[name]
        bad = {"complex dtype": value.to(torch.complex64), "python list": [1.0, 2.0]}
        if not spec.any_leading:
            bad["extra dimension"] = value[None]
        if len(spec.dims) > 0 or not spec.any_leading:
            bad["missing dimensions"] = value.reshape(-1)[0]
        if value.dim() and value.shape[-1] > 1 and value.numel():
            doubled = torch.stack((value, value), dim=-1)[..., 0]
            bad["stride 2"] = doubled
        if name in op.mutates and value.dim() >= 2 and value.shape[0] > 1:
            bad["self-overlapping"] = value[:1].expand(value.shape)
        bad["other device"] = value.to("meta")
        others = [op.contract.specs[other] for other in tensors(good) if other != name]
        if spec.dtype_class == "T" and any(other.dtype_class == "T" for other in others):
            bad["dtype of its own"] = value.to(torch.bfloat16)
        for i, dim in enumerate(spec.dims, value.dim() - len(spec.dims)):
            if value.shape[i] > 1 and any(dim in other.dims for other in others):
                bad[f"one {dim}"] = value.narrow(i, 0, 1)
        for what, wrong in bad.items():
            arguments = clone(good) | {name: wrong}
            before = clone(arguments)
            with pytest.raises(InputError) as error:
                door(**arguments)
            refused += 1
            message = str(error.value)
            assert error.value.op == op.name, what
            assert error.value.argument in message
            assert error.value.allowed, what
            for mutated in op.mutates:
                if (
                    isinstance(arguments[mutated], Tensor)
                    and arguments[mutated].device.type != "meta"
                ):
                    assert torch.equal(
                        arguments[mutated].nan_to_num(), before[mutated].nan_to_num()
                    ), what
    assert refused


@EACH
def test_dispatcher_agrees(op):
    """torch.ops.ferrum runs the same function, and its fake has the same shapes and strides."""
    arguments = traced_sample(op, 7)
    direct, through = clone(arguments), clone(arguments)
    got = as_tuple(op(**through))
    want = as_tuple(getattr(get_backend("cpu"), op.name)(**direct))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    for name in tensors(through).keys() & set(op.mutates):
        assert torch.equal(through[name], direct[name])
    torch.library.opcheck(op.torch_op, (), clone(arguments), **OF_FLOAT8.get(op.name, {}))
    if op.has_out:
        overload = getattr(torch.ops.ferrum, op.name).out
        outs = {f"out{i}": torch.zeros_like(t) for i, t in enumerate(want)}
        overload(**clone(arguments), **outs)
        for g, w in zip(outs.values(), want, strict=True):
            assert torch.equal(g, w)
        left_out = OF_FLOAT8.get(op.name, {})
        torch.library.opcheck(overload, (), clone(arguments) | outs, **left_out)


@EACH
def test_traced_whole(op):
    """torch.compile(fullgraph=True) and torch.export take the op without a break."""
    torch.compiler.reset()  # else every op counts as a recompilation of the same forward
    arguments = traced_sample(op, 8)

    inputs = tensors(arguments)
    others = {name: value for name, value in arguments.items() if name not in inputs}

    class Module(torch.nn.Module):
        def forward(self, inputs):
            return op.torch_op(**inputs, **others)

    eager = clone(inputs)
    want = as_tuple(Module()(eager))
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    traced = clone(inputs)
    got = as_tuple(compiled(traced))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    for name in traced.keys() & set(op.mutates):
        assert torch.equal(traced[name], eager[name])
    exported = torch.export.export(Module(), (clone(inputs),))
    again = as_tuple(exported.module()(clone(inputs)))
    for g, w in zip(again, want, strict=True):
        assert torch.equal(g, w)


@each(op for name, op in OPS.items() if name != "embedding_lookup")  # ids of the host
@pytest.mark.gpu
def test_graph_replay_sees_new_inputs(op):
    """A captured call replays on what its input buffers hold by then."""
    backend = get_backend("cuda")
    door = getattr(backend, op.name)
    axes = typical_axes(op)
    buffers = sample(op, torch.float16, "cuda", 11, **axes)
    door(**clone(buffers))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = as_tuple(door(**buffers))
    for seed in (12, 13):
        fresh = sample(op, torch.float16, "cuda", seed, **axes)
        for name, value in tensors(fresh).items():
            buffers[name].copy_(value)
        want, left = expected(op, buffers)  # scalars are the captured ones
        graph.replay()
        assert_call_matches(op, outs, buffers, want, left)
