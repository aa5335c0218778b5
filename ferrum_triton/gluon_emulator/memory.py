"""Shared memory, its views, and the order of accesses to each region of it.

An allocation is bytes. Regions are not fixed: an allocation is one at first, and is divided where
views that are used divide it, so that every region was always accessed as a whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_triton.gluon_emulator.clocks import Access, Clock, here
from ferrum_triton.gluon_emulator.errors import Misuse, OutOfBounds, Race
from ferrum_triton.gluon_emulator.schedule import Operation, current
from ferrum_triton.gluon_emulator.values import Value, torch_type

# Integers as wide as an element.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Region:
    """The last write, and the reads since."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None = None, reads: tuple[Access, ...] = ()) -> None:
        self.write, self.reads = write, list(reads)


class Allocation:
    """A piece of shared memory."""

    def __init__(self, num_bytes: int) -> None:
        self.name = "shared memory"
        # All bits of what nobody wrote, or what is on its way, are set: NaN in every float.
        self.bytes = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self.barriers: dict[int, Any] = {}
        self._region_of = np.zeros(num_bytes, dtype=np.int32)
        self._regions = [_Region()]
        self._found: dict[tuple, tuple[int, list[int]]] = {}

    def regions(self, view: View) -> list[_Region]:
        """Those that make up a view."""
        key = (view.offset, *view.shape, -1, *view.strides, view.item_bytes)
        count, found = self._found.get(key, (0, []))
        if count != len(self._regions):
            found = self._divide(view)
            self._found[key] = (len(self._regions), found)
        return [self._regions[each] for each in found]

    def _divide(self, view: View) -> list[int]:
        touched = torch.zeros_like(self.bytes)
        # Every bit of every element.
        view.elements(touched, WORDS[view.item_bytes]).fill_(-1)
        inside = touched.numpy() != 0
        found = []
        for each in np.unique(self._region_of[inside]).tolist():
            whole = self._region_of == each
            if (whole & ~inside).any():
                old = self._regions[each]
                self._region_of[whole & inside] = len(self._regions)
                found.append(len(self._regions))
                self._regions.append(_Region(old.write, tuple(old.reads)))
            else:
                found.append(each)
        return found


