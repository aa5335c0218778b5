"""Packed matrices laid out for kernels: the file's bits in planes, one kind of number each.

GGUF blocks mix integers, scales and pieces of integers at offsets that wide loads cannot start at.
Here a matrix [rows, K] holds the same bits, each in exactly one place, as up to five planes one
after the other. A plane has a row for each row of the matrix, K in its own order:

* ``q`` and ``h``: the low bits of the weights' integers and, where the format keeps them apart, the
  bits above. 8, 4, 2 or 1 bits each, in words of four bytes: byte b of a word holds weights
  4p + b, p = 0, 1, ..., the first lowest. So a shift and a mask give four neighbours as bytes.
* ``s``: sub-scales as bytes. Q4_K, Q5_K: scale and minimum of each 32 weights, unpacked from six
  bits. Q6_K: one int8 for each 16. Q2_K: the file's byte for each 16. Q3_K: the low nibbles of two
  sub-blocks in a byte, the first lower, and their upper two bits in ``t``, four in a byte. IQ4_XS:
  one int8 for each 32. MXFP4: the exponent of each 32. NVFP4: the E4M3 of each 16.
* ``d``: fp16 for each block, or two fp16 (d below, minimum above) where there are two. MXFP4: the
  largest exponent of each 256 weights, of blocks that are not all 0. It repeats what ``s`` says:
  products in float16 take the others relative to it. NVFP4: what scales a row, float32 each: the
  factor of its products, and the two that make it.

Rows of planes are filled up to multiples of 16 bytes with zeros. The whole is uint8 [rows,
row_bytes], contiguous; it has as many bytes a row as that, but its own rows mean nothing, so that
only stacks of matrices may be sliced. The integers are those the file stores, before any offset is
taken from them; which bits they are is told by :data:`~ferrum_triton.quant.FORMATS`. A kind of this
layout is named ``"Q4_K:planes"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.layout import Ratio, Run

ROW_ALIGN = 16
# Low bits of an integer and the bits apart from them, as kernels unpack them.
CODE_BITS = ((2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (8, 0))
# Weights of a block with sub-blocks, and weights that share a byte of the plane d where blocks are
# scaled by powers of two.
LARGEST_OF = 256
SUFFIX = ":planes"
# Bytes of what scales a row. Kernels take 2^-8 of an E4M3 where half of it is meant, so that the
# factor of products is 2^7 times the ratio.
ROW_SCALE_BYTES, ROW_SCALE = 12, 2.0**7
# Bytes of blocks repacked at a time: codes take up to eight times their room while they are moved.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class PlaneFormat:
    """A block format whose rows are in planes.

    Attributes:
        file: the format's description.

    Raises:
        InputError: kernels do not know such a format.
    """

    file: BlockFormat

    def __post_init__(self) -> None:
        fmt = self.file
        if (
            (fmt.low_bits, fmt.high_bits) not in CODE_BITS
            or (fmt.block_size != (LARGEST_OF if fmt.scales else 32) and not fmt.is_row_scaled)
            or fmt.sub_size not in (16, 32)
            or (fmt.low_bits == 2 and not fmt.has_halves)
            or (fmt.values is None and fmt.is_exponent)
            or (fmt.values is not None and (fmt.bits, fmt.has_minimum) != (4, False))
        ):
            advice = "CONTRIBUTING lists what kernels know of a format."
            raise InputError("PlaneFormat", "file", fmt.name, "a format with planes", advice)

    @cached_property
    def plane_bytes(self) -> dict[str, Fraction]:
        """Bytes of a block in each plane, in the order of the planes; 0 of what a row has once."""
        fmt = self.file
        num_scales = fmt.block_size // fmt.sub_size
        # Bits of a sub-block in s and t.
        s, t = {"": (0, 0), "pair": (16, 0), "packed": (4, 2)}.get(fmt.scale_code, (8, 0))
        sizes = {
            "q": Fraction(fmt.block_size * fmt.low_bits, 8),
            "h": Fraction(fmt.block_size * fmt.high_bits, 8),
            "s": Fraction(s * num_scales, 8),
            "t": Fraction(t * num_scales, 8),
            "d": Fraction(4 if fmt.has_minimum else 2),
        }
        if fmt.is_exponent:
            sizes["d"] = Fraction(fmt.block_size, LARGEST_OF)
        if fmt.is_row_scaled:
            sizes["d"] = Fraction(0)
        return {plane: size for plane, size in sizes.items() if size or plane == "d"}

    def used_bytes(self, plane: str, num_blocks: int) -> int:
        """Bytes of a row of so many blocks in a plane, before it is filled up."""
        if plane == "d" and self.file.is_row_scaled:
            return ROW_SCALE_BYTES if num_blocks else 0
        return math.ceil(num_blocks * self.plane_bytes[plane])

    @property
    def name(self) -> str:
        return self.file.name + SUFFIX

    @property
    def block_size(self) -> int:
        return self.file.block_size

    @property
    def block_bytes(self) -> int:
        """Whole bytes of a block in all planes."""
        return math.floor(sum(self.plane_bytes.values()))

    def row_sizes(self, num_weights: int) -> dict[str, int]:
        """Bytes of a row of each plane, for rows of ``num_weights`` weights."""
        num_blocks = self.file.row_bytes(num_weights) // self.file.block_bytes
        return {
            plane: -(-self.used_bytes(plane, num_blocks) // ROW_ALIGN) * ROW_ALIGN
            for plane in self.plane_bytes
        }

    def row_bytes(self, num_weights: int) -> int:
        """Bytes a row of all planes, for ``num_weights`` weights, a multiple of the block size."""
        return sum(self.row_sizes(num_weights).values())

    def is_row(self, row_bytes: int) -> bool:
        """Whether there are rows of ``row_bytes`` bytes."""
        return row_bytes == self.row_bytes(self._most_weights(row_bytes))

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of ``row_bytes`` bytes.

        Raises:
            InputError: no row of whole blocks has as many bytes.
        """
        if not self.is_row(row_bytes):
            allowed = f"planes of whole blocks, each filled up to a multiple of {ROW_ALIGN}"
            advice = "The row is truncated, or of another format."
            raise InputError(
                "PlaneFormat.row_weights", "row_bytes", str(row_bytes), allowed, advice
            )
        return self._most_weights(row_bytes)

    def _most_weights(self, row_bytes: int) -> int:
        """The longest row that fits."""
        num_weights = row_bytes // self.block_bytes * self.block_size
        while num_weights and self.row_bytes(num_weights) > row_bytes:
            num_weights -= self.block_size
        return num_weights


