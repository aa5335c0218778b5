"""A norm whose result tensor cores multiply next, arranged for them where it is computed.

Chosen for the products with a layer's weights behind a norm, ``add_rms_norm_quant_qkv`` and
``add_rms_norm_quant_gate_up_silu``, where three tokens or more go to tensor cores: one launch where
:mod:`ferrum_triton.kernels.norm` and :mod:`ferrum_triton.kernels.quant.activations` take one each.
The numbers are the same: the norm is rounded to the activations' dtype before it is arranged.

What is added before the norm may be a sum over slots that is yet to be taken, which the same launch
takes: ``weighted_sum_norm_quant_qkv`` (:mod:`ferrum_triton.kernels.moe.combine`).
"""

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.norm import (
    fused_add_rms_norm,
    inverse_rms,
    load_weight,
    residual_sum,
)
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import (
    LONGEST_BLOCK,
    Arranged,
    Order,
    Tokens,
    arrange,
    arranged,
    block_and_warps,
    clear_tickets,
    factor_of,
    inverse_of,
    room_for,
    store_arranged,
)
from ferrum_triton.kernels.quant.gemv_fused import gate_up, side_by_side, stacked
from ferrum_triton.kernels.shadow import rms_norm_to
from ferrum_triton.kernels.slots import sum_slots
from ferrum_triton.ops import quant_fused as ops


@kernel(dynamic=("eps",))
def _add_norm_arrange_kernel(
    arranged_ptr,  # [m, padded k], float16
    sums_ptr,  # [m, their number], float16; or None
    factor_ptr,  # [m], float32
    tickets_ptr,  # [TICKETS], int32, or None
    residual_ptr,  # [m, k], updated
    x_ptr,  # [m, k]; with slot_weights [m, top_k, k], whose weighted sum is added
    slot_weights_ptr,  # [m, top_k], or None
    weight_ptr,  # [k]
    stride_residual_token,
    stride_x_token,
    stride_x_slot,
    stride_slot_weights_token,
    num_weights,
    num_padded,
    eps,
    ADDS: tl.constexpr,  # whether x is yet to be added
    TOP_K: tl.constexpr,  # slots of x
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    INTERLEAVE: tl.constexpr,  # tokens of which 32 elements each lie in turn; 0: end to end
    SUMS: tl.constexpr,  # as an Order has it
    BLOCK_K: tl.constexpr,  # power of two, >= num_padded
    PDL: tl.constexpr,
):
    """residual ← residual + x, rounded; its norm in x's dtype, arranged"""
    pdl_trigger(PDL)
    pdl_wait(PDL)
    clear_tickets(tickets_ptr)
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    mask = k < num_weights
    residual_row = residual_ptr + token * stride_residual_token
    x_row = x_ptr + token * stride_x_token
    if ADDS and slot_weights_ptr is not None:
        weights_row = slot_weights_ptr + token * stride_slot_weights_token
        x = sum_slots(x_row, weights_row, None, stride_x_slot, 0, k, mask, TOP_K, BLOCK_K)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # as a launch of its own would write it
        residual = tl.load(residual_row + k, mask=mask, other=0.0).to(tl.float32)
        stored = (residual + x).to(residual_ptr.dtype.element_ty)
    elif ADDS:
        stored = residual_sum(residual_row, x_row, k, mask, "")
    else:
        stored = tl.load(residual_row + k, mask=mask, other=0.0)
    total = stored.to(tl.float32)
    weight = load_weight(weight_ptr, k, num_weights).to(tl.float32)
    h = total * inverse_rms(total * total, num_weights, eps) * weight
    # Past the end 0 even if the root is infinite or NaN.
    h = tl.where(mask, h.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
    inverse = inverse_of(tl.abs(h).to(tl.int32, bitcast=True))
    to = Arranged(arranged_ptr, sums_ptr, factor_ptr)
    tl.store(to.factor + token, factor_of(inverse))
    in_order, sums = arranged(h, inverse, COLUMNS, HALVES, INTERLEAVE > 0, SUMS)
    store_arranged(to, token, 0, in_order, sums, num_padded, INTERLEAVE)
    if ADDS:
        tl.store(residual_row + k, stored, mask=mask)


class NormedTokens(Tokens):
    """h = rms_norm(residual ← residual + x) · weight; x is added when h is first asked for."""

    def __init__(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        super().__init__(x)
        self.residual, self.weight, self.eps = residual, weight, float(eps)
        self._is_added = False

    def values(self) -> Tensor:
        if self._is_added:
            return rms_norm_to(self.residual, self.weight, self.like.dtype, self.eps)
        self._is_added = True
        return fused_add_rms_norm(self.residual, self._added(), self.weight, self.eps)

    def _added(self) -> Tensor:
        """x."""
        return self.like

    def _terms(self) -> dict[str, Any]:
        """What the kernel that arranges takes x from."""
        return {
            "x_ptr": self.like,
            "slot_weights_ptr": None,
            "stride_x_token": self.like.stride(0),
            "stride_x_slot": 0,
            "stride_slot_weights_token": 0,
            "TOP_K": 1,
        }

    def _arrange(self, order: Order) -> Arranged:
        num_tokens, num_weights = self.like.shape
        if not 0 < num_weights <= LONGEST_BLOCK:
            return arrange(self.values(), order)
        # A program has the whole row in any case.
        order = order._replace(by_blocks=False)
        to = room_for(num_tokens, num_weights, self.like.device, order, splits_k=True)
        num_padded = to.x.shape[1]
        block, warps = block_and_warps(num_padded)
        _add_norm_arrange_kernel.launch(
            (num_tokens,),
            arranged_ptr=to.x,
            sums_ptr=to.sums,
            factor_ptr=to.factor,
            tickets_ptr=to.tickets,
            residual_ptr=self.residual,
            weight_ptr=self.weight,
            stride_residual_token=self.residual.stride(0),
            **self._terms(),
            num_weights=num_weights,
            num_padded=num_padded,
            eps=self.eps,
            ADDS=not self._is_added,
            COLUMNS=order.words // order.halves,
            HALVES=order.halves,
            INTERLEAVE=order.interleave,
            SUMS=order.sums,
            BLOCK_K=block,
            num_warps=warps,
        )
        self._is_added = True
        return to


@ops.add_rms_norm_quant_gate_up_silu.impl("triton")
def add_rms_norm_quant_gate_up_silu(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = x.new_empty((x.shape[0], gate_blocks.shape[0])) if out is None else out
    tokens = NormedTokens(residual, x, norm_weight, eps)
    if y.numel():
        gate_up(tokens, [(gate_blocks, gate_kind), (up_blocks, up_kind)], activation, y)
    else:
        tokens.values()  # which adds x
    return y


@ops.add_rms_norm_quant_qkv.impl("triton")
def add_rms_norm_quant_qkv(
    residual: Tensor,
    x: Tensor,
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
    tokens = NormedTokens(residual, x, norm_weight, eps)
    matrices = (q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)
    return products_of_norm(tokens, matrices, out)


def products_of_norm(
    tokens: NormedTokens, matrices: Sequence[tuple[Tensor | None, str]], out: Tensor | None
) -> Tensor:
    """h · [W₁; W₂; W₃]ᵀ of the matrices there are; x is added to the residual in any case."""
    parts, like = stacked(*matrices), tokens.like
    num_rows = sum(blocks.shape[0] for blocks, _ in parts)
    y = like.new_empty((like.shape[0], num_rows)) if out is None else out
    if y.numel():
        side_by_side(tokens, parts, y)
    else:
        tokens.values()  # which adds x
    return y
