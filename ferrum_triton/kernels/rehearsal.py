"""What a launcher does for a call, found out without doing it.

A launcher is plain Python between tensors and launches: it allocates, takes views, and launches
kernels whose grids and arguments follow from shapes, strides, dtypes and devices. Here it is called
with stand-ins, which have all of these and an address of their own far from any other's, but no
memory. So every address it hands to a kernel tells which tensor it came from, and how many bytes
into it. Whatever else it does (computing with torch, reading a value, doing arithmetic with a
scalar that may change) raises :class:`NotReplayable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ferrum_triton.kernels.jit import Kernel, Launch, note_launches

_aten = torch.ops.aten
ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

# Every tensor begins in the middle of 2^48 bytes that are its own: views reach either side.
ROOM = 48


class NotReplayable(Exception):
    """A launcher did something that may come out differently for another call of the same key."""


class ScalarUsed(NotReplayable):
    """A launcher looked at a scalar instead of handing it on."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is used on the host")
        self.name = name


def _refuse(self: Scalar, *_: Any) -> NoReturn:
    raise ScalarUsed(object.__getattribute__(self, "name"))


_UNARY = "bool int float index hash str format neg pos abs invert round trunc floor ceil".split()
_COMPARISONS = "eq ne lt le gt ge".split()
_BINARY = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor".split()
_REFUSED = [*_UNARY, *_COMPARISONS, *_BINARY, *(f"r{name}" for name in _BINARY)]


class Scalar:
    """Stands for an integer of a call: it can be handed on to a kernel, and nothing else."""

    __slots__ = ("name",)
    vars().update({f"__{name}__": _refuse for name in _REFUSED})
    __class__ = property(_refuse)  # what isinstance() asks for

    def __init__(self, name: str) -> None:
        self.name = name


class StandIn(Tensor):
    """A tensor of every property but memory: what it has instead is an address nobody else has."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    meta: Tensor
    stands_on: torch.device
    address: int

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, address: int) -> StandIn:
        self = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=meta.device,
        )
        self.meta, self.stands_on, self.address = meta, device, address
        return self

    @property
    def device(self) -> torch.device:
        return self.stands_on

    @property
    def is_cuda(self) -> bool:
        return self.stands_on.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.stands_on.type == "cpu"

    @property
    def is_meta(self) -> bool:
        return False

    def get_device(self) -> int:
        return self.stands_on.index if self.is_cuda else -1

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.meta.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        raise NotReplayable(f"{func} after the rehearsal")


@dataclass(frozen=True)
class Allocation:
    """Memory a launcher asks for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def num_bytes(self) -> int:
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """A tensor that a launcher hands to a kernel.

    Attributes:
        base: which it is a view of: an argument's name, or an allocation's number.
        offset: bytes from there to its first element.
    """

    base: str | int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Described:
    """A host tensor descriptor that a launcher hands to a kernel; Gluon's have a layout."""

    place: Place
    block: tuple[int, ...]
    padding: str
    layout: Any


@dataclass(frozen=True)
class Passed:
    """A scalar of the call, handed on as it came."""

    name: str


@dataclass(frozen=True)
class Zero:
    """Fill with zeros."""

    place: Place


