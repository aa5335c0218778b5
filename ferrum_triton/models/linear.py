"""Linear layers: activations by weights that are dense, packed, or several of the two stacked.

Activations are there, or they are a norm that is computed on the way to the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.ops.linear import MOST_TOKENS
from ferrum_triton.quant import Fp8Blocks, FusedTensor, QuantizedTensor, Reordered
from ferrum_triton.quant.fp8 import KIND as FP8
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.quant.reordered import in_one_order, take_rows

# Tokens up to which a product by dense weights has a kernel of the project's own before a norm.
FEW_ROWS = 64

Table: TypeAlias = Tensor | QuantizedTensor
Matrix: TypeAlias = Table | Fp8Blocks
Stored: TypeAlias = Matrix | Reordered
"""A matrix as files have it."""


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + bias, W of shape [n, k].

    Attributes:
        weight: W, its columns in an order of their own.
        bias: float32 [n], or None.
        order: int64 [k], the column of x that each of W's is for; None for x's own order.
    """

    weight: Matrix | FusedTensor
    bias: Tensor | None = None
    order: Tensor | None = None


def stacked(
    stored: Sequence[Stored],
    biases: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    rows: Tensor | None = None,
    in_planes: bool = False,
    apart: bool = False,
) -> Linear:
    """A layer of matrices over one K, and their biases or none.

    Args:
        dtype: the dtype of matrices that are not kept packed.
        rows: the order of each matrix's rows; None for their own.
        in_planes: lay out packed ones in planes.
        apart: keep those from being joined.
    """
    parts, order = in_one_order(stored, dtype)
    if rows is not None:
        parts, biases = [take_rows(w, rows) for w in parts], [bias[rows] for bias in biases]
    bias = torch.cat(list(biases)) if biases else None
    have_planes = all(isinstance(part, QuantizedTensor) and part.has_planes for part in parts)
    keep_apart = in_planes and apart and have_planes
    fused = FusedTensor(tuple(parts)) if keep_apart else FusedTensor.of(parts)
    if in_planes:
        fused = fused.in_planes()
    return Linear(fused if len(fused.parts) > 1 else fused.parts[0], bias, order)


def in_order(x: Tensor, linear: Linear) -> Tensor:
    """x [m, k] with its columns where the layer's weight takes them."""
    return x if linear.order is None else x.index_select(1, linear.order)


def matmul(
    backend: Backend, x: Tensor, weight: Matrix | FusedTensor, out: Tensor | None = None
) -> Tensor:
    """x [m, k] · Wᵀ, by the op that suits W; parts of W each fill their columns of one result.

    Returns:
        [m, n] in x's dtype, which is also a dense W's.
    """
    if isinstance(weight, FusedTensor):
        packed = _in_planes(weight)
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
    if isinstance(weight, Fp8Blocks):
        return backend.gemm_fp8_128x128(x, weight.weight, weight.scales, out=out)
    return backend.gemm_quant(x, weight.blocks, weight.kind, out=out)


def keeps_packed(backend: Backend, kind: str) -> bool:
    """Whether a kernel multiplies by packed matrices of ``kind``, so that they stay packed."""
    if kind == FP8:
        return backend.has_kernel("gemm_fp8_128x128")
    return backend.has_kernel("gemm_quant", kind)


def apply(backend: Backend, x: Tensor, linear: Linear) -> Tensor:
    """x Wᵀ + bias, [m, n]."""
    y = matmul(backend, in_order(x, linear), linear.weight)
    if linear.bias is not None:
        backend.add_bias(y, linear.bias)
    return y


