"""How long work takes on a device."""

from __future__ import annotations

import time
from typing import Any

import torch

from ferrum_triton.runtime.context import Context


class Timer:
    """Milliseconds between two points of a stream: events on CUDA, a clock elsewhere.

    Recording on CUDA does not wait, so a timed section runs as it does untimed. Elsewhere the
    device is synchronised before the clock is read.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._start: Any = None  # an event on CUDA, seconds elsewhere
        self._end: Any = None

    def record_start(self) -> None:
        """Mark the beginning; forgets an earlier end."""
        self._start, self._end = self._now(), None

    def record_end(self) -> None:
        """Mark the end."""
        self._end = self._now()

    def elapsed_ms(self) -> float:
        """Milliseconds from start to end, or 0.0 where either is missing. Waits for the end."""
        if self._start is None or self._end is None:
            return 0.0
        if isinstance(self._end, float):
            return (self._end - self._start) * 1e3
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _now(self) -> torch.cuda.Event | float:
        if self.context.stream is None:
            self.context.sync()
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.context.stream)
        return event
