"""A token's experts in FP8 and the sum over its slots: one launch for few tokens.

A program has a token and some rows of all of its experts, whose codes are in flight at the same
time. It makes the codes of all slots' activations by itself, so that no launch goes before it, and
multiplies them as :mod:`ferrum_triton.kernels.fp8.gemv` does.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.fp8.codes import BLOCK, multiplies_codes, scaled_groups
from ferrum_triton.kernels.fp8.experts import gemm_moe_id_fp8_128x128
from ferrum_triton.kernels.fp8.gemv import (
    are_words,
    load_activations,
    load_scales,
    load_words,
    rounded_to_e4m3,
    scaled_words,
    stack_strides,
    with_products,
)
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.combine import launch_sum
from ferrum_triton.kernels.moe.dense_sum import ask_ahead, chosen, lines_of
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.sum_config import FP8_SUMS
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.fp8 import experts as ops


@kernel(dynamic=("num_tokens",))
def _fp8_sum_kernel(
    y_ptr,  # [num_tokens, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    weights_ptr,  # uint8 [num_experts, n, k]
    scales_ptr,  # float32 [num_experts, row_blocks, groups]
    slot_weights_ptr,  # [num_tokens, top_k]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    strides,  # StackStrides of weights
    stride_slot_weights_token,
    stride_ids_token,
    num_experts,
    num_rows,
    num_cols,
    num_tokens,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # power of two >= TOP_K
    BLOCK_N: tl.constexpr,  # at most a block of weights
    BLOCK_K: tl.constexpr,  # whole groups
    LINES: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether rows of weights begin and end at words
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS_OF_GROUPS: tl.constexpr = SLOTS * BLOCK_K // BLOCK
    # Programs side by side have the same rows of matrices.
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    first_row = (tl.program_id(0) // num_tokens).to(tl.int64) * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    slot = tl.arange(0, SLOTS)
    of_token = ids_ptr + token * stride_ids_token
    if LINES > 0:
        ask_ahead(
            weights_ptr,
            row,
            of_token,
            slot,
            strides.expert,
            strides.row,
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
    end = tl.where(found.known, num_cols, 0)[:, None]
    x_at = a_ptr + token * stride_a_token + slot.to(tl.int64)[:, None, None] * stride_a_slot
    w_at = weights_ptr + found.expert[:, None, None] * strides.expert
    w_at += row[None, :, None] * strides.row
    scale_at = scales_ptr + found.expert[:, None] * strides.scales_expert
    scale_at += first_row // BLOCK * strides.scales_row
    sums = tl.zeros([SLOTS, BLOCK_N, BLOCK_K // 4], tl.float32)
    # All that a step takes is asked for a step ahead.
    w = load_words(w_at, 0, end[:, :, None], BLOCK_K, ALIGNED)
    x = load_activations(x_at, 0, end[:, :, None], BLOCK_K)
    scale = load_scales(scale_at, 0, end, BLOCK_K)
    for column in range(0, num_cols, BLOCK_K):
        later = column + BLOCK_K
        y, step = scaled_groups(tl.reshape(x, [ROWS_OF_GROUPS, BLOCK]))
        y = rounded_to_e4m3(y, NATIVE)
        x = load_activations(x_at, later, end[:, :, None], BLOCK_K)
        w_later = load_words(w_at, later, end[:, :, None], BLOCK_K, ALIGNED)
        t = ()
        for part in tl.static_range(4):
            fourth = scaled_words(y, step * tl.reshape(scale, [ROWS_OF_GROUPS]))[part]
            t += (tl.reshape(fourth, [SLOTS, 1, BLOCK_K // 4]),)
        sums = with_products(sums, w, t, NATIVE)
        scale = load_scales(scale_at, later, end, BLOCK_K)
        w = w_later
    products = tl.sum(sums, axis=2)
    total = tl.sum(products * found.weight[:, None], axis=0)
    y_at = y_ptr + token * stride_y_token + n
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=n < num_rows)


@ops.gemm_moe_id_sum_fp8_128x128.impl("triton")
def gemm_moe_id_sum_fp8_128x128(
    a: Tensor,
    weights: Tensor,
    scales: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
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
    native = multiplies_codes(a)
    config = FP8_SUMS.pick(a.device, native, num_tokens, top_k, num_rows, num_cols)
    if config["path"] == "slots":
        slots = gemm_moe_id_fp8_128x128(a, weights, scales, ids)
        launch_sum(y, slots, slot_weights, ids, num_experts=num_experts)
        return y
    codes = weights.view(torch.uint8)
    _fp8_sum_kernel.launch(
        (num_tokens * cdiv(num_rows, config["BLOCK_N"]),),
        y_ptr=y,
        a_ptr=a,
        weights_ptr=codes,
        scales_ptr=scales,
        slot_weights_ptr=slot_weights,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        strides=stack_strides(weights, scales),
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
        ALIGNED=are_words(codes),
        NATIVE=native,
        num_warps=config["num_warps"],
    )
    return y
