"""Prompts to answers: text or ids, one or many, at once or as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeAlias

from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.files.tokenizer import Tokenizer
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.engine import PREFILL_CHUNK, Engine, NewToken
from ferrum_triton.models.weights import Progress
from ferrum_triton.runtime.sampling import GREEDY, Sampling

Prompt: TypeAlias = str | Sequence[int] | Tensor

_ADVICE = "Choose a value in range."

MAX_SEQS = 32
"""Sequences that run at a time where the caller does not say."""

LONGEST_UNKNOWN = 8192
"""Positions of a sequence where prompts come from an iterator, which cannot be measured."""


@dataclass
class Stats:
    """Counts and seconds of one generation."""

    setup_seconds: float = 0.0  # compiling kernels and capturing graphs
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    stopped_by: str = "length"  # or "end" (an end token) or "context" (no room left)

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_speed(self) -> float:
        """New tokens per second. The first is not counted: prefill computes it."""
        return max(self.new_tokens - 1, 0) / max(self.decode_seconds, 1e-9)


@dataclass
class Generation:
    """The answer to one prompt.

    Attributes:
        ids: the tokens chosen, without an end token.
        text: what they say; ``""`` for a model without a tokenizer.
        stopped_by: ``"length"``, ``"end"``, ``"stop"`` (a stop string) or ``"context"``.
        logprobs: of each token, where :class:`Sampling` asks for them.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped_by: str = ""
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """What one step added to one answer.

    Attributes:
        index: the prompt, counted from 0.
        token: the token chosen; None where there is none but an end.
        text: the text that is certain by now: whole characters, and nothing that may yet turn out
            to be a stop string.
        logprob: the token's, where asked for.
        stopped_by: as in :class:`Generation` after the last token, else ``""``.
    """

    index: int
    token: int | None
    text: str = ""
    logprob: float | None = None
    stopped_by: str = ""


def generate(
    model: Decoder, prompts: Prompt | Iterable[Prompt], **settings: Any
) -> Generation | list[Generation]:
    """Answer prompts; the settings are those of :func:`stream`.

    Returns:
        One answer for one prompt, else a list in the prompts' order.
    """
    answers: dict[int, Generation] = {}
    prompts = _as_lists(prompts)
    single = _is_prompt(prompts)
    if not single and isinstance(prompts, Sequence):
        answers = {i: Generation() for i in range(len(prompts))}
    for piece in stream(model, prompts, **settings):
        answer = answers.setdefault(piece.index, Generation())
        if piece.token is not None:
            answer.ids.append(piece.token)
        if piece.logprob is not None:
            answer.logprobs.append(piece.logprob)
        answer.text += piece.text
        answer.stopped_by = piece.stopped_by or answer.stopped_by
    return answers[0] if single else [answers[i] for i in sorted(answers)]


