"""Torch on the CPU: the definition of every op, and faster torch where there is some."""


def prepare() -> str:
    """Register the providers and return the device."""
    import ferrum_triton.backends.torch_delta
    import ferrum_triton.backends.torch_moe
    import ferrum_triton.backends.torch_ops
    import ferrum_triton.backends.torch_paged  # noqa: F401  these register the "torch" provider

    return "cpu"
