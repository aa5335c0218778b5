"""Mixture of experts: routing, pairs sorted by expert, combination."""

from ferrum_triton.ops.moe import combine, pairs, routing  # noqa: F401  declares the ops
