"""Attention over contiguous and paged caches."""

from ferrum_triton.kernels.attention import (  # noqa: F401  registers the launchers
    flash,
    merge,
    mla,
    paged,
    paged_step,
)
