"""Packed weights laid out for kernels: the file's bits in planes, one kind of number each.

GGUF blocks mix integers, scales and pieces of integers at offsets that wide loads cannot start at.
Here a matrix [rows, K] becomes a few planes of one row each a row of weights, K in its own order,
every bit of the file in exactly one place:

* ``q`` and ``h``: the low bits of the weights' integers and, where the format keeps them apart, the
  bits above. 8, 4, 2 or 1 bits each, in int32 words of four bytes: byte b of a word holds weights
  4p + b, p = 0, 1, ..., the first lowest. So a shift and a mask give four neighbours as bytes.
* ``d``: fp16 for each block, or an int32 of the two fp16 (d below, minimum above) where there are
  two.
* ``s``: sub-scales as bytes. Q4_K, Q5_K: scale and minimum of each 32 weights, unpacked from six
  bits. Q6_K: one int8 for each 16. Q2_K: the file's byte for each 16. Q3_K: the low nibbles of two
  sub-blocks in a byte, the first lower, and their upper two bits in ``t``, four in a byte.

Rows start at multiples of 16 bytes; K is never padded. The integers are those the file stores,
before any offset is taken from them; which bits they are is told by
:data:`~ferrum_triton.quant.FORMATS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.layout import Integers, Run

PLANE_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
ROW_ALIGN = 16
# Bytes of blocks repacked at a time: codes take up to eight times their room while they are moved.
CHUNK_BYTES = 32 << 20

_DTYPES = {"q": torch.int32, "h": torch.int32, "s": torch.uint8, "t": torch.uint8}


@dataclass(frozen=True, eq=False)
class Planes:
    """A weight matrix, or a stack of one for each expert, in planes.

    Attributes:
        kind: a name in :data:`PLANE_KINDS`.
        num_weights: K.
        q: int32 [..., rows, words], the weights' low bits.
        d: float16 or int32 [..., rows, blocks], scales of the blocks.
        h: int32 [..., rows, words], the weights' high bits.
        s: uint8 [..., rows, bytes], sub-scales.
        t: uint8 [..., rows, bytes], upper bits of Q3_K's sub-scales.
    """

    kind: str
    num_weights: int
    q: Tensor
    d: Tensor
    h: Tensor | None = None
    s: Tensor | None = None
    t: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.num_weights)

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in "qdhst"}
        return {name: plane for name, plane in named.items() if plane is not None}

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self.tensors.values())

    def to(self, device: torch.device | str) -> Planes:
        return replace(self, **{name: plane.to(device) for name, plane in self.tensors.items()})

    def clone(self) -> Planes:
        return replace(self, **{name: plane.clone() for name, plane in self.tensors.items()})


def row_bytes(kind: str, num_weights: int) -> dict[str, int]:
    """Bytes of a row in each plane, before they are rounded up to ``ROW_ALIGN``."""
    fmt = FORMATS[kind]
    blocks = num_weights // fmt.block_size
    sizes = {"q": num_weights * fmt.q.low[0].bits // 8, "d": blocks * (4 if fmt.m else 2)}
    if fmt.q.high:
        sizes["h"] = num_weights * fmt.q.high.bits // 8
    if kind == "Q3_K":
        sizes |= {"s": blocks * 8, "t": blocks * 4}
    elif fmt.scales:
        sizes["s"] = blocks * 16
    return sizes


def to_planes(blocks: Tensor, kind: str, chunk_bytes: int = CHUNK_BYTES) -> Planes:
    """Lay packed rows out in planes, on their own device, some rows at a time.

    Args:
        blocks: uint8 [..., rows, row_bytes] as in a GGUF file.
        kind: their format.
        chunk_bytes: of ``blocks`` at a time.

    Raises:
        InputError: the format has no planes, or a row is no whole number of blocks.
    """
    fmt = _format(kind)
    k = fmt.row_weights(blocks.shape[-1])
    flat = blocks.reshape(math.prod(blocks.shape[:-1]), blocks.shape[-1])
    dtypes = _DTYPES | {"d": torch.int32 if fmt.m else torch.float16}
    sizes = row_bytes(kind, k)
    planes = {}
    for name, size in sizes.items():
        padded = -(-size // ROW_ALIGN) * ROW_ALIGN
        shape = (len(flat), padded // dtypes[name].itemsize)
        planes[name] = torch.zeros(shape, dtype=dtypes[name], device=blocks.device)
    for first, last in _chunks(len(flat), blocks.shape[-1], chunk_bytes):
        rows = flat[first:last].unflatten(-1, (k // fmt.block_size, fmt.block_bytes))
        for name, plane in _split(rows, fmt).items():
            planes[name][first:last].view(torch.uint8)[:, : sizes[name]] = plane
    lead = blocks.shape[:-1]
    return Planes(kind, k, **{name: p.view(*lead, p.shape[1]) for name, p in planes.items()})


def from_planes(planes: Planes, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """The file's bytes again: uint8 [..., rows, row_bytes]."""
    fmt, k = _format(planes.kind), planes.num_weights
    num_blocks = k // fmt.block_size
    bytes_of = {
        name: _rows_of_bytes(plane)[:, :size]
        for (name, size) in row_bytes(planes.kind, k).items()
        for plane in [planes.tensors[name]]
    }
    num_rows, row = len(bytes_of["q"]), num_blocks * fmt.block_bytes
    flat = bytes_of["q"].new_zeros(num_rows, row)
    for first, last in _chunks(num_rows, row, chunk_bytes):
        blocks = flat[first:last].unflatten(-1, (num_blocks, fmt.block_bytes))
        _join(blocks, {name: plane[first:last] for name, plane in bytes_of.items()}, fmt)
    return flat.view(*planes.shape[:-1], row)


