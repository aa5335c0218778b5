"""GGUF's block formats: what the bytes of a block mean.

A weight row of K values is K / block_size blocks back to back, each holding its own scales; bytes
are little-endian and scales are fp16 unless said. Names and layouts are ggml's
(``ggml-common.h``); the order of the float32 operations is that of its reference dequantisers, so
that every implementation gives the same bits.

A format is one :class:`BlockFormat`, an entry of :data:`FORMATS`. All else follows from it: this
module's decoder, the repacked layout (:mod:`ferrum_triton.quant.planes`) and what the kernels know
of the format, which take the description itself as a constant. Two are of no GGUF file: Q4_Z and
NVFP4 hold what other checkpoints have, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.layout import (
    E4m3,
    Half,
    HalvedExponent,
    Integers,
    Ratio,
    Run,
    Scale,
    Zero,
)


@dataclass(frozen=True)
class BlockFormat:
    """The description of one block format. Weight i, in sub-block j, is

        w[i] = (d · scales[j]) · q[i] - m · mins[j]

    without the factors and terms the format has not; a format with ``m`` and no mins adds m, or
    takes it from q[i] where it is a zero. Where
    there are ``values``, values[q[i]] takes q[i]'s place. A ratio d is that of a whole row:
    scales[j] · q[i], which is exact then, is multiplied by one number and divided by another.

    Kernels take a description as a constant, and Triton's cache keys hold its text. So a kernel
    compiled for one description never serves another of the same name.

    Attributes:
        name: ggml's name, e.g. ``"Q4_K"``.
        ggml_id: number of the type in GGUF files; None of one that they do not have.
        block_size: weights in a block.
        block_bytes: bytes of a block.
        d: scale of the block.
        q: the weights' integers.
        m: minimum, or scale of the minimums, or a zero.
        scales: integers that scale the sub-blocks, of equal size.
        mins: integers that scale ``m`` for each sub-block.
        values: codebook, up to 16 integers of 8 bits that the integers q are indices of.
    """

    name: str
    ggml_id: int | None
    block_size: int
    block_bytes: int
    d: Scale
    q: Integers
    m: Half | None = None
    scales: Integers | None = None
    mins: Integers | None = None
    values: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        """The name's hash: launches look kernels up by it, and a string remembers its own."""
        return hash(self.name)

    @property
    def low_bits(self) -> int:
        """Low bits of an integer, that lie together: 2, 4 or 8."""
        return self.q.low[0].bits

    @property
    def high_bits(self) -> int:
        """Bits of an integer that lie apart from the low ones: 0, 1 or 2."""
        return self.q.high.bits if self.q.high else 0

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return self.low_bits + self.high_bits

    @property
    def offset(self) -> int:
        """What is taken from every stored integer."""
        return self.q.offset

    @property
    def signed(self) -> bool:
        """Whether integers are bytes in two's complement."""
        return self.q.signed

    @property
    def bias(self) -> int:
        """What makes the smallest value of the codebook 0."""
        return -min(self.values) if self.values else 0

    @property
    def has_minimum(self) -> bool:
        """Whether a block has m beside d."""
        return self.m is not None

    @property
    def has_zero(self) -> bool:
        """Whether m is what an integer is if its weight is 0."""
        return isinstance(self.m, Zero)

    @property
    def is_exponent(self) -> bool:
        """Whether d is a power of two, stored as a byte."""
        return isinstance(self.d, HalvedExponent)

    @property
    def is_row_scaled(self) -> bool:
        """Whether all blocks of a row have the same d, a ratio."""
        return isinstance(self.d, Ratio)

    @property
    def sub_size(self) -> int:
        """Weights that share a scale: those of a sub-block, or of a block without sub-blocks."""
        return self.block_size // len(self.scales) if self.scales else self.block_size

    @property
    def has_halves(self) -> bool:
        """Whether each half of a group of 32 weights has a scale of its own."""
        return self.sub_size == 16

    @property
    def scale_code(self) -> str:
        """How the sub-blocks' integers lie in the repacked layout.

        * ``""``: there are none.
        * ``"pair"``: a scale and a minimum, a byte each.
        * ``"nibbles"``: a scale and a minimum of four bits in a byte, the scale lower.
        * ``"byte"``: a scale for each 16 weights, as a signed byte.
        * ``"byte32"``: the same for each 32.
        * ``"e4m3"``: a scale for each 16 weights, in E4M3.
        * ``"power"``: d itself, the byte of a power of two, for each 32.
        * ``"packed"``: a scale of four low bits, two in a byte, and two high bits, four in a byte.
        """
        if self.scales is None:
            return "power" if self.is_exponent else ""
        if self.mins is not None:
            return "nibbles" if self.scales.bits == self.mins.bits == 4 else "pair"
        if isinstance(self.scales, E4m3):
            return "e4m3"
        if not self.has_halves:
            return "byte32"
        return "packed" if self.scales.bits == 6 else "byte"

    def row_bytes(self, num_weights: int) -> int:
        """Bytes of a row of ``num_weights`` weights, a multiple of the block size."""
        if num_weights % self.block_size:
            allowed = f"a multiple of {self.block_size}, the block size of {self.name}"
            raise InputError(
                "BlockFormat.row_bytes", "num_weights", str(num_weights), allowed, "Pad the row."
            )
        return num_weights // self.block_size * self.block_bytes

    def is_row(self, row_bytes: int) -> bool:
        """Whether a row can have ``row_bytes`` bytes."""
        return row_bytes % self.block_bytes == 0

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of ``row_bytes`` bytes, a multiple of the block's bytes."""
        if not self.is_row(row_bytes):
            allowed = f"a multiple of {self.block_bytes}, the block bytes of {self.name}"
            advice = "The row is truncated, or of another format."
            raise InputError(
                "BlockFormat.row_weights", "row_bytes", str(row_bytes), allowed, advice
            )
        return row_bytes // self.block_bytes * self.block_size


