"""Mixture of experts: routing, pairs sorted by expert, packed experts, combination."""

from ferrum_triton.ops.moe import (  # noqa: F401  declares the ops
    activation,
    combine,
    experts,
    pairs,
    routing,
)
