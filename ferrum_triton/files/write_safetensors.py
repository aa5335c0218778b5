"""Hugging Face directories with weights in compressed-tensors' ``pack-quantized``, as written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ferrum_triton.files.safetensors import INDEX, SINGLE
from ferrum_triton.quant.codings import IntCoding

# Bytes of tensors that are written to one file.
MAX_SHARD_BYTES = 4 << 30
_COPIED = (".json", ".txt", ".model", ".jinja")


class DirectoryWriter:
    """Writes tensors to files of MAX_SHARD_BYTES at most, and an index where they are several."""

    def __init__(self, at: Path) -> None:
        at.mkdir()
        self._at, self._size, self._total = at, 0, 0
        self._shards: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write those before it where this one would be too many."""
        if self._pending and self._size + tensor.nbytes > MAX_SHARD_BYTES:
            self._write()
        self._pending[name] = tensor.cpu().contiguous()
        self._size, self._total = self._size + tensor.nbytes, self._total + tensor.nbytes

    def finish(self, config: Mapping[str, Any], source: Path) -> None:
        """Write what is left, ``config.json``, and copies of a model's files beside its weights."""
        self._write()
        homes: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            home = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            home = home if len(self._shards) > 1 else SINGLE
            (self._at / f"{number}.part").rename(self._at / home)
            homes |= dict.fromkeys(names, home)
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": homes}
            (self._at / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (self._at / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in sorted(source.iterdir()):
            is_new = path.name not in (INDEX, "config.json")
            if is_new and path.suffix in _COPIED and path.is_file():
                shutil.copyfile(path, self._at / path.name)

    def _write(self) -> None:
        save_file(self._pending, self._at / f"{len(self._shards)}.part", {"format": "pt"})
        self._shards.append([*self._pending])
        self._pending.clear()
        self._size = 0


def quantization_config(coding: IntCoding, others: Mapping[str, IntCoding]) -> Mapping[str, Any]:
    """``quantization_config`` of a directory.

    Args:
        coding: that of all linear layers but the others.
        others: codings of modules by name.
    """
    groups = {"group_0": {"targets": ["Linear"], "weights": _weights(coding)}}
    for other in dict.fromkeys(others.values()):
        targets = [name for name, coding in others.items() if coding == other]
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": _weights(other)}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def _weights(coding: IntCoding) -> dict[str, Any]:
    return {
        "num_bits": coding.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": coding.group_size,
        "dynamic": False,
    }
