"""What a matrix can be rounded to: integers of compressed-tensors, or a GGUF format's blocks.

A coding chooses the grid and stores integers on it. What readers decode is the grid's own numbers,
bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.gptq import Curvature, gptq
from ferrum_triton.quant.rounding import Grid, packed_words, range_grid, symmetric_grid


class Coding(Protocol):
    """How a matrix is stored."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> int:
        """Columns that belong together: a matrix has a multiple of them."""
        ...

    def grid(self, weight: Tensor, importance: Tensor | None = None) -> Grid:
        """The grid of a matrix [n, k], of columns of some importance [k]."""
        ...

    def stored(self, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The tensors that hold integers [n, k] on a grid, by what follows the module's name."""
        ...


def rounded(
    weight: Tensor, coding: Coding, curvature: Curvature | None = None
) -> tuple[Tensor, Grid]:
    """The integers of a matrix and their grid: the nearest, or GPTQ's where inputs are known."""
    if curvature is None:
        grid = coding.grid(weight)
        return grid.nearest(weight), grid
    grid = coding.grid(weight, curvature.importance)
    return gptq(weight, curvature, grid), grid


@dataclass(frozen=True)
class IntCoding:
    """Integers in groups, that of the middle 0, as compressed-tensors' ``pack-quantized``.

    Attributes:
        bits: bits of an integer, 4 or 8.
        group_size: columns that share a scale.
    """

    bits: int
    group_size: int

    @property
    def name(self) -> str:
        return f"{self.bits} bits"

    @property
    def columns(self) -> int:
        return self.group_size

    def grid(self, weight: Tensor, importance: Tensor | None = None) -> Grid:
        return symmetric_grid(weight, self.bits, self.group_size, importance)

    def stored(self, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        return {
            "weight_packed": packed_words(q, self.bits),
            "weight_scale": grid.step.clone(),
            "weight_shape": torch.tensor(q.shape),
        }


@dataclass(frozen=True)
class BlockCoding:
    """Blocks of a GGUF format: Q4_0, Q5_0, Q8_0, Q4_K or Q5_K."""

    fmt: BlockFormat

    @property
    def name(self) -> str:
        return self.fmt.name

    @property
    def columns(self) -> int:
        return self.fmt.block_size

    def grid(self, weight: Tensor, importance: Tensor | None = None) -> Grid:
        fmt = self.fmt
        shape = weight.shape[0], weight.shape[1] // fmt.block_size, fmt.block_bytes
        blocks = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
        if fmt.mins is None:
            found = symmetric_grid(weight, fmt.bits, fmt.block_size, importance, either_sign=True)
            fmt.d.write(blocks, found.step[..., None])
            return found._replace(blocks=blocks)
        assert fmt.scales and fmt.m
        found = range_grid(weight, fmt.bits, fmt.sub_size, importance)
        step, depth = (
            part.unflatten(1, (-1, len(fmt.scales))) for part in (found.step, -found.low)
        )
        fmt.d.write(blocks, step.amax(dim=2, keepdim=True) / fmt.scales.largest)
        fmt.m.write(blocks, depth.amax(dim=2, keepdim=True) / fmt.mins.largest)
        for whole, integers, wanted in (
            (fmt.d, fmt.scales, step),
            (fmt.m, fmt.mins, depth),
        ):
            unit = whole.read(blocks)
            share = torch.where(unit == 0, 0.0, wanted / unit).round()
            integers.write(blocks, share.clamp(0, integers.largest))
        step = fmt.d.read(blocks) * fmt.scales.read(blocks)
        depth = fmt.m.read(blocks) * fmt.mins.read(blocks)
        return Grid(step.flatten(1), -depth.flatten(1), found.largest, blocks)

    def stored(self, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        assert grid.blocks is not None
        blocks = grid.blocks.clone()
        codes = q.unflatten(1, (-1, self.fmt.block_size))
        # A byte in two's complement is the integer with its top bit turned.
        self.fmt.q.write_codes(blocks, codes ^ 128 if self.fmt.signed else codes)
        return {"weight": blocks.flatten(1)}


def block_coding(kind: str) -> BlockCoding:
    """The coding of a format's name."""
    return BlockCoding(FORMATS[kind])
