"""A Jinja environment in which a program can neither escape nor run on.

Escape: Jinja's immutable sandbox knows what is forbidden; on top of it, only what is listed here is
allowed. Attributes other than those of :data:`_METHODS`, of namespaces and of loops do not exist;
only the functions given here, macros and the listed methods can be called; values are plain data.

Running on: work is paid from the :class:`~ferrum_triton.files.chat_meter.Meter` before it is done.

- A round of a loop costs the number of nodes of the loop, a macro call that of the template's
  longest macro. Jinja has no other way to execute a node twice.
- Operators, filters, tests, comparisons, method calls and output pay for the data they go through,
  containers with all they hold.
- Whatever can write more than it reads (repeating, replacing, joining, padding, powers) is bounded
  beforehand by the size of its result.

Why not Jinja's own sandbox in a child process under limits of time and memory: a render takes
0.6 ms here and 290 ms with a child started for it. Of the 135 hostile templates in
tests/test_chat_hostile.py, only the limit on the child's address space stops 30, and macOS does not
enforce it, nor has Windows one; 33 run until they are killed; and 16 are rendered, using up to half
a gigabyte and some seconds, or what no chat template needs.
"""

from __future__ import annotations

import functools
import html
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from ferrum_triton.files.chat_meter import (
    CHARS_PER_UNIT,
    MAX_INT_BITS,
    MAX_NESTING,
    LimitExceeded,
    Meter,
)
from ferrum_triton.files.chat_syntax import (
    CONCAT,
    KEY,
    LITERAL,
    LOOP,
    OPERAND,
    GenerationTag,
    longest_macro,
    meter_syntax,
)

