"""Routing: each token's top_k experts and their weights, by softmax or by grouped sigmoid scores.

A program has a tile of tokens by experts, a token a warp, and takes top_k rounds of maximum. Rounds
work on unsigned integers that order as the values do, which one instruction reduces across a warp.
A 16-bit value shares its integer with its column, so that the largest is unique; a 32-bit one takes
a second reduction, for the lowest column that has it.

Counts, where they are asked for, without a second pass: where one program holds every token it
stores them; otherwise programs add theirs to zeros, whose sum does not depend on the order of
integer additions. The zeros are written by the same call, as a fill that a captured graph replays.

A router's product of few tokens comes in parts whose K was split, as its launch left them: the
launch that routes adds them up, in the order in which a launch of its own would.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import Kernel, kernel, processors
from ferrum_triton.kernels.linear import product_in_parts
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import routing as ops

# Bytes of a row that two loads of a warp cover, 16 a thread. Longer rows go alone.
SHARED_ROW = 1024
# Elements of a tile: 16 tokens of 128 experts, on 16 warps.
MAX_TILE = 2048
# Elements of the tile up to which one program for every token beats filling the counts first.
MAX_SINGLE = 1024


@triton.jit
def ranked_keys(x, column):
    """Positive integers that order as x does; of 16-bit x, equal ones by the lower column."""
    x = tl.where(x == 0, 0.0, x).to(x.dtype)  # -0 is no smaller than 0
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        rank = (bits ^ ((bits >> 31) & 0x7FFF)) + 0x8000
        key = (rank.to(tl.uint32) << 16) | (0xFFFF - column).to(tl.uint32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return key


@triton.jit
def value_of(key, DTYPE: tl.constexpr):
    """The x of :func:`ranked_keys`."""
    if DTYPE.primitive_bitwidth == 16:
        bits = (key >> 16).to(tl.int32) - 0x8000
        bits = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16)
    else:
        bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
        bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def take_largest(keys, column, ROUNDS: tl.constexpr, BLOCK_K: tl.constexpr, UNIQUE: tl.constexpr):
    """The largest ROUNDS keys of each row, descending, equal ones by the lower column.

    A key of 0 is absent; at least ROUNDS keys of a row are present.

    Returns:
        their columns and themselves, [rows, BLOCK_K], and where they were, as keys is.
    """
    left = keys
    place = tl.arange(0, BLOCK_K)[None, :]
    columns = tl.zeros([keys.shape[0], BLOCK_K], tl.int32)
    largest = tl.zeros([keys.shape[0], BLOCK_K], tl.uint32)
    for i in range(ROUNDS):
        top = tl.max(left, axis=1)[:, None]
        hit = left == top
        if UNIQUE:
            at = 0xFFFF - (top & 0xFFFF).to(tl.int32)
        else:
            at = tl.min(tl.where(hit, column, 0xFFFF), axis=1)[:, None]
            hit = column == at
        columns = tl.where(place == i, at, columns)
        largest = tl.where(place == i, top, largest)
        left = tl.where(hit, 0, left)
    return columns, largest, left != keys


@triton.jit
def store_choice(
    ids_ptr, weights_ptr, stride_ids_token, stride_weights_token, token, ids, weights, mask
):
    """Write the chosen experts [rows, top_k] of the tokens [rows, 1], and their weights."""
    place = tl.arange(0, ids.shape[1])[None, :]
    tl.store(ids_ptr + token * stride_ids_token + place, ids, mask=mask)
    tl.store(weights_ptr + token * stride_weights_token + place, weights, mask=mask)


@triton.jit
def store_counts(
    counts_ptr, ids, mask, num_experts, BLOCK_E: tl.constexpr, ONE_PROGRAM: tl.constexpr
):
    """Store, or add, how many of the ``ids`` under ``mask`` name each expert.

    A histogram of the ids, not a sum over the tile: that would send the whole tile through shared
    memory.
    """
    size: tl.constexpr = ids.shape[0] * ids.shape[1]
    mask = tl.broadcast_to(mask, ids.shape)
    counts = tl.histogram(tl.reshape(ids, [size]), BLOCK_E, tl.reshape(mask, [size]))
    expert = tl.arange(0, BLOCK_E)
    if ONE_PROGRAM:
        tl.store(counts_ptr + expert, counts, mask=expert < num_experts)
    else:
        known = (expert < num_experts) & (counts > 0)
        tl.atomic_add(counts_ptr + expert, counts, mask=known, sem="relaxed")


@triton.jit
def shares(x, total, if_none):
    """x / total, or if_none where the total is 0."""
    return tl.where(total > 0, x / total, if_none)


@triton.jit
def likelihoods(x, top):
    """exp(x - top), and 1 where x is an infinite top."""
    return tl.where(x == top, 1.0, tl.exp(x - top))


@kernel
def _route_topk_softmax_kernel(
    ids_ptr,  # [num_tokens, top_k] int32
    weights_ptr,  # [num_tokens, top_k] float32
    counts_ptr,  # [num_experts] int32, zeros unless ONE_PROGRAM; or None
    logits_ptr,  # [num_tokens, num_experts]; of parts float32 [parts, num_tokens, num_experts]
    stride_ids_token,
    stride_weights_token,
    stride_logits_part,
    stride_logits_token,
    num_tokens,
    num_experts,
    PARTS: tl.constexpr,  # whose sum the logits are
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    ONE_PROGRAM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_K: tl.constexpr,  # power of two >= top_k
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    in_batch = token < num_tokens
    known = expert < num_experts
    logits_row = logits_ptr + token * stride_logits_token + expert
    logits = tl.load(logits_row, mask=in_batch & known, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        more = logits_row + part * stride_logits_part
        logits += tl.load(more, mask=in_batch & known, other=0.0)
    logits = tl.where(logits != logits, float("-inf"), logits).to(logits_ptr.dtype.element_ty)

    keys = tl.where(known, ranked_keys(logits, expert), 0)
    packed: tl.constexpr = logits.dtype.primitive_bitwidth == 16
    ids, largest, _ = take_largest(keys, expert, TOP_K, BLOCK_K, packed)

    mask = in_batch & (tl.arange(0, BLOCK_K) < TOP_K)[None, :]
    x = value_of(largest, logits.dtype).to(tl.float32)
    x = tl.where(mask, x, float("-inf"))
    top = tl.max(x, axis=1)[:, None]
    top = tl.where(top == float("-inf"), 0.0, top)
    likelihood = likelihoods(x, top)
    if NORMALISE:
        weights = shares(likelihood, tl.sum(likelihood, axis=1)[:, None], 1.0 / TOP_K)
    else:
        total = tl.sum(likelihoods(logits.to(tl.float32), top), axis=1)[:, None]
        weights = shares(likelihood, total, 0.0)

    store_choice(
        ids_ptr, weights_ptr, stride_ids_token, stride_weights_token, token, ids, weights, mask
    )
    if counts_ptr is not None:
        store_counts(counts_ptr, ids, mask, num_experts, BLOCK_E, ONE_PROGRAM)


@triton.jit
def scores(logits):
    x = logits.to(tl.float32)
    return tl.sigmoid(tl.where(x != x, float("-inf"), x))


@triton.jit
def keys_of_best_groups(
    keys,
    choice,
    num_groups,
    group_size,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """``keys`` of the experts in their rows' best groups, 0 for the others."""
    values = tl.reshape(tl.where(keys > 0, choice, float("-inf")), [BLOCK_T, BLOCK_G, BLOCK_M])
    member = tl.arange(0, BLOCK_M)[None, None, :]
    largest = tl.max(values, axis=2)
    at = tl.min(tl.where(values == largest[:, :, None], member, BLOCK_M), axis=2)
    second = tl.max(tl.where(member == at[:, :, None], float("-inf"), values), axis=2)
    best = largest + tl.where(group_size > 1, second, 0.0)
    best = tl.where(best != best, float("-inf"), best)

    group = tl.arange(0, BLOCK_G)[None, :]
    group_keys = tl.where(group < num_groups, ranked_keys(best, group), 0)
    _, _, kept = take_largest(group_keys, group, TOPK_GROUPS, 1, False)
    members = tl.where(kept[:, :, None], tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_M]), 0)
    return tl.reshape(members, [BLOCK_T, BLOCK_G * BLOCK_M])


