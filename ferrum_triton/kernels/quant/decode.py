"""Decoding packed blocks to float32 tiles, format by format: what every kernel here shares.

A lane is a byte position that holds PLANES weights, one a plane (in the low and the high half of
the byte, say); a group is the run of lanes whose weights share their scales, plane by plane. A
lane's bytes are loaded once for all its planes. A tile is [rows, groups, lanes] of one plane::

    format                  weights  groups  lanes  planes  first weight of group s in plane p
    Q4_0, Q4_1, Q5_0, Q5_1       32       1     16       2  16p
    IQ4_NL, MXFP4                32       1     16       2  16p
    Q8_0                         32       1     32       1  0
    Q4_K, Q5_K                  256       4     32       2  64s + 32p
    Q2_K, Q3_K, Q6_K            256       4     16       4  128(s // 2) + 32p + 16(s mod 2)
    IQ4_XS                      256       8     16       2  32s + 16p

Layouts and the order of operations are those of :mod:`ferrum_triton.quant.formats`; compiled with
``enable_fp_fusion=False`` the results are equal to its bit for bit.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.quant import FORMATS

_TILES = {  # groups, lanes, planes
    "Q4_0": (1, 16, 2),
    "Q4_1": (1, 16, 2),
    "Q5_0": (1, 16, 2),
    "Q5_1": (1, 16, 2),
    "Q8_0": (1, 32, 1),
    "Q2_K": (4, 16, 4),
    "Q3_K": (4, 16, 4),
    "Q4_K": (4, 32, 2),
    "Q5_K": (4, 32, 2),
    "Q6_K": (4, 16, 4),
    "IQ4_NL": (1, 16, 2),
    "IQ4_XS": (8, 16, 2),
    "MXFP4": (1, 16, 2),
}

# The constexprs every kernel here takes to know a format.
LAYOUTS: dict[str, dict[str, Any]] = {
    kind: {
        "KIND": kind,
        "BLOCK_SIZE": FORMATS[kind].block_size,
        "BLOCK_BYTES": FORMATS[kind].block_bytes,
        "GROUPS": groups,
        "LANES": lanes,
        "PLANES": planes,
    }
    for kind, (groups, lanes, planes) in _TILES.items()
}


def groups_of(num_weights: int, kind: str) -> int:
    """Groups in a row of so many weights."""
    return num_weights // LAYOUTS[kind]["BLOCK_SIZE"] * LAYOUTS[kind]["GROUPS"]


# What the four-bit codes stand for: 16 int8, the first lowest, and the eight of MXFP4 that are not
# negative, in four bits each.
_UNEVEN = tl.constexpr(int.from_bytes(bytes(v % 256 for v in FORMATS["IQ4_NL"].values), "little"))
_E2M1_DOUBLED = tl.constexpr(
    sum(v << 4 * code for code, v in enumerate(FORMATS["MXFP4"].values[:8]))
)


def alignment(blocks: Tensor) -> int:
    """The largest power of two, up to 16, that divides every row's address."""
    return math.gcd(blocks.data_ptr(), *blocks.stride()[:-1], 16)