@dataclass(frozen=True)
class Step:
    """One launch: its arguments are places, descriptors, passed scalars and plain values."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """All a launcher does for a call.

    Attributes:
        allocations: memory it asks for, in that order.
        steps: launches and fills, in order.
        result: what it returns: a name or a number as in :class:`Place`, several of them, or None.
    """

    allocations: tuple[Allocation, ...]
    steps: tuple[Step | Zero, ...]
    result: str | int | tuple[str | int, ...] | None


def rehearse(
    launcher: Callable[..., Any], arguments: Mapping[str, Any], by_value: frozenset[str]
) -> Recipe:
    """Find out what ``launcher(**arguments)`` does.

    Args:
        launcher: an implementation of an op.
        arguments: those of a call, ``out`` among them if the op has one.
        by_value: names of scalars the recipe may depend on; others are integers it only hands on.

    Raises:
        ScalarUsed: it depends on another integer.
        NotReplayable: it does what a recipe cannot say.
    """
    device = next(v.device for v in arguments.values() if isinstance(v, Tensor))
    rehearsal = _Rehearsal(device)
    stand_ins: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = rehearsal.argument(name, value)
        elif isinstance(value, tuple):
            value = tuple(rehearsal.argument(f"{name}{i}", v) for i, v in enumerate(value))
        elif value is not None and name not in by_value:
            if type(value) is not int:
                raise NotReplayable(f"{name} is a {type(value)}")
            value = Scalar(name)
        stand_ins[name] = value
    with note_launches(runs=False) as launches, rehearsal:
        rehearsal.launches = launches
        result = launcher(**stand_ins)
    rehearsal.take_launches()
    given = stand_ins.get("out")
    if result is not None and result is given:
        returned: Any = "out"
    elif isinstance(result, tuple):
        returned = tuple(rehearsal.whole(part) for part in result)
    else:
        returned = None if result is None else rehearsal.whole(result)
    return Recipe(tuple(rehearsal.allocations), tuple(rehearsal.steps), returned)


class _Rehearsal(TorchDispatchMode):
    """torch and the launches, as a launcher called with stand-ins meets them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.allocations: list[Allocation] = []
        self.steps: list[Step | Zero] = []
        self.launches: list[Launch] = []
        self._taken = 0
        self._tensors: list[tuple[str | int, StandIn]] = []
        # By storage: the address that a storage offset of 0 would have.
        self._starts: dict[int, int] = {}

    def argument(self, name: str, tensor: Tensor) -> StandIn:
        """A stand-in for an argument, whose address has the same remainder by 16."""
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise NotReplayable(f"{name} is on {tensor.device}")
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        storage = torch.empty(size, dtype=tensor.dtype, device="meta")
        meta = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._new(name, meta, tensor.data_ptr() % 16)

    def _new(self, base: str | int, meta: Tensor, remainder: int = 0) -> StandIn:
        address = (len(self._tensors) + 1 << ROOM) + (1 << ROOM - 1) + remainder
        before = meta.storage_offset() * meta.element_size()
        self._starts[meta.untyped_storage()._cdata] = address - before
        made = StandIn(meta, self.device, address)
        self._tensors.append((base, made))
        return made

    def meet(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what the launcher asks of torch, on stand-ins."""
        kwargs = kwargs or {}
        if func is _aten.zero_.default and type(args[0]) is StandIn:
            self.take_launches()
            self.steps.append(Zero(self.place(args[0])))
            return args[0]
        if func._schema.is_mutable:
            raise NotReplayable(f"{func} writes")
        if "device" in kwargs:
            if kwargs["device"] not in (None, self.device):
                raise NotReplayable(f"{func} on {kwargs['device']}")
            kwargs = {**kwargs, "device": torch.device("meta")}
        elif not any(type(arg) is StandIn for arg in args):
            raise NotReplayable(f"{func} on no tensor of the call")
        result = func(*tree_map(_meta_of, args), **tree_map(_meta_of, kwargs))
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrap(func, part) for part in result)
        return self._wrap(func, result)

    def _wrap(self, func: Any, meta: Any) -> StandIn:
        if not isinstance(meta, Tensor):
            raise NotReplayable(f"{func} returns no tensor")
        start = self._starts.get(meta.untyped_storage()._cdata)
        if start is not None:
            return StandIn(meta, self.device, start + meta.storage_offset() * meta.element_size())
        if func not in ALLOCATIONS:
            raise NotReplayable(f"{func} computes")
        self.allocations.append(Allocation(tuple(meta.shape), meta.stride(), meta.dtype))
        return self._new(len(self.allocations) - 1, meta)

    def take_launches(self) -> None:
        """Turn the launches made since the last time into steps."""
        for launch in self.launches[self._taken :]:
            self.steps.append(self._step(launch))
        self._taken = len(self.launches)

    def _step(self, launch: Launch) -> Step:
        kernel = launch.kernel
        dynamic = len(kernel.runtime) - len(kernel.dynamic)
        args = tuple(self._argument(arg, i >= dynamic) for i, arg in enumerate(launch.args))
        for value in (*launch.grid, *launch.meta.values()):
            if type(value) is Scalar:
                raise ScalarUsed(value.name)
            if isinstance(value, Tensor):
                raise NotReplayable("a tensor among constexprs")
        return Step(kernel, tuple(launch.grid), args, launch.meta)

    def _argument(self, arg: Any, is_dynamic: bool) -> Any:
        if type(arg) is Scalar:
            if not is_dynamic:  # compiled code depends on it
                raise ScalarUsed(arg.name)
            return Passed(arg.name)
        if type(arg) is StandIn:
            return self.place(arg)
        if is_descriptor(arg):
            base, offset = self._base_of(arg.base.data_ptr())
            place = Place(base, offset, tuple(arg.shape), tuple(arg.strides), arg.base.dtype)
            layout = getattr(arg, "layout", None)
            return Described(place, tuple(arg.block_shape), arg.padding, layout)
        if arg is None or type(arg) in (int, float, bool):
            return arg
        if isinstance(arg, tuple) and all(type(step) is int for step in arg):  # strides
            return arg
        raise NotReplayable(f"a {type(arg)} among arguments")

    def place(self, stand_in: StandIn) -> Place:
        base, offset = self._base_of(stand_in.address)
        return Place(base, offset, tuple(stand_in.shape), tuple(stand_in.stride()), stand_in.dtype)

    def _base_of(self, address: int) -> tuple[str | int, int]:
        number = (address >> ROOM) - 1
        if not 0 <= number < len(self._tensors):
            raise NotReplayable(f"{address:#x} is nobody's address")
        base, first = self._tensors[number]
        return base, address - first.address

    def whole(self, result: Any) -> str | int:
        """The argument or the allocation that ``result`` is."""
        if type(result) is StandIn:
            for base, tensor in self._tensors:
                if self.place(result) == self.place(tensor):
                    return base
        raise NotReplayable("what is returned is neither an argument nor allocated")


# Assigned afterwards, so that torch does not wrap it: what a class defines under this name imports
# torch._dynamo at its first call, which takes seconds.
_Rehearsal.__torch_dispatch__ = _Rehearsal.meet  # type: ignore[method-assign]


def is_descriptor(value: Any) -> bool:
    """Whether this is a host tensor descriptor, Triton's or Gluon's."""
    return hasattr(value, "block_shape")


def _meta_of(value: Any) -> Any:
    return value.meta if type(value) is StandIn else value
