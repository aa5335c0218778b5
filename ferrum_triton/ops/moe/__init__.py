"""Mixture of experts: routing, pairs sorted by expert, packed experts, combination."""

from ferrum_triton.ops.moe import combine, experts, pairs, routing  # noqa: F401  declares the ops
