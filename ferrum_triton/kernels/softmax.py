"""Softmax over the last dimension: rows in registers, as in :mod:`norm`, or long ones read twice.

A row of up to 16384 columns is held by one program, which reads it once. A program of a longer one
reads it block by block, first for its maximum and sum, then for the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.norm import softmax_config, sum_of_rows, tile_of_rows
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, group_size, group_stride, row_offset, row_views
from ferrum_triton.ops import norm as ops

# Columns beyond which a row is read twice rather than kept: 32 values a thread.
MAX_SOFTMAX_TILE = 16384
LONG_BLOCK, LONG_WARPS = 4096, 8


@triton.jit
def max_of_rows(x):
    """Maxima over the columns of a vector, or of a tile: [BLOCK_T, 1]."""
    if len(x.shape) == 1:
        largest = tl.max(x, axis=0)
    else:
        largest = tl.max(x, axis=1)[:, None]
    return largest


@kernel(dynamic=("num_rows",))
def _softmax_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    stride_y_group,
    stride_x_group,
    group_size,
    num_cols,
    num_rows,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= num_cols
    PDL: tl.constexpr,
):
    """y = e^(x - max(x)) / sum(e^(x - max(x)))"""
    pdl_trigger(PDL)
    row, col, mask = tile_of_rows(num_rows, num_cols, BLOCK_T, BLOCK_H)
    x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
    pdl_wait(PDL)

    x = tl.load(x_row + col, mask=mask, other=float("-inf")).to(tl.float32)

    weights = tl.exp(x - max_of_rows(x))
    y = weights / sum_of_rows(weights)

    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finite_shift(top):
    """What to subtract before exponentiating: 0 where nothing but -inf was seen yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@kernel
def _softmax_long_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    stride_y_group,
    stride_x_group,
    group_size,
    num_cols,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = e^(x - max(x)) / sum(e^(x - max(x))), of a row read twice."""
    pdl_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    pdl_wait(PDL)

    # Each lane keeps its own maximum and sum, so that the loop needs no exchange between lanes.
    tops = tl.full([BLOCK_C], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, num_cols, BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        x = tl.load(x_row + col, mask=col < num_cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tops, x)
        shift = finite_shift(higher)
        sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
        tops = higher
    shift = finite_shift(tl.max(tops, axis=0))
    total = tl.sum(sums * tl.exp(tops - shift), axis=0)

    for first in range(0, num_cols, BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        x = tl.load(x_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        y = tl.exp(x - shift) / total
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=col < num_cols)


@ops.softmax_rows.impl("triton")
def softmax_rows(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    for y_rows, x_rows in row_views(y, x):
        num_rows, num_cols = x_rows.shape[:-1].numel(), x_rows.shape[-1]
        rows = {
            "y_ptr": y_rows,
            "x_ptr": x_rows,
            "stride_y_row": y_rows.stride(-2),
            "stride_x_row": x_rows.stride(-2),
            "stride_y_group": group_stride(y_rows),
            "stride_x_group": group_stride(x_rows),
            "group_size": group_size(x_rows),
            "num_cols": num_cols,
        }
        if num_cols <= MAX_SOFTMAX_TILE:
            config = softmax_config.pick(x.device, num_rows, num_cols)
            grid = (cdiv(num_rows, config["BLOCK_T"]),)
            _softmax_kernel.launch(grid, **rows, num_rows=num_rows, **config)
        else:
            _softmax_long_kernel.launch(
                (num_rows,), **rows, BLOCK_C=LONG_BLOCK, num_warps=LONG_WARPS
            )
    return y
