"""Shortcuts through Triton's interpreter: the same values in less time.

Triton works out at every operation what its operands' types make of each other, casts, and spreads
numbers over whole blocks before numpy may add them up. Here what two types make of each other is
looked up, and numpy spreads. What a shortcut does not know, such as a division, a dtype that numpy
lacks or operands that Triton refuses, goes Triton's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_SIZES = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
NUMPY = {tl.int1: np.dtype(bool)} | {
    getattr(tl, f"{kind}{bits}"): np.dtype(f"{kind}{bits}")
    for kind, sizes in _SIZES.items()
    for bits in sizes
}
_TYPES = {dtype.name: dtype for dtype in NUMPY}

ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
OF_INTEGERS = ("and", "or", "xor", "lshift", "rshift")
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}

_NUMBERS = (int, float, bool)

Method = Callable[[tl.tensor, Any], tl.tensor]


def shortcuts(methods: dict[str, Method]) -> dict[str, Method]:
    """Operators of ``tl.tensor`` by their names, in front of Triton's own."""
    found = {}
    for name, compute in (ARITHMETIC | COMPARISONS).items():
        for method in (f"__{name}__", f"__r{name}__"):
            # Signedness decides how a number shifts to the right, and Triton asks the other's.
            if method in methods and method != "__rrshift__":
                is_reflected = not method.startswith(f"__{name}")
                found[method] = _operator(name, compute, is_reflected, methods[method])
    found["__add__"] = _pointer_add(found["__add__"])
    return found


class _Meeting(NamedTuple):
    """What two operands become.

    Attributes:
        mine: numpy's dtype that the first is cast to, ``None`` if it is of that already.
        theirs: the same of the second; of a number, the number in an array.
        common: the type both have then.
    """

    mine: np.dtype | None
    theirs: Any
    common: tl.dtype


@functools.cache
def _meeting(mine: str, theirs: str) -> _Meeting | None:
    """Of two tensors, by the names of their types."""
    if mine not in _TYPES or theirs not in _TYPES:
        return None
    types = _TYPES[mine], _TYPES[theirs]
    common = interpreter.interpreter_semantic.computation_type_impl(
        types[0], False, types[1], False, False
    )
    return _Meeting(*(None if type_ == common else NUMPY[common] for type_ in types), common)


@functools.lru_cache(1 << 12)
def _meeting_number(mine: str, kind: type, number: Any, as_tensor: bool) -> _Meeting | None:
    """Of a tensor and a number, which leaves a tensor's type be unless it counts as one itself."""
    if mine not in _TYPES:
        return None
    type_, semantic = _TYPES[mine], interpreter.interpreter_semantic
    own = semantic.to_tensor(number).dtype
    common = semantic.computation_type_impl(type_, False, own, not as_tensor, False)
    if common.is_int() and not common.get_int_min_value() <= number <= common.get_int_max_value():
        return None
    array = np.array([number or 0], dtype=NUMPY[common])  # -0.0 is 0
    return _Meeting(None if type_ == common else NUMPY[common], array, common)


def _operator(name: str, compute: np.ufunc, is_reflected: bool, triton: Method) -> Method:
    """An operator of a tensor and a tensor or a number."""
    compares = name in COMPARISONS
    of_integers = name in OF_INTEGERS

    def operator(self: tl.tensor, other: Any) -> tl.tensor:
        operand = other.value if type(other) is tl.constexpr else other
        kind = type(operand)
        if kind is tl.tensor:
            met = _meeting(self.dtype.name, operand.dtype.name)
        elif kind in _NUMBERS:
            met = _meeting_number(self.dtype.name, kind, operand, compares)
        else:
            met = None
        if met is None or (of_integers and not met.common.is_int()):
            return triton(self, other)
        if name == "rshift" and met.mine is not None:
            return triton(self, other)
        left, right = self.handle.data, met.theirs
        if met.mine is not None:
            left = left.astype(met.mine)
        is_block = self.type is not self.dtype
        if kind is tl.tensor:
            right = operand.handle.data if right is None else operand.handle.data.astype(right)
            is_block = is_block or operand.type is not operand.dtype
        value = compute(right, left) if is_reflected else compute(left, right)
        return tensor_of(value, tl.int1 if compares else met.common, is_block)

    return operator


