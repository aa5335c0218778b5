"""A layer of a decode step by graph replay, and where its time goes.

    python -m bench.decode_layer [MODEL ...] [--formats q4_K bf16] [--batches 1 8 32]
                                 [--context 1024] [--json FILE]

Models are those of :mod:`bench.decode`, run as its engine runs them. Rows
``decode_layer/<model>/<format>/b<batch>/ctx<context>`` are microseconds of a layer: a step, from
ids to the likeliest next ones, less a step of the same model's first layer alone, by the number of
the others. Below a row stands what each op costs a layer: the time by which the step is shorter
where its launches are left out of the graph. Where launches overlap that adds up to less than the
whole.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import decode
from bench.cases import code_of
from bench.launches import arch_here
from bench.random_models import CONFIGS, FORMATS_OF_MODELS, random_model
from bench.results import Row, add_options, save_rows
from bench.timed_step import TimedStep, replay_us
from ferrum_triton import OPS, get_backend
from ferrum_triton.backends import Backend
from ferrum_triton.models import Decoder

BATCHES, CONTEXT = (1, 8, 32), 1024
ROW = re.compile(r"decode_layer/([\w.-]+)/(\w+)/b(\d+)/ctx(\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--formats", nargs="*", choices=FORMATS_OF_MODELS, default=("q4_K",))
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, metavar="N")
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="N")
    add_options(parser)
    options = parser.parse_args()
    if unknown := set(options.models) - set(CONFIGS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    for name in options.models or ["qwen3-8b"]:
        for form in options.formats:
            model = random_model(name, form, get_backend("cuda"))
            for batch in options.batches:
                case = f"{name}/{form}/b{batch}/ctx{options.context}"
                rows = measure(model, case, batch, options.context)
                if options.json:
                    save_rows(options.json, rows, options.commit, options.dirty)
            del model
            torch.cuda.empty_cache()


@torch.inference_mode()
def measure(model: Decoder, name: str, batch: int, context: int) -> list[Row]:
    """The row of a model and batch; prints it and what each op costs."""
    step, first = (TimedStep(m, batch, context) for m in (model, first_layer(model)))
    model.backend.compile_ahead(step.tokens)
    if not step.logits().isfinite().all():
        raise RuntimeError(f"{name}: logits are not finite, so it is not timed")
    layers = model.config.num_layers - 1
    whole = replay_us(step.tokens)
    layer = (whole - replay_us(first.tokens)) / layers
    print(f"{name}: {batch / whole * 1e6:.0f} tok/s, {whole:.0f} us a step")
    print(f"decode_layer/{name}: {layer:.2f} us")
    for op, without in without_each_op(step):
        print(f"  {op:<40} {(whole - replay_us(without)) / (layers + 1):8.2f} us", flush=True)
    code = code_of(f"decode_layer/{name}", arch_here()) or ""
    return [Row(f"decode_layer/{name}", layer, "us", code=code)]


def first_layer(model: Decoder) -> Decoder:
    """The same model without its other layers."""
    small = copy.copy(model)
    small.config = replace(model.config, num_layers=1)
    small.weights = replace(model.weights, layers=model.weights.layers[:1])
    return small


def without_each_op(step: TimedStep) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each op that a step calls, and the step without its launches."""
    noted = Noting(step.model.backend)
    step.model.backend = noted
    try:
        step.tokens()
        for name in dict.fromkeys(name for name, _ in noted.results):

            def without(name: str = name) -> Tensor:
                noted.left_out, noted.count = name, 0
                return step.tokens()

            yield name, without
    finally:
        step.model.backend = noted.backend


class Noting:
    """A backend that notes what a step's calls return, and gives it again for a call left out.

    Attributes:
        backend: the backend that it stands for.
        results: the op and the result of each call of the first step.
        left_out: the op whose calls are not made; None while results are noted.
        count: calls of the step that runs.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.results: list[tuple[str, Any]] = []
        self.left_out: str | None = None
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backend, name)
        if name not in OPS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left_out is None:
                self.results.append((name, found(*args, **kwargs)))
                return self.results[-1][1]
            self.count += 1
            if name == self.left_out:
                return self.results[self.count - 1][1]
            return found(*args, **kwargs)

        return call


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """The step behind a row, on meta tensors; None for a row of another bench."""
    if ROW.fullmatch(row) is None:
        return None
    return decode.meta_call(row.replace("decode_layer/", "decode/", 1))


if __name__ == "__main__":
    main()
