"""``gl.*`` on values: what is emulated of the language that is no matter of synchronisation."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import SliceLayout
from triton.language import core as tl
from triton.language import standard
from triton.runtime.jit import JITFunction

from ferrum_triton.gluon_emulator import barriers, memory, tensors, values
from ferrum_triton.gluon_emulator.clocks import here
from ferrum_triton.gluon_emulator.errors import Misuse
from ferrum_triton.gluon_emulator.schedule import current
from ferrum_triton.gluon_emulator.values import Value, cast, compute, constant, pair, to_value

# Emulated functions, by their names in Gluon: `tma.store_wait`, and without a prefix those of `gl`.
EMULATED: dict[str, Callable] = {}


def emulates(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        EMULATED.update(dict.fromkeys(names, function))
        return function

    return register


def emulated_name(function: Any) -> str:
    """A function of Triton's as the table has it; no name of anything else."""
    module, name = (getattr(function, each, None) or "" for each in ("__module__", "__name__"))
    if not callable(function) or isinstance(function, (type, JITFunction)):
        return ""
    plain = module.startswith("triton.language") and name in EMULATED
    if not plain and not getattr(function, "__triton_builtin__", False):
        return ""
    part = module.rpartition(".")[2]
    return f"{part}.{name}" if part in ("tma", "mbarrier", "async_copy") else name


def shape_of(given: tuple) -> list[int]:
    """Dimensions that are passed one by one, or as a list."""
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = tuple(given[0])
    return [int(each) for each in given]


EMULATED |= {
    "add": values.add,
    "sub": values.sub,
    "mul": values.mul,
    "cast": cast,
    "broadcast": values.broadcast,
    "expand_dims": values.expand_dims,
    "load": tensors.load,
    "store": tensors.store,
    "to_tensor": to_value,
    "allocate_shared_memory": memory.allocate,
    "fdiv": lambda x, y, ieee_rounding=False: values.truediv(x, y),
    "div_rn": values.truediv,
    "static_range": lambda *bounds: range(*(int(each) for each in bounds)),
}


@emulates("program_id")
def program_id(axis: Any) -> Value:
    return constant(current().program.index[int(axis)], tl.int32)


@emulates("num_programs")
def num_programs(axis: Any) -> Value:
    return constant(current().program.settings.grid[int(axis)], tl.int32)


@emulates("num_warps")
def num_warps() -> int:
    return current().num_warps


@emulates("num_ctas")
def num_ctas() -> int:
    return 1


@emulates("arange")
def arange(start: Any, end: Any, layout: Any = None) -> Value:
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), tl.int32, layout)


@emulates("full")
def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    scalar = cast(value, dtype) if isinstance(value, Value) else constant(value, dtype)
    return Value(scalar.data.expand(shape_of((shape,))), dtype, layout)


@emulates("convert_layout", "set_auto_layout")
def convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(value.data, value.dtype, layout, value.base)


@emulates("static_print", "device_print")
def ignored(*args: Any, **options: Any) -> None:
    pass


@emulates("max_constancy", "max_contiguous", "multiple_of")
def hint(value: Any, *args: Any) -> Any:
    return value


@emulates("static_assert")
def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise Misuse(f"gl.static_assert at {here()}: {message}")


@emulates("device_assert")
def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    held = to_value(condition).data != 0
    if mask is not None:
        held = held | ~to_value(mask).data
    if not bool(held.all()):
        raise Misuse(f"gl.device_assert at {here()}: {message}")


@emulates("assume")
def assume(condition: Any) -> None:
    device_assert(condition, "what gl.assume says does not hold")


@emulates("reshape", "view")
def reshape(value: Value, *shape: Any, can_reorder: bool = False) -> Value:
    sizes = shape_of(shape)
    if math.prod(sizes) != value.numel:
        raise Misuse(f"a block of shape {value.shape} is not reshaped to {sizes}")
    return Value(value.data.reshape(sizes), value.dtype, None, value.base)


@emulates("permute", "trans")
def permute(value: Value, *order: Any) -> Value:
    axes = shape_of(order) or [1, 0]
    return Value(value.data.permute(axes), value.dtype, None, value.base)


@emulates("broadcast_to")
def broadcast_to(value: Value, *shape: Any) -> Value:
    return value.like(value.data.expand(shape_of(shape)))


@emulates("join")
def join(a: Any, b: Any) -> Value:
    x, y = values.broadcast(a, b)
    return Value(torch.stack((x.data, y.data), -1), x.dtype, None)


@emulates("split")
def split(value: Value) -> tuple[Value, Value]:
    low, high = value.data.unbind(-1)
    return Value(low, value.dtype, None), Value(high, value.dtype, None)


@emulates("where")
def where(condition: Any, x: Any, y: Any) -> Value:
    a, b = (to_value(x), to_value(y)) if _pointers(x, y) else pair(x, y)
    c, a = values.broadcast(condition, a)
    c, b = values.broadcast(c, b)
    a, b = values.broadcast(a, b)
    layout = c.layout if c.shape else a.layout
    return Value(torch.where(c.data != 0, a.data, b.data), a.dtype, layout, a.base)


