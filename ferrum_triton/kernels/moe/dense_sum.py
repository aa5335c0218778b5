"""A token's experts in 16 or 32 bits and the sum over its slots: one launch for few tokens.

A program has a token and a few rows of all of its experts, whose weights are in flight at the same
time. Threads lie along K, and warps along a tile's first axis, slots: a thread loads an activation
once for all of its rows. With rows first, warps lay along those, and each step's weights went
through shared memory, as :mod:`ferrum_triton.kernels.sass` showed. Threads multiply-add in float32:
of one row of activations tensor cores would multiply fifteen of padding. Sums are added up over K,
and then over slots, at a program's end.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.moe.combine import launch_sum
from ferrum_triton.kernels.moe.dense import gemm_moe_id, without_expert
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.sum_config import SUMS
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import dense as ops

# Bytes of what L2 is asked for at a time.
LINE_BYTES = tl.constexpr(128)


class Chosen(NamedTuple):
    """The experts of a token's slots: their numbers, 0 of none; which there are; their weights."""

    expert: tl.tensor
    known: tl.tensor
    weight: tl.tensor


@triton.jit
def chosen(ids_ptr, slot_weights_ptr, slot, num_experts, TOP_K: tl.constexpr):
    """The experts of slots, of which those from TOP_K on are none, as :class:`Chosen`."""
    expert = tl.load(ids_ptr + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    is_lost = without_expert(expert, num_experts)
    weight = tl.load(slot_weights_ptr + slot, mask=~is_lost, other=0.0).to(tl.float32)
    return Chosen(tl.where(is_lost, 0, expert), ~is_lost, weight)


@triton.jit
def ask_ahead(
    weights_ptr,
    row,
    ids_ptr,
    slot,
    stride_expert,
    stride_row,
    num_experts,
    num_cols,
    TOP_K: tl.constexpr,
    LINES: tl.constexpr,
):
    """Ask L2 for the first LINES lines of rows of slots' experts, before the PDL wait.

    Ids may be those of the step before: they are bounded, and lead to nothing else.
    """
    LINE: tl.constexpr = 8 * LINE_BYTES // weights_ptr.dtype.element_ty.primitive_bitwidth
    expert = tl.load(ids_ptr + slot, mask=slot < TOP_K, other=0, cache_modifier=".cg")
    expert = tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int64)
    column = tl.minimum(tl.arange(0, LINES) * LINE, num_cols - 1)
    at = weights_ptr + expert[:, None, None] * stride_expert + row[None, :, None] * stride_row
    prefetch_l2(at + column[None, None, :])


@kernel(dynamic=("num_tokens",))
def _dense_sum_kernel(
    y_ptr,  # [num_tokens, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    weights_ptr,  # [num_experts, n, k]
    bias_ptr,  # [num_experts, n], or None
    slot_weights_ptr,  # [num_tokens, top_k]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_weights_expert,
    stride_weights_row,
    stride_bias_expert,
    stride_slot_weights_token,
    stride_ids_token,
    num_experts,
    num_rows,
    num_cols,
    num_tokens,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # power of two >= TOP_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs side by side have the same rows of matrices.
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    n = (tl.program_id(0) // num_tokens).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    slot = tl.arange(0, SLOTS)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    of_token = ids_ptr + token * stride_ids_token
    if LINES > 0:
        ask_ahead(
            weights_ptr,
            row,
            of_token,
            slot,
            stride_weights_expert,
            stride_weights_row,
            num_experts,
            num_cols,
            TOP_K,
            LINES,
        )
    pdl_wait(PDL)
    pdl_trigger(PDL)
    slot_weights = slot_weights_ptr + token * stride_slot_weights_token
    found = chosen(of_token, slot_weights, slot, num_experts, TOP_K)
    # Of a slot without an expert nothing is read: its sums stay zeros.
    end = tl.where(found.known, num_cols, 0)[:, None, None]
    a_at = a_ptr + token * stride_a_token + slot.to(tl.int64)[:, None, None] * stride_a_slot
    w_at = weights_ptr + found.expert[:, None, None] * stride_weights_expert
    w_at += row[None, :, None] * stride_weights_row
    sums = tl.zeros([SLOTS, BLOCK_N, BLOCK_K], tl.float32)
    # All that a step takes is asked for a step ahead.
    w = tl.load(w_at + k, mask=k < end, other=0.0, eviction_policy="evict_first")
    a = tl.load(a_at + k, mask=k < end, other=0.0)
    for column in range(0, num_cols, BLOCK_K):
        later = column + BLOCK_K + k
        w_later = tl.load(w_at + later, mask=later < end, other=0.0, eviction_policy="evict_first")
        a_later = tl.load(a_at + later, mask=later < end, other=0.0)
        sums += w.to(tl.float32) * a.to(tl.float32)
        w, a = w_later, a_later
    products = tl.sum(sums, axis=2)
    if bias_ptr is not None:
        bias_at = bias_ptr + found.expert[:, None] * stride_bias_expert + row[None, :]
        products += tl.load(bias_at, mask=found.known[:, None], other=0.0).to(tl.float32)
    y = tl.sum(products * found.weight[:, None], axis=0)
    y_at = y_ptr + token * stride_y_token + n
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=n < num_rows)


def lines_of(config: Config, a: Tensor, num_cols: int) -> int:
    """Lines of a row that are asked for ahead: none where launches do not overlap."""
    return config["LINES"] if num_cols and can_overlap(a.device) else 0


@ops.gemm_moe_id_sum.impl("triton")
def gemm_moe_id_sum(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_experts, num_rows, num_cols = weights.shape
    num_tokens, top_k = ids.shape
    y = a.new_empty(num_tokens, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if top_k == 0:
        return y.zero_()
    config = SUMS.pick(a.device, num_tokens, top_k, num_rows, num_cols, a.element_size())
    if config["path"] == "slots":
        slots = gemm_moe_id(a, weights, ids, bias)
        launch_sum(y, slots, slot_weights, ids, num_experts=num_experts)
        return y
    _dense_sum_kernel.launch(
        (num_tokens * cdiv(num_rows, config["BLOCK_N"]),),
        y_ptr=y,
        a_ptr=a,
        weights_ptr=weights,
        bias_ptr=bias,
        slot_weights_ptr=slot_weights,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_weights_expert=weights.stride(0),
        stride_weights_row=weights.stride(1),
        stride_bias_expert=0 if bias is None else bias.stride(0),
        stride_slot_weights_token=slot_weights.stride(0),
        stride_ids_token=ids.stride(0),
        num_experts=num_experts,
        num_rows=num_rows,
        num_cols=num_cols,
        num_tokens=num_tokens,
        TOP_K=top_k,
        SLOTS=next_power_of_2(top_k),
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=config["BLOCK_K"],
        LINES=lines_of(config, a, num_cols),
        num_warps=config["num_warps"],
    )
    return y
