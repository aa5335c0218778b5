"""64 weights of a row for each thread of a quad, as pairs of float16 for ``mma.m16n8k16``.

A quad takes 256 weights of a row, a block of the k-quants, and each of its threads 64 in whole
words of each plane. Pairs are those of :mod:`ferrum_triton.kernels.quant.fragments`, 16 weights
being eight of them; every tensor here is int32 [threads], with a pair in each.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.quant.fragments import (
    LESS,
    PLUS,
    PLUS_CONSTRAINTS,
    TIMES,
    TIMES_CONSTRAINTS,
    byte_asm,
    constraints_of,
    largest_power,
    relative_power,
    unpacking_of,
    value_at,
)
from ferrum_triton.kernels.quant.planes import (
    STREAM,
    Layout,
    fp16_pair,
    layout_of,
    load_words,
    pointer_to,
    small_e4m3,
    uses_ptx,
)
from ferrum_triton.kernels.quant.thread_products import permuted

# Weights a quad takes at a time.
BLOCK = 256
_EIGHT = tl.constexpr((tl.int32,) * 8)


def quad_layout(planes: Tensor, kind: str, num_weights: int) -> Layout:
    """The layout of a matrix whose rows have ``num_weights`` weights, with PTX where there is."""
    layout = layout_of(planes, kind, num_weights)
    return replace(layout, asm=unpacking_of(layout.format)) if uses_ptx(planes) else layout


@triton.constexpr_function
def is_late(fmt):
    """Whether d is taken after the sum over a block."""
    return fmt.scale_code != ""


@triton.constexpr_function
def sums_minimums(fmt):
    """Whether a block's minimums are a product of their own, with sums of activations."""
    return is_late(fmt) and fmt.has_minimum


@triton.constexpr_function
def thread_bytes(plane, fmt):
    """Bytes of 64 weights in a plane; of ``"d"`` those of all 256 where d is theirs."""
    if plane == "q":
        return 8 * fmt.low_bits
    if plane == "h":
        return 8 * fmt.high_bits
    if plane == "s":
        return {"": 0, "packed": 2, "byte32": 2, "power": 2}.get(fmt.scale_code, 4)
    if fmt.scale_code == "power":
        return 1
    if fmt.is_row_scaled:
        return 4  # of a whole row
    return (4 if fmt.has_minimum else 2) * (1 if fmt.scale_code else 2)


@triton.jit
def _pointer(ptr, first, thread, block, ROW: tl.constexpr, EACH: tl.constexpr):
    """Bytes of a quad's thread in a block of a row."""
    return ptr + first * ROW + (block * 4 + thread) * EACH


