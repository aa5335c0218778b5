"""Products with rows in planes: which kernel takes how many activations.

One and two activations take about as long as W is read: :func:`gemv_planes`, or at some sizes
:func:`gemv_walk`. Three to eight go to tensor cores that are fed as weights are read,
:func:`gemv_quads`; more fill them, W as their tall operand, by :func:`mma_quant`, whose tile grows
with them. From MANY on decoding W costs less than what cuBLAS gains over it. The kernels beside it
take what quads cannot, a K of part of a block or hardly any rows. float32 activations are never
rounded: up to eight of them take the first way, and more a product by torch.
"""

import torch
from torch import Tensor

from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.quant.gemv_planes import gemv_planes
from ferrum_triton.kernels.quant.gemv_quads import gemv_quads, takes_quads
from ferrum_triton.kernels.quant.gemv_walk import gemv_walk, walk_of
from ferrum_triton.kernels.quant.int16 import int16_activations
from ferrum_triton.kernels.quant.mma import mma_quant
from ferrum_triton.kernels.quant.mma_config import MmaConfig, mma_heuristic
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.quant.plane_rows import product_by_torch
from ferrum_triton.ops.quant import MAX_GEMV_ROWS
from ferrum_triton.quant.kinds import file_kind

FEW, MANY = 4, 512
# Weights from which on two activations become integers in a launch of their own.
MANY_WEIGHTS = 1 << 25


def choose_config(
    kind: str, num_tokens: int, num_rows: int, num_weights: int, device: torch.device
) -> MmaConfig:
    """How ``mma_quant`` takes so many tokens by W [num_rows, num_weights]."""
    return mma_heuristic(gpu_of(device), kind, num_tokens, num_rows, num_weights)


def are_few(a: Tensor, num_rows: int) -> bool:
    """Whether a product of ``a`` with so many rows in planes is :func:`product_of_few`'s."""
    if a.shape[0] <= FEW or a.dtype == torch.float32:
        return a.shape[0] <= MAX_GEMV_ROWS
    return takes_quads(a, num_rows)


def product_of_few(
    a: Tensor,
    planes: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual for W's rows in planes."""
    num_tokens, num_weights = a.shape
    if takes_quads(a, planes.shape[0]):
        return gemv_quads(a, planes, kind, bias=bias, residual=residual, out=out)
    if a.dtype != torch.float32:
        walk = walk_of(file_kind(kind), planes.shape[0], num_weights // 32, num_tokens, a.device)
        if walk is not None:
            return gemv_walk(a, planes, kind, walk, bias=bias, residual=residual, out=out)
    apart = num_tokens > 2 or (num_tokens == 2 and planes.shape[0] * num_weights >= MANY_WEIGHTS)
    x = int16_activations(a) if apart and a.dtype != torch.float32 else a
    return gemv_planes(x, planes, kind, bias=bias, residual=residual, out=out)


def product_of_planes(
    a: Tensor,
    planes: Tensor,
    kind: str,
    out: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual for W's rows in planes."""
    if are_few(a, planes.shape[0]):
        return product_of_few(a, planes, kind, bias, residual, out)
    num_tokens, num_weights = a.shape
    if a.dtype == torch.float32 or num_tokens >= MANY:
        if bias is None and residual is None:
            return product_by_torch(a, planes, kind, out=out)
        y = a.new_empty((num_tokens, planes.shape[0])) if out is None else out
        sums = torch.empty(y.shape, dtype=torch.float32, device=a.device)
        product_by_torch(a, planes, kind, out=sums)
        return add_partials(y, sums[None], bias, residual)
    config = choose_config(file_kind(kind), num_tokens, planes.shape[0], num_weights, a.device)
    return mma_quant(a, planes, kind, config, bias=bias, residual=residual, out=out)
