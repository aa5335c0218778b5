"""Torch on the CPU: the definition of every op, and faster torch where there is some."""

import ferrum_triton.backends.torch_ops  # noqa: F401  registers the "torch" provider
from ferrum_triton.backends.backend import Backend


def load() -> Backend:
    return Backend("cpu", device="cpu", providers=("torch", "blas", "reference"))