@triton.jit
def load_rows(matrix, row, thread, block, mask, LAYOUT: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of a thread, eight apart: tuples of words (q, h, scales, d).

    Args:
        matrix: Matrix.
        row: the first, int64 [threads].
        thread: of its quad, [threads].
        block: of 256 weights, [threads].
        mask: [threads]; words are 0 where it does not hold.
    """
    FORMAT: tl.constexpr = LAYOUT.format
    SCALES: tl.constexpr = LAYOUT.format.scale_code
    Q_EACH: tl.constexpr = thread_bytes("q", FORMAT)
    H_EACH: tl.constexpr = thread_bytes("h", FORMAT)
    S_EACH: tl.constexpr = thread_bytes("s", FORMAT)
    D_EACH: tl.constexpr = thread_bytes("d", FORMAT)
    PTX: tl.constexpr = LAYOUT.asm != ""
    num_rows = tl.full((), 1, tl.int64) * matrix.num_rows
    planes_ptr = matrix.ptr
    q_ptr = _pointer(planes_ptr, row, thread, block, LAYOUT.q, Q_EACH)
    planes_ptr += num_rows * LAYOUT.q
    h_ptr = _pointer(planes_ptr, row, thread, block, LAYOUT.h, H_EACH)
    planes_ptr += num_rows * LAYOUT.h
    s_ptr = _pointer(planes_ptr, row, thread, block, LAYOUT.s, S_EACH)
    planes_ptr += num_rows * LAYOUT.s
    t_ptr = _pointer(planes_ptr, row, thread, block, LAYOUT.t, 1)
    planes_ptr += num_rows * LAYOUT.t
    if SCALES == "":
        d_ptr = _pointer(planes_ptr, row, thread, block, LAYOUT.d, D_EACH)
    else:
        d_ptr = planes_ptr + row * LAYOUT.d
        if not FORMAT.is_row_scaled:
            d_ptr += block * D_EACH
    rows = ()
    for r in tl.static_range(ROWS):
        q = ()
        at = (q_ptr + 8 * r * LAYOUT.q).to(tl.pointer_type(tl.int32))
        for i in tl.static_range(Q_EACH // 16):
            q += load_words(at + 4 * i, mask, 4, PTX, STREAM)
        h = ()
        at = (h_ptr + 8 * r * LAYOUT.h).to(tl.pointer_type(tl.int32))
        if H_EACH > 0:
            h = load_words(at, mask, H_EACH // 4, PTX, STREAM)
        # Scales are a few of Triton's own loads: by PTX, Q4_0 would need 99 registers for 80
        # (`compile_launch` for sm_90).
        s = ()
        if S_EACH > 0:
            at = (s_ptr + 8 * r * LAYOUT.s).to(pointer_to(S_EACH))
            s = load_words(at, mask, 1, False, "")
        if SCALES == "packed":
            s += load_words(t_ptr + 8 * r * LAYOUT.t, mask, 1, False, "")
        at = (d_ptr + 8 * r * LAYOUT.d).to(pointer_to(D_EACH))
        if D_EACH == 8:
            d = load_words(at, mask, 2, PTX, STREAM)
        else:
            d = load_words(at, mask, 1, False, "")
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
    elif SCALES == "byte" or SCALES == "e4m3":
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
def _unpacked(words, more, scale, FORMAT: tl.constexpr):
    """The eight pairs without PTX."""
    if FORMAT.scale_code == "":
        scale = 1
    elif FORMAT.scale_code == "packed":
        scale -= 32
    elif FORMAT.scale_code == "power":
        scale, _ = fp16_pair(scale)
    elif FORMAT.scale_code == "e4m3":
        scale = small_e4m3(scale)
    else:
        scale = (scale << 24) >> 24
    pairs = ()
    for p in tl.static_range(8):
        low = value_at(words, more, scale, p // 4, p // 2 % 2, p % 2 * 8, FORMAT)
        high = value_at(words, more, scale, p // 4, p // 2 % 2, p % 2 * 8 + 16, FORMAT)
        pairs += (_packed(low, high),)
    return pairs


@triton.jit
def weights(row, J: tl.constexpr, LAYOUT: tl.constexpr):
    """The eight pairs of a thread's weights 16 J and on; where they have scales, up to d.

    Args:
        row: of :func:`load_rows`.
    """
    FORMAT: tl.constexpr = LAYOUT.format
    BITS: tl.constexpr = LAYOUT.format.bits
    SCALES: tl.constexpr = LAYOUT.format.scale_code
    ASM: tl.constexpr = LAYOUT.asm
    CONSTRAINTS: tl.constexpr = constraints_of(LAYOUT.format)
    PTX: tl.constexpr = LAYOUT.asm != ""
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
    if PTX:
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
        pairs = _unpacked(words, more, scale, FORMAT)
    if SCALES == "" and LAYOUT.format.has_minimum:
        both = d[J // 2]
        pairs = _times(
            pairs,
            _twice(both, 0, PTX),
            _twice(both, 1, PTX),
            FORMAT.has_zero,
            PTX,
        )
    elif SCALES == "":
        pairs = _times(pairs, _twice(d[0], J // 2, PTX), None, False, PTX)
    return pairs


@triton.jit
def _times(pairs, d, low, IS_ZERO: tl.constexpr, PTX: tl.constexpr):
    """pairs · d + low, or (pairs - low) · d; d and low are pairs of the same number."""
    if PTX and low is not None:
        args = pairs
        args += (d, low)
        pairs = tl.inline_asm_elementwise(
            LESS if IS_ZERO else PLUS, PLUS_CONSTRAINTS, args, dtype=_EIGHT, is_pure=True, pack=1
        )
    elif PTX:
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
            if IS_ZERO:
                added = -(added * factor)
        out = ()
        for p in tl.static_range(8):
            first, second = fp16_pair(pairs[p])
            first, second = first * factor + added, second * factor + added
            out += (_packed(first.to(tl.float16), second.to(tl.float16)),)
        pairs = out
    return pairs


@triton.jit
def late_scales(row, LAYOUT: tl.constexpr):
    """d of a row's block, and m or 0, float32: of formats whose :func:`weights` are up to them."""
    m = 0.0
    if LAYOUT.format.has_minimum:
        d, m = fp16_pair(row[3][0])
    elif LAYOUT.format.scale_code == "power":
        d = largest_power(row[3][0])
    elif LAYOUT.format.is_row_scaled:
        d = row[3][0].to(tl.float32, bitcast=True)
    else:
        d, _ = fp16_pair(row[3][0])
    return d, m


@triton.jit
def minimum(row, J: tl.constexpr, LAYOUT: tl.constexpr):
    """The integer minimum of a thread's weights 16 J and on, twice; 0 of a format without."""
    if sums_minimums(LAYOUT.format):
        BYTE: tl.constexpr = 2 * (J // 2) + 1 if LAYOUT.format.scale_code == "pair" else J
        word = row[2][0]
        if LAYOUT.format.scale_code == "nibbles":
            word = (word >> 4) & 0x0F0F0F0F
        if LAYOUT.asm != "":
            pair = tl.inline_asm_elementwise(
                byte_asm(BYTE), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            half = ((word >> (8 * BYTE)) & 255).to(tl.float16)
            pair = _packed(half, half)
    else:
        pair = tl.zeros_like(row[0][0])
    return pair
