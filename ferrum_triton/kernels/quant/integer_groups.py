"""A group of 32 weights of some rows times activations as integers, of 8 bits or of 16.

Four weights are the bytes of a word. Their products with four int8 activations are one ``dp4a``,
with four of 16 bits two ``dp2a``; offsets start the integers' sum. Activations of 8 bits come with
their steps (``quantize_q8``). Those of 16 bits each thread makes here for its group, of float16 or
bfloat16: the step is a power of two with which the largest magnitude takes 15 bits. So activations
down to 2^-7 of that keep all the bits a bfloat16 has, and down to 2^-4 a float16's; smaller ones
are off by at most 2^-15 of the largest, the last bit of a float16 as large being 2^-10 of it.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.plane_groups import eight_activations, float_pair
from ferrum_triton.kernels.quant.planes import (
    GROUP,
    bits_of,
    block_scales,
    eight_words,
    has_halves,
    load_words,
    merged,
    offset_of,
    shift_of,
    sub_scales,
)

ONES = tl.constexpr(0x01010101)
# Added to a float32 of less than 2^22, leaves the nearest integer in the lowest bits.
ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def _dp4a(a, b, acc, ASM: tl.constexpr):
    """acc + the products of the four int8 of a and of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def _dp2a(low, high, b, acc, ASM: tl.constexpr):
    """acc + the products of the int16 of low and high and the four int8 of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "{ .reg .s32 t; dp2a.lo.s32.s32 t, $1, $3, $4; dp2a.hi.s32.s32 $0, $2, $3, t; }",
            "=r,r,r,r,r", [low, high, b, acc], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        acc += ((low << 16) >> 16) * ((b << 24) >> 24) + (low >> 16) * ((b << 16) >> 24)
        acc += ((high << 16) >> 16) * ((b << 8) >> 24) + (high >> 16) * (b >> 24)
    return acc


@triton.jit
def _dot_four(acc, x, word, AT: tl.constexpr, ASM: tl.constexpr):
    """acc + the products of a group's activations x from 4 AT on with the bytes of a word."""
    if len(x) == 8:
        acc = _dp4a(word, x[AT], acc, ASM)
    else:
        acc = _dp2a(x[2 * AT], x[2 * AT + 1], word, acc, ASM)
    return acc


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """acc + the products of a group's activations x with the integers of eight E."""
    for i in tl.static_range(2):
        word = words[i]
        if KIND != "Q8_0":
            word = (word >> shift_of(E, i, KIND)) & (((1 << bits_of(KIND)) - 1) * ONES)
        acc = _dot_four(acc, x, word, 2 * E + i, ASM)
    return acc


@triton.jit
def _q3_nibbles(q, h, HALF: tl.constexpr, ASM: tl.constexpr):
    """The 16 codes of half a group as nibbles: fours 0 and 2 in a word, 1 and 3 in another.

    Bit p of a byte of h belongs above the code of four p, which is four bits from that of four
    p + 2: a multiplication brings both there at once, and what else it leaves is masked off.
    """
    if HALF == 1:
        h = h >> 4
    even = merged(q, (h & (5 * ONES)) * 20, 0x33333333, 0, ASM)
    odd = merged(q >> 2, (h & (10 * ONES)) * 10, 0x33333333, 0, ASM)
    return even, odd