def _rows_of_bytes(plane: Tensor) -> Tensor:
    rows = plane.reshape(math.prod(plane.shape[:-1]), plane.shape[-1])
    return rows.view(torch.uint8)


def _format(kind: str) -> BlockFormat:
    if kind not in PLANE_KINDS:
        allowed = ", ".join(PLANE_KINDS)
        raise InputError("to_planes", "kind", repr(kind), allowed, "Keep it as the file has it.")
    return FORMATS[kind]


def _chunks(num_rows: int, row: int, chunk_bytes: int) -> list[tuple[int, int]]:
    step = max(chunk_bytes // max(row, 1), 1)
    return [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def _plane(bits: int, num_weights: int) -> Run:
    """How the integers of a row lie in a plane's bytes."""
    planes = 8 // bits
    return Run(0, bits, lanes=4, planes=planes, chunks=num_weights // (4 * planes))


# Q3_K's sub-scales: neighbours share a byte, so that those of a run of weights lie in few bytes.
_LOW_SCALES = Run(0, bits=4, lanes=1, planes=2, chunks=8)
_HIGH_SCALES = Run(0, bits=2, lanes=1, planes=4, chunks=4)


def _low_codes(integers: Integers, blocks: Tensor) -> Tensor:
    return torch.cat([run.read(blocks) for run in integers.low], dim=-1)


def _packed(codes: Tensor, run: Run, num_bytes: int) -> Tensor:
    """uint8 [..., codes] -> uint8 [..., num_bytes]."""
    out = codes.new_zeros(*codes.shape[:-1], num_bytes)
    run.write(out, codes)
    return out


def _split(blocks: Tensor, fmt: BlockFormat) -> dict[str, Tensor]:
    """uint8 [rows, blocks, block_bytes] -> uint8 [rows, bytes] for each plane.

    A block is a whole number of words in every plane but one of single bits of 32 weights, where it
    is one: rows are the blocks' pieces end to end.
    """
    bits = fmt.q.low[0].bits
    planes = {
        "q": _packed(
            _low_codes(fmt.q, blocks), _plane(bits, fmt.block_size), fmt.block_size * bits // 8
        )
    }
    d = blocks[..., fmt.d.at : fmt.d.at + 2]
    planes["d"] = torch.cat([d, blocks[..., fmt.m.at : fmt.m.at + 2]], -1) if fmt.m else d
    if fmt.q.high:
        high = fmt.q.high.bits
        planes["h"] = _packed(
            fmt.q.high.read(blocks), _plane(high, fmt.block_size), fmt.block_size * high // 8
        )
    if fmt.name == "Q3_K":
        assert fmt.scales and fmt.scales.high
        planes["s"] = _packed(_low_codes(fmt.scales, blocks), _LOW_SCALES, 8)
        planes["t"] = _packed(fmt.scales.high.read(blocks), _HIGH_SCALES, 4)
    elif fmt.name == "Q2_K":
        planes["s"] = blocks[..., :16]
    elif fmt.scales:
        scales = fmt.scales.read(blocks).view(torch.uint8)
        if fmt.mins:
            scales = torch.stack([scales, fmt.mins.read(blocks)], -1).flatten(-2)
        planes["s"] = scales
    return {name: plane.flatten(-2) for name, plane in planes.items()}


def _join(blocks: Tensor, planes: dict[str, Tensor], fmt: BlockFormat) -> None:
    """What :func:`_split` took apart, into uint8 [rows, blocks, block_bytes] of zeros."""
    each = {name: plane.unflatten(-1, (blocks.shape[-2], -1)) for name, plane in planes.items()}
    codes = _plane(fmt.q.low[0].bits, fmt.block_size).read(each["q"])
    for run, part in zip(fmt.q.low, codes.split([len(run) for run in fmt.q.low], -1), strict=True):
        run.write(blocks, part)
    if fmt.q.high:
        fmt.q.high.write(blocks, _plane(fmt.q.high.bits, fmt.block_size).read(each["h"]))
    blocks[..., fmt.d.at : fmt.d.at + 2] = each["d"][..., :2]
    if fmt.m:
        blocks[..., fmt.m.at : fmt.m.at + 2] = each["d"][..., 2:]
    if fmt.name == "Q3_K":
        assert fmt.scales and fmt.scales.high
        fmt.scales.low[0].write(blocks, _LOW_SCALES.read(each["s"]))
        fmt.scales.high.write(blocks, _HIGH_SCALES.read(each["t"]))
    elif fmt.name == "Q2_K":
        blocks[..., :16] = each["s"]
    elif fmt.mins:
        assert fmt.scales
        scales, mins = each["s"].unflatten(-1, (-1, 2)).unbind(-1)
        fmt.scales.write(blocks, scales)
        fmt.mins.write(blocks, mins)
    elif fmt.scales:
        fmt.scales.write(blocks, each["s"].view(torch.int8))
