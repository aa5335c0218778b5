"""Torch on the CPU: the definition of every op, and faster torch where there is some."""


def prepare() -> str:
    """Register the providers and return the device."""
    import ferrum_triton.backends.torch_ops  # noqa: F401  registers the "torch" provider

    return "cpu"
