"""Global memory: tensors that a kernel is given, pointers into them, descriptors of their tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.language import core as tl

from ferrum_triton.gluon_emulator.clocks import here
from ferrum_triton.gluon_emulator.errors import Misuse, OutOfBounds
from ferrum_triton.gluon_emulator.ledger import MOST_LANES, Ledger
from ferrum_triton.gluon_emulator.memory import WORDS
from ferrum_triton.gluon_emulator.schedule import Operation, current
from ferrum_triton.gluon_emulator.values import (
    TRITON_TYPES,
    Type,
    Value,
    broadcast,
    cast,
    compute,
    to_value,
    torch_type,
)


class Global:
    """A tensor in global memory: its bytes from the first element to the last."""

    def __init__(self, name: str, tensor: Tensor, ledger: Ledger) -> None:
        if tensor.device.type != "cpu":
            raise Misuse(f"{name} is on {tensor.device}; the emulator takes tensors on the CPU")
        if tensor.dtype not in TRITON_TYPES:
            raise Misuse(f"{name} has dtype {tensor.dtype}, which no Triton type stands for")
        self.name, self.dtype, self.ledger = name, TRITON_TYPES[tensor.dtype], ledger
        self.storage = tensor.untyped_storage()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        self.start = tensor.data_ptr()
        self.end = self.start + extent * tensor.element_size()

    def __str__(self) -> str:
        return self.name

    def pointer(self) -> Value:
        return Value(torch.tensor(self.start), tl.pointer_type(self.dtype), None, self)

    def flat(self, dtype: torch.dtype) -> Tensor:
        """The whole storage, as elements of a dtype."""
        return torch.empty(0, dtype=dtype).set_(self.storage)

    def index(self, address: Any, item: int) -> Any:
        """Of the element of the storage at an address; addresses may be many."""
        return (address - self.storage.data_ptr()) // item


def _found(pointer: Value, mask: Any, what: str) -> tuple[Global, Tensor, Tensor | None]:
    """A tensor, the elements of its storage that lanes mean, and which lanes take part."""
    if not pointer.dtype.is_ptr():
        raise Misuse(f"{what} at {here()} of {pointer.dtype}, which is no pointer")
    data, lanes = pointer.data, None
    if mask is not None:
        given = to_value(mask)
        if given.dtype != tl.int1:
            raise Misuse(f"{what} at {here()}: the mask is {given.dtype}, not int1")
        wide, given = broadcast(pointer, given)
        data, lanes = wide.data, given.data
    asked = data if lanes is None else data[lanes]
    base = pointer.base
    if base is None:
        base = _holder(asked, what)
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    if asked.numel():
        least, most = int(asked.min()), int(asked.max())
        if least < base.start or most + size > base.end:
            raise OutOfBounds(
                f"{what} at {here()}: byte {least - base.start} to {most + size - base.start} of "
                f"{base}, which has {base.end - base.start} bytes"
            )
        if bool((asked % size).any()):
            raise Misuse(f"{what} at {here()}: an address in {base} is not a multiple of {size}")
    index = base.index(data, size)
    return base, index if lanes is None else torch.where(lanes, index, 0), lanes


def _holder(addresses: Tensor, what: str) -> Global:
    """The tensor that addresses from memory lie in."""
    known = current().program.settings.tensors
    least = int(addresses.min()) if addresses.numel() else known[0].start
    for each in known:
        if each.start <= least < each.end:
            return each
    raise OutOfBounds(f"{what} at {here()}: an address that lies in no tensor of the call")


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Value:
    current().program.checkpoint()
    base, index, lanes = _found(pointer, mask, "gl.load")
    dtype = pointer.dtype.element_ty
    known = torch_type(dtype)
    _note("gl.load", base, index, lanes, known.itemsize, writes=False, atomic=bool(volatile))
    flat = base.flat(known)
    # Without a clone the element at a single index would be a view; without one there is no lane.
    data = flat[index].clone() if flat.numel() else torch.zeros(index.shape, dtype=known)
    result = Value(data, dtype, pointer.layout)
    if lanes is None:
        return result
    if other is None:
        # What a masked lane holds is undefined; a NaN shows where it is used.
        filler = torch.full((1,), 0xFF, dtype=torch.uint8).expand(data.element_size())
        rest = filler.contiguous().view(known).expand(data.shape)
    else:
        rest = broadcast(cast(other, dtype), result)[0].data
    return result.like(torch.where(lanes, data, rest))


def store(
    pointer: Any, value: Any, mask: Any = None, cache_modifier: str = "", eviction_policy: str = ""
) -> None:
    current().program.checkpoint()
    base, index, lanes = _found(pointer, mask, "gl.store")
    dtype = pointer.dtype.element_ty
    data = cast(value, dtype).data.expand(index.shape)
    if lanes is not None:
        index, data = index[lanes], data[lanes]
    if index.numel():
        flat = base.flat(torch_type(dtype))
        changed = _bits(flat[index]) != _bits(data)
        _note("gl.store", base, index, None, flat.itemsize, writes=True, changed=changed)
        flat[index] = data


def _bits(x: Tensor) -> Tensor:
    """Equal where values are the same, a NaN too."""
    return x.contiguous().view(WORDS[x.itemsize])


def _note(
    what: str, base: Global, index: Tensor, lanes: Tensor | None, item: int, **how: Any
) -> None:
    """Hold an access against the others to its tensor."""
    index = index.reshape(-1) if lanes is None else index[lanes]
    entries = base.ledger.entries(index, item)
    if (changed := how.get("changed")) is not None:
        how["changed"] = changed.reshape(-1)
    base.ledger.note(base.name, what, entries, **how)


def atomic(
    kind: str, pointer: Value, value: Any, mask: Any = None, sem: Any = None, scope: Any = None
) -> Value:
    """Read, compute and write, one lane after the other; gives what was there before."""
    current().program.checkpoint()
    base, index, lanes = _found(pointer, mask, f"gl.atomic_{kind}")
    _atomically(f"gl.atomic_{kind}", pointer, base, index, lanes, sem, scope)
    dtype = pointer.dtype.element_ty
    known = torch_type(dtype)
    flat, data = base.flat(known), cast(value, dtype).data.expand(index.shape)
    if lanes is not None:
        data, index = data[lanes], index[lanes]
    old = torch.zeros(index.shape, dtype=known)
    if index.unique().numel() == index.numel():
        old = flat[index].clone()
        flat[index] = data if kind == "xchg" else compute(kind, old, data).to(known)
    else:
        places, items, before = index.reshape(-1), data.reshape(-1), old.view(-1)
        for lane in range(places.numel()):
            at = places[lane]
            before[lane] = flat[at]
            new = items[lane] if kind == "xchg" else compute(kind, flat[at], items[lane])
            flat[at] = new.to(known)
    if lanes is not None:
        full = torch.zeros(lanes.shape, dtype=known)
        full[lanes] = old
        old = full
    return Value(old, dtype, pointer.layout)


def _atomically(
    what: str,
    pointer: Value,
    base: Global,
    index: Tensor,
    lanes: Tensor | None,
    sem: str | None,
    scope: str | None,
) -> None:
    addresses = pointer.data if lanes is None else pointer.data.expand(lanes.shape)[lanes]
    few = addresses.reshape(-1).tolist() if addresses.numel() <= MOST_LANES else []
    item = torch_type(pointer.dtype.element_ty).itemsize
    for address in few:
        base.ledger.acquire(address, sem, scope)
    _note(what, base, index, lanes, item, writes=True, atomic=True)
    for address in few:
        base.ledger.release(address, sem, scope)


def compare_and_swap(
    pointer: Value, compared: Any, value: Any, sem: Any = None, scope: Any = None
) -> Value:
    current().program.checkpoint()
    base, index, _ = _found(pointer, None, "gl.atomic_cas")
    _atomically("gl.atomic_cas", pointer, base, index, None, sem, scope)
    dtype = pointer.dtype.element_ty
    flat = base.flat(torch_type(dtype))
    old = flat[index].clone()
    wanted, new = cast(compared, dtype).data, cast(value, dtype).data
    flat[index] = torch.where(old == wanted, new.expand(old.shape), old)
    return Value(old, dtype, pointer.layout)


class Descriptor:
    """What TMA copies tiles by."""

    def __init__(
        self,
        base: Global,
        address: int,
        shape: Any,
        strides: Any,
        block_shape: Any,
        dtype: Any,
        layout: Any,
        padding: str = "zero",
    ) -> None:
        self.base, self.dtype, self.layout, self.padding = base, dtype, layout, padding
        self.sizes = [int(each) for each in shape]
        self.steps = [int(each) for each in strides]
        self.block_shape = tuple(int(each) for each in block_shape)
        self.block_type = Type(dtype, self.block_shape, layout)
        self.shape = tuple(Value(torch.tensor(n, dtype=torch.int32), tl.int32) for n in self.sizes)
        self.strides = tuple(Value(torch.tensor(n), tl.int64) for n in self.steps)
        known = torch_type(dtype)
        reach = 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.steps, strict=True))
        end = address + reach * known.itemsize
        if address < base.start or end > base.end:
            raise OutOfBounds(
                f"the descriptor of {base} covers bytes {address - base.start} to "
                f"{end - base.start}, and it has {base.end - base.start}"
            )
        self.first = base.index(address, known.itemsize)
        self.tensor = base.flat(known).as_strided(self.sizes, self.steps, self.first)

    def __str__(self) -> str:
        return str(self.base)

    @property
    def type(self) -> Descriptor:
        return self

    def _overlap(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What a tile shares with the tensor: where it is in the tensor, and in the tile."""
        outer, inner = [], []
        for start, size, block in zip(at, self.sizes, self.block_shape, strict=True):
            low, high = min(max(start, 0), size), min(max(start + block, 0), size)
            outer.append(slice(low, high))
            inner.append(slice(low - start, low - start + max(0, high - low)))
        return tuple(outer), tuple(inner)

    def note(self, what: str, at: list[int], tile: Tensor | None, operation: Operation) -> None:
        """Hold a copy against the other accesses to the tensor."""
        outer, inner = self._overlap(at)
        if not all(each.stop > each.start for each in outer):
            return
        parts = zip(outer, self.steps, strict=True)
        steps = [torch.arange(part.start, part.stop) * step for part, step in parts]
        index = torch.stack(torch.meshgrid(*steps, indexing="ij")).sum(0) + self.first
        changed = None if tile is None else _bits(tile[inner]) != _bits(self.tensor[outer])
        how = {"writes": tile is not None, "changed": changed, "operation": operation}
        _note(what, self.base, index, None, self.tensor.itemsize, **how)

    def read(self, at: list[int]) -> Tensor:
        """A tile; what lies outside of the tensor is 0, or NaN where the descriptor says so."""
        filler = math.nan if self.padding == "nan" else 0
        tile = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        if filler:
            tile.fill_(filler)
        outer, inner = self._overlap(at)
        if all(each.stop > each.start for each in outer):
            tile[inner] = self.tensor[outer]
        return tile

    def write(self, at: list[int], tile: Tensor) -> None:
        """A tile; what lies outside of the tensor is dropped."""
        outer, inner = self._overlap(at)
        if all(each.stop > each.start for each in outer):
            self.tensor[outer] = tile[inner]