def stream(
    model: Decoder,
    prompts: Prompt | Iterable[Prompt],
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    end_ids: Collection[int] | None = None,
    max_seqs: int | None = None,
    capacity: int | None = None,
    engine: Engine | None = None,
) -> Iterator[Piece]:
    """Answer prompts, yielding each token as it is chosen.

    Args:
        model: the model that predicts.
        prompts: a text, its token ids, or several of either; an iterator is read as there is room.
        sampling: how tokens are chosen, for all prompts or one each.
        max_tokens: the most tokens of an answer; the context length may allow fewer.
        stop: strings that end an answer and are no part of it; needs the model's tokenizer.
        end_ids: tokens that end an answer; None takes the tokenizer's.
        max_seqs: sequences that run at a time at most; None has up to MAX_SEQS.
        capacity: the most positions of a sequence, its prompt and answer together; None has what
            the prompts need, or LONGEST_UNKNOWN where they come from an iterator.
        engine: the engine to run them, for settings beyond these; None keeps one with the model.

    Raises:
        InputError: there is no prompt, one cannot be run, or a setting is out of range.
    """
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        _reject("stop", "an empty string", "strings of a character or more")
    if max_tokens < 0:
        _reject("max_tokens", str(max_tokens), "0 or more")
    prompts = _as_lists(prompts)
    for name, number in (("max_seqs", max_seqs), ("capacity", capacity)):
        if number is not None and number < 1:
            _reject(name, str(number), "1 or more")
    several: Any = [prompts] if _is_prompt(prompts) else prompts
    ids: Iterator[list[int]] = (_encode(model, prompt) for prompt in several)
    num_tokens, needed, num_seqs = 0, LONGEST_UNKNOWN, max_seqs or MAX_SEQS
    if isinstance(several, Sequence):
        if not several:
            _reject("prompts", "none", "one or more")
        _check_settings(sampling, len(several))
        known = list(ids)
        num_tokens = sum(map(len, known))
        needed = max(map(len, known)) + max(max_tokens - 1, 0)
        num_seqs, ids = min(len(known), num_seqs), iter(known)
    elif not isinstance(sampling, Sampling):
        _reject("sampling", "several", "one for all prompts of an iterator")
    if engine is None:
        context = model.config.max_positions
        engine = engine_of(model, num_seqs, min(capacity or needed, context), num_tokens=num_tokens)
    if end_ids is None:
        end_ids = model.tokenizer.eos_ids if model.has_tokenizer else ()
    if stops and not model.has_tokenizer:
        _reject("stop", "given", "none for a model without a tokenizer")
    if max_tokens == 0:
        return (Piece(index, None, stopped_by="length") for index, _ in enumerate(ids))
    add = partial(
        engine.add,
        max_tokens=max_tokens,
        end_ids=frozenset(end_ids),
        capacity=None if capacity is None else min(capacity, engine.capacity),
    )
    return _run(engine, add, ids, sampling, stops, max_seqs or 2 * engine.max_seqs)


