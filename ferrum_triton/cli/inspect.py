"""``ferrum-triton inspect``: what a GGUF file holds, and which of its tensors would run packed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_triton.errors import FileError

if TYPE_CHECKING:
    from ferrum_triton.files.gguf import GgufFile, GgufTensor

SUMMARY = "say what a GGUF file holds and what of it would run packed"

# Shown of a long array and of a long string.
MAX_ELEMENTS, MAX_CHARACTERS = 6, 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a GGUF file")


def run(options: argparse.Namespace) -> int:
    """Print what the file holds; the status is 1 if it cannot be opened or is malformed."""
    from ferrum_triton.files.gguf import open_gguf

    try:
        with open_gguf(options.file) as file:
            _print(file)
    except FileError as error:
        print(f"ferrum-triton: {error}", file=sys.stderr)
        return 1
    return 0


def _print(file: GgufFile) -> None:
    size = file.path.stat().st_size
    head = f"GGUF version {file.version}, {size:,} bytes, alignment {file.alignment}"
    print(f"{_safe(str(file.path))}: {head}")
    print(f"model: {_safe(_verdict(file))}")
    print(f"\nmetadata: {len(file.metadata)} values")
    _table([(_safe(key), _short(value)) for key, value in file.metadata.items()])
    print(f"\ntensors: {len(file.tensors)}")
    rows = [
        (_safe(t.name), t.type.name, "×".join(map(str, t.shape)), f"{t.nbytes:,}", _runs(t))
        for t in file.tensors.values()
    ]
    _table([("name", "type", "shape", "bytes", "runs"), *rows], right=(2, 3))
    print("\ntypes")
    _table([("type", "tensors", "bytes", "runs"), *_types(file.tensors.values())], right=(1, 2))


def _runs(tensor: GgufTensor) -> str:
    """``packed`` where kernels read its blocks as stored, ``plain`` if it has none, or ``refused``.

    What is refused is of a type that nothing here decodes, or not a matrix.
    """
    from ferrum_triton.quant import FORMATS

    if tensor.type.dtype is not None:
        return "plain"
    return "packed" if tensor.type.name in FORMATS and len(tensor.shape) in (2, 3) else "refused"


def _verdict(file: GgufFile) -> str:
    """Whether ``generate`` takes a file of this metadata and these types."""
    from ferrum_triton.models import LlamaConfig

    try:
        LlamaConfig.from_gguf(file.metadata, file.tensors, file.path)
    except FileError as error:
        return f"not one that generate runs: {error.reason}"
    for tensor in file.tensors.values():
        if _runs(tensor) == "refused":
            what = f"{tensor.type.name} of shape {list(tensor.shape)}"
            return f"not one that generate runs: tensor {tensor.name!r} is {what}"
    return "one that generate runs, by its metadata and types"


def _types(tensors: Iterable[GgufTensor]) -> list[tuple[str, ...]]:
    """A row a type and way to run, the one of most bytes first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.type.name, _runs(tensor)), []).append(tensor.nbytes)
    largest_first = sorted(groups.items(), key=lambda group: -sum(group[1]))
    return [(t, str(len(sizes)), f"{sum(sizes):,}", runs) for (t, runs), sizes in largest_first]


def _short(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_short(element) for element in value[:MAX_ELEMENTS])
        if len(value) <= MAX_ELEMENTS:
            return f"[{shown}]"
        return f"[{shown}, …] of {len(value):,}"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]!r}… of {len(value):,} characters"
    return repr(value)


def _safe(text: str) -> str:
    """Text of a file that is not trusted, without what would steer a terminal."""
    return text if text.isprintable() else repr(text)


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print columns as wide as they must be, those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1:] = [0]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"  {'  '.join(cells)}".rstrip())
