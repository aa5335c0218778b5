"""What a run of a chat template may use up.

A run has :data:`FUEL` units. One unit pays for one node of the program executed, one element of a
container walked through, or 128 characters handled. Payment comes before the work, so what is left
undone when the fuel is out is the expensive part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError

FUEL = 2_000_000
CHARS_PER_UNIT = 128
MAX_INT_BITS = 4096
MAX_NESTING = 64
# Values a tuple holds, with those of tuples in it: a tuple can be a key, and hashing walks it all.
MAX_TUPLE = 100

_LISTED: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


class LimitExceeded(TemplateError):
    """The program asked for more than a chat template needs."""


class Meter:
    """The fuel of one run, and the limits on single values.

    Args:
        max_chars: longest string.
    """

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.fuel = FUEL

    def refill(self) -> None:
        self.fuel = FUEL

    def burn(self, units: int) -> None:
        self.fuel -= units
        if self.fuel < 0:
            raise LimitExceeded("the template does more work than a chat template needs")

    def bound(self, num_chars: int) -> None:
        """Pay for a string about to be made."""
        if num_chars > self.max_chars:
            raise LimitExceeded(f"a string is longer than {self.max_chars} characters")
        self.burn(1 + num_chars // CHARS_PER_UNIT)

    def walk(self, *values: Any, factor: int = 1) -> None:
        """Pay for going through ``values`` and all they hold, each time they hold it."""
        self._walk(values, factor, 0)

    def _walk(self, values: Collection[Any], factor: int, depth: int) -> None:
        if depth > MAX_NESTING:
            raise LimitExceeded(f"values are nested more than {MAX_NESTING} deep")
        self.burn(factor * len(values))
        for value in values:
            if isinstance(value, str):
                if len(value) >= CHARS_PER_UNIT:
                    self.burn(factor * (len(value) // CHARS_PER_UNIT))
            elif isinstance(value, range):
                self.burn(factor * len(value))
            elif isinstance(value, _LISTED):
                self._walk(value, factor, depth + 1)
            elif isinstance(value, Mapping):
                self._walk(value.keys(), factor, depth + 1)
                self._walk(value.values(), factor, depth + 1)

    def result(self, value: Any) -> Any:
        """Pay for a new value and return it, an iterator as a list: every value has a size."""
        if isinstance(value, Iterator):
            return [*self.counted(value)]
        if isinstance(value, str):
            self.bound(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.burn(len(value))
            if isinstance(value, tuple) and _num_values(value) > MAX_TUPLE:
                raise LimitExceeded(f"a tuple holds more than {MAX_TUPLE} values")
        else:
            self.integers(value)
        return value

    def counted(self, values: Iterable[Any], cost: int = 1) -> Iterator[Any]:
        """The values, each paid for when it is taken."""
        for value in values:
            self.burn(cost)
            yield value

    def integers(self, *values: Any) -> None:
        """Refuse integers on which a single operation could take long."""
        for value in values:
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise LimitExceeded(f"an integer has more than {MAX_INT_BITS} bits")


def _num_values(value: tuple) -> int:
    """How many values a tuple holds, with those of tuples in it; counts no further than needed."""
    count, stack = 0, [value]
    while stack and count <= MAX_TUPLE:
        item = stack.pop()
        if isinstance(item, tuple):
            count += len(item)
            stack.extend(item[:MAX_TUPLE])
    return count
