"""Eight tokens by a thread's two rows of W on tensor cores, fed without shared memory.

The instruction ``mma.m16n8k16`` sums over the four threads of a quad. A quad takes a block of 256
weights, so that d can wait for the sum, and each of its threads 64 that follow each other, of two
rows: eight apart, as the instruction wants them, or a row of gate and the same row of up. Weights
become pairs of float16 in registers (:mod:`ferrum_triton.kernels.quant.quad_weights`), and
activations come in their order (:func:`ferrum_triton.kernels.quant.activations.arrange`), so that
threads exchange nothing.

Scales times codes are exact in a float16 but for Q6_K's large ones, and d is taken in float32 after
the sum; formats without integer scales are rounded to float16 once, like dequantised ones.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.planes import fp16_pair, load_words
from ferrum_triton.kernels.quant.quad_weights import (
    is_late,
    late_scales,
    load_rows,
    minimum,
    sums_minimums,
    weights,
)

# Words of a token's arranged activations that lie together.
WORDS = tl.constexpr(16)

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_MMA_CONSTRAINTS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


@triton.jit
def _mma(acc, a, b, PTX: tl.constexpr):
    """acc + a · b for each warp: a [16, 16] · b [16, 8], as their threads hold them.

    Args:
        acc: sums of a thread's two rows, two tokens each, float32 [threads].
        a: weights, pairs of float16 in int32 [threads]: each row's first pair, then each's second.
        b: activations of the thread's token, two pairs.
    """
    if PTX:
        acc = tl.inline_asm_elementwise(
            _MMA,
            _MMA_CONSTRAINTS,
            (a[0], a[1], a[2], a[3], b[0], b[1], acc[0], acc[1], acc[2], acc[3]),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        first = _sums_of_quads(a[0], b[0]) + _sums_of_quads(a[2], b[1])
        second = _sums_of_quads(a[1], b[0]) + _sums_of_quads(a[3], b[1])
        even, odd = tl.split(tl.reshape(first, [a[0].shape[0], 2]))
        low, high = tl.split(tl.reshape(second, [a[0].shape[0], 2]))
        acc = (acc[0] + even, acc[1] + odd, acc[2] + low, acc[3] + high)
    return acc


@triton.jit
def _sums_of_quads(a, b):
    """Sums over quads of pairs of weights times pairs of activations: [warps, 8 rows, 8 tokens]."""
    WARPS: tl.constexpr = a.shape[0] // 32
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    low, high = fp16_pair(a)
    b_low, b_high = fp16_pair(b)
    for row, token in ((low, b_low), (high, b_high)):
        product = tl.reshape(row, [WARPS, 8, 1, 4]) * tl.reshape(token, [WARPS, 1, 8, 4])
        total += tl.sum(product, axis=3)
    return total


@triton.jit
def quarter_of(x_ptr, block, J: tl.constexpr, APART: tl.constexpr, PTX: tl.constexpr):
    """A thread's activations of a quarter of a block: the eight pairs that ``weights`` J multiply.

    Args:
        APART: words from a token's 16 to its next ones.
    """
    at = x_ptr + (block * 8 + 2 * J) * APART
    return load_words(at, None, 4, PTX, "") + load_words(at + APART, None, 4, PTX, "")


@triton.jit
def activations_of(x_ptr, block, APART: tl.constexpr, PTX: tl.constexpr):
    """A thread's activations of a block: four of :func:`quarter_of`."""
    x = ()
    for j in tl.static_range(4):
        x += (quarter_of(x_ptr, block, j, APART, PTX),)
    return x


@triton.jit
def _scaled(acc, total, low, row, LAYOUT: tl.constexpr):
    """One row's sums of two tokens: acc + d · total - m · low, where d is taken late."""
    if is_late(LAYOUT.format):
        d, m = late_scales(row, LAYOUT)
        total = (tl.fma(d, total[0], acc[0]), tl.fma(d, total[1], acc[1]))
        if sums_minimums(LAYOUT.format):
            total = (tl.fma(-m, low[0], total[0]), tl.fma(-m, low[1], total[1]))
    return total


@triton.jit
def block_begun(accs, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """What a block's products are added to: each group's acc, or 0 of rows whose d is late."""
    begun = ()
    for group in tl.static_range(len(accs)):
        acc = accs[group]
        none = tl.zeros_like(acc[0])
        start = (none, none) if is_late(FIRST.format) else (acc[0], acc[1])
        begun += (start + ((none, none) if is_late(SECOND.format) else (acc[2], acc[3])),)
    return begun


@triton.jit
def add_quarter(totals, rows, x, J: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """totals plus a quarter of a block of a thread's two rows, of two layouts.

    Each group's products follow the unpacking, so that its registers are free for the next quarter.

    Args:
        totals: a block's sums so far, of each group of eight tokens.
        x: :func:`quarter_of` each group's token.
    """
    a = weights(rows[0], J, FIRST)
    b = weights(rows[1], J, SECOND)
    added = ()
    for group in tl.static_range(len(x)):
        total = totals[group]
        for p in tl.static_range(4):
            pairs = (a[2 * p], b[2 * p], a[2 * p + 1], b[2 * p + 1])
            total = _mma(total, pairs, (x[group][2 * p], x[group][2 * p + 1]), FIRST.asm != "")
        added += (total,)
    return added


@triton.jit
def block_ended(acc, total, rows, sums, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """A group's acc plus a block, of which total has the products; sums as words have them."""
    none = tl.zeros_like(acc[0])
    low = (none, none, none, none)
    if sums_minimums(FIRST.format) or sums_minimums(SECOND.format):
        for j in tl.static_range(2):
            pairs = (
                minimum(rows[0], 2 * j, FIRST),
                minimum(rows[1], 2 * j, SECOND),
                minimum(rows[0], 2 * j + 1, FIRST),
                minimum(rows[1], 2 * j + 1, SECOND),
            )
            low = _mma(low, pairs, (sums[2 * j], sums[2 * j + 1]), FIRST.asm != "")
    of_first = _scaled((acc[0], acc[1]), (total[0], total[1]), (low[0], low[1]), rows[0], FIRST)
    of_second = _scaled((acc[2], acc[3]), (total[2], total[3]), (low[2], low[3]), rows[1], SECOND)
    return of_first + of_second


@triton.jit
def add_block(acc, rows, x, sums, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """One group's acc plus a block of a thread's two rows, by :func:`activations_of`."""
    totals = block_begun((acc,), FIRST, SECOND)
    for j in tl.static_range(4):
        totals = add_quarter(totals, rows, (x[j],), j, FIRST, SECOND)
    return block_ended(acc, totals[0], rows, sums, FIRST, SECOND)


@triton.jit
def two_rows(first, second, row, thread, block, mask, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Two rows of a thread: of one matrix, eight apart; or the same one of two matrices."""
    if SECOND is None:
        rows = load_rows(first, row, thread, block, mask, FIRST, 2)
    else:
        rows = load_rows(first, row, thread, block, mask, FIRST, 1)
        rows += load_rows(second, row, thread, block, mask, SECOND, 1)
    return rows
