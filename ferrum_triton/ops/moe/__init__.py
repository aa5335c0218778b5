"""Mixture of experts: routing, pairs sorted by expert, products of experts, combination."""

from ferrum_triton.ops.moe import (  # noqa: F401  declares the ops
    activation,
    combine,
    dense,
    expert_sum,
    experts,
    mlp,
    pairs,
    routing,
)
