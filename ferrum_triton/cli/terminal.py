"""What goes to the terminal: text of files and arguments that are not trusted, and failures."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_MAX_CHARACTERS = 1000


def printable(text: str) -> str:
    """``text`` on one line, what would steer a terminal written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(message: object) -> None:
    """Write one line to standard error, if there is one."""
    text = printable(str(message))
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS // 2]} … {text[-_MAX_CHARACTERS // 2 :]}"
    note(f"ferrum-triton: {text}")


def note(line: str = "") -> None:
    """The same, of words of our own."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


class _Notes(logging.Handler):
    """A logger's lines as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"[{printable(record.getMessage())}]")


@contextlib.contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """While it lasts, each Ctrl-C is listed, and then raised as Python does.

    A library may take the exception for a failure of its own: an import that is interrupted often
    ends in an ImportError, and is tried again another way. The list still tells of it.
    """
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen  # somebody else's to decide
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def noted(quiet: bool) -> Iterator[None]:
    """While it lasts, what the package logs is written as notes; of a quiet command, warnings."""
    log, notes = logging.getLogger("ferrum_triton"), _Notes()
    level, propagate = log.level, log.propagate
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.addHandler(notes)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.setLevel(level)
        log.propagate = propagate


@contextlib.contextmanager
def panics_untold() -> Iterator[None]:
    """While it lasts, nothing is written to standard error.

    A library in Rust that panics reports so by itself, beside the error that it raises.
    """
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    _lose(2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def accept_any_text() -> None:
    """Let standard output write escapes for characters that its encoding has not."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is left, while a failure can still be told."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_output() -> None:
    """Lose what could not be written, which Python would try once more as it ends."""
    with contextlib.suppress(OSError, ValueError):
        _lose(sys.stdout.fileno())


def _lose(descriptor: int) -> None:
    """Let what is written to a file descriptor from here on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
