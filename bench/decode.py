"""Tokens a second of whole models through the engine, as a user of ``generate`` gets them.

    python -m bench.decode [MODEL ...] [--formats q4_K bf16] [--batches 1 8 32]
                           [--contexts 1024] [--beside transformers] [--through convert]
                           [--json FILE]

Models have the shapes of :mod:`bench.random_models` and random weights. Every sequence has a prompt
of its own, as long as the context less what is decoded. Rows ``decode/<model>/<format>/b<batch>/
ctx<context>`` are the tokens a second of all sequences together from the host's clock, while all of
them run; ``prefill/...`` are those of reading the prompts. The roof is the weights that a step
reads, experts by how many of them a batch is expected to choose, and the keys and values, at the
copy bandwidth. What does not fit into memory costs its row and one line.

``--beside transformers`` times the same shapes in bfloat16 by transformers' own ``generate``, with
a static cache and a compiled step, once ours has left the GPU; ``--through convert`` the same model
with weights packed as the format says, after ``integrations.transformers.convert``. Both are peers
of the row: ``transformers/bf16`` and ``convert/<format>``.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bench.cases import code_of
from bench.launches import arch_here, meta_backend
from bench.random_models import CONFIGS, FORMATS_OF_MODELS, random_model
from bench.results import Row, add_options, save_rows
from bench.run import COPY_BYTES_PER_US
from bench.transformers_models import decode_speed, pack, their_model
from ferrum_triton import get_backend
from ferrum_triton.integrations.transformers import convert
from ferrum_triton.models import Decoder
from ferrum_triton.models.engine import PREFILL_CHUNK, Engine
from ferrum_triton.models.roof import bytes_of_step
from ferrum_triton.models.step import Step

ROW = re.compile(r"(decode|prefill)/([\w.-]+)/(\w+)/b(\d+)/ctx(\d+)")
STEPS = 96

T = TypeVar("T")


class Size(NamedTuple):
    """Sequences, and tokens of each in the end."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"b{self.batch}/ctx{self.context}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--formats", nargs="*", choices=FORMATS_OF_MODELS, default=("q4_K",))
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 8, 32), metavar="N")
    parser.add_argument("--contexts", nargs="*", type=int, default=(1024,), metavar="N")
    parser.add_argument("--beside", choices=("transformers",), help="time it too, in bfloat16")
    parser.add_argument("--through", choices=("convert",), help="time transformers' model after it")
    add_options(parser)
    options = parser.parse_args()
    if unknown := set(options.models) - set(CONFIGS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if min(options.contexts) <= STEPS:
        parser.error(f"--contexts: each is more than the {STEPS} tokens that are decoded")
    sizes = [Size(*size) for size in product(options.batches, options.contexts)]
    for name, form in product(options.models or ["qwen3-8b"], options.formats):
        rows: list[Row] = []

        def save(rows: Sequence[Row]) -> None:
            if options.json and rows:
                save_rows(options.json, rows, options.commit, options.dirty)

        for found in our_rows(f"{name}/{form}", sizes):
            save(found)
            rows += found
        peers = {"transformers/bf16": ""} if options.beside else {}
        if options.through:
            peers[f"convert/{form}"] = form
        for peer, packed in peers.items():
            for size, speed in their_speeds(name, peer, packed, sizes):
                rows = [with_peer(row, peer, size, speed) for row in rows]
                save(rows)


def our_rows(name: str, sizes: Sequence[Size]) -> Iterator[list[Row]]:
    """Rows of a ``model/format`` at each size that fits into memory; prints them."""
    start = time.perf_counter()
    model = attempt(name, lambda: random_model(*name.split("/"), get_backend("cuda")))
    if model is None:
        return
    print(f"{name}: made in {time.perf_counter() - start:.1f} s", flush=True)
    for size in sizes:
        yield attempt(f"{name}/{size}", partial(measure, model, f"{name}/{size}", *size)) or []


def their_speeds(
    name: str, peer: str, packed: str, sizes: Sequence[Size]
) -> Iterator[tuple[Size, float]]:
    """Tokens a second of transformers' model of a name, by size; prints them.

    Args:
        name: one of CONFIGS.
        peer: what rows call it.
        packed: the format that its weights are packed in before it is converted; ``""`` for none.
        sizes: batches and contexts.
    """
    gc.collect()
    torch.cuda.empty_cache()  # where ours was

    def make() -> Any:
        model = their_model(CONFIGS[name], "cuda")
        if packed:
            pack(model, CONFIGS[name], packed)
            convert(model)
        return model

    model = attempt(f"{name} {peer}", make)
    for size in sizes if model is not None else ():
        case = f"{name} {peer} {size}"
        speed = attempt(case, partial(decode_speed, model, *size, STEPS))
        if speed is not None:
            print(f"{case}: {speed:.1f} tok/s", flush=True)
            yield size, speed


def with_peer(row: Row, peer: str, size: Size, speed: float) -> Row:
    """A row, with what a peer reached where it is of decoding at that size."""
    bench, *_, batch, context = row.id.split("/")
    if (bench, f"{batch}/{context}") != ("decode", str(size)):
        return row
    print(f"{row.id}: {row.value:.1f} tok/s, {row.value / speed:.2f} times {peer}", flush=True)
    return replace(row, peers=row.peers | {peer: speed})


def attempt(what: str, make: Callable[[], T]) -> T | None:
    """What ``make`` returns; None, and a line, where that fails or does not fit into memory."""
    try:
        return make()
    except Exception as error:  # the other rows still count
        kind, first = type(error).__name__, (str(error).splitlines() or [""])[0]
    print(f"{what}: left out, {kind}: {first[:120]}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return None


def measure(model: Decoder, name: str, batch: int, context: int, steps: int = STEPS) -> list[Row]:
    """Rows of one batch; prints them. The first round compiles and captures.

    What is timed comes after two more rounds, as in a server that has answered before: calls of an
    op are replayed without Python from the third on. A figure is the middle one of three rounds: a
    prompt of 1024 tokens is over in 25 ms, and single rounds gave 30,360 to 38,220 tokens a second
    (``python -m bench.decode qwen3-8b --batches 1 --contexts 1024``, H200, 879cf4a and e7b4576).
    """
    work = work_of(batch, context, steps)
    engine = Engine(model, max_seqs=batch, capacity=max(map(sum, work)))
    start = time.perf_counter()
    # Most kernels are chosen by what a step takes of a prompt: two steps compile them.
    _answer(engine, [Work(min(w.prompt, 2 * PREFILL_CHUNK), w.tokens) for w in work])
    first = time.perf_counter() - start
    for _ in range(2):
        _answer(engine, work)
    rounds = [_answer(engine, work) for _ in range(3)]
    prefill, decode = map(median, zip(*rounds, strict=True))
    roof = bytes_of_step(model, batch, context) / COPY_BYTES_PER_US / 1e6
    share = roof / (batch / decode)
    print(
        f"decode/{name}: {decode:.1f} tok/s, {100 * share:.0f} % of the roof; prefill "
        f"{prefill:.0f} tok/s; first round {first:.1f} s",
        flush=True,
    )
    code = code_of(f"decode/{name}", arch_here()) or ""
    return [
        Row(f"decode/{name}", decode, "tok_s", roof=share, code=code),
        Row(f"prefill/{name}", prefill, "tok_s", code=code),
    ]


class Work(NamedTuple):
    """Tokens of a prompt, and of its answer."""

    prompt: int
    tokens: int


def work_of(batch: int, context: int, steps: int, chunk: int = PREFILL_CHUNK) -> list[Work]:
    """What each sequence does, so that all decode together once the last prompt is read.

    Prompts are read one after the other, ``chunk`` tokens a step at most, and a sequence whose
    prompt is read has a token of its own in each step until the last one's is. By so much its
    prompt is shorter and its answer longer.
    """
    length, room = context - steps, max(chunk, batch) - batch + 1
    read = [-(-length * (i + 1) // room) for i in range(batch)]  # steps until it is
    ahead = [read[-1] - each for each in read]
    return [Work(max(length - n, 1), steps + n) for n in ahead]


def _answer(engine: Engine, work: Sequence[Work]) -> tuple[float, float]:
    """Tokens a second of reading prompts and of decoding, for sequences that run together."""
    vocab, batch = engine.model.config.vocab_size, len(work)
    for each in work:
        prompt = torch.randint(0, vocab, (each.prompt,)).tolist()
        engine.add(prompt, max_tokens=each.tokens)
    start = time.perf_counter()
    begun: set[int] = set()
    while len(begun) < batch:
        begun |= {new.key for new in engine.step()}
    middle = time.perf_counter()
    count, all_run = 0, True
    while all_run:  # whoever began first ends first
        news = engine.step()
        count += len(news)
        all_run = not any(new.stopped_by for new in news)
    end = time.perf_counter()
    while engine.busy:
        engine.step()
    return sum(each.prompt for each in work) / (middle - start), count / (end - middle)


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """The decode step behind a row, on meta tensors; None for a row of another bench."""
    match = ROW.fullmatch(row)
    if match is None or match[2] not in CONFIGS or match[3] not in FORMATS_OF_MODELS:
        return None
    batch, context = int(match[4]), int(match[5])
    backend = meta_backend()
    model = random_model(match[2], match[3], backend)
    cache = model.new_cache(context, batch)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="meta")

    step = Step(ints(batch), cache.block_tables, ints(batch), ints(batch))
    return lambda: backend.argmax_rows(model.run(step, cache))


if __name__ == "__main__":
    main()
