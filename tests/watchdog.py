"""A thread that ends a process which hangs, as a kernel does that waits for a wrong phase."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

HUNG = 2


class Watchdog:
    """Ends the process with status 2, and says what it waited for, unless told of progress.

    Args:
        seconds: how long one wait may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._names: Sequence[str] = ()
        self._deadline = float("inf")
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def expect(self, names: Sequence[str]) -> None:
        """These calls are to end within the time."""
        with self._changed:
            self._names, self._deadline = names, time.monotonic() + self._seconds
            self._changed.notify()

    def rest(self) -> None:
        """Nothing is awaited."""
        with self._changed:
            self._names, self._deadline = (), float("inf")
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_over:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._end()
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _end(self) -> None:
        """Leave without waiting for the device, which may never be done."""
        waited = f"{self._seconds:.0f} s" if self._seconds >= 1 else f"{self._seconds} s"
        sys.stderr.write(f"hangs for {waited}; in flight: {', '.join(self._names)}\n")
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(HUNG)
