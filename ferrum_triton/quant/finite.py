"""Weights that no number in range stands for, found at a fraction of what decoding all takes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks
from ferrum_triton.quant.fp8 import LARGEST, Fp8Blocks
from ferrum_triton.quant.layout import HalvedExponent, Ratio
from ferrum_triton.quant.reordered import Reordered
from ferrum_triton.quant.tensor import QuantizedTensor

# Above what the integers of any format multiply a scale by.
_MAX_MULTIPLE = 2**14
# Weights decoded or compared at a time.
_TILE = 1 << 20


def count_out_of_range(
    weight: Tensor | QuantizedTensor | Fp8Blocks | Reordered, dtype: torch.dtype
) -> int:
    """Number of weights that are NaN, infinite, or too large for ``dtype``.

    Of packed weights the scales are read, and only blocks with one out of the ordinary decoded; of
    others, the extremes come first.
    """
    limit = torch.finfo(dtype).max
    tiles: Iterable[Tensor] = ()
    if isinstance(weight, Reordered):
        weight = weight.weight
    if isinstance(weight, QuantizedTensor):
        stored = weight.as_in_file()
        fmt = FORMATS[stored.kind]
        blocks = stored.blocks.reshape(-1, fmt.block_bytes)
        odd = _out_of_the_ordinary(blocks, fmt, limit / _MAX_MULTIPLE)
        if len(odd):
            parts = odd.split(_TILE // fmt.block_size)
            tiles = (dequantize_blocks(part, fmt) for part in parts)
    elif isinstance(weight, Fp8Blocks):
        if weight.has_nan or not _within(weight.scales, limit / LARGEST):
            tiles = (weight.dequantize(),)
    elif not _within(weight, limit):
        tiles = weight.reshape(-1).split(_TILE)
    # In float64, where the limit is itself: rounded to bfloat16 it would let more pass.
    return sum(int((~(tile.double().abs() <= limit)).sum()) for tile in tiles)


def _out_of_the_ordinary(blocks: Tensor, fmt: BlockFormat, limit: float) -> Tensor:
    """Those of [blocks, block_bytes] that have a scale of ``limit`` or above, or NaN.

    By the byte of a scale that has its exponent, which as an integer orders as the scale does.
    """
    if isinstance(fmt.d, Ratio):
        first, second = fmt.d.parts(blocks)
        ordinary = (first.abs() < limit) & ((first / second).abs() < limit)
        return blocks[~ordinary.squeeze(-1)]
    raw = blocks.cpu().numpy()
    if isinstance(fmt.d, HalvedExponent):
        odd = raw[:, fmt.d.at] >= 128 + int(math.log2(limit))
    else:
        with np.errstate(over="ignore"):  # infinity, which no scale may be, is above all others
            above = int(np.float64(limit).astype(np.float16).view(np.uint16)) >> 8
        odd = np.zeros(len(raw), dtype=bool)
        for scale in filter(None, (fmt.d, fmt.m)):
            odd |= raw[:, scale.at + 1] & 0x7F >= above
    return blocks[torch.from_numpy(odd).to(blocks.device)] if odd.any() else blocks[:0]


def _within(values: Tensor, limit: float) -> bool:
    if not values.numel():
        return True
    low, high = values.aminmax()  # NaN if any value is
    return -limit <= low.item() and high.item() <= limit
