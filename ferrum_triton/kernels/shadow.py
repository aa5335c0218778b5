"""RMSNorm into and onto a float32 residual: rows in registers, as in :mod:`norm`."""

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
from ferrum_triton.kernels.rows import as_rows, cdiv
from ferrum_triton.ops import shadow as ops

rms_norm_to_config = tunable_rms("rms_norm_to")
rms_norm_add_config = tunable_rows("rms_norm_add_inplace", HIDDEN, operands=2)


@kernel(dynamic=("num_tokens", "eps"))
def _rms_norm_add_kernel(
    residual_ptr,  # [num_tokens, hidden_size], updated
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_residual_token,
    stride_x_token,
    hidden_size,
    num_tokens,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
):
    token, h, mask = tile_of_rows(num_tokens, hidden_size, BLOCK_T, BLOCK_H)
    residual_rows = residual_ptr + token * stride_residual_token + h

    x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_rows, mask=mask, other=0.0)
    weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)

    total = residual.to(tl.float32) + x * inverse_rms(x * x, hidden_size, eps) * weight

    tl.store(residual_rows, total.to(residual_ptr.dtype.element_ty), mask=mask)


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
    name = "rms_norm_add_inplace"
    rows, residual_rows = as_rows(name, "x", x), as_rows(name, "residual", residual)
    num_tokens, hidden_size = rows.shape
    config = rms_norm_add_config.pick(x.device, num_tokens, hidden_size)
    _rms_norm_add_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_T"]),),
        residual_rows,
        rows,
        weight,
        residual_rows.stride(0),
        rows.stride(0),
        hidden_size,
        num_tokens,
        float(eps),
        **config,
    )