class View:
    """What Gluon calls a shared memory descriptor."""

    def __init__(
        self,
        allocation: Allocation,
        dtype: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        layout: Any,
        path: str = "",
        moved: bool = False,
    ) -> None:
        self.allocation, self.dtype, self.layout = allocation, dtype, layout
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset
        self.item_bytes = max(1, dtype.primitive_bitwidth // 8)
        self.path, self.moved = path, moved

    def __str__(self) -> str:
        return self.allocation.name + self.path

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes

    @property
    def type(self) -> View:
        return self

    @property
    def element_ty(self) -> Any:
        return self.dtype

    def elements(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """This view's elements of the allocation's bytes, or of an array that is laid out alike."""
        start = self.offset // self.item_bytes
        return data.view(dtype).as_strided(self.shape, self.strides, start)

    @property
    def tensor(self) -> Tensor:
        return self.elements(self.allocation.bytes, torch_type(self.dtype))

    def poison(self) -> None:
        """Set every bit: a reader finds NaN or -1, and nothing that looks like data."""
        self.elements(self.allocation.bytes, WORDS[self.item_bytes]).fill_(-1)

    def _view(self, shape: Any, strides: Any, offset: int, path: str, moved: bool = False) -> View:
        args = (self.allocation, self.dtype, tuple(shape), tuple(strides), offset, self.layout)
        return View(*args, self.path + path, self.moved or moved)

    def index(self, index: Any) -> View:
        at = int(index)
        if not 0 <= at < self.shape[0]:
            raise OutOfBounds(f"index {at} of {self} at {here()}, which has {self.shape[0]}")
        offset = self.offset + at * self.strides[0] * self.item_bytes
        # An array of barriers is indexed to one of its elements.
        return self._view(self.shape[1:] or (1,), self.strides[1:] or (1,), offset, f"[{at}]")

    def slice(self, start: Any, length: Any, dim: Any = 0) -> View:
        start, length, dim = int(start), int(length), int(dim)
        if start < 0 or length < 1 or start + length > self.shape[dim]:
            raise OutOfBounds(
                f"{self}.slice({start}, {length}, dim={dim}) at {here()}, of a dimension of "
                f"{self.shape[dim]}"
            )
        shape = list(self.shape)
        shape[dim] = length
        offset = self.offset + start * self.strides[dim] * self.item_bytes
        path = f".slice({start}, {length}, dim={dim})"
        return self._view(shape, self.strides, offset, path)

    def permute(self, order: Any) -> View:
        order = [int(each) for each in order]
        if sorted(order) != list(range(self.rank)):
            raise Misuse(f"{self}.permute({order}) at {here()}, of {self.rank} dimensions")
        moved = order != list(range(self.rank))
        shape, strides = ([of[each] for each in order] for of in (self.shape, self.strides))
        return self._view(shape, strides, self.offset, "", moved)

    def reshape(self, shape: Any) -> View:
        shape = [int(each) for each in shape]
        if math.prod(shape) != self.numel or self.strides != contiguous(self.shape):
            raise Misuse(f"{self} of shape {self.shape} is not reshaped to {shape} at {here()}")
        return self._view(shape, contiguous(shape), self.offset, "", True)

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> View:
        shape = tuple(int(each) for each in shape)
        view = View(
            self.allocation, dtype, shape, contiguous(shape), self.offset, layout, self.path
        )
        if self.strides != contiguous(self.shape):
            raise Misuse(f"{self} is not contiguous, and cannot be reinterpreted at {here()}")
        if view.offset + view.nbytes > self.allocation.bytes.numel():
            raise OutOfBounds(f"{self} reinterpreted as {dtype} {shape} at {here()} does not fit")
        return view

    def _keep_alive(self) -> None:
        pass

    def load(self, layout: Any = None) -> Value:
        me = current()
        me.program.checkpoint()
        me.loads.append(self.access("load", writes=False))
        return Value(self.tensor.clone(), self.dtype, layout)

    def store(self, value: Any) -> None:
        me = current()
        me.program.checkpoint()
        if value.shape != self.shape:
            raise Misuse(f"{self} has shape {self.shape}, what is stored at {here()} {value.shape}")
        if value.dtype != self.dtype:
            raise Misuse(f"{self} holds {self.dtype}; what is stored at {here()} is {value.dtype}")
        data = value.data
        self.access("store", writes=True)
        self.tensor.copy_(data)

    def access(
        self,
        what: str,
        writes: bool,
        operation: Operation | None = None,
        generic: bool = False,
    ) -> Access:
        """Note an access by the current partition, and raise if another one is not ordered with it.

        Raises:
            Race: another access, of which one writes, may happen at the same time.
            Misuse: nothing was ever written to what is read.
        """
        me = current()
        generic = generic or operation is None
        access = Access(me, what, writes, operation.bit if operation else 0, generic)
        clock = me.clock
        for region in self.allocation.regions(self):
            write = region.write
            if write is not None:
                if not write.known_to(clock):
                    raise Race(self._conflict(access, write))
                if write.generic and not generic:
                    self._need_fence(access, write, clock)
            elif not writes:
                raise Misuse(f"{self}: {access}, and nobody has written to it")
            if writes:
                for read in region.reads:
                    if not read.known_to(clock):
                        raise Race(self._conflict(access, read))
                    if not generic and read.may_be_overtaken(clock):
                        raise Race(self._overtaken(access, read))
                region.write, region.reads = access, []
            else:
                region.reads = [
                    read
                    for read in region.reads
                    if read.may_be_overtaken(clock) or not read.known_to(clock)
                ]
                region.reads.append(access)
        return access

    def _need_fence(self, access: Access, write: Access, clock: Clock) -> None:
        who = write.who
        if clock.of(("fence", who)) >= write.epoch:
            return
        if access.who.fenced.get(who, 0) >= write.epoch:
            if who is not access.who:
                return  # each thread that reads has waited for these writes and fenced them itself
            lacking = "the fence_async_shared between them needs a gl.thread_barrier after it"
        else:
            lacking = (
                f"fence_async_shared and then gl.thread_barrier, by {who} after its writes, are "
                "missing between them"
            )
        raise Race(f"{self}: {access}, of what was written by {write}; {lacking}")

    def _overtaken(self, access: Access, read: Access) -> str:
        return (
            f"{self}: {access}, which may overtake {read}: the arrival at {read.let_go} let go of "
            "these bytes, and neither it nor a barrier of threads waits for loads in flight. "
            "Before it a warpgroup_mma_wait for a product of what was loaded is missing, or a "
            "fence_async_shared"
        )

    def _conflict(self, access: Access, other: Access) -> str:
        me = access.who
        if not other.bit:
            lacking = f"no chain of arrivals and waits leads from {other.who} to {me}"
        elif other.what == "TMA load":
            lacking = "no wait on the copy's barrier comes before"
        elif other.what == "TMA store":
            lacking = "tma.store_wait and then gl.thread_barrier are missing before"
            if me.half_done & other.bit:
                lacking = "gl.thread_barrier is missing after tma.store_wait"
        elif other.what == "warpgroup_mma":
            lacking = "no warpgroup_mma_wait comes before"
        else:
            lacking = "no wait for it comes before"
        return f"{self}: {access}, and {other} may happen at the same time; {lacking}"


def contiguous(shape: Any) -> tuple[int, ...]:
    """Strides of a row-major array."""
    strides = [1]
    for size in reversed(tuple(shape)[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> View:
    """``gl.allocate_shared_memory``."""
    shape = tuple(int(each) for each in shape)
    size = max(1, dtype.primitive_bitwidth // 8)
    allocation = Allocation(math.prod(shape) * size)
    view = View(allocation, dtype, shape, contiguous(shape), 0, layout)
    if value is not None:
        view.store(value)
    return view
