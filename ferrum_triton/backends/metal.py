"""Metal shaders through ``torch.mps``: the place is kept, the shaders are still to come."""

import torch

from ferrum_triton.errors import BackendUnavailable


def prepare() -> str:
    """Check the device and return it."""
    if not torch.backends.mps.is_available():
        raise BackendUnavailable(
            "backend 'metal' needs macOS on Apple silicon and a torch with MPS; "
            "get_backend('cpu') runs everywhere."
        )
    return "mps"
