"""Values of a kernel: blocks and scalars as torch tensors, with Triton's types and its promotions.

A value does not change. Layouts are carried along and not computed with.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.language import SliceLayout
from triton.language import core as tl
from triton.language.semantic import TritonSemantic

from ferrum_triton.gluon_emulator.errors import Misuse

TORCH_TYPES = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint8: torch.uint8,
    tl.uint16: torch.uint16,
    tl.uint32: torch.uint32,
    tl.uint64: torch.uint64,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
TRITON_TYPES = {known: dtype for dtype, known in TORCH_TYPES.items()}

# torch converts these and computes little with them; numpy computes with all of them.
_THROUGH_NUMPY = (torch.uint16, torch.uint32, torch.uint64)
_LARGEST = {torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0}


def torch_type(dtype: Any) -> torch.dtype:
    """The torch dtype that holds values of a Triton type; addresses are 64-bit integers."""
    if dtype.is_ptr():
        return torch.int64
    if dtype not in TORCH_TYPES:
        raise Misuse(f"values of {dtype} are not emulated")
    return TORCH_TYPES[dtype]


class Value:
    """A block or a scalar.

    ``base`` is the tensor that pointers were derived from, ``product`` an asynchronous product
    that nobody has waited for, whose result must not be used yet.
    """

    __slots__ = ("_data", "base", "dtype", "layout", "product")

    def __init__(
        self, data: Tensor, dtype: Any, layout: Any = None, base: Any = None, product: Any = None
    ) -> None:
        self._data, self.dtype, self.layout = data, dtype, layout
        self.base, self.product = base, product

    @property
    def data(self) -> Tensor:
        if self.product is not None:
            raise Misuse(
                f"the result of {self.product} is used before a warpgroup_mma_wait handed it back: "
                "pass it through `deps` of a wait that leaves few enough products outstanding"
            )
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    @property
    def numel(self) -> int:
        return self._data.numel()

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape, self.layout)

    def like(self, data: Tensor, dtype: Any = None, layout: Any = None) -> Value:
        """Another value in this one's type and layout, unless told otherwise."""
        layout = self.layout if layout is None else layout
        return Value(data, dtype or self.dtype, layout, self.base)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Value:
        return cast(self, dtype, fp_downcast_rounding, bitcast)

    def __index__(self) -> int:
        self._only_scalar("an index")
        return int(self.data.item())

    __int__ = __index__

    def __bool__(self) -> bool:
        self._only_scalar("a condition")
        return bool(self.data.item())

    def __float__(self) -> float:
        self._only_scalar("a number")
        return float(self.data.item())

    def _only_scalar(self, use: str) -> None:
        if self._data.ndim:
            raise Misuse(f"a block of shape {self.shape} is taken for {use}")

    def __getitem__(self, item: Any) -> Value:
        value = self
        for axis, each in enumerate(item if isinstance(item, tuple) else (item,)):
            if each is None:
                value = expand_dims(value, axis)
            elif each != slice(None):
                raise Misuse(f"blocks are indexed by None and : alone, not {each!r}")
        return value

    def __repr__(self) -> str:
        return f"Value({self._data}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        from ferrum_triton.gluon_emulator.twins import member

        return member(self, name)

    def __neg__(self) -> Value:
        return sub(constant(0, self.dtype), self) if self.dtype.is_int() else self.like(-self.data)

    def __invert__(self) -> Value:
        ones = constant(True if self.dtype == tl.int1 else -1, self.dtype)
        return bitwise("xor", self, ones)

    __hash__ = None  # type: ignore[assignment]


class Type:
    """What ``value.type`` tells."""

    def __init__(self, scalar: Any, shape: tuple[int, ...], layout: Any) -> None:
        self.scalar, self.shape, self.layout = scalar, shape, layout
        self.element_ty = scalar.element_ty if scalar.is_ptr() and not shape else scalar

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.scalar.primitive_bitwidth // 8

    def is_block(self) -> bool:
        return bool(self.shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scalar, name)


def type_of_number(number: Any) -> Any:
    """The type that Triton gives a constant."""
    if isinstance(number, bool):
        return tl.int1
    if isinstance(number, numbers.Integral):
        for dtype in (tl.int32, tl.uint32, tl.int64, tl.uint64):
            if dtype.get_int_min_value() <= number <= dtype.get_int_max_value():
                return dtype
        raise Misuse(f"{number} fits in no integer type")
    size = abs(number)
    fits = math.isinf(size) or size == 0 or size != size or 2**-126 <= size <= (2 - 2**-23) * 2**127
    return tl.float32 if fits else tl.float64


