"""Float32 partial sums of a product, added up with what follows it and rounded once.

The launch behind a product whose K is split, or whose kernel cannot take bias and residual itself.
"""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2


@kernel
def _add_partials_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # float32 [splits, m, n]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_partial_split,
    stride_partial_token,
    stride_residual_token,
    num_rows,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = Σ_s partial[s] + bias + residual."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_rows
    acc = tl.zeros([BLOCK], tl.float32)
    row = partial_ptr + token * stride_partial_token + n
    for split in tl.static_range(SPLITS):
        acc += tl.load(row + split * stride_partial_split, mask=mask)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + token * stride_residual_token
        acc += tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


def add_partials(
    y: Tensor,
    partial: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σ_s partial[s, m, n] + bias[n] + residual[m, n].

    Args:
        partial: float32 [splits, m, n].
    """
    num_tokens, num_rows = y.shape
    if y.numel() == 0:
        return y
    block = min(next_power_of_2(num_rows), 1024)
    _add_partials_kernel.launch(
        (num_tokens, cdiv(num_rows, block)),
        y_ptr=y,
        partial_ptr=partial,
        bias_ptr=bias,
        residual_ptr=residual,
        stride_y_token=y.stride(0),
        stride_partial_split=partial.stride(0),
        stride_partial_token=partial.stride(1),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_rows=num_rows,
        SPLITS=partial.shape[0],
        BLOCK=block,
    )
    return y
