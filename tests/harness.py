"""What every op's tests are made of: samples laid out in guarded memory, and their comparison."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from ferrum_triton.backends.backend import Backend
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import OPS, Op
from ferrum_triton.testing import CODES, TensorFactory, assert_close

ALL_OPS = [pytest.param(op, id=name) for name, op in OPS.items()]
BACKENDS = ["cpu", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)]

# Ops that refuse strided tensors, and why; every other op must take them.
CONTIGUOUS_ONLY = {"copy_slice": "addresses its tensors as one row of elements"}

# Arguments whose rows may not be one row expanded, and why; mostly their entries have to differ.
DISTINCT_ROWS = {
    # A pair in two experts' buckets has two results.
    "gemm_quant_moe_id": ("bucket_ids",),
    "gemm_quant_moe_id_gate_up_silu": ("bucket_ids",),
    # A CPU multiplies all rows of an expert at once, and rounds one of few otherwise.
    "mlp_quant_moe_id": ("ids",),
    # Keys that are all alike leave nothing of 16 bits (docs/linear-attention.md).
    "gdn_prefill": ("k",),
    # A page of two sequences may be given two tokens for one slot.
    "kv_cache_append_paged": ("block_tables",),
    "qkv_paged_decode_attention": ("block_tables",),
    "split_qkv_norm_rope_into_paged_cache": ("block_tables",),
}

# Ops that multiply by a tail of the normal distribution, or nearly one: its last bits depend on how
# the square in its exponent was rounded, and the largest float makes them large.
TAILED = ("fused_gelu_mul_split", "fused_gelu_tanh_mul_split")

# Ops that multiply a sum of several by a weight: where it cancels, the largest float makes large
# what each addition rounded.
CANCELLED = (
    "weighted_sum_residual_norm",
    "weighted_sum_norm_quant_qkv",
    "linear_open_norm",
    "linear_quant_open_norm",
    "linear_add_rms_norm",
    "gdn_decode",
)

# Ops that multiply by each other what one large factor made large: of two products that overflow to
# opposite sides, a multiply-add has only the first do so.
SQUARED = ("qkv_paged_decode_attention",)

# Ops that divide once products are summed: those of the largest float overflow before.
OPEN = ("open_norm_linear", "open_norm_gate_up_silu")

# Ops whose tensor cores multiply minimums by sums of 16-bit activations, rounded to float16.
ROUNDED_SUMS = (
    "gemv_quant",
    "gemm_quant",
    "gemm_quant_moe_id",
    "gemm_quant_moe_id_gate_up_silu",
    "mlp_quant_moe_id",
    "gemv_quant_gate_up_silu",
    "gemv_quant_qkv",
    "add_rms_norm_quant_gate_up_silu",
    "add_rms_norm_quant_qkv",
    "weighted_sum_norm_quant_qkv",
    "linear_quant_open_norm",
    "open_norm_quant_gate_up_silu",
    "open_norm_quant_qkv",
)

# Products whose weights may be rounded to the activations' dtype, whatever that of a result is.
ROUNDED_WEIGHTS = ("gemm_quant", "linear_quant_open_norm")

# Ops that round experts' products of many tokens before they sum them: a sum that cancels has the
# errors of all of its products. One of bfloat16 was off by 0.01636, 0.016 allowed: 30 tokens by
# 3 experts, n 70, k 1, seed 0 (``pytest tests/test_ops.py``, test_matches_reference of the first).
ROUNDED_PRODUCTS = ("gemm_moe_id_sum", "gemm_moe_id_sum_fp8_128x128")

# Ops whose tensor cores multiply in 16 bits what the tokens of a chunk change: where keys are
# alike, changes are larger than what their sum leaves.
CHUNKED = ("gdn_prefill",)

GUARD = 32  # elements before and after a tensor; 33 puts its start off the 16-byte grid
LAYOUTS = ("plain", "misaligned", "padded", "permuted", "expanded")


@dataclass
class Buffer:
    """A tensor inside a larger allocation whose other elements must never change."""

    tensor: Tensor
    flat: Tensor
    guards: Tensor  # bool, True where flat is not part of the tensor
    before: Tensor

    def guards_intact(self) -> bool:
        return torch.equal(bits(self.flat)[self.guards], bits(self.before)[self.guards])

    def unchanged(self) -> bool:
        return torch.equal(bits(self.flat), bits(self.before))


def bits(x: Tensor) -> Tensor:
    """The elements' bits as integers, by which NaN equal themselves."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()])


