"""The generation loop: prefill a prompt, then one token a step until an end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ferrum_triton.errors import InputError
from ferrum_triton.files.tokenizer import Tokenizer
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.weights import Progress
from ferrum_triton.runtime.sampling import Sampler

# Tokens of a prompt that go through the model at once: bounds the memory of its activations.
PREFILL_CHUNK = 2048


@dataclass
class Stats:
    """Counts and seconds of one generation."""

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


def generate_ids(
    model: Decoder,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    stats: Stats | None = None,
    progress: Progress | None = None,
) -> Iterator[int]:
    """Yield new token ids, an end token excluded.

    Args:
        model: the model that predicts.
        prompt: at least one token id, each below the vocabulary size.
        sampler: the sampler that chooses.
        max_tokens: the most tokens to yield; the context length may allow fewer.
        end_ids: the tokens that end the text.
        stats: the counts and times, filled in while running.
        progress: a function called with the numbers of prompt tokens read and to read
            before each part of the prompt.

    Raises:
        InputError: the prompt is empty, holds an unknown id or exceeds the context length.
    """
    stats = Stats() if stats is None else stats
    _check_prompt(model, prompt, max_tokens)
    if max_tokens == 0:
        return
    room = model.config.max_positions - len(prompt)
    # The last token is chosen, not fed back: it needs no place in the cache.
    cache = model.new_cache(len(prompt) + min(max_tokens - 1, room))
    ids = torch.tensor(prompt, dtype=torch.int32, device=model.backend.device)

    start = time.perf_counter()
    for chunk in ids.split(PREFILL_CHUNK):
        if progress is not None:
            progress(cache.length, len(prompt))
        logits = model.forward(chunk, cache)
    token = sampler.choose(logits)
    stats.prompt_tokens = len(prompt)
    stats.prefill_seconds = time.perf_counter() - start

    start = time.perf_counter()
    while token not in end_ids:
        stats.new_tokens += 1
        stats.decode_seconds = time.perf_counter() - start
        yield token
        if stats.new_tokens == max_tokens:
            return
        if cache.length == cache.capacity:
            stats.stopped_by = "context"
            return
        step = torch.tensor([token], dtype=torch.int32, device=model.backend.device)
        token = sampler.choose(model.forward(step, cache))
    stats.stopped_by = "end"
    stats.decode_seconds = time.perf_counter() - start


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    stats: Stats | None = None,
    progress: Progress | None = None,
) -> Iterator[str]:
    """:func:`generate_ids` as pieces of text, each a run of whole characters."""
    stream = tokenizer.stream()
    ends = tokenizer.eos_ids
    for token in generate_ids(model, prompt, sampler, max_tokens, ends, stats, progress):
        if piece := stream.push(token):
            yield piece
    if rest := stream.finish():
        yield rest


def _check_prompt(model: Decoder, prompt: Sequence[int], max_tokens: int) -> None:
    context, vocabulary = model.config.max_positions, model.config.vocab_size
    if not 1 <= len(prompt) <= context:
        allowed = f"1 to the context length of {context}"
        raise InputError(
            "generate", "prompt", f"{len(prompt)} tokens", allowed, "Shorten it, or write one."
        )
    unknown = next((i for i in prompt if not 0 <= i < vocabulary), None)
    if unknown is not None:
        allowed = f"ids in [0, {vocabulary})"
        advice = "Use the tokenizer that came with the model."
        raise InputError("generate", "prompt", f"holding {unknown}", allowed, advice)
    if max_tokens < 0:
        raise InputError(
            "generate", "max_tokens", str(max_tokens), "0 or more", "Choose a number in range."
        )
