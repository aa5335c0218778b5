"""The precision references compute in."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it is wider already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
