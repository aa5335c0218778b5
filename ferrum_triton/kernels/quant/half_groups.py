"""Groups of Q2_K and Q3_K, of two low bits and a scale for each half, times integers.

Codes are taken where they lie in the nibbles of two words, the upper ones as 16 times as large:
bytes with a sign still. A shift of their sum then does for shifts of words. Scales and minimums are
bytes of words too.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.planes import bits_of, block_scales, merged
from ferrum_triton.kernels.quant.thread_products import ONES, dp2a, packed, permuted


@triton.jit
def _q3_nibbles(q, h, HALF: tl.constexpr, PTX: tl.constexpr):
    """The 16 codes of half a group as nibbles: fours 0 and 2 in a word, 1 and 3 in another.

    Bit p of a byte of h belongs above the code of four p, which is four bits from that of four
    p + 2: a multiplication brings both there at once, and what else it leaves is masked off.
    """
    if HALF == 1:
        h = h >> 4
    even = merged(q, (h & (5 * ONES)) * 20, 0x33333333, 0, PTX)
    odd = merged(q >> 2, (h & (10 * ONES)) * 10, 0x33333333, 0, PTX)
    return even, odd


@triton.jit
def _scales(raw, FORMAT: tl.constexpr):
    """Scales of halves of groups as bytes of a word, packed ones with their offset still."""
    if FORMAT.scale_code == "nibbles":
        word = raw[1] & 0x0F0F0F0F
    else:
        low = (raw[1] & 0xFF) | ((raw[1] & 0xFF00) << 8)
        low = (low | (low << 4)) & 0x0F0F0F0F
        # Two bits of each: copies of the byte where none reaches into what is kept of another.
        high = (raw[2] * 0x1001) & 0x000F000F
        word = low | ((high * 0x410) & 0x30303030)
    return word


@triton.jit
def _half_dots(sums, none, x, q, h, HALF: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """[token]: the products of half a group's codes, less their offset, with activations.

    Args:
        sums: of those activations, [token].
        x: words of the group's activations, [token].
        q, h: words of half the codes' low bits, and of all the codes' high bits or None.
    """
    MASK: tl.constexpr = ((1 << bits_of(FORMAT)) - 1) * ONES
    starts = ()
    for m in tl.static_range(len(x)):
        starts += (sums[m] * -FORMAT.offset + none,)
    words = (q, q >> 2) if h is None else _q3_nibbles(q, h, HALF, PTX)
    dots = ()
    for m in tl.static_range(len(x)):
        low, high = starts[m], none
        for i in tl.static_range(2):
            first, second = x[m][8 * HALF + 2 * i], x[m][8 * HALF + 2 * i + 1]
            low = dp2a(first, second, words[i] & MASK, low, PTX)
            first, second = x[m][8 * HALF + 2 * i + 4], x[m][8 * HALF + 2 * i + 5]
            high = dp2a(first, second, words[i] & (MASK << 4), high, PTX)
        dots += (low + (high >> 4),)
    return dots


@triton.jit
def _add_scaled_dots(
    kept, none, rows, activations, AT: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr
):
    """kept[row][token] plus the products of group AT's codes times its scales, int32."""
    x = activations[0]
    out = ()
    for r in tl.static_range(len(rows)):
        q, h, raw = rows[r]
        scales = _scales(raw, FORMAT)
        each = kept[r]
        for half in tl.static_range(2):
            more = h[AT] if FORMAT.high_bits > 0 else None
            sums = activations[2 + half]
            dots = _half_dots(sums, none, x, q[2 * AT + half], more, half, FORMAT, PTX)
            scale = permuted(scales, tl.zeros_like(scales), 0x4440 + 2 * AT + half, PTX)
            if FORMAT.scale_code == "packed":
                scale -= 32
            new = ()
            for m in tl.static_range(len(x)):
                new += (each[m] + scale * dots[m],)
            each = new
        out += (each,)
    return out


@triton.constexpr_function
def _two_asm(upper):
    return f"dp2a.{'hi' if upper else 'lo'}.s32.u32 $0, $1, $2, $3;"


@triton.jit
def _dot_two(pair, b, acc, UPPER: tl.constexpr, PTX: tl.constexpr):
    """acc + the products of the two int16 of ``pair`` and the lower or upper two uint8 of b."""
    if PTX:
        acc = tl.inline_asm_elementwise(
            _two_asm(UPPER), "=r,r,r,r", [pair, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b = b >> (16 * UPPER)
        acc += ((pair << 16) >> 16) * (b & 0xFF) + (pair >> 16) * ((b >> 8) & 0xFF)
    return acc


@triton.jit
def _dot_bytes(a, b, PTX: tl.constexpr):
    """The products of the four uint8 of a and of b."""
    if PTX:
        acc = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        acc = tl.zeros_like(a)
        for i in tl.static_range(4):
            acc += ((a >> (8 * i)) & 0xFF) * ((b >> (8 * i)) & 0xFF)
    return acc


@triton.jit
def _minimums(raw, groups, AT: tl.constexpr, m: tl.constexpr, PTX: tl.constexpr):
    """Minimums of halves of groups from AT on times sums of token m's activations, int32.

    A sum has 20 bits: 16 of them are multiplied as int16, two to a word, and the lower four of up
    to four sums as the bytes of one more word.
    """
    # They are taken where they lie, 16 times as large.
    mins = (raw[1] >> (16 * AT)) & (-0x0F0F0F10)
    words, ends = (), ()
    for i in tl.static_range(len(groups)):
        _x, _steps, lows, highs = groups[i]
        ends += (packed(lows[m], highs[m], PTX),)
        words += (packed(lows[m] >> 4, highs[m] >> 4, PTX),)
    more = ends[1] if len(groups) == 2 else tl.zeros_like(ends[0])
    rest = permuted(ends[0], more, 0x6420, PTX) & (15 * ONES)
    low = tl.zeros_like(mins)
    for i in tl.static_range(len(words)):
        low = _dot_two(words[i], mins, low, i == 1, PTX)
    return low + (_dot_bytes(rest, mins, PTX) >> 4)


@triton.jit
def add_halves(
    totals, none, rows, groups, SAME: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr
):
    """totals[row][token] plus the products of what a thread took of each row.

    Args:
        none: a 0 to start sums at.
        groups: of activations, as many as were taken of a row.
        SAME: they have the same step.
    """
    COUNT: tl.constexpr = len(groups) if SAME else 1
    for i in tl.static_range(0, len(groups), COUNT):
        some = groups if SAME else (groups[i],)
        steps = groups[i][1]
        kept = ()
        for _r in tl.static_range(len(rows)):
            each = ()
            for _m in tl.static_range(len(steps)):
                each += (tl.zeros_like(none),)
            kept += (each,)
        for j in tl.static_range(i, i + COUNT):
            kept = _add_scaled_dots(kept, none, rows, groups[j], j, FORMAT, PTX)
        out = ()
        for r in tl.static_range(len(rows)):
            raw = rows[r][2]
            d = block_scales(raw, FORMAT)
            each = ()
            for m in tl.static_range(len(steps)):
                value = d[0] * kept[r][m].to(tl.float32)
                if FORMAT.has_minimum:
                    low = _minimums(raw, some, i, m, PTX)
                    value = tl.fma(-d[1], low.to(tl.float32), value)
                each += (tl.fma(steps[m], value, totals[r][m]),)
            out += (each,)
        totals = out
    return totals
