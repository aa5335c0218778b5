"""Tokens by their experts' weights in FP8.

Few pairs are a row of activations each (:mod:`ferrum_triton.kernels.fp8.gemv`). More are sorted by
expert, as of experts in 16 bits (:mod:`ferrum_triton.kernels.moe.dense`), and a program has a tile
of a product; activations become codes by a launch before.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.fp8.codes import BLOCK, multiplies_codes, operands_of, quantised
from ferrum_triton.kernels.fp8.experts_config import GATE_UP_TILES, TILES
from ferrum_triton.kernels.fp8.gemv import gemv, stack_strides
from ferrum_triton.kernels.fp8.product import group_sums, load_group, of_rows, of_tokens
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.dense import blocks_of, clear_pairs
from ferrum_triton.kernels.moe.prepare import Result
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.fp8 import experts as ops
from ferrum_triton.quant import fp8


@triton.jit
def _halves(sums, BLOCK_N: tl.constexpr, TOKENS_TALL: tl.constexpr):
    """Sums of gate's rows and of up's, of which a tile has eight and eight in turns.

    A thread has sums of both, so that none is moved.
    """
    if TOKENS_TALL:
        apart = tl.reshape(sums, [sums.shape[0], BLOCK_N // 8, 2, 8])
        gate, up = tl.split(tl.permute(apart, (0, 1, 3, 2)))
        gate = tl.reshape(gate, [sums.shape[0], BLOCK_N])
        up = tl.reshape(up, [sums.shape[0], BLOCK_N])
    else:
        apart = tl.reshape(sums, [BLOCK_N // 8, 2, 8, sums.shape[1]])
        gate, up = tl.split(tl.permute(apart, (0, 2, 3, 1)))
        gate = tl.reshape(gate, [BLOCK_N, sums.shape[1]])
        up = tl.reshape(up, [BLOCK_N, sums.shape[1]])
    return gate, up


@kernel(dynamic=("num_pairs", "num_blocks"))
def _fp8_experts_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    codes_ptr,  # [rows, k] as operands_of has them, a row a token or a row a pair
    steps_ptr,  # float32 [groups, rows], scales of codes
    weights_ptr,  # [num_experts, n, k], alike; of gate, where there are two
    scales_ptr,  # float32 [num_experts, row_blocks, groups]
    up_ptr,  # as weights_ptr, or None
    up_scales_ptr,
    ids_ptr,  # [num_tokens, top_k]
    sorted_ptr,  # int32 [num_blocks, BLOCK_M] pairs
    experts_ptr,  # int32 [num_blocks], -1 of a block that is none
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
    BLOCK_N: tl.constexpr,  # of y; at most a block of weights
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
    behind = tl.program_id(0) - num_blocks * tiles_n
    if behind >= 0:
        result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
        clear_pairs(
            result, ids_ptr, stride_ids_token, behind, num_pairs, num_experts, TOP_K, BLOCK_N
        )
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_ptr + block.to(tl.int64) * BLOCK_M + entry).to(tl.int64)
    known = pair < num_pairs
    groups = tl.cdiv(num_cols, BLOCK)
    code_row = pair if PER_SLOT else pair // TOP_K
    code_rows = num_pairs if PER_SLOT else num_pairs // TOP_K
    k = tl.arange(0, BLOCK)
    a_at = codes_ptr + code_row[None, :] * stride_codes_row + k[:, None]
    step_at = steps_ptr + tl.minimum(code_row, code_rows - 1)
    row_block = first_row // BLOCK
    w_at = weights_ptr + expert * strides.expert
    scale_at = scales_ptr + expert * strides.scales_expert + row_block * strides.scales_row
    if GATED:
        local = tl.arange(0, 2 * BLOCK_N)
        row = tl.minimum(first_row + local // 16 * 8 + local % 8, num_rows - 1)
        up_at = up_ptr + expert * up_strides.expert
        is_up = local // 8 % 2 == 1
        w_at = tl.where(is_up, up_at + row * up_strides.row, w_at + row * strides.row)
        up_scale_at = up_scales_ptr + expert * up_strides.scales_expert
        up_scale_at += row_block * up_strides.scales_row
        up_scale = tl.load(up_scale_at)
    else:
        w_at += tl.minimum(n, num_rows - 1) * strides.row
    w_at = w_at[:, None] + k[None, :]
    if TOKENS_TALL:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros(acc.shape, tl.float32)
    step = tl.load(step_at)
    scale = tl.load(scale_at)
    for group in range(groups):
        a = load_group(a_at, group * BLOCK, num_cols, known, MASKED, 0)
        w = load_group(w_at, group * BLOCK, num_cols, None, MASKED, 1)
        # Asked for a step ahead, so that no product waits for its scales.
        later = tl.minimum(group + 1, groups - 1)
        step_later = tl.load(step_at + later.to(tl.int64) * code_rows)
        scale_later = tl.load(scale_at + later)
        sums = group_sums(w, a, TOKENS_TALL, NATIVE)
        if GATED:
            up_scale_later = tl.load(up_scale_at + later)
            sums, up = _halves(sums, BLOCK_N, TOKENS_TALL)
            up_acc += up * of_tokens(step * up_scale, TOKENS_TALL)
            up_scale = up_scale_later
        acc += sums * of_tokens(step * scale, TOKENS_TALL)
        step, scale = step_later, scale_later
    pdl_trigger(PDL)
    if GATED:
        acc = activated(acc, ACTIVATION) * up_acc
    y_row = y_ptr + pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot
    y_row, known = of_tokens(y_row, TOKENS_TALL), of_tokens(known, TOKENS_TALL)
    n = of_rows(n, TOKENS_TALL)
    tl.store(y_row + n, acc.to(y_ptr.dtype.element_ty), mask=known & (n < num_rows))


def _by_hopper(
    y: Tensor,
    a: Tensor,
    stacks: tuple[Tensor, ...],
    ids: Tensor,
    config: Config,
    activation: str,
) -> bool:
    """y ← as of :func:`_launch` by the kernel in Gluon, where it can take them; whether it can."""
    from ferrum_triton.kernels.hopper import experts, experts_maps

    if not experts_maps.maps(*stacks[::2]):
        return False
    codes, steps = quantised(a)
    codes, *weights = operands_of(True, codes, *stacks[::2])
    more = {"up": weights[1], "up_scales": stacks[3]} if activation else {}
    experts.multiply_pairs(
        y,
        codes.view(a.shape),
        ids,
        weights[0],
        config,
        steps=steps,
        scales=stacks[1],
        activation=activation,
        **more,
    )
    return True


def _launch(
    y: Tensor,
    a: Tensor,
    stacks: tuple[Tensor, ...],
    ids: Tensor,
    tunable: Tunable,
    activation: str = "",
) -> Tensor:
    """y ← the products of pairs with their experts, or what ``activation`` makes of gate and up.

    Args:
        stacks: weights and scales; with ``activation`` those of gate and then of up.
    """
    num_pairs, num_rows, num_cols = ids.numel(), y.shape[2], a.shape[-1]
    weights, scales, up, up_scales = stacks if activation else (*stacks, *stacks)
    native = multiplies_codes(a)
    shape = (native, num_pairs, len(weights), num_rows, num_cols)
    config = tunable.pick(a.device, *shape)
    if config["path"] == "hopper":
        if _by_hopper(y, a, stacks, ids, config, activation):
            return y
        config = tunable.heuristic(gpu_of(a.device), *shape)
    if config["path"] == "gemv":
        gemv(y, a, stacks, config, ids, activation)
        return y
    options = {name: value for name, value in config.items() if name != "path"}
    codes, steps = quantised(a)
    codes, of_first, of_up = operands_of(native, codes, weights, up)
    blocks = blocks_of(ids, weights.shape[0], config)
    _fp8_experts_kernel.launch(
        (blocks.count * cdiv(num_rows, config["BLOCK_N"]) + blocks.clearing,),
        y_ptr=y,
        codes_ptr=codes,
        steps_ptr=steps,
        weights_ptr=of_first,
        scales_ptr=scales,
        up_ptr=of_up if activation else None,
        up_scales_ptr=up_scales if activation else None,
        ids_ptr=ids,
        sorted_ptr=blocks.pairs,
        experts_ptr=blocks.experts,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_codes_row=codes.stride(0),
        strides=stack_strides(weights, scales),
        up_strides=stack_strides(up, up_scales),
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
        NATIVE=native,
        **options,
    )
    return y


@ops.gemm_moe_id_fp8_128x128.impl("triton")
def gemm_moe_id_fp8_128x128(
    a: Tensor, weights: Tensor, scales: Tensor, ids: Tensor, *, out: Tensor | None = None
) -> Tensor:
    _, num_rows, num_cols = weights.shape
    y = a.new_empty((*ids.shape, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_cols == 0:
        return y.zero_()
    return _launch(y, a, (weights, scales), ids, TILES)


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
    _, num_rows, num_cols = gate_weights.shape
    y = a.new_empty((*ids.shape, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_cols == 0:
        return y.zero_()
    stacks = (gate_weights, gate_scales, up_weights, up_scales)
    return _launch(y, a, stacks, ids, GATE_UP_TILES, activation)
