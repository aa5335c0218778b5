"""Tensors of safetensors files: one file, or the shards of a model directory, as one mapping.

The format and its checks are the safetensors library's; the directory layout is that of the Hugging
Face Hub, where ``model.safetensors.index.json`` says which shard holds which tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import is_directory, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 64 << 20


class SafetensorsFiles(Mapping[str, Tensor]):
    """Tensors by name; each access reads the tensor anew, to the CPU.

    Attributes:
        path: the file or directory opened.
    """

    def __init__(self, path: Path, shards: Mapping[str, Any], homes: Mapping[str, str]) -> None:
        self.path = path
        self._shards, self._homes = shards, homes

    def __getitem__(self, name: str) -> Tensor:
        """The tensor ``name``.

        Raises:
            KeyError: there is no such tensor.
            FileError: it cannot be read.
        """
        shard = self._homes[name]
        try:
            return self._shards[shard].get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
            # TypeError and AttributeError: an element type this torch has no dtype for.
            raise FileError(self._file(shard), f"tensor {name!r}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __repr__(self) -> str:
        return f"SafetensorsFiles({str(self.path)!r}, {len(self)} tensors)"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``, without reading its data.

        Raises:
            KeyError: there is no such tensor.
        """
        return self.stored_as(name)[1]

    def stored_as(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Element type, by the format's name, and shape of a tensor, without reading its data.

        Raises:
            KeyError: there is no such tensor.
        """
        header = self._shards[self._homes[name]].get_slice(name)
        return header.get_dtype(), tuple(header.get_shape())

    def _file(self, shard: str) -> Path:
        return self.path / shard if self.path.is_dir() else self.path


def open_safetensors(path: str | Path) -> SafetensorsFiles:
    """Open a safetensors file, or a model directory.

    Args:
        path: a file; or a directory with ``model.safetensors.index.json`` and the shards it names,
            or with ``model.safetensors``.

    Returns:
        All tensors, read when they are asked for.

    Raises:
        FileError: a file is missing or malformed, or the index is inconsistent or names anything
            but plain files of its own directory.
    """
    path = Path(path)
    if not is_directory(path):
        shard = _open(path)
        return SafetensorsFiles(path, {path.name: shard}, dict.fromkeys(shard.keys(), path.name))
    if (path / INDEX).exists():
        return _open_shards(path)
    if (path / SINGLE).exists():
        shard = _open(path / SINGLE)
        return SafetensorsFiles(path, {SINGLE: shard}, dict.fromkeys(shard.keys(), SINGLE))
    raise FileError(path, f"the directory holds neither {INDEX} nor {SINGLE}")


def _open_shards(directory: Path) -> SafetensorsFiles:
    index = directory / INDEX
    homes = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise FileError(index, "'weight_map' is missing, empty or no object")
    for name, shard in homes.items():
        if not _is_plain_file_name(shard):
            raise FileError(index, f"tensor {name!r} is in {shard!r}, which is no plain file name")
    shards = {shard: _open(directory / shard) for shard in sorted(set(homes.values()))}
    stored = {shard: set(file.keys()) for shard, file in shards.items()}
    for name, shard in homes.items():
        if name not in stored[shard]:
            raise FileError(index, f"tensor {name!r} is not in {shard}, where the index has it")
    return SafetensorsFiles(directory, shards, homes)


def _is_plain_file_name(name: object) -> bool:
    """Whether ``name`` stays inside the directory it is joined to, on any system."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
        return False
    return name == PurePosixPath(name).name == PureWindowsPath(name).name


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileError(path, "not a regular file" if path.exists() else "no such file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(path, f"not a safetensors file: {error}") from error
