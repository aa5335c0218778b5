"""Grids: what integers of a few bits stand for in each group of a matrix, and the nearest of them.

A grid is chosen first, of several the one of least squared error. Integers on it are the nearest
ones, or those of :mod:`ferrum_triton.quant.gptq`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# What the least integer of a group may stand for, by its largest |w|. The largest integer is one
# less in size, so that 8 / 7 of it may be best; and all weights together may gain where the largest
# is cut off.
SHARES = (1.15, 1.1, 1.05, 1.01, 1.0, 0.95, 0.9, 0.85, 0.8)
# The same of a group's range where the integers need not have zero in their middle.
RANGE_SHARES = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# Weights whose grid is sought at a time: of each some copies in float32 are made.
CHUNK = 1 << 24
_LARGEST_HALF = 65280.0  # that has eight significant bits


class Grid(NamedTuple):
    """w = step · q + low, with a step and a low for each group of columns.

    Attributes:
        step: float32 [n, groups].
        low: the same.
        largest: the largest integer; the smallest is 0.
        blocks: uint8 [n, blocks, block_bytes], where a block format has steps and lows of its own
            and integers are yet to be written.
    """

    step: Tensor
    low: Tensor
    largest: int
    blocks: Tensor | None = None

    def decode(self, q: Tensor) -> Tensor:
        """Float32 [n, k] of the integers q [n, k]."""
        groups = q.float().unflatten(1, (self.step.shape[1], -1))
        return (groups * self.step[..., None] + self.low[..., None]).flatten(1)

    def nearest(self, weight: Tensor) -> Tensor:
        """The integers nearest to a matrix [n, k], as uint8."""
        groups = weight.float().unflatten(1, (self.step.shape[1], -1))
        return on_grid(groups, self.step[..., None], self.low[..., None], self.largest).flatten(1)


def on_grid(w: Tensor, step: Tensor, low: Tensor, largest: int) -> Tensor:
    """The integers of least |step · q + low - w|, as uint8; 0 where the step is 0."""
    q = torch.where(step == 0, 0.0, (w - low) / step)
    return q.round_().clamp_(0, largest).to(torch.uint8)


def symmetric_grid(
    weight: Tensor,
    bits: int,
    group_size: int,
    importance: Tensor | None = None,
    either_sign: bool = False,
) -> Grid:
    """The grid of least error in which the integer of the middle is 0.

    Steps have eight significant bits, which float16 and bfloat16 both hold.

    Args:
        weight: [n, k], finite.
        bits: bits of an integer.
        group_size: columns of a group, which divide k.
        importance: [k], by which squared errors are weighed; None weighs them alike.
        either_sign: whether steps may be negative, so that the least integer, which is the largest
            in size, can stand for a weight of either sign.
    """
    middle = 1 << (bits - 1)

    def candidates(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        largest = groups.abs().amax(dim=2, keepdim=True)
        for share in SHARES:
            step = _stored(largest * share / middle)
            yield step, -step * middle
            if either_sign:
                yield -step, step * middle

    return _best(weight, candidates, 2 * middle - 1, group_size, importance)


def range_grid(
    weight: Tensor, bits: int, group_size: int, importance: Tensor | None = None
) -> Grid:
    """The grid of least error with any low that is not above 0, in float32.

    Arguments are those of :func:`symmetric_grid`.
    """
    largest = (1 << bits) - 1

    def candidates(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        least, most = _range(groups)
        for share in RANGE_SHARES:
            for from_below in (0.0, 0.5, 1.0):
                cut = (most - least) * (1 - share)
                yield (most - least - cut) / largest, (least + cut * from_below).clamp(max=0)

    return _best(weight, candidates, largest, group_size, importance)


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of each group, and 0 between them."""
    least = groups.amin(dim=2, keepdim=True).clamp(max=0)
    return least, groups.amax(dim=2, keepdim=True).clamp(min=0)


def _best(
    weight: Tensor, candidates, largest: int, group_size: int, importance: Tensor | None
) -> Grid:
    """Of each group the candidate with whose nearest integers the weighed error is least."""
    found = []
    for rows in weight.split(max(1, CHUNK // max(1, weight.shape[1]))):
        groups = rows.float().unflatten(1, (-1, group_size))
        weighed = 1.0 if importance is None else importance.view(-1, group_size)
        best: Tensor | None = None
        for step, low in candidates(groups):
            q = on_grid(groups, step, low, largest)
            error = (q * step + low - groups).square_().mul_(weighed).sum(dim=2, keepdim=True)
            if best is None:
                best, kept = error, torch.cat((step, low), dim=2)
                continue
            kept = torch.where(error < best, torch.cat((step, low), dim=2), kept)
            best = torch.minimum(error, best)
        found.append(kept)
    step, low = torch.cat(found).unbind(2)
    return Grid(step, low, largest)


def _stored(step: Tensor) -> Tensor:
    """Float32 rounded to what both bfloat16 and float16 hold."""
    return step.bfloat16().float().clamp(max=_LARGEST_HALF).half().float()


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