PLANE_FORMATS: dict[str, PlaneFormat] = {
    kind + SUFFIX: PlaneFormat(fmt) for kind, fmt in FORMATS.items()
}


def views(planes: Tensor, kind: str) -> dict[str, Tensor]:
    """Each plane of uint8 [..., rows, row_bytes], as uint8 [..., rows, bytes of its row]."""
    form = _form(kind)
    sizes = form.row_sizes(form.row_weights(planes.shape[-1]))
    num_rows = planes.shape[-2]
    parts = planes.flatten(-2).split([num_rows * size for size in sizes.values()], -1)
    return {
        name: part.unflatten(-1, (num_rows, size))
        for (name, size), part in zip(sizes.items(), parts, strict=True)
    }


def take_rows(planes: Tensor, rows: Tensor, kind: str) -> Tensor:
    """Planes of some rows of one matrix: uint8 [len(rows), row_bytes]."""
    parts = [plane[rows].flatten() for plane in views(planes, kind).values()]
    return torch.cat(parts).view(len(rows), planes.shape[-1])


def has_part_of_rows(blocks: Tensor) -> bool:
    """Whether a matrix is a view of some rows of another: no matrix, if that one is in planes."""
    base = blocks._base
    if base is None or base.dim() < 2 or blocks.dim() < 2 or base.shape[-1] != blocks.shape[-1]:
        return False
    return base.shape[-2] != blocks.shape[-2]


