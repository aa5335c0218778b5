"""The order of accesses to global memory, between partitions and between programs of a launch.

Each element of a tensor remembers who wrote it last, and who read it last since. Programs begin in
no order, whatever order they are run in; scalar atomics that acquire and release order them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_triton.gluon_emulator.clocks import Access, Clock
from ferrum_triton.gluon_emulator.errors import Race
from ferrum_triton.gluon_emulator.schedule import Operation, current

# An atomic of more lanes orders nothing: it adds up, and nobody waits for it.
MOST_LANES = 32


class Ledger:
    """Of a storage, which several tensors may share."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.item = num_bytes, 0
        self.accesses: list[Access | None] = [None]
        self.writes = self.reads = torch.zeros(0, dtype=torch.int32)
        self.clocks: dict[int, Clock] = {}

    def _refine(self, item: int) -> int:
        """Entries as fine as the finest elements that were accessed; how many an element has."""
        if not self.item:
            self.item = item
            self.writes, self.reads = torch.zeros((2, self.num_bytes // item), dtype=torch.int32)
        elif item < self.item:
            times = self.item // item
            self.item = item
            self.writes, self.reads = (
                each.repeat_interleave(times) for each in (self.writes, self.reads)
            )
        return item // self.item

    def entries(self, index: Tensor, item: int) -> Tensor:
        """Of elements by their index."""
        times = self._refine(item)
        if times == 1:
            return index
        return index[..., None] * times + torch.arange(times)

    def note(
        self,
        name: str,
        what: str,
        entries: Tensor,
        writes: bool,
        changed: Tensor | None = None,
        operation: Operation | None = None,
        atomic: bool = False,
    ) -> None:
        """An access by the current partition.

        Args:
            name: the tensor's name.
            what: the kind of access, for messages.
            entries: the entries of its elements.
            writes: whether the access writes.
            changed: whether each element gets another value by a write. Where it keeps its value,
                the write races with nobody.
            operation: the asynchronous operation that the access is part of, if any.
            atomic: whether the access is atomic, which races with no other atomic.

        Raises:
            Race: another access, of which one writes, may happen at the same time.
        """
        if not entries.numel():
            return
        access = Access(current(), what, writes, operation.bit if operation else 0, not operation)
        access.atomic = atomic
        touched = entries if changed is None else entries[changed]
        self._check(name, access, self.writes[touched])
        if writes:
            self._check(name, access, self.reads[touched])
        number = len(self.accesses)
        self.accesses.append(access)
        if writes:
            self.writes[entries], self.reads[entries] = number, 0
        else:
            self.reads[entries] = number

    def _check(self, name: str, access: Access, numbers: Tensor) -> None:
        clock = access.who.clock
        if not numbers.numel() or not int(numbers.max()):
            return
        for number in numbers.unique().tolist():
            other = self.accesses[number]
            if other is None or other.known_to(clock) or (access.atomic and other.atomic):
                continue
            raise Race(f"{name}: {access}, and {other} {_lacking(access, other)}")

    def acquire(self, address: int, sem: str | None, scope: str | None) -> None:
        """What an atomic at an address takes over of those before it."""
        if sem not in ("relaxed", "release") and scope != "cta":
            current().clock.join(self.clocks.get(address, Clock()))

    def release(self, address: int, sem: str | None, scope: str | None) -> None:
        """What it publishes for those after it."""
        if sem not in ("relaxed", "acquire") and scope != "cta":
            self.clocks.setdefault(address, Clock()).join(current().publish())


def _lacking(access: Access, other: Access) -> str:
    if other.bit:
        return (
            "may happen at the same time: tma.store_wait waits until the source is read, and "
            "nothing in a launch waits for what is written"
        )
    if access.who.program is other.who.program:
        return "may happen at the same time: no chain of arrivals and waits leads from that to this"
    return "may happen at the same time: no atomic of one program orders it with the other"
