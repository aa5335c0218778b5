"""Products of a few tokens with several matrices: one launch, or other kernels where it cannot be.

Gate and up are multiplied with the activation between them; Q, K and V lie side by side in y.
Chosen for whatever calls ``gemv_quant_gate_up_silu`` and ``gemv_quant_qkv``.
"""

import torch
from torch import Tensor

from ferrum_triton.kernels.elementwise import fused_gelu_tanh_mul_split, fused_silu_mul_split
from ferrum_triton.kernels.quant.gemm import gemm_quant
from ferrum_triton.kernels.quant.products import gate_up, side_by_side
from ferrum_triton.ops import quant_fused as ops
from ferrum_triton.quant.planes import PLANE_FORMATS


@ops.gemv_quant_gate_up_silu.impl("triton")
def gemv_quant_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, n = a.shape[0], gate_blocks.shape[0]
    y = a.new_empty((num_tokens, n)) if out is None else out
    if y.numel() == 0:
        return y
    if gate_kind in PLANE_FORMATS and up_kind in PLANE_FORMATS:
        parts = [(gate_blocks, gate_kind), (up_blocks, up_kind)]
        if gate_up(a, parts, activation, y):
            return y
    both = torch.empty((num_tokens, 2 * n), dtype=torch.float32, device=a.device)
    gemm_quant(a, gate_blocks, gate_kind, out=both[:, :n])
    gemm_quant(a, up_blocks, up_kind, out=both[:, n:])
    if activation == "silu":
        return fused_silu_mul_split(both, out=y)
    return fused_gelu_tanh_mul_split(both, out=y)


@ops.gemv_quant_qkv.impl("triton")
def gemv_quant_qkv(
    a: Tensor,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor,
    q_kind: str,
    k_kind: str,
    v_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    parts = [(q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)]
    parts = [(blocks, kind) for blocks, kind in parts if blocks is not None]
    counts = [blocks.shape[0] for blocks, _ in parts]
    y = a.new_empty((a.shape[0], sum(counts))) if out is None else out
    if y.numel() == 0:
        return y
    if all(kind in PLANE_FORMATS for _, kind in parts) and side_by_side(a, parts, y):
        return y
    for (blocks, kind), columns in zip(parts, y.split(counts, dim=1), strict=True):
        gemm_quant(a, blocks, kind, out=columns)
    return y