def dequantize_blocks(blocks: Tensor, fmt: BlockFormat) -> Tensor:
    """Decode packed rows.

    Args:
        blocks: uint8 [..., row_bytes], any strides, at any byte address.
        fmt: their format.

    Returns:
        float32 [..., K], equal to ggml's reference dequantisation bit for bit.

    Raises:
        InputError: row_bytes is no whole number of blocks.
    """
    num_weights = fmt.row_weights(blocks.shape[-1])
    num_blocks = num_weights // fmt.block_size
    values = _decode(blocks.unflatten(-1, (num_blocks, fmt.block_bytes)), fmt)
    return values.reshape(*blocks.shape[:-1], num_weights)


def _decode(blocks: Tensor, fmt: BlockFormat) -> Tensor:
    """uint8 [..., block_bytes] -> float32 [..., block_size]."""
    q = fmt.q.read(blocks)
    if fmt.values is None:
        q = q.float()
    else:
        q = torch.tensor(fmt.values, dtype=torch.float32, device=q.device)[q.int()]
    if fmt.scales is None:
        if fmt.m is not None and fmt.has_zero:
            return fmt.d.read(blocks) * (q - fmt.m.read(blocks))
        w = fmt.d.read(blocks) * q
        return w if fmt.m is None else w + fmt.m.read(blocks)
    if isinstance(fmt.d, Ratio):
        first, second = fmt.d.parts(blocks)
        w = fmt.scales.read(blocks)[..., None] * q.unflatten(-1, (len(fmt.scales), -1))
        return w.flatten(-2) * first / second
    step = fmt.d.read(blocks) * fmt.scales.read(blocks).float()
    w = step[..., None] * q.unflatten(-1, (len(fmt.scales), -1))
    if fmt.m is not None and fmt.mins is not None:
        w = w - (fmt.m.read(blocks) * fmt.mins.read(blocks).float())[..., None]
    return w.flatten(-2)


def _nibbles(at: int, lanes: int, chunks: int = 1) -> Run:
    """Four-bit values: of each ``lanes`` bytes first the low halves, then the high halves."""
    return Run(at, bits=4, lanes=lanes, planes=2, chunks=chunks)


def _word_of_bits(at: int) -> Run:
    """One bit a weight: bit i of the uint32 at ``at``."""
    return Run(at, bits=1, lanes=1, planes=8, chunks=4)


# Q4_K and Q5_K hold eight scales and eight mins of six bits in the 12 bytes 4:16. The first four of
# each lie in the low six bits of the first and of the second four bytes. The last four have their
# low four bits in the halves of the third four bytes, and the rest above the first four's.
_SIX_BIT_SCALES = Integers(
    low=(Run(4, bits=4, lanes=4), Run(12, bits=4, lanes=4)),
    high=Run(4, bits=2, lanes=4, planes=2, shift=4),
)
_SIX_BIT_MINS = Integers(
    low=(Run(8, bits=4, lanes=4), Run(12, bits=4, lanes=4, shift=4)),
    high=Run(8, bits=2, lanes=4, planes=2, shift=4),
)

