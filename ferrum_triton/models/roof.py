"""The least time that a decode step can take: the bytes it has to read, at the copy bandwidth."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.experts import Experts
from ferrum_triton.models.qwen35_config import Qwen35Config

_COPIED_BYTES, _COPIES = 1 << 29, 5


def bytes_of_step(model: Decoder, batch: int, context: int) -> float:
    """Bytes of weights, keys, values and states that a step reads, and of states that it writes.

    Args:
        model: the model.
        batch: sequences. Experts count by the share that so many tokens are expected to choose.
        context: keys of each.
    """
    weights, config = model.weights, model.config
    nbytes = _nbytes(weights.head)
    for layer in weights.layers:
        nbytes += _nbytes(layer.qkv) + _nbytes(layer.attn_out)
        if isinstance(layer.mlp, Experts):
            unread = (1 - layer.mlp.top_k / config.num_experts) ** batch
            nbytes += (1 - unread) * sum(map(_nbytes, layer.mlp.matrices))
            nbytes += _nbytes(layer.mlp.router)
            if (shared := layer.mlp.shared) is not None:
                nbytes += _nbytes(shared.gate_up) + _nbytes(shared.down)
        else:
            nbytes += _nbytes(layer.mlp.gate_up) + _nbytes(layer.mlp.down)
    windows = getattr(config, "windows", ()) or (config.sliding_window,) * config.num_layers
    states = 0
    if isinstance(config, Qwen35Config):  # layers with states have no keys
        windows = windows[sum(config.linear) :]
        shapes = config.states_of(model.dtype)
        states = sum(config.linear) * sum(math.prod(s) * dtype.itemsize for s, dtype in shapes)
    keys = sum(min(window or context, context) for window in windows)
    return nbytes + batch * (2 * states + keys * 2 * config.kv_dim * model.dtype.itemsize)


def copy_rate(device: torch.device) -> float:
    """Bytes that a CUDA device reads and writes in a second of a large copy, measured."""
    nbytes = min(_COPIED_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in "ab")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(_COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * _COPIES * nbytes / (begin.elapsed_time(end) / 1e3)


def _nbytes(weight: Any) -> float:
    """Bytes of a matrix, packed or not, or of the matrices of a linear layer."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    if hasattr(weight, "blocks"):
        return weight.blocks.nbytes
    if hasattr(weight, "parts"):
        return sum(map(_nbytes, weight.parts))
    return _nbytes(weight.weight)
