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

from ferrum_triton.kernels.quant.planes import (
    bits_of,
    block_scales,
    eight_words,
    load_one,
    load_words,
    offset_of,
    shift_of,
    sub_scales,
)
from ferrum_triton.kernels.quant.thread_products import GROUP

# Sums are of a q 2^-63. Activations up to 2^41 stay finite, and what a product loses below
# float32's smallest number is less than 2^-86.
UNIT = 86
SMALL, LARGE = tl.constexpr(2.0**-63), tl.constexpr(2.0**63)


@triton.jit
def _eight_activations(ptr, mask, WIDE: tl.constexpr):
    """Eight activations in a row as a tuple of float32 [threads]."""
    x = ()
    if WIDE:
        ints = ptr.to(tl.pointer_type(tl.int32))
        words = load_words(ints, mask, 4, True, "") + load_words(ints + 4, mask, 4, True, "")
        for i in tl.static_range(8):
            x += (words[i].to(tl.float32, bitcast=True),)
    else:
        for i in tl.static_range(8):
            x += (load_one(ptr + i, mask),)
    return x


@triton.constexpr_function
def _place_of(e, i, fmt):
    """Bits below integer ``i`` of eight ``e`` once those of byte 3 are moved down to byte 2."""
    return 8 * min(i % 4, 2) + shift_of(e, i // 4, fmt)


@triton.constexpr_function
def _power_of(e, i, fmt):
    return 2.0 ** (UNIT - _place_of(e, i, fmt))


@triton.jit
def _scaled_eight(x, E: tl.constexpr, FORMAT: tl.constexpr):
    """Each times the power of two that its weight's place in the word asks for."""
    y = ()
    for i in tl.static_range(8):
        y += (x[i] * _power_of(E, i, FORMAT),)
    return y


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, FORMAT: tl.constexpr):
    """acc + sum of x times the integers of eight E."""
    for i in tl.static_range(8):
        word = words[i // 4]
        if i % 4 == 3:
            word = word >> 8  # out of the exponent's bits
        integer = word & (((1 << bits_of(FORMAT)) - 1) << _place_of(E, i, FORMAT))
        acc = tl.fma(integer.to(tl.float32, bitcast=True), x[i], acc)
    return acc


@triton.jit
def _sum_eight(x):
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@triton.jit
def _group_value(total, dots, sums, raw, M: tl.constexpr, FORMAT: tl.constexpr):
    """total[m] plus the group's product, from the dots of its integers.

    Args:
        dots: of all the group, [m], or of its two halves, [2 m].
        sums: of the activations, likewise.
    """
    scales = block_scales(raw, FORMAT)
    factors = sub_scales(raw, FORMAT)
    CODE: tl.constexpr = FORMAT.scale_code
    new = ()
    for m in tl.static_range(M):
        if CODE == "" and FORMAT.has_minimum:
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
def group_of(row, AT: tl.constexpr, FORMAT: tl.constexpr, SPAN: tl.constexpr):
    """Group AT of SPAN that were loaded of a row."""
    q, h, raw = row
    CODE: tl.constexpr = FORMAT.scale_code
    if CODE == "nibbles" and SPAN == 2:
        q, raw = (q[2 * AT], q[2 * AT + 1]), (raw[0], (raw[1] >> (16 * AT)) & 0xFFFF)
    elif CODE == "packed":
        raw = (raw[0], (raw[1] >> (8 * AT)) & 0xFF, raw[2] >> (4 * AT))
        q, h = (q[2 * AT], q[2 * AT + 1]), (h[AT],)
    return q, h, raw


@triton.jit
def add_group(
    totals, none, rows, a, group, mask, FORMAT: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr
):
    """totals[row][token] plus the products of each row's group; ``none`` is a 0 to start sums at.

    Args:
        a: Activations, float32.
        group: which of a row, [threads].
        WIDE: rows start at multiples of 16 bytes, and there is PTX.
    """
    ROWS: tl.constexpr = len(totals)
    M: tl.constexpr = len(totals[0])
    HALVES: tl.constexpr = FORMAT.has_halves
    OFFSET: tl.constexpr = offset_of(FORMAT)
    zero = none.to(tl.float32, bitcast=True)
    sums = ()  # of the halves, or of the group
    kept = ()  # [r]: dots of the first half, [m]
    dots = ()  # [r][m]
    for e in tl.static_range(4):
        scaled = ()
        eights = ()
        for m in tl.static_range(M):
            at = a.ptr + m * a.stride + group * GROUP + 8 * e
            x = _eight_activations(at, mask, WIDE)
            scaled += (_scaled_eight(x, e, FORMAT),)
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
            words = eight_words(rows[r][0], rows[r][1], e, FORMAT, False, PTX)
            each = ()
            for m in tl.static_range(M):
                if e == 0 or (HALVES and e == 2):
                    each += (_dot_eight(zero, scaled[m], words, e, FORMAT),)
                else:
                    each += (_dot_eight(dots[r][m], scaled[m], words, e, FORMAT),)
            new += (each,)
        dots = new
    out = ()
    for r in tl.static_range(ROWS):
        if HALVES:
            out += (_group_value(totals[r], kept[r] + dots[r], sums, rows[r][2], M, FORMAT),)
        else:
            out += (_group_value(totals[r], dots[r], sums, rows[r][2], M, FORMAT),)
    return out


@triton.jit
def whole_sums(totals):
    """The sums of products, of what :func:`add_group` keeps of them."""
    out = ()
    for r in tl.static_range(len(totals)):
        each = ()
        for m in tl.static_range(len(totals[r])):
            each += (totals[r][m] * LARGE,)
        out += (each,)
    return out
