"""Packed matrices whose columns are not in the order of the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferrum_triton.quant.fp8 import Fp8Blocks
from ferrum_triton.quant.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Reordered:
    """A matrix W with W[:, order] = weight, so that x · Wᵀ = x[:, order] · weightᵀ.

    What GPTQ's ``desc_act`` leaves: columns share scales in the order in which they were rounded,
    the largest activations first.

    Attributes:
        weight: [rows, K], its columns in their own order.
        order: int64 [K], the column of W that each is.
    """

    weight: QuantizedTensor
    order: Tensor

    @property
    def kind(self) -> str:
        return self.weight.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def to(self, device: torch.device | str) -> Reordered:
        """The same weights on ``device``."""
        return Reordered(self.weight.to(device), self.order.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W, decoded with torch."""
        return self.weight.dequantize(dtype)[:, self.order.argsort()]


def in_one_order(
    parts: Sequence[Tensor | QuantizedTensor | Fp8Blocks | Reordered], dtype: torch.dtype
) -> tuple[list[Tensor | QuantizedTensor | Fp8Blocks], Tensor | None]:
    """Matrices over one K, and the order in which they take its columns; None for K's own.

    Those that have an order which the others do not share are decoded to ``dtype``.
    """
    orders = [part.order for part in parts if isinstance(part, Reordered)]
    is_one = len(orders) == len(parts) and all(torch.equal(o, orders[0]) for o in orders)
    found: list[Tensor | QuantizedTensor | Fp8Blocks] = []
    for part in parts:
        if isinstance(part, Reordered):
            found.append(part.weight if is_one else part.dequantize(dtype))
        else:
            found.append(part)
    return found, orders[0] if is_one else None


def take_rows(
    part: Tensor | QuantizedTensor | Fp8Blocks, rows: Tensor
) -> Tensor | QuantizedTensor | Fp8Blocks:
    """Rows [i] of a matrix as a file has it; of FP8, whose blocks have rows in common, decoded."""
    if isinstance(part, QuantizedTensor):
        return replace(part, blocks=part.blocks[rows])
    return (part if isinstance(part, Tensor) else part.dequantize())[rows]
