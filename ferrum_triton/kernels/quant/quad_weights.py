"""64 weights of a row for each thread of a quad, as pairs of float16 for ``mma.m16n8k16``.

A quad takes 256 weights of a row, a block of the k-quants, and each of its threads 64 in whole
words of each plane. Pairs are those of :mod:`ferrum_triton.kernels.quant.fragments`, 16 weights
being eight of them; every tensor here is int32 [threads], with a pair in each.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.fragments import (
    PLUS,
    PLUS_CONSTRAINTS,
    TIMES,
    TIMES_CONSTRAINTS,
    byte_asm,
    largest_power,
    relative_power,
    value,
)
from ferrum_triton.kernels.quant.loads import load_one, load_words
from ferrum_triton.kernels.quant.planes import fp16_pair
from ferrum_triton.kernels.quant.words import permuted

_EIGHT = tl.constexpr((tl.int32,) * 8)


@triton.constexpr_function
def thread_bytes(plane, bits, scales, mins):
    """Bytes of 64 weights in a plane; of ``"d"`` those of all 256 where d is theirs."""
    low = 8 if bits == 8 else 4 if bits >= 4 else 2
    if plane == "q":
        return 8 * low
    if plane == "h":
        return 8 * (bits - low)
    if plane == "s":
        return {"": 0, "packed": 2, "byte32": 2, "power": 2}.get(scales, 4)
    if plane == "t":
        return 1
    if scales == "power":
        return 1
    return (4 if mins else 2) * (1 if scales else 2)


@triton.jit
def _pointer(ptr, first, thread, block, ROW: tl.constexpr, EACH: tl.constexpr):
    """Bytes of a quad's thread in a block of a row."""
    return ptr + first * ROW + (block * 4 + thread) * EACH


