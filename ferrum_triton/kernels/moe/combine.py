"""Combining experts' outputs: float32 sums over a token's slots, always in their order."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import combine as ops

# 8 elements a thread, 16 bytes of 16-bit values: one load for each of the unrolled slots.
BLOCK = 1024


@triton.jit
def sum_slots(
    slots_ptr, weights_ptr, stride_slots_slot, h, mask, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Σ_k weights[k] · slots[k], [BLOCK_H] float32."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + k).to(tl.float32)
        total += weight * tl.load(slots_ptr + h, mask=mask, other=0.0).to(tl.float32)
        slots_ptr += stride_slots_slot  # k * stride could pass int32
    return total


@triton.jit
def token_and_columns(hidden_size, BLOCK_H: tl.constexpr):
    """The token of this program and its columns, with their mask."""
    blocks_per_token = tl.cdiv(hidden_size, BLOCK_H)
    token = (tl.program_id(0) // blocks_per_token).to(tl.int64)
    h = tl.program_id(0) % blocks_per_token * BLOCK_H + tl.arange(0, BLOCK_H)
    return token, h, h < hidden_size


@kernel
def _moe_combine_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    packed_ptr,  # [num_rows, hidden_size]
    weights_ptr,  # [num_tokens, top_k]
    pairs_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_packed_row,
    stride_weights_token,
    stride_pairs_token,
    num_rows,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token, h, mask = token_and_columns(hidden_size, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(pairs_ptr + token * stride_pairs_token + k).to(tl.int64)
        known = (row >= 0) & (row < num_rows)
        weight = tl.load(weights_ptr + token * stride_weights_token + k).to(tl.float32)
        x = tl.load(packed_ptr + row * stride_packed_row + h, mask=mask & known, other=0.0)
        total += tl.where(known, weight, 0.0) * x.to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + h, total.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _weighted_sum_kernel(
    y_ptr,  # [num_tokens, hidden_size]; the residual, updated, if ADD
    slots_ptr,  # [num_tokens, top_k, hidden_size]
    weights_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_slots_token,
    stride_slots_slot,
    stride_weights_token,
    hidden_size,
    ADD: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,  # this kernel may start before the end of the one before
):
    if EARLY:
        gdc_wait()
    token, h, mask = token_and_columns(hidden_size, BLOCK_H)
    slots_ptr += token * stride_slots_token
    weights_ptr += token * stride_weights_token
    y = sum_slots(slots_ptr, weights_ptr, stride_slots_slot, h, mask, TOP_K, BLOCK_H)
    y_row = y_ptr + token * stride_y_token + h
    if ADD:
        y += tl.load(y_row, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("eps",))
def _weighted_sum_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    residual_ptr,  # [num_tokens, hidden_size], updated
    slots_ptr,  # [num_tokens, top_k, hidden_size]
    weights_ptr,  # [num_tokens, top_k]
    norm_weight_ptr,  # [hidden_size]
    stride_y_token,
    stride_residual_token,
    stride_slots_token,
    stride_slots_slot,
    stride_weights_token,
    hidden_size,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    residual_row = residual_ptr + token * stride_residual_token + h
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + h, mask=mask, other=0.0).to(tl.float32)

    slots_ptr += token * stride_slots_token
    weights_ptr += token * stride_weights_token
    added = sum_slots(slots_ptr, weights_ptr, stride_slots_slot, h, mask, TOP_K, BLOCK_H)
    stored = (residual + added).to(residual_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / hidden_size + eps)

    tl.store(residual_row, stored, mask=mask)
    y = total * rstd * norm_weight
    tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)


def _block(hidden_size: int) -> int:
    return min(next_power_of_2(hidden_size), BLOCK)


def _warps(block: int) -> int:
    return max(block // 256, 1)


@ops.moe_combine.impl("triton")
def moe_combine(
    packed: Tensor, pairs: Tensor, weights: Tensor, *, out: Tensor | None = None
) -> Tensor:
    (num_tokens, top_k), (num_rows, hidden_size) = pairs.shape, packed.shape
    y = packed.new_empty(num_tokens, hidden_size) if out is None else out
    if y.numel() == 0:
        return y
    block = _block(hidden_size)
    _moe_combine_kernel.launch(
        (num_tokens * cdiv(hidden_size, block),),
        y,
        packed,
        weights,
        pairs,
        y.stride(0),
        packed.stride(0),
        weights.stride(0),
        pairs.stride(0),
        num_rows,
        hidden_size,
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=_warps(block),
    )
    return y


def _launch_sum(y: Tensor, slots: Tensor, weights: Tensor, add: bool) -> None:
    num_tokens, top_k, hidden_size = slots.shape
    if num_tokens * hidden_size == 0:
        return
    block = _block(hidden_size)
    early = can_overlap(slots.device)
    _weighted_sum_kernel.launch(
        (num_tokens * cdiv(hidden_size, block),),
        y,
        slots,
        weights,
        y.stride(0),
        slots.stride(0),
        slots.stride(1),
        weights.stride(0),
        hidden_size,
        ADD=add,
        TOP_K=top_k,
        BLOCK_H=block,
        EARLY=early,
        num_warps=_warps(block),
        **({"launch_pdl": True} if early else {}),
    )


@ops.weighted_sum.impl("triton")
def weighted_sum(slots: Tensor, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = slots.new_empty(slots.shape[0], slots.shape[2]) if out is None else out
    _launch_sum(y, slots, weights, add=False)
    return y


@ops.weighted_sum_residual.impl("triton")
def weighted_sum_residual(slots: Tensor, weights: Tensor, residual: Tensor) -> None:
    _launch_sum(residual, slots, weights, add=True)


@ops.weighted_sum_residual_norm.impl("triton")
def weighted_sum_residual_norm(
    slots: Tensor,
    weights: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, top_k, hidden_size = slots.shape
    y = slots.new_empty(num_tokens, hidden_size) if out is None else out
    if y.numel() == 0:
        return y
    block = next_power_of_2(hidden_size)
    _weighted_sum_norm_kernel.launch(
        (num_tokens,),
        y,
        residual,
        slots,
        weights,
        norm_weight,
        y.stride(0),
        residual.stride(0),
        slots.stride(0),
        slots.stride(1),
        weights.stride(0),
        hidden_size,
        float(eps),
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y
