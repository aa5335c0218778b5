"""Packed rows laid out for kernels: the file's bits in planes, one kind of number each.

GGUF blocks mix integers, scales and pieces of integers at offsets that wide loads cannot start at.
Here a row holds the same bits, each in exactly one place, as up to five planes end to end, K in its
own order in each:

* ``q`` and ``h``: the low bits of the weights' integers and, where the format keeps them apart, the
  bits above. 8, 4, 2 or 1 bits each, in words of four bytes: byte b of a word holds weights
  4p + b, p = 0, 1, ..., the first lowest. So a shift and a mask give four neighbours as bytes.
* ``s``: sub-scales as bytes. Q4_K, Q5_K: scale and minimum of each 32 weights, unpacked from six
  bits. Q6_K: one int8 for each 16. Q2_K: the file's byte for each 16. Q3_K: the low nibbles of two
  sub-blocks in a byte, the first lower, and their upper two bits in ``t``, four in a byte.
* ``d``: fp16 for each block, or two fp16 (d below, minimum above) where there are two.

Rows are filled up to multiples of 16 bytes with zeros. The integers are those the file stores,
before any offset is taken from them; which bits they are is told by
:data:`~ferrum_triton.quant.FORMATS`. A kind of this layout is named ``"Q4_K:planes"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.layout import Integers, Run

ROW_ALIGN = 16
SUFFIX = ":planes"
# Bytes of blocks repacked at a time: codes take up to eight times their room while they are moved.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class PlaneFormat:
    """A block format whose rows are in planes.

    Attributes:
        file: the format as a file has it.
        plane_bytes: bytes of a block in each plane, in the order of the planes.
    """

    file: BlockFormat
    plane_bytes: dict[str, int]

    @property
    def name(self) -> str:
        return self.file.name + SUFFIX

    @property
    def block_size(self) -> int:
        return self.file.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all planes."""
        return sum(self.plane_bytes.values())

    def row_bytes(self, num_weights: int) -> int:
        """Bytes of a row of ``num_weights`` weights, a multiple of the block size."""
        num_blocks = self.file.row_bytes(num_weights) // self.file.block_bytes
        return -(-num_blocks * self.block_bytes // ROW_ALIGN) * ROW_ALIGN

    def is_row(self, row_bytes: int) -> bool:
        """Whether a row can have ``row_bytes`` bytes."""
        # A block is larger than what fills a row up.
        return row_bytes == self.row_bytes(row_bytes // self.block_bytes * self.block_size)

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of ``row_bytes`` bytes.

        Raises:
            InputError: no row of whole blocks has as many bytes.
        """
        if not self.is_row(row_bytes):
            allowed = f"whole blocks of {self.block_bytes}, filled up to a multiple of {ROW_ALIGN}"
            advice = "The row is truncated, or of another format."
            raise InputError(
                "PlaneFormat.row_weights", "row_bytes", str(row_bytes), allowed, advice
            )
        return row_bytes // self.block_bytes * self.block_size

    def offsets(self, num_weights: int) -> dict[str, int]:
        """Where each plane of a row begins, in bytes."""
        num_blocks, at, offsets = num_weights // self.block_size, 0, {}
        for plane, each in self.plane_bytes.items():
            offsets[plane] = at
            at += num_blocks * each
        return offsets


def _plane_bytes(fmt: BlockFormat) -> dict[str, int]:
    sizes = {"q": fmt.block_size * fmt.q.low[0].bits // 8}
    if fmt.q.high:
        sizes["h"] = fmt.block_size * fmt.q.high.bits // 8
    if fmt.name == "Q3_K":
        sizes |= {"s": 8, "t": 4}
    elif fmt.scales:
        sizes["s"] = 16
    return sizes | {"d": 4 if fmt.m else 2}


PLANE_FORMATS: dict[str, PlaneFormat] = {
    kind + SUFFIX: PlaneFormat(fmt, _plane_bytes(fmt))
    for kind, fmt in FORMATS.items()
    if fmt.values is None
}


def to_planes(blocks: Tensor, kind: str, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Lay packed rows out in planes, on their own device, some rows at a time.

    Args:
        blocks: uint8 [..., row_bytes] as in a GGUF file.
        kind: their format, as in :data:`~ferrum_triton.quant.FORMATS`.
        chunk_bytes: of ``blocks`` at a time.

    Returns:
        uint8 [..., row_bytes of ``kind + ":planes"``].

    Raises:
        InputError: the format has no planes, or a row is no whole number of blocks.
    """
    form = _form(kind)
    fmt = form.file
    num_blocks = fmt.row_weights(blocks.shape[-1]) // fmt.block_size
    flat = blocks.reshape(math.prod(blocks.shape[:-1]), blocks.shape[-1])
    used = num_blocks * form.block_bytes
    planes = flat.new_empty(len(flat), form.row_bytes(num_blocks * fmt.block_size))
    planes[:, used:] = 0
    for first, last in _chunks(len(flat), blocks.shape[-1], chunk_bytes):
        rows = flat[first:last].unflatten(-1, (num_blocks, fmt.block_bytes))
        each = _split(rows, fmt)
        torch.cat([each[name] for name in form.plane_bytes], -1, out=planes[first:last, :used])
    return planes.view(*blocks.shape[:-1], planes.shape[1])


def from_planes(planes: Tensor, kind: str, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """The file's bytes again: uint8 [..., row_bytes] from what :func:`to_planes` made of them."""
    form = _form(kind)
    fmt = form.file
    num_blocks = form.row_weights(planes.shape[-1]) // fmt.block_size
    rows = planes.reshape(math.prod(planes.shape[:-1]), planes.shape[-1])
    flat = rows.new_zeros(len(rows), num_blocks * fmt.block_bytes)
    sizes = [num_blocks * each for each in form.plane_bytes.values()]
    for first, last in _chunks(len(rows), planes.shape[-1], chunk_bytes):
        parts = rows[first:last, : sum(sizes)].split(sizes, -1)
        blocks = flat[first:last].unflatten(-1, (num_blocks, fmt.block_bytes))
        _join(blocks, dict(zip(form.plane_bytes, parts, strict=True)), fmt)
    return flat.view(*planes.shape[:-1], flat.shape[1])


def _form(kind: str) -> PlaneFormat:
    if kind + SUFFIX not in PLANE_FORMATS:
        allowed = ", ".join(form.file.name for form in PLANE_FORMATS.values())
        raise InputError("to_planes", "kind", repr(kind), allowed, "Keep it as the file has it.")
    return PLANE_FORMATS[kind + SUFFIX]


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
    sizes = _plane_bytes(fmt)
    bits = fmt.q.low[0].bits
    planes = {"q": _packed(_low_codes(fmt.q, blocks), _plane(bits, fmt.block_size), sizes["q"])}
    d = blocks[..., fmt.d.at : fmt.d.at + 2]
    planes["d"] = torch.cat([d, blocks[..., fmt.m.at : fmt.m.at + 2]], -1) if fmt.m else d
    if fmt.q.high:
        run = _plane(fmt.q.high.bits, fmt.block_size)
        planes["h"] = _packed(fmt.q.high.read(blocks), run, sizes["h"])
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
    sizes, count = _plane_bytes(fmt), blocks.shape[-2]
    each = {name: plane.unflatten(-1, (count, sizes[name])) for name, plane in planes.items()}
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