@triton.jit
def load_rows(
    planes_ptr, num_rows, row, thread, block, mask, Q: tl.constexpr, H: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, PTX: tl.constexpr, HINT: tl.constexpr, ROWS: tl.constexpr = 2,
):  # fmt: skip
    """ROWS rows of a thread, eight apart: tuples of words (q, h, scales, d).

    Args:
        planes_ptr: of a matrix of num_rows rows, int64.
        row: the first, int64 [threads].
        thread: of its quad, [threads].
        block: of 256 weights, [threads].
        mask: [threads]; words are 0 where it does not hold.
        Q, H, S, T, D: bytes of a row of each plane, 0 of one that the format has not.
    """
    Q_EACH: tl.constexpr = thread_bytes("q", BITS, SCALES, MINS)
    H_EACH: tl.constexpr = thread_bytes("h", BITS, SCALES, MINS)
    S_EACH: tl.constexpr = thread_bytes("s", BITS, SCALES, MINS)
    D_EACH: tl.constexpr = thread_bytes("d", BITS, SCALES, MINS)
    q_ptr = _pointer(planes_ptr, row, thread, block, Q, Q_EACH)
    planes_ptr += num_rows * Q
    h_ptr = _pointer(planes_ptr, row, thread, block, H, H_EACH)
    planes_ptr += num_rows * H
    s_ptr = _pointer(planes_ptr, row, thread, block, S, S_EACH)
    planes_ptr += num_rows * S
    t_ptr = _pointer(planes_ptr, row, thread, block, T, 1)
    planes_ptr += num_rows * T
    if SCALES == "":
        d_ptr = _pointer(planes_ptr, row, thread, block, D, D_EACH)
    else:
        d_ptr = planes_ptr + row * D + block * D_EACH
    rows = ()
    for r in tl.static_range(ROWS):
        q = ()
        at = (q_ptr + 8 * r * Q).to(tl.pointer_type(tl.int32))
        for i in tl.static_range(Q_EACH // 16):
            q += load_words(at + 4 * i, mask, 4, PTX, HINT)
        h = ()
        at = (h_ptr + 8 * r * H).to(tl.pointer_type(tl.int32))
        if H_EACH > 0:
            h = load_words(at, mask, H_EACH // 4, PTX, HINT)
        s = ()
        if SCALES == "packed":
            low = load_one((s_ptr + 8 * r * S).to(tl.pointer_type(tl.uint16)), mask)
            s = (low.to(tl.int32), load_one(t_ptr + 8 * r * T, mask).to(tl.int32))
        elif S_EACH == 2:
            low = load_one((s_ptr + 8 * r * S).to(tl.pointer_type(tl.uint16)), mask)
            s = (low.to(tl.int32),)
        elif SCALES != "":
            s = (load_one((s_ptr + 8 * r * S).to(tl.pointer_type(tl.int32)), mask),)
        at = d_ptr + 8 * r * D
        if D_EACH == 8:
            d = load_words(at.to(tl.pointer_type(tl.int32)), mask, 2, PTX, HINT)
        elif D_EACH == 4:
            d = (load_one(at.to(tl.pointer_type(tl.int32)), mask),)
        elif D_EACH == 2:
            d = (load_one(at.to(tl.pointer_type(tl.uint16)), mask).to(tl.int32),)
        else:
            d = (load_one(at, mask).to(tl.int32),)
        rows += ((q, h, s, d),)
    return rows


@triton.jit
def _twice(word, HALF: tl.constexpr, PTX: tl.constexpr):
    """The lower or upper 16 bits of a word, twice."""
    return permuted(word, word, 0x3232 if HALF else 0x1010, PTX)


@triton.jit
def _scale(s, d, J: tl.constexpr, SCALES: tl.constexpr):
    """The integer scale of a thread's weights 16 J and on, in the lowest byte.

    Of powers of two, a pair of that relative to the block's largest.
    """
    if SCALES == "power":
        half = relative_power((s[0] >> (8 * (J // 2))) & 0xFF, d[0])
        scale = _packed(half, half)
    elif SCALES == "byte32":
        scale = s[0] >> (8 * (J // 2))
    elif SCALES == "pair":
        scale = s[0] >> (16 * (J // 2))
    elif SCALES == "byte":
        scale = s[0] >> (8 * J)
    elif SCALES == "nibbles":
        scale = (s[0] >> (8 * J)) & 15
    else:
        scale = ((s[0] >> (4 * J)) & 15) | (((s[1] >> (2 * J)) & 3) << 4)
    return scale


@triton.jit
def _packed(low, high):
    """Two float16 as a pair."""
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _unpacked(words, more, scale, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr):
    """The eight pairs without PTX."""
    if SCALES == "":
        scale = 1
    elif SCALES == "packed":
        scale -= 32
    elif SCALES == "power":
        scale, _ = fp16_pair(scale)
    else:
        scale = (scale << 24) >> 24
    pairs = ()
    for p in tl.static_range(8):
        low = value(words, more, scale, p // 4, p // 2 % 2, p % 2 * 8, BITS, OFFSET)
        high = value(words, more, scale, p // 4, p // 2 % 2, p % 2 * 8 + 16, BITS, OFFSET)
        pairs += (_packed(low, high),)
    return pairs


@triton.jit
def weights(
    row, J: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """The eight pairs of a thread's weights 16 J and on; where they have scales, up to d.

    Args:
        row: of :func:`load_rows`.
        ASM, CONSTRAINTS: of :class:`ferrum_triton.kernels.quant.fragments.Codes`, or "".
    """
    q, h, s, d = row
    more = None
    if BITS == 8:
        words = (q[4 * J], q[4 * J + 2], q[4 * J + 1], q[4 * J + 3])
    elif BITS >= 4:
        words = (q[2 * J], q[2 * J + 1])
    else:
        words = (q[J], q[J])
    if BITS == 6:
        more = h[J]
    elif BITS == 5 or BITS == 3:
        more = h[J // 2] >> (4 * (J % 2))
    scale = None
    if SCALES != "":
        scale = _scale(s, d, J, SCALES)
    if ASM != "":
        args = words
        if more is not None:
            args += (more, more)
        if SCALES == "power":
            args += (scale,)
        elif scale is not None:
            args += (scale, scale)
        pairs = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=1
        )
    else:
        pairs = _unpacked(words, more, scale, BITS, OFFSET, SCALES)
    if SCALES == "" and MINS:
        pairs = _times(pairs, _twice(d[J // 2], 0, ASM != ""), _twice(d[J // 2], 1, ASM != ""), ASM)
    elif SCALES == "":
        pairs = _times(pairs, _twice(d[0], J // 2, ASM != ""), None, ASM)
    return pairs


@triton.jit
def _times(pairs, d, low, ASM: tl.constexpr):
    """pairs · d + low, which are pairs of the same number."""
    if ASM != "" and low is not None:
        args = pairs
        args += (d, low)
        pairs = tl.inline_asm_elementwise(
            PLUS, PLUS_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=1
        )
    elif ASM != "":
        args = pairs
        args += (d,)
        pairs = tl.inline_asm_elementwise(
            TIMES, TIMES_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=1
        )
    else:
        factor, _ = fp16_pair(d)
        added = 0.0
        if low is not None:
            added, _ = fp16_pair(low)
        out = ()
        for p in tl.static_range(8):
            first, second = fp16_pair(pairs[p])
            out += (
                _packed(
                    (first * factor + added).to(tl.float16),
                    (second * factor + added).to(tl.float16),
                ),
            )
        pairs = out
    return pairs


@triton.jit
def block_scale(row, SCALES: tl.constexpr):
    """d of a row's block, float32: of formats whose :func:`weights` are scaled up to it."""
    if SCALES == "power":
        d = largest_power(row[3][0])
    else:
        d, _ = fp16_pair(row[3][0])
    return d


@triton.jit
def minimum(row, J: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr):
    """The integer minimum of a thread's weights 16 J and on, a pair of the same number."""
    BYTE: tl.constexpr = 2 * (J // 2) + 1 if SCALES == "pair" else J
    word = row[2][0]
    if SCALES == "nibbles":
        word = (word >> 4) & 0x0F0F0F0F
    if PTX:
        pair = tl.inline_asm_elementwise(
            byte_asm(BYTE), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        half = ((word >> (8 * BYTE)) & 255).to(tl.float16)
        pair = _packed(half, half)
    return pair
