"""Typed, bounded access to hyperparameters from outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrum_triton.errors import FileError

# Larger than any model of the family; a hostile file could otherwise ask for any amount of memory.
MAX_DIM = 1 << 24


class Keys:
    """Typed, bounded access to a mapping from outside; None in it counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values, self._path, self._prefix = values, path, prefix

    def _get(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        value = self._values.get(self._prefix + name)
        value = default if value is None else value
        if value is None:
            raise FileError(self._path, f"{self._prefix}{name} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return value

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(name, default, (int,))
        if not least <= value <= MAX_DIM:
            reason = f"{self._prefix}{name} is {value}, not in {least} to {MAX_DIM}"
            raise FileError(self._path, reason)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default, (int, float))
        if not -1e30 < value < 1e30:  # also false for NaN; an int may be too large for a float
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(self._prefix + name)
        if value is not None and not isinstance(value, bool):
            raise FileError(self._path, f"{self._prefix}{name} is {value!r:.80}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        return self._get(name, default, (str,))