class Norm(NamedTuple):
    """h = rms_norm(residual ← residual + x) · weight, which is for one product: it adds x.

    Attributes:
        residual: [m, k], updated in place; of x's dtype, or float32.
        x: [m, k].
        weight: [k].
        eps: added to the mean square.
    """

    residual: Tensor
    x: Tensor
    weight: Tensor
    eps: float

    @property
    def like(self) -> Tensor:
        """A tensor of h's shape and dtype."""
        return self.x

    def values(self, backend: Backend) -> Tensor:
        """h, by a launch of its own."""
        return backend.fused_add_rms_norm(self.residual, self.x, self.weight, self.eps)

    def qkv(self, backend: Backend, *matrices: Any) -> Tensor:
        """h · [W₁; W₂; W₃]ᵀ, of blocks and then kinds."""
        norm = (self.residual, self.x, self.weight, self.eps)
        return backend.add_rms_norm_quant_qkv(*norm, *matrices)

    def gate_up(self, backend: Backend, *matrices: Any) -> Tensor:
        """silu(h · Gᵀ) · (h · Uᵀ), of blocks and then kinds."""
        norm = (self.residual, self.x, self.weight, self.eps)
        return backend.add_rms_norm_quant_gate_up_silu(*norm, *matrices)


class MixedNorm(NamedTuple):
    """The same norm, whose x is yet to be summed: Σ_k weights[:, k] · slots[:, k].

    Attributes:
        residual: [m, k], to which the sum is added.
        slots: [m, top_k, k], what the experts of a mixture return.
        weights: [m, top_k].
        weight: [k], of the norm.
        eps: added to the mean square.
    """

    residual: Tensor
    slots: Tensor
    weights: Tensor
    weight: Tensor
    eps: float

    @property
    def like(self) -> Tensor:
        """A tensor of h's shape and dtype."""
        return self.slots[:, 0]

    def summed(self, backend: Backend) -> Norm:
        """The norm once x is there."""
        x = backend.weighted_sum(self.slots, self.weights)
        return Norm(self.residual, x, self.weight, self.eps)

    def values(self, backend: Backend) -> Tensor:
        return self.summed(backend).values(backend)

    def qkv(self, backend: Backend, *matrices: Any) -> Tensor:
        norm = (self.residual, self.slots, self.weights, self.weight, self.eps)
        return backend.weighted_sum_norm_quant_qkv(*norm, *matrices)

    def gate_up(self, backend: Backend, *matrices: Any) -> Tensor:
        return self.summed(backend).gate_up(backend, *matrices)


class OpenNorm(NamedTuple):
    """The same norm, opened by the product that gave x: h is yet to be divided.

    Attributes:
        residual: [m, k], to which x is added.
        like: residual · weight, [m, k].
        squares: sums of residual², of which the root of the mean divides h.
        eps: added to the mean square.
    """

    residual: Tensor
    like: Tensor
    squares: Tensor
    eps: float

    def qkv(self, backend: Backend, *matrices: Any) -> Tensor:
        return backend.open_norm_quant_qkv(self.like, self.squares, self.eps, *matrices)

    def gate_up(self, backend: Backend, *matrices: Any) -> Tensor:
        return backend.open_norm_quant_gate_up_silu(self.like, self.squares, self.eps, *matrices)


class ReadyNorm(NamedTuple):
    """The same norm, computed with the product that gave x.

    Attributes:
        residual: [m, k], to which x was added.
        like: h, [m, k].
    """

    residual: Tensor
    like: Tensor

    def values(self, backend: Backend) -> Tensor:
        return self.like

    def gate_up(self, backend: Backend, *matrices: Any) -> Tensor:
        return backend.gemv_quant_gate_up_silu(self.like, *matrices)


AnyNorm: TypeAlias = Norm | MixedNorm | OpenNorm | ReadyNorm


def norm_after(
    backend: Backend,
    x: Tensor,
    linear: Linear,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    then: Linear | None,
) -> AnyNorm:
    """The norm over residual + x Wᵀ + bias: open or ready where that saves a launch.

    Args:
        then: the product that the norm is for; None if there is another use of it.
    """
    if linear.order is not None:
        x, linear = in_order(x, linear), replace(linear, order=None)
    if then is not None and then.order is not None:
        then = None  # columns of an open norm are in its own order
    if linear.bias is None and then is not None:
        packed = _in_planes(linear.weight)
        if len(packed) == 1 and _shares_a_norm(backend, x, _in_planes(then.weight)):
            opened = backend.linear_quant_open_norm(
                x, packed[0].blocks, packed[0].kind, residual, weight
            )
            return OpenNorm(*opened, eps)
        if _is_dense(linear) and _is_dense(then) and _is_one(backend, x, "linear_open_norm"):
            return OpenNorm(*backend.linear_open_norm(x, linear.weight, residual, weight), eps)
    if _is_dense(linear) and _are_few(backend, x, "linear_add_rms_norm"):
        h = backend.linear_add_rms_norm(x, linear.weight, residual, weight, eps)
        return ReadyNorm(residual, h)
    return Norm(residual, apply(backend, x, linear), weight, eps)


