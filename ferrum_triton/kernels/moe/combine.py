"""Combining experts' outputs: float32 sums over a token's slots, always in their order.

The last kernel of a MoE layer: y[t] = Σ_s weights[t, s] · slots[t, s], optionally added to the
residual stream and normalised.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.add_norm import NormedTokens, products_of_norm
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.slots import sum_slots
from ferrum_triton.ops.moe import combine as ops

# 8 elements a thread, 16 bytes of 16-bit values: one load for each of the unrolled slots.
BLOCK = 1024
# Tokens up to which a sum before packed products has a launch of its own, which divides a token
# among programs. Joined to the norm, a step of eight layers of Qwen3-30B-A3B's shape in Q4_K takes
# 1,123 us for 16 sequences, and 1,112 before; for 32, whose experts' launches became fewer too,
# 1,510 and 1,530 (``bench.timed_step.replay_us``, H200, 8b1a4f1 beside 8d1a382).
FEW = 16


@kernel
def _weighted_sum_kernel(
    y_ptr,  # [num_tokens, hidden_size]; the residual, updated, if ADD
    slots_ptr,  # [num_tokens, top_k, hidden_size]; of rows [num_rows, hidden_size]
    weights_ptr,  # [num_tokens, top_k]
    pairs_ptr,  # [num_tokens, top_k], rows of slots, or with OWN the experts of slots; or None
    stride_y_token,
    stride_slots_token,
    stride_slots_slot,  # of rows from one to the next
    stride_weights_token,
    stride_pairs_token,
    num_rows,  # or with OWN num_experts
    hidden_size,
    ADD: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OWN: tl.constexpr,  # whether slots are a token's own, whatever pairs there are
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    blocks_per_token = tl.cdiv(hidden_size, BLOCK_H)
    token = (tl.program_id(0) // blocks_per_token).to(tl.int64)
    h = tl.program_id(0) % blocks_per_token * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    weights_ptr += token * stride_weights_token
    if pairs_ptr is not None:
        pairs_ptr += token * stride_pairs_token
    slots_ptr += token * stride_slots_token
    y = sum_slots(
        slots_ptr,
        weights_ptr,
        pairs_ptr,
        stride_slots_slot,
        num_rows,
        h,
        mask,
        TOP_K,
        BLOCK_H,
        OWN,
    )
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
    PDL: tl.constexpr,
):
    """residual += Σ_s weights[s] · slots[s]; y = residual / rms(residual) · norm_weight."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    residual_row = residual_ptr + token * stride_residual_token + h
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + h, mask=mask, other=0.0).to(tl.float32)

    slots_ptr += token * stride_slots_token
    weights_ptr += token * stride_weights_token
    added = sum_slots(slots_ptr, weights_ptr, None, stride_slots_slot, 0, h, mask, TOP_K, BLOCK_H)
    stored = (residual + added).to(residual_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / hidden_size + eps)

    tl.store(residual_row, stored, mask=mask)
    y = total * rstd * norm_weight
    tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_sum(
    y: Tensor,
    slots: Tensor,
    weights: Tensor,
    pairs: Tensor | None = None,
    *,
    num_experts: int = 0,
    add: bool = False,
) -> None:
    """y ← the weighted sum of slots, or of rows; or y ← y plus that.

    Args:
        y: [num_tokens, hidden_size].
        slots: [num_tokens, top_k, hidden_size]; or rows, [num_rows, hidden_size].
        weights: [num_tokens, top_k].
        pairs: [num_tokens, top_k], the rows; or beside slots their experts.
        num_experts: how many experts there are, where pairs names the experts of slots. A slot
            with another id adds nothing, whatever its weight.
        add: whether y is added to.
    """
    (num_tokens, top_k), hidden_size = weights.shape, slots.shape[-1]
    if num_tokens * hidden_size == 0:
        return
    block = min(next_power_of_2(hidden_size), BLOCK)
    _weighted_sum_kernel.launch(
        (num_tokens * cdiv(hidden_size, block),),
        y_ptr=y,
        slots_ptr=slots,
        weights_ptr=weights,
        pairs_ptr=pairs,
        stride_y_token=y.stride(0),
        stride_slots_token=slots.stride(0) if slots.dim() == 3 else 0,
        stride_slots_slot=slots.stride(-2),
        stride_weights_token=weights.stride(0),
        stride_pairs_token=0 if pairs is None else pairs.stride(0),
        num_rows=num_experts or slots.shape[0],
        hidden_size=hidden_size,
        ADD=add,
        TOP_K=top_k,
        BLOCK_H=block,
        OWN=num_experts > 0,
        num_warps=max(block // 256, 1),
    )


@ops.moe_combine.impl("triton")
def moe_combine(
    packed: Tensor, pairs: Tensor, weights: Tensor, *, out: Tensor | None = None
) -> Tensor:
    y = packed.new_empty(pairs.shape[0], packed.shape[1]) if out is None else out
    launch_sum(y, packed, weights, pairs)
    return y


@ops.weighted_sum.impl("triton")
def weighted_sum(slots: Tensor, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = slots.new_empty(slots.shape[0], slots.shape[2]) if out is None else out
    launch_sum(y, slots, weights)
    return y


@ops.weighted_sum_residual.impl("triton")
def weighted_sum_residual(slots: Tensor, weights: Tensor, residual: Tensor) -> None:
    launch_sum(residual, slots, weights, add=True)


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
        y_ptr=y,
        residual_ptr=residual,
        slots_ptr=slots,
        weights_ptr=weights,
        norm_weight_ptr=norm_weight,
        stride_y_token=y.stride(0),
        stride_residual_token=residual.stride(0),
        stride_slots_token=slots.stride(0),
        stride_slots_slot=slots.stride(1),
        stride_weights_token=weights.stride(0),
        hidden_size=hidden_size,
        eps=float(eps),
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y


class MixedTokens(NormedTokens):
    """h = rms_norm(residual ← residual + x) · weight, where x is the weighted sum over slots."""

    def __init__(
        self, residual: Tensor, slots: Tensor, weights: Tensor, norm_weight: Tensor, eps: float
    ) -> None:
        super().__init__(residual, slots[:, 0], norm_weight, eps)
        self._slots, self._weights = slots, weights

    def _added(self) -> Tensor:
        return weighted_sum(self._slots, self._weights)

    def _terms(self) -> dict[str, Any]:
        slots, weights = self._slots, self._weights
        return {
            "x_ptr": slots,
            "slot_weights_ptr": weights,
            "stride_x_token": slots.stride(0),
            "stride_x_slot": slots.stride(1),
            "stride_slot_weights_token": weights.stride(0),
            "TOP_K": slots.shape[1],
        }


@ops.weighted_sum_norm_quant_qkv.impl("triton")
def weighted_sum_norm_quant_qkv(
    residual: Tensor,
    slots: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    eps: float,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor | None,
    q_kind: str,
    k_kind: str,
    v_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, top_k, _ = slots.shape
    if num_tokens <= FEW or top_k == 0:
        tokens = NormedTokens(residual, weighted_sum(slots, weights), norm_weight, eps)
    else:
        tokens = MixedTokens(residual, slots, weights, norm_weight, eps)
    matrices = (q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)
    return products_of_norm(tokens, matrices, out)
