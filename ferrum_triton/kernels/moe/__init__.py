"""Mixture of experts: routing, pairs sorted by expert, packed experts, combination."""

from ferrum_triton.kernels.moe import (  # noqa: F401  registers the launchers
    activation,
    combine,
    expert_gemm,
    expert_gemv,
    pairs,
    routing,
)
