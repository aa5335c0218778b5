"""Tokens by their experts' weights in 16 or 32 bits: one program per tile of a product.

A tile is some rows of one expert by some of its pairs, computed transposed: rows of weights are the
tall operand of the tensor cores, so that few pairs need little padding. Rows of activations are
gathered as they are read. Few pairs are a tile each. More are sorted by expert first, every expert
padded to whole tiles (:func:`~ferrum_triton.kernels.moe.pairs.aligned_pairs`). The grid has
room for any routing of that many pairs. Programs without a tile end at once. Programs after the
last tile clear the rows of pairs that have no expert.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.activation import clamped_swiglu
from ferrum_triton.kernels.moe.dense_config import GATE_UP_TILES, TILES
from ferrum_triton.kernels.moe.pairs import aligned_pairs
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.prepare import Result, clear_rows
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.moe import dense as ops

# Pairs that a program looks at whose rows may have to be cleared.
CLEARED_PAIRS = tl.constexpr(64)


class Blocks(NamedTuple):
    """Tiles' pairs: a pair each, or as many of one expert as a tile has, sorted.

    Attributes:
        pairs: int32 [num_blocks, BLOCK_M]; None where a tile is a pair.
        experts: int32 [num_blocks], -1 of a block that is none; None likewise.
        count: num_blocks.
        clearing: programs behind those of tiles, which clear rows of pairs without an expert.
    """

    pairs: Tensor | None
    experts: Tensor | None
    count: int
    clearing: int


def blocks_of(ids: Tensor, num_experts: int, config: Config) -> Blocks:
    """The tiles' pairs of a launch choice, by a launch that sorts them where they are sorted."""
    num_pairs = ids.numel()
    if config["path"] == "per_pair":
        return Blocks(None, None, num_pairs, 0)
    pairs, experts, _ = aligned_pairs(ids, num_experts, config["BLOCK_M"])
    return Blocks(pairs, experts, experts.shape[0], cdiv(num_pairs, CLEARED_PAIRS.value))


@triton.jit
def without_expert(expert, num_experts):
    return (expert < 0) | (expert >= num_experts)


