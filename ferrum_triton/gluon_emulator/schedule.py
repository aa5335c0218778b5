"""Partitions of a program, run one at a time in an order drawn from a seed.

Each partition has a thread of its own, and one of them runs until it has to wait or hands over.
Asynchronous operations lie in flight until they are drawn. Since accesses are ordered by clocks,
which order is drawn decides little of what is found.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ferrum_triton.gluon_emulator.clocks import Access, Clock, Place, here
from ferrum_triton.gluon_emulator.errors import Deadlock, EmulationError, Misuse

_running = threading.local()


def current() -> Partition:
    """The partition whose code is being executed."""
    partition = getattr(_running, "partition", None)
    if partition is None:
        raise Misuse("a function of a Gluon kernel is called outside of `run`")
    return partition


class _Stopped(BaseException):
    """Unwinds a partition after another one has failed."""


class Operation:
    """Something asynchronous: its bit in clocks, what it is and where it was begun."""

    __slots__ = ("bit", "bytes", "phase", "place", "program", "what")

    def __init__(self, program: Program, what: str) -> None:
        self.program, self.what, self.place = program, what, here()
        self.bit = 1 << next(program.settings.bits)
        self.bytes = self.phase = 0  # of a TMA load: how many, and the barrier's

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"


class Partition:
    """The warps that execute one function of ``gl.warp_specialize``; the kernel's own are one."""

    def __init__(self, program: Program, name: str, num_warps: int, clock: Clock) -> None:
        self.program, self.name, self.num_warps = program, name, num_warps
        self.clock = clock
        clock.seen[self] = clock.of(self) + 1
        self.products: list[Operation] = []
        self.stores: list[Operation] = []
        self.copies: list[Operation] = []  # of cp.async, that no group holds yet
        self.groups: list[list[Operation]] = []
        # What a fence or a wait for stores did for one thread, until a barrier of all of them.
        self.fenced: dict[Partition, int] = {}
        self.half_done = 0
        self.loads: list[Access] = []  # from shared memory, which may still be in flight
        self.waits_until: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] | None = None
        self.waits_at: Place | None = None
        self.finished = False
        self.turn = threading.Semaphore(0)

    def __str__(self) -> str:
        if math.prod(self.program.settings.grid) == 1:
            return self.name
        return f"{self.name} of program {self.program.index}"

    def publish(self) -> Clock:
        """What others know once they are told, which is not what this partition does next."""
        clock = self.clock.copy()
        self.clock.seen[self] += 1
        return clock

    def synchronise(self) -> None:
        """A barrier of the partition's threads."""
        self.clock.done |= self.half_done
        self.half_done = 0
        self.clock.join(Clock({("fence", who): epoch for who, epoch in self.fenced.items()}))

    def let_go(self) -> None:
        """An arrival, which does not wait for the other warps' loads."""
        if self.num_warps > 1:  # a warp's own loads come before its arrival
            place = here()
            for load in self.loads:
                load.let_go = load.let_go or place

    def land(self) -> None:
        """All loads so far have ended, and whoever hears from this partition later knows it."""
        for load in self.loads:
            load.landed = self.clock.of(self)
        self.loads = []

    def fence(self) -> None:
        """Writes known so far get visible to asynchronous operations, after a threads' barrier."""
        self.land()
        known = self.clock.seen.items()
        self.fenced = {who: epoch for who, epoch in known if isinstance(who, Partition)}
        self.publish()
        self.after_wait()

    def after_wait(self) -> None:
        """The barrier of threads that Triton adds, which ``strict`` runs want written."""
        if not self.program.settings.strict:
            self.synchronise()

    def end(self) -> None:
        if self.products:
            raise Misuse(f"{self} ends, and nobody has waited for {self.products[0]}")
        if self.stores:
            raise Misuse(
                f"{self} ends, and no tma.store_wait has waited for {self.stores[0]}, which may "
                "still read shared memory"
            )
        if self.copies or any(self.groups):
            last = self.copies or next(group for group in self.groups if group)
            raise Misuse(f"{self} ends, and nobody has waited for {last[0]}")