def _run(
    engine: Engine,
    add: Callable[[Sequence[int], Sampling], int],
    prompts: Iterator[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    stops: Sequence[str],
    most: int,
) -> Iterator[Piece]:
    """Keep ``most`` prompts in the engine until all are answered."""
    tokenizer = engine.model.tokenizer if engine.model.has_tokenizer else None
    answering: dict[int, tuple[int, _Text]] = {}
    try:
        source = enumerate(prompts)
        while True:
            for index, ids in islice(source, most - len(answering)):
                key = add(ids, sampling if isinstance(sampling, Sampling) else sampling[index])
                answering[key] = index, _Text(tokenizer, stops)
            if not answering:
                return
            for new in engine.news_of(answering.keys()):
                if new.key not in answering:  # it has ended by a stop string
                    continue
                index, text = answering[new.key]
                piece = text.add(index, new)
                if piece.stopped_by:
                    del answering[new.key]
                    engine.cancel(new.key)
                yield piece
    finally:
        for key in answering:
            engine.cancel(key)


class _Text:
    """The text of one answer, as far as it is certain."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stops, self._held = stops, ""

    def add(self, index: int, new: NewToken) -> Piece:
        """The piece of a token."""
        if self._stream is None:
            return Piece(index, new.token, "", new.logprob, new.stopped_by)
        if new.token is not None:
            self._held += self._stream.push(new.token)
        if new.stopped_by:
            self._held += self._stream.finish()
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            return Piece(index, new.token, self._held[: min(found)], new.logprob, "stop")
        kept = 0 if new.stopped_by else self._uncertain()
        sure = len(self._held) - kept
        text, self._held = self._held[:sure], self._held[sure:]
        return Piece(index, new.token, text, new.logprob, new.stopped_by)

    def _uncertain(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


def engine_of(
    model: Decoder,
    num_seqs: int,
    capacity: int,
    greedy: bool = True,
    on_compile: Progress | None = None,
    num_tokens: int = 0,
) -> Engine:
    """The model's engine if it is idle and large enough, else a new one in its place.

    Sizes are rounded up, so that the graphs of one call serve the next.

    Args:
        model: the model.
        num_seqs: sequences at a time.
        capacity: the most positions of each.
        greedy: whether a new engine captures steps that choose the likeliest token, not ones that
            draw; others are captured when they first run.
        on_compile: a function called with the numbers of kernels compiled and to compile.
        num_tokens: tokens of the prompts, together; 0 where they are not known.
    """
    engine = model.engine
    if engine is None or engine.busy or engine.max_seqs < num_seqs or engine.capacity < capacity:
        num_seqs = 1 << (num_seqs - 1).bit_length()
        capacity = min(max(256, 1 << (capacity - 1).bit_length()), model.config.max_positions)
        model.engine = None  # its memory is given back first
        model.engine = engine = Engine(model, max_seqs=num_seqs, capacity=capacity)
        engine.runner.on_compile = on_compile
        engine.runner.warm_up(greedy, min(num_tokens, PREFILL_CHUNK))
    engine.runner.on_compile = on_compile
    return engine


def generate_ids(
    model: Decoder,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    end_ids: Collection[int] = (),
    stats: Stats | None = None,
    progress: Progress | None = None,
    on_compile: Progress | None = None,
) -> Iterator[int]:
    """Yield new token ids, an end token excluded.

    Args:
        model: the model that predicts.
        prompt: at least one token id, each below the vocabulary size.
        sampling: how tokens are chosen.
        max_tokens: the most tokens to yield; the context length may allow fewer.
        end_ids: the tokens that end the text.
        stats: the counts and times, filled in while running.
        progress: a function called with the numbers of prompt tokens read and to read
            before each part of the prompt.
        on_compile: a function called with the numbers of kernels compiled and to compile.

    Raises:
        InputError: the prompt is empty, holds an unknown id or exceeds the context length.
    """
    start = time.perf_counter()
    stats = Stats() if stats is None else stats
    context = model.config.max_positions
    if not 1 <= len(prompt) <= context:
        allowed = f"1 to the context length of {context}"
        _reject("prompt", f"{len(prompt)} tokens", allowed, "Shorten it, or write one.")
    if max_tokens < 0:
        _reject("max_tokens", str(max_tokens), "0 or more")
    if max_tokens == 0:
        return
    # The last token is chosen, not fed back: it needs no place in the cache.
    capacity = min(len(prompt) + max_tokens - 1, context)
    engine = engine_of(
        model, 1, capacity, sampling.temperature == 0, on_compile, num_tokens=len(prompt)
    )
    key = engine.add(prompt, sampling, max_tokens, end_ids)
    stats.setup_seconds, start = time.perf_counter() - start, time.perf_counter()
    compiled, stopped = engine.runner.compile_seconds, False
    try:
        while not stopped:
            if progress is not None and stats.new_tokens == 0:
                progress(engine.progress(key), len(prompt))
            for new in engine.news_of((key,)):
                now = time.perf_counter()
                stopped = bool(new.stopped_by)
                if stats.prompt_tokens == 0:
                    more = engine.runner.compile_seconds - compiled
                    stats.setup_seconds += more
                    stats.prompt_tokens, stats.prefill_seconds = len(prompt), now - start - more
                    start = now
                stats.decode_seconds = now - start
                stats.stopped_by = new.stopped_by or stats.stopped_by
                if new.token is not None:
                    stats.new_tokens += 1
                    yield new.token
    finally:
        engine.cancel(key)


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stats: Stats | None = None,
    progress: Progress | None = None,
    on_compile: Progress | None = None,
) -> Iterator[str]:
    """:func:`generate_ids` as pieces of text, each a run of whole characters."""
    decoded = tokenizer.stream()
    ends = tokenizer.eos_ids
    settings = (sampling, max_tokens, ends, stats, progress, on_compile)
    for token in generate_ids(model, prompt, *settings):
        if piece := decoded.push(token):
            yield piece
    if rest := decoded.finish():
        yield rest


def _as_lists(prompts: Any) -> Any:
    """Prompts in a tensor or an array as lists."""
    return prompts.tolist() if hasattr(prompts, "tolist") else prompts


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, not several."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int | float)


def _encode(model: Decoder, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    return prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)


def _check_settings(sampling: Sampling | Sequence[Sampling], count: int) -> None:
    if not isinstance(sampling, Sampling) and len(sampling) != count:
        _reject("sampling", f"{len(sampling)} settings", f"one, or {count}")


def _reject(
    name: str, got: str, allowed: str, advice: str = "Choose a value in range."
) -> NoReturn:
    raise InputError("generate", name, got, allowed, advice)
