"""Packed weights, read as GGUF files store them. One module a shape of work."""

from ferrum_triton.kernels.quant import gemm, gemv, rows  # noqa: F401  registers the launchers