@triton.jit
def first_weight(s, PLANE: tl.constexpr, KIND: tl.constexpr):
    """Index in its block of the first weight of group ``s`` in a plane."""
    if KIND == "Q4_K" or KIND == "Q5_K":
        index = 64 * s + 32 * PLANE
    elif KIND == "IQ4_XS":
        index = 32 * s + 16 * PLANE
    elif KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q6_K":
        index = 128 * (s // 2) + 32 * PLANE + 16 * (s % 2)
    else:
        index = 16 * PLANE + s * 0
    return index


@triton.jit
def decode(block, s, lane, mask, PLANE: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """The weights of one plane, float32 [rows, groups, lanes]; 0 or -0 where masked off.

    Args:
        block: uint8 pointers to the blocks' first bytes, [rows, groups, 1].
        s: index of each group in its block, [1, groups, 1].
        lane: index of each lane in its group, [1, 1, lanes].
        mask: groups to read, [rows, groups, 1].
        PLANE: which plane.
        KIND: the format.
        ALIGN: power of two that divides every row's address.
    """
    if KIND == "Q4_0":
        weights = _decode_q4_0(block, lane, mask, PLANE, ALIGN)
    elif KIND == "Q4_1":
        weights = _decode_q4_1(block, lane, mask, PLANE, ALIGN)
    elif KIND == "Q5_0":
        weights = _decode_q5_0(block, lane, mask, PLANE, ALIGN)
    elif KIND == "Q5_1":
        weights = _decode_q5_1(block, lane, mask, PLANE, ALIGN)
    elif KIND == "Q8_0":
        weights = _decode_q8_0(block, lane, mask, ALIGN)
    elif KIND == "Q2_K":
        weights = _decode_q2_k(block, s, lane, mask, PLANE, ALIGN)
    elif KIND == "Q3_K":
        weights = _decode_q3_k(block, s, lane, mask, PLANE, ALIGN)
    elif KIND == "Q4_K":
        weights = _decode_q4_k(block, s, lane, mask, PLANE, ALIGN)
    elif KIND == "Q5_K":
        weights = _decode_q5_k(block, s, lane, mask, PLANE, ALIGN)
    elif KIND == "Q6_K":
        weights = _decode_q6_k(block, s, lane, mask, PLANE, ALIGN)
    elif KIND == "IQ4_NL":
        weights = _decode_iq4_nl(block, lane, mask, PLANE, ALIGN)
    elif KIND == "IQ4_XS":
        weights = _decode_iq4_xs(block, s, lane, mask, PLANE, ALIGN)
    else:
        tl.static_assert(KIND == "MXFP4")
        weights = _decode_mxfp4(block, lane, mask, PLANE)
    return weights


@triton.jit
def _half_at(ptr, mask, ALIGN: tl.constexpr):
    """The fp16 at ``ptr``, an even offset into a row, as float32."""
    if ALIGN % 2 == 0:
        half = tl.load(ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        low = tl.load(ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(ptr + 1, mask=mask, other=0).to(tl.uint16)
        half = (low | (high << 8)).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def _word_at(ptr, mask, ALIGN: tl.constexpr):
    """The uint32 at ``ptr``, an offset into a row that is a multiple of 4."""
    if ALIGN % 4 == 0:
        word = tl.load(ptr.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
    else:
        word = tl.load(ptr, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            word |= tl.load(ptr + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
    return word


@triton.jit
def _two_halves(word):
    """The two fp16 of a uint32, as float32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _bits_at(ptr, mask, shift, BITS: tl.constexpr):
    """``BITS`` bits of the bytes at ``ptr``, above the lowest ``shift``, int32."""
    return (tl.load(ptr, mask=mask, other=0).to(tl.int32) >> shift) & ((1 << BITS) - 1)


@triton.jit
def _decode_q4_0(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d = _half_at(block, mask, ALIGN)
    q = _bits_at(block + 2 + lane, mask, 4 * PLANE, 4)
    return d * (q - 8).to(tl.float32)


@triton.jit
def _decode_q4_1(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d, m = _two_halves(_word_at(block, mask, ALIGN))
    q = _bits_at(block + 4 + lane, mask, 4 * PLANE, 4)
    return d * q.to(tl.float32) + m


@triton.jit
def _five_bits(block, lane, mask, PLANE: tl.constexpr, AT: tl.constexpr):
    """Fifth bits in the uint32 at ``AT``, one a weight, and the low four in the 16 bytes after."""
    low = _bits_at(block + AT + 4 + lane, mask, 4 * PLANE, 4)
    high = _bits_at(block + AT + 2 * PLANE + lane // 8, mask, lane % 8, 1)
    return low | (high << 4)


@triton.jit
def _decode_q5_0(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    q = _five_bits(block, lane, mask, PLANE, 2)
    return _half_at(block, mask, ALIGN) * (q - 16).to(tl.float32)


@triton.jit
def _decode_q5_1(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d, m = _two_halves(_word_at(block, mask, ALIGN))
    return d * _five_bits(block, lane, mask, PLANE, 4).to(tl.float32) + m


@triton.jit
def _decode_q8_0(block, lane, mask, ALIGN: tl.constexpr):
    d = _half_at(block, mask, ALIGN)
    q = tl.load(block + 2 + lane, mask=mask, other=0).to(tl.int8, bitcast=True)
    return d * q.to(tl.float32)


# Formats of 16 weights a sub-block: group s is half s % 2 of the 32 weights that half s // 2 of the
# block has in each plane.


@triton.jit
def _decode_q2_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d, dmin = _two_halves(_word_at(block + 80, mask, ALIGN))
    q = _bits_at(block + 16 + 16 * s + lane, mask, 2 * PLANE, 2)
    both = tl.load(block + 8 * (s // 2) + 2 * PLANE + s % 2, mask=mask, other=0)
    scale, low = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
    return (d * scale) * q.to(tl.float32) - dmin * low


@triton.jit
def _decode_q3_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    low = _bits_at(block + 32 + 16 * s + lane, mask, 2 * PLANE, 2)
    high = _bits_at(block + 16 * (s % 2) + lane, mask, 4 * (s // 2) + PLANE, 1)
    q = (low | (high << 2)) - 4

    scale_low = _bits_at(block + 96 + 2 * PLANE + s % 2, mask, 4 * (s // 2), 4)
    scale_high = _bits_at(
        block + 104 + 2 * (PLANE % 2) + s % 2, mask, 4 * (s // 2) + 2 * (PLANE // 2), 2
    )
    scale = (scale_low | (scale_high << 4)) - 32
    return (_half_at(block + 108, mask, ALIGN) * scale.to(tl.float32)) * q.to(tl.float32)


@triton.jit
def _decode_q6_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    low_at = 64 * (s // 2) + 32 * (PLANE % 2) + 16 * (s % 2)
    low = _bits_at(block + low_at + lane, mask, 4 * (PLANE // 2), 4)
    high = _bits_at(block + 128 + 16 * s + lane, mask, 2 * PLANE, 2)
    q = (low | (high << 4)) - 32

    scale_at = 192 + 8 * (s // 2) + 2 * PLANE + s % 2
    scale = tl.load(block + scale_at, mask=mask, other=0).to(tl.int8, bitcast=True)
    return (_half_at(block + 208, mask, ALIGN) * scale.to(tl.float32)) * q.to(tl.float32)


# Formats of 32 weights a sub-block: group s has sub-blocks 2s and 2s + 1, one a plane.


@triton.jit
def _step_and_low(block, s, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    """d · scale and dmin · min of sub-block 2s + PLANE, whose integers have six bits."""
    d, dmin = _two_halves(_word_at(block, mask, ALIGN))
    # The sub-block is the i-th of the first four or of the last four; the i-th bytes of the three
    # words hold what both need.
    i = 2 * (s % 2) + PLANE
    first = _word_at(block + 4, mask, ALIGN) >> (8 * i)
    second = _word_at(block + 8, mask, ALIGN) >> (8 * i)
    third = _word_at(block + 12, mask, ALIGN) >> (8 * i)
    in_first_four = s < 2
    scale = tl.where(in_first_four, first & 63, (third & 15) | ((first >> 2) & 48))
    low = tl.where(in_first_four, second & 63, ((third >> 4) & 15) | ((second >> 2) & 48))
    return d * scale.to(tl.float32), dmin * low.to(tl.float32)


@triton.jit
def _decode_q4_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    step, low = _step_and_low(block, s, mask, PLANE, ALIGN)
    q = _bits_at(block + 16 + 32 * s + lane, mask, 4 * PLANE, 4)
    return step * q.to(tl.float32) - low


@triton.jit
def _decode_q5_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    step, low = _step_and_low(block, s, mask, PLANE, ALIGN)
    q = _bits_at(block + 48 + 32 * s + lane, mask, 4 * PLANE, 4)
    q |= _bits_at(block + 16 + lane, mask, 2 * s + PLANE, 1) << 4
    return step * q.to(tl.float32) - low


# Formats whose codes stand for uneven levels.


@triton.jit
def _uneven(code):
    """The level of each four-bit code, as float32."""
    # Words of 32 bits: chosen from two of 64, the gemv of IQ4_NL spills on sm_90.
    WORD: tl.constexpr = 2**32 - 1
    low = tl.where(code < 4, _UNEVEN & WORD, (_UNEVEN >> 32) & WORD)
    high = tl.where(code < 12, (_UNEVEN >> 64) & WORD, _UNEVEN >> 96)
    word = tl.where(code < 8, low, high)
    return (word >> (8 * (code & 3)).to(word.dtype)).to(tl.int8).to(tl.float32)


@triton.jit
def _decode_iq4_nl(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    code = _bits_at(block + 2 + lane, mask, 4 * PLANE, 4)
    return _half_at(block, mask, ALIGN) * _uneven(code)


@triton.jit
def _decode_iq4_xs(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    code = _bits_at(block + 8 + 16 * s + lane, mask, 4 * PLANE, 4)
    scale_low = _bits_at(block + 4 + s // 2, mask, 4 * (s % 2), 4)
    scale_high = _bits_at(block + 2 + s // 4, mask, 2 * (s % 4), 2)
    scale = (scale_low | (scale_high << 4)) - 32
    step = _half_at(block, mask, ALIGN) * scale.to(tl.float32)
    return step * _uneven(code)


@triton.jit
def _decode_mxfp4(block, lane, mask, PLANE: tl.constexpr):
    e = tl.load(block, mask=mask, other=0).to(tl.int32)
    # 2^(e - 128) as the bits of a float32, of which the first two are denormal.
    d = tl.where(e == 0, 1 << 21, tl.maximum((e - 1) << 23, 1 << 22)).to(tl.float32, bitcast=True)
    code = _bits_at(block + 1 + lane, mask, 4 * PLANE, 4)
    size = (tl.cast(_E2M1_DOUBLED, tl.uint32) >> (4 * (code & 7)).to(tl.uint32)) & 15
    size = size.to(tl.int32)
    return d * tl.where(code < 8, size, -size).to(tl.float32)
