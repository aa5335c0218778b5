"""A packed layer's product with its bias and the residual stream."""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.gemm import gemm_quant
from ferrum_triton.kernels.quant.products import adds, product
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import quant as ops
from ferrum_triton.quant.planes import PLANE_FORMATS


@kernel
def _finish_kernel(
    y_ptr,  # [m, n]
    x_ptr,  # [m, n]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_x_token,
    stride_residual_token,
    num_rows,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_rows
    y = tl.load(x_ptr + token * stride_x_token + n, mask=mask, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + token * stride_residual_token
        y += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@ops.linear_quant.impl("triton")
def linear_quant(
    a: Tensor,
    blocks: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if bias is None and residual is None:
        return gemm_quant(a, blocks, kind, out=out)
    bias = None if bias is None else bias.contiguous()
    num_tokens, num_rows = a.shape[0], blocks.shape[0]
    y = a.new_empty((num_tokens, num_rows)) if out is None else out
    if kind in PLANE_FORMATS and adds(a):
        return product(a, blocks, kind, bias, residual, y)
    sums = torch.empty((num_tokens, num_rows), dtype=torch.float32, device=a.device)
    gemm_quant(a, blocks, kind, out=sums)
    if y.numel() == 0:
        return y
    block = min(next_power_of_2(num_rows), 1024)
    _finish_kernel.launch(
        (num_tokens, cdiv(num_rows, block)),
        y,
        sums,
        bias,
        residual,
        y.stride(0),
        sums.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        BLOCK=block,
    )
    return y
