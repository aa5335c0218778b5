"""Tensors seen as rows: how kernels over the last dimension take inputs of any rank."""

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.kernels.jit import processors


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    """The largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def as_rows(op: str, name: str, x: Tensor) -> Tensor:
    """View ``x`` [..., n] as [rows, n].

    Raises:
        InputError: the leading strides do not collapse into one, so that only a copy would do.
    """
    if x.dim() == 2:
        return x
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, max(x.shape[-1], 1))
    except RuntimeError:
        raise InputError(
            op,
            name,
            f"of strides {list(x.stride())}, which one row stride cannot describe",
            "a tensor whose leading dimensions collapse",
            f"Pass {name}.contiguous() or a 2-D view.",
        ) from None


def as_flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of one shape as one row each: fewer, fuller blocks."""
    if all(t.is_contiguous() for t in tensors):
        return tuple(t.view(1, -1) for t in tensors)
    return tensors


def tokens_per_program(num_tokens: int, num_heads: int, block_d: int, device: torch.device) -> int:
    """One token where there are few programs (latency), else tiles of up to 2048 elements."""
    largest = max(2048 // block_d, 1)
    fill = num_tokens * num_heads // (4 * processors(device))
    return min(next_power_of_2(max(fill, 1)), largest)
