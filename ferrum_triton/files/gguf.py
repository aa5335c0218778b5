"""A reader of GGUF files that trusts nothing in them.

The format is the GGUF specification of the ggml project (``docs/gguf.md``), versions 2 and 3,
little-endian: magic, version, number of tensors, number of metadata pairs, the pairs, one record a
tensor (name, dimensions, type, offset), padding, tensor data. Versions 2 and 3 share this layout.

The file is mapped, not read, and tensors are views of the mapping. Every count, length, offset and
dimension is checked before it is used, in Python's unbounded integers, so opening a file costs time
and memory proportional to its header whatever the header says.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.ggml_types import GGML_TYPES, GgmlType

MAX_HEADER_BYTES = 128 << 20
"""Longest header accepted. The largest vocabularies in use need about 20 MB; decoded into Python
objects a header takes up to eight times its bytes."""

MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 255
MAX_DIMS = 4
MAX_DIM = 2**31 - 1
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Metadata types of fixed size, by number.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U64 = struct.Struct("<Q")
# The shortest records there can be: a one-byte key, its type and a one-byte value; a one-byte name,
# the number of dimensions, one dimension, the type and the offset.
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

Value = bool | int | float | str | list
"""What a metadata value decodes to; lists are flat and of one type."""


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: its name, unique in the file.
        shape: rows first, as torch has it: ggml's dimensions in reverse.
        type: element type.
        offset: position of the data from the start of the file, in bytes.
        nbytes: length of the data in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int
    _file: GgufFile = field(repr=False)

    def data(self) -> Tensor:
        """The stored bytes, without a copy.

        Returns:
            For plain types, a tensor of ``shape`` and the type's dtype. For block-quantised types
            uint8 [*shape[:-1], row_bytes]. Writing to it changes neither the file nor what other
            processes see of it, but does change what a second call returns.

        Raises:
            FileError: the file has been closed.
        """
        raw = self._file._slice(self.offset, self.nbytes)
        if self.type.dtype is not None:
            # Offsets are multiples of 8 in a page-aligned mapping, so every element is aligned.
            return raw.view(self.type.dtype).view(self.shape)
        row_bytes = self.shape[-1] // self.type.block_size * self.type.block_bytes
        return raw.view(*self.shape[:-1], row_bytes)


class GgufFile:
    """An open GGUF file; see :func:`open_gguf`.

    Attributes:
        path: the file.
        version: the format's version, 2 or 3.
        alignment: the alignment of the tensor data, in bytes.
        metadata: the key-value pairs, decoded.
        tensors: the tensors by name, in the file's order.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self.path = path
        # numpy holds an export of the mapping for as long as any tensor made from it lives. torch
        # alone would let it be unmapped under them.
        self._bytes: Tensor | None = torch.from_numpy(np.frombuffer(mapping, np.uint8))

        header = _Header(path, mapping, size)
        self.version, num_tensors, num_pairs = header.start()
        metadata, self._pairs = header.metadata(num_pairs)
        self.metadata = MappingProxyType(metadata)
        self.alignment = header.alignment(metadata)
        header.refuse_splits(metadata)
        self.tensors = MappingProxyType(
            {
                name: GgufTensor(name, shape, kind, offset, nbytes, self)
                for name, shape, kind, offset, nbytes in header.tensors(num_tensors, self.alignment)
            }
        )

    def pair(self, key: str) -> bytes:
        """A metadata pair as the file has it: key, type and value.

        Raises:
            FileError: the file has been closed.
        """
        start, stop = self._pairs[key]
        return self._slice(start, stop - start).numpy().tobytes()

    def close(self) -> None:
        """Let go of the file. Tensors already handed out stay valid and keep it mapped."""
        self._bytes = None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}, {len(self.tensors)} tensors)"

    def _slice(self, offset: int, nbytes: int) -> Tensor:
        if self._bytes is None:
            raise FileError(self.path, "the file has been closed")
        return self._bytes[offset : offset + nbytes]