# Levels chosen to fit weights better than even ones do: ``kvalues_iq4nl`` of ggml.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# E2M1 of the OCP microscaling formats, doubled; the code of -0 gives 0.
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_ALL = (
    BlockFormat(
        "Q4_0",
        ggml_id=2,
        block_size=32,
        block_bytes=18,
        d=Half(0),
        q=Integers((_nibbles(2, lanes=16),), offset=8),
    ),
    BlockFormat(
        "Q4_1",
        ggml_id=3,
        block_size=32,
        block_bytes=20,
        d=Half(0),
        m=Half(2),
        q=Integers((_nibbles(4, lanes=16),)),
    ),
    BlockFormat(
        "Q5_0",
        ggml_id=6,
        block_size=32,
        block_bytes=22,
        d=Half(0),
        q=Integers((_nibbles(6, lanes=16),), high=_word_of_bits(2), offset=16),
    ),
    BlockFormat(
        "Q5_1",
        ggml_id=7,
        block_size=32,
        block_bytes=24,
        d=Half(0),
        m=Half(2),
        q=Integers((_nibbles(8, lanes=16),), high=_word_of_bits(4)),
    ),
    BlockFormat(
        "Q8_0",
        ggml_id=8,
        block_size=32,
        block_bytes=34,
        d=Half(0),
        q=Integers((Run(2, bits=8, lanes=32),), signed=True),
    ),
    BlockFormat(
        "Q2_K",
        ggml_id=10,
        block_size=256,
        block_bytes=84,
        d=Half(80),
        m=Half(82),
        scales=Integers((Run(0, bits=4, lanes=16),)),
        mins=Integers((Run(0, bits=4, lanes=16, shift=4),)),
        q=Integers((Run(16, bits=2, lanes=32, planes=4, chunks=2),)),
    ),
    BlockFormat(
        "Q3_K",
        ggml_id=11,
        block_size=256,
        block_bytes=110,
        d=Half(108),
        scales=Integers(
            (_nibbles(96, lanes=8),), high=Run(104, bits=2, lanes=4, planes=4), offset=32
        ),
        q=Integers(
            (Run(32, bits=2, lanes=32, planes=4, chunks=2),),
            high=Run(0, bits=1, lanes=32, planes=8),
            offset=4,
        ),
    ),
    BlockFormat(
        "Q4_K",
        ggml_id=12,
        block_size=256,
        block_bytes=144,
        d=Half(0),
        m=Half(2),
        scales=_SIX_BIT_SCALES,
        mins=_SIX_BIT_MINS,
        q=Integers((_nibbles(16, lanes=32, chunks=4),)),
    ),
    BlockFormat(
        "Q5_K",
        ggml_id=13,
        block_size=256,
        block_bytes=176,
        d=Half(0),
        m=Half(2),
        scales=_SIX_BIT_SCALES,
        mins=_SIX_BIT_MINS,
        q=Integers((_nibbles(48, lanes=32, chunks=4),), high=Run(16, bits=1, lanes=32, planes=8)),
    ),
    BlockFormat(
        "Q6_K",
        ggml_id=14,
        block_size=256,
        block_bytes=210,
        d=Half(208),
        scales=Integers((Run(192, bits=8, lanes=16),), signed=True),
        q=Integers(
            (_nibbles(0, lanes=64, chunks=2),),
            high=Run(128, bits=2, lanes=32, planes=4, chunks=2),
            offset=32,
        ),
    ),
    BlockFormat(
        "IQ4_NL",
        ggml_id=20,
        block_size=32,
        block_bytes=18,
        d=Half(0),
        q=Integers((_nibbles(2, lanes=16),)),
        values=_UNEVEN,
    ),
    BlockFormat(
        "IQ4_XS",
        ggml_id=23,
        block_size=256,
        block_bytes=136,
        d=Half(0),
        scales=Integers(
            (_nibbles(4, lanes=1, chunks=4),),
            high=Run(2, bits=2, lanes=1, planes=4, chunks=2),
            offset=32,
        ),
        q=Integers((_nibbles(8, lanes=16, chunks=8),)),
        values=_UNEVEN,
    ),
    BlockFormat(
        "MXFP4",
        ggml_id=39,
        block_size=32,
        block_bytes=17,
        d=HalvedExponent(0),
        q=Integers((_nibbles(1, lanes=16),)),
        values=_E2M1_DOUBLED,
    ),
    # What GPTQ and AWQ have: a zero for each scale, which a minimum would round.
    BlockFormat(
        "Q4_Z",
        ggml_id=None,
        block_size=32,
        block_bytes=20,
        d=Half(0),
        m=Zero(2),
        q=Integers((_nibbles(4, lanes=16),)),
    ),
    # Codes as checkpoints have them, two neighbours in a byte. GGUF's type of this name has no d.
    BlockFormat(
        "NVFP4",
        ggml_id=None,
        block_size=64,
        block_bytes=44,
        d=Ratio(0),
        scales=E4m3((Run(8, bits=8, lanes=4),)),
        q=Integers((_nibbles(12, lanes=1, chunks=32),)),
        values=_E2M1_DOUBLED,
    ),
)


class Formats(dict[str, BlockFormat]):
    """Descriptions by name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Formats:
        """Itself: Triton copies what its functions refer to, and refuses what changed since.

        A format that is added changes nothing about a kernel of another one.
        """
        return self


FORMATS = Formats({fmt.name: fmt for fmt in _ALL})

GGUF_FORMATS = {fmt.ggml_id: fmt for fmt in _ALL if fmt.ggml_id is not None}
"""Those that GGUF files have, by their numbers there."""
