"""Tokens a second of whole models through the engine, as a user of ``generate`` gets them.

    python -m bench.decode [MODEL ...] [--formats q4_K bf16] [--batches 1 8 32]
                           [--contexts 1024] [--json FILE]

Models have the shapes of :mod:`bench.random_models` and random weights. Every sequence has a prompt
of its own, as long as the context less what is decoded. Rows ``decode/<model>/<format>/b<batch>/
ctx<context>`` are the tokens a second of all sequences together from the host's clock, while all of
them run; ``prefill/...`` are those of reading the prompts. The roof is the weights that a step
reads, experts by how many of them a batch is expected to choose, and the keys and values, at the
copy bandwidth.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import code_of
from bench.launches import arch_here, meta_backend
from bench.random_models import CONFIGS, FORMATS_OF_MODELS, random_model
from bench.results import Row, add_options, save_rows
from bench.run import COPY_BYTES_PER_US
from ferrum_triton import get_backend
from ferrum_triton.models import Decoder
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.roof import bytes_of_step
from ferrum_triton.models.step import Step

ROW = re.compile(r"(decode|prefill)/([\w.-]+)/(\w+)/b(\d+)/ctx(\d+)")
STEPS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--formats", nargs="*", choices=FORMATS_OF_MODELS, default=("q4_K",))
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 8, 32), metavar="N")
    parser.add_argument("--contexts", nargs="*", type=int, default=(1024,), metavar="N")
    add_options(parser)
    options = parser.parse_args()
    for name in options.models or ["qwen3-8b"]:
        for form in options.formats:
            start = time.perf_counter()
            model = random_model(name, form, get_backend("cuda"))
            print(f"{name}/{form}: made in {time.perf_counter() - start:.1f} s", flush=True)
            for batch in options.batches:
                for context in options.contexts:
                    rows = measure(model, f"{name}/{form}/b{batch}/ctx{context}", batch, context)
                    if options.json:
                        save_rows(options.json, rows, options.commit, options.dirty)
            del model
            torch.cuda.empty_cache()


def measure(model: Decoder, name: str, batch: int, context: int, steps: int = STEPS) -> list[Row]:
    """Rows of one batch; prints them. The first round compiles and captures."""
    engine = Engine(model, max_seqs=batch, capacity=context)
    start = time.perf_counter()
    _answer(engine, batch, context, steps)
    first = time.perf_counter() - start
    prefill, decode = _answer(engine, batch, context, steps)
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


def _answer(engine: Engine, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Tokens a second of reading prompts and of decoding, for sequences that run together."""
    vocab = engine.model.config.vocab_size
    length = context - steps
    for _ in range(batch):
        engine.add(torch.randint(0, vocab, (length,)).tolist(), max_tokens=steps)
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
    return batch * length / (middle - start), count / (end - middle)


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
