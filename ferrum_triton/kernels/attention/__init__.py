"""Attention over contiguous and paged caches."""

from ferrum_triton.kernels.attention import flash  # noqa: F401  registers the launchers
