"""Norms that dense products share, and a norm whose launch adds up a product's parts.

Products of few tokens that multiply from memory open a norm of their own rows, and those of one or
two tokens close one. Elsewhere a launch opens the norm of a product's sums, and one closes it.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear import (
    activated_halves,
    gemm,
    mma_choice,
    mma_options,
    product_in_parts,
    tokens_and_rows,
    totals_of_rows,
)
from ferrum_triton.kernels.norm import fused_add_rms_norm, inverse_rms, load_weight
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.gemv_plan import NormOpening, Squares, opened_arguments
from ferrum_triton.kernels.quant.open_norm import BLOCK, close_norm, open_norm_of
from ferrum_triton.kernels.quant.thread_sums import PART, OpenNorm, closed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import open_norm as ops

# Tokens whose open norm a product divides by itself: each program reads all their squares.
FEW = 2
# Columns of a row that a norm's program has in registers.
LONGEST_ROW = 1 << 15


@kernel(dynamic=("num_rows", "num_tokens", "eps"))
def _mma_norm_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    b_ptr,  # [n, k], or [2 n, k] with ACTIVATION
    residual_ptr,  # [m, n], or None
    squares_ptr,  # float32 [m, PARTS] of an open norm of a, or None
    h_ptr,  # [m, n] of an open norm of y, or None
    y_squares_ptr,  # float32 [m, n / 8], or None
    norm_weight_ptr,  # [n], or None
    stride_y_token,
    stride_a_token,
    stride_b_row,
    stride_residual_token,
    stride_squares_token,
    stride_h_token,
    stride_y_squares_token,
    num_cols,
    num_rows,  # of y
    num_tokens,
    eps,
    TOKENS: tl.constexpr,  # of which an open norm is closed
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    MASKED: tl.constexpr,
    PTX: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product of few tokens, of which a norm before it is closed or one behind it opened"""
    HALVES: tl.constexpr = 1 if ACTIVATION == "" else 2
    ROWS: tl.constexpr = BLOCK_N // HALVES
    first = tl.program_id(0).to(tl.int64) * ROWS
    y = totals_of_rows(
        a_ptr,
        b_ptr,
        stride_a_token,
        stride_b_row,
        first,
        num_cols,
        num_rows,
        num_tokens,
        HALVES,
        BLOCK_N,
        DEPTH,
        LINES,
        PER_LINE,
        MASKED,
        PTX,
        WARPS,
        PDL,
    )
    if PARTS > 0:
        token, _ = tokens_and_rows(first, BLOCK_N // 4)
        opened = OpenNorm(squares_ptr, stride_squares_token, eps)
        y = closed(y, token, opened, PARTS, TOKENS)
    if ACTIVATION != "":
        y = activated_halves(y, ACTIVATION)
    token, n = tokens_and_rows(first, ROWS // 4)
    at_token = token.to(tl.int64)
    mask = (token < num_tokens) & (n < num_rows)
    if residual_ptr is not None:
        residual = residual_ptr + at_token * stride_residual_token + n
        y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at_token * stride_y_token + n, y.to(y_ptr.dtype.element_ty), mask=mask)
    if h_ptr is not None:
        h = y * tl.load(norm_weight_ptr + n, mask=mask, other=0.0).to(tl.float32)
        tl.store(h_ptr + at_token * stride_h_token + n, h.to(h_ptr.dtype.element_ty), mask=mask)
        # Lanes whose numbers differ by fours have the eight rows of a part.
        GROUPS: tl.constexpr = ROWS // PART
        squares = tl.reshape(tl.where(mask, y * y, 0.0), [PART, 8 * GROUPS])
        squares = tl.sum(squares, axis=0)
        i = tl.arange(0, 8 * GROUPS)
        token = i // (2 * GROUPS) * 2 + i % 2
        part = first // PART + i // 2 % GROUPS
        to = y_squares_ptr + token.to(tl.int64) * stride_y_squares_token + part
        tl.store(to, squares, mask=(token < num_tokens) & (part * PART < num_rows))


@kernel(dynamic=("eps",))
def _close_gated_kernel(
    y_ptr,  # [m, n]
    sums_ptr,  # float32 [m, 2 n], of a whose norm is open
    squares_ptr,  # float32 [m, PARTS]
    stride_y_token,
    stride_sums_token,
    stride_squares_token,
    num_rows,
    num_cols,  # of a
    eps,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(gate) · up, both divided by the root of the mean square"""
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_rows
    pdl_wait(PDL)
    gate_at = sums_ptr + token * stride_sums_token + n
    gate = tl.load(gate_at, mask=mask, other=0.0)
    up = tl.load(gate_at + num_rows, mask=mask, other=0.0)
    opened = OpenNorm(squares_ptr + token * stride_squares_token, 0, eps)
    one = tl.full([BLOCK], 1.0, tl.float32)
    rstd = closed(one, n * 0, opened, PARTS, 1, num_cols)
    y = activated(gate * rstd, ACTIVATION) * (up * rstd)
    tl.store(y_ptr + token * stride_y_token + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("eps",))
def _add_partials_norm_kernel(
    y_ptr,  # [m, n]
    residual_ptr,  # [m, n], updated
    partial_ptr,  # float32 [splits, m, n]
    weight_ptr,  # [n]
    stride_y_token,
    stride_residual_token,
    stride_partial_split,
    stride_partial_token,
    num_rows,
    eps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= num_rows
    PDL: tl.constexpr,
):
    """residual ← residual + Σ_s partial[s], rounded; y = its norm · weight"""
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < num_rows
    pdl_wait(PDL)
    residual_at = residual_ptr + token * stride_residual_token + n
    total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    partial_at = partial_ptr + token * stride_partial_token + n
    x = tl.load(partial_at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(partial_at + split * stride_partial_split, mask=mask, other=0.0)
    stored = (total + x).to(residual_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    weight = load_weight(weight_ptr, n, num_rows).to(tl.float32)
    y = total * inverse_rms(total * total, num_rows, eps) * weight
    tl.store(residual_at, stored, mask=mask)
    tl.store(y_ptr + token * stride_y_token + n, y.to(y_ptr.dtype.element_ty), mask=mask)


def _launch_mma(
    y: Tensor,
    a: Tensor,
    b: Tensor,
    config: Config,
    *,
    residual: Tensor | None = None,
    activation: str = "",
    opened: Squares | None = None,
    opens: NormOpening | None = None,
) -> None:
    """y ← residual + a · bᵀ of few tokens, with a norm of a closed or one of y opened."""
    (num_tokens, num_cols), num_rows = a.shape, y.shape[1]
    _mma_norm_kernel.launch(
        (cdiv(b.shape[0], config["BLOCK_N"]),),
        y_ptr=y,
        a_ptr=a,
        b_ptr=b,
        residual_ptr=residual,
        **opened_arguments(opened),
        h_ptr=None if opens is None else opens.h,
        y_squares_ptr=None if opens is None else opens.squares,
        norm_weight_ptr=None if opens is None else opens.weight,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_b_row=b.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        stride_h_token=0 if opens is None else opens.h.stride(0),
        stride_y_squares_token=0 if opens is None else opens.squares.stride(0),
        num_cols=num_cols,
        num_rows=num_rows,
        num_tokens=num_tokens,
        TOKENS=0 if opened is None else num_tokens,
        PARTS=0 if opened is None else opened.squares.shape[1],
        ACTIVATION=activation,
        **mma_options(config, a, b),
    )


@ops.linear_open_norm.impl("triton")
def linear_open_norm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = num_tokens, num_rows = residual.shape
    if out is None:
        squares = a.new_empty((num_tokens, ops.num_parts(num_rows)), dtype=torch.float32)
        out = residual.new_empty(shape), a.new_empty(shape), squares
    y, h, squares = out
    if y.numel() == 0:
        return out
    config = mma_choice(a, b)
    if config is None:
        open_norm_of(gemm(a, b, wide=True), residual, norm_weight, out)
    else:
        opens = NormOpening(h, squares, norm_weight)
        _launch_mma(y, a, b, config, residual=residual, opens=opens)
    return out


@ops.open_norm_linear.impl("triton")
def open_norm_linear(
    h: Tensor, squares: Tensor, eps: float, b: Tensor, *, out: Tensor | None = None
) -> Tensor:
    y = h.new_empty((h.shape[0], b.shape[0])) if out is None else out
    opened = Squares(squares, float(eps))
    config = mma_choice(h, b) if h.shape[0] <= FEW else None
    if config is not None:
        _launch_mma(y, h, b, config, opened=opened)
        return y
    return gemm(close_norm(h, opened) if h.numel() else h, b, out=y)


@ops.open_norm_gate_up_silu.impl("triton")
def open_norm_gate_up_silu(
    h: Tensor,
    squares: Tensor,
    eps: float,
    b: Tensor,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    shape = num_tokens, num_rows = h.shape[0], b.shape[0] // 2
    y = h.new_empty(shape) if out is None else out
    if y.numel() == 0:
        return y
    opened = Squares(squares, float(eps))
    config = mma_choice(h, b) if num_tokens <= FEW else None
    if config is not None and config["BLOCK_N"] % 16 == 0:
        _launch_mma(y, h, b, config, activation=activation, opened=opened)
        return y
    sums = gemm(h, b, wide=True)
    _close_gated_kernel.launch(
        (num_tokens, cdiv(num_rows, BLOCK)),
        y_ptr=y,
        sums_ptr=sums,
        **opened_arguments(opened),
        stride_y_token=y.stride(0),
        stride_sums_token=sums.stride(0),
        num_rows=num_rows,
        num_cols=h.shape[1],
        ACTIVATION=activation,
        PARTS=squares.shape[1],
        BLOCK=BLOCK,
    )
    return y


@ops.linear_add_rms_norm.impl("triton")
def linear_add_rms_norm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_rows = residual.shape
    y = a.new_empty((num_tokens, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_rows > LONGEST_ROW:
        wide = gemm(a, b, wide=True)
        return y.copy_(fused_add_rms_norm(residual, wide, norm_weight, eps))
    partial = product_in_parts(a, b)
    block = next_power_of_2(num_rows)
    _add_partials_norm_kernel.launch(
        (num_tokens,),
        y_ptr=y,
        residual_ptr=residual,
        partial_ptr=partial,
        weight_ptr=norm_weight,
        stride_y_token=y.stride(0),
        stride_residual_token=residual.stride(0),
        stride_partial_split=partial.stride(0),
        stride_partial_token=partial.stride(1),
        num_rows=num_rows,
        eps=float(eps),
        SPLITS=partial.shape[0],
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y
