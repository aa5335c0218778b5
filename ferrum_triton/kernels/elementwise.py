"""Elementwise, activation and layout ops: every element is read once and written once.

A program takes a block of one row; contiguous tensors are one row as a whole, so that only the
last block is not full. The transposes take tiles of several short rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise_choices import BLOCK, FLAT, SPLITS, WARPS
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import (
    as_flat,
    cdiv,
    group_size,
    group_stride,
    next_power_of_2,
    row_offset,
    row_views,
)
from ferrum_triton.ops import elementwise as ops


@triton.jit
def row_and_columns(num_cols, BLOCK_C: tl.constexpr):
    """The row of this program and its columns, both int64, with the columns' mask."""
    blocks_per_row = tl.cdiv(num_cols, BLOCK_C)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    block = (tl.program_id(0) % blocks_per_row).to(tl.int64)
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    return row, cols, cols < num_cols


@triton.jit
def normal_tail(s):
    """The share of the normal distribution above s >= 0, erfc(s/√2) / 2.

    It is e^(-s²/2) · t · P(t) with t = 1 / (1 + 0.35 s), which maps every s into (0, 1]. P has
    degree 8 and was fitted for the least relative error. 1 - erf(s/√2) would cancel: a small tail
    would keep few bits, and from s = 5.5 on none.
    """
    s = tl.minimum(s, 16.0)  # from 14.2 on the tail is 0 in float32
    t = 1.0 / (1.0 + 0.35 * s)
    p = -0.029164928942918777
    p = p * t + 0.1440657675266266
    p = p * t - 0.25591233372688293
    p = p * t + 0.1594051569700241
    p = p * t - 0.023272467777132988
    p = p * t + 0.10557854920625687
    p = p * t + 0.11981452256441116
    p = p * t + 0.1398644745349884
    p = p * t + 0.13962124288082123
    square = s * s
    # What rounding took from the square would change the result by up to a share of 2⁻²⁵ s².
    rounded_off = tl.fma(s, s, -square)
    return tl.exp(-0.5 * square) * (1.0 - 0.5 * rounded_off) * (t * p)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """silu(x), or gelu(x) in its exact or its tanh form."""
    if ACTIVATION == "gelu":
        tail = normal_tail(tl.abs(x))
        y = x * tl.where(x < 0, tail, 1.0 - tail)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(z) = 2 sigmoid(2z) - 1, which does not overflow on either side.
        y = x * tl.sigmoid(2.0 * inner)
    else:
        y = x * tl.sigmoid(x)
    return y


