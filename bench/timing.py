"""Device time of one call, by CUDA-graph replay over inputs that a cache cannot hold.

:func:`device_us` chains an op with itself. A kernel that triggers the next launch early then reads
its weights during the call before, which no decoder lets it do; :func:`added_us` times such a call
behind a launch of another op.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Three times an H200's L2: by the time inputs come round again, they have left it.
COLD_BYTES = 180 << 20
MAX_SETS = 8192
# An H200's L2, and what copies may take of its memory.
CACHE_BYTES, MOST_BYTES = 60 << 20, 32 << 30
# Device time one replay should take, so that the events' own resolution does not count.
REPLAY_US = 4000.0
REPLAYS = 15
EAGER_CALLS = 200


def copies_of(arguments: dict[str, Any], nbytes: int) -> list[dict[str, Any]]:
    """Enough copies of a call's tensors to walk through more memory than the cache has.

    A tensor larger than the cache of which a call reads a part (an embedding table) is shared by
    all, and the ids into it are drawn anew.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    shared = [t for t in tensors if t.nbytes > max(CACHE_BYTES, 2 * nbytes)]
    copied = sum(t.nbytes for t in tensors if not any(t is s for s in shared))
    most = min(MAX_SETS, max(MOST_BYTES // max(copied, 1), 2))
    count = min(max(math.ceil(COLD_BYTES / max(nbytes, 1)), 2), most)

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or any(value is t for t in shared):
            return value
        if shared and not value.is_floating_point():
            return torch.randint_like(value, shared[0].shape[0])
        return value.clone()

    return [{name: copy(value) for name, value in arguments.items()} for _ in range(count)]


class Replay:
    """A graph of some calls, one after the other."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        calls[0]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        self._num_calls = len(calls)
        with torch.cuda.graph(self._graph):
            # Every output has memory of its own, as in a model.
            self._outputs = [call() for call in calls]
        self._graph.replay()
        self._times = max(1, round(REPLAY_US / self._us(1)))

    def us(self) -> float:
        """Microseconds of one call, the mean of a few milliseconds of replays."""
        return self._us(self._times) / self._num_calls

    def _us(self, times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times


def device_us(call: Callable[..., Any], sets: Sequence[dict[str, Any]]) -> float:
    """Median microseconds of one call, over replays of a graph that calls once with each set."""
    replay = Replay([partial(call, **arguments) for arguments in sets])
    return statistics.median(replay.us() for _ in range(REPLAYS))


def eager_us(
    call: Callable[..., Any],
    sets: Sequence[dict[str, Any]],
    count: int = EAGER_CALLS,
    turns: int = REPLAYS,
) -> float:
    """Median microseconds of one call that no graph can hold, enqueued and awaited.

    Args:
        call: the call.
        sets: arguments of each call, taken in turn.
        count: calls that are timed together.
        turns: timings that the median is taken of.
    """
    times = []
    for turn in range(turns):
        calls = [sets[(turn * count + i) % len(sets)] for i in range(count)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for arguments in calls:
            call(**arguments)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def added_us(calls: Sequence[Callable[[], Any]], before: Sequence[Callable[[], Any]]) -> float:
    """Median microseconds that each of ``calls`` adds to the launch of ``before`` ahead of it."""

    def pair(first: Callable[[], Any], then: Callable[[], Any]) -> Any:
        first()
        return then()

    both = Replay([partial(pair, *two) for two in zip(before, calls, strict=True)])
    alone = Replay(before)
    # In turns, so that a change of the clock falls on both alike.
    return statistics.median(both.us() - alone.us() for _ in range(REPLAYS))