def _pointers(*each: Any) -> bool:
    return any(isinstance(x, Value) and x.dtype.is_ptr() for x in each)


@emulates("minimum")
def minimum(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
    return _extreme("min", x, y, propagate_nan)


@emulates("maximum")
def maximum(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
    return _extreme("max", x, y, propagate_nan)


def _extreme(kind: str, x: Any, y: Any, propagate_nan: Any) -> Value:
    a, b = pair(promote(x), promote(y))
    result = compute(kind, a.data, b.data)
    if propagate_nan == tl.PropagateNan.ALL:
        result = torch.where(a.data.isnan() | b.data.isnan(), math.nan, result)
    return a.like(result)


@emulates("_promote_bfloat16_to_float32")
def promote(x: Any) -> Value:
    value = to_value(x)
    return cast(value, tl.float32) if value.dtype == tl.bfloat16 else value


@emulates("clamp")
def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
    return _extreme("min", _extreme("max", x, min, propagate_nan), max, propagate_nan)


def builtin_extreme(kind: str) -> Callable:
    """Python's min and max, which of constants are Python's own."""
    own = min if kind == "min" else max

    def call(*args: Any) -> Any:
        if all(isinstance(each, numbers.Number) for each in args):
            return own(*args)
        result = args[0]
        for each in args[1:]:
            result = _extreme(kind, result, each, tl.PropagateNan.NONE)
        return result

    return call


def _math(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def call(x: Any) -> Value:
        value = to_value(x)
        if value.dtype not in (tl.float32, tl.float64):
            raise Misuse(f"gl.{name} at {here()} of {value.dtype}: float32 or float64 alone")
        return value.like(function(value.data))

    EMULATED[name] = call


for _name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "floor", "ceil"):
    _math(_name, getattr(torch, _name))
_math("sqrt_rn", torch.sqrt)


@emulates("abs")
def absolute(x: Any) -> Value:
    value = to_value(x)
    return value.like(value.data.abs())


@emulates("fma")
def fma(x: Any, y: Any, z: Any) -> Value:
    a, b = pair(x, y)
    a, c = pair(a, z)
    if a.dtype != tl.float32:
        return values.add(values.mul(a, b), c)
    # A product of two float32 is exact in float64.
    return a.like((a.data.double() * b.data.double() + c.data.double()).float())


@emulates("umulhi")
def umulhi(x: Any, y: Any) -> Value:
    a, b = pair(x, y)
    bits = a.dtype.primitive_bitwidth
    if bits != 32:
        raise Misuse(f"gl.umulhi of {a.dtype} is not emulated")
    wide = (each.data.to(torch.int64) & 0xFFFFFFFF for each in (a, b))
    low, high = next(wide), next(wide)
    # In halves of the second factor, since a product of 64 bits would not fit.
    top = (low * (high >> 16) + ((low * (high & 0xFFFF)) >> 16)) >> 16
    return cast(Value(top, tl.int64, a.layout), a.dtype)


def _atomic(name: str, kind: str) -> None:
    def call(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
        return tensors.atomic(kind, pointer, val, mask, sem, scope)

    EMULATED[name] = call


for _kind in ("add", "and", "or", "xor", "max", "min", "xchg"):
    _atomic(f"atomic_{_kind}", _kind)


@emulates("atomic_cas")
def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Value:
    return tensors.compare_and_swap(pointer, cmp, val, sem, scope)


@emulates("gather")
def gather(src: Value, index: Value, axis: Any) -> Value:
    return Value(torch.gather(src.data, int(axis), index.data.long()), src.dtype, index.layout)


_HALVES = (torch.float16, torch.bfloat16)
# Combining functions of Triton's library that torch has.
_REDUCTIONS = {
    standard._sum_combine: lambda x, axis: (
        x.float().sum(axis) if x.dtype in _HALVES else x.sum(axis)
    ),
    standard._elementwise_max: lambda x, axis: _of_numbers(x, -math.inf, torch.amax, axis),
    standard._elementwise_min: lambda x, axis: _of_numbers(x, math.inf, torch.amin, axis),
}


def _of_numbers(x: Tensor, least: float, function: Callable, axis: int) -> Tensor:
    """The largest or smallest, NaN only where all are."""
    if not x.dtype.is_floating_point:
        return function(x, axis)
    found = function(torch.where(x.isnan(), least, x), axis)
    return torch.where(x.isnan().all(axis), math.nan, found)


@emulates("reduce")
def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
    several = isinstance(input, tuple)
    inputs = [to_value(each) for each in (input if several else (input,))]
    rank = len(inputs[0].shape)
    if axis is None:
        inputs = [Value(each.data.reshape(-1), each.dtype, None) for each in inputs]
        at = 0
    else:
        at = int(axis) % rank
    layout = inputs[0].layout
    layout = None if axis is None or layout is None else SliceLayout(at, layout)
    known = _REDUCTIONS.get(getattr(combine_fn, "kernel", None))
    if known is not None and not several:
        x = inputs[0]
        results = [Value(known(x.data, at).to(x.data.dtype), x.dtype, layout)]
    else:
        results = _fold(inputs, at, combine_fn, layout)
    if keep_dims:
        axes = range(rank) if axis is None else [at]
        results = [values.expand_dims(each, list(axes)) for each in results]
    return tuple(results) if several else results[0]


def _fold(inputs: list[Value], axis: int, combine: Callable, layout: Any) -> list[Value]:
    """Neighbours combined until one is left."""
    while (size := inputs[0].shape[axis]) > 1:
        if size % 2:
            raise Misuse(f"a reduction of {size} elements: not a power of two")
        halves = []
        for start in (0, 1):
            index = torch.arange(start, size, 2)
            halves.append([each.like(each.data.index_select(axis, index)) for each in inputs])
        combined = combine(*halves[0], *halves[1])
        inputs = list(combined) if isinstance(combined, tuple) else [combined]
    return [Value(each.data.squeeze(axis), each.dtype, layout) for each in inputs]


@emulates("_reduce_with_indices")
def reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
    size = input.shape[int(axis)]
    wide = [1] * len(input.shape)
    wide[int(axis)] = size
    index = torch.arange(size, dtype=torch.int32).reshape(wide).expand(input.shape)
    return reduce((input, Value(index, tl.int32, input.layout)), axis, combine_fn, keep_dims)


@emulates("associative_scan")
def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
    several = isinstance(input, tuple)
    inputs = [to_value(each) for each in (input if several else (input,))]
    at, size = int(axis) % len(inputs[0].shape), inputs[0].shape[int(axis)]
    order = range(size - 1, -1, -1) if reverse else range(size)
    kept: list[list[Value]] = []
    for step in order:
        now = [each.like(each.data.select(at, step)) for each in inputs]
        if kept:
            combined = combine_fn(*kept[-1], *now)
            now = list(combined) if isinstance(combined, tuple) else [combined]
        kept.append(now)
    columns = zip(*(reversed(kept) if reverse else kept), strict=True)
    results = [
        first.like(torch.stack([each.data for each in column], at), column[0].dtype)
        for first, column in zip(inputs, columns, strict=True)
    ]
    return tuple(results) if several else results[0]


@emulates("dot_fma")
def dot_fma(a: Value, b: Value, acc: Value) -> Value:
    return acc.like(acc.data + a.data.to(acc.data.dtype) @ b.data.to(acc.data.dtype))


def counted(*bounds: Any, **options: Any) -> Iterator[Value]:
    """``range`` in a kernel, whose counter is an int32 or wider."""
    given = [to_value(each) for each in bounds]
    dtype = tl.int32
    for each in given:
        dtype = values.promoted(dtype, False, each.dtype, False, False)
    for number in range(*(int(x) for x in given)):
        yield constant(number, dtype)


def logical(kind: str, a: Any, b: Callable[[], Any]) -> Any:
    """``and`` and ``or``: of blocks for each lane, of constants as in Python."""
    if not isinstance(a, Value):
        if bool(a) == (kind == "or"):
            return a
        return b()
    other = b()
    if isinstance(other, Value):
        x, y = values.broadcast(a, other)
        return Value(compute(kind, x.data != 0, y.data != 0), tl.int1, x.layout)
    return a.like(compute(kind, a.data != 0, torch.tensor(bool(other))), tl.int1)


def negated(a: Any) -> Any:
    return a.like(a.data == 0, tl.int1) if isinstance(a, Value) else not a


_BARRIER = re.compile(
    r"\bbar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)?\s+([$\w]+)(?:\s*,\s*([$\w]+))?"
)


@emulates("inline_asm_elementwise")
def inline_asm(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool = True, pack: int = 1
) -> Any:
    """Assembly by the twin that the kernel's author gives; barriers and fences are known here."""
    given = [to_value(each) for each in args]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    me = current()
    twin = me.program.settings.assembly.get(" ".join(asm.split()))
    if twin is not None:
        results = twin(*(each.data for each in given))
        results = results if isinstance(results, tuple) else (results,)
        made = [
            Value(result.to(values.torch_type(each)), each, given[0].layout if given else None)
            for result, each in zip(results, dtypes, strict=True)
        ]
    elif not (_BARRIER.search(asm) or "fence.proxy.async" in asm):
        raise Misuse(
            f"inline assembly at {here()} has no twin: pass one to run(assembly=...), keyed by its "
            f"text or by the function that holds it. The text is {asm!r}"
        )
    else:
        # What it returns is a placeholder; the first operand has the shape.
        made = [cast(given[0], each) if given else constant(0, each) for each in dtypes]
    operands = len(dtypes)

    def number(word: str) -> int:
        return int(given[int(word[1:]) - operands].data.flatten()[0] if word[0] == "$" else word)

    for verb, which, threads in _BARRIER.findall(asm):
        me.program.checkpoint()
        barrier = barriers.named_barrier(number(which))
        barrier.meet(me, number(threads) if threads else None, verb == "sync")
    if "fence.proxy.async" in asm:
        me.fence()
    return tuple(made) if isinstance(dtype, tuple) else made[0]
