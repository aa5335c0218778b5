"""``ferrum-triton quantize``: a Hugging Face directory with its linear layers in few bits."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "round a Hugging Face directory's weights to 4 or 8 bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a Hugging Face directory, not quantised")
    parser.add_argument("target", type=Path, help="the directory to make, as compressed-tensors")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=128,
        help="columns that share a scale (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the directory, and say what was written."""
    from ferrum_triton.cli.terminal import printable
    from ferrum_triton.files.quantize import quantize_directory

    count = quantize_directory(options.source, options.target, options.bits, options.group_size)
    written = sum(path.stat().st_size for path in options.target.iterdir())
    where, size = printable(str(options.target)), f"{written:,} bytes"
    print(f"{where}: {count} matrices of {options.bits} bits, {size}")
    return 0
