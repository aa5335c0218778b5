"""Metal shaders through ``torch.mps``; ops without one run by torch's own MPS kernels.

A family of ops is a module here, and its kernels are in Metal Shading Language under ``shaders``.
Nothing is compiled before it is launched.
"""

from importlib import import_module

import torch

from ferrum_triton.errors import BackendUnavailable

FAMILIES = (
    "norm",
    "elementwise",
    "embedding",
    "rope",
    "attention",
    "quant",
    "routing",
    "combine",
    "sampling",
)


def load_shaders() -> None:
    """Register the ``"metal"`` provider."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")


def prepare() -> str:
    """Check the device, register the providers and return it."""
    if not torch.backends.mps.is_available():
        raise BackendUnavailable(
            "backend 'metal' needs macOS on Apple silicon and a torch with MPS; "
            "get_backend('cpu') runs everywhere."
        )
    load_shaders()
    for provider in ("torch_moe", "torch_ops"):
        import_module(f"ferrum_triton.backends.{provider}")
    return "mps"
