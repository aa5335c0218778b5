"""``ferrum-triton quantize``: a model with its linear layers in few bits."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "round a model's weights to 4 or 8 bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a Hugging Face directory, or a GGUF file")
    parser.add_argument(
        "target",
        type=Path,
        help="what to make: a directory, as compressed-tensors, or a file that ends in .gguf",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text like what the model is for: rounds by GPTQ, not to the nearest",
    )
    parser.add_argument(
        "--eight-bits",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="modules that get 8 bits, as '*.down_proj' (of a GGUF file '*.ffn_down')",
    )
    directory = parser.add_argument_group("of a directory")
    directory.add_argument("--bits", type=int, choices=(4, 8), default=4)
    directory.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=128,
        help="columns that share a scale (default: %(default)s)",
    )
    file = parser.add_argument_group("of a .gguf file")
    file.add_argument("--kind", choices=("Q4_0", "Q4_K", "Q8_0"), default="Q4_K")
    calibrated = parser.add_argument_group("of the calibration")
    calibrated.add_argument(
        "--tokens",
        type=int,
        default=32768,
        help="tokens of text at most (default: %(default)s)",
    )
    calibrated.add_argument(
        "--sequence",
        type=int,
        default=512,
        help="tokens that are read as one text (default: %(default)s)",
    )
    calibrated.add_argument(
        "--backend", default="cpu", help="what runs the model (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the model, and say what was written."""
    from ferrum_triton.cli.bar import Bar
    from ferrum_triton.cli.terminal import printable
    from ferrum_triton.models.quantize import Settings, quantize_model

    settings = Settings(
        bits=options.bits,
        group_size=options.group_size,
        kind=options.kind,
        eight_bits=tuple(options.eight_bits),
        texts=tuple(options.calibration),
        num_tokens=options.tokens,
        length=options.sequence,
        backend=options.backend,
    )
    target: Path = options.target
    with Bar(target.name, "matrix", quiet=False) as bar:
        counts = quantize_model(options.source, target, settings, bar)
    files = target.iterdir() if target.is_dir() else [target]
    size = sum(path.stat().st_size for path in files)
    said = ", ".join(f"{count} matrices of {name}" for name, count in counts.items())
    print(f"{printable(str(target))}: {said}, {size:,} bytes")
    return 0
