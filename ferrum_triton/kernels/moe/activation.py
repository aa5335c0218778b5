"""The activation of experts whose products have biases: a program takes a block of one pair."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise_choices import tunable_blocks
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops.moe import activation as ops

_BLOCKS = tunable_blocks("clamped_swiglu_moe_id", ("num_pairs", "intermediate_size"))


@triton.jit
def clamped_swiglu(g, u, alpha, limit):
    """(u + 1) · g · sigmoid(alpha · g), g at most limit and u from -limit to limit; float32."""
    # tl.minimum(g, limit) of a NaN would be limit.
    g = tl.where(g > limit, limit, g)
    u = tl.where(u < -limit, -limit, u)
    u = tl.where(u > limit, limit, u)
    return (u + 1.0) * g * tl.sigmoid(alpha * g)


@kernel(dynamic=("alpha", "limit"))
def _clamped_swiglu_kernel(
    y_ptr,  # [num_tokens, top_k, intermediate_size]
    gate_ptr,  # [num_tokens, top_k, intermediate_size]
    up_ptr,  # [num_tokens, top_k, intermediate_size]
    gate_bias_ptr,  # [num_experts, intermediate_size]
    up_bias_ptr,  # [num_experts, intermediate_size]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_y_slot,
    stride_gate_token,
    stride_gate_slot,
    stride_up_token,
    stride_up_slot,
    stride_gate_bias_expert,
    stride_up_bias_expert,
    stride_ids_token,
    top_k,
    num_experts,
    intermediate_size,
    alpha,
    limit,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = (u + 1) · g · sigmoid(alpha · g)"""
    pdl_trigger(PDL)
    blocks_per_pair = tl.cdiv(intermediate_size, BLOCK_C)
    pair = tl.program_id(0) // blocks_per_pair
    token, slot = (pair // top_k).to(tl.int64), (pair % top_k).to(tl.int64)
    i = tl.program_id(0) % blocks_per_pair * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = i < intermediate_size
    pdl_wait(PDL)

    expert = tl.load(ids_ptr + token * stride_ids_token + slot).to(tl.int64)
    biased = mask & (expert >= 0) & (expert < num_experts)
    gate_bias_row = gate_bias_ptr + expert * stride_gate_bias_expert
    up_bias_row = up_bias_ptr + expert * stride_up_bias_expert
    gate_row = gate_ptr + token * stride_gate_token + slot * stride_gate_slot
    up_row = up_ptr + token * stride_up_token + slot * stride_up_slot

    g = tl.load(gate_row + i, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_row + i, mask=mask, other=0.0).to(tl.float32)
    g += tl.load(gate_bias_row + i, mask=biased, other=0.0).to(tl.float32)
    u += tl.load(up_bias_row + i, mask=biased, other=0.0).to(tl.float32)
    y = clamped_swiglu(g, u, alpha, limit)
    y_row = y_ptr + token * stride_y_token + slot * stride_y_slot
    tl.store(y_row + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@ops.clamped_swiglu_moe_id.impl("triton")
def clamped_swiglu_moe_id(
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor,
    up_bias: Tensor,
    ids: Tensor,
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    num_tokens, top_k, intermediate_size = gate.shape
    config = _BLOCKS.pick(y.device, num_tokens * top_k, intermediate_size)
    _clamped_swiglu_kernel.launch(
        (num_tokens * top_k * cdiv(intermediate_size, config["BLOCK_C"]),),
        y_ptr=y,
        gate_ptr=gate,
        up_ptr=up,
        gate_bias_ptr=gate_bias,
        up_bias_ptr=up_bias,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_gate_token=gate.stride(0),
        stride_gate_slot=gate.stride(1),
        stride_up_token=up.stride(0),
        stride_up_slot=up.stride(1),
        stride_gate_bias_expert=gate_bias.stride(0),
        stride_up_bias_expert=up_bias.stride(0),
        stride_ids_token=ids.stride(0),
        top_k=top_k,
        num_experts=gate_bias.shape[0],
        intermediate_size=intermediate_size,
        alpha=float(alpha),
        limit=float(limit),
        **config,
    )
    return y
