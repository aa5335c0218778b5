"""Mixture of experts: routing, pairs sorted by expert, products of experts, combination."""

from ferrum_triton.kernels.moe import (  # noqa: F401  registers the launchers
    activation,
    combine,
    dense,
    dense_sum,
    expert_gemm,
    expert_gemv,
    expert_sum,
    mlp,
    pairs,
    routing,
)