def constant(number: Any, dtype: Any) -> Value:
    """A scalar of a type, from a Python number."""
    known = torch_type(dtype)
    if dtype.is_int() and dtype != tl.int1:
        bits = dtype.primitive_bitwidth
        number = int(number) & ((1 << bits) - 1)
        if dtype.is_int_signed() and number >> (bits - 1):
            number -= 1 << bits
    if known in _THROUGH_NUMPY:
        name = str(known)[6:]
        return Value(torch.from_numpy(np.array(number, dtype=name)), dtype)
    return Value(torch.tensor(number, dtype=known), dtype)


def to_value(x: Any) -> Value:
    """A number as the scalar that Triton makes of it; a value as it is."""
    if isinstance(x, Value):
        return x
    if isinstance(x, tl.constexpr):
        x = x.value
    if not isinstance(x, numbers.Number):
        raise Misuse(f"a number or a block is needed, not {x!r}")
    return constant(x, type_of_number(x))


def cast(x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Value:
    x = to_value(x)
    if fp_downcast_rounding not in (None, "rtne"):
        raise Misuse(f"rounding {fp_downcast_rounding!r} is not emulated")
    known, data = torch_type(dtype), x.data
    if x.dtype == dtype:
        return x
    if dtype.is_ptr() or x.dtype.is_ptr():
        base = x.base if dtype.is_ptr() else None
        return Value(data.to(torch.int64), dtype, x.layout, base)
    if bitcast:
        return x.like(data.contiguous().view(known), dtype)
    return x.like(_converted(data, known), dtype)


def _converted(data: Tensor, known: torch.dtype) -> Tensor:
    if known in _LARGEST:
        # As cvt.satfinite: too large a number becomes the largest, and a NaN stays one.
        data, most = data.float(), _LARGEST[known]
        return data.clamp(-most, most).to(known)
    if known in _THROUGH_NUMPY or data.dtype in _THROUGH_NUMPY:
        array = data.numpy() if data.dtype not in (torch.bfloat16,) else data.float().numpy()
        if known in (torch.bfloat16, torch.float16):
            return torch.from_numpy(np.asarray(array.astype(np.float64))).to(known)
        if array.dtype.kind == "f" and known in _THROUGH_NUMPY:
            array = array.astype(np.int64)
        return torch.from_numpy(np.asarray(array.astype(str(known).removeprefix("torch."))))
    return data.to(known)


_semantic = TritonSemantic(None)


@functools.cache
def promoted(a: Any, a_number: bool, b: Any, b_number: bool, division: bool) -> Any:
    try:
        return _semantic.computation_type_impl(a, a_number, b, b_number, division)
    except TypeError as error:
        raise Misuse(str(error)) from None


def pair(a: Any, b: Any, division: bool = False) -> tuple[Value, Value]:
    """Both operands in the type in which Triton computes, broadcast to one shape."""
    a_number, b_number = isinstance(a, numbers.Number), isinstance(b, numbers.Number)
    x, y = to_value(a), to_value(b)
    if x.dtype.is_ptr() or y.dtype.is_ptr():
        return broadcast(x, y)
    dtype = promoted(x.dtype, a_number, y.dtype, b_number, division)
    x = constant(a, dtype) if a_number else cast(x, dtype)
    y = constant(b, dtype) if b_number else cast(y, dtype)
    return broadcast(x, y)


def broadcast(a: Any, b: Any) -> tuple[Value, Value]:
    x, y = to_value(a), to_value(b)
    if x._data.shape == y._data.shape:
        return x, y
    if x._data.ndim and y._data.ndim and x._data.ndim != y._data.ndim:
        raise Misuse(f"shapes {x.shape} and {y.shape} have different ranks")
    try:
        shape = torch.broadcast_shapes(x._data.shape, y._data.shape)
    except RuntimeError:
        raise Misuse(f"shapes {x.shape} and {y.shape} do not broadcast") from None
    layout = x.layout if x._data.ndim else y.layout
    return (
        Value(x.data.expand(shape), x.dtype, layout, x.base),
        Value(y.data.expand(shape), y.dtype, layout, y.base),
    )


def compute(kind: str, x: Tensor, y: Tensor) -> Tensor:
    """An operation on tensors of one dtype."""
    torch_function, numpy_function = _OPERATIONS[kind]
    if x.dtype in _THROUGH_NUMPY:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(numpy_function(x.numpy(), y.numpy())))
    if x.dtype in _LARGEST:
        result = torch_function(x.float(), y.float())
        return result if result.dtype == torch.bool else _converted(result, x.dtype)
    return torch_function(x, y)


def _divided(x: Tensor, y: Tensor) -> Tensor:
    # A lane that divides by nought and is masked later must not stop the others.
    return torch.div(x, torch.where(y == 0, 1, y), rounding_mode="trunc")


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return torch.fmod(x, y)
    return torch.fmod(x, torch.where(y == 0, 1, y))


