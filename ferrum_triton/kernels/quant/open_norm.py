"""Norms that packed products share: opened by the product before, closed by the ones after.

Chosen for ``linear_quant_open_norm``, ``open_norm_quant_qkv`` and ``open_norm_quant_gate_up_silu``.
Products of one or two tokens by planes do both parts themselves (:mod:`.gemv_repacked`); elsewhere
a launch opens the norm of a product's sums, and one closes it.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import INTERPRETER, gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import Tokens
from ferrum_triton.kernels.quant.gemv_config import FEW, MOST_THREADS, persistent
from ferrum_triton.kernels.quant.gemv_fused import gate_up, side_by_side, stacked
from ferrum_triton.kernels.quant.gemv_plan import (
    NormOpening,
    Squares,
    launch_plan,
    opened_arguments,
    persistent_threads,
)
from ferrum_triton.kernels.quant.gemv_repacked import launch_gemv
from ferrum_triton.kernels.quant.planes import layout_of
from ferrum_triton.kernels.quant.products import gemm_quant, pick
from ferrum_triton.kernels.quant.thread_sums import PART, OpenNorm, closed
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import quant_open_norm as ops
from ferrum_triton.ops.open_norm import num_parts
from ferrum_triton.quant.planes import PLANE_FORMATS

# Columns of a program that opens or closes a norm by itself.
BLOCK = 1024
# Rows that an SM's programs read at a time, at least, where they open a norm.
LEAST_ROWS = 8


@kernel
def _open_norm_kernel(
    y_ptr,  # [m, n]
    h_ptr,  # [m, n]
    squares_ptr,  # float32 [m, cdiv(n, PART)]
    sums_ptr,  # float32 [m, n]
    residual_ptr,  # [m, n]
    weight_ptr,  # [n]
    stride_y_token,
    stride_h_token,
    stride_squares_token,
    stride_sums_token,
    stride_residual_token,
    num_columns,
    num_parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = residual + sums, h = y · weight, and sums of y² by PART columns."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < num_columns
    y = tl.load(sums_ptr + token * stride_sums_token + column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + token * stride_residual_token + column, mask=mask, other=0.0)
    y += residual.to(tl.float32)
    h = y * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + column, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptr + token * stride_h_token + column, h.to(h_ptr.dtype.element_ty), mask=mask)
    squares = tl.sum(tl.reshape(y * y, [BLOCK // PART, PART]), axis=1)
    part = first // PART + tl.arange(0, BLOCK // PART)
    tl.store(squares_ptr + token * stride_squares_token + part, squares, mask=part < num_parts)


@kernel(dynamic=("eps",))
def _close_norm_kernel(
    y_ptr,  # [m, k]
    h_ptr,  # [m, k]
    squares_ptr,  # float32 [m, PARTS]
    stride_y_token,
    stride_h_token,
    stride_squares_token,
    num_columns,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = h / sqrt(mean of the squares + eps)"""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    h = tl.load(h_ptr + token * stride_h_token + column, mask=mask, other=0.0).to(tl.float32)
    opened = OpenNorm(squares_ptr + token * stride_squares_token, 0, eps)
    y = closed(h, column * 0, opened, PARTS, 1, num_columns)
    tl.store(y_ptr + token * stride_y_token + column, y.to(y_ptr.dtype.element_ty), mask=mask)


class OpenTokens(Tokens):
    """Activations h whose norm is open; other kernels than few tokens' take it closed."""

    def __init__(self, h: Tensor, squares: Tensor, eps: float) -> None:
        super().__init__(h)
        self._opened = Squares(squares, float(eps))
        self._closed: Tensor | None = None

    def open(self) -> tuple[Tensor, Squares | None]:
        return self.like, self._opened

    def values(self) -> Tensor:
        if self._closed is None:
            self._closed = close_norm(self.like, self._opened)
        return self._closed


