"""Steps of a product of weights in planes on tensor cores: what they read, unpacked and summed.

Every product here, of one matrix or of experts, is a loop over :func:`add_step`.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.elementwise import activated
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
    d_unit,
    load_step,
    upper_scales,
    weight_scales,
)
from ferrum_triton.kernels.tensor_cores import settled


@triton.jit
def _every_other_pair(words, TILE: tl.constexpr):
    """Words whose high bits are in the low halves of a one-bit plane's bytes; the high halves'."""
    if TILE.format.bits == 5:
        pairs = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2])
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        even = tl.reshape(even, [words.shape[0], words.shape[1] // 2])
        odd = tl.reshape(odd, [words.shape[0], words.shape[1] // 2])
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def _weights(words, more, scale, low, scales, W: tl.constexpr, TILE: tl.constexpr):
    """Eight products' weights, float16 [rows, W]; without d where it scales products or rows.

    Args:
        words, more, scale: the operands of ``unpack``.
        low: mins of sub-blocks in the second byte of an int32.
        scales: d and m of the weights.
    """
    FORMAT: tl.constexpr = TILE.format
    ASM: tl.constexpr = TILE.asm
    t = unpack(words, more, scale, FORMAT, ASM)
    if not (TILE.scale_after or FORMAT.is_row_scaled):
        mins, m = 0.0, scales.m
        if FORMAT.has_minimum:
            m = spread(m, W)
            if FORMAT.scale_code != "":
                mins = second_bytes(low, W, ASM)
        t = times(t, mins, spread(scales.d, W), m, FORMAT, ASM != "")
    return t


@triton.jit
def add_step(acc, scales, operands, place, next_place, num_words, TILE: tl.constexpr):
    """acc plus a step's products, and the next step's scales.

    Args:
        acc: float32 [rows, tokens].
        scales: ``block_scales`` of this step.
        operands: :class:`~.mma_operands.Operands`.
        place, next_place: this step and the one after it.
        num_words: words of eight weights in a row.
    """
    W: tl.constexpr = TILE.words
    ASM: tl.constexpr = TILE.asm
    step = load_step(operands, place, num_words - place.step * W, TILE)
    scale = step.scale.to(tl.int32) if TILE.format.scale_code != "" else step.scale
    upper = upper_scales(operands, place, TILE) if TILE.format.scale_code == "packed" else 0
    low = scale
    if TILE.format.scale_code == "power":
        # Loaded again: with d, which the loop carries, weights would go through shared memory.
        skipped = place.rows * operands.rows.d * d_unit(TILE)
        largest = tl.load(operands.at.d[:, None] + (skipped + place.step * W // 32))
        scale = relative_power(scale, largest.to(tl.int32))
    if TILE.format.scale_code == "nibbles":
        scale, low = scale & 15, scale << 4  # a min as the low bits of the second byte
    # Here, not before: the loop's copies are asked for first.
    next_scales = block_scales(operands, next_place, TILE)
    if TILE.scale_after:
        product = tl.zeros_like(acc)
    else:
        product = acc
        scales = weight_scales(operands, step, place, TILE)

    if TILE.format.bits == 5 or TILE.format.bits == 3:
        even, odd = _every_other_pair(step.words, TILE)
        even_scale, odd_scale = scale, scale
        if TILE.format.bits == 3:
            even_scale = scale & 15 | upper << 4 & 48
            odd_scale = scale >> 4 | upper << 2 & 48
        t = _weights(even, spread(step.more, W // 2), even_scale, low, scales, W // 2, TILE)
        product = tl.dot(all_end_to_end(t), tl.trans(step.x), product)
        t = _weights(odd, spread(step.more >> 4, W // 2), odd_scale, low, scales, W // 2, TILE)
        product = tl.dot(all_end_to_end(t), tl.trans(step.x_second), product)
    else:
        t = _weights(step.words, step.more, scale, low, scales, W, TILE)
        if TILE.parts == 1:
            product = tl.dot(all_end_to_end(t), tl.trans(step.x), product)
        else:
            product = tl.dot(end_to_end(t, 0), tl.trans(step.x), product)
            product = tl.dot(end_to_end(t, 4), tl.trans(step.x_second), product)

    if TILE.scale_after:
        if TILE.format.scale_code == "power":
            factor = largest_power(scales.d)
        else:
            factor = scales.d.to(tl.float32)
        acc += product * factor[:, None]
        if TILE.format.has_minimum:
            mins = second_bytes(low, W, ASM)
            acc -= tl.dot(mins, tl.trans(step.sums)) * scales.m.to(tl.float32)[:, None]
    else:
        acc = settled(product, ASM != "")
    return acc, next_scales


@triton.jit
def gated(acc, ACTIVATION: tl.constexpr):
    """activation(gate) · up, [rows / 2, tokens], of a tile with eight rows of each in turn.

    What a thread has of gate and up are neighbours' products, so that nothing is exchanged.
    """
    acc = tl.reshape(acc, [acc.shape[0] // 16, 2, 8, acc.shape[1]])
    gate, up = tl.split(tl.permute(acc, (0, 2, 3, 1)))
    return tl.reshape(activated(gate, ACTIVATION) * up, [acc.shape[0] * 8, acc.shape[3]])
