"""Barriers in shared memory with phases, and the hardware's named ones."""

from __future__ import annotations

from typing import Any

from ferrum_triton.gluon_emulator.clocks import Clock, Place, here
from ferrum_triton.gluon_emulator.errors import Misuse, Race
from ferrum_triton.gluon_emulator.memory import View
from ferrum_triton.gluon_emulator.schedule import Operation, Partition, current


class Barrier:
    """An mbarrier.

    ``completed`` phases are over; the next one still lacks ``pending`` arrivals and
    ``lacking_bytes``, which is negative where a copy has landed before the arrival that expects it.
    """

    def __init__(self, view: View, count: int, partition: Partition) -> None:
        self.view, self.count, self.maker = view, count, partition
        self.made_in, self.made_at = partition.clock.of(partition), here()
        self.completed, self.pending, self.lacking_bytes = 0, count, 0
        self.clock = Clock()  # of the phase under way
        self.clocks: dict[int, Clock] = {}  # of phases that are over
        # Who saw the last completed phase by waiting; the phase after may not overtake them.
        self.seen_by: list[tuple[Partition, int, Place]] = []
        self.copies: list[Operation] = []
        self.last_copy: Operation | None = None

    def __str__(self) -> str:
        return str(self.view)

    def check_usable(self, me: Partition) -> None:
        """Raise unless its initialisation is known to a partition, and was fenced."""
        if me.clock.of(self.maker) < self.made_in:
            raise Race(
                f"{self} is used at {here()} by {me}, and nothing orders its initialisation at "
                f"{self.made_at} before that"
            )
        fenced = max(me.fenced.get(self.maker, 0), me.clock.of(("fence", self.maker)))
        if fenced < self.made_in and me.program.settings.strict:
            raise Misuse(
                f"{self} is used at {here()} by {me}: fence_async_shared is missing after its "
                f"initialisation at {self.made_at}"
            )

    def arrive(self, me: Partition, count: int, expected_bytes: int = 0) -> None:
        if count < 1:
            raise Misuse(f"{self}: {count} arrivals at {here()}")
        self.lacking_bytes += expected_bytes
        self.arrive_with(me.publish(), count, f"{here()} by {me}")

    def arrive_with(self, clock: Clock, count: int, by: str) -> None:
        if self.pending < count:
            raise Misuse(
                f"{self}: {count} arrivals at {by}, where phase {self.completed} has "
                f"{self.pending} of {self.count} left"
            )
        self.pending -= count
        self.clock.join(clock)
        self._complete_if_done()

    def land(self, operation: Operation) -> None:
        """A copy has landed: count its bytes."""
        if operation.phase != self.completed:
            raise Misuse(
                f"{self}: phase {operation.phase} completed without waiting for {operation}: the "
                "bytes that mbarrier.expect was told are fewer than those copied"
            )
        self.copies.remove(operation)
        self.lacking_bytes -= operation.bytes
        self.clock.done |= operation.bit
        self.last_copy = operation
        self._complete_if_done()

    def _complete_if_done(self) -> None:
        if self.pending:
            return
        if self.lacking_bytes < 0 or (self.lacking_bytes == 0 and self.copies):
            last = self.copies[-1] if self.copies else self.last_copy
            raise Misuse(
                f"{self}: more bytes are copied in phase {self.completed} than mbarrier.expect was "
                f"told, by {last}"
            )
        if self.lacking_bytes:
            return
        # A waiter on parity alone mistakes the phase after the next for the one it is waiting for.
        for partition, epoch, place in self.seen_by:
            if self.clock.of(partition) < epoch:
                raise Race(
                    f"{self}: phase {self.completed} can complete before {partition} has seen the "
                    f"phase before it, at {place}: nothing orders that wait before the arrivals"
                )
        self.seen_by = []
        self.completed += 1
        self.clock.seen[self] = self.completed
        self.clocks = {self.completed - 1: self.clock}
        self.clock, self.pending, self.lacking_bytes = Clock(), self.count, 0

    def wait(self, me: Partition, parity: int) -> None:
        """Until the phase of a parity is over that is the next this partition does not know of.

        Or the last that it knows of, where the parity is that one's.
        """
        if parity not in (0, 1):
            raise Misuse(f"{self}: phase {parity} at {here()}; a wait takes 0 or 1")
        phase = me.clock.of(self) - 1
        if phase % 2 != parity:
            phase += 1
        me.program.scheduler.block(
            lambda: self.completed > phase,
            lambda: (
                f"{_named(phase)} of {self}, which has completed {self.completed} phases and lacks "
                f"{self.pending} of {self.count} arrivals and {self.lacking_bytes} bytes"
            ),
        )
        if self.completed > phase + 1:
            raise Race(
                f"{self}: {me} waits at {here()} for {_named(phase)}, and phase {phase + 1} can "
                "complete before that: nothing orders its arrivals after this wait"
            )
        if phase in self.clocks:
            me.clock.join(self.clocks[phase])
        self.seen_by.append((me, me.clock.of(me), here()))


