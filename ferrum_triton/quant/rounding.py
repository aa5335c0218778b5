"""Weights rounded to integers of a few bits, the nearest ones, with a scale for each group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# What the least integer of a group may stand for, by its largest |w|. The largest integer is one
# less in size, so that 8 / 7 of it may be best; and all weights together may gain where the largest
# is cut off.
SHARES = (1.15, 1.1, 1.05, 1.01, 1.0, 0.95, 0.9, 0.85)


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """The integers q and scales s of least squared error: w ≈ s · (q - 2^(bits - 1)).

    Scales have eight significant bits, which float16 and bfloat16 both hold. Of each group the
    error is the least that SHARES give.

    Args:
        weight: [n, k], finite.
        bits: bits of an integer.
        group_size: columns of a group, which divide k.

    Returns:
        uint8 [n, k], and float32 [n, k / group_size].
    """
    middle = 1 << (bits - 1)
    groups = weight.float().unflatten(1, (-1, group_size))
    largest = groups.abs().amax(dim=2, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    kept = torch.zeros_like(largest), torch.zeros_like(groups)
    for share in SHARES:
        scale = _of_eight_bits(largest * share / middle)
        scale = torch.where(scale > 0, scale, 1.0)  # a group of zeros has any
        q = (groups / scale).round_().clamp_(-middle, middle - 1)
        error = (q * scale - groups).square().sum(dim=2, keepdim=True)
        is_less = error < best
        best = torch.where(is_less, error, best)
        kept = torch.where(is_less, scale, kept[0]), torch.where(is_less, q, kept[1])
    scales, q = kept
    return (q + middle).to(torch.uint8).flatten(1), scales.squeeze(2)


def _of_eight_bits(x: Tensor) -> Tensor:
    """Float32 rounded to bfloat16's significant bits."""
    return x.bfloat16().float()


def packed_words(q: Tensor, bits: int) -> Tensor:
    """Integers [rows, columns] in 32-bit words, the first in a word's lowest bits, padded by zeros.

    The inverse of :func:`ferrum_triton.quant.integers.unpacked`.

    Args:
        q: uint8, each less than 2^bits.
        bits: 4 or 8.
    """
    q = pad(q, (0, -q.shape[1] % (32 // bits)))
    if bits == 4:
        low, high = q.unflatten(1, (-1, 2)).unbind(2)
        q = low | high << 4
    return q.contiguous().view(torch.int32)