def place(value: Tensor, layout: str, own_rows: bool = False) -> Buffer:
    """Copy ``value`` into guarded memory of the given layout.

    With ``own_rows`` no layout makes rows share memory.
    """
    shape = list(value.shape)
    guard = GUARD + (layout == "misaligned")
    order = list(range(value.dim()))
    pad = 0
    if layout == "padded" and value.dim() >= 2:
        pad = 5
    elif layout == "permuted" and value.dim() >= 3:
        order[0], order[1] = order[1], order[0]
    strides, step = [0] * value.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if dim == order[-1]:
            step += pad
    if layout == "expanded" and value.dim() >= 2 and not own_rows and shape[0] > 0:
        value = value[:1].expand(shape)
        strides[0] = 0
    extent = (
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if value.numel() else 0
    )
    poison = float("nan") if value.dtype.is_floating_point else torch.iinfo(value.dtype).max
    flat = torch.full((2 * guard + extent,), poison, dtype=value.dtype, device=value.device)
    inside = torch.ones_like(flat, dtype=torch.bool)
    tensor = flat.as_strided(shape, strides, guard)
    if value.numel():
        base = value[:1] if strides and strides[0] == 0 and shape[0] > 1 else value
        target = flat.as_strided(base.shape, strides, guard)
        target.copy_(base)
        inside.as_strided(shape, strides, guard).fill_(False)
    return Buffer(tensor, flat, inside, flat.clone())


def in_planes(arguments: dict[str, Any], name: str) -> bool:
    """Whether an argument is a matrix in planes, which is contiguous, and aligned."""
    kind = arguments.get(name.replace("blocks", "kind"), "")
    return name.endswith("blocks") and str(kind) in PLANE_FORMATS


def layouts_of(arguments: dict[str, Any], name: str, layout: st.SearchStrategy[str]) -> Any:
    """Those an argument is drawn in."""
    return st.just("plain") if in_planes(arguments, name) else layout


def place_far_apart(value: Tensor, dim: int, apart: int = 2**31) -> Tensor:
    """``value`` with its last index along ``dim`` so far away, on a CPU in virtual memory.

    From three indices on the stride itself still fits an int32, so that a kernel which multiplies
    before it widens wraps around: on a CPU into the memory in front, which reads as zeros.
    """
    stride = (apart // (value.shape[dim] - 1) + 32) // 16 * 16
    strides = list(value.contiguous().stride())
    strides[dim] = stride
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    before = 0
    if value.is_cuda:
        memory = torch.empty(extent, dtype=value.dtype, device=value.device)
    else:
        before = 2**31
        lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, (before + extent) * value.element_size(), flags=lazily)
        memory = torch.frombuffer(pages, dtype=value.dtype)
    far = memory.as_strided(value.shape, strides, before)
    far.copy_(value)
    return far


def draw_axes(op: Op, **narrowed: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A point of the op's axes, from some of the values of those that are narrowed."""
    axes = {**op.axes, **narrowed}
    return st.fixed_dictionaries({name: st.sampled_from(list(v)) for name, v in axes.items()})


def typical_axes(op: Op) -> dict[str, Any]:
    """A middling point of the op's axes, with at least two of everything that counts."""
    axes = {}
    for name, values in op.axes.items():
        sizes = [v for v in values if type(v) is int and v > 1]
        axes[name] = (
            sizes[0] if sizes and name not in ("qk_mode", "cache_len") else list(values)[-1]
        )
    return axes


def smallest_axes(op: Op) -> dict[str, Any]:
    """One of everything, as far as the op takes one: sizes of 0 are drawn elsewhere."""
    axes = typical_axes(op)
    for name, values in op.axes.items():
        sizes = [v for v in values if type(v) is int and v > 0]
        if sizes and not any(type(v) is bool for v in values):
            axes[name] = min(sizes)
    return axes


def sample(op: Op, dtype: torch.dtype, device: Any, seed: int, **axes: Any) -> dict[str, Any]:
    return op.make_sample(TensorFactory(dtype, device, seed), **axes)


def tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v for k, v in arguments.items() if isinstance(v, Tensor)}


