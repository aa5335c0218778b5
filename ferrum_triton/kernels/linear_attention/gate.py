"""Sigmoid gates of values, and the residual that what passes them joins."""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise_choices import tunable_blocks
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, group_size, group_stride, row_offset, row_views
from ferrum_triton.ops.linear_attention import gate as ops

gate_config = tunable_blocks("sigmoid_gate", ("num_rows", "num_cols"))


@kernel
def _sigmoid_gate_kernel(
    y_ptr,  # [num_rows, hidden_size]
    values_ptr,  # [num_rows, hidden_size]
    gate_ptr,  # [num_rows, hidden_size], or [num_rows, 1]
    residual_ptr,  # [num_rows, hidden_size] or None
    stride_y_row,
    stride_values_row,
    stride_gate_row,
    stride_residual_row,
    stride_y_group,
    stride_values_group,
    stride_gate_group,
    stride_residual_group,
    group_size,
    hidden_size,
    PER_ROW: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = residual + values · sigmoid(gate)"""
    pdl_trigger(PDL)
    blocks = tl.cdiv(hidden_size, BLOCK_C)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = col < hidden_size
    values_row = values_ptr + row_offset(row, stride_values_row, stride_values_group, group_size)
    gate_row = gate_ptr + row_offset(row, stride_gate_row, stride_gate_group, group_size)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    pdl_wait(PDL)

    values = tl.load(values_row + col, mask=mask, other=0.0).to(tl.float32)
    if PER_ROW:
        gate = tl.load(gate_row).to(tl.float32)
    else:
        gate = tl.load(gate_row + col, mask=mask, other=0.0).to(tl.float32)
    y = values * tl.sigmoid(gate)
    if residual_ptr is not None:
        residual_row = row_offset(row, stride_residual_row, stride_residual_group, group_size)
        y += tl.load(residual_ptr + residual_row + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@ops.sigmoid_gate.impl("triton")
def sigmoid_gate(
    values: Tensor, gate: Tensor, residual: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    y = out
    if y is None:
        like = values if residual is None else residual
        y = torch.empty_like(like, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    present = () if residual is None else (residual,)
    for y_rows, values_rows, gate_rows, *others in row_views(y, values, gate, *present):
        num_rows, num_cols = y_rows.shape[:-1].numel(), y_rows.shape[-1]
        residual_rows = others[0] if others else None
        config = gate_config.pick(y.device, num_rows, num_cols)
        _sigmoid_gate_kernel.launch(
            (num_rows * cdiv(num_cols, config["BLOCK_C"]),),
            y_ptr=y_rows,
            values_ptr=values_rows,
            gate_ptr=gate_rows,
            residual_ptr=residual_rows,
            stride_y_row=y_rows.stride(-2),
            stride_values_row=values_rows.stride(-2),
            stride_gate_row=gate_rows.stride(-2),
            stride_residual_row=residual_rows.stride(-2) if others else None,
            stride_y_group=group_stride(y_rows),
            stride_values_group=group_stride(values_rows),
            stride_gate_group=group_stride(gate_rows),
            stride_residual_group=group_stride(residual_rows) if others else None,
            group_size=group_size(y_rows),
            hidden_size=num_cols,
            PER_ROW=gate_rows.shape[-1] != num_cols,
            **config,
        )
    return y
