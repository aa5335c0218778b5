"""Steps of a model over one cache: decode steps replayed from graphs, everything else eager.

A decode step takes token, position and length of every row from device memory, chooses the next
token there and moves the row on, so that a replay needs nothing of the host. Graphs are captured
for powers of two of rows, the largest first, in one pool of memory. The host reads a step's tokens
while the next one runs. Where there are no device graphs the same step runs eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.models.decoder import BLOCK_SIZE, Decoder
from ferrum_triton.models.step import Spans, Step, varlen_step
from ferrum_triton.runtime.graph import HISTORY, Graph
from ferrum_triton.runtime.sampling import GREEDY, Sampler, Sampling, change_logits
from ferrum_triton.types import KvDtypeKind


@dataclass(frozen=True)
class Row:
    """What a sequence brings to a step.

    Attributes:
        key: a number that no other sequence has.
        ids: its tokens so far, of which the cache has the keys of the first ``start``.
        start: the position of the first token that goes through the model.
        end: one past the last.
        sampling: how it chooses; None where the step does not reach its last token.
    """

    key: int
    ids: Sequence[int]
    start: int
    end: int
    sampling: Sampling | None


@dataclass(frozen=True)
class Chosen:
    """Tokens that a step chose, by sequence, and their log-probabilities where wanted."""

    tokens: dict[int, int]
    logprobs: dict[int, float]


class Runner:
    """A model, a paged cache of ``num_rows`` sequences, and graphs of its decode steps.

    Args:
        model: the model.
        num_rows: sequences at a time.
        capacity: the most positions of a sequence.
        num_blocks: blocks of the cache; None has enough for all rows.
        kind: the kind of the cache's elements; None is the activations' dtype.

    Attributes:
        on_compile: a function called with the numbers of kernels compiled and to compile, where a
            step needs some that are not compiled; None for silence.
        compile_seconds: the time that took so far.
    """

    def __init__(
        self,
        model: Decoder,
        num_rows: int,
        capacity: int,
        num_blocks: int | None = None,
        kind: KvDtypeKind | None = None,
    ) -> None:
        self.model, self.num_rows = model, num_rows
        device = model.backend.device
        self.cache = model.new_cache(capacity, num_rows, num_blocks, kind)
        self.graph = Graph(device, num_rows)
        self._sampler = Sampler(model.backend, num_rows)
        self._on_cuda = device.type == "cuda"
        self._in_flight: list[_InFlight] = []
        self.on_compile: Callable[[int, int], None] | None = None
        self.compile_seconds = 0.0
        self._seen: set[tuple[int, int, bool]] = set()
        # What the device has of each row: None for padding.
        self._rows: list[Row | None] = [None] * num_rows
        self._greedy = True

    @property
    def captured_sizes(self) -> list[int]:
        """Numbers of rows that there are graphs for, ascending."""
        sizes = [1]
        while sizes[-1] < self.num_rows:
            sizes.append(min(2 * sizes[-1], self.num_rows))
        return sizes

    @torch.inference_mode()
    def warm_up(self, greedy: bool = True, num_tokens: int = 0) -> None:
        """Compile and capture every decode step beforehand, the largest first; on CUDA alone.

        Args:
            greedy: whether the steps choose the likeliest token.
            num_tokens: tokens of prompts in a first step, which is compiled too; 0 for none.
        """
        if not self._on_cuda:
            return
        self._set_rows([None] * self.num_rows)
        sizes = self.captured_sizes[::-1]

        def every_step() -> None:
            for count in sizes:
                self._step(count, greedy)
            if num_tokens:
                step = varlen_step(self.cache, [(0, [0] * num_tokens)], [num_tokens - 1])
                self._seen.add(_kind_of(step))
                self.model.run(step, self.cache)

        # All at once: a kernel that is slow to compile is waited for once, beside all others.
        self._compile_ahead(every_step)
        for count in sizes:
            self._capture(count, greedy)

    @torch.inference_mode()
    def run(self, rows: dict[int, Row]) -> Chosen:
        """Any numbers of tokens of any sequences, eagerly; waits for what is chosen."""
        predicted, settings, last = [], [], -1
        for row in rows.values():
            last += row.end - row.start
            if row.sampling is not None:
                predicted.append(last)
                settings.append(row.sampling)
        parts = [(seq, row.ids[row.start : row.end]) for seq, row in rows.items()]
        step = varlen_step(self.cache, parts, predicted or [last])
        kind = _kind_of(step)
        if kind not in self._seen:
            self._seen.add(kind)
            self._compile_ahead(lambda: self.model.run(step, self.cache))
        return self._finish(rows, self.model.run(step, self.cache))

    @torch.inference_mode()
    def run_invariant(self, rows: dict[int, Row]) -> Chosen:
        """As :meth:`run`, by a step of ``num_rows`` single tokens whatever there is to do.

        Products choose their kernel by the number of tokens, and attention its splits by the
        batch: with both fixed a sequence's results do not depend by a bit on what runs beside it.
        """
        tokens = [
            (seq, position) for seq, row in rows.items() for position in range(row.start, row.end)
        ]
        padding = self.num_rows - len(tokens)
        where = [*tokens, *[(0, -1)] * padding]
        ids = [rows[seq].ids[position] for seq, position in tokens] + [0] * padding
        ids_, seqs, positions = self._upload([ids, [s for s, _ in where], [p for _, p in where]])
        absent = [-1] * (self.num_rows - len(rows))
        ends = accumulate((row.end - row.start for row in rows.values()), initial=0)
        spans = Spans(
            slots=self._upload([*rows, *absent]),
            positions=self._upload([*(row.start for row in rows.values()), *absent]),
            cu_seqlens=self._upload([*ends, *[len(tokens) for _ in absent]]),
        )
        step = Step(
            ids=ids_,
            block_tables=self.cache.block_tables.index_select(0, seqs),
            positions=positions,
            kv_lens=positions + 1,
            batch_invariant=True,
            spans=spans,
        )
        logits = self.model.run(step, self.cache)
        last = [
            tokens.index((seq, row.end - 1))
            for seq, row in rows.items()
            if row.sampling is not None
        ]
        return self._finish(rows, logits.index_select(0, self._upload(last)))

    def _upload(self, numbers: list[Any]) -> Tensor:
        """Numbers as int32 on the device."""
        # Pageable memory is read before the call returns, so this neither waits nor races.
        values = torch.tensor(numbers, dtype=torch.int32)
        return values.to(self.model.backend.device, non_blocking=True)

    def _download(self, values: Tensor) -> list[Any]:
        """Values on the host; waits for them, and for nothing enqueued after them."""
        if not self._on_cuda:
            return values.tolist()
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return pinned.tolist()

    def _finish(self, rows: dict[int, Row], logits: Tensor) -> Chosen:
        """Note what is cached after a step, and choose for the rows that reached their last token.

        Args:
            rows: the rows of the step.
            logits: [num_reached, vocab_size], in the rows' order; anything if none did.
        """
        self._note_lengths(rows)
        reached = {seq: row for seq, row in rows.items() if row.sampling is not None}
        return self._choose(logits, reached) if reached else Chosen({}, {})

    def _note_lengths(self, rows: dict[int, Row]) -> None:
        for seq, row in rows.items():
            self.cache.lengths[seq] = row.end

    def _choose(self, logits: Tensor, rows: dict[int, Row]) -> Chosen:
        """One token after each row of logits, by each row's settings."""
        settings = [row.sampling for row in rows.values() if row.sampling is not None]
        logprobs: dict[int, float] = {}
        plain = None
        if any(s.logprobs for s in settings):
            plain = logits.float().log_softmax(-1)
        if any(s.changes_logits for s in settings):
            change_logits(
                self.model.backend, logits, settings, [r.ids[: r.end] for r in rows.values()]
            )
        greedy = all(s.temperature == 0 for s in settings)
        self._rows = [None] * self.num_rows  # what the sampler has is no longer the rows'
        if not greedy:
            self._sampler.set(settings)
        positions = self._upload([row.end - 1 for row in rows.values()])
        chosen = self._sampler.choose(logits, positions, greedy)
        tokens = dict(zip(rows, self._download(chosen), strict=True))
        if plain is not None:
            values = self._download(plain.gather(1, chosen.long()[:, None])[:, 0])
            wanted = zip(rows, settings, values, strict=True)
            logprobs = {seq: value for seq, s, value in wanted if s.logprobs}
        return Chosen(tokens, logprobs)

    def decode(self, rows: dict[int, Row]) -> None:
        """Enqueue a decode step of single tokens; :meth:`collect` returns what it chose.

        The tokens of rows that were in the step before are taken from the device, whether or not
        the host has read them: their last id may be unknown here.
        """
        wanted: list[Row | None] = [rows.get(seq) for seq in range(max(rows) + 1)]
        continues = self._continues(wanted)
        # What the history has of earlier steps is read before it is written over.
        for step in self._in_flight[: -(HISTORY - 1) if continues else None]:
            step.read()
        if not continues:
            self._set_rows(wanted)
        self._rows[: len(wanted)] = wanted  # and the others are padding
        count = next(size for size in self.captured_sizes if size >= len(wanted))
        self._launch(count, self._greedy)
        self._note_lengths(rows)
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
        places = {seq: row.start % HISTORY for seq, row in rows.items()}
        self._in_flight.append(_InFlight(self.graph.state.history, places, event))

    @property
    def num_in_flight(self) -> int:
        """Decode steps that were enqueued and not collected."""
        return len(self._in_flight)

    def collect(self) -> dict[int, int]:
        """Wait for the oldest decode step in flight; its tokens by sequence."""
        return self._in_flight.pop(0).read()

    def _continues(self, wanted: list[Row | None]) -> bool:
        """Whether the device has these rows already, as the step before left them."""
        padded = [*wanted, *[None] * (self.num_rows - len(wanted))]
        left = [None if old is None else (old.key, old.end) for old in self._rows]
        return left == [None if new is None else (new.key, new.start) for new in padded]

    def _set_rows(self, rows: list[Row | None]) -> None:
        """Tell the device of the rows of the next step."""
        padded = [*rows, *[None] * (self.num_rows - len(rows))]
        tokens = [0 if row is None else row.ids[row.start] for row in padded]
        steps = [-1 if row is None else row.start for row in padded]
        self.graph.set_decode_state(tokens, steps)
        settings = [(row and row.sampling) or GREEDY for row in padded]
        self._greedy = all(s.temperature == 0 for s in settings)
        if not self._greedy:
            self._sampler.set(settings)
        self._rows = padded

    @torch.inference_mode()
    def _launch(self, count: int, greedy: bool) -> None:
        """One decode step of the first ``count`` rows: replayed, or captured at its first time."""
        if not self.graph.replay((count, greedy)):
            self._compile_ahead(lambda: self._step(count, greedy))
            self._capture(count, greedy)

    def _capture(self, count: int, greedy: bool) -> None:
        """Run a decode step whose kernels are compiled, and keep a graph of it."""
        owners = [*self.cache.tensors, *(t for pair in self.model.tables for t in pair)]
        self.graph.capture((count, greedy), lambda: self._step(count, greedy), owners)

    def _compile_ahead(self, step: Callable[[], object]) -> None:
        if self.model.parallel is not None and self.model.parallel.capacity is None:
            return  # ranks would exchange rows by counts that no kernel has written
        start = time.perf_counter()
        self.model.backend.compile_ahead(step, self.on_compile)
        self.compile_seconds += time.perf_counter() - start

    def _step(self, count: int, greedy: bool) -> None:
        self.graph.state.advance(self._choose_next(count, greedy))

    def _choose_next(self, count: int, greedy: bool) -> Tensor:
        """The next tokens of the first ``count`` rows, all of it on the device."""
        state = self.graph.state
        step = Step(
            ids=state.token[:count],
            block_tables=self.cache.block_tables[:count],
            positions=state.pos[:count],
            kv_lens=state.kv_len[:count],
        )
        logits = self.model.run(step, self.cache)
        return self._sampler.choose(logits, state.pos[:count], greedy)


@dataclass
class _InFlight:
    """A decode step that was enqueued.

    Attributes:
        history: what steps chose, by place and sequence.
        places: its own of each sequence.
        event: what has passed once they are there.
        tokens: what was read of them.
    """

    history: Tensor
    places: dict[int, int]
    event: torch.cuda.Event | None
    tokens: dict[int, int] | None = None

    def read(self) -> dict[int, int]:
        """Wait for the tokens; the history may be written over then."""
        if self.tokens is None:
            if self.event is not None:
                self.event.synchronize()
            history = self.history.tolist()
            self.tokens = {seq: history[place][seq] for seq, place in self.places.items()}
        return self.tokens


def _kind_of(step: Step) -> tuple[int, int, bool]:
    """What a step's kernels depend on: between powers of two of tokens they seldom change."""
    num_predicted = len(step.ids if step.predicted is None else step.predicted)
    return len(step.ids).bit_length(), num_predicted.bit_length(), step.longest > 1


def blocks_of(length: int) -> int:
    """Blocks that so many positions take."""
    return -(-length // BLOCK_SIZE)
