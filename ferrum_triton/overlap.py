"""Which tensors share memory, told from addresses and strides alone."""

from __future__ import annotations

from torch import Tensor


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    layouts = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (a, b)]
    return layouts[0] == layouts[1]


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one may lie where an element of the other does.

    Columns of one matrix do not overlap, nor do the two halves of a pool. Of layouts less regular
    the answer is that they may.
    """
    if not a.numel() or not b.numel():
        return False
    dims_a, dims_b = _dims(a), _dims(b)
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a + _length(a, dims_a) <= start_b or start_b + _length(b, dims_b) <= start_a:
        return False
    for step in {stride for _, stride in (*dims_a, *dims_b) if stride}:
        rows = [[dim for dim in dims if dim[1] % step] for dims in (dims_a, dims_b)]
        # Both repeat at multiples of the step: within one, rows of each may lie side by side.
        gap = (start_b - start_a) % step
        if _length(a, rows[0]) <= gap and gap + _length(b, rows[1]) <= step:
            return False
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may lie in the same place."""
    if not tensor.numel():
        return False
    dims = sorted(_dims(tensor), key=lambda dim: dim[1])
    lengths = [_length(tensor, dims[:count]) for count in range(len(dims))]
    return any(stride < length for (_, stride), length in zip(dims, lengths, strict=True))


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes, and strides in bytes, of the dimensions that have more than one element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride * tensor.element_size()) for size, stride in steps if size > 1]


def _length(tensor: Tensor, dims: list[tuple[int, int]]) -> int:
    """Bytes from the first element to the end of the last, over some dimensions."""
    return tensor.element_size() + sum((size - 1) * stride for size, stride in dims)
