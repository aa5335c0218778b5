"""Attention over contiguous and paged caches."""

from ferrum_triton.ops.attention import flash  # noqa: F401  declares the ops