@triton.jit
def _half_dots(
    starts, none, x, row, HALF: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """starts[m] plus the products of half a group of Q2_K or Q3_K.

    Codes are taken where they lie in the nibbles of two words, the upper ones as 16 times as large:
    bytes with a sign still. A shift of their sum then does for shifts of words.
    """
    MASK: tl.constexpr = ((1 << bits_of(KIND)) - 1) * ONES
    if KIND == "Q3_K":
        words = _q3_nibbles(row[0][HALF], row[1][0], HALF, ASM)
    else:
        words = (row[0][HALF], row[0][HALF] >> 2)
    dots = ()
    for m in tl.static_range(M):
        low, high = starts[m], none
        for i in tl.static_range(2):
            low = _dot_four(low, x[m], words[i] & MASK, 4 * HALF + i, ASM)
            high = _dot_four(high, x[m], words[i] & (MASK << 4), 4 * HALF + 2 + i, ASM)
        dots += (low + (high >> 4),)
    return dots


@triton.jit
def _group_value(
    total, first, dots, activations, raw, group, M: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """total[m] plus the group's product, from the dots of its integers or of its halves'."""
    x, steps, lows, highs = activations
    d = block_scales(raw, KIND)
    factors = sub_scales(raw, group, KIND)
    out = ()
    for m in tl.static_range(M):
        if KIND == "Q6_K" and len(x[m]) == 16:  # beyond int32
            dot = factors[1].to(tl.float32) * dots[m].to(tl.float32)
            dot = tl.fma(factors[0].to(tl.float32), first[m].to(tl.float32), dot)
        elif KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q6_K":
            dot = (factors[0] * first[m] + factors[1] * dots[m]).to(tl.float32)
        elif KIND == "Q4_K" or KIND == "Q5_K":
            dot = (factors[0] * dots[m]).to(tl.float32)
        else:
            dot = dots[m].to(tl.float32)
        value = d[0] * dot
        if KIND == "Q2_K":
            low = factors[2] * lows[m] + factors[3] * highs[m]
            value = tl.fma(-d[1], low.to(tl.float32), value)
        elif KIND == "Q4_K" or KIND == "Q5_K":
            low = factors[1] * (lows[m] + highs[m])
            value = tl.fma(-d[1], low.to(tl.float32), value)
        elif KIND == "Q4_1" or KIND == "Q5_1":
            value = tl.fma(d[1], (lows[m] + highs[m]).to(tl.float32), value)
        out += (tl.fma(steps[m], value, total[m]),)
    return out


@triton.jit
def add_integers(
    totals, none, rows, activations, group, KIND: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """totals[r][m] plus the products of each row's group; ``none`` is a 0 to start sums at.

    Args:
        activations: of :func:`load_int8`, :func:`load_int16` or :func:`make_int16`.
    """
    x, _, lows, highs = activations
    HALVES: tl.constexpr = has_halves(KIND)
    # Q8_0's integers are taken as they are stored; what has a minimum has no offset.
    OFFSET: tl.constexpr = 0 if KIND == "Q8_0" or offset_of(KIND) == 1 else offset_of(KIND)
    out = ()
    for r in tl.static_range(ROWS):
        first, dots = (), ()
        for m in tl.static_range(M):
            start = lows[m]
            if not HALVES:
                start = lows[m] + highs[m]
            dots += (start * -OFFSET + none,)
        if KIND == "Q2_K" or KIND == "Q3_K":
            first = _half_dots(dots, none, x, rows[r], 0, KIND, M, ASM)
            dots = ()
            for m in tl.static_range(M):
                dots += (highs[m] * -OFFSET + none,)
            dots = _half_dots(dots, none, x, rows[r], 1, KIND, M, ASM)
        else:
            for e in tl.static_range(4):
                words = eight_words(rows[r][0], rows[r][1], e, KIND, True, ASM)
                if HALVES and e == 2:
                    first = dots
                    dots = ()
                    for m in tl.static_range(M):
                        dots += (highs[m] * -OFFSET + none,)
                new = ()
                for m in tl.static_range(M):
                    new += (_dot_eight(dots[m], x[m], words, e, KIND, ASM),)
                dots = new
        out += (_group_value(totals[r], first, dots, activations, rows[r][2], group, M, KIND),)
    return out


@triton.jit
def load_int8(
    x_ptr, info_ptr, stride_x_token, stride_info_token, group, mask, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A group of M activations as ``quantize_activations`` leaves them, [m] each.

    Returns:
        Their words, of four integers; what an integer is worth, float32; sums of the integers of
        the group's first half, int32; and of its second half.
    """
    x, steps, lows, highs = (), (), (), ()
    for m in tl.static_range(M):
        at = (x_ptr + m * stride_x_token).to(tl.pointer_type(tl.int32)) + group * 8
        x += (load_words(at, mask, 4, ASM, "") + load_words(at + 4, mask, 4, ASM, ""),)
        info = load_words(info_ptr + m * stride_info_token + group * 2, mask, 2, ASM, "")
        steps += (info[0].to(tl.float32, bitcast=True),)
        lows += ((info[1] << 16) >> 16,)
        highs += (info[1] >> 16,)
    return x, steps, lows, highs


@triton.jit
def load_int16(
    x_ptr, info_ptr, stride_x_token, stride_info_token, group, mask, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As :func:`load_int8`, of ``int16_activations``, in words of two integers."""
    x, steps, lows, highs = (), (), (), ()
    for m in tl.static_range(M):
        at = x_ptr + m * stride_x_token + group * 16
        words = ()
        for i in tl.static_range(4):
            words += load_words(at + 4 * i, mask, 4, ASM, "")
        x += (words,)
        info = load_words(info_ptr + m * stride_info_token + group * 4, mask, 4, ASM, "")
        steps += (info[0].to(tl.float32, bitcast=True),)
        lows += (info[1],)
        highs += (info[2],)
    return x, steps, lows, highs


@triton.jit
def _packed(low, high, ASM: tl.constexpr):
    """The lower 16 bits of both, in a word."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        word = (low & 0xFFFF) | (high << 16)
    return word


@triton.constexpr_function
def _largest_asm(dtype):
    kind = "f16x2" if dtype == tl.float16 else "bf16x2"
    return f"{{ .reg .b32 t; and.b32 t, $2, 0x7FFF7FFF; max.NaN.{kind} $0, $1, t; }}"


@triton.jit
def _load_group(ptr, mask, VECTOR: tl.constexpr):
    """A group's activations as float32, and their largest magnitude's bits; NaN above all."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    x = ()
    if VECTOR:
        most = None
        for e in tl.static_range(4):
            at = (ptr + 8 * e).to(tl.pointer_type(tl.int32))
            words = load_words(at, mask, 4, True, "")
            for i in tl.static_range(4):
                x += float_pair(words[i], dtype)
                if most is None:
                    most = words[i] & 0x7FFF7FFF
                else:
                    most = tl.inline_asm_elementwise(
                        _largest_asm(dtype), "=r,r,r", [most, words[i]], dtype=tl.int32,
                        is_pure=True, pack=1,
                    )  # fmt: skip
        low, high = float_pair(most, dtype)
        largest = tl.maximum(low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True))
    else:
        for e in tl.static_range(4):
            x += eight_activations(ptr + 8 * e, mask, False)
        largest = x[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        for i in tl.static_range(1, 32):
            largest = tl.maximum(largest, x[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return x, largest


@triton.jit
def _integers(ptr, mask, VECTOR: tl.constexpr, ASM: tl.constexpr):
    """A group's activations as integers of 16 bits, two a word; their step, NaN of what is lost."""
    x, largest = _load_group(ptr, mask, VECTOR)
    # Of magnitudes below 2^-111, the step is that of those.
    exponent = tl.maximum(largest >> 23, 16)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    words = ()
    for i in tl.static_range(16):
        low = tl.fma(x[2 * i], factor, ROUND).to(tl.int32, bitcast=True)
        high = tl.fma(x[2 * i + 1], factor, ROUND).to(tl.int32, bitcast=True)
        words += (_packed(low, high, ASM),)
    return words, step.to(tl.float32, bitcast=True)


@triton.jit
def make_int16(
    a_ptr, stride_a_token, group, mask, M: tl.constexpr, VECTOR: tl.constexpr, ASM: tl.constexpr
):
    """As :func:`load_int8`, of float16 or bfloat16 activations, in words of two integers."""
    x, steps, lows, highs = (), (), (), ()
    ones = tl.full(group.shape, ONES, tl.int32)
    for m in tl.static_range(M):
        words, step = _integers(a_ptr + m * stride_a_token + group * GROUP, mask, VECTOR, ASM)
        low, high = tl.zeros_like(group), tl.zeros_like(group)
        for i in tl.static_range(4):
            low = _dp2a(words[2 * i], words[2 * i + 1], ones, low, ASM)
            high = _dp2a(words[2 * i + 8], words[2 * i + 9], ones, high, ASM)
        x += (words,)
        steps += (step,)
        lows += (low,)
        highs += (high,)
    return x, steps, lows, highs


@triton.jit
def group_integers(
    a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask, M: tl.constexpr,
    VECTOR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A group of M activations as integers: of :func:`load_int8` or :func:`load_int16` where there
    is info, else of :func:`make_int16`."""
    if info_ptr is None:
        integers = make_int16(a_ptr, stride_a_token, group, mask, M, VECTOR, ASM)
    elif a_ptr.dtype.element_ty == tl.int8:
        integers = load_int8(
            a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask, M, ASM
        )
    else:
        integers = load_int16(
            a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask, M, ASM
        )
    return integers
