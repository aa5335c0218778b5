"""Tensor maps: which tensors can have one, and their rows in blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.gpu import gpu_of

# Architectures with tensor maps and 227 KB of shared memory: Hopper, and Blackwell's large GPUs.
LARGE = (9, 10)

# Byte strides a tensor map can hold.
MAX_MAP_STRIDE = 1 << 40


def can_describe(x: Tensor) -> bool:
    """Whether a tensor map can be made of x [batch, heads, rows, head_dim] on its device.

    It wants an address and strides in multiples of 16 bytes, and repeats nothing.
    """
    size = x.element_size()
    if x.device.type == "cpu":
        supported = x.dtype != torch.bfloat16  # numpy lacks it, and descriptors are not widened
    else:
        supported = gpu_of(x.device).capability[0] in LARGE
    return (
        supported
        and x.data_ptr() % 16 == 0
        and x.shape[3] * size % 16 == 0
        and steps_fit([s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1], size)
    )


def steps_fit(steps: Sequence[int], size: int) -> bool:
    """Whether strides, in elements of ``size`` bytes, fit a tensor map."""
    return all(0 < step * size < MAX_MAP_STRIDE and step * size % 16 == 0 for step in steps)


def describe(x: Tensor, num_rows: int, block: int, width: int) -> TensorDescriptor:
    """The first ``num_rows`` rows of x [..., rows, columns], in blocks of rows, ``width`` wide.

    What a block has beyond them, or beyond the columns, reads as zero and is not written: no row
    of a cache that is not valid yet gets near a product.
    """
    shape, strides = sizes_of(x, num_rows)
    return TensorDescriptor(x, shape, strides, [*(1 for _ in shape[:-2]), block, width])


def sizes_of(x: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Shape and strides of the first rows of x [..., rows, columns], as a tensor map takes them."""
    *leading, _, columns = x.shape
    # The stride of a single index is never used, but must look like one.
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    used = [step if n > 1 else columns for n, step in zip(sizes, strides, strict=True)]
    return [*leading, num_rows, columns], [*used, 1]
