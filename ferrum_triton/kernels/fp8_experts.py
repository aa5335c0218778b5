"""Tokens by their experts' weights in FP8: one program per tile of a product.

Activations become codes by a launch of their own, as of one matrix
(:mod:`ferrum_triton.kernels.fp8`). Pairs come to tiles as of experts in 16 bits
(:mod:`ferrum_triton.kernels.moe.dense`): few are a tile each, more are sorted by expert first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.fp8 import BLOCK, multiplies_codes, placed, quantised, scaled_sums
from ferrum_triton.kernels.fp8_experts_config import GATE_UP_TILES, TILES
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.dense import blocks_of, clear_pairs, without_expert
from ferrum_triton.kernels.moe.prepare import Result
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import fp8_experts as ops
from ferrum_triton.quant import fp8


class StackStrides(NamedTuple):
    """Strides of a stack of matrices and of its scales, in elements."""

    expert: Any
    row: Any
    scales_expert: Any
    scales_row: Any


@triton.jit
def _codes(at, column, num_cols, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Bytes of a group, whose columns lie along AXIS; past the last, 0."""
    if MASKED:
        inside = tl.expand_dims(column + tl.arange(0, BLOCK) < num_cols, 1 - AXIS)
        codes = tl.load(at + column, mask=inside, other=0)
    else:
        codes = tl.load(at + column)
    return codes


