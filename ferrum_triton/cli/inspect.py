"""``ferrum-triton inspect``: what a model file holds, and what of it would run as it is stored."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrum_triton.cli.terminal import complain, printable
from ferrum_triton.errors import FileError

SUMMARY = "say what a model's file or directory holds and what of it would run packed"

# Shown of a long array and of a long string.
MAX_ELEMENTS, MAX_CHARACTERS = 6, 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="a GGUF or safetensors file, or a Hugging Face directory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all of each value")


def run(options: argparse.Namespace) -> int:
    """Print what the file holds; the status is 1 if it cannot be opened or is malformed."""
    try:
        found = describe(options.file)
    except FileError as error:
        complain(error)
        return 1
    if options.json:
        print(json.dumps(_finite(found), indent=1))
    else:
        _print(found)
    return 0


def describe(path: Path) -> dict[str, Any]:
    """Everything the command knows.

    Each tensor ``runs`` ``"packed"`` where kernels read its blocks as stored, or such blocks as
    integers become; ``"plain"`` if it has none; or is ``"refused"``: of a type that weights are not
    stored in, or packed and no matrix.

    Raises:
        FileError: the file cannot be opened or is malformed.
    """
    from ferrum_triton.files.json_file import is_directory

    if is_directory(path) or path.suffix == ".safetensors":
        return _describe_safetensors(path)
    return _describe_gguf(path)


def _describe_gguf(path: Path) -> dict[str, Any]:
    from ferrum_triton.files.gguf import open_gguf
    from ferrum_triton.models.families import family_of_gguf
    from ferrum_triton.models.weights import PLAIN_DTYPES
    from ferrum_triton.quant.formats import GGUF_FORMATS

    with open_gguf(path) as file:
        tensors = []
        for tensor in file.tensors.values():
            packed = tensor.type.id in GGUF_FORMATS and len(tensor.shape) in (2, 3)
            plain = tensor.type.dtype in PLAIN_DTYPES
            runs = "plain" if plain else "packed" if packed else "refused"
            tensors.append(_row(tensor.name, tensor.type.name, tensor.shape, tensor.nbytes, runs))
        try:
            config = family_of_gguf(file.metadata, path).config
            config.from_gguf(file.metadata, file.tensors, path)
            problem = None
        except FileError as error:
            problem = error.reason
        return {
            "path": str(path),
            "format": f"GGUF version {file.version}",
            "bytes": path.stat().st_size,
            "alignment": file.alignment,
            "model": _verdict(problem, tensors),
            "metadata": dict(file.metadata),
            "tensors": tensors,
        }


def _describe_safetensors(path: Path) -> dict[str, Any]:
    from ferrum_triton.files.int_weights import packing_of, read_config
    from ferrum_triton.files.json_file import is_directory
    from ferrum_triton.files.packed import open_packed
    from ferrum_triton.files.safetensors import open_safetensors
    from ferrum_triton.models.families import family_of_hf

    files = open_safetensors(path)
    config: Mapping[str, Any] = {}
    problem: str | None = "name the directory, which has its config.json"
    parts: Collection[str] = ()
    form = "safetensors"
    if is_directory(path):
        try:
            config = read_config(path)
            family = family_of_hf(config, path)
            family.config.from_hf(config, path / "config.json")
            problem = None
            if family.packs_integers and (packing := packing_of(config, path)):
                form += f", weights in {packing}"
                parts = open_packed(files, packing).parts
        except FileError as error:
            problem = str(error)
    tensors = []
    for name in files:
        kind, shape = files.stored_as(name)
        # The name of a type begins with its family and bits, but for booleans, which are bytes.
        bits = re.search(r"\d+", kind)
        nbytes = math.prod(shape) * int(bits[0] if bits else 8) // 8
        runs = "plain" if kind in ("F64", "F32", "F16", "BF16") else "refused"
        runs = "packed" if name in parts else runs
        tensors.append(_row(name, kind, shape, nbytes, runs))
    return {
        "path": str(path),
        "format": form,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "model": _verdict(problem, tensors),
        "metadata": dict(config),
        "tensors": tensors,
    }


def _row(name: str, kind: str, shape: Sequence[int], nbytes: int, runs: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "shape": list(shape), "bytes": nbytes, "runs": runs}


def _verdict(problem: str | None, tensors: Iterable[Mapping[str, Any]]) -> str:
    """Whether ``generate`` takes a file of these metadata and types."""
    for tensor in tensors:
        if problem is None and tensor["runs"] == "refused":
            what = f"{tensor['type']} of shape {tensor['shape']}"
            problem = f"tensor {tensor['name']!r} is {what}"
    if problem is None:
        return "one that generate runs, by its metadata and types"
    return f"not one that generate runs: {problem}"


def _finite(value: Any) -> Any:
    """``value`` with the numbers that JSON does not know as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _print(found: Mapping[str, Any]) -> None:
    head = f"{found['format']}, {found['bytes']:,} bytes"
    if "alignment" in found:
        head += f", alignment {found['alignment']}"
    print(f"{printable(found['path'])}: {head}")
    print(f"model: {printable(found['model'])}")
    metadata, tensors = found["metadata"], found["tensors"]
    print(f"\nmetadata: {len(metadata)} values")
    _table([(printable(key), _short(value)) for key, value in metadata.items()])
    print(f"\ntensors: {len(tensors)}")
    rows = [
        (
            printable(t["name"]),
            t["type"],
            "×".join(map(str, t["shape"])),
            f"{t['bytes']:,}",
            t["runs"],
        )
        for t in tensors
    ]
    _table([("name", "type", "shape", "bytes", "runs"), *rows], right=(2, 3))
    print("\ntypes")
    _table([("type", "tensors", "bytes", "runs"), *_types(tensors)], right=(1, 2))


def _types(tensors: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row a type and way to run, the one of most bytes first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for tensor in tensors:
        groups.setdefault((tensor["type"], tensor["runs"]), []).append(tensor["bytes"])
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