def _shares_a_norm(backend: Backend, x: Tensor, then: tuple[QuantizedTensor, ...]) -> bool:
    """Whether an open norm saves a launch before packed products, all of ``then``."""
    return len(then) in (1, 2, 3) and _is_one(backend, x, "linear_quant_open_norm")


def _is_one(backend: Backend, x: Tensor, op: str) -> bool:
    """Whether x is one token, whose norm can be open.

    bfloat16 has room for what is not divided yet; float16 would end at 65504.
    """
    return x.shape[0] == 1 and x.dtype == torch.bfloat16 and backend.has_kernel(op)


def _are_few(backend: Backend, x: Tensor, op: str) -> bool:
    """Whether a product of x by dense weights has a kernel of the project's own."""
    return x.shape[0] <= FEW_ROWS and x.dtype != torch.float32 and backend.has_kernel(op)


def _is_dense(linear: Linear) -> bool:
    """Whether a linear layer is one dense matrix without a bias."""
    return isinstance(linear.weight, Tensor) and linear.bias is None


def apply_to_norm(backend: Backend, norm: AnyNorm, linear: Linear) -> Tensor:
    """h Wᵀ + bias, [m, n]."""
    if isinstance(norm, OpenNorm) and isinstance(linear.weight, Tensor):
        return backend.open_norm_linear(norm.like, norm.squares, norm.eps, linear.weight)
    packed = _in_planes(linear.weight) if linear.order is None else ()
    is_packed = len(packed) in (1, 2, 3)
    if isinstance(norm, ReadyNorm) or (not isinstance(norm, OpenNorm) and not is_packed):
        return apply(backend, norm.values(backend), linear)
    missing = 3 - len(packed)
    blocks = [part.blocks for part in packed] + [None] * missing
    kinds = [part.kind for part in packed] + [""] * missing
    y = norm.qkv(backend, *blocks, *kinds)
    if linear.bias is not None:
        backend.add_bias(y, linear.bias)
    return y


def gated_norm(backend: Backend, norm: AnyNorm, linear: Linear) -> Tensor:
    """silu(gate) · up, [m, n / 2], which are the halves of h Wᵀ + bias."""
    weight, few = linear.weight, norm.like.shape[0] <= MOST_TOKENS
    packed = _in_planes(weight) if linear.bias is None else ()
    is_pair = len(packed) == 2 and packed[0].shape == packed[1].shape
    if is_pair and linear.order is not None and not isinstance(norm, OpenNorm):
        h, (gate, up) = in_order(norm.values(backend), linear), packed
        return backend.gemv_quant_gate_up_silu(h, gate.blocks, up.blocks, gate.kind, up.kind)
    if is_pair:
        gate, up = packed
        return norm.gate_up(backend, gate.blocks, up.blocks, gate.kind, up.kind)
    if isinstance(norm, OpenNorm) and isinstance(weight, Tensor):
        return backend.open_norm_gate_up_silu(norm.like, norm.squares, norm.eps, weight)
    # Without a kernel the op widens the weights at each call.
    if (
        not isinstance(norm, OpenNorm)
        and isinstance(weight, Tensor)
        and linear.bias is None
        and few
        and backend.has_kernel("gemm_gate_up_silu")
    ):
        return backend.gemm_gate_up_silu(norm.values(backend), weight)
    return backend.fused_silu_mul_split(apply_to_norm(backend, norm, linear))


def _in_planes(weight: Matrix | FusedTensor) -> tuple[QuantizedTensor, ...]:
    """The parts of a weight if all are packed in planes, else none."""
    parts = weight.parts if isinstance(weight, FusedTensor) else (weight,)
    packed = [p for p in parts if isinstance(p, QuantizedTensor) and p.kind in PLANE_FORMATS]
    return tuple(packed) if len(packed) == len(parts) else ()