@triton.jit
def clear_pairs(
    result,
    ids_ptr,
    stride_ids_token,
    number,
    num_pairs,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fill y's rows of pairs without an expert with zeros, of the CLEARED_PAIRS of a number."""
    pair = number.to(tl.int64) * CLEARED_PAIRS + tl.arange(0, CLEARED_PAIRS)
    named = ids_ptr + pair // TOP_K * stride_ids_token + pair % TOP_K
    expert = tl.load(named, mask=pair < num_pairs, other=0)
    clear_rows(result, pair, without_expert(expert, num_experts), TOP_K, BLOCK_N)


@kernel(dynamic=("num_pairs", "num_blocks", "alpha", "limit"))
def _expert_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    weights_ptr,  # [num_experts, n, k]; of gate and then up [num_experts, 2 n, k]
    bias_ptr,  # [num_experts, n] or [num_experts, 2 n], or None
    ids_ptr,  # [num_tokens, top_k]
    sorted_ptr,  # int32 [num_blocks, BLOCK_M] pairs, or None where a tile is a pair
    experts_ptr,  # int32 [num_blocks], -1 of a block that is none; or None
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's pairs share a row
    stride_weights_expert,
    stride_weights_row,
    stride_bias_expert,
    stride_ids_token,
    num_experts,
    num_rows,  # of y
    num_cols,
    num_pairs,
    num_blocks,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gate; "" of one matrix
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last step has columns past the end
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    # Programs that share rows of activations run side by side, and so do an expert's tiles.
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
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
        is_lost = expert < 0  # false: programs without an expert have returned
    token, slot = pair // TOP_K, pair % TOP_K
    # Of a pair without an expert no weights are read: its sums stay zeros.
    end = tl.where(is_lost, 0, num_cols)
    expert = tl.where(is_lost, 0, expert).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + (token * stride_a_token + slot * stride_a_slot)[None, :] + k[:, None]
    row = tl.minimum(n, num_rows - 1)
    weights = weights_ptr + expert * stride_weights_expert
    w_at = weights + row[:, None] * stride_weights_row + k[None, :]
    up_at = weights + (row + num_rows)[:, None] * stride_weights_row + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for column in range(0, end, BLOCK_K):
        if MASKED:
            inside = column + k < num_cols
            a = tl.load(a_at + column, mask=known[None, :] & inside[:, None], other=0.0)
            w = tl.load(w_at + column, mask=inside[None, :], other=0.0)
        else:
            a = tl.load(a_at + column, mask=known[None, :], other=0.0)
            w = tl.load(w_at + column)
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if GATED:
            if MASKED:
                v = tl.load(up_at + column, mask=inside[None, :], other=0.0)
            else:
                v = tl.load(up_at + column)
            up = tl.dot(v, a, up, input_precision="ieee")
    pdl_trigger(PDL)  # before the loop it would cost registers
    if bias_ptr is not None:
        bias = bias_ptr + expert * stride_bias_expert + row
        acc += tl.load(bias).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + num_rows).to(tl.float32)[:, None]
    if ACTIVATION == "clamped_swiglu":
        acc = clamped_swiglu(acc, up, alpha, limit)
    elif GATED:
        acc = activated(acc, ACTIVATION) * up
    acc = tl.where(is_lost, 0.0, acc)
    y_row = y_ptr + (token * stride_y_token + slot * stride_y_slot)[None, :]
    mask = known[None, :] & (n < num_rows)[:, None]
    tl.store(y_row + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


def _launch(
    y: Tensor,
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    tunable: Tunable,
    *,
    activation: str = "",
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Tensor:
    """y ← the products of pairs with their experts, or what ``activation`` makes of gate and up."""
    num_pairs, num_rows, num_cols = ids.numel(), y.shape[2], a.shape[-1]
    shape = (num_pairs, len(weights), num_rows, num_cols, a.element_size())
    config = tunable.pick(a.device, *shape)
    if config["path"] == "hopper":
        from ferrum_triton.kernels.hopper import experts, experts_maps

        if experts_maps.gathers(a) and experts_maps.maps(weights):
            gate = {"activation": activation, "alpha": alpha, "limit": limit}
            experts.multiply_pairs(y, a, ids, weights, config, bias=bias, **gate)
            return y
        config = tunable.heuristic(gpu_of(a.device), *shape)
    options = {name: value for name, value in config.items() if name != "path"}
    blocks = blocks_of(ids, weights.shape[0], config)
    _expert_tiles_kernel.launch(
        (blocks.count * cdiv(num_rows, config["BLOCK_N"]) + blocks.clearing,),
        y_ptr=y,
        a_ptr=a,
        weights_ptr=weights,
        bias_ptr=bias,
        ids_ptr=ids,
        sorted_ptr=blocks.pairs,
        experts_ptr=blocks.experts,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_weights_expert=weights.stride(0),
        stride_weights_row=weights.stride(1),
        stride_bias_expert=0 if bias is None else bias.stride(0),
        stride_ids_token=ids.stride(0),
        num_experts=weights.shape[0],
        num_rows=num_rows,
        num_cols=num_cols,
        num_pairs=num_pairs,
        num_blocks=blocks.count,
        alpha=alpha,
        limit=limit,
        TOP_K=ids.shape[1],
        ACTIVATION=activation,
        MASKED=num_cols % config["BLOCK_K"] != 0,
        **options,
    )
    return y


@ops.gemm_moe_id.impl("triton")
def gemm_moe_id(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_rows = weights.shape[1]
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    return _launch(y, a, weights, ids, bias, TILES)


@ops.gemm_moe_id_gate_up.impl("triton")
def gemm_moe_id_gate_up(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_rows = weights.shape[1] // 2
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    gate = {"activation": activation, "alpha": float(alpha), "limit": float(limit)}
    return _launch(y, a, weights, ids, bias, GATE_UP_TILES, **gate)