MAX_RANGE = 100_000
MAX_INDENT = 32
MAX_DIGITS = 15
MAX_WIDTH = 999
# What a call of a filter, test, function or method costs by itself.
_CALL = 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        """capitalize count endswith find format index isalnum isalpha isascii isdecimal isdigit
        islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
        removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith
        strip swapcase title upper"""
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
}
_LOOP_ATTRIBUTES = _words(
    """changed cycle depth depth0 first index index0 last length nextitem previtem revindex
    revindex0"""
)
# Filters taken from Jinja as they are; those that could amplify are written anew below.
_FILTERS = _words(
    """abs capitalize count d default dictsort first float groupby int items join last length list
    lower map max min reject rejectattr reverse select selectattr sort string title trim unique
    upper"""
)
_CONSTANT_TIME = _words("count d default first last length")
_ELEMENTWISE = _words(
    """dictsort groupby items join list map max min reject rejectattr reverse select selectattr
    sort sum unique"""
)
_SLOW = _words("dictsort groupby max min sort title unique")
_TOO_WIDE = re.compile(r"\*|[0-9]{4}")


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template. Not thread-safe: it keeps the meter of the run.

    Args:
        max_chars: longest string, and longest output.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, max_chars: int) -> None:
        self.meter = Meter(max_chars)
        self._macro_cost = 1
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=self._walked,
        )
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = frozenset(self.globals.values())
        known: Any = self.tests
        self.tests = {name: self._metered_test(test) for name, test in known.items()}
        filters = {name: FILTERS[name] for name in _FILTERS} | {
            "tojson": self._tojson,
            "replace": self._replace,
            "indent": self._indent,
            "round": _round,
            "sum": self._sum,
            "safe": str,
            "e": _escape,
            "escape": _escape,
        }
        self.filters = {name: self._metered_filter(name, fn) for name, fn in filters.items()} | {
            LOOP: lambda values, cost: _Rounds(self.meter, values, cost),
            CONCAT: self._concatenate,
            OPERAND: self._walked,
            LITERAL: self.meter.result,
            KEY: _key,
        }

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render ``template`` with a full tank.

        Raises:
            Exception: whatever the program runs into.
        """
        self.meter.refill()
        parts, length = [], 0
        for part in template.generate(**variables):
            length += len(part)
            if length > self.meter.max_chars:
                raise LimitExceeded(f"the output passes {self.meter.max_chars} characters")
            parts.append(part)
        return "".join(parts)

    # Hooks of Jinja.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # Constant expressions are evaluated while compiling.
        self.meter.refill()
        tree = super()._parse(source, name, filename)
        self._macro_cost = longest_macro(tree)
        tree = meter_syntax(tree)
        tree.set_environment(self)
        return tree

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        parts = list(parts)
        self.meter.bound(sum(map(len, parts)))
        return "".join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, LoopContext):
            return attr in _LOOP_ATTRIBUTES
        return isinstance(obj, _Namespace) or attr in _METHODS.get(type(obj), frozenset())

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _key(argument))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, types.BuiltinMethodType) or type(value.__self__) is not str:
            return None
        return _Format(self, value.__self__) if value.__name__ == "format" else None

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("#"):
            raise SecurityError(f"there is no filter {name!r}")
        return super().call_filter(name, *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, obj = __self, __obj
        self.meter.burn(_CALL)
        self.meter.walk(args, kwargs)
        if isinstance(obj, Macro):
            self.meter.burn(self._macro_cost)
        elif isinstance(obj, types.BuiltinMethodType):
            self._pay_method(obj.__self__, obj.__name__, args)
        elif not self._is_function(obj):
            raise SecurityError(f"{type(obj).__name__!r} objects cannot be called")
        return self.meter.result(super().call(__context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        meter.integers(left, right)
        if operator == "%" and isinstance(left, str):
            self._pay_percent(left, right)
        elif operator == "*":
            self._pay_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > MAX_INT_BITS:
                raise LimitExceeded(f"a power has more than {MAX_INT_BITS} bits")
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            meter.bound(len(left) + len(right))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            meter.burn(len(left) + len(right))
        return meter.result(super().call_binop(context, operator, left, right))

    # What calls and operators cost.

    def _is_function(self, obj: Any) -> bool:
        if isinstance(obj, types.MethodType):
            return isinstance(obj.__self__, LoopContext)
        if isinstance(obj, _Format):
            return True
        return isinstance(obj, (types.FunctionType, type)) and obj in self._functions

    def _pay_method(self, owner: Any, name: str, args: tuple[Any, ...]) -> None:
        if name not in _METHODS.get(type(owner), frozenset()):
            raise SecurityError(f"{name!r} of {type(owner).__name__!r} is not available")
        if isinstance(owner, dict):
            return
        self.meter.walk(owner)
        if name in ("split", "rsplit") and args and isinstance(args[0], str):
            self.meter.burn(owner.count(args[0]) if args[0] else 0)
        elif name in ("split", "rsplit", "splitlines"):
            self.meter.burn(len(owner) // 2)
        elif name == "join" and args and isinstance(args[0], Sized):
            self.meter.bound(len(owner) * len(args[0]))
        elif name == "replace" and isinstance(owner, str):
            self._bound_replacement(owner, *args[:2])

    def _bound_replacement(self, text: str, old: Any = None, new: Any = None) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.meter.bound(len(text) + text.count(old) * len(new))

    def _pay_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and times > 0:
                if isinstance(value, str):
                    self.meter.bound(len(value) * times)
                elif isinstance(value, (list, tuple)):
                    self.meter.burn(len(value) * times)

    def _pay_percent(self, pattern: str, values: Any) -> None:
        if _TOO_WIDE.search(pattern):
            raise LimitExceeded(f"a format asks for more than {MAX_WIDTH} characters")
        places = pattern.count("%")
        self.meter.bound(len(pattern) + places * MAX_WIDTH)
        # A name can be printed at every place. A character may be written as \U0001f600.
        self.meter.walk(values, factor=10 * (places if isinstance(values, Mapping) else 1))

    # Filters and tests.

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters take the context before the value.
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0
        factor = 16 if name in _SLOW else 1
        meter = self.meter

        def metered(*args: Any, **kwargs: Any) -> Any:
            value, options = args[skip], (*args[skip + 1 :], *kwargs.values())
            meter.burn(_CALL)
            meter.walk(options)
            if name not in _CONSTANT_TIME:
                meter.walk(value, factor=factor)
            if name in _ELEMENTWISE and isinstance(value, Sized):
                # Strings count by characters. The dots of "a.b.c" are steps for each element.
                steps = sum(o.count(".") + o.count(",") for o in options if isinstance(o, str))
                meter.burn(len(value) * (1 + steps))
                if name == "join" and options:
                    meter.bound(len(str(options[0])) * len(value))
            return meter.result(function(*args, **kwargs))

        if skip:
            metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any) -> Any:
            self.meter.burn(1)
            # With an argument a test compares; without, it looks at the value only.
            if len(args) > skip + 1:
                self.meter.walk(args[skip:])
            return function(*args)

        return metered

    def _walked(self, value: Any) -> Any:
        self.meter.walk(value)
        return value

    def _concatenate(self, values: list[Any]) -> str:
        self.meter.walk(values)
        return self.concat(map(str, values))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # A character may be written as \u0000, an element with an indent and two separators.
        factor = 6
        if indent is not None:
            if type(indent) is not int or not 0 <= indent <= MAX_INDENT:
                raise LimitExceeded(f"an indent is not from 0 to {MAX_INDENT}")
            factor += 1 + indent * MAX_NESTING // CHARS_PER_UNIT
        if separators is not None:
            factor += sum(len(text) for text in separators)
        self.meter.walk(value, factor=factor)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(value), str(old), str(new)
        self._bound_replacement(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        padding = width if isinstance(width, str) else " " * min(width, MAX_INDENT + 1)
        if len(padding) > MAX_INDENT:
            raise LimitExceeded(f"an indent is more than {MAX_INDENT} characters")
        text = str(value)
        self.meter.burn(len(text) // 8)
        # The line break at the end opens a last, empty line.
        lines = f"{text}\n".splitlines()
        self.meter.bound(len(text) + len(lines) * len(padding))
        rest = [padding + line if line or blank else line for line in lines[1:]]
        return "\n".join([padding + lines[0] if first else lines[0], *rest])

    def _sum(
        self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0
    ) -> Any:
        total = start
        for value in values:
            term = value if attribute is None else self.getitem(value, attribute)
            total = self.call_binop(None, "+", total, term)
        return total


class _Rounds:
    """The values of a loop; a round costs what the loop's body does."""

    def __init__(self, meter: Meter, values: Any, cost: int) -> None:
        self._meter, self._values, self._cost = meter, values, cost

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._meter.counted(self._values, self._cost)