@kernel
def _gated_split_kernel(
    y_ptr,  # [num_rows, intermediate_size]
    gate_up_ptr,  # [num_rows, 2 * intermediate_size]
    stride_y_row,
    stride_gate_up_row,
    stride_y_group,
    stride_gate_up_group,
    group_size,
    intermediate_size,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(gate) · up, where a row is [gate | up]"""
    pdl_trigger(PDL)
    row, i, mask = row_and_columns(intermediate_size, BLOCK_C)
    gate_up_row = gate_up_ptr + row_offset(
        row, stride_gate_up_row, stride_gate_up_group, group_size
    )
    pdl_wait(PDL)

    gate = tl.load(gate_up_row + i, mask=mask, other=0.0)
    up = tl.load(gate_up_row + i + intermediate_size, mask=mask, other=0.0)

    y = activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _gated_kernel(
    y_ptr,  # [num_rows, intermediate_size]
    gate_ptr,  # [num_rows, intermediate_size]
    up_ptr,  # [num_rows, intermediate_size]
    stride_y_row,
    stride_gate_row,
    stride_up_row,
    stride_y_group,
    stride_gate_group,
    stride_up_group,
    group_size,
    intermediate_size,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(gate) · up"""
    pdl_trigger(PDL)
    row, i, mask = row_and_columns(intermediate_size, BLOCK_C)
    gate_row = gate_ptr + row_offset(row, stride_gate_row, stride_gate_group, group_size)
    pdl_wait(PDL)

    gate = tl.load(gate_row + i, mask=mask)
    up_row = up_ptr + row_offset(row, stride_up_row, stride_up_group, group_size)
    up = tl.load(up_row + i, mask=mask)

    y = activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _activation_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    stride_y_group,
    stride_x_group,
    group_size,
    num_cols,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(x)"""
    pdl_trigger(PDL)
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
    pdl_wait(PDL)

    x = tl.load(x_row + col, mask=mask)
    y = activated(x.to(tl.float32), ACTIVATION)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("scale",))
def _scale_kernel(
    x_ptr,  # [num_rows, num_cols], updated
    stride_x_row,
    stride_x_group,
    group_size,
    num_cols,
    scale,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """x ← scale · x"""
    pdl_trigger(PDL)
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    block = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size) + col
    pdl_wait(PDL)

    x = tl.load(block, mask=mask).to(tl.float32)
    tl.store(block, (x * scale).to(x_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("scale",))
def _add_kernel(
    dst_ptr,  # [num_rows, num_cols], updated
    src_ptr,  # [num_rows, num_cols]
    stride_dst_row,
    stride_src_row,  # 0 repeats one row
    stride_dst_group,
    stride_src_group,
    group_size,
    num_cols,
    scale,
    HAS_SCALE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """dst ← dst + scale · src"""
    pdl_trigger(PDL)
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    dst_block = dst_ptr + row_offset(row, stride_dst_row, stride_dst_group, group_size) + col
    src_row = src_ptr + row_offset(row, stride_src_row, stride_src_group, group_size)
    pdl_wait(PDL)

    src = tl.load(src_row + col, mask=mask).to(tl.float32)
    dst = tl.load(dst_block, mask=mask).to(tl.float32)
    if HAS_SCALE:
        src *= scale

    tl.store(dst_block, (dst + src).to(dst_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("length",))
def _copy_kernel(
    dst_ptr,  # [length]
    src_ptr,  # [length]
    length,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """dst ← src, converted to dst's dtype"""
    pdl_trigger(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    pdl_wait(PDL)
    values = tl.load(src_ptr + i, mask=i < length)
    tl.store(dst_ptr + i, values.to(dst_ptr.dtype.element_ty), mask=i < length)


@kernel
def _transpose_kernel(
    y_ptr,  # [num_inner, num_outer, size]
    x_ptr,  # [num_outer, num_inner, size]
    stride_y_inner,
    stride_y_outer,
    stride_x_outer,
    stride_x_inner,
    num_outer,
    num_rows,  # num_outer * num_inner
    size,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[inner, outer] = x[outer, inner]"""
    pdl_trigger(PDL)
    pdl_wait(PDL)
    blocks_per_row = tl.cdiv(size, BLOCK_C)
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * BLOCK_R
    row = (first + tl.arange(0, BLOCK_R))[:, None]
    col = (tl.program_id(0) % blocks_per_row * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (row < num_rows) & (col < size)
    inner, outer = row // num_outer, row % num_outer

    x = tl.load(x_ptr + outer * stride_x_outer + inner * stride_x_inner + col, mask=mask)
    tl.store(y_ptr + inner * stride_y_inner + outer * stride_y_outer + col, x, mask=mask)


def _blocks(num_rows: int, num_cols: int, config: Config) -> tuple[int]:
    return (num_rows * cdiv(num_cols, config["BLOCK_C"]),)


# The op whose launch choice an activation of both halves has.
SPLIT_OPS = {
    "silu": "fused_silu_mul_split",
    "gelu": "fused_gelu_mul_split",
    "gelu_tanh": "fused_gelu_tanh_mul_split",
}


def gated_split(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """y = activation(gate) · up, of rows [gate | up] and one of SPLIT_OPS."""
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    y = gate_up.new_empty(shape) if out is None else out
    if y.numel() == 0:
        return y
    for y_rows, gate_up_rows in row_views(y, gate_up):
        num_rows, intermediate_size = y_rows.shape[:-1].numel(), y_rows.shape[-1]
        config = SPLITS[SPLIT_OPS[activation]].pick(y.device, num_rows, intermediate_size)
        _gated_split_kernel.launch(
            _blocks(num_rows, intermediate_size, config),
            y_ptr=y_rows,
            gate_up_ptr=gate_up_rows,
            stride_y_row=y_rows.stride(-2),
            stride_gate_up_row=gate_up_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_gate_up_group=group_stride(gate_up_rows),
            group_size=group_size(y_rows),
            intermediate_size=intermediate_size,
            ACTIVATION=activation,
            **config,
        )
    return y


@ops.fused_silu_mul_split.impl("triton")
def fused_silu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return gated_split(gate_up, "silu", out)


@ops.fused_gelu_mul_split.impl("triton")
def fused_gelu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return gated_split(gate_up, "gelu", out)


@ops.fused_gelu_tanh_mul_split.impl("triton")
def fused_gelu_tanh_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return gated_split(gate_up, "gelu_tanh", out)


@ops.silu_mul.impl("triton")
def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    for views in row_views(y, gate, up):
        y_rows, gate_rows, up_rows = as_flat(*views)
        num_rows, num_cols = y_rows.shape[:-1].numel(), y_rows.shape[-1]
        config = FLAT["silu_mul"].pick(y.device, num_rows, num_cols)
        _gated_kernel.launch(
            _blocks(num_rows, num_cols, config),
            y_ptr=y_rows,
            gate_ptr=gate_rows,
            up_ptr=up_rows,
            stride_y_row=y_rows.stride(-2),
            stride_gate_row=gate_rows.stride(-2),
            stride_up_row=up_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_gate_group=group_stride(gate_rows),
            stride_up_group=group_stride(up_rows),
            group_size=group_size(y_rows),
            intermediate_size=num_cols,
            ACTIVATION="silu",
            **config,
        )
    return y


@ops.gelu.impl("triton")
def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    for views in row_views(y, x):
        y_rows, x_rows = as_flat(*views)
        num_rows, num_cols = y_rows.shape[:-1].numel(), y_rows.shape[-1]
        config = FLAT["gelu"].pick(y.device, num_rows, num_cols)
        _activation_kernel.launch(
            _blocks(num_rows, num_cols, config),
            y_ptr=y_rows,
            x_ptr=x_rows,
            stride_y_row=y_rows.stride(-2),
            stride_x_row=x_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_x_group=group_stride(x_rows),
            group_size=group_size(y_rows),
            num_cols=num_cols,
            ACTIVATION="gelu",
            **config,
        )
    return y


@ops.scale_inplace.impl("triton")
def scale_inplace(x: Tensor, scale: float) -> None:
    if x.numel() == 0:
        return
    for views in row_views(x):
        (rows,) = as_flat(*views)
        num_rows, num_cols = rows.shape[:-1].numel(), rows.shape[-1]
        config = FLAT["scale_inplace"].pick(x.device, num_rows, num_cols)
        _scale_kernel.launch(
            _blocks(num_rows, num_cols, config),
            x_ptr=rows,
            stride_x_row=rows.stride(-2),
            stride_x_group=group_stride(rows),
            group_size=group_size(rows),
            num_cols=num_cols,
            scale=float(scale),
            **config,
        )


def _add(name: str, dst: Tensor, src: Tensor, scale: float | None = None) -> None:
    """dst ← dst + scale · src"""
    if dst.numel() == 0:
        return
    for views in row_views(dst, src):
        dst_rows, src_rows = as_flat(*views)
        num_rows, num_cols = dst_rows.shape[:-1].numel(), dst_rows.shape[-1]
        config = FLAT[name].pick(dst.device, num_rows, num_cols)
        _add_kernel.launch(
            _blocks(num_rows, num_cols, config),
            dst_ptr=dst_rows,
            src_ptr=src_rows,
            stride_dst_row=dst_rows.stride(-2),
            stride_src_row=src_rows.stride(-2),
            stride_dst_group=group_stride(dst_rows),
            stride_src_group=group_stride(src_rows),
            group_size=group_size(dst_rows),
            num_cols=num_cols,
            scale=0.0 if scale is None else float(scale),
            HAS_SCALE=scale is not None,
            **config,
        )


@ops.add_inplace.impl("triton")
def add_inplace(residual: Tensor, x: Tensor) -> None:
    _add("add_inplace", residual, x)


@ops.scaled_add_inplace.impl("triton")
def scaled_add_inplace(dst: Tensor, src: Tensor, scale: float) -> None:
    _add("scaled_add_inplace", dst, src, scale)


@ops.add_bias.impl("triton")
def add_bias(x: Tensor, bias: Tensor) -> None:
    _add("add_bias", x, bias.expand(x.shape))


@ops.copy_slice.impl("triton")
def copy_slice(
    src: Tensor,
    dst: Tensor,
    src_offset: int = 0,
    dst_offset: int = 0,
    length: int | None = None,
) -> None:
    source, target = src.view(-1)[src_offset:], dst.view(-1)[dst_offset:]
    length = min(source.numel(), target.numel()) if length is None else length
    if length:
        _copy_kernel.launch(
            (cdiv(length, BLOCK),),
            dst_ptr=target,
            src_ptr=source,
            length=length,
            BLOCK_C=BLOCK,
            num_warps=WARPS,
        )


@ops.transpose_head_to_token.impl("triton")
@ops.transpose_token_to_head.impl("triton")
def transpose_leading(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    num_outer, num_inner, size = x.shape
    y = x.new_empty((num_inner, num_outer, size)) if out is None else out
    if x.numel() == 0:
        return y
    block_c = min(next_power_of_2(size), 256)
    block_r = max(2048 // block_c, 1)
    _transpose_kernel.launch(
        (cdiv(num_outer * num_inner, block_r) * cdiv(size, block_c),),
        y_ptr=y,
        x_ptr=x,
        stride_y_inner=y.stride(0),
        stride_y_outer=y.stride(1),
        stride_x_outer=x.stride(0),
        stride_x_inner=x.stride(1),
        num_outer=num_outer,
        num_rows=num_outer * num_inner,
        size=size,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=WARPS,
    )
    return y
