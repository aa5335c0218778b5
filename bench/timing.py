"""Device time of one call, by CUDA-graph replay over inputs that a cache cannot hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Three times an H200's L2: by the time inputs come round again, they have left it.
COLD_BYTES = 180 << 20
MAX_SETS = 8192
# Device time one replay should take, so that the events' own resolution does not count.
REPLAY_US = 4000.0
REPLAYS = 15


def copies_of(arguments: dict[str, Any], nbytes: int) -> list[dict[str, Any]]:
    """Enough copies of a call's tensors to walk through more memory than the cache has.

    A tensor larger than that of which a call reads a part (an embedding table) is shared by all,
    and the ids into it are drawn anew.
    """
    count = min(max(math.ceil(COLD_BYTES / max(nbytes, 1)), 2), MAX_SETS)
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    shared = [t for t in tensors if t.numel() * t.element_size() > max(COLD_BYTES, 2 * nbytes)]

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or any(value is t for t in shared):
            return value
        if shared and not value.is_floating_point():
            return torch.randint_like(value, shared[0].shape[0])
        return value.clone()

    return [{name: copy(value) for name, value in arguments.items()} for _ in range(count)]


def device_us(call: Callable[..., Any], sets: Sequence[dict[str, Any]]) -> float:
    """Median microseconds of one call, over replays of a graph that calls once with each set."""
    call(**sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []  # every output has memory of its own, as in a model
    with torch.cuda.graph(graph):
        kept.extend(call(**arguments) for arguments in sets)
    graph.replay()
    once = _replay_us(graph, 1)
    times = max(1, round(REPLAY_US / once))
    return statistics.median(_replay_us(graph, times) for _ in range(REPLAYS)) / len(sets)


def _replay_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times