class _Format:
    """The method ``format`` of one string."""

    def __init__(self, env: MeteredEnvironment, pattern: str) -> None:
        self._env, self._pattern = env, pattern

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        pattern, meter = self._pattern, self._env.meter
        meter.burn(len(pattern))
        meter.bound(len(pattern) + pattern.count("{") * MAX_WIDTH)
        return _Formatter(self._env).vformat(pattern, args, kwargs)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if _TOO_WIDE.search(format_spec):
            raise LimitExceeded(f"a format asks for more than {MAX_WIDTH} characters")
        self._env.meter.walk(value, factor=10)  # type: ignore[attr-defined]
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._env.meter.walk(value, factor=10)  # type: ignore[attr-defined]
        return super().convert_field(value, conversion)


class _Namespace(Namespace):
    """A namespace that does not print what it holds, which may be without end."""

    def __repr__(self) -> str:
        return "<namespace>"


def _key(value: Any) -> Any:
    """``value`` as a key or subscript; tuples would have to be paid for at every look-up."""
    if isinstance(value, tuple):
        raise SecurityError("keys and subscripts must be strings or numbers")
    return value


def _range(*args: int) -> range:
    values = range(*args)
    try:
        length = len(values)
    except OverflowError:
        length = MAX_RANGE + 1
    if length > MAX_RANGE:
        raise LimitExceeded(f"a range is longer than {MAX_RANGE}")
    return values


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 100 or _TOO_WIDE.search(layout):
        raise LimitExceeded("a date format is too long")
    return datetime.now().strftime(layout)


def _escape(value: Any) -> str:
    return html.escape(str(value))


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if type(precision) is not int or not 0 <= precision <= MAX_DIGITS:
        raise LimitExceeded(f"a precision is not from 0 to {MAX_DIGITS}")
    return FILTERS["round"](value, precision, method)
