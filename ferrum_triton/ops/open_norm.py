"""A norm shared by products: opened by the one before it, closed by the ones after it.

The product before it adds itself to the residual stream, multiplies the sums by the norm's weight
and leaves the sums of their squares. The products after it divide by the root of their mean, which
commutes with them. So a norm between products of a token or two takes no launch of its own.

Here are those of dense weights, and a norm that is whole behind a product of more tokens. Those of
packed weights are in :mod:`ferrum_triton.ops.quant_open_norm`.
"""

from typing import Any

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, check_gate, gated
from ferrum_triton.ops.norm import check_residual
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

# Columns of the residual stream whose squares are summed together.
PART = 8

OPEN_TENSORS = {"h": "T[m, k]", "squares": "float32[m, k_parts]"}
SIZES = {"m": (1, 0, 2, 5, 20), "n": (64, 1, 9, 32), "k": (128, 1, 33)}


def num_parts(num_columns: int) -> int:
    """Sums of squares of a row."""
    return -(-num_columns // PART)


def opened(
    x: Tensor, residual: Tensor, norm_weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """r = residual + x, r · norm_weight in ``dtype``, and sums of r² by PART columns; x is wide."""
    r = widen(residual) + x
    return r.to(residual.dtype), (r * widen(norm_weight)).to(dtype), _squares(r)


def _squares(r: Tensor) -> Tensor:
    """Sums of r² by PART columns."""
    columns = torch.nn.functional.pad(r.square(), (0, -r.shape[1] % PART))
    return columns.unflatten(1, (-1, PART)).sum(dim=2)


def closed(h: Tensor, squares: Tensor, eps: float) -> Tensor:
    """h / sqrt(mean of the squares + eps), wide."""
    mean = widen(squares).sum(dim=1, keepdim=True) / max(h.shape[1], 1)
    return widen(h) * torch.rsqrt(mean + eps)


def check_squares(op: Op, h: Tensor, squares: Tensor) -> None:
    """Refuse squares of another number of columns than h has."""
    if squares.shape[1] != num_parts(h.shape[1]):
        allowed = f"[m, {num_parts(h.shape[1])}], a sum for each {PART} columns of h"
        op.reject("squares", f"of shape {list(squares.shape)}", allowed)


def open_sample(make, m: int, k: int) -> dict[str, Any]:
    """h and its squares, as a product would leave them."""
    r = make.randn(m, k)
    weight = make.weight(k, dtype=torch.float32)
    return {"h": (r * weight).to(r.dtype), "squares": _squares(r.float()), "eps": 1e-6}


def _case(m: int, n: int, k: int) -> Case:
    axes = {"m": m, "n": n, "k": k, "wide_residual": True}
    return Case(f"bf16/n{n}k{k}/m{m}", torch.bfloat16, axes)


def _product_sample(make, m: int, n: int, k: int, wide_residual: bool) -> dict[str, Any]:
    residual = make.randn(m, n)
    return {
        "a": make.randn(m, k),
        "b": make.randn(n, k, scale=k**-0.5),
        "residual": residual.float() if wide_residual else residual,
        "norm_weight": make.weight(n, dtype=torch.float32),
    }


@op(
    tensors={
        "a": "T[m, k]",
        "b": "T[n, k]",
        "residual": "float[m, n]",
        "norm_weight": "float[n]",
    },
    axes={**SIZES, "wide_residual": (True, False)},
    bench=[_case(m, 4096, k) for k in (4096, 12288) for m in (1, 2)],
    after_norm="a",
)
def linear_open_norm(
    a: Tensor, b: Tensor, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """r = residual + a · bᵀ, h = r · norm_weight, and sums of r² by eight columns.

    The product is that of :func:`gemm`; r is float32 until each result is rounded. With the
    squares, h is the norm that ``open_norm_linear`` and ``open_norm_gate_up_silu`` close. Of up to
    MOST_TOKENS tokens it is one launch where a kernel is faster than cuBLAS.

    Args:
        a: [m, k].
        b: [n, k], same dtype.
        residual: [m, n], of a's dtype or float32.
        norm_weight: [n], any float dtype.

    Returns:
        r, [m, n] in residual's dtype; h, [m, n] in a's dtype, infinite beyond float16's 65504; the
        sums of squares, float32 [m, ceil(n / 8)].
    """
    return opened(widen(a) @ widen(b).T, residual, norm_weight, a.dtype)


@linear_open_norm.rule
def _(a, b, residual, norm_weight):
    check_residual(linear_open_norm, residual, a, "a")


linear_open_norm.sample(_product_sample)


@linear_open_norm.flops
def _(a, b, residual, norm_weight):
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]


@op(
    tensors={**OPEN_TENSORS, "b": "T[n, k]"},
    axes=SIZES,
    bench=[
        Case(f"bf16/n6144k4096/m{m}", torch.bfloat16, {"m": m, "n": 6144, "k": 4096})
        for m in (1, 2, 8)
    ],
    finite=("h",),  # and after the division, which may be rounded to h's dtype
)
def open_norm_linear(h: Tensor, squares: Tensor, eps: float, b: Tensor) -> Tensor:
    """y = (h / sqrt(Σ squares / k + eps)) · bᵀ: a product with a norm that another opened.

    One or two rows are one launch where a kernel is faster than cuBLAS; else h is divided and
    rounded to its dtype first.

    Args:
        h: [m, k], of ``linear_open_norm``; finite.
        squares: float32 [m, ceil(k / 8)], of the same.
        eps: added to the mean square.
        b: [n, k], of h's dtype. Sums of h · bᵀ that are too large for float32 are infinite.

    Returns:
        [m, n] in h's dtype.
    """
    return (closed(h, squares, eps) @ widen(b).T).to(h.dtype)


@open_norm_linear.rule
def _(h, squares, eps, b):
    check_squares(open_norm_linear, h, squares)


@open_norm_linear.sample
def _(make, m, n, k):
    return open_sample(make, m, k) | {"b": make.randn(n, k, scale=k**-0.5)}


@open_norm_linear.flops
def _(h, squares, eps, b):
    return 2 * h.shape[0] * h.shape[1] * b.shape[0]


@op(
    tensors={**OPEN_TENSORS, "b": "T[n2, k]"},
    axes={**SIZES, "activation": GATES},
    bench=[
        Case(f"bf16/n12288k4096/m{m}", torch.bfloat16, {"m": m, "n": 12288, "k": 4096})
        for m in (1, 2)
    ],
    finite=("h",),
)
def open_norm_gate_up_silu(
    h: Tensor, squares: Tensor, eps: float, b: Tensor, activation: str = "silu"
) -> Tensor:
    """y = silu(n · Gᵀ) · (n · Uᵀ), n = h / sqrt(Σ squares / k + eps), b = [G; U].

    As :func:`gemm_gate_up_silu` behind a norm that another product opened. One or two rows are one
    launch where a kernel is faster than cuBLAS; else the launch that gates divides too.

    Args:
        h: [m, k], of ``linear_open_norm``; finite.
        squares: float32 [m, ceil(k / 8)], of the same.
        eps: added to the mean square.
        b: [2 n, k], G's rows and then U's; of h's dtype. Sums of h · bᵀ that are too large for
            float32 are infinite.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [m, n] in h's dtype.
    """
    gate, up = (closed(h, squares, eps) @ widen(b).T).chunk(2, dim=-1)
    return gated(gate, up, activation).to(h.dtype)


@open_norm_gate_up_silu.rule
def _(h, squares, eps, b, activation):
    this = open_norm_gate_up_silu
    check_squares(this, h, squares)
    check_gate(this, activation)
    if b.shape[0] % 2:
        this.reject("b", f"{b.shape[0]} rows", "as many of G as of U")


@open_norm_gate_up_silu.sample
def _(make, m, n, k, activation="silu"):
    b = make.randn(2 * n, k, scale=k**-0.5)
    return open_sample(make, m, k) | {"b": b, "activation": activation}


@open_norm_gate_up_silu.flops
def _(h, squares, eps, b, activation):
    return 2 * h.shape[0] * h.shape[1] * b.shape[0]


@op(
    tensors={
        "a": "T[m, k]",
        "b": "T[n, k]",
        "residual": "float[m, n]",
        "norm_weight": "float[n]",
    },
    axes={**SIZES, "wide_residual": (True, False)},
    bench=[_case(m, 4096, k) for k in (4096, 12288) for m in (8, 32, 64)],
    mutates=("residual",),
    after_norm="a",
)
def linear_add_rms_norm(
    a: Tensor, b: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6
) -> Tensor:
    """residual ← residual + a · bᵀ, then y = rms_norm(residual) · norm_weight.

    As :func:`gemm` and :func:`fused_add_rms_norm` behind it, but that the product is not rounded
    before it is added. Where K is split among programs, the launch that adds up their sums is the
    norm's.

    Args:
        a: [m, k].
        b: [n, k], same dtype.
        residual: [m, n], updated in place; of a's dtype, or float32.
        norm_weight: [n], any float dtype.
        eps: added to the mean square.

    Returns:
        [m, n] in a's dtype.
    """
    residual.copy_(widen(residual) + widen(a) @ widen(b).T)
    r = widen(residual)
    rstd = torch.rsqrt(r.square().mean(dim=-1, keepdim=True) + eps)
    return (r * rstd * widen(norm_weight)).to(a.dtype)


@linear_add_rms_norm.rule
def _(a, b, residual, norm_weight, eps):
    check_residual(linear_add_rms_norm, residual, a, "a")


linear_add_rms_norm.sample(_product_sample)


@linear_add_rms_norm.flops
def _(a, b, residual, norm_weight, eps):
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]