@kernel(dynamic=("num_pairs", "num_blocks"))
def _fp8_experts_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    codes_ptr,  # uint8 [rows, k], a row a token or a row a pair
    steps_ptr,  # float32 [groups, rows], scales of codes
    weights_ptr,  # uint8 [num_experts, n, k]; of gate, where there are two
    scales_ptr,  # float32 [num_experts, row_blocks, groups]
    up_ptr,  # as weights_ptr, or None
    up_scales_ptr,
    ids_ptr,  # [num_tokens, top_k]
    sorted_ptr,  # int32 [num_blocks, BLOCK_M] pairs, or None where a tile is a pair
    experts_ptr,  # int32 [num_blocks], -1 of a block that is none; or None
    stride_y_token,
    stride_y_slot,
    stride_codes_row,
    strides,  # StackStrides of weights
    up_strides,  # StackStrides of up
    stride_ids_token,
    num_experts,
    num_rows,
    num_cols,
    num_pairs,
    num_blocks,
    TOP_K: tl.constexpr,
    PER_SLOT: tl.constexpr,  # whether codes have a row a pair
    ACTIVATION: tl.constexpr,  # of gate; "" of one matrix
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at most a block of weights
    TOKENS_TALL: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last group has columns past the end
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    # Programs that share rows of activations run side by side, and so do an expert's tiles.
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    first_row = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    entry = tl.arange(0, BLOCK_M)
    pdl_wait(PDL)
    if sorted_ptr is None:
        pair = tl.zeros([BLOCK_M], tl.int64) + block
        known = entry == 0
        expert = tl.load(ids_ptr + (block // TOP_K).to(tl.int64) * stride_ids_token + block % TOP_K)
        is_lost = without_expert(expert, num_experts)
    else:
        behind = tl.program_id(0) - num_blocks * tiles_n
        if behind >= 0:
            result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
            clear_pairs(
                result, ids_ptr, stride_ids_token, behind, num_pairs, num_experts, TOP_K, BLOCK_N
            )
            return
        expert = tl.load(experts_ptr + block)
        if expert < 0:
            return
        pair = tl.load(sorted_ptr + block.to(tl.int64) * BLOCK_M + entry).to(tl.int64)
        known = pair < num_pairs
        pair = tl.minimum(pair, num_pairs - 1)  # padding reads a row that is there
        is_lost = expert < 0  # false: programs without an expert have returned
    # Of a pair without an expert no weights are read: its sums stay zeros.
    groups = tl.cdiv(num_cols, BLOCK)
    end = tl.where(is_lost, 0, groups)
    expert = tl.where(is_lost, 0, expert).to(tl.int64)
    code_row = pair if PER_SLOT else pair // TOP_K
    code_rows = num_pairs if PER_SLOT else num_pairs // TOP_K
    k = tl.arange(0, BLOCK)
    a_at = codes_ptr + code_row[None, :] * stride_codes_row + k[:, None]
    step_at = steps_ptr + code_row
    row = tl.minimum(n, num_rows - 1)[:, None]
    row_block = first_row // BLOCK
    w_at = weights_ptr + expert * strides.expert + row * strides.row + k[None, :]
    scale_at = scales_ptr + expert * strides.scales_expert + row_block * strides.scales_row
    if GATED:
        up_at = up_ptr + expert * up_strides.expert + row * up_strides.row + k[None, :]
        up_scale_at = up_scales_ptr + expert * up_strides.scales_expert
        up_scale_at += row_block * up_strides.scales_row
    if TOKENS_TALL:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros(acc.shape, tl.float32)
    step = tl.load(step_at)
    scale = tl.load(scale_at)
    if GATED:
        up_scale = tl.load(up_scale_at)
    for group in range(end):
        a = _codes(a_at, group * BLOCK, num_cols, MASKED, 0)
        w = _codes(w_at, group * BLOCK, num_cols, MASKED, 1)
        # Asked for a step ahead, so that no product waits for its scales.
        later = tl.minimum(group + 1, groups - 1)
        step_later = tl.load(step_at + later.to(tl.int64) * code_rows)
        scale_later = tl.load(scale_at + later)
        acc += scaled_sums(w, a, step * scale, TOKENS_TALL, NATIVE)
        if GATED:
            v = _codes(up_at, group * BLOCK, num_cols, MASKED, 1)
            up_scale_later = tl.load(up_scale_at + later)
            up += scaled_sums(v, a, step * up_scale, TOKENS_TALL, NATIVE)
            up_scale = up_scale_later
        step, scale = step_later, scale_later
    pdl_trigger(PDL)
    if GATED:
        acc = activated(acc, ACTIVATION) * up
    acc = tl.where(is_lost, 0.0, acc)
    y_row = y_ptr + pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot
    y_row, n = placed(y_row, n, TOKENS_TALL)
    known, _ = placed(known, n, TOKENS_TALL)
    tl.store(y_row + n, acc.to(y_ptr.dtype.element_ty), mask=known & (n < num_rows))


def _stack(weights: Tensor, scales: Tensor) -> StackStrides:
    return StackStrides(*weights.stride()[:2], *scales.stride()[:2])


def _launch(
    y: Tensor,
    a: Tensor,
    stacks: tuple[Tensor, ...],
    ids: Tensor,
    config: Config,
    activation: str = "",
) -> Tensor:
    """y ← the products of pairs with their experts, or what ``activation`` makes of gate and up.

    Args:
        stacks: weights and scales; with ``activation`` those of gate and then of up.
    """
    num_pairs, num_rows, num_cols = ids.numel(), y.shape[2], a.shape[-1]
    weights, scales, up, up_scales = stacks if activation else (*stacks, *stacks)
    options = {name: value for name, value in config.items() if name != "path"}
    codes, steps = quantised(a)
    blocks = blocks_of(ids, weights.shape[0], config)
    _fp8_experts_kernel.launch(
        (blocks.count * cdiv(num_rows, config["BLOCK_N"]) + blocks.clearing,),
        y_ptr=y,
        codes_ptr=codes,
        steps_ptr=steps,
        weights_ptr=weights.view(codes.dtype),
        scales_ptr=scales,
        up_ptr=up.view(codes.dtype) if activation else None,
        up_scales_ptr=up_scales if activation else None,
        ids_ptr=ids,
        sorted_ptr=blocks.pairs,
        experts_ptr=blocks.experts,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_codes_row=codes.stride(0),
        strides=_stack(weights, scales),
        up_strides=_stack(up, up_scales),
        stride_ids_token=ids.stride(0),
        num_experts=len(weights),
        num_rows=num_rows,
        num_cols=num_cols,
        num_pairs=num_pairs,
        num_blocks=blocks.count,
        TOP_K=ids.shape[1],
        PER_SLOT=a.dim() == 3,
        ACTIVATION=activation,
        MASKED=num_cols % fp8.BLOCK != 0,
        NATIVE=multiplies_codes(a),
        **options,
    )
    return y


@ops.gemm_moe_id_fp8_128x128.impl("triton")
def gemm_moe_id_fp8_128x128(
    a: Tensor, weights: Tensor, scales: Tensor, ids: Tensor, *, out: Tensor | None = None
) -> Tensor:
    num_experts, num_rows, num_cols = weights.shape
    y = a.new_empty((*ids.shape, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_cols == 0:
        return y.zero_()
    shape = (multiplies_codes(a), ids.numel(), num_experts, num_rows, num_cols)
    return _launch(y, a, (weights, scales), ids, TILES.pick(a.device, *shape))


@ops.gemm_moe_id_gate_up_fp8_128x128.impl("triton")
def gemm_moe_id_gate_up_fp8_128x128(
    a: Tensor,
    gate_weights: Tensor,
    gate_scales: Tensor,
    up_weights: Tensor,
    up_scales: Tensor,
    ids: Tensor,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_experts, num_rows, num_cols = gate_weights.shape
    y = a.new_empty((*ids.shape, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_cols == 0:
        return y.zero_()
    shape = (multiplies_codes(a), ids.numel(), num_experts, num_rows, num_cols)
    stacks = (gate_weights, gate_scales, up_weights, up_scales)
    return _launch(y, a, stacks, ids, GATE_UP_TILES.pick(a.device, *shape), activation)
