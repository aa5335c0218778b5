"""What a conversion did, and how it is undone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ferrum_triton.errors import FerrumError


class Replaced(NamedTuple):
    """A module that was replaced: its name, its class, and what stands there now."""

    name: str
    was: str
    now: str


class Left(NamedTuple):
    """A module that was left alone, and why."""

    name: str
    was: str
    reason: str


@dataclass
class Report:
    """What :func:`convert` did with a model; ``print`` shows it, layers of one kind in one line.

    Attributes:
        replaced: the modules that were replaced.
        left: those that might have been and were not.
        attention: the attention that the model uses now.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    attention: str
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    def undo(self) -> None:
        """Give the model back the modules and the attention that it had.

        Raises:
            FerrumError: it was undone before.
        """
        if self._undo is None:
            raise FerrumError("this conversion was undone before; convert the model again")
        undo, self._undo = self._undo, None
        undo()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} modules replaced"]
        lines += _grouped((r.name, f"{r.was} -> {r.now}") for r in self.replaced)
        lines += [f"{len(self.left)} modules left alone"]
        lines += _grouped((name, f"{was}: {reason}") for name, was, reason in self.left)
        return "\n".join([*lines, f"attention: {self.attention}"])


def describe(module: nn.Module) -> str:
    """A module in a few words: its class, and the kinds of its packed weights."""
    kinds = dict.fromkeys(getattr(module, "_kinds", {}).values())
    return " ".join([type(module).__name__, *kinds])


def _grouped(entries) -> list[str]:
    """A line for each kind of entry; numbers of layers count as one."""
    groups: dict[tuple[str, str], int] = {}
    for name, text in entries:
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name), text
        groups[key] = groups.get(key, 0) + 1
    width = max((len(name) for name, _ in groups), default=0)
    return [
        f"  {name:{width}}  {text}" + (f"  x {count}" if count > 1 else "")
        for (name, text), count in groups.items()
    ]