class Scheduler:
    """Whose turn it is, and what is in flight, of the programs that run together."""

    def __init__(self, settings: Any, key: Any) -> None:
        self.settings = settings
        self.random = random.Random(repr((settings.seed, key)))
        # Some orders land what is in flight early, others late.
        self.haste = self.random.choice((0.05, 0.3, 0.7))
        self.in_flight: list[tuple[Operation, Callable[[], None]]] = []
        self.partitions: list[Partition] = []
        self.failure: BaseException | None = None

    def run(self, programs: list[Program], body: Callable[[], Any]) -> None:
        threads = [
            self.start(each.main, functools.partial(each.execute, body)) for each in programs
        ]
        try:
            self._next().turn.release()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._fail(error)
        if self.failure is not None:
            raise self.failure

    def start(self, partition: Partition, body: Callable[[], Any]) -> threading.Thread:
        """A thread that runs a partition, once it is its turn."""
        self.partitions.append(partition)
        thread = threading.Thread(target=self._work, args=(partition, body), daemon=True)
        thread.start()
        return thread

    def _work(self, partition: Partition, body: Callable[[], Any]) -> None:
        partition.turn.acquire()
        _running.partition = partition
        try:
            if self.failure is None:
                body()
                self.partitions.remove(partition)
            partition.finished = True
            if self.failure is None and self.partitions:
                self._next().turn.release()
        except BaseException as error:
            if isinstance(error, EmulationError):
                self._note(error, partition.program)
            partition.finished = True
            self._fail(error)

    def _note(self, error: EmulationError, program: Program) -> None:
        if not hasattr(error, "__notes__"):
            settings = self.settings
            error.add_note(f"in program {program.index} of {settings.name}, seed {settings.seed}")

    def _fail(self, error: BaseException) -> None:
        if self.failure is None and not isinstance(error, _Stopped):
            self.failure = error
        for partition in self.partitions:
            partition.turn.release()

    def checkpoint(self) -> None:
        """Before anything that others can see: perhaps it is another's turn first."""
        self._check_time()
        if self.in_flight and self.random.random() < self.haste:
            self._land()
        if len(self.partitions) > 1 and self.random.random() < 0.3:
            self._hand_over()

    def block(self, until: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until a condition holds."""
        me = current()
        self.checkpoint()
        if until():
            return
        me.waits_until, me.waits_for, me.waits_at = until, what, here()
        while not until():
            self._hand_over()
        me.waits_until = None

    def _check_time(self) -> None:
        if self.failure is not None:
            raise _Stopped
        if time.process_time() > self.settings.deadline:
            raise Deadlock(self._report("the time given is over"))

    def _hand_over(self) -> None:
        me, other = current(), self._next()
        if other is me:
            return
        other.turn.release()
        me.turn.acquire()
        if self.failure is not None:
            raise _Stopped

    def _next(self) -> Partition:
        """Draw who goes on; what is in flight lands where nobody can."""
        while True:
            self._check_time()
            able = [
                partition
                for partition in self.partitions
                if partition.waits_until is None or partition.waits_until()
            ]
            if self.in_flight and (not able or self.random.random() < self.haste):
                self._land()
            elif able:
                return self.random.choice(able)
            else:
                raise Deadlock(self._report("every partition waits, and nothing is in flight"))

    def _land(self) -> None:
        self._finish(self.in_flight.pop(self.random.randrange(len(self.in_flight))))

    def land_now(self, operations: list[Operation]) -> None:
        """Those of the operations that are still in flight."""
        now = [each for each in self.in_flight if each[0] in operations]
        self.in_flight = [each for each in self.in_flight if each[0] not in operations]
        for each in now:
            self._finish(each)

    def _finish(self, flight: tuple[Operation, Callable[[], None]]) -> None:
        operation, action = flight
        try:
            action()
        except EmulationError as error:
            self._note(error, operation.program)
            raise

    def _report(self, reason: str) -> str:
        lines = [reason]
        for partition in self.partitions:
            if partition.waits_until is None:
                at = f" at {here()}" if partition is getattr(_running, "partition", None) else ""
                lines.append(f"{partition} goes on{at}")
            else:
                what = partition.waits_for() if partition.waits_for else ""
                lines.append(f"{partition} waits at {partition.waits_at} for {what}")
        return "\n  ".join(lines)


class Program:
    """One program of a grid."""

    def __init__(self, index: tuple[int, ...], scheduler: Scheduler) -> None:
        self.index, self.scheduler, self.settings = index, scheduler, scheduler.settings
        self.loads: list[Operation] = []
        self.named_barriers: dict[int, Any] = {}
        self.main = Partition(self, "the kernel", self.settings.num_warps, Clock())
        self.specialised = False

    def execute(self, body: Callable[[], Any]) -> None:
        main, scheduler = self.main, self.scheduler
        body()
        main.end()
        scheduler.block(
            lambda: all(operation.program is not self for operation, _ in scheduler.in_flight),
            lambda: "what is in flight",
        )
        lost = [load for load in self.loads if not main.clock.done & load.bit]
        if lost:
            raise Misuse(f"the kernel ends, and nobody has waited for {lost[0]}")

    def checkpoint(self) -> None:
        self.scheduler.checkpoint()

    def fly(self, operation: Operation, action: Callable[[], None]) -> None:
        """Begin an operation, whose effect comes at a time that is drawn."""
        self.scheduler.in_flight.append((operation, action))

    def specialise(self, functions: list[tuple[Callable, tuple]], warps: list[int]) -> Any:
        """Run the first function here and each other in a partition of its own."""
        main = current()
        if self.specialised:
            raise Misuse(f"gl.warp_specialize at {here()}, inside of a partition")
        self.specialised = True
        # The kernel's warps meet the others at a barrier.
        main.synchronise()
        clock, outer_name = main.publish(), main.name
        names = _names([getattr(function, "__name__", "?") for function, _ in functions])
        main.name = names[0]
        workers = [
            Partition(self, name, count, clock.copy())
            for name, count in zip(names[1:], warps, strict=True)
        ]
        for worker, (function, args) in zip(workers, functions[1:], strict=True):
            self.scheduler.start(worker, functools.partial(_whole, worker, function, args))
        function, args = functions[0]
        result = function(*args)
        self.scheduler.block(
            lambda: all(worker.finished for worker in workers),
            lambda: "the other partitions to end",
        )
        for worker in workers:
            main.clock.join(worker.clock)
        main.name, self.specialised = outer_name, False
        return result


def _whole(worker: Partition, function: Callable, args: tuple) -> None:
    function(*args)
    worker.end()


def _names(functions: list[str]) -> list[str]:
    """A name for each partition: its function's, numbered where several run the same."""
    many = {name for name in functions if functions.count(name) > 1}
    counts: dict[str, int] = {}
    names = []
    for name in functions:
        counts[name] = counts.get(name, -1) + 1
        names.append(f"{name} {counts[name]}" if name in many else name)
    return names
