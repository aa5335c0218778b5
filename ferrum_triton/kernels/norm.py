"""Normalisation: one program per row, the whole row held in registers."""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import as_rows, next_power_of_2
from ferrum_triton.ops import norm as ops


@kernel(dynamic=("eps",))
def _rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_token,
    stride_x_token,
    hidden_size,
    eps,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < hidden_size

    x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)

    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    y = x * rstd * weight

    tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("eps",))
def _fused_add_rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    residual_ptr,  # [num_tokens, hidden_size], updated
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_token,
    stride_residual_token,
    stride_x_token,
    hidden_size,
    eps,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    residual_row = residual_ptr + token * stride_residual_token + h

    x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)

    stored = (residual + x).to(residual_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / hidden_size + eps)
    y = total * rstd * weight

    tl.store(residual_row, stored, mask=mask)
    tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)


def _warps(block: int) -> int:
    """16 elements a thread: one or two 16-byte loads of each operand in flight."""
    return min(max(block // 512, 1), 16)


@ops.rms_norm.impl("triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    rows, y_rows = as_rows("rms_norm", "x", x), as_rows("rms_norm", "out", y)
    num_tokens, hidden_size = rows.shape
    block = next_power_of_2(hidden_size)
    _rms_norm_kernel.launch(
        (num_tokens,),
        y_rows,
        rows,
        weight,
        y_rows.stride(0),
        rows.stride(0),
        hidden_size,
        float(eps),
        BLOCK_H=block,
        num_warps=_warps(block),
    )
    return y


@ops.fused_add_rms_norm.impl("triton")
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    rows, y_rows = as_rows("fused_add_rms_norm", "x", x), as_rows("fused_add_rms_norm", "out", y)
    residual_rows = as_rows("fused_add_rms_norm", "residual", residual)
    num_tokens, hidden_size = rows.shape
    block = next_power_of_2(hidden_size)
    _fused_add_rms_norm_kernel.launch(
        (num_tokens,),
        y_rows,
        residual_rows,
        rows,
        weight,
        y_rows.stride(0),
        residual_rows.stride(0),
        rows.stride(0),
        hidden_size,
        float(eps),
        BLOCK_H=block,
        num_warps=_warps(block),
    )
    return y
