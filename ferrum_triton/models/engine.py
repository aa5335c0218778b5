"""Many sequences through one model: who runs, who waits, and what each step takes.

The reference loop of a kernel library, small on purpose: serving at scale is an engine's work.
Sequences join and leave between steps. A step is either a decode step of all that run, replayed
from a graph, or, while a prompt is read, chunks of prompts beside single tokens of the others.
Prompts that begin alike share the blocks of their beginning, where blocks are all that is known of
it: a model with states reads each prompt from its start. Where blocks run out, the youngest
sequence gives up its own and is read again later; its draws depend on its seed and positions alone,
so its text is the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ferrum_triton.errors import InputError
from ferrum_triton.models.decoder import BLOCK_SIZE, Decoder
from ferrum_triton.models.runner import Row, Runner, blocks_of
from ferrum_triton.runtime.blocks import PrefixIndex
from ferrum_triton.runtime.sampling import GREEDY, Sampling
from ferrum_triton.types import KvDtypeKind

_ADVICE = "Choose a value in range."

PREFILL_CHUNK = 2048
"""Tokens of prompts that go through the model at once: bounds the memory of its activations."""


@dataclass(frozen=True)
class NewToken:
    """What a step did for a sequence.

    Attributes:
        key: the sequence, as :meth:`Engine.add` named it.
        token: its next token; None where the sequence ended without one.
        logprob: the token's log-probability, if wanted.
        stopped_by: ``"length"`` (max_tokens), ``"end"`` (an end token) or ``"context"`` (no room
            left) after the last token, else ``""``.
    """

    key: int
    token: int | None
    logprob: float | None = None
    stopped_by: str = ""


@dataclass
class _Sequence:
    key: int
    ids: list[int]
    sampling: Sampling
    tokens_left: int
    end_ids: Collection[int]
    capacity: int
    row: int = -1
    cached: int = 0


class Engine:
    """Runs sequences together.

    Args:
        model: the model.
        max_seqs: sequences that run at a time; others wait.
        capacity: the most positions of a sequence; None is the model's context length.
        num_blocks: blocks of BLOCK_SIZE positions in the cache; None has enough for all.
        chunk: tokens of prompts that a step takes at most.
        kind: the kind of the cache's elements; None is the activations' dtype.
        batch_invariant: whether a sequence's results may not depend on the others by a bit. Every
            step then takes max_seqs tokens, of prompts too, and no graph is used.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_seqs: int = 8,
        capacity: int | None = None,
        num_blocks: int | None = None,
        chunk: int = PREFILL_CHUNK,
        kind: KvDtypeKind | None = None,
        batch_invariant: bool = False,
    ) -> None:
        capacity = model.config.max_positions if capacity is None else capacity
        least = blocks_of(capacity)
        for name, value, bound in (
            ("max_seqs", max_seqs, 1),
            ("chunk", chunk, 1),
            ("num_blocks", least if num_blocks is None else num_blocks, least),
        ):
            if value < bound:
                _reject(name, str(value), f"{bound} or more")
        self.model, self.capacity = model, capacity
        self.max_seqs, self.batch_invariant = max_seqs, batch_invariant
        # More than all rows can fill keep the beginnings of prompts that have ended.
        self.runner = Runner(model, max_seqs, capacity, num_blocks, kind)
        self._cache = self.runner.cache
        self._chunk = max_seqs if batch_invariant else max(chunk, max_seqs)
        self._prefixes = PrefixIndex(self._cache.allocator, BLOCK_SIZE)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # the oldest first
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._keys = itertools.count()
        self._joined_or_left = False
        self._unread: list[NewToken] = []
        self.num_preempted = 0

    def add(
        self,
        ids: Sequence[int],
        sampling: Sampling = GREEDY,
        max_tokens: int = 256,
        end_ids: Collection[int] = (),
        capacity: int | None = None,
    ) -> int:
        """Have a sequence run as soon as there is room; its key.

        Args:
            ids: the prompt.
            sampling: how it chooses.
            max_tokens: the most tokens to choose, 1 or more.
            end_ids: the tokens that end it, which are not returned.
            capacity: the most positions it may have, up to the engine's; None is the engine's.

        Raises:
            InputError: the prompt is empty, longer than the capacity, or holds what is no id of the
                vocabulary; max_tokens, the capacity or a biased id is out of range.
        """
        vocabulary = self.model.config.vocab_size
        room = self.capacity if capacity is None else capacity
        if not 1 <= room <= self.capacity:
            _reject("capacity", str(capacity), f"1 to the engine's {self.capacity}")
        if not 1 <= len(ids) <= room:
            allowed = f"1 to the {room} positions of a sequence"
            _reject("prompt", f"{len(ids)} tokens", allowed, "Shorten it, or write one.")
        for name, values in (("prompt", ids), ("logit_bias", sampling.logit_bias)):
            unknown = next(
                (i for i in values if type(i) is not int or not 0 <= i < vocabulary), None
            )
            if unknown is not None:
                advice = "Use the tokenizer that came with the model."
                _reject(name, f"holding {unknown}", f"ids in [0, {vocabulary})", advice)
        if max_tokens < 1:
            _reject("max_tokens", str(max_tokens), "1 or more")
        key = next(self._keys)
        self._waiting.append(_Sequence(key, list(ids), sampling, max_tokens, end_ids, room))
        return key

    def cancel(self, key: int) -> None:
        """Have a sequence end where it is; one that has ended is left alone."""
        self._unread = [new for new in self._unread if new.key != key]
        for seq in [*self._waiting, *self._running]:
            if seq.key == key:
                self._stop(seq)

    @property
    def busy(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self._running or self._waiting)

    def progress(self, key: int) -> int:
        """How many tokens of a sequence have their keys in the cache."""
        found = (seq.cached for seq in [*self._waiting, *self._running] if seq.key == key)
        return next(found, 0)

    def news_of(self, keys: Collection[int]) -> list[NewToken]:
        """Run a step for some of the sequences; what it chose for others is kept for them.

        For callers that share an engine: each asks for its own. Nothing runs where a step that
        another asked for has left news of these.
        """
        if not any(new.key in keys for new in self._unread):
            self._unread += self.step()
        mine = [new for new in self._unread if new.key in keys]
        self._unread = [new for new in self._unread if new.key not in keys]
        return mine

    def step(self) -> list[NewToken]:
        """Run one step; what it, or one before it, chose."""
        if self.runner.num_in_flight and self._joined_or_left:
            return self._collect()  # what the host knows of every row is complete then
        self._admit()
        if not self._running:
            return []
        graphs = not self.batch_invariant and not any(
            len(seq.ids) - seq.cached > 1 or seq.sampling.changes_logits for seq in self._running
        )
        if self.runner.num_in_flight or graphs:
            return self._decode()
        return self._mixed()

    def _admit(self) -> None:
        """Have waiting sequences join while there are rows and blocks for their prompts."""
        while self._waiting and self._free_rows and not self.runner.num_in_flight:
            seq, allocator = self._waiting[0], self._cache.allocator
            shared = self._prefixes.find(seq.ids) if self._cache.can_share else []
            # The last token goes through the model in any case, and its block is copied then.
            whole = len(shared) * BLOCK_SIZE == len(seq.ids)
            fresh = blocks_of(len(seq.ids)) - len(shared) + whole
            idle = sum(allocator.holders(block) == 0 for block in shared)
            # A block for each that runs, so that whoever joins is not sent away at once.
            if allocator.num_free - idle < fresh + len(self._running):
                if self._running:
                    return
                shared, whole = [], False
            self._waiting.popleft()
            self._running.append(seq)
            self._joined_or_left = True
            seq.row = self._free_rows.pop()
            self._cache.share(seq.row, shared)
            seq.cached = len(shared) * BLOCK_SIZE - whole
            self._cache.lengths[seq.row] = seq.cached
            self._cache.reserve({seq.row: len(seq.ids)})
            if whole:
                self._cache.make_writable(seq.row, seq.cached)

    def _decode(self) -> list[NewToken]:
        """A decode step of all that run, and one ahead where nothing stands against it."""
        if not self.runner.num_in_flight:
            self._make_room()
            self._enqueue(0)
        if self._may_look_ahead():
            self._enqueue(1)
        return self._collect()

    def _enqueue(self, ahead: int) -> None:
        """Enqueue a decode step that feeds the token chosen ``ahead`` steps from now."""
        rows = {}
        for seq in self._running:
            start = seq.cached + ahead
            rows[seq.row] = Row(seq.key, seq.ids, start, start + 1, seq.sampling)
        self._cache.reserve({row: r.end for row, r in rows.items()})
        self.runner.decode(rows)
        self._joined_or_left = False

    def _may_look_ahead(self) -> bool:
        """Whether the step after the one in flight is known: the same rows, with room for each."""
        if self._joined_or_left or (self._waiting and self._free_rows):
            return False
        wanted = {seq.row: seq.cached + 2 for seq in self._running}
        ends = any(seq.tokens_left < 2 or wanted[seq.row] > seq.capacity for seq in self._running)
        return not ends and self._can_reserve(wanted)

    def _can_reserve(self, lengths: dict[int, int]) -> bool:
        """Whether enough blocks are free for rows of these lengths."""
        held = self._cache.blocks
        missing = (max(blocks_of(n) - len(held[row]), 0) for row, n in lengths.items())
        return sum(missing) <= self._cache.allocator.num_free

    def _collect(self) -> list[NewToken]:
        tokens = self.runner.collect()
        news = []
        for seq in list(self._running):
            if seq.row in tokens:
                seq.cached += 1
                news.append(self._take(seq, tokens[seq.row]))
        return news

    def _mixed(self) -> list[NewToken]:
        """Single tokens of those that have read their prompts, beside chunks of prompts."""
        self._make_room()
        left = self._chunk
        rows: dict[int, Row] = {}
        behind = {seq.key: len(seq.ids) - seq.cached for seq in self._running}
        for seq in sorted(self._running, key=lambda seq: behind[seq.key] > 1):
            end = min(len(seq.ids), seq.cached + left)
            if end > seq.cached:
                sampling = seq.sampling if end == len(seq.ids) else None
                rows[seq.row] = Row(seq.key, seq.ids, seq.cached, end, sampling)
                left -= end - seq.cached
        run = self.runner.run_invariant if self.batch_invariant else self.runner.run
        chosen = run(rows)
        self._joined_or_left = False
        news = []
        for seq in list(self._running):
            if seq.row in rows:
                seq.cached = rows[seq.row].end
                if seq.row in chosen.tokens:
                    row = seq.row
                    if rows[row].end - rows[row].start > 1:  # it has read its prompt
                        self._prefixes.add(seq.ids[: seq.cached], self._cache.blocks[row])
                    news.append(self._take(seq, chosen.tokens[row], chosen.logprobs.get(row)))
        return news

    def _make_room(self) -> None:
        """Have a block for the next token of all that run, sending the youngest away if need be."""
        while True:
            wanted = {seq.row: len(seq.ids) for seq in self._running}
            if self._can_reserve(wanted):
                self._cache.reserve(wanted)
                return
            self._preempt(self._running[-1])

    def _preempt(self, seq: _Sequence) -> None:
        """Give up a sequence's blocks; it waits first in line, to be read again."""
        self._leave(seq)
        seq.cached = 0
        self._waiting.appendleft(seq)
        self.num_preempted += 1

    def _take(self, seq: _Sequence, token: int, logprob: float | None = None) -> NewToken:
        """Append a chosen token, and say whether the sequence ends."""
        if token in seq.end_ids:
            self._stop(seq)
            return NewToken(seq.key, None, None, "end")
        seq.ids.append(token)
        seq.tokens_left -= 1
        stopped_by = ""
        if seq.tokens_left == 0:
            stopped_by = "length"
        elif len(seq.ids) > seq.capacity:
            stopped_by = "context"
        if stopped_by:
            self._stop(seq)
        return NewToken(seq.key, token, logprob, stopped_by)

    def _stop(self, seq: _Sequence) -> None:
        if seq in self._waiting:
            self._waiting.remove(seq)
        else:
            self._leave(seq)

    def _leave(self, seq: _Sequence) -> None:
        """Free a row; the blocks can be found by their tokens until they are taken."""
        self._prefixes.add(seq.ids[: seq.cached], self._cache.blocks[seq.row])
        self._running.remove(seq)
        self._cache.free(seq.row)
        self._free_rows.append(seq.row)
        self._free_rows.sort(reverse=True)
        seq.row = -1
        self._joined_or_left = True


def _reject(
    name: str, got: str, allowed: str, advice: str = "Choose a value in range."
) -> NoReturn:
    raise InputError("generate", name, got, allowed, advice)
