"""One decode step of a whole model by graph replay, and where a layer's time goes.

    python -m bench.decode_layer [--formats q4_K bf16] [--batches 1 8 32] [--json FILE]

The model has the shape of Qwen3-8B, random weights of its own for every layer, and 1024 keys a
sequence; :mod:`bench.decode_model` says which matrices are in which format. Rows
``decode_layer/qwen3-8b/<format>/b<batch>/ctx1024`` are microseconds of a layer, which is the step,
from ids to the likeliest next ones, less what it takes without its layers, by their number.

Logits are in the activations' dtype. Below a row stands what each part costs: the time by which the
step is shorter when the part is left out of the graph. Where parts overlap they add up to less than
the whole.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.cases import code_of, launches_of
from bench.decode_model import FORMATS, QWEN3_8B, Decoder, make_weights
from bench.launches import arch_here, meta_backend
from bench.precompile import compile_all
from bench.results import Row, add_options, save_rows
from bench.timing import Replay
from ferrum_triton import get_backend

BATCHES, CONTEXT = (1, 8, 32), 1024
ROW = re.compile(r"decode_layer/qwen3-8b/(\w+)/b(\d+)/ctx(\d+)")
END_PARTS = ("embedding", "final_norm", "head", "argmax")
REPLAYS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, metavar="N")
    add_options(parser)
    options = parser.parse_args()
    names = {
        (f, b): f"qwen3-8b/{f}/b{b}/ctx{CONTEXT}" for f in options.formats for b in options.batches
    }
    arch = arch_here()
    compile_all([partial(launches_of, f"decode_layer/{name}", arch) for name in names.values()])
    for form in options.formats:
        weights = make_weights(QWEN3_8B, form, "cuda", context=CONTEXT)
        for batch in options.batches:
            decoder = Decoder(get_backend("cuda"), weights, batch, CONTEXT)
            rows = measure(decoder, names[form, batch])
            if options.json:
                save_rows(options.json, rows, options.commit, options.dirty)
            del decoder
            torch.cuda.empty_cache()
        del weights
        torch.cuda.empty_cache()


def measure(decoder: Decoder, name: str) -> list[Row]:
    """The rows of one format and batch; prints them and what each part costs."""
    decoder.step()
    if not decoder.logits.isfinite().all():
        raise RuntimeError(f"{name}: logits are not finite, so it is not timed")
    layers = len(decoder.weights.layers)
    step = replay_us(decoder.step)
    ends = replay_us(partial(decoder.step, with_layers=False))
    layer = (step - ends) / layers
    speed = decoder.batch / step * 1e6
    print(f"{name}: {speed:.0f} tok/s, {step:.0f} us a step")
    print(f"decode_layer/{name}: {layer:.2f} us")
    for part in (*decoder.layer_parts, *END_PARTS):
        each = layers if part in decoder.layer_parts else 1
        cost = (step - replay_us(partial(decoder.step, left_out=part))) / each
        print(f"  {part:<12} {cost:8.2f} us", flush=True)
    code = code_of(f"decode_layer/{name}", arch_here()) or ""
    return [Row(f"decode_layer/{name}", layer, "us", code=code)]


def replay_us(step: Callable[[], Tensor]) -> float:
    """Median microseconds of a step by graph replay."""
    replay = Replay([step])
    return statistics.median(replay.us() for _ in range(REPLAYS))


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """The step behind a row, on meta tensors; None for a row of another bench."""
    match = ROW.fullmatch(row)
    if match is None or match[1] not in FORMATS:
        return None
    form, batch, context = match[1], int(match[2]), int(match[3])
    weights = make_weights(QWEN3_8B, form, "meta", context=context)
    return Decoder(meta_backend(), weights, batch, context).step


if __name__ == "__main__":
    main()
