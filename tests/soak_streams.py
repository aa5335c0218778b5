"""Calls launched over and over on streams and in graphs, each held to the bits of its first output.

Outputs are compared on the device. What a lane found is copied behind each batch of launches, and
looked at once the next batch is in flight, so that the GPU never waits for the host.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from ferrum_triton import OPS
from ferrum_triton.backends import Backend
from tests.harness import bits, clone
from tests.soak_axes import Arguments
from tests.soak_draws import Drawn, group
from tests.test_attention_fuzz import ALIKE
from tests.watchdog import Watchdog

# Launches between two looks at what was found, and the share of them that replay a graph.
BATCH, REPLAYS = 64, 0.2
# Graphs of a lane, and calls of a graph.
GRAPHS, TOGETHER = 6, 4


@dataclass(frozen=True)
class Ready:
    """A call on the device, and what it gave and left in its arguments at first."""

    drawn: Drawn
    call: Arguments
    first: list[Tensor]

    def launch(self, backend: Backend, differing: Tensor) -> None:
        """Add one to ``differing`` if the outputs have other bits than at first."""
        written = {name: self.call[name] for name in self.drawn.op.mutates}
        got = self.drawn.results(backend, self.call | clone(written))
        pairs = zip(got, self.first, strict=True)
        differing += torch.stack([(bits(x) != bits(y)).any() for x, y in pairs]).any()


@dataclass(frozen=True)
class Captured:
    """A graph of several calls, each with its comparison."""

    graph: torch.cuda.CUDAGraph
    members: list[int]


class Lane:
    """A stream, the graphs that are replayed on it alone, and how often each call differed."""

    def __init__(self, calls: Sequence[Ready], backend: Backend, pick: random.Random) -> None:
        self.calls, self.backend = calls, backend
        self.stream = torch.cuda.Stream()
        self.differing = torch.zeros(len(calls), dtype=torch.int32, device=backend.device)
        torch.cuda.synchronize()  # zeros are there, and so is all that calls read
        self.graphs = [
            self._captured(pick.sample(range(len(calls)), min(TOGETHER, len(calls))))
            for _ in range(GRAPHS)
        ]

    def _captured(self, members: list[int]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        for member in members:
            self.launch(member)  # what is compared with is compiled
        self.stream.synchronize()
        with torch.cuda.graph(graph, stream=self.stream):
            for member in members:
                self.calls[member].launch(self.backend, self.differing[member])
        return Captured(graph, members)

    def launch(self, member: int) -> None:
        """Launch a call and its comparison."""
        with torch.cuda.stream(self.stream):
            self.calls[member].launch(self.backend, self.differing[member])

    def replay(self, captured: Captured) -> None:
        """Launch a graph."""
        with torch.cuda.stream(self.stream):
            captured.graph.replay()

    def found(self) -> tuple[Tensor, torch.cuda.Event]:
        """How often each call differed so far, in the host's memory once the event is over."""
        seen = torch.empty(len(self.calls), dtype=torch.int32, pin_memory=True)
        event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            seen.copy_(self.differing, non_blocking=True)
            event.record()
        return seen, event


@dataclass(frozen=True)
class Batch:
    """Launches in flight: their names, and what the lanes will have found behind them."""

    names: list[str]
    found: list[tuple[Tensor, torch.cuda.Event]]


class Soak:
    """A pool of calls under their launch choices, and two lanes that launch them.

    Attributes:
        launches: calls that were launched.
        seconds: for how long.
        differences: launches whose outputs had other bits than at first.
    """

    def __init__(
        self, calls: Sequence[Drawn], backend: Backend, seed: int, watchdog: Watchdog
    ) -> None:
        self._drawn, self._backend, self._watchdog = calls, backend, watchdog
        self._pick = random.Random(f"launches/{seed}")
        self._stack = contextlib.ExitStack()
        self._told: set[int] = set()
        self.launches, self.seconds, self.differences = 0, 0.0, 0

    def __str__(self) -> str:
        return f"{self.launches} launches, {self.seconds:.0f} s, {self.differences} differences"

    def __enter__(self) -> Soak:
        self._watchdog.expect([drawn.name for drawn in self._drawn])
        for drawn in self._drawn:  # all at once: a choice that changes has calls launched slowly
            self._stack.enter_context(drawn.forced(self._backend.device))
        self.calls = [self._ready(drawn) for drawn in self._drawn]
        self._lanes = [Lane(self.calls, self._backend, self._pick) for _ in range(2)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watchdog.rest()
        self._stack.close()

    def _ready(self, drawn: Drawn) -> Ready:
        call = drawn.build(self._backend.device)
        return Ready(drawn, call, drawn.results(self._backend, clone(call)))

    def launch_for(self, seconds: float) -> None:
        """Launch batches, by turns on one lane and on two, and look at each when it is over.

        What has been found is told every minute, so that a run that is cut off has told most.
        """
        start, batches, before = time.monotonic(), 0, self.seconds
        in_flight: deque[Batch] = deque()
        while time.monotonic() < start + seconds:
            in_flight.append(self._launch(self._lanes[: 1 + batches % 2]))
            batches += 1
            names = [name for batch in in_flight for name in batch.names]
            self._watchdog.expect(list(dict.fromkeys(names)))
            if len(in_flight) > 1:
                self._look(in_flight.popleft())
            last, self.seconds = self.seconds, before + time.monotonic() - start
            if self.seconds // 60 > last // 60:
                print(self, flush=True)
        while in_flight:
            self._look(in_flight.popleft())
        self.seconds = before + time.monotonic() - start

    def _launch(self, lanes: Sequence[Lane]) -> Batch:
        names: list[str] = []
        for _ in range(BATCH):
            lane = self._pick.choice(lanes)
            if self._pick.random() < REPLAYS:
                captured = self._pick.choice(lane.graphs)
                lane.replay(captured)
                members = captured.members
            else:
                members = [self._pick.randrange(len(self.calls))]
                lane.launch(members[0])
            names += [self.calls[member].drawn.name for member in members]
        self.launches += len(names)
        return Batch(names, [lane.found() for lane in self._lanes])

    def _look(self, batch: Batch) -> None:
        total = torch.zeros(len(self.calls), dtype=torch.int32)
        for seen, event in batch.found:
            event.synchronize()
            total += seen
        self.differences = int(total.sum())
        for member in total.nonzero().flatten().tolist():
            if member not in self._told:
                self._told.add(member)
                drawn = self.calls[member].drawn
                print(f"{drawn.name}: other bits than at first [{drawn.about}]", flush=True)


def share_of(names: Sequence[str], part: int, parts: int) -> tuple[Sequence[str], int]:
    """The ops of a part, and which group of each it takes: others where parts outnumber ops."""
    return names[(part - 1) % len(names) :: parts], (part - 1) // len(names)


def pool(names: Sequence[str], seed: int, size: int, number: int = 0) -> list[Drawn]:
    """About ``size`` calls, of the group of a number of each op.

    Of calls whose launch choice is asked for one shape the first alone is taken.
    """
    members = min(-(-size // len(names)), ALIKE)
    found: dict[tuple, Drawn] = {}
    for name in names:
        for drawn in group(OPS[name], seed, number)[:members]:
            found.setdefault((drawn.tunable.op, drawn.shape), drawn)
    return list(found.values())
