"""A packed layer's product with its bias and the residual stream.

Products by planes add them before they round; blocks as a file has them are multiplied in float32
first, which a second launch finishes.
"""

import torch
from torch import Tensor

from ferrum_triton.kernels.quant.gemm import gemm_quant
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.quant.products import product
from ferrum_triton.ops import quant as ops
from ferrum_triton.quant.planes import PLANE_FORMATS


@ops.linear_quant.impl("triton")
def linear_quant(
    a: Tensor,
    blocks: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if bias is None and residual is None:
        return gemm_quant(a, blocks, kind, out=out)
    bias = None if bias is None else bias.contiguous()
    y = a.new_empty((a.shape[0], blocks.shape[0])) if out is None else out
    if kind in PLANE_FORMATS:
        return product(a, blocks, kind, bias, residual, y)
    sums = torch.empty(y.shape, dtype=torch.float32, device=a.device)
    gemm_quant(a, blocks, kind, out=sums)
    return add_partials(y, sums[None], bias, residual)
