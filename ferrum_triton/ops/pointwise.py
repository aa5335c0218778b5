"""Functions whose value at an element does not depend on where in a tensor the element lies.

On a CPU, torch's own sigmoid, silu and softplus take elements by whole vectors, and those behind
the last whole one by other instructions. The two may differ in the last bit, so that what a
sequence gets would depend on its row in a batch. exp and log1p are computed in one way throughout.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), of large x too."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