def _named(phase: int) -> str:
    return f"phase {phase}" if phase >= 0 else "the phase before the first"


def barrier_of(view: View) -> Barrier:
    """The barrier in a view."""
    if not isinstance(view, View):
        raise Misuse(f"{view!r} at {here()} is no barrier")
    barrier = view.allocation.barriers.get(view.offset)
    if barrier is None:
        raise Misuse(
            f"{view} is used at {here()} as a barrier, and mbarrier.init never made it one"
        )
    barrier.check_usable(current())
    return barrier


def init(view: View, count: Any) -> None:
    me = current()
    me.program.checkpoint()
    if view.numel != 1:
        raise Misuse(f"{view} at {here()} has {view.numel} elements; a barrier is one: index it")
    if view.offset in view.allocation.barriers:
        old = view.allocation.barriers[view.offset]
        raise Misuse(
            f"{view} is initialised at {here()}, and was at {old.made_at}: mbarrier.invalidate is "
            "missing between them"
        )
    if int(count) < 1:
        raise Misuse(f"{view} is initialised at {here()} for {int(count)} arrivals")
    view.access("mbarrier.init", writes=True)
    view.allocation.barriers[view.offset] = Barrier(view, int(count), me)


def invalidate(view: View) -> None:
    me = current()
    me.program.checkpoint()
    barrier = barrier_of(view)
    for partition, epoch, place in barrier.seen_by:
        if me.clock.of(partition) < epoch:
            raise Race(f"{view} is invalidated at {here()}, and {partition} may wait at {place}")
    if barrier.copies:
        raise Misuse(f"{view} is invalidated at {here()}, and in flight is {barrier.copies[0]}")
    del view.allocation.barriers[view.offset]


class NamedBarrier:
    """One of the hardware's sixteen: ``bar.sync`` and ``bar.arrive`` with a number of threads."""

    def __init__(self, number: int) -> None:
        self.number, self.threads, self.arrived, self.generation = number, 0, 0, 0
        self.clock, self.over = Clock(), Clock()
        self.members: list[Partition] = []

    def __str__(self) -> str:
        return f"named barrier {self.number}"

    def meet(self, me: Partition, threads: int | None, sync: bool) -> None:
        own = me.num_warps * 32
        threads = own if threads is None else threads
        if self.arrived and threads != self.threads:
            raise Misuse(f"{self}: {threads} threads at {here()}, {self.threads} before")
        if me in self.members:
            raise Misuse(f"{self}: {me} arrives a second time at {here()}, before it is complete")
        self.threads = threads
        if sync:
            me.synchronise()
        if self.arrived + own > threads:
            raise Misuse(f"{self}: {self.arrived + own} threads at {here()}, of {threads}")
        self.arrived += own
        self.members.append(me)
        self.clock.join(me.publish())
        generation = self.generation
        if self.arrived == threads:
            self.over, self.clock = self.clock, Clock()
            self.generation, self.arrived, self.members = generation + 1, 0, []
        if sync:
            me.program.scheduler.block(
                lambda: self.generation > generation,
                lambda: f"{self}, at which {self.arrived} of {self.threads} threads are",
            )
            me.clock.join(self.over)


def named_barrier(number: int) -> NamedBarrier:
    """The running program's."""
    known = current().program.named_barriers
    if number not in range(16):
        raise Misuse(f"named barrier {number} at {here()}: there are sixteen, from 0")
    return known.setdefault(number, NamedBarrier(number))
