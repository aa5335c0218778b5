"""GGUF files, as written: version 3, little-endian, the alignment that files have by default."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.files.ggml_types import GGML_TYPES, GgmlType
from ferrum_triton.files.gguf import DEFAULT_ALIGNMENT, Value

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
OF_DTYPES = {kind.dtype: kind for kind in GGML_TYPES.values() if kind.dtype is not None}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


class Record(NamedTuple):
    """A tensor that a file will have: its name, its shape, rows first, and its type."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


def pair(key: str, value: Value) -> bytes:
    """A metadata pair. Whole numbers are unsigned in 32 bits, those of arrays signed."""
    if not isinstance(value, list):
        kind = _kind(value)
        return _string(key) + struct.pack("<I", kind) + _element(kind, value)
    kind = _I32 if _kind(value[0]) == _U32 else _kind(value[0])
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return _string(key) + head + b"".join(_element(kind, item) for item in value)


def _kind(value: Value) -> int:
    # A bool is an int, and so comes first.
    kinds = {bool: _BOOL, int: _U32, float: _F32, str: _STRING}
    return kinds[type(value)]  # type: ignore[index]


def _element(kind: int, value: Value) -> bytes:
    if isinstance(value, str):
        return _string(value)
    return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


class GgufWriter:
    """Writes the header of a file, then its tensors, in any order."""

    def __init__(self, at: Path, pairs: Sequence[bytes], records: Sequence[Record]) -> None:
        self._offsets: dict[str, int] = {}
        self._left = {record.name: record for record in records}
        listed, end = b"", 0
        for name, shape, kind in records:
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            listed += _string(name) + dims + struct.pack("<IQ", kind.id, end)
            self._offsets[name] = end
            end += _aligned(self._left[name].nbytes)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(records), len(pairs))
        head += b"".join(pairs) + listed
        self._at, self._base = at, _aligned(len(head))
        with at.open("wb") as file:
            file.write(head)
            file.truncate(self._base + end)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the record's type: bytes of blocks, or plain numbers."""
        record = self._left.pop(name)
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        assert data.numel() == record.nbytes, (name, tuple(tensor.shape), record)
        with self._at.open("r+b") as file:
            file.seek(self._base + self._offsets[name])
            file.write(data.numpy())

    def finish(self) -> None:
        """Check that all tensors have been written."""
        assert not self._left, f"not written: {[*self._left]}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
