"""Attention over contiguous and paged caches."""

from ferrum_triton.ops.attention import (  # noqa: F401  declares the ops
    flash,
    merge,
    mla,
    paged_decode,
    paged_step,
    paged_varlen,
)
