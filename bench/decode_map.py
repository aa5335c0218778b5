"""Bandwidth of paged decode over batch and context, and where it drops.

    python -m bench.decode_map [--cache bf16|int8|fp8] [--json FILE] [--svg FILE]

Times one decode step at every batch from 1 to 256 and context from 128 to 131072 that fits in
memory, and names each cell that reaches less than LEAST_SHARE of a neighbour's bandwidth though it
moves as many bytes: a cliff.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.results import add_options, environment
from bench.timing import copies_of, device_us
from ferrum_triton import OPS, get_backend
from ferrum_triton.testing import TensorFactory

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(128 << i for i in range(11))
CACHES = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}

# Two copies of the pool, and room beside them.
MOST_BYTES = 40 << 30
LEAST_SHARE = 0.7

# Bandwidth in TB/s by (batch, context).
Cells = Mapping[tuple[int, int], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", choices=CACHES, default="bf16")
    parser.add_argument("--svg", help="draw them into this one")
    add_options(parser)
    options = parser.parse_args()
    cells = {}
    for batch in BATCHES:
        for context in CONTEXTS:
            speed = measure(batch, context, options.cache)
            if speed is not None:
                cells[batch, context] = speed
                print(f"batch {batch:>3} context {context:>6}: {speed:5.2f} TB/s", flush=True)
    for cell, neighbour in cliffs(cells):
        print(
            f"cliff: {cell} at {cells[cell]:.2f} beside {neighbour} at {cells[neighbour]:.2f} TB/s"
        )
    if options.json:
        rows = [{"batch": b, "context": c, "tbs": speed} for (b, c), speed in cells.items()]
        table = {
            "measured": environment(options.commit, options.dirty),
            "cache": options.cache,
            "cells": rows,
        }
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n")
    if options.svg:
        Path(options.svg).write_text(draw(cells))


def measure(batch: int, context: int, cache: str) -> float | None:
    """TB/s of one step with 32 query and 8 KV heads of 128, or None if it does not fit."""
    op, dtype = OPS["paged_decode_attention"], CACHES[cache]
    key_bytes = 2 * 8 * 128 * (dtype or torch.bfloat16).itemsize
    if 2 * batch * context * key_bytes > MOST_BYTES:
        return None
    axes = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "full": True, "scales": "tensor"}
    arguments = op.make_sample(
        TensorFactory(torch.bfloat16, "cuda"),
        batch=batch,
        max_len=context,
        cache_dtype=dtype,
        **axes,
    )
    nbytes = op.bytes_moved(arguments, ())
    us = device_us(get_backend("cuda").paged_decode_attention, copies_of(arguments, nbytes))
    return nbytes / us / 1e6


def cliffs(cells: Cells) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Cells slower than LEAST_SHARE of a neighbour that moves no more bytes.

    Less work is slower work where a launch is a matter of latency, so a cell is held only against
    neighbours of the same or half its bytes.
    """
    found = []
    for (batch, context), speed in cells.items():
        around = [
            (batch // 2, context),
            (batch, context // 2),
            (batch * 2, context // 2),
            (batch // 2, context * 2),
        ]
        for neighbour in around:
            if neighbour in cells and speed < LEAST_SHARE * cells[neighbour]:
                found.append(((batch, context), neighbour))
    return found


def draw(cells: Cells) -> str:
    """The cells as an SVG heat map, context to the right and batch downwards."""
    wide, high, left, top = 62, 30, 60, 40
    most = max(cells.values(), default=1.0)
    batches = [b for b in BATCHES if any(cell[0] == b for cell in cells)]
    contexts = [c for c in CONTEXTS if any(cell[1] == c for cell in cells)]
    width, height = left + wide * len(contexts) + 10, top + high * len(batches) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<text x="{left}" y="14" text-anchor="start">TB/s by batch (rows) and context</text>',
    ]
    for i, context in enumerate(contexts):
        parts.append(f'<text x="{left + wide * i + wide // 2}" y="{top - 8}">{context}</text>')
    for j, batch in enumerate(batches):
        y = top + high * j
        parts.append(f'<text x="{left - 24}" y="{y + 20}">{batch}</text>')
        for i, context in enumerate(contexts):
            speed = cells.get((batch, context))
            if speed is None:
                continue
            x, share = left + wide * i, speed / most
            # From white to a blue dark enough that the figures turn white on it.
            shade = f"hsl(212, 70%, {round(96 - 56 * share)}%)"
            ink = "#fff" if share > 0.6 else "#000"
            parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="{shade}"/>')
            parts.append(f'<text x="{x + wide // 2}" y="{y + 20}" fill="{ink}">{speed:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