def open_gguf(path: str | Path) -> GgufFile:
    """Open and check a GGUF file.

    The file must not be truncated by others while tensors of it are in use: the system ends a
    process that touches a mapped page which no longer exists.

    Args:
        path: a GGUF file of version 2 or 3, little-endian and not split.

    Returns:
        The file; a context manager that closes it.

    Raises:
        FileError: the file cannot be opened, is malformed in any way, or of a kind not supported.
    """
    path = Path(path)
    try:
        # Before opening: to open a named pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError(path, "not a regular file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise FileError(path, "the file is empty")
            # Copy on write: torch wants memory it may write to.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(path, f"cannot be opened: {reason}") from error
    return GgufFile(path, mapping, len(mapping))


class _Header:
    """A cursor over the header that never reads past its end."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int) -> None:
        self.path, self.buffer, self.size = path, buffer, size
        self.end = min(size, MAX_HEADER_BYTES)
        self.position = 0

    def error(self, reason: str, offset: int) -> FileError:
        return FileError(self.path, reason, offset)

    def take(self, nbytes: int, what: str) -> int:
        """Step over ``nbytes`` and return where they start."""
        start = self.position
        if nbytes > self.end - start:
            if nbytes > self.size - start:
                left = self.size - start
                raise self.error(
                    f"{what} needs {nbytes} bytes but {left} are left in the file", start
                )
            raise self.error(f"the header is longer than {MAX_HEADER_BYTES} bytes", start)
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        start = self.take(4, what)
        return int.from_bytes(self.buffer[start : start + 4], "little")

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.take(8, what))[0]

    def count(self, what: str, min_record_bytes: int) -> int:
        """A number of records, no more than fit in the rest of the file."""
        start = self.position
        n = self.u64(f"the number of {what}")
        if n > (self.size - self.position) // min_record_bytes:
            raise self.error(f"{n} {what} do not fit in the file", start)
        return n

    def string(self, what: str, max_bytes: int | None = None) -> str:
        start = self.position
        length = self.u64(f"the length of {what}")
        if max_bytes is not None and not 1 <= length <= max_bytes:
            raise self.error(f"{what} has {length} bytes; allowed: 1 to {max_bytes}", start)
        text = self.take(length, what)
        try:
            return str(self.buffer[text : text + length], "utf-8")
        except UnicodeDecodeError as error:
            reason = f"{what} is not UTF-8: {error.reason}"
            raise self.error(reason, text + error.start) from error

    def start(self) -> tuple[int, int, int]:
        """Magic and version checked; returns (version, num_tensors, num_pairs)."""
        magic = self.take(4, "the magic")
        if self.buffer[magic:4] != b"GGUF":
            raise self.error("not a GGUF file: it does not start with 'GGUF'", magic)
        at = self.position
        version = self.u32("the version")
        if version and version & 0xFFFF == 0:
            raise self.error("the file is big-endian; convert it to little-endian", at)
        if version not in (2, 3):
            raise self.error(f"GGUF version {version} is not supported; versions 2 and 3 are", at)
        num_tensors = self.count("tensors", _MIN_TENSOR_BYTES)
        num_pairs = self.count("metadata pairs", _MIN_PAIR_BYTES)
        return version, num_tensors, num_pairs

    def metadata(self, num_pairs: int) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
        """The values by key, and where their pairs start and stop."""
        metadata: dict[str, Value] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_pairs):
            start = self.position
            key = self.string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise self.error(f"metadata key {key!r} appears twice", start)
            metadata[key] = self.value(f"metadata value {key!r}")
            places[key] = start, self.position
        return metadata, places

    def value(self, what: str) -> Value:
        at = self.position
        kind = self.u32(f"the type of {what}")
        if kind in _SCALARS:
            return self.numbers(kind, 1, what)[0]
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.error(f"{what} has the unknown type {kind}", at)

    def array(self, what: str) -> list:
        at = self.position
        kind = self.u32(f"the element type of {what}")
        if kind in _SCALARS:
            return self.numbers(
                kind, self.count(f"elements of {what}", _SCALARS[kind].itemsize), what
            )
        if kind == _STRING:
            return self.strings(self.count(f"elements of {what}", _U64.size), what)
        if kind == _ARRAY:
            raise self.error(f"{what} is an array of arrays, which is not supported", at)
        raise self.error(f"{what} has elements of the unknown type {kind}", at)

    def numbers(self, kind: int, n: int, what: str) -> list:
        dtype = _SCALARS[kind]
        start = self.take(n * dtype.itemsize, what)
        values = np.frombuffer(self.buffer, dtype, n, start)
        if kind != _BOOL:
            return values.tolist()
        if (values > 1).any():
            raise self.error(
                f"{what} holds a boolean other than 0 and 1", start + int(values.argmax())
            )
        return values.astype(bool).tolist()

    def strings(self, n: int, what: str) -> list[str]:
        """``n`` strings: :meth:`string` unrolled, for vocabularies of several 100 000 tokens."""
        buffer, unpack, position, end = self.buffer, _U64.unpack_from, self.position, self.end
        values = []
        for _ in range(n):
            text = position + 8
            if text > end or (stop := text + unpack(buffer, position)[0]) > end:
                break
            try:
                values.append(str(buffer[text:stop], "utf-8"))
            except UnicodeDecodeError:
                break
            position = stop
        self.position = position
        if len(values) < n:
            self.string(f"an element of {what}")  # fails, with the reason
        return values

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or value & (value - 1) or value < MIN_ALIGNMENT:
            allowed = f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
            raise FileError(self.path, f"general.alignment is {value!r}; allowed: {allowed}")
        if value > MAX_ALIGNMENT:
            raise FileError(self.path, f"general.alignment is {value}, above {MAX_ALIGNMENT}")
        return value

    def refuse_splits(self, metadata: Mapping[str, Value]) -> None:
        count = metadata.get("split.count", 0)
        if type(count) is not int or count > 1:
            advice = "merge the parts into one file (llama-gguf-split --merge)"
            raise FileError(self.path, f"a part of a model split into {count!r} files: {advice}")

    def tensors(self, num_tensors: int, alignment: int) -> list[tuple[Any, ...]]:
        """(name, shape, type, absolute offset, nbytes) of every tensor, in the file's order."""
        records: dict[str, tuple[Any, ...]] = {}
        starts: dict[str, int] = {}
        for _ in range(num_tensors):
            start = self.position
            name = self.string("a tensor's name", MAX_NAME_BYTES)
            if name in records:
                raise self.error(f"tensor {name!r} appears twice", start)
            starts[name] = start
            records[name] = (name, *self.tensor(name, alignment))
        base = -(-self.position // alignment) * alignment
        placed = []
        for name, shape, kind, offset, nbytes in records.values():
            if base + offset + nbytes > self.size:
                end = base + offset + nbytes
                raise self.error(
                    f"tensor {name!r} ends at byte {end}, past the file's end", starts[name]
                )
            placed.append((name, shape, kind, base + offset, nbytes))
        self.refuse_overlaps(placed, starts)
        return placed

    def tensor(self, name: str, alignment: int) -> tuple[tuple[int, ...], GgmlType, int, int]:
        """Shape, type, offset from the start of the data, and size of one tensor."""
        at = self.position
        num_dims = self.u32(f"the rank of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(
                f"tensor {name!r} has {num_dims} dimensions; allowed: 1 to {MAX_DIMS}", at
            )
        at = self.position
        dims = [self.u64(f"the shape of tensor {name!r}") for _ in range(num_dims)]
        if not all(1 <= dim <= MAX_DIM for dim in dims):
            raise self.error(f"tensor {name!r} has dimensions {dims}; allowed: 1 to {MAX_DIM}", at)
        at = self.position
        kind = GGML_TYPES.get(number := self.u32(f"the type of tensor {name!r}"))
        if kind is None:
            raise self.error(f"tensor {name!r} has the unknown type {number}", at)
        if dims[0] % kind.block_size:
            reason = f"rows of {dims[0]} weights, no multiple of {kind.name}'s {kind.block_size}"
            raise self.error(f"tensor {name!r} has {reason}", at)
        at = self.position
        offset = self.u64(f"the offset of tensor {name!r}")
        if offset % alignment:
            raise self.error(f"tensor {name!r} starts at {offset}, no multiple of {alignment}", at)
        nbytes = math.prod(dims) // kind.block_size * kind.block_bytes
        return tuple(reversed(dims)), kind, offset, nbytes

    def refuse_overlaps(self, placed: Iterable[tuple[Any, ...]], starts: dict[str, int]) -> None:
        last_name, last_end = "", 0
        for name, _, _, offset, nbytes in sorted(placed, key=lambda record: record[3]):
            if offset < last_end:
                raise self.error(f"tensors {last_name!r} and {name!r} overlap", starts[name])
            last_name, last_end = name, offset + nbytes
