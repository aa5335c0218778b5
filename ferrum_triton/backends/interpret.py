"""The Triton kernels themselves, run by Triton's interpreter on CPU tensors, as a check."""

from ferrum_triton.backends.triton_provider import load_kernels


def prepare() -> str:
    """Register the kernels and return the device."""
    load_kernels("interpret")
    return "cpu"
