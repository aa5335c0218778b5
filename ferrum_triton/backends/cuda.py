"""Compiled Triton kernels on CUDA tensors; dense products of many tokens through cuBLAS."""

import torch

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.errors import BackendUnavailable


def prepare() -> str:
    """Check the device, register the kernels and return the device."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend 'cuda' needs a CUDA build of torch and a visible NVIDIA GPU; torch "
            f"{torch.__version__} sees none. `ferrum-triton doctor` says what is missing; "
            "get_backend('cpu') runs everywhere."
        )
    load_kernels("cuda")
    return "cuda"
