"""Sums of experts' outputs as shaders."""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.elementwise import grid
from ferrum_triton.backends.metal.shader import Shader, delivered, result, threads_for
from ferrum_triton.ops.moe import combine as ops

_PARAMS = "hidden_size top_k count eps"
SUM = Shader("combine", "weighted_sum", "y slots weights", _PARAMS)
SUM_RESIDUAL = Shader("combine", "weighted_sum_residual", "residual slots weights", _PARAMS)
SUM_NORM = Shader(
    "combine", "weighted_sum_residual_norm", "y residual slots weights norm_weight", _PARAMS
)


def _types(slots: Tensor, residual: Tensor) -> dict[str, torch.dtype]:
    return {"SCALAR": slots.dtype, "STREAM": residual.dtype}


def _params(slots: Tensor, eps: float = 0.0) -> tuple[int | float, ...]:
    num_tokens, top_k, hidden_size = slots.shape
    return hidden_size, top_k, num_tokens * hidden_size, float(eps)


@ops.weighted_sum.impl("metal")
def weighted_sum(slots: Tensor, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = result(slots, (slots.shape[0], slots.shape[2]), out)
    if y.numel():
        buffers = (y, slots.contiguous(), weights.float().contiguous())
        SUM.launch(_types(slots, slots), buffers, _params(slots), **grid(y.numel()))
    return delivered(y, out)


@ops.weighted_sum_residual.impl("metal")
def weighted_sum_residual(slots: Tensor, weights: Tensor, residual: Tensor) -> None:
    if residual.numel():
        stream = residual.contiguous()
        buffers = (stream, slots.contiguous(), weights.float().contiguous())
        types = _types(slots, residual)
        SUM_RESIDUAL.launch(types, buffers, _params(slots), **grid(stream.numel()))
        delivered(stream, residual)


@ops.weighted_sum_residual_norm.impl("metal")
def weighted_sum_residual_norm(
    slots: Tensor,
    weights: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = result(slots, (slots.shape[0], slots.shape[2]), out)
    if y.numel():
        stream = residual.contiguous()
        wide = (weights.float().contiguous(), norm_weight.float().contiguous())
        buffers = (y, stream, slots.contiguous(), *wide)
        launch = {"groups": slots.shape[0], "threads": threads_for(slots.shape[-1])}
        SUM_NORM.launch(_types(slots, residual), buffers, _params(slots, eps), **launch)
        delivered(stream, residual)
    return delivered(y, out)
