"""A mixture of packed experts in the place of an MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.quant import QuantizedTensor


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, and the router that chooses some for each token."""

    router: Tensor  # [num_experts, hidden_size]
    gate: QuantizedTensor  # [num_experts, intermediate_size, hidden_size]
    up: QuantizedTensor  # as gate
    down: QuantizedTensor  # [num_experts, hidden_size, intermediate_size]
    top_k: int


def mixture(backend: Backend, h: Tensor, experts: Experts) -> Tensor:
    """The sum of p_e · down_e(silu(gate_e(h)) · up_e(h)) over the likeliest experts e of each row.

    p are the probabilities of a softmax over all experts, divided by the sum of those chosen.

    Args:
        backend: the backend that computes.
        h: [num_tokens, hidden_size].
        experts: the layer's.

    Returns:
        As h.
    """
    gate, up, down, top_k = experts.gate, experts.up, experts.down, experts.top_k
    num_experts, inner, hidden = gate.shape
    logits = backend.gemm(h, experts.router, wide=True)
    ids, weights, _ = backend.route_topk_softmax(logits, top_k)
    if ids.numel() <= num_experts:  # each pair reads its expert by itself
        middle = backend.gemv_quant_moe_id_gate_up_silu(
            h, gate.blocks, up.blocks, ids, gate.kind, up.kind
        )
        slots = backend.gemv_quant_moe_id(middle, down.blocks, ids, down.kind)
    else:
        bucket_ids, tpe, _ = backend.compute_ids_tpe(ids, num_experts, inner, hidden)
        middle = backend.gemm_quant_moe_id_gate_up_silu(
            h, gate.blocks, up.blocks, bucket_ids, tpe, gate.kind, up.kind, top_k
        )
        slots = backend.gemm_quant_moe_id(middle, down.blocks, bucket_ids, tpe, down.kind, top_k)
    return backend.weighted_sum(slots, weights)
