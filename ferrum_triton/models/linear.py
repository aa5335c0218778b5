"""Linear layers: activations by weights that are dense, packed, or several of the two stacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.ops.quant_fused import MAX_ROWS
from ferrum_triton.quant import FusedTensor, QuantizedTensor
from ferrum_triton.quant.planes import PLANE_FORMATS

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
        packed = _in_planes(weight.parts) if x.shape[0] <= MAX_ROWS else ()
        if len(packed) in (2, 3):
            q, *between, v = packed
            k_blocks, k_kind = (between[0].blocks, between[0].kind) if between else (None, "")
            return backend.gemv_quant_qkv(
                x, q.blocks, k_blocks, v.blocks, q.kind, k_kind, v.kind, out=out
            )
        y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        for part, columns in zip(weight.parts, weight.columns, strict=True):
            matmul(backend, x, part, out=y[:, columns])
        return y
    if isinstance(weight, Tensor):
        return backend.gemm(x, weight, out=out)
    return backend.gemm_quant(x, weight.blocks, weight.kind, out=out)


def apply(backend: Backend, x: Tensor, linear: Linear) -> Tensor:
    """x Wᵀ + bias, [m, n]."""
    y = matmul(backend, x, linear.weight)
    if linear.bias is not None:
        backend.add_bias(y, linear.bias)
    return y


def gated(backend: Backend, x: Tensor, linear: Linear) -> Tensor:
    """silu(gate) · up, [m, n / 2], which are the halves of x Wᵀ + bias."""
    weight = linear.weight
    if linear.bias is None and x.shape[0] <= MAX_ROWS:
        packed = _in_planes(weight.parts) if isinstance(weight, FusedTensor) else ()
        if len(packed) == 2 and packed[0].shape == packed[1].shape:
            gate, up = packed
            return backend.gemv_quant_gate_up_silu(x, gate.blocks, up.blocks, gate.kind, up.kind)
    return backend.fused_silu_mul_split(apply(backend, x, linear))


def _in_planes(parts: tuple[Matrix, ...]) -> tuple[QuantizedTensor, ...]:
    """The parts if all are packed in planes, else none."""
    packed = [p for p in parts if isinstance(p, QuantizedTensor) and p.kind in PLANE_FORMATS]
    return tuple(packed) if len(packed) == len(parts) else ()
