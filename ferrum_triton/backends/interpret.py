"""The Triton kernels themselves, run by Triton's interpreter on CPU tensors, as a check."""

from ferrum_triton.backends.backend import Backend
from ferrum_triton.backends.triton_provider import load_kernels


def load() -> Backend:
    load_kernels("interpret")
    return Backend("interpret", device="cpu", providers=("triton", "blas"))
