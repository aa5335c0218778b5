"""What finds addresses outside a launch's tensors, in each kernel that is interpreted."""

import pytest
import torch
import triton.language as tl

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import kernel

load_kernels("interpret")


@kernel
def _shift_kernel(y_ptr, x_ptr, from_x, first, count, BLOCK: tl.constexpr):
    """y[first : count] = x[first : count], of a block whose other values are dropped."""
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < from_x, other=0.0)
    tl.store(y_ptr + i, x, mask=i < count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("from_x", "first", "count", "fault"),
    [
        (5, 0, 5, ""),
        (5, 4, 5, ""),
        (6, 0, 5, "reads"),
        (5, -1, 5, "reads"),
        (5, 0, 6, "writes"),
        (-1, -1, 5, "writes"),
    ],
)
def test_addresses_are_those_of_the_launch(from_x, first, count, fault, dtype):
    memory = torch.ones(32).to(dtype)
    x, y = memory[2:12:2], torch.zeros(7).to(dtype)[1:6]
    x = x.contiguous()
    call = {"y_ptr": y, "x_ptr": x, "from_x": from_x, "first": first, "count": count}
    if not fault:
        _shift_kernel.launch((1,), **call, BLOCK=8)
        assert torch.equal(y[first:], x[first:])
        return
    with pytest.raises(AssertionError, match=f"_shift_kernel {fault} outside the tensors"):
        _shift_kernel.launch((1,), **call, BLOCK=8)