_OPERATIONS: dict[str, tuple[Callable, Callable]] = {
    "add": (torch.add, np.add),
    "sub": (torch.sub, np.subtract),
    "mul": (torch.mul, np.multiply),
    "div": (torch.true_divide, np.true_divide),
    "floordiv": (_divided, lambda x, y: x // np.where(y == 0, 1, y).astype(y.dtype)),
    "mod": (_remainder, lambda x, y: x % np.where(y == 0, 1, y).astype(y.dtype)),
    "and": (torch.bitwise_and, np.bitwise_and),
    "or": (torch.bitwise_or, np.bitwise_or),
    "xor": (torch.bitwise_xor, np.bitwise_xor),
    "shl": (torch.bitwise_left_shift, np.left_shift),
    "shr": (torch.bitwise_right_shift, np.right_shift),
    "eq": (torch.eq, np.equal),
    "ne": (torch.ne, np.not_equal),
    "lt": (torch.lt, np.less),
    "le": (torch.le, np.less_equal),
    "gt": (torch.gt, np.greater),
    "ge": (torch.ge, np.greater_equal),
    # Of a number and a NaN, the number, as PTX's min and max.
    "min": (lambda x, y: _extreme(torch.fmin, torch.minimum, x, y), np.minimum),
    "max": (lambda x, y: _extreme(torch.fmax, torch.maximum, x, y), np.maximum),
}


def _extreme(of_floats: Callable, of_integers: Callable, x: Tensor, y: Tensor) -> Tensor:
    return (of_floats if x.dtype.is_floating_point else of_integers)(x, y)


def _arithmetic(kind: str, a: Any, b: Any, division: bool = False) -> Value:
    x, y = pair(a, b, division)
    if x.dtype == tl.int1:
        raise Misuse(f"{kind} of two int1: cast them first")
    return x.like(compute(kind, x.data, y.data))


def add(a: Any, b: Any, sanitize_overflow: bool = True) -> Value:
    x, y = pair(a, b)
    if y.dtype.is_ptr():
        x, y = y, x
    if x.dtype.is_ptr():
        return _moved(x, y, 1)
    return _arithmetic("add", a, b)


def sub(a: Any, b: Any, sanitize_overflow: bool = True) -> Value:
    x, y = pair(a, b)
    return _moved(x, y, -1) if x.dtype.is_ptr() else _arithmetic("sub", a, b)


def _moved(pointer: Value, by: Value, sign: int) -> Value:
    if not by.dtype.is_int():
        raise Misuse(f"a pointer is moved by {by.dtype}; integers alone do that")
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    steps = _converted(by.data, torch.int64)
    return Value(pointer.data + steps * (size * sign), pointer.dtype, pointer.layout, pointer.base)


def mul(a: Any, b: Any, sanitize_overflow: bool = True) -> Value:
    return _arithmetic("mul", a, b)


def truediv(a: Any, b: Any) -> Value:
    x, y = pair(a, b, division=True)
    if x.dtype.is_int():
        x, y = cast(x, tl.float32), cast(y, tl.float32)
    return x.like(compute("div", x.data, y.data))


def floordiv(a: Any, b: Any) -> Value:
    x, y = pair(a, b, division=True)
    if not x.dtype.is_int():
        raise Misuse(f"// of {x.dtype}")
    return x.like(compute("floordiv", x.data, y.data))


def mod(a: Any, b: Any) -> Value:
    return _arithmetic("mod", a, b, division=True)


def bitwise(kind: str, a: Any, b: Any) -> Value:
    x, y = pair(a, b)
    if not x.dtype.is_int():
        raise Misuse(f"{kind} of {x.dtype}: bits of integers alone")
    return x.like(compute(kind, x.data, y.data))


def compare(kind: str, a: Any, b: Any) -> Value:
    x, y = pair(a, b)
    return Value(compute(kind, x.data, y.data), tl.int1, x.layout)


def _operators() -> None:
    binary: dict[str, Callable[..., Value]] = {"add": add, "sub": sub, "mul": mul}
    binary |= {"truediv": truediv, "floordiv": floordiv}
    binary |= {"mod": mod, "lshift": _of("shl"), "rshift": _of("shr")}
    binary |= {name: _of(name) for name in ("and", "or", "xor")}
    for name, function in binary.items():
        setattr(Value, f"__{name}__", function)
        setattr(Value, f"__r{name}__", _swapped(function))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Value, f"__{name}__", functools.partialmethod(_compared, name))


def _of(kind: str) -> Callable[[Any, Any], Value]:
    return lambda a, b: bitwise(kind, a, b)


def _swapped(function: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
    return lambda a, b: function(b, a)


def _compared(a: Value, kind: str, b: Any) -> Value:
    return compare(kind, a, b)


_operators()


def expand_dims(x: Value, axis: Any) -> Value:
    for each in sorted(axis) if isinstance(axis, (list, tuple)) else [axis]:
        layout = x.layout.parent if isinstance(x.layout, SliceLayout) else None
        x = Value(x.data.unsqueeze(int(each)), x.dtype, layout, x.base)
    return x
