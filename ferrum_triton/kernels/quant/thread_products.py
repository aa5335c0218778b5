"""What threads multiply: groups of 32 weights by activations as integers.

x = step · integer, the step a power of two with which the group's largest magnitude takes 15 bits.
Activations down to 2^-7 of that keep all the bits a bfloat16 has, and down to 2^-4 a float16's;
smaller ones are off by at most 2^-15 of the largest, the last bit of a float16 as large being 2^-10
of it. Every thread makes the integers of the groups that it takes.

Two such integers are a word, and four weights are the bytes of one. Their products are two
instructions, :func:`dp2a`; weights' offsets start the integers' sum.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.planes import (
    bits_of,
    block_scales,
    eight_words,
    fp16_pair,
    has_bytes,
    load_one,
    load_words,
    shift_of,
    sub_scales,
)

# Added to a float32 of less than 2^22, leaves the nearest integer in the lowest bits.
ROUND = tl.constexpr(1.5 * 2**23)
ONES = tl.constexpr(0x01010101)
GROUP = tl.constexpr(32)  # weights


class Activations(NamedTuple):
    """Rows of activations in memory, [m, k].

    Attributes:
        ptr: the first; floats, or integers that a launch before this one made of them.
        stride: elements from one token to the next.
        scales_and_sums_ptr, scales_and_sums_stride: what stands beside integers; None of floats.
    """

    ptr: Any
    stride: Any
    scales_and_sums_ptr: Any
    scales_and_sums_stride: Any


class IntegerGroup(NamedTuple):
    """A group of 32 activations of each token, [m].

    Attributes:
        words: 16 words of two integers.
        steps: what an integer is worth, float32.
        lows, highs: sums of the first and the last 16 integers, int32.
    """

    words: Any
    steps: Any
    lows: Any
    highs: Any


@triton.jit
def dp2a(low, high, b, acc, PTX: tl.constexpr):
    """acc + the products of the int16 of low and high and the four int8 of b."""
    if PTX:
        asm: tl.constexpr = (
            "{ .reg .s32 t; dp2a.lo.s32.s32 t, $1, $3, $4; dp2a.hi.s32.s32 $0, $2, $3, t; }"
        )
        words = [low, high, b, acc]
        acc = tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r", words, dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        acc += ((low << 16) >> 16) * ((b << 24) >> 24) + (low >> 16) * ((b << 16) >> 24)
        acc += ((high << 16) >> 16) * ((b << 8) >> 24) + (high >> 16) * (b >> 24)
    return acc


@triton.constexpr_function
def _permute_asm(bytes_):
    return f"prmt.b32 $0, $1, $2, {bytes_:#06x};"


@triton.jit
def permuted(a, b, BYTES: tl.constexpr, PTX: tl.constexpr):
    """Four bytes of a and b, which have numbers 0 to 3 and 4 to 7: a digit of BYTES each."""
    if PTX:
        word = tl.inline_asm_elementwise(
            _permute_asm(BYTES), "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            source = b if (BYTES >> (4 * i)) & 4 else a
            word |= ((source >> (8 * ((BYTES >> (4 * i)) & 3))) & 0xFF) << (8 * i)
    return word


@triton.jit
def packed(low, high, PTX: tl.constexpr):
    """The lower 16 bits of both, in a word."""
    return permuted(low, high, 0x5410, PTX)


@triton.jit
def float_pair(word, DTYPE: tl.constexpr):
    """The two 16-bit floats of a word as float32."""
    if DTYPE == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = fp16_pair(word)
    return low, high


@triton.jit
def load_floats(a, part, mask, M: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """SPAN groups of M tokens, [token]: words of two floats if WIDE, else float32 each.

    Args:
        a: Activations of 16 bits.
        part: parts of SPAN groups, [threads].
        mask: parts that there are, [threads] or None.
        WIDE: rows start at multiples of 16 bytes, and there is PTX.
    """
    loaded = ()
    for m in tl.static_range(M):
        ptr = a.ptr + m * a.stride + part * (SPAN * GROUP)
        x = ()
        if WIDE:
            for i in tl.static_range(4 * SPAN):
                x += load_words((ptr + 8 * i).to(tl.pointer_type(tl.int32)), mask, 4, True, "")
        else:
            for i in tl.static_range(32 * SPAN):
                x += (load_one(ptr + i, mask).to(tl.float32),)
        loaded += (x,)
    return loaded


@triton.constexpr_function
def _extreme_asm(which, dtype):
    return f"{which}.NaN.{'f16x2' if dtype == tl.float16 else 'bf16x2'} $0, $1, $2;"


@triton.jit
def _extreme(x, y, WHICH: tl.constexpr, DTYPE: tl.constexpr):
    """The larger ("max") or smaller ("min") of each of two words' two floats; NaN of a NaN."""
    return tl.inline_asm_elementwise(
        _extreme_asm(WHICH, DTYPE), "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest(raw, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """The bits of the largest magnitude, as float32, of activations as they were loaded."""
    if WIDE:
        most, least = raw[0], raw[0]
        for i in tl.static_range(1, len(raw)):
            most = _extreme(most, raw[i], "max", DTYPE)
            least = _extreme(least, raw[i], "min", DTYPE)
        x = float_pair(most, DTYPE) + float_pair(least, DTYPE)
    else:
        x = raw
    largest = x[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, x[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return largest


@triton.jit
def _integers(raw, DTYPE: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr):
    """Activations as integers of 16 bits, two a word; their step, NaN of what is lost."""
    # Of magnitudes below 2^-111, the step is that of those.
    exponent = tl.maximum(_largest(raw, DTYPE, WIDE) >> 23, 16)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    words = ()
    for i in tl.static_range(len(raw) if WIDE else len(raw) // 2):
        x = float_pair(raw[i], DTYPE) if WIDE else (raw[2 * i], raw[2 * i + 1])
        low = tl.fma(x[0], factor, ROUND).to(tl.int32, bitcast=True)
        high = tl.fma(x[1], factor, ROUND).to(tl.int32, bitcast=True)
        words += (packed(low, high, PTX),)
    return words, step.to(tl.float32, bitcast=True)


@triton.jit
def integers_of(
    loaded, DTYPE: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr
):
    """:class:`IntegerGroup` of each of SPAN groups of :func:`load_floats`, with one step for all.

    Args:
        DTYPE: of the activations in memory.
    """
    words, steps = (), ()
    for m in tl.static_range(len(loaded)):
        integers, step = _integers(loaded[m], DTYPE, WIDE, PTX)
        words += (integers,)
        steps += (step,)
    zero = tl.zeros_like(words[0][0])
    ones = zero + ONES
    groups = ()
    for s in tl.static_range(SPAN):
        x, lows, highs = (), (), ()
        for m in tl.static_range(len(loaded)):
            low, high = zero, zero
            each = ()
            for i in tl.static_range(16):
                each += (words[m][16 * s + i],)
            for i in tl.static_range(4):
                low = dp2a(each[2 * i], each[2 * i + 1], ones, low, PTX)
                high = dp2a(each[2 * i + 8], each[2 * i + 9], ones, high, PTX)
            x += (each,)
            lows += (low,)
            highs += (high,)
        groups += (IntegerGroup(x, steps, lows, highs),)
    return groups


@triton.jit
def no_totals(THREADS: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr):
    """Zeros [row][token], float32 [THREADS] each."""
    totals = ()
    for _r in tl.static_range(ROWS):
        each = ()
        for _m in tl.static_range(M):
            each += (tl.zeros([THREADS], tl.float32),)
        totals += (each,)
    return totals


@triton.jit
def add_groups(totals, none, rows, activations, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """totals[row][token] plus the products of a group of each row, of what :func:`load_rows` gave.

    Args:
        none: a 0 to start sums at.
        activations: :class:`IntegerGroup`.
    """
    x, _, lows, highs = activations
    OFFSET: tl.constexpr = FORMAT.offset
    out = ()
    for r in tl.static_range(len(rows)):
        first, dots = (), ()
        for m in tl.static_range(len(x)):
            start = lows[m]
            if not FORMAT.has_halves:
                start = lows[m] + highs[m]
            dots += (start * -OFFSET + none,)
        for e in tl.static_range(4):
            words = eight_words(rows[r][0], rows[r][1], e, FORMAT, True, PTX)
            if FORMAT.has_halves and e == 2:
                first = dots
                dots = ()
                for m in tl.static_range(len(x)):
                    dots += (highs[m] * -OFFSET + none,)
            new = ()
            for m in tl.static_range(len(x)):
                new += (_dot_eight(dots[m], x[m], words, e, FORMAT, PTX),)
            dots = new
        out += (_group_value(totals[r], first, dots, activations, rows[r][2], FORMAT),)
    return out


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """acc + the products of a group's activations x with the integers of eight E."""
    for i in tl.static_range(2):
        word = words[i]
        if not has_bytes(FORMAT):
            word = (word >> shift_of(E, i, FORMAT)) & (((1 << bits_of(FORMAT)) - 1) * ONES)
        acc = dp2a(x[4 * E + 2 * i], x[4 * E + 2 * i + 1], word, acc, PTX)
    return acc


@triton.jit
def _group_value(total, first, dots, activations, raw, FORMAT: tl.constexpr):
    """total[m] plus the group's product, from the dots of its integers or of its halves'."""
    x, steps, lows, highs = activations
    d = block_scales(raw, FORMAT)
    factors = sub_scales(raw, FORMAT)
    CODE: tl.constexpr = FORMAT.scale_code
    out = ()
    for m in tl.static_range(len(x)):
        if CODE == "byte" or CODE == "e4m3":  # beyond int32, or no integer
            dot = factors[1].to(tl.float32) * dots[m].to(tl.float32)
            dot = tl.fma(factors[0].to(tl.float32), first[m].to(tl.float32), dot)
        elif CODE == "byte32":
            dot = factors[0].to(tl.float32) * dots[m].to(tl.float32)
        elif CODE == "pair":
            dot = (factors[0] * dots[m]).to(tl.float32)
        else:
            dot = dots[m].to(tl.float32)
        if CODE == "power":
            # By the powers first: their product is exact, and nothing between is beyond float32.
            out += (tl.fma(steps[m] * d[0], dot, total[m]),)
        else:
            value = d[0] * dot
            if CODE == "pair":
                low = factors[1] * (lows[m] + highs[m])
                value = tl.fma(-d[1], low.to(tl.float32), value)
            elif FORMAT.has_minimum:
                value = tl.fma(d[1], (lows[m] + highs[m]).to(tl.float32), value)
            out += (tl.fma(steps[m], value, total[m]),)
    return out
