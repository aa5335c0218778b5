"""Python twins of inline assembly, which the emulator cannot read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triton.runtime.jit import JITFunction

from ferrum_triton.gluon_emulator.errors import Misuse

_TWINS: dict[Any, Callable] = {}


def twin_of(assembly: str | JITFunction) -> Callable[[Callable], Callable]:
    """Register a Python twin of inline assembly, beside the kernel that holds it.

    Args:
        assembly: its text, or the Gluon function that wraps it. The twin takes torch tensors for
            the operands, or for the function's arguments, and returns one, or a tuple of them.
    """

    def register(twin: Callable) -> Callable:
        _TWINS[_key(assembly)] = twin
        return twin

    return register


def known(more: Mapping[Any, Callable] | None) -> dict[Any, Callable]:
    """The registered twins, and those of one run, which go first."""
    return _TWINS | {_key(assembly): twin for assembly, twin in (more or {}).items()}


def _key(assembly: Any) -> Any:
    if isinstance(assembly, str):
        return " ".join(assembly.split())
    if not isinstance(assembly, JITFunction):
        raise Misuse(f"{assembly!r} is neither a Gluon function nor the text of assembly")
    return assembly
