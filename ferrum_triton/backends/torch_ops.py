"""The ``"torch"`` provider: torch's own fused CPU math, where it is faster than the reference."""

from ferrum_triton import ops  # noqa: F401
