"""RMS norm into and onto a float32 residual, whose sandwich norms would round on the way otherwise.

A program holds one row, or a tile of short ones, in registers, as in :mod:`norm`.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.norm import (
    HIDDEN,
    inverse_rms,
    launch_rms_norm,
    load_weight,
    tile_of_rows,
    tunable_rms,
    tunable_rows,
)
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, group_size, group_stride, row_offset, row_views
from ferrum_triton.ops import shadow as ops

rms_norm_to_config = tunable_rms("rms_norm_to")
rms_norm_add_config = tunable_rows("rms_norm_add_inplace", HIDDEN, operands=2)


@kernel(dynamic=("num_rows", "eps"))
def _rms_norm_add_kernel(
    residual_ptr,  # [num_rows, hidden_size], updated
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_residual_row,
    stride_x_row,
    stride_residual_group,
    stride_x_group,
    group_size,
    hidden_size,
    num_rows,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
    PDL: tl.constexpr,
):
    """residual ← residual + x / sqrt(mean(x²) + eps) · weight"""
    pdl_trigger(PDL)
    row, h, mask = tile_of_rows(num_rows, hidden_size, BLOCK_T, BLOCK_H)
    residual_offset = row_offset(row, stride_residual_row, stride_residual_group, group_size)
    residual_row = residual_ptr + residual_offset + h
    x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
    pdl_wait(PDL)

    x = tl.load(x_row + h, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_row, mask=mask, other=0.0)
    weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)

    total = residual.to(tl.float32) + x * inverse_rms(x * x, hidden_size, eps) * weight

    tl.store(residual_row, total.to(residual_ptr.dtype.element_ty), mask=mask)


@ops.rms_norm_to.impl("triton")
def rms_norm_to(
    x: Tensor, weight: Tensor, dtype: torch.dtype, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    y = x.new_empty(x.shape, dtype=dtype) if out is None else out
    launch_rms_norm(rms_norm_to_config, x, weight, eps, y)
    return y


@ops.rms_norm_add_inplace.impl("triton")
def rms_norm_add_inplace(residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    if x.numel() == 0:
        return
    for residual_rows, x_rows in row_views(residual, x):
        num_rows, hidden_size = x_rows.shape[:-1].numel(), x_rows.shape[-1]
        config = rms_norm_add_config.pick(x.device, num_rows, hidden_size)
        _rms_norm_add_kernel.launch(
            (cdiv(num_rows, config["BLOCK_T"]),),
            residual_ptr=residual_rows,
            x_ptr=x_rows,
            weight_ptr=weight,
            stride_residual_row=residual_rows.stride(-2),
            stride_x_row=x_rows.stride(-2),
            stride_residual_group=group_stride(residual_rows),
            stride_x_group=group_stride(x_rows),
            group_size=group_size(x_rows),
            hidden_size=hidden_size,
            num_rows=num_rows,
            eps=float(eps),
            **config,
        )
