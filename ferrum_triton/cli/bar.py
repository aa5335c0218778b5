"""How far a command has come, while it runs."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ferrum_triton.cli.terminal import printable


class Bar:
    """A progress bar, where standard error is a terminal and what it counts takes a second.

    It is drawn each second, with the time taken, whether or not there is progress to tell.
    """

    def __init__(self, title: str, unit: str, quiet: bool) -> None:
        self._title, self._unit = printable(title), unit
        # None: shown on a terminal only; standard error is None where it is closed.
        self._disable = True if quiet or sys.stderr is None else None
        self._bar: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # Never drawn by the calls: the thread does it, and from then on there is one to clear.
            options = {"leave": False, "delay": 1e9, "disable": self._disable}
            self._bar = tqdm(total=total, desc=self._title, unit=self._unit, **options)
            self._thread.start()
        self._bar.n, self._bar.total = done, total

    def _draw(self) -> None:
        while not self._closed.wait(1.0) and not self._bar.disable:
            self._bar.delay = 0
            try:
                with self._bar.get_lock():  # which refresh keeps for ever where it cannot draw
                    self._bar.refresh(nolock=True)
            except Exception:
                self._bar.disable = True

    def close(self) -> None:
        if self._bar is not None:
            self._closed.set()
            self._thread.join()
            self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()
