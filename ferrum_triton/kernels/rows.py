"""Tensors seen as rows: how kernels over the last dimension take inputs of any rank and stride.

Rows have one stride where the leading dimensions collapse, which costs a kernel nothing. Where they
do not, as in a slice of the heads of [num_tokens, num_heads, head_dim], rows come in groups and
have two: one from row to row within a group, one from group to group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.kernels.jit import processors

# Rows in groups are counted in 32 bits, whose division takes a fraction of the time of 64.
MAX_GROUPED_ROWS = 2**31


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
    """View ``x`` [..., n] as [num_rows, n], for kernels that take one row stride.

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


def row_views(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of tensors as rows, for kernels that take a row stride and a group stride.

    Args:
        tensors: not empty, of one shape but for the last dimension, [..., n] each.

    Returns:
        One view of every tensor for each launch: [num_rows, n], or [num_groups, group_size, n]
        where the leading dimensions do not collapse into one. One launch is enough unless they do
        not collapse into two either.
    """
    for tensor in tensors:
        if tensor.dim() != 2:
            break
    else:
        return [tensors]  # most calls; a generator would take three times as long
    if all(t.is_contiguous() for t in tensors):
        return [tuple(t.view(-1, t.shape[-1]) for t in tensors)]

    sizes, strides = collapsed(*tensors)
    views = tuple(
        t.as_strided((*sizes, t.shape[-1]), (*steps, 1))
        for t, steps in zip(tensors, zip(*strides, strict=True), strict=True)
    )
    if len(sizes) == 1 or (len(sizes) == 2 and sizes[0] * sizes[1] < MAX_GROUPED_ROWS):
        return [views]
    shortest = sizes.index(min(sizes))
    return [
        part
        for i in range(sizes[shortest])
        for part in row_views(*(view.select(shortest, i) for view in views))
    ]


def collapsed(*tensors: Tensor) -> tuple[list[int], list[tuple[int, ...]]]:
    """The fewest leading dimensions that describe all of the tensors: sizes, and strides of each.

    A dimension joins the one before it if, in every tensor, its rows end where the next begin.
    """
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for dim, size in enumerate(tensors[0].shape[:-1]):
        steps = tuple(t.stride(dim) for t in tensors)
        if size == 1:
            continue
        if sizes and strides[-1] == tuple(size * step for step in steps):
            sizes[-1] *= size
            strides[-1] = steps
        else:
            sizes.append(size)
            strides.append(steps)
    if not sizes:
        return [1], [tuple(t.shape[-1] for t in tensors)]
    return sizes, strides


def group_size(rows: Tensor) -> int | None:
    """Rows of a group of a view of :func:`row_views`; None where there are no groups."""
    return rows.shape[1] if rows.dim() == 3 else None


def group_stride(rows: Tensor) -> int | None:
    """Elements from one group to the next; None where there are no groups."""
    return rows.stride(0) if rows.dim() == 3 else None


@triton.jit
def row_offset(row, stride_row, stride_group, group_size):
    """Offset of ``row``, int64; without groups (``group_size`` is None) it is row · stride_row."""
    offset = row * stride_row
    if group_size is not None:
        group = row.to(tl.int32) // group_size
        within = row.to(tl.int32) % group_size
        offset = group.to(tl.int64) * stride_group + within.to(tl.int64) * stride_row
    return offset


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
