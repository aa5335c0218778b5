"""Packed weights, read as GGUF files store them. One module a shape of work."""

from ferrum_triton.kernels.quant import (  # noqa: F401  registers the launchers
    gemm,
    gemv,
    gemv_fused,
    gemv_planes,
    int8,
    rows,
)
