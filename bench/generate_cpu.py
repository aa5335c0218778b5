"""Prefill and decode on the CPU, beside ``transformers`` on the same weights and threads.

    python -m bench.generate_cpu [--model FILE] [--threads N] [--json FILE]

Both run in float32, in this process, taking turns, so that whatever else the machine does falls on
both alike. A figure is the median of its rounds. Prefill computes the logits of the last token
only, in either; decode feeds the greedy choice back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.results import Row, add_options, print_rows, save_rows
from ferrum_triton import get_backend
from ferrum_triton.cli.default_model import default_model
from ferrum_triton.models import Decoder, load_model

Run = Callable[[Tensor, int], tuple[float, float, list[int]]]
"""Prompt and number of steps to prefill seconds, decode seconds and the ids chosen."""


def load_transformers(path: Path) -> Any:
    """The same file as transformers reads, decodes and runs it, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # What from_pretrained(gguf_file=...) does, which would want accelerate installed.
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if missing != tied or unexpected:
        raise ValueError(f"transformers misses {missing} and does not know {unexpected}")
    model.tie_weights()
    return model.eval()


def run_ours(model: Decoder) -> Run:
    def run(ids: Tensor, steps: int) -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        cache = model.new_cache(len(ids) + steps)
        logits = model.forward(ids, cache)
        chosen = [int(model.backend.argmax_rows(logits))]
        middle = time.perf_counter()
        for _ in range(steps):
            logits = model.forward(torch.tensor(chosen[-1:]), cache)
            chosen.append(int(model.backend.argmax_rows(logits)))
        return middle - start, time.perf_counter() - middle, chosen

    return run


def run_transformers(model: Any) -> Run:
    @torch.inference_mode()
    def run(ids: Tensor, steps: int) -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        result = model(ids[None], use_cache=True, logits_to_keep=1)
        chosen = [int(result.logits[0, -1].argmax())]
        middle = time.perf_counter()
        for _ in range(steps):
            result = model(
                torch.tensor([chosen[-1:]]),
                past_key_values=result.past_key_values,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen.append(int(result.logits[0, -1].argmax()))
        return middle - start, time.perf_counter() - middle, chosen

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of both (default: torch's choice)")
    add_options(parser)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    path = options.model or default_model()
    ours = load_model(path, get_backend("cpu"))
    runs = {"ours": run_ours(ours), "transformers": run_transformers(load_transformers(path))}
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompt_tokens,)
    prompt = torch.randint(1000, ours.config.vocab_size, shape, generator=generator)

    speeds: dict[str, list[float]] = {
        f"{part}/{n}": [] for part in ("prefill", "decode") for n in runs
    }
    for turn in range(options.rounds + 1):  # the first warms up
        chosen = {}
        for name, run in sorted(runs.items(), reverse=turn % 2 == 1):  # who goes first alternates
            prefill, decode, chosen[name] = run(prompt, options.steps)
            if turn:
                speeds[f"prefill/{name}"].append(options.prompt_tokens / prefill)
                speeds[f"decode/{name}"].append(options.steps / decode)
        if chosen["ours"] != chosen["transformers"]:
            raise SystemExit(f"the two disagree, so speeds mean nothing: {chosen}")

    threads = torch.get_num_threads()
    case = f"generate_cpu/{path.stem}/p{options.prompt_tokens}/t{threads}"
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows = [Row(f"{case}/{name}", value, "tokens/s") for name, value in medians.items()]
    for part in ("prefill", "decode"):
        ratio = medians[f"{part}/ours"] / medians[f"{part}/transformers"]
        rows.append(Row(f"{case}/{part}/ratio", ratio, "x"))
    print_rows(rows)
    if options.json:
        save_rows(options.json, rows, options.commit, options.dirty)


if __name__ == "__main__":
    main()
