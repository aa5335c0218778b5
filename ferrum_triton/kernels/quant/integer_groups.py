"""Groups of 32 weights of some rows times activations as integers, of 8 bits or of 16.

Four weights are the bytes of a word. Their products with four int8 activations are one ``dp4a``,
with four of 16 bits two ``dp2a``; offsets start the integers' sum. The activations are those of
:mod:`ferrum_triton.kernels.quant.integer_activations`.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.planes import (
    bits_of,
    block_scales,
    described,
    eight_words,
    half_scales,
    has_bytes,
    has_halves,
    has_minimum,
    merged,
    shift_of,
    sub_scales,
)
from ferrum_triton.kernels.quant.words import (
    ONES,
    byte_of,
    dot_bytes,
    dot_two,
    dp2a,
    dp4a,
    low_bytes,
    packed,
)


@triton.jit
def _dot_four(acc, x, word, AT: tl.constexpr, ASM: tl.constexpr):
    """acc + the products of a group's activations x from 4 AT on with the bytes of a word."""
    if len(x) == 8:
        acc = dp4a(word, x[AT], acc, ASM)
    else:
        acc = dp2a(x[2 * AT], x[2 * AT + 1], word, acc, ASM)
    return acc


@triton.jit
def _dot_eight(acc, x, words, E: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """acc + the products of a group's activations x with the integers of eight E."""
    for i in tl.static_range(2):
        word = words[i]
        if not has_bytes(KIND):
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
    starts, none, x, q, h, HALF: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """starts[m] plus the products of half a group, from its words of q and h.

    Codes are taken where they lie in the nibbles of two words, the upper ones as 16 times as large:
    bytes with a sign still. A shift of their sum then does for shifts of words.
    """
    MASK: tl.constexpr = ((1 << bits_of(KIND)) - 1) * ONES
    words = (q, q >> 2) if h is None else _q3_nibbles(q, h, HALF, ASM)
    dots = ()
    for m in tl.static_range(M):
        low, high = starts[m], none
        for i in tl.static_range(2):
            low = _dot_four(low, x[m], words[i] & MASK, 4 * HALF + i, ASM)
            high = _dot_four(high, x[m], words[i] & (MASK << 4), 4 * HALF + 2 + i, ASM)
        dots += (low + (high >> 4),)
    return dots


@triton.jit
def _group_value(total, first, dots, activations, raw, M: tl.constexpr, KIND: tl.constexpr):
    """total[m] plus the group's product, from the dots of its integers or of its halves'."""
    x, steps, lows, highs = activations
    d = block_scales(raw, KIND)
    factors = sub_scales(raw, KIND)
    CODE: tl.constexpr = described(KIND).scale_code
    out = ()
    for m in tl.static_range(M):
        if CODE == "byte" and len(x[m]) == 16:  # beyond int32
            dot = factors[1].to(tl.float32) * dots[m].to(tl.float32)
            dot = tl.fma(factors[0].to(tl.float32), first[m].to(tl.float32), dot)
        elif CODE == "byte":
            dot = (factors[0] * first[m] + factors[1] * dots[m]).to(tl.float32)
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
            elif has_minimum(KIND):
                value = tl.fma(d[1], (lows[m] + highs[m]).to(tl.float32), value)
            out += (tl.fma(steps[m], value, total[m]),)
    return out


@triton.jit
def _add_groups(
    totals, none, rows, activations, KIND: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """:func:`add_integers` of the other formats."""
    x, _, lows, highs = activations
    HALVES: tl.constexpr = has_halves(KIND)
    OFFSET: tl.constexpr = described(KIND).offset
    out = ()
    for r in tl.static_range(ROWS):
        first, dots = (), ()
        for m in tl.static_range(M):
            start = lows[m]
            if not HALVES:
                start = lows[m] + highs[m]
            dots += (start * -OFFSET + none,)
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
        out += (_group_value(totals[r], first, dots, activations, rows[r][2], M, KIND),)
    return out


@triton.jit
def _sums_of_halves(groups, m: tl.constexpr, ASM: tl.constexpr):
    """Sums of token m's activations of each group's halves, for products with bytes.

    Returns:
        Words of two int16, a group each, and the rest: a sum of 16-bit activations has 20 bits, the
        lower four of which are bytes of one more word. Sums of int8 have no rest.
    """
    words, ends = (), ()
    for i in tl.static_range(len(groups)):
        x, _, lows, highs = groups[i]
        low, high = lows[m], highs[m]
        ends += (packed(low, high, ASM),)
        if len(x[m]) == 16:
            low, high = low >> 4, high >> 4
        words += (packed(low, high, ASM),)
    if len(groups) == 2:
        rest = low_bytes(ends[0], ends[1], ASM)
    else:
        rest = low_bytes(ends[0], tl.zeros_like(ends[0]), ASM)
    return words, rest & (15 * ONES)


@triton.jit
def _minimums(raw, groups, AT: tl.constexpr, m: tl.constexpr, ASM: tl.constexpr):
    """Minimums of halves of groups from AT on times sums of token m's activations, int32."""
    # They are taken where they lie, 16 times as large.
    mins = (raw[1] >> (16 * AT)) & (-0x0F0F0F10)
    words, rest = _sums_of_halves(groups, m, ASM)
    low = tl.zeros_like(mins)
    for i in tl.static_range(len(words)):
        low = dot_two(words[i], mins, low, i == 1, ASM)
    if len(groups[0][0][m]) == 8:
        low = low >> 4
    else:
        low += dot_bytes(rest, mins, ASM) >> 4
    return low


@triton.jit
def _add_scaled_dots(
    kept, none, rows, activations, AT: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """kept[r][m] plus the products of group AT of codes of two low bits times its scales, int32."""
    OFFSET: tl.constexpr = described(KIND).offset
    HIGH: tl.constexpr = described(KIND).high_bits
    PACKED: tl.constexpr = described(KIND).scale_code == "packed"
    x = activations[0]
    out = ()
    for r in tl.static_range(len(rows)):
        q, h, raw = rows[r]
        scales = half_scales(raw, KIND)
        each = kept[r]
        for half in tl.static_range(2):
            starts = ()
            for m in tl.static_range(M):
                starts += (activations[2 + half][m] * -OFFSET + none,)
            more = h[AT] if HIGH else None
            dots = _half_dots(starts, none, x, q[2 * AT + half], more, half, KIND, M, ASM)
            scale = byte_of(scales, 2 * AT + half, ASM)
            if PACKED:
                scale -= 32
            new = ()
            for m in tl.static_range(M):
                new += (each[m] + scale * dots[m],)
            each = new
        out += (each,)
    return out


@triton.jit
def _add_halves(
    totals, none, rows, groups, KIND: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
    SAME: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """:func:`add_integers` of formats of two low bits, taken where they lie in nibbles."""
    COUNT: tl.constexpr = len(groups) if SAME else 1
    for i in tl.static_range(0, len(groups), COUNT):
        some = groups if SAME else (groups[i],)
        kept = ()
        for _r in tl.static_range(ROWS):
            each = ()
            for _m in tl.static_range(M):
                each += (tl.zeros_like(none),)
            kept += (each,)
        for j in tl.static_range(i, i + COUNT):
            kept = _add_scaled_dots(kept, none, rows, groups[j], j, KIND, M, ASM)
        steps = groups[i][1]
        out = ()
        for r in tl.static_range(ROWS):
            raw = rows[r][2]
            d = block_scales(raw, KIND)
            each = ()
            for m in tl.static_range(M):
                value = d[0] * kept[r][m].to(tl.float32)
                if has_minimum(KIND):
                    low = _minimums(raw, some, i, m, ASM)
                    value = tl.fma(-d[1], low.to(tl.float32), value)
                each += (tl.fma(steps[m], value, totals[r][m]),)
            out += (each,)
        totals = out
    return totals


@triton.jit
def add_integers(
    totals, none, rows, groups, KIND: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
    SAME: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """totals[r][m] plus the products of what a thread took of each row.

    Args:
        none: a 0 to start sums at.
        groups: of activations, of ``integers_of``, as many as were taken of a row.
        SAME: they have the same step.
    """
    if has_halves(KIND) and described(KIND).low_bits == 2:
        totals = _add_halves(totals, none, rows, groups, KIND, ROWS, M, SAME, ASM)
    else:
        totals = _add_groups(totals, none, rows, groups[0], KIND, ROWS, M, ASM)
    return totals
