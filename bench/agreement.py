"""How close 16-bit activations on packed weights come to float32: the real model on real text.

    python -m bench.agreement [--backend cuda] [--json FILE] [--commit HASH]

Teacher-forced over 512 tokens, at once (prefill) and token by token (decode), against the CPU
backend in float32 on the same file: how often the likeliest token is the same, and the mean
Kullback-Leibler divergence in nats.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.results import Row, add_options, print_rows, save_rows
from ferrum_triton import get_backend
from ferrum_triton.cli.default_model import default_model
from ferrum_triton.models import Decoder, load_model, load_tokenizer

TEXT = Path(__file__).parent.parent / "tests" / "data" / "alice.txt"
NUM_TOKENS = 512


@dataclass(frozen=True)
class Agreement:
    """Share of positions with the same likeliest token, and mean divergence in nats."""

    argmax_agreement: float
    mean_kl: float


def log_probabilities(model: Decoder, ids: Tensor, chunk: int) -> Tensor:
    """[num_tokens, vocab_size] float64 on the CPU, the tokens fed ``chunk`` at a time."""
    cache = model.new_cache(len(ids))
    chunks = ids.to(model.backend.device).split(chunk)
    logits = torch.cat([model.forward(part, cache, all_logits=True) for part in chunks])
    return torch.log_softmax(logits.cpu().double(), dim=-1)


def compare(model: Decoder, want: Tensor, ids: Tensor, chunk: int) -> Agreement:
    """Hold ``model`` against log-probabilities of a reference."""
    got = log_probabilities(model, ids, chunk)
    same = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
    return Agreement(same, (want.exp() * (want - got)).sum(-1).mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    add_options(parser)
    options = parser.parse_args()
    path = default_model()
    ids = torch.tensor(load_tokenizer(path).encode(TEXT.read_text())[:NUM_TOKENS])
    want = log_probabilities(load_model(path, get_backend("cpu")), ids, NUM_TOKENS)
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        model = load_model(path, get_backend(options.backend), dtype)
        for part, chunk in (("prefill", NUM_TOKENS), ("decode", 1)):
            found = compare(model, want, ids, chunk)
            case = f"agreement/smollm2-135m/q4_1/{str(dtype)[6:]}/{part}"
            rows.append(Row(f"{case}/argmax", found.argmax_agreement, "share"))
            rows.append(Row(f"{case}/mean_kl", found.mean_kl, "nats"))
    print_rows(rows)
    if options.json:
        save_rows(options.json, rows, options.commit, options.dirty)


if __name__ == "__main__":
    main()
