"""Linear layers: activations by weights that are dense, packed, or several of the two stacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.quant import FusedTensor, QuantizedTensor

Matrix: TypeAlias = Tensor | QuantizedTensor


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + bias, W of shape [n, k]; bias float32 [n] or None."""

    weight: Matrix | FusedTensor
    bias: Tensor | None = None


def matmul(
    backend: Backend, x: Tensor, weight: Matrix | FusedTensor, out: Tensor | None = None
) -> Tensor:
    """x [m, k] · Wᵀ, by the op that suits W; parts of W each fill their columns of one result.

    Returns:
        [m, n] in x's dtype, which is also a dense W's.
    """
    if isinstance(weight, FusedTensor):
        y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        for part, columns in zip(weight.parts, weight.columns, strict=True):
            matmul(backend, x, part, out=y[:, columns])
        return y
    if isinstance(weight, Tensor):
        return backend.gemm(x, weight, out=out)
    return backend.gemm_quant(x, weight.blocks, weight.kind, out=out)