def open_norm_of(
    sums: Tensor, residual: Tensor, norm_weight: Tensor, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """y ← residual + sums, h ← y · norm_weight and the sums of y², by a launch of its own."""
    y, h, squares = out
    num_tokens, num_rows = y.shape
    _open_norm_kernel.launch(
        (num_tokens, cdiv(num_rows, BLOCK)),
        y_ptr=y,
        h_ptr=h,
        squares_ptr=squares,
        sums_ptr=sums,
        residual_ptr=residual,
        weight_ptr=norm_weight,
        stride_y_token=y.stride(0),
        stride_h_token=h.stride(0),
        stride_squares_token=squares.stride(0),
        stride_sums_token=sums.stride(0),
        stride_residual_token=residual.stride(0),
        num_columns=num_rows,
        num_parts=squares.shape[1],
        BLOCK=BLOCK,
    )


def close_norm(h: Tensor, opened: Squares) -> Tensor:
    """h / sqrt(mean of the squares + eps), rounded to h's dtype."""
    y = torch.empty_like(h, memory_format=torch.contiguous_format)
    num_tokens, num_columns = h.shape
    _close_norm_kernel.launch(
        (num_tokens, cdiv(num_columns, BLOCK)),
        y_ptr=y,
        h_ptr=h,
        stride_y_token=y.stride(0),
        stride_h_token=h.stride(0),
        num_columns=num_columns,
        PARTS=opened.squares.shape[1],
        BLOCK=BLOCK,
        **opened_arguments(opened),
    )
    return y


def opening_choice(a: Tensor, planes: Tensor, kind: str) -> Config | None:
    """A launch that opens the norm of its own products; None where there is none.

    The launch chosen for the product by itself if its sums are deferred; else one of persistent
    programs, whether or not a row fills their threads: a launch less is worth more. One program of
    four rows an SM reads too little at a time beside a norm: 4096x12288 of Q4_0 takes 13.4 us so
    and 9.05 by eight rows, of Q4_K 12.6 and 9.64 (``device_us`` of ``linear_quant_open_norm`` by
    one token under each, H200, 8d1a382).
    """
    num_tokens, num_rows = a.shape[0], planes.shape[0]
    if num_tokens > FEW or a.dtype == torch.float32 or kind not in PLANE_FORMATS:
        return None
    gpu, layout = gpu_of(a.device), layout_of(planes, kind, a.shape[1])
    # In the interpreter too, so that tests see it.
    is_able = gpu.capability >= (8, 0) or gpu.arch == INTERPRETER
    if not is_able or persistent_threads(layout.groups // layout.span) > MOST_THREADS:
        return None
    for config in (
        pick(a, kind, num_rows),
        persistent(8, 1, deferred=True, ordered=True),
        persistent(4, 2, deferred=True, maxnreg=128, late_trigger=True),
    ):
        if config["path"] != "persistent" or config["rows"] * config["ctas_per_sm"] < LEAST_ROWS:
            continue
        if config["deferred"] and launch_plan(config, a, layout, num_rows, opens=True) is not None:
            return config
    return None


@ops.linear_quant_open_norm.impl("triton")
def linear_quant_open_norm(
    a: Tensor,
    blocks: Tensor,
    kind: str,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = num_tokens, num_rows = residual.shape
    if out is None:
        squares = a.new_empty((num_tokens, num_parts(num_rows)), dtype=torch.float32)
        y, h = residual.new_empty(shape), a.new_empty(shape)
    else:
        y, h, squares = out
    if y.numel() == 0:
        return y, h, squares
    config = opening_choice(a, blocks, kind)
    if config is not None:
        opens = NormOpening(h, squares, norm_weight)
        launch_gemv(a, blocks, kind, config, y, residual=residual, opens=opens)
        return y, h, squares
    open_norm_of(gemm_quant(a, blocks, kind, wide=True), residual, norm_weight, (y, h, squares))
    return y, h, squares


@ops.open_norm_quant_qkv.impl("triton")
def open_norm_quant_qkv(
    h: Tensor,
    squares: Tensor,
    eps: float,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor | None,
    q_kind: str,
    k_kind: str,
    v_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    parts = stacked((q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind))
    num_rows = sum(blocks.shape[0] for blocks, _ in parts)
    y = h.new_empty((h.shape[0], num_rows)) if out is None else out
    if y.numel():
        side_by_side(OpenTokens(h, squares, eps), parts, y)
    return y


@ops.open_norm_quant_gate_up_silu.impl("triton")
def open_norm_quant_gate_up_silu(
    h: Tensor,
    squares: Tensor,
    eps: float,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = h.new_empty((h.shape[0], gate_blocks.shape[0])) if out is None else out
    if y.numel():
        parts = [(gate_blocks, gate_kind), (up_blocks, up_kind)]
        gate_up(OpenTokens(h, squares, eps), parts, activation, y)
    return y