def clone(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    def wide(v: Any) -> Any:
        is_real = isinstance(v, Tensor) and v.is_floating_point() and v.dtype not in CODES
        if isinstance(v, Tensor) and v.is_mps:
            v = v.cpu()  # which has float64
        return v.double() if is_real else v

    return {k: wide(v) for k, v in arguments.items()}


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def expected(op: Op, arguments: dict[str, Any], *, double: bool = True) -> tuple[tuple, dict]:
    """The reference's outputs and what it leaves in the arguments, in float64 unless told."""
    arguments = clone(in_float64(arguments) if double else arguments)
    outputs = as_tuple(op.reference(**arguments))
    return outputs, {n: arguments[n] for n in op.mutates if arguments[n] is not None}


def has_minimums(arguments: dict[str, Any]) -> bool:
    """Whether 16-bit activations meet a format in planes that has minimums."""
    kinds = [value for value in arguments.values() if isinstance(value, str)]
    formats = [PLANE_FORMATS[kind].file for kind in kinds if kind in PLANE_FORMATS]
    a = next(arguments[name] for name in ("a", "x", "h", "slots") if name in arguments)
    return a.dtype != torch.float32 and any(fmt.m for fmt in formats)


def assert_call_matches(
    op: Op, got: tuple, arguments: dict, want: tuple, left: dict, scale: float = 1
) -> None:
    """Hold outputs and mutated arguments against the reference's."""
    assert len(got) == len(want)
    chunked = 4 if op.name in CHUNKED else 1
    is_rounded = op.name in ROUNDED_PRODUCTS and got[0].dtype != torch.float32
    is_rounded |= op.name in ROUNDED_SUMS and has_minimums(arguments)
    scale *= chunked * (2 if is_rounded else 1)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape, f"{op.name} output {i}: {g.shape} for {w.shape}"
        if op.name in ROUNDED_WEIGHTS and g.dtype == torch.float32:
            g = g.to(arguments["a"].dtype)  # sums are exact, but not of the weights as they were
        assert_close(g.to(w.device), w, scale=scale, name=f"{op.name} output {i}")
    for name, value in left.items():
        g = op.left_in(name, arguments)
        assert_close(g.to(value.device), value, scale=chunked, name=f"{op.name} {name}")


def check_matches_reference(
    backend: Backend, op: Op, data: st.DataObject, seed: int, **narrowed: Any
) -> None:
    """Any shape, dtype and stride gives the reference's result, and touches nothing else."""
    axes = data.draw(draw_axes(op, **narrowed), label="axes")
    dtype = data.draw(st.sampled_from(op.dtypes), label="dtype")
    arguments = sample(op, dtype, backend.device, seed, **axes)
    layout = st.sampled_from(LAYOUTS[:2] if op.name in CONTIGUOUS_ONLY else LAYOUTS)
    own_rows = (*op.mutates, *DISTINCT_ROWS.get(op.name, ()))
    buffers = {
        name: place(
            value, data.draw(layouts_of(arguments, name, layout), label=name), name in own_rows
        )
        for name, value in tensors(arguments).items()
    }
    arguments |= {name: buffer.tensor for name, buffer in buffers.items()}
    want, left = expected(op, arguments)

    out_buffers = []
    if op.has_out and data.draw(st.booleans(), label="out"):
        backend_out = op.fake(**clone(arguments))
        out_buffers = [
            place(torch.zeros_like(t), data.draw(layout, label="out"), own_rows=True)
            for t in as_tuple(backend_out)
        ]
        outs = tuple(buffer.tensor for buffer in out_buffers)
        getattr(backend, op.name)(**arguments, out=outs if len(outs) > 1 else outs[0])
        got = outs
    else:
        got = as_tuple(getattr(backend, op.name)(**arguments))
        assert all(t.is_contiguous() for t in got)
        held = {t.untyped_storage().data_ptr() for t in tensors(arguments).values() if t.numel()}
        assert not held & {t.untyped_storage().data_ptr() for t in got if t.numel()}, (
            f"{op.name} returns memory of its arguments"
        )

    assert_call_matches(op, got, arguments, want, left)
    for name, buffer in buffers.items():
        if name in op.mutates:
            assert buffer.guards_intact(), f"{op.name} wrote outside {name}"
        else:
            assert buffer.unchanged(), f"{op.name} changed {name}"
    assert all(buffer.guards_intact() for buffer in out_buffers), f"{op.name} wrote outside out"


def _where_one_overflows(got: Tensor, single: Tensor, exact: Tensor) -> Tensor:
    """The float32 reference, but the float64 one where that and the result alone are finite.

    Kernels compute in float32, but multiply-adds that round once may overflow later than its
    reference does. What is finite has to be right. Products of the reference may overflow to both
    infinities, whose sum is NaN; a multiply-add that overflows to one of them stays at it. Or the
    result alone overflows, by a product that others in the sum would have brought back: that is one
    of the infinities too, where the sum itself is over a quarter of the largest float32.
    """
    if got.shape != single.shape or not got.is_floating_point() or got.dtype in CODES:
        return single
    device = single.device
    exact, result = exact.to(device, got.dtype), got.to(device)
    later = ~single.isfinite() & exact.isfinite() & result.isfinite()
    alone = single.isnan() & ~exact.isnan() & result.isinf()
    is_near = exact.isfinite() & (exact.abs().double() > torch.finfo(torch.float32).max / 4)
    alone |= result.isinf() & is_near & (result.sign() == exact.sign())
    single = torch.where(alone, result.to(single.dtype), single)
    return torch.where(later, exact.to(single.dtype), single)


def check_edge_values(
    backend: Backend, op: Op, data: st.DataObject, seed: int, **narrowed: Any
) -> None:
    """Infinities, NaN, denormals and the largest values come out where the reference has them."""
    dtype = data.draw(st.sampled_from(op.dtypes), label="dtype")
    chosen = {name: st.sampled_from(list(values)) for name, values in narrowed.items()}
    axes = typical_axes(op) | data.draw(st.fixed_dictionaries(chosen), label="axes")
    arguments = sample(op, dtype, backend.device, seed, **axes)
    kinds = ["nan", "inf", "-inf", "denormal", "zero"] + ["max"] * (
        op.name not in (*TAILED, *CANCELLED, *SQUARED, *OPEN)
    )
    kind = data.draw(st.sampled_from(kinds), label="kind")
    info = torch.finfo(dtype)
    special = {"max": info.max, "denormal": info.tiny / 4, "zero": 0.0}.get(kind)
    pick = random.Random(seed)
    for name, value in tensors(arguments).items():
        if value.dtype == dtype and value.numel() and name not in op.finite:
            flat = value.view(-1)
            flat[pick.randrange(flat.numel())] = float(kind) if special is None else special
            arguments[name] = value
    want, left = expected(op, arguments, double=False)
    exact, exact_left = expected(op, arguments) if kind == "max" else ((), {})
    got = as_tuple(getattr(backend, op.name)(**arguments))
    if kind == "max":
        want = tuple(map(_where_one_overflows, got, want, exact))
        left = {n: _where_one_overflows(arguments[n], v, exact_left[n]) for n, v in left.items()}
    # Each addition to the largest float rounds by it, here and in the reference: of 33 products in
    # float32 the reference was 0.0068 off float64, and a kernel 0.0044, where 0.002 was allowed
    # between them (test_edge_values[interpret-gemm] in float16, seed 23713).
    assert_call_matches(op, got, arguments, want, left, scale=4 if kind == "max" else 1)
