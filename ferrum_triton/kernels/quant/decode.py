"""Decoding packed blocks to float32 tiles, format by format: what every kernel here shares.

A lane is a byte position that holds PLANES weights, one a plane (in the low and the high half of
the byte, say); a group is the run of lanes whose weights share their scales, plane by plane. A
lane's bytes are loaded once for all its planes. A tile is [rows, groups, lanes] of one plane::

    format      weights  groups  lanes  planes  first weight of group s in plane p
    Q4_0, Q4_1       32       1     16       2  16p
    Q8_0             32       1     32       1  0
    Q4_K            256       4     32       2  64s + 32p
    Q6_K            256       4     16       4  128(s // 2) + 32p + 16(s mod 2)

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
    "Q8_0": (1, 32, 1),
    "Q4_K": (4, 32, 2),
    "Q6_K": (4, 16, 4),
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


def alignment(blocks: Tensor) -> int:
    """The largest power of two, up to 16, that divides every row's address."""
    return math.gcd(blocks.data_ptr(), blocks.stride(0), 16)


@triton.jit
def first_weight(s, PLANE: tl.constexpr, KIND: tl.constexpr):
    """Index in its block of the first weight of group ``s`` in a plane."""
    if KIND == "Q4_K":
        index = 64 * s + 32 * PLANE
    elif KIND == "Q6_K":
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
    elif KIND == "Q8_0":
        weights = _decode_q8_0(block, lane, mask, ALIGN)
    elif KIND == "Q4_K":
        weights = _decode_q4_k(block, s, lane, mask, PLANE, ALIGN)
    else:
        tl.static_assert(KIND == "Q6_K")
        weights = _decode_q6_k(block, s, lane, mask, PLANE, ALIGN)
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
def _nibbles_at(ptr, mask, HIGH: tl.constexpr):
    """The low or high four bits of the bytes at ``ptr``, int32."""
    return (tl.load(ptr, mask=mask, other=0).to(tl.int32) >> (4 * HIGH)) & 15


@triton.jit
def _decode_q4_0(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d = _half_at(block, mask, ALIGN)
    q = _nibbles_at(block + 2 + lane, mask, PLANE)
    return d * (q - 8).to(tl.float32)


@triton.jit
def _decode_q4_1(block, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d, m = _two_halves(_word_at(block, mask, ALIGN))
    q = _nibbles_at(block + 4 + lane, mask, PLANE)
    return d * q.to(tl.float32) + m


@triton.jit
def _decode_q8_0(block, lane, mask, ALIGN: tl.constexpr):
    d = _half_at(block, mask, ALIGN)
    q = tl.load(block + 2 + lane, mask=mask, other=0).to(tl.int8, bitcast=True)
    return d * q.to(tl.float32)


@triton.jit
def _decode_q4_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    d, dmin = _two_halves(_word_at(block, mask, ALIGN))
    q = _nibbles_at(block + 16 + 32 * s + lane, mask, PLANE)

    # Sub-block 2s + PLANE is the i-th of the first four or of the last four; the i-th bytes of the
    # three words hold what both need.
    i = 2 * (s % 2) + PLANE
    first = _word_at(block + 4, mask, ALIGN) >> (8 * i)
    second = _word_at(block + 8, mask, ALIGN) >> (8 * i)
    third = _word_at(block + 12, mask, ALIGN) >> (8 * i)
    in_first_four = s < 2
    scale = tl.where(in_first_four, first & 63, (third & 15) | ((first >> 2) & 48))
    low = tl.where(in_first_four, second & 63, ((third >> 4) & 15) | ((second >> 2) & 48))
    return (d * scale.to(tl.float32)) * q.to(tl.float32) - dmin * low.to(tl.float32)


@triton.jit
def _decode_q6_k(block, s, lane, mask, PLANE: tl.constexpr, ALIGN: tl.constexpr):
    # Group s is half s % 2 of the 32 weights that half s // 2 of the block has in each plane.
    low_at = 64 * (s // 2) + 32 * (PLANE % 2) + 16 * (s % 2)
    low = _nibbles_at(block + low_at + lane, mask, PLANE // 2)
    high = tl.load(block + 128 + 16 * s + lane, mask=mask, other=0).to(tl.int32) >> (2 * PLANE)
    q = low | ((high & 3) << 4)

    scale_at = 192 + 8 * (s // 2) + 2 * PLANE + s % 2
    scale = tl.load(block + scale_at, mask=mask, other=0).to(tl.int8, bitcast=True)
    step = _half_at(block + 208, mask, ALIGN) * scale.to(tl.float32)
    return step * (q - 32).to(tl.float32)