def _pointer_add(add: Method) -> Method:
    """Addition, where an offset may be added to a pointer."""

    def operator(self: tl.tensor, other: Any) -> tl.tensor:
        if type(other) is not tl.tensor or not self.dtype.is_ptr() or not other.dtype.is_int():
            return add(self, other)
        handle = interpreter.interpreter_builder.create_addptr(self.handle, other.handle)
        is_block = self.type is not self.dtype or other.type is not other.dtype
        return tensor_of(handle.data, self.dtype, is_block)

    return operator


def _made_alike(x: Any, y: Any) -> tuple[tl.tensor, tl.tensor] | None:
    """Two operands of one type as tensors, of which one may be a number; ``None`` of others."""
    if type(x) is not tl.tensor:
        if type(x) not in _NUMBERS or type(y) is not tl.tensor:
            return None
        alike = _made_alike(y, x)
        return alike and alike[::-1]
    if type(y) is tl.tensor:
        return (x, y) if x.dtype.name == y.dtype.name and x.dtype.name in _TYPES else None
    if type(y) not in _NUMBERS:
        return None
    met = _meeting_number(x.dtype.name, type(y), y, False)
    if met is None or met.mine is not None:
        return None
    return x, tensor_of(met.theirs, met.common, False)


class Semantic(TritonSemantic):
    """Triton's rules, with less work where operands are alike or numpy casts and spreads them."""

    def to_tensor(self, x: Any, *check_type: bool) -> Any:
        return x if type(x) is tl.tensor else super().to_tensor(x, *check_type)

    def scalar_constant(self, value: Any, dtype: tl.dtype) -> tl.tensor:
        if dtype.name not in _TYPES:
            return super().scalar_constant(value, dtype)
        return tensor_of(np.array([value or 0], dtype=NUMPY[dtype]), dtype, False)  # -0.0 is 0

    def cast(self, input: tl.tensor, dst_ty: tl.dtype, *rounding: str | None) -> tl.tensor:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        is_numpys = source.name in _TYPES and target.name in _TYPES
        # Comparing with zero makes truth values, and float16 has detours.
        is_direct = target != tl.int1 and (source != tl.float16 or target == tl.float32)
        if any(rounding) or not (is_numpys and is_direct):
            return super().cast(input, dst_ty, *rounding)
        value = input.handle.data.astype(NUMPY[target])
        return tensor_of(value, target, input.type is not source)

    def bitcast(self, input: tl.tensor, dst_ty: tl.dtype) -> tl.tensor:
        return input if input.dtype is dst_ty else super().bitcast(input, dst_ty)

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        shapes = [x.handle.data.shape if x.type is not x.dtype else () for x in (lhs, rhs)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
        shape = np.broadcast_shapes(*shapes)
        return tuple(
            x if own == shape else tensor_of(np.broadcast_to(x.handle.data, shape), x.dtype, True)
            for x, own in zip((lhs, rhs), shapes, strict=True)
        )

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        if not div_or_mod:
            alike = _made_alike(lhs, rhs)
            if alike is not None:
                return self.broadcast_impl_value(*alike)
        return super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def where(self, condition: tl.tensor, x: Any, y: Any) -> tl.tensor:
        if condition.dtype != tl.int1:
            return super().where(condition, x, y)
        x, y = self.binary_op_type_checking_impl(x, y, True, True)
        value = np.where(condition.handle.data, x.handle.data, y.handle.data)
        return tensor_of(value, x.dtype, condition.type is not tl.int1 or x.type is not x.dtype)

    def expand_dims(self, input: tl.tensor, axis: int) -> tl.tensor:
        if input.type is input.dtype:
            return super().expand_dims(input, axis)
        return tensor_of(np.expand_dims(input.handle.data, axis), input.dtype, True)


_blocks: dict[tuple[str, tuple[int, ...]], tuple[tl.block_type, Any, Any]] = {}


def tensor_of(value: np.ndarray, type_: tl.dtype, is_block: bool) -> tl.tensor:
    """A tensor made without working out its type and shape again."""
    made = object.__new__(tl.tensor)
    made.handle = handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = value, type_, {}
    made.dtype = type_
    key = (type_.name, value.shape if is_block else ())
    if key not in _blocks:
        block = tl.block_type(type_, list(value.shape)) if is_block else type_
        like = tl.tensor(handle, block)
        _blocks[key] = block, like.shape, like.numel
    made.type, made.shape, made.numel = _blocks[key]
    if not is_block:
        made.type = type_
    return made
