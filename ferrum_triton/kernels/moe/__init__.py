"""Mixture of experts: routing, pairs sorted by expert, combination."""

from ferrum_triton.kernels.moe import combine, pairs, routing  # noqa: F401  registers the launchers
