"""Steps of a product of weights in planes on tensor cores: what they read, unpacked and summed."""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.fragments import (
    all_end_to_end,
    end_to_end,
    largest_power,
    relative_power,
    second_bytes,
    spread,
    times,
    unpack,
)
from ferrum_triton.kernels.quant.mma_operands import (
    block_scales,
    load_early_scales,
    load_weights,
)
from ferrum_triton.kernels.tensor_cores import settled


@triton.jit
def _every_other_pair(words, BITS: tl.constexpr):
    """Words whose high bits are in the low halves of a one-bit plane's bytes; the high halves'."""
    if BITS == 5:
        pairs = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2])
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        even = tl.reshape(even, [words.shape[0], words.shape[1] // 2])
        odd = tl.reshape(odd, [words.shape[0], words.shape[1] // 2])
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def _weights(
    words, more, scale, low, d, d_min, W: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, MINS: tl.constexpr, LATE: tl.constexpr, ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Eight products' weights, float16 [BLOCK_N, W]; up to d if that is taken late."""
    t = unpack(words, more, scale, BITS, OFFSET, SCALED, ASM, CONSTRAINTS)
    if not LATE:
        mins = 0.0
        if MINS:
            d_min = spread(d_min, W)
            if SCALED:
                mins = second_bytes(low, W, ASM)
        t = times(t, mins, spread(d, W), d_min, SCALED, MINS, ASM != "")
    return t


@triton.jit
def add_step(
    acc, d, d_min, at, q_row, h_row, s_row, t_row, d_row, skipped, step, next_skipped, next_step,
    num_words, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
    LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """acc, float32 [BLOCK_N, BLOCK_M], and BLOCK_W words' products; d and d_min of the next step.

    Args:
        d, d_min: of ``block_scales`` for this step.
        at: of ``operands``.
        skipped: rows of W between those of ``at`` and those that are meant, int64.
        step: of the row.
        next_skipped, next_step: likewise of the step after this one.
        num_words: of a row.
    """
    SCALED: tl.constexpr = SCALES != ""
    DESCRIBED: tl.constexpr = len(at) > 7
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    left = num_words - step * BLOCK_W
    words, more, scale, upper, d_tile, x, second, sums = load_weights(
        at, q_row, h_row, s_row, t_row, skipped, step, left, BITS, SCALES, MINS, BLOCK_W, PARTS,
        LATE, WHOLE,
    )  # fmt: skip
    low = scale
    if SCALES == "power":
        # Loaded again: with d, which the loop carries, weights would go through shared memory.
        largest = tl.load(at[4][:, None] + (skipped * d_row * 16 + step * BLOCK_W // 32))
        scale = relative_power(scale, largest.to(tl.int32))
    if SCALES == "nibbles":
        scale, low = scale & 15, scale << 4  # a min as the low bits of the second byte
    # Here, not before: the loop's copies are asked for first.
    d_next, m_next = block_scales(at, d_row, next_skipped, next_step, BLOCK_W, MINS, LATE)
    if not LATE:
        d, d_min = load_early_scales(
            at, d_tile, d_row, skipped, step, left, SCALES, MINS, BLOCK_W, WHOLE
        )

    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if LATE else acc
    if not DESCRIBED:
        x_rows = at[5] + step * (8 * BLOCK_W)
        x = tl.load(x_rows)
    if BITS == 5 or BITS == 3:
        even, odd = _every_other_pair(words, BITS)
        if BITS == 3:
            even_scale = scale & 15 | upper << 4 & 48
            odd_scale = scale >> 4 | upper << 2 & 48
        else:
            even_scale, odd_scale = scale, scale
        t = _weights(
            even, spread(more, BLOCK_W // 2), even_scale, low, d, d_min, BLOCK_W // 2, BITS, OFFSET,
            SCALED, MINS, LATE, ASM, CONSTRAINTS,
        )  # fmt: skip
        product = tl.dot(all_end_to_end(t), tl.trans(x), product)
        t = _weights(
            odd, spread(more >> 4, BLOCK_W // 2), odd_scale, low, d, d_min, BLOCK_W // 2, BITS,
            OFFSET, SCALED, MINS, LATE, ASM, CONSTRAINTS,
        )  # fmt: skip
        if not DESCRIBED:
            second = tl.load(x_rows + 4 * BLOCK_W)
        product = tl.dot(all_end_to_end(t), tl.trans(second), product)
    else:
        t = _weights(
            words, more, scale, low, d, d_min, BLOCK_W, BITS, OFFSET, SCALED, MINS, LATE, ASM,
            CONSTRAINTS,
        )  # fmt: skip
        if PARTS == 1:
            product = tl.dot(all_end_to_end(t), tl.trans(x), product)
        else:
            product = tl.dot(end_to_end(t, 0), tl.trans(x), product)
            if not DESCRIBED:
                second = tl.load(x_rows + 4 * BLOCK_W)
            product = tl.dot(end_to_end(t, 4), tl.trans(second), product)
    if LATE:
        factor = largest_power(d) if SCALES == "power" else d.to(tl.float32)
        acc += product * factor[:, None]
        if MINS:
            mins = second_bytes(low, BLOCK_W, ASM)
            if not DESCRIBED:
                sums = tl.load(at[6] + step * BLOCK_W)
            acc -= tl.dot(mins, tl.trans(sums)) * d_min.to(tl.float32)[:, None]
    else:
        acc = settled(product, ASM != "")
    return acc, d_next, m_next
