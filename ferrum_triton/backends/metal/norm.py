"""Norms as shaders: a threadgroup a row."""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.shader import Shader, delivered, result, threads_for
from ferrum_triton.ops import norm as ops

RMS_NORM = Shader("norm", "rms_norm", "y x weight", "hidden_size eps")
FUSED_ADD = Shader("norm", "fused_add_rms_norm", "y residual x weight", "hidden_size eps")
LAYER_NORM = Shader("norm", "layer_norm", "y x weight bias", "hidden_size has_bias eps")


def _grid(x: Tensor) -> dict[str, int]:
    return {"groups": x.numel() // x.shape[-1], "threads": threads_for(x.shape[-1])}


def _types(x: Tensor, residual: Tensor) -> dict[str, torch.dtype]:
    return {"SCALAR": x.dtype, "STREAM": residual.dtype}


@ops.rms_norm.impl("metal")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    y = result(x, x.shape, out)
    if y.numel():
        buffers = (y, x.contiguous(), weight.float().contiguous())
        RMS_NORM.launch(_types(x, x), buffers, (x.shape[-1], float(eps)), **_grid(x))
    return delivered(y, out)


@ops.fused_add_rms_norm.impl("metal")
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    y = result(x, x.shape, out)
    if y.numel():
        stream = residual.contiguous()
        buffers = (y, stream, x.contiguous(), weight.float().contiguous())
        FUSED_ADD.launch(_types(x, residual), buffers, (x.shape[-1], float(eps)), **_grid(x))
        delivered(stream, residual)
    return delivered(y, out)


@ops.layer_norm.impl("metal")
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    y = result(x, x.shape, out)
    if y.numel():
        weight = weight.float().contiguous()
        buffers = (y, x.contiguous(), weight, weight if bias is None else bias.float().contiguous())
        params = (x.shape[-1], int(bias is not None), float(eps))
        LAYER_NORM.launch(_types(x, x), buffers, params, **_grid(x))
    return delivered(y, out)