def to_planes(blocks: Tensor, kind: str, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Lay packed matrices out in planes, on their own device, some rows at a time.

    Args:
        blocks: uint8 [..., rows, row_bytes] as in a GGUF file.
        kind: their format, as in :data:`~ferrum_triton.quant.FORMATS`.
        chunk_bytes: of ``blocks`` at a time.

    Returns:
        uint8 [..., rows, row_bytes of ``kind + ":planes"``].

    Raises:
        InputError: the format has no planes, or a row is no whole number of blocks.
    """
    form = _form(kind)
    num_weights = form.file.row_weights(blocks.shape[-1])
    planes = blocks.new_zeros(*blocks.shape[:-1], form.row_bytes(num_weights))
    stacked, stored = views(_stack(planes), kind), _stack(blocks)
    for chunk in _chunks(stored.shape, chunk_bytes):
        part = stored[chunk]
        each = _split(part.unflatten(-1, (-1, form.file.block_bytes)), form.file)
        for name, plane in each.items():
            stacked[name][chunk][..., : plane.shape[-1]] = plane
    return planes


def from_planes(planes: Tensor, kind: str, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """The file's bytes again: uint8 [..., rows, row_bytes] from what :func:`to_planes` made."""
    form = _form(kind)
    num_blocks = form.row_weights(planes.shape[-1]) // form.block_size
    blocks = planes.new_zeros(*planes.shape[:-1], num_blocks * form.file.block_bytes)
    stacked, stored = views(_stack(planes), kind), _stack(blocks)
    for chunk in _chunks(stored.shape, chunk_bytes):
        each = {
            name: plane[chunk][..., : form.used_bytes(name, num_blocks)]
            for name, plane in stacked.items()
        }
        _join(stored[chunk].unflatten(-1, (num_blocks, form.file.block_bytes)), each, form)
    return blocks


def _stack(x: Tensor) -> Tensor:
    """[..., rows, row_bytes] as [matrices, rows, row_bytes]."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _chunks(shape: torch.Size, chunk_bytes: int) -> list[tuple[slice, slice]]:
    """Slices of matrices and of rows that cover [matrices, rows, row_bytes]."""
    num_matrices, num_rows, row = shape
    if shape.numel() == 0:
        return []
    rows = min(max(chunk_bytes // row, 1), num_rows)
    matrices = max(chunk_bytes // (row * num_rows), 1)
    return [
        (slice(i, i + matrices), slice(j, j + rows))
        for i in range(0, num_matrices, matrices)
        for j in range(0, num_rows, rows)
    ]


def _form(kind: str) -> PlaneFormat:
    if kind + SUFFIX not in PLANE_FORMATS:
        allowed = ", ".join(form.file.name for form in PLANE_FORMATS.values())
        raise InputError("to_planes", "kind", repr(kind), allowed, "Keep it as the file has it.")
    return PLANE_FORMATS[kind + SUFFIX]


def _plane(bits: int, num_weights: int) -> Run:
    """How the integers of a row lie in a plane's bytes."""
    planes = 8 // bits
    return Run(0, bits, lanes=4, planes=planes, chunks=num_weights // (4 * planes))


def _packed(codes: Tensor, run: Run) -> Tensor:
    """The low bits of uint8 [..., codes] as uint8 [..., bytes of the run]."""
    out = codes.new_zeros(*codes.shape[:-1], run.chunks * run.lanes)
    run.write(out, codes)
    return out


def _scale_runs(num_scales: int) -> tuple[Run, Run]:
    """How packed scales lie in the planes s and t.

    Neighbours share a byte, so that the scales of a run of weights lie in few bytes.
    """
    low = Run(0, bits=4, lanes=1, planes=2, chunks=num_scales // 2)
    return low, Run(0, bits=2, lanes=1, planes=4, chunks=num_scales // 4)


def _split(blocks: Tensor, fmt: BlockFormat) -> dict[str, Tensor]:
    """uint8 [..., blocks, block_bytes] -> uint8 [..., bytes] for each plane.

    A block is a whole number of words in every plane but one of single bits of 32 weights, where it
    is one: rows are the blocks' pieces end to end.
    """
    codes = fmt.q.codes(blocks)
    planes = {"q": _packed(codes, _plane(fmt.low_bits, fmt.block_size))}
    if fmt.high_bits:
        planes["h"] = _packed(codes >> fmt.low_bits, _plane(fmt.high_bits, fmt.block_size))
    planes |= _split_scales(blocks, fmt)
    if isinstance(fmt.d, Ratio):
        return {name: plane.flatten(-2) for name, plane in planes.items()} | {
            "d": _row_scale(blocks, fmt.d)
        }
    if fmt.is_exponent:
        planes["d"] = _largest_exponents(planes["s"], codes, fmt)
        return {name: plane.flatten(-2) for name, plane in planes.items()}
    d = blocks[..., fmt.d.at : fmt.d.at + 2]
    planes["d"] = torch.cat([d, blocks[..., fmt.m.at : fmt.m.at + 2]], -1) if fmt.m else d
    return {name: plane.flatten(-2) for name, plane in planes.items()}


def _largest_exponents(exponents: Tensor, codes: Tensor, fmt: BlockFormat) -> Tensor:
    """The largest byte of each 256 weights, of blocks whose weights are not all 0.

    Args:
        exponents: uint8 [..., blocks, 1].
        codes: uint8 [..., blocks, block_size].

    Returns:
        uint8 [..., blocks of 256 weights, 1].
    """
    assert fmt.values
    zeros = torch.tensor([value == 0 for value in fmt.values], device=codes.device)
    known = exponents.squeeze(-1).where(~zeros[codes.int()].all(-1), 0)
    count = LARGEST_OF // fmt.block_size
    known = torch.nn.functional.pad(known, (0, -known.shape[-1] % count))
    return known.unflatten(-1, (-1, count)).amax(-1, keepdim=True)


def _row_scale(blocks: Tensor, d: Ratio) -> Tensor:
    """What scales rows, uint8 [..., rows, ROW_SCALE_BYTES], of [..., rows, blocks, block_bytes].

    Raises:
        InputError: blocks of a row have different ones.
    """
    stored = blocks[..., d.at : d.at + 8]
    first = stored[..., 0, :]
    if not torch.equal(stored, first[..., None, :].expand_as(stored)):
        allowed = "rows of blocks that have one scale d"
        raise InputError("to_planes", "blocks", "of several in a row", allowed, "Keep the blocks.")
    factor = d.read(blocks[..., 0, :]) * ROW_SCALE
    return torch.cat([factor.view(torch.uint8), first], -1)


def _split_scales(blocks: Tensor, fmt: BlockFormat) -> dict[str, Tensor]:
    """The planes s and t, of formats that have them."""
    if fmt.is_exponent:
        return {"s": blocks[..., fmt.d.at : fmt.d.at + 1]}
    if fmt.scales is None:
        return {}
    if fmt.scale_code == "e4m3":
        return {"s": fmt.scales.codes(blocks)}
    if fmt.scale_code == "packed":
        codes = fmt.scales.codes(blocks)
        low, high = _scale_runs(len(fmt.scales))
        return {"s": _packed(codes, low), "t": _packed(codes >> 4, high)}
    scales = fmt.scales.read(blocks).view(torch.uint8)
    if fmt.mins is not None:
        mins = fmt.mins.read(blocks)
        if fmt.scale_code == "nibbles":
            scales = scales | mins << 4
        else:
            scales = torch.stack([scales, mins], -1).flatten(-2)
    return {"s": scales}


def _join(blocks: Tensor, planes: dict[str, Tensor], form: PlaneFormat) -> None:
    """What :func:`_split` took apart, into uint8 [..., blocks, block_bytes] of zeros."""
    fmt, count = form.file, blocks.shape[-2]
    each = {
        name: plane.unflatten(-1, (count, int(form.plane_bytes[name])))
        for name, plane in planes.items()
        if form.plane_bytes[name] >= 1
    }
    codes = _plane(fmt.low_bits, fmt.block_size).read(each["q"])
    if fmt.high_bits:
        high = _plane(fmt.high_bits, fmt.block_size).read(each["h"])
        codes = codes | high << fmt.low_bits
    fmt.q.write_codes(blocks, codes)
    _join_scales(blocks, each, fmt)
    if isinstance(fmt.d, Ratio):
        blocks[..., fmt.d.at : fmt.d.at + 8] = planes["d"][..., None, 4:]
        return
    if fmt.is_exponent:
        blocks[..., fmt.d.at : fmt.d.at + 1] = each["s"]
        return
    blocks[..., fmt.d.at : fmt.d.at + 2] = each["d"][..., :2]
    if fmt.m:
        blocks[..., fmt.m.at : fmt.m.at + 2] = each["d"][..., 2:]


def _join_scales(blocks: Tensor, planes: dict[str, Tensor], fmt: BlockFormat) -> None:
    """What :func:`_split_scales` took apart."""
    if fmt.scales is None:
        return
    stored = planes["s"]
    if fmt.scale_code == "e4m3":
        fmt.scales.write_codes(blocks, stored)
    elif fmt.scale_code == "packed":
        low, high = _scale_runs(len(fmt.scales))
        fmt.scales.write_codes(blocks, low.read(stored) | high.read(planes["t"]) << 4)
    elif fmt.scale_code == "nibbles":
        assert fmt.mins
        fmt.scales.write(blocks, stored & 15)
        fmt.mins.write(blocks, stored >> 4)
    elif fmt.scale_code == "pair":
        assert fmt.mins
        scales, mins = stored.unflatten(-1, (-1, 2)).unbind(-1)
        fmt.scales.write(blocks, scales)
        fmt.mins.write(blocks, mins)
    else:
        fmt.scales.write(blocks, stored.view(torch.int8))
