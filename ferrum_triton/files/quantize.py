"""Hugging Face directories quantised to integers, as compressed-tensors' ``pack-quantized``.

Tensors are read, rounded and written a shard at a time. The directory appears under its name when
all of it has been written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import is_directory, read_json
from ferrum_triton.files.safetensors import INDEX, SINGLE, SafetensorsFiles, open_safetensors
from ferrum_triton.quant.rounding import packed_words, round_to_nearest

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
GROUP_SIZES = (32, 64, 128)
# Bytes of tensors that are written to one file.
MAX_SHARD_BYTES = 4 << 30
# What stays as it is: they are no linear layers, or their rounding is heard in every token.
_KEPT = ("lm_head.weight", "embed_tokens.weight")


def quantize_directory(source: Path, target: Path, bits: int = 4, group_size: int = 128) -> int:
    """Write a copy of a model whose linear layers are rounded to integers.

    Args:
        source: a Hugging Face directory of one of ARCHITECTURES, not quantised.
        target: the directory to make.
        bits: bits of an integer, 4 or 8.
        group_size: columns that share a scale, one of GROUP_SIZES.

    Returns:
        How many matrices were rounded.

    Raises:
        FileError: the source is of another kind or malformed, or the target is there.
    """
    config = _config(source)
    files = open_safetensors(source)
    matrices = [name for name in files if _is_rounded(files, name)]
    for name in matrices:
        _check(files, name, group_size)
    if target.exists():
        raise FileError(target, "is there already; name a directory to make")
    if not is_directory(target.absolute().parent):
        raise FileError(target, "has no directory to be made in")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as at:
        made = Path(at) / target.name
        made.mkdir()
        _copy_others(source, made)
        _write_shards(_tensors(files, set(matrices), bits, group_size), made)
        config["quantization_config"] = _settings(bits, group_size)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        made.rename(target)
    return len(matrices)


def _config(source: Path) -> dict[str, Any]:
    if not is_directory(source):
        raise FileError(source, "is no directory; a Hugging Face directory is what is quantised")
    config = read_json(source / "config.json")
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FileError(source, f"architecture {name!r:.80} is not quantised; known: {known}")
    if config.get("quantization_config"):
        raise FileError(source, "is quantised already")
    return config


def _is_rounded(files: SafetensorsFiles, name: str) -> bool:
    """Whether a tensor is a linear layer's matrix."""
    return name.endswith(".weight") and not name.endswith(_KEPT) and len(files.shape(name)) == 2


def _check(files: SafetensorsFiles, name: str, group_size: int) -> None:
    """Refuse a matrix that has no whole groups or is no matrix of floats."""
    kind, shape = files.stored_as(name)
    if kind not in ("F32", "F16", "BF16"):
        raise FileError(files.path, f"tensor {name!r} is {kind}; known: F32, F16, BF16")
    if shape[1] % group_size:
        fitting = [str(size) for size in GROUP_SIZES if shape[1] % size == 0]
        known = ", ".join(fitting) if fitting else "none"
        reason = f"has {shape[1]} columns, no whole groups of {group_size}; group sizes: {known}"
        raise FileError(files.path, f"tensor {name!r} {reason}")


def _tensors(
    files: SafetensorsFiles, rounded: set[str], bits: int, group_size: int
) -> Iterator[tuple[str, Tensor]]:
    """What is written, by name."""
    for name in files:
        weight = files[name]
        if name not in rounded:
            yield name, weight
            continue
        if not weight.isfinite().all():
            raise FileError(files.path, f"tensor {name!r} holds what is not finite")
        q, scales = round_to_nearest(weight, bits, group_size)
        stem = name.removesuffix("weight")
        yield f"{stem}weight_packed", packed_words(q, bits)
        yield f"{stem}weight_scale", scales.to(weight.dtype)
        yield f"{stem}weight_shape", torch.tensor(weight.shape)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], at: Path) -> None:
    """Write tensors to files of MAX_SHARD_BYTES at most, and an index where they are several."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def write() -> None:
        save_file(pending, at / f"{len(shards)}.part", {"format": "pt"})
        shards.append([*pending])
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > MAX_SHARD_BYTES:
            write()
            size = 0
        pending[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    homes: dict[str, str] = {}
    for number, names in enumerate(shards):
        home = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        home = home if len(shards) > 1 else SINGLE
        (at / f"{number}.part").rename(at / home)
        homes |= dict.fromkeys(names, home)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (at / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_others(source: Path, to: Path) -> None:
    """Copy the tokenizer and what else a directory holds beside weights, which may be links."""
    for path in sorted(source.iterdir()):
        is_new = path.name not in (INDEX, "config.json")
        if is_new and path.suffix in (".json", ".txt", ".model", ".jinja") and path.is_file():
            shutil.copyfile(path, to / path.name)


def _settings(bits: int, group_size: int) -> Mapping[str, Any]:
    """``quantization_config`` of what is written."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
