"""A group of 32 weights of some rows times float32 activations, exactly.

Weights never become floats by an instruction of their own. Bits 0 to 23 of a float32 whose others
are 0 mean that many 2^-149: masked where they lie, an integer q with s bits below it is the float
q 2^(s - 149), and times an activation that was multiplied by 2^(UNIT - s) once for all rows the
product is a q 2^(UNIT - 149). The sum is rounded as ever, since a fused multiply-add takes denormal
factors as they are. So a weight costs a mask and a multiply-add. Offsets and minimums count by the
group's sum of activations.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.loads import load_one, load_words
from ferrum_triton.kernels.quant.planes import (
    GROUP,
    bits_of,
    block_scales,
    described,
    eight_words,
    fp16_pair,
    has_halves,
    has_minimum,
    offset_of,
    place_of,
    sub_scales,
)

# Sums are of a q 2^-63. Activations up to 2^41 stay finite, and what a product loses below
# float32's smallest number is less than 2^-86.
UNIT = 86
SMALL, LARGE = tl.constexpr(2.0**-63), tl.constexpr(2.0**63)


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
def eight_activations(ptr, mask, VECTOR: tl.constexpr):
    """Eight activations in a row as a tuple of float32 [threads]."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if VECTOR and dtype == tl.float32:
        ints = ptr.to(tl.pointer_type(tl.int32))
        words = load_words(ints, mask, 4, True, "") + load_words(ints + 4, mask, 4, True, "")
        x = ()
        for i in tl.static_range(8):
            x += (words[i].to(tl.float32, bitcast=True),)
    elif VECTOR:
        words = load_words(ptr.to(tl.pointer_type(tl.int32)), mask, 4, True, "")
        x = ()
        for i in tl.static_range(4):
            x += float_pair(words[i], dtype)
    else:
        x = ()
        for i in tl.static_range(8):
            x += (load_one(ptr + i, mask).to(tl.float32),)
    return x


@triton.constexpr_function
def power_of(e, i, kind):
    return 2.0 ** (UNIT - place_of(e, i, kind))


@triton.jit
def _scaled_eight(x, E: tl.constexpr, KIND: tl.constexpr):
    """Each times the power of two that its weight's place in the word asks for."""
    y = ()
    for i in tl.static_range(8):
        y += (x[i] * power_of(E, i, KIND),)
    return y


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, KIND: tl.constexpr):
    """acc + sum of x times the integers of eight E."""
    for i in tl.static_range(8):
        word = words[i // 4]
        if i % 4 == 3:
            word = word >> 8  # out of the exponent's bits
        integer = word & (((1 << bits_of(KIND)) - 1) << place_of(E, i, KIND))
        acc = tl.fma(integer.to(tl.float32, bitcast=True), x[i], acc)
    return acc


@triton.jit
def _sum_eight(x):
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@triton.jit
def _group_value(total, dots, sums, raw, M: tl.constexpr, KIND: tl.constexpr):
    """total[m] plus the group's product, from the dots of its integers.

    Args:
        dots: of all the group, [m], or of its two halves, [2 m].
        sums: of the activations, likewise.
    """
    scales = block_scales(raw, KIND)
    factors = sub_scales(raw, KIND)
    CODE: tl.constexpr = described(KIND).scale_code
    new = ()
    for m in tl.static_range(M):
        if CODE == "" and has_minimum(KIND):
            value = tl.fma(scales[1], sums[m], tl.fma(scales[0], dots[m], total[m]))
        elif CODE == "" or CODE == "power":
            # sums hold the offset as a factor.
            value = tl.fma(scales[0], dots[m] - sums[m], total[m])
        elif CODE == "byte32":
            scale = scales[0] * factors[0].to(tl.float32)
            value = tl.fma(scale, dots[m] - sums[m], total[m])
        elif CODE == "pair":
            scale = scales[0] * factors[0].to(tl.float32)
            low = scales[1] * factors[1].to(tl.float32)
            value = tl.fma(scale, dots[m], tl.fma(-low, sums[m], total[m]))
        elif CODE == "nibbles":
            both = factors[0].to(tl.float32) * dots[m]
            both = tl.fma(factors[1].to(tl.float32), dots[M + m], both)
            low = factors[2].to(tl.float32) * sums[m]
            low = tl.fma(factors[3].to(tl.float32), sums[M + m], low)
            value = tl.fma(scales[0], both, tl.fma(-scales[1], low, total[m]))
        else:
            both = factors[0].to(tl.float32) * (dots[m] - sums[m])
            both = tl.fma(factors[1].to(tl.float32), dots[M + m] - sums[M + m], both)
            value = tl.fma(scales[0], both, total[m])
        new += (value,)
    return new


@triton.jit
def add_group(
    totals, none, rows, a_ptr, stride_a_token, group, mask,
    KIND: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """totals[r][m] plus the products of each row's group; ``none`` is a 0 to start sums at."""
    HALVES: tl.constexpr = has_halves(KIND)
    OFFSET: tl.constexpr = offset_of(KIND)
    zero = none.to(tl.float32, bitcast=True)
    sums = ()  # of the halves, or of the group
    kept = ()  # [r]: dots of the first half, [m]
    dots = ()  # [r][m]
    for e in tl.static_range(4):
        scaled = ()
        eights = ()
        for m in tl.static_range(M):
            at = a_ptr + m * stride_a_token + group * GROUP + 8 * e
            x = eight_activations(at, mask, VECTOR)
            scaled += (_scaled_eight(x, e, KIND),)
            eights += (_sum_eight(x) * (OFFSET * SMALL),)
        if e == 0:
            sums = eights
        elif HALVES and e == 2:
            sums += eights
        else:
            more = ()
            for i in tl.static_range(len(sums)):
                if HALVES and e == 3 and i < M:
                    more += (sums[i],)
                else:
                    more += (sums[i] + eights[i % M],)
            sums = more
        if HALVES and e == 2:
            kept = dots
        new = ()
        for r in tl.static_range(ROWS):
            words = eight_words(rows[r][0], rows[r][1], e, KIND, False, ASM)
            each = ()
            for m in tl.static_range(M):
                if e == 0 or (HALVES and e == 2):
                    each += (_dot_eight(zero, scaled[m], words, e, KIND),)
                else:
                    each += (_dot_eight(dots[r][m], scaled[m], words, e, KIND),)
            new += (each,)
        dots = new
    out = ()
    for r in tl.static_range(ROWS):
        if HALVES:
            out += (_group_value(totals[r], kept[r] + dots[r], sums, rows[r][2], M, KIND),)
        else:
            out += (_group_value(totals[r], dots[r], sums, rows[r][2], M, KIND),)
    return out
