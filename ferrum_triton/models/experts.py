"""A mixture of experts in the place of an MLP: packed, in FP8, or in the activations' dtype."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.models.linear import Linear, MixedNorm, Norm, ReadyNorm, apply, gated_norm
from ferrum_triton.ops.moe.expert_sum import FEW_TOKENS
from ferrum_triton.quant import Fp8Blocks, QuantizedTensor
from ferrum_triton.runtime.expert_parallel import ExpertParallel


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token has, by as much as a gate of its own says."""

    gate: Tensor  # [1, hidden_size]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, kw_only=True)
class Experts(ABC):
    """The experts of one layer, and the router that chooses some for each token.

    norm_topk_prob is whether the probabilities of those chosen are divided by their sum. Where
    ``parallel`` says that ranks share the experts, stacks hold those of this rank.
    """

    STACKS: ClassVar[tuple[str, ...]]
    """The fields that have an expert each along their first dimension."""

    router: Tensor  # [num_experts, hidden_size]
    top_k: int
    norm_topk_prob: bool = True
    parallel: ExpertParallel | None = None
    shared: SharedExpert | None = None

    @property
    @abstractmethod
    def matrices(self) -> tuple[Tensor | QuantizedTensor | Fp8Blocks, ...]:
        """The stacks of matrices, an expert each along their first dimension."""

    @abstractmethod
    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        """down_e(silu(gate_e(h)) · up_e(h)) of each token at each of the stacks' experts e.

        Args:
            backend: the backend that computes.
            h: [num_tokens, hidden_size].
            ids: int32 [num_tokens, top_k], the experts.

        Returns:
            [num_tokens, top_k, hidden_size].
        """

    def slots(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        """As :meth:`outputs`, of experts on whichever rank they are."""
        if self.parallel is None:
            return self.outputs(backend, h, ids)
        return self.parallel.outputs(h, ids, functools.partial(self.outputs, backend))

    def summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over a token's slots of weights · :meth:`slots`, [num_tokens, hidden_size].

        Args:
            backend: the backend that computes.
            h: [num_tokens, hidden_size].
            ids: int32 [num_tokens, top_k], the experts.
            weights: [num_tokens, top_k], any float dtype.
        """
        if self.parallel is not None:
            return backend.weighted_sum(self.slots(backend, h, ids), weights)
        return self._summed(backend, h, ids, weights)

    def _summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same of experts that are all on this rank; formats may sum in their last product."""
        return backend.weighted_sum(self.outputs(backend, h, ids), weights)

    def spread(self, parallel: ExpertParallel) -> Self:
        """This rank's experts alone, in memory of their own."""
        mine = slice(parallel.experts.start, parallel.experts.stop)
        stacks = {name: _part(getattr(self, name), mine) for name in self.STACKS}
        return dataclasses.replace(self, **stacks, parallel=parallel)


@dataclass(frozen=True, kw_only=True)
class PackedExperts(Experts):
    """Experts in a GGUF file's blocks, or in planes."""

    STACKS: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    gate: QuantizedTensor  # [num_experts, intermediate_size, hidden_size]
    up: QuantizedTensor  # as gate
    down: QuantizedTensor  # [num_experts, hidden_size, intermediate_size]

    @property
    def matrices(self) -> tuple[QuantizedTensor, ...]:
        return self.gate, self.up, self.down

    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        gate, up, down = self.matrices
        if self._reads_pairs(ids):
            middle = self._gated(backend, h, ids)
            return backend.gemv_quant_moe_id(middle, down.blocks, ids, down.kind)
        stacks = gate.blocks, up.blocks, down.blocks
        return backend.mlp_quant_moe_id(h, *stacks, ids, gate.kind, up.kind, down.kind)

    def _summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        is_few, down = len(h) <= FEW_TOKENS and self._reads_pairs(ids), self.down
        if not is_few or not backend.has_kernel("gemv_quant_moe_id_sum", down.kind):
            return super()._summed(backend, h, ids, weights)
        middle = self._gated(backend, h, ids)
        return backend.gemv_quant_moe_id_sum(middle, down.blocks, ids, weights, down.kind)

    def _reads_pairs(self, ids: Tensor) -> bool:
        """Whether each pair reads its expert by itself."""
        return ids.numel() <= len(self.gate.blocks)

    def _gated(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        """silu(gate_e(h)) · up_e(h) of few pairs, [num_tokens, top_k, intermediate_size]."""
        gate, up = self.gate, self.up
        return backend.gemv_quant_moe_id_gate_up_silu(
            h, gate.blocks, up.blocks, ids, gate.kind, up.kind
        )


@dataclass(frozen=True, kw_only=True)
class DenseExperts(Experts):
    """Experts in the activations' dtype."""

    STACKS: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    gate_up: Tensor  # [num_experts, 2 * intermediate_size, hidden_size], gate's rows before up's
    down: Tensor  # [num_experts, hidden_size, intermediate_size]

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down

    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        middle = backend.gemm_moe_id_gate_up(h, self.gate_up, ids)
        return backend.gemm_moe_id(middle, self.down, ids)

    def _summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        middle = backend.gemm_moe_id_gate_up(h, self.gate_up, ids)
        return backend.gemm_moe_id_sum(middle, self.down, ids, weights)


@dataclass(frozen=True, kw_only=True)
class Fp8Experts(Experts):
    """Experts in FP8 by blocks."""

    STACKS: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    gate: Fp8Blocks  # [num_experts, intermediate_size, hidden_size]
    up: Fp8Blocks  # as gate
    down: Fp8Blocks  # [num_experts, hidden_size, intermediate_size]

    @property
    def matrices(self) -> tuple[Fp8Blocks, ...]:
        return self.gate, self.up, self.down

    def outputs(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        middle, down = self._gated(backend, h, ids), self.down
        return backend.gemm_moe_id_fp8_128x128(middle, down.weight, down.scales, ids)

    def _summed(self, backend: Backend, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        middle, down = self._gated(backend, h, ids), self.down
        return backend.gemm_moe_id_sum_fp8_128x128(middle, down.weight, down.scales, ids, weights)

    def _gated(self, backend: Backend, h: Tensor, ids: Tensor) -> Tensor:
        """What down takes: silu(gate_e(h)) · up_e(h) of each token at each of its experts e."""
        gate, up = self.gate, self.up
        return backend.gemm_moe_id_gate_up_fp8_128x128(
            h, gate.weight, gate.scales, up.weight, up.scales, ids
        )


def mixture(backend: Backend, h: Tensor, experts: Experts) -> Tensor:
    """The sum of p_e · down_e(silu(gate_e(h)) · up_e(h)) over the likeliest experts e of each row.

    p are the probabilities of a softmax over all experts. A shared expert s is added, as
    sigmoid(gate_s(h)) · s(h).

    Args:
        backend: the backend that computes.
        h: [num_tokens, hidden_size].
        experts: the layer's.

    Returns:
        As h.
    """
    y = experts.summed(backend, h, *_routed(backend, h, experts))
    if (shared := experts.shared) is None:
        return y
    middle = gated_norm(backend, ReadyNorm(h, h), shared.gate_up)
    gate = backend.gemm(h, shared.gate)
    return backend.sigmoid_gate(apply(backend, middle, shared.down), gate, y, out=y)


def norm_after_mixture(
    backend: Backend, h: Tensor, experts: Experts, residual: Tensor, weight: Tensor, eps: float
) -> Norm | MixedNorm:
    """The norm over residual + :func:`mixture`, whose sum over experts may be left to it.

    Of few tokens the norm would have a launch of its own for that sum, which products with experts
    may make themselves.
    """
    if experts.shared is not None or len(h) <= FEW_TOKENS:
        return Norm(residual, mixture(backend, h, experts), weight, eps)
    ids, weights = _routed(backend, h, experts)
    return MixedNorm(residual, experts.slots(backend, h, ids), weights, weight, eps)


def _routed(backend: Backend, h: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """A token's experts and their p, [num_tokens, top_k]."""
    return backend.gemm_route_topk_softmax(h, experts.router, experts.top_k, experts.norm_topk_prob)


def _part(stack: Any, experts: slice) -> Any:
    """Some experts of a stack, which keep none of the others' memory."""
    if isinstance(stack, Fp8Blocks):
        return Fp8Blocks(stack.weight[experts].clone(), stack.scales[experts].clone())
    if isinstance(stack, QuantizedTensor):
        return QuantizedTensor(stack.blocks[experts].clone(), stack.kind)
    return stack[experts].clone()
