"""Weights in FP8 with a scale for every block of 128 rows by 128 columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ferrum_triton.errors import InputError

BLOCK = 128
"""Rows and columns of a block."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
KIND = "FP8"
"""What such weights are called among packed ones."""

# The bits of a code but for its sign, all of which NaN has.
_MAGNITUDE = 0x7F


def num_blocks(size: int) -> int:
    """Blocks that many rows or columns are in, of which the last may be a part."""
    return -(-size // BLOCK)


@dataclass(frozen=True, eq=False)
class Fp8Blocks:
    """A matrix, or a stack of them, of weights code · scale, the scale that of the code's block.

    Attributes:
        weight: float8_e4m3fn [rows, K] or [experts, rows, K], the codes.
        scales: float32 [ceil(rows / 128), ceil(K / 128)]; of a stack [experts, ...].

    Raises:
        InputError: one has another dtype or shape.
    """

    weight: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.weight.dtype != torch.float8_e4m3fn or self.weight.dim() not in (2, 3):
            _reject("weight", self.weight, "float8_e4m3fn [rows, K] or [experts, rows, K]")
        *experts, rows, k = self.weight.shape
        want = [*experts, num_blocks(rows), num_blocks(k)]
        if self.scales.dtype != torch.float32 or list(self.scales.shape) != want:
            _reject("scales", self.scales, f"float32 {want}, one for each block of 128 x 128")

    @property
    def kind(self) -> str:
        return KIND

    @property
    def shape(self) -> tuple[int, ...]:
        """([experts,] rows, K)."""
        return tuple(self.weight.shape)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN; there is none of infinity."""
        magnitudes = self.weight.view(torch.uint8) & _MAGNITUDE
        return magnitudes.numel() > 0 and int(magnitudes.max()) == _MAGNITUDE

    def to(self, device: torch.device | str) -> Fp8Blocks:
        """The same weights on ``device``."""
        return Fp8Blocks(self.weight.to(device), self.scales.to(device))

    def in_planes(self) -> Fp8Blocks:
        """The same weights: these have one layout."""
        return self

    def above(self, below: Fp8Blocks) -> Fp8Blocks | None:
        """The two stacked along their rows, or None where a block would have rows of both."""
        if self.shape[0] % BLOCK:
            return None
        # torch concatenates no float8.
        codes = torch.cat((self.weight.view(torch.uint8), below.weight.view(torch.uint8)))
        return Fp8Blocks(codes.view(torch.float8_e4m3fn), torch.cat((self.scales, below.scales)))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[[experts,] rows, K], products of float32 rounded to ``dtype``."""
        if self.weight.dim() == 3:
            matrices = zip(self.weight, self.scales, strict=True)
            return torch.stack([Fp8Blocks(*parts).dequantize(dtype) for parts in matrices])
        rows, k = self.shape
        decoded = torch.empty(rows, k, dtype=dtype, device=self.device)
        for block, scales in enumerate(self.scales):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            columns = scales.repeat_interleave(BLOCK)[:k]
            decoded[part] = self.weight[part].float() * columns
        return decoded


def _reject(argument: str, got: Tensor, allowed: str) -> NoReturn:
    told = f"{str(got.dtype).removeprefix('torch.')} {list(got.shape)}"
    raise InputError("Fp8Blocks", argument, told, allowed, "Pass both as a file has them.")
