"""Weights in FP8 by blocks: activations as codes, products of matrices and of experts."""

from ferrum_triton.kernels.fp8 import (  # noqa: F401  registers launchers
    codes,
    experts,
    experts_sum,
    product,
)
