"""Who knows of what: vector clocks, and the accesses that are held against them.

A clock says of each partition up to which of its epochs its accesses are known to have happened, of
each barrier how many of its phases are known to be complete, and which asynchronous operations are
known to be done. A partition's epoch ends when it publishes its clock, as an arrive does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import triton

_HERE = str(Path(__file__).parent)
_TRITON = str(Path(triton.__file__).parent)


class Clock:
    """Knowledge; ``done`` has a bit for each asynchronous operation."""

    __slots__ = ("done", "seen")

    def __init__(self, seen: dict[Any, int] | None = None, done: int = 0) -> None:
        self.seen, self.done = {} if seen is None else seen, done

    def copy(self) -> Clock:
        return Clock(dict(self.seen), self.done)

    def join(self, other: Clock) -> None:
        seen = self.seen
        for who, epoch in other.seen.items():
            if seen.get(who, -1) < epoch:
                seen[who] = epoch
        self.done |= other.done

    def of(self, who: Any) -> int:
        return self.seen.get(who, 0)


class Place:
    """A line of a kernel, and the function it is in."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code, self.line = code, line

    def __str__(self) -> str:
        path = Path(self.code.co_filename)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line} in {self.code.co_name}"


def here() -> Place:
    """The line of a kernel that is being executed, rather than the emulator's or Triton's own."""
    frame = inner = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TRITON)):
            return Place(frame.f_code, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Place(inner.f_code, inner.f_lineno)


class Access:
    """A read or write of a buffer: whose, in which epoch, and by what.

    ``bit`` is that of the asynchronous operation, or 0 of what is done once it is executed.
    ``generic`` accesses go through the generic proxy, as ordinary loads and stores do. ``let_go``
    is where the partition arrived at a barrier while this, a load, may still have been in flight.
    ``landed`` is the partition's epoch in which it knew that the load had ended.
    """

    __slots__ = (
        "atomic",
        "bit",
        "epoch",
        "generic",
        "landed",
        "let_go",
        "place",
        "what",
        "who",
        "writes",
    )

    def __init__(self, who: Any, what: str, writes: bool, bit: int, generic: bool) -> None:
        self.who, self.what, self.writes, self.bit, self.generic = who, what, writes, bit, generic
        self.epoch, self.place, self.atomic = who.clock.of(who), here(), False
        self.let_go: Place | None = None
        self.landed: int | None = None

    def may_be_overtaken(self, clock: Clock) -> bool:
        """Whether this load was let go of, and a clock does not tell that it has ended."""
        if self.let_go is None:
            return False
        return self.landed is None or clock.of(self.who) < self.landed

    def known_to(self, clock: Clock) -> bool:
        if self.bit:
            return bool(clock.done & self.bit)
        return clock.of(self.who) >= self.epoch

    def __str__(self) -> str:
        return f"{self.what} at {self.place}, by {self.who}"
