"""Perplexity of models on texts: what rounding their weights costs.

    python -m bench.perplexity MODEL [MODEL ...] --text FILE [FILE ...] [--tokens 2000]
                               [--backend cpu]

MODEL is a file or directory that ``load_model`` reads; the first is what others are held against.
Of each text the first tokens are one sequence.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from ferrum_triton.models import Decoder, load_model

# Tokens whose logits are in memory at a time.
_CHUNK = 512


def perplexity(model: Decoder, text: str, num_tokens: int) -> float:
    """e to the mean of -log p of a text's first tokens, each after those before it."""
    ids = model.tokenizer.encode(text, add_special=False)[:num_tokens]
    cache, loss = model.new_cache(len(ids)), 0.0
    for start in range(0, len(ids), _CHUNK):
        logits = model.forward(ids[start : start + _CHUNK], cache, all_logits=True)
        following = torch.tensor(ids[start + 1 : start + _CHUNK + 1], device=logits.device)
        loss += cross_entropy(logits[: len(following)], following, reduction="sum").item()
    return math.exp(loss / (len(ids) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--backend", default="cpu")
    options = parser.parse_args()
    first: dict[Path, float] = {}
    for name in options.models:
        model = load_model(name, options.backend)
        for text in options.text:
            found = perplexity(model, text.read_text(), options.tokens)
            more = 100 * (found / first.setdefault(text, found) - 1)
            print(f"{name}  {text}  {found:.3f}  {more:+.2f} %", flush=True)


if __name__ == "__main__":
    main()