@kernel(dynamic=("routed_scaling_factor",))
def _route_topk_sigmoid_kernel(
    ids_ptr,  # [num_tokens, top_k] int32
    weights_ptr,  # [num_tokens, top_k] float32
    counts_ptr,  # [num_experts] int32, zeros unless ONE_PROGRAM; or None
    logits_ptr,  # [num_tokens, num_experts]
    bias_ptr,  # [num_experts] or None
    stride_ids_token,
    stride_weights_token,
    stride_logits_token,
    num_tokens,
    num_groups,
    group_size,  # num_experts / num_groups
    routed_scaling_factor,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    ONE_PROGRAM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= num_groups
    BLOCK_M: tl.constexpr,  # power of two >= group_size
    BLOCK_E: tl.constexpr,  # power of two >= num_groups * group_size
    BLOCK_K: tl.constexpr,  # power of two >= top_k
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    column = tl.arange(0, BLOCK_G * BLOCK_M)[None, :]
    group, member = column // BLOCK_M, column % BLOCK_M
    expert = group * group_size + member
    in_batch = token < num_tokens
    known = (group < num_groups) & (member < group_size)
    logits_row = logits_ptr + token * stride_logits_token
    logits = tl.load(logits_row + expert, mask=in_batch & known, other=float("-inf"))
    choice = scores(logits)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
        choice = tl.where(choice != choice, float("-inf"), choice)

    keys = tl.where(known, ranked_keys(choice, column), 0)
    if BLOCK_G > 1:
        keys = keys_of_best_groups(
            keys, choice, num_groups, group_size, TOPK_GROUPS, BLOCK_T, BLOCK_G, BLOCK_M
        )
    chosen, _, _ = take_largest(keys, column, TOP_K, BLOCK_K, False)

    ids = chosen // BLOCK_M * group_size + chosen % BLOCK_M
    mask = in_batch & (tl.arange(0, BLOCK_K) < TOP_K)[None, :]
    weights = scores(tl.load(logits_row + ids, mask=mask, other=float("-inf")))
    if NORMALISE:
        weights = shares(weights, tl.sum(weights, axis=1)[:, None], 1.0 / TOP_K)
    weights *= routed_scaling_factor

    store_choice(
        ids_ptr, weights_ptr, stride_ids_token, stride_weights_token, token, ids, weights, mask
    )
    if counts_ptr is not None:
        store_counts(counts_ptr, ids, mask, num_groups * group_size, BLOCK_E, ONE_PROGRAM)


def _tokens(
    num_tokens: int, block_e: int, item_size: int, device: torch.device, counted: bool
) -> int:
    """Tokens a program: all of few that are counted, else what fills the processors once.

    More programs than that cost more: each adds a row of counts, to the same few addresses. Rows
    that a warp cannot hold in two loads would be spread over warps, which exchange every maximum.
    """
    if block_e * item_size > SHARED_ROW:
        return 1
    tokens = next_power_of_2(num_tokens)
    if tokens * block_e > MAX_SINGLE or not counted:
        share = next_power_of_2(max(num_tokens // processors(device), 1))
        tokens = min(share, MAX_TILE // block_e)
    return tokens


def _launch(
    kernel_: Kernel,
    logits: Tensor,
    top_k: int,
    block_e: int,
    counted: bool,
    out: tuple[Tensor, Tensor, Tensor] | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch a routing kernel on tiles of some tokens by ``block_e`` experts.

    Args:
        logits: [num_tokens, num_experts], or in parts.
    """
    num_tokens, num_experts = logits.shape[-2:]
    ids, weights, counts = out or (
        logits.new_empty(num_tokens, top_k, dtype=torch.int32),
        logits.new_empty(num_tokens, top_k, dtype=torch.float32),
        logits.new_empty(num_experts if counted else 0, dtype=torch.int32),
    )
    tokens = _tokens(num_tokens, block_e, logits.element_size(), logits.device, counted)
    programs = cdiv(num_tokens, tokens)
    if programs != 1 and counted:
        counts.zero_()
    if programs > 0:
        kernel_.launch(
            (programs,),
            ids_ptr=ids,
            weights_ptr=weights,
            counts_ptr=counts if counted else None,
            logits_ptr=logits,
            stride_ids_token=ids.stride(0),
            stride_weights_token=weights.stride(0),
            stride_logits_token=logits.stride(-2),
            num_tokens=num_tokens,
            **arguments,
            TOP_K=top_k,
            ONE_PROGRAM=programs == 1,
            BLOCK_T=tokens,
            BLOCK_E=next_power_of_2(num_experts),
            BLOCK_K=next_power_of_2(top_k),
            num_warps=min(tokens, 32),
        )
    return ids, weights, counts


def _route_softmax(
    parts: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    counted: bool,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Routing by the sum of parts [parts, num_tokens, num_experts]."""
    num_parts, _, num_experts = parts.shape
    return _launch(
        _route_topk_softmax_kernel,
        parts,
        top_k,
        next_power_of_2(num_experts),
        counted,
        out,
        stride_logits_part=parts.stride(0) if num_parts > 1 else 0,
        num_experts=num_experts,
        PARTS=num_parts,
        NORMALISE=norm_topk_prob,
    )


@ops.route_topk_softmax.impl("triton")
def route_topk_softmax(
    logits: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    counted: bool = True,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _route_softmax(logits[None], top_k, norm_topk_prob, counted, out)


@ops.gemm_route_topk_softmax.impl("triton")
def gemm_route_topk_softmax(
    a: Tensor,
    router: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    results = None if out is None else (*out, out[0].new_empty(0))
    parts = product_in_parts(a, router)
    ids, weights, _ = _route_softmax(parts, top_k, norm_topk_prob, False, results)
    return ids, weights


@ops.route_topk_sigmoid_grouped.impl("triton")
def route_topk_sigmoid_grouped(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    counted: bool = True,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    group_size = logits.shape[1] // num_groups
    block_g, block_m = next_power_of_2(num_groups), next_power_of_2(group_size)
    return _launch(
        _route_topk_sigmoid_kernel,
        logits,
        top_k,
        block_g * block_m,
        counted,
        out,
        bias_ptr=bias,
        num_groups=num_groups,
        group_size=group_size,
        routed_scaling_factor=float(routed_scaling_factor),
        TOPK_GROUPS=topk_groups,
        NORMALISE=norm_topk_prob,
        BLOCK_G=block_g,
        BLOCK_M=block_m,
    )
