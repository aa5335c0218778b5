"""Sorting pairs by expert: one program an expert, which reads every id.

A program finds its expert's pairs in order, so the sort is stable and needs neither atomics nor a
second launch; where its region begins it learns by counting the experts before it. The ids are few
and come from L2. One more program does what belongs to no expert.

Pairs are laid out in lanes of consecutive ones. A first pass counts each lane's matches, a scan
over the lanes tells where each one's begin, and a second pass places them: threads meet once, not
at every step.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import Kernel, kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import pairs as ops


class Ids(NamedTuple):
    """The pairs' experts, and how lanes share them."""

    ids: Any  # pointer, [num_tokens, top_k]
    stride_token: Any
    lane_size: Any  # pairs of a lane
    num_pairs: Any
    num_experts: Any


# Consecutive pairs of a lane a step, a 16-byte load; and lanes, 4 a thread on 8 warps.
STEP, MAX_LANES = 4, 1024


@triton.jit
def load_experts(ids, step, TOP_K: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr):
    """A step of every lane: pairs [LANES, STEP] and their experts, -1 for one that has none.

    Args:
        ids: :class:`Ids`.
        step: the first of a lane's pairs.
    """
    lane = tl.arange(0, LANES)[:, None]
    pair = lane * ids.lane_size + step + tl.arange(0, STEP)[None, :]
    token = (pair // TOP_K).to(tl.int64)
    source = ids.ids + token * ids.stride_token + pair % TOP_K
    expert = tl.load(source, mask=pair < ids.num_pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < ids.num_experts), expert, -1).to(tl.int32)


@triton.jit
def places(mine, first):
    """Where each match of a step goes, and where each lane's next one will."""
    found = first[:, None] + tl.cumsum(mine, axis=1)
    return found - 1, first + tl.sum(mine, axis=1)


@triton.jit
def fill(y_ptr, begin, end, value, BLOCK: tl.constexpr):
    """y[begin:end] ← value."""
    values = tl.full([BLOCK], 0, tl.int32) + value
    whole = tl.minimum(tl.cdiv(begin, BLOCK) * BLOCK, end)
    last = tl.maximum(end // BLOCK * BLOCK, whole)
    i = begin + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, values, mask=i < whole)
    for start in range(whole, last, BLOCK):  # without a mask stores are wide
        tl.store(y_ptr + tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK), values)
    i = last + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, values, mask=i < end)


@triton.jit
def lowest_bit(word):
    """The place of an int32's lowest 1; of 0 any."""
    lowest = (word & -word).to(tl.float32)  # a power of two, so exact, or that of the sign
    return ((lowest.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@kernel(dynamic=("gate_up_tiles", "down_tiles", "token_tile"))
def _ids_tpe_kernel(
    buckets_ptr,  # [num_experts, num_pairs] int32
    tpe_ptr,  # [num_experts] int32
    grid_ptr,  # [2, 3] int32
    ids_ptr,  # [num_tokens, top_k]
    stride_buckets_expert,
    stride_grid_part,
    stride_ids_token,
    num_pairs,
    lane_size,
    num_experts,
    gate_up_tiles,
    down_tiles,
    token_tile,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    IN_WORD: tl.constexpr,  # a lane has at most 32 pairs
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, lane_size, num_pairs, num_experts)
    program = tl.program_id(0)
    matches = tl.zeros([LANES], tl.int32)
    found = tl.zeros([LANES], tl.int32)  # a bit for each match
    counts = tl.zeros([BLOCK_E], tl.int32)
    for step in range(0, lane_size, STEP):
        pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
        if program < num_experts:
            mine = (expert == program).to(tl.int32)
            matches += tl.sum(mine, axis=1)
            if IN_WORD:
                found |= tl.sum(mine << (step + tl.arange(0, STEP))[None, :], axis=1)
        else:
            counts += tl.histogram(tl.ravel(expert), BLOCK_E, mask=tl.ravel(expert >= 0))
    if program < num_experts:
        bucket_ptr = buckets_ptr + program.to(tl.int64) * stride_buckets_expert
        total = tl.sum(matches, axis=0)
        tl.store(tpe_ptr + program, total)
        fill(bucket_ptr, total, num_pairs, -1, LANES)
        first = tl.cumsum(matches, axis=0) - matches
        if IN_WORD:
            lane = tl.arange(0, LANES) * lane_size
            for i in range(tl.max(matches, axis=0)):
                tl.store(bucket_ptr + first + i, lane + lowest_bit(found), mask=i < matches)
                found &= found - 1
        else:
            for step in range(0, lane_size, STEP):
                pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
                mine = (expert == program).to(tl.int32)
                place, first = places(mine, first)
                tl.store(bucket_ptr + place, pair, mask=mine > 0)
    else:
        tiles = tl.maximum(tl.cdiv(tl.max(counts, axis=0), token_tile), 1)
        for part in tl.static_range(2):
            tl.store(grid_ptr + part * stride_grid_part, tiles)
            tl.store(grid_ptr + part * stride_grid_part + 2, num_experts)
        tl.store(grid_ptr + 1, gate_up_tiles)
        tl.store(grid_ptr + stride_grid_part + 1, down_tiles)


@kernel
def _align_kernel(
    sorted_ptr,  # [capacity] int32
    block_experts_ptr,  # [capacity / block_size] int32
    total_ptr,  # [1] int32
    ids_ptr,  # [num_tokens, top_k]
    stride_ids_token,
    num_pairs,
    lane_size,
    num_experts,
    block_size,
    capacity,
    PAIR_IDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, lane_size, num_pairs, num_experts)
    program = tl.program_id(0)
    matches = tl.zeros([LANES], tl.int32)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for step in range(0, lane_size, STEP):
        pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
        matches += tl.sum((expert == program).to(tl.int32), axis=1)
        counts += tl.histogram(tl.ravel(expert), BLOCK_E, mask=tl.ravel(expert >= 0))
    padded = tl.cdiv(counts, block_size) * block_size
    before = tl.arange(0, BLOCK_E) < program
    begin = tl.sum(tl.where(before, padded, 0), axis=0)
    if program < num_experts:
        first_row = tl.sum(tl.where(before, counts, 0), axis=0)
        total = tl.sum(matches, axis=0)
        end = begin + tl.cdiv(total, block_size) * block_size
        fill(sorted_ptr, begin + total, end, num_pairs, 128)
        fill(block_experts_ptr, begin // block_size, end // block_size, program, 128)
        first = tl.cumsum(matches, axis=0) - matches
        for step in range(0, lane_size, STEP):
            pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
            mine = (expert == program).to(tl.int32)
            place, first = places(mine, first)
            entry = pair if PAIR_IDS else first_row + place
            tl.store(sorted_ptr + begin + place, entry, mask=mine > 0)
    else:
        # Every expert came before this program.
        tl.store(total_ptr, begin)
        fill(sorted_ptr, begin, capacity, num_pairs, LANES)
        fill(block_experts_ptr, begin // block_size, capacity // block_size, -1, LANES)


@kernel
def _build_pairs_kernel(
    pairs_ptr,  # [num_tokens, top_k] int32
    packed_tokens_ptr,  # [num_pairs] int32
    expert_offsets_ptr,  # [num_experts + 1] int32
    ids_ptr,  # [num_tokens, top_k]
    stride_pairs_token,
    stride_ids_token,
    num_pairs,
    lane_size,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, lane_size, num_pairs, num_experts)
    program = tl.program_id(0)
    orphans = program == num_experts
    wanted = tl.where(orphans, -1, program)
    matches = tl.zeros([LANES], tl.int32)
    earlier = tl.zeros([LANES], tl.int32)
    for step in range(0, lane_size, STEP):
        pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
        matches += tl.sum((expert == wanted).to(tl.int32), axis=1)
        earlier += tl.sum(((expert >= 0) & (expert < program)).to(tl.int32), axis=1)
    begin = tl.sum(earlier, axis=0)
    tl.store(expert_offsets_ptr + program, begin)
    if orphans:
        fill(packed_tokens_ptr, begin, num_pairs, -1, LANES)
    first = begin + tl.cumsum(matches, axis=0) - matches
    for step in range(0, lane_size, STEP):
        pair, expert = load_experts(ids, step, TOP_K, LANES, STEP)
        mine = (expert == wanted) & (pair < num_pairs)
        row, first = places(mine.to(tl.int32), first)
        token = pair // TOP_K
        target = pairs_ptr + token.to(tl.int64) * stride_pairs_token + pair % TOP_K
        tl.store(target, tl.where(orphans, -1, row), mask=mine)
        tl.store(packed_tokens_ptr + row, token, mask=mine & (expert >= 0))


def _launch(kernel_: Kernel, ids: Tensor, num_experts: int, **arguments: Any) -> None:
    """Launch a program an expert and one more, with what every kernel here takes of ``ids``."""
    num_pairs = ids.numel()
    lanes = min(max(next_power_of_2(cdiv(max(num_pairs, 1), STEP)), 32), MAX_LANES)
    kernel_.launch(
        (num_experts + 1,),
        **arguments,
        ids_ptr=ids,
        stride_ids_token=ids.stride(0),
        num_pairs=num_pairs,
        lane_size=cdiv(num_pairs, lanes * STEP) * STEP,
        num_experts=num_experts,
        TOP_K=max(ids.shape[1], 1),
        BLOCK_E=next_power_of_2(num_experts),
        LANES=lanes,
        STEP=STEP,
        num_warps=max(lanes // 128, 1),
    )


@ops.compute_ids_tpe.impl("triton")
def compute_ids_tpe(
    ids: Tensor,
    num_experts: int,
    gate_up_rows: int,
    down_rows: int,
    token_tile: int = 32,
    row_tile: int = 64,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_pairs = ids.numel()
    buckets, tpe, grid_args = out or (
        ids.new_empty(num_experts, num_pairs, dtype=torch.int32),
        ids.new_empty(num_experts, dtype=torch.int32),
        ids.new_empty(2, 3, dtype=torch.int32),
    )
    _launch(
        _ids_tpe_kernel,
        ids,
        num_experts,
        buckets_ptr=buckets,
        tpe_ptr=tpe,
        grid_ptr=grid_args,
        stride_buckets_expert=buckets.stride(0),
        stride_grid_part=grid_args.stride(0),
        gate_up_tiles=cdiv(gate_up_rows, row_tile),
        down_tiles=cdiv(down_rows, row_tile),
        token_tile=token_tile,
        IN_WORD=num_pairs <= 32 * MAX_LANES,
    )
    return buckets, tpe, grid_args


def sorted_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Buckets of pairs and their sizes, of which only the products' own tiles are asked."""
    buckets, tpe, _ = compute_ids_tpe(ids, num_experts, 1, 1)
    return buckets, tpe


@ops.moe_align_block_size.impl("triton")
def moe_align_block_size(
    ids: Tensor,
    num_experts: int,
    block_size: int,
    pair_ids: bool = True,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_pairs = ids.numel()
    capacity = ops.align_capacity(num_pairs, num_experts, block_size)
    sorted_ids, block_experts, total = out or (
        ids.new_empty(capacity, dtype=torch.int32),
        ids.new_empty(capacity // block_size, dtype=torch.int32),
        ids.new_empty(1, dtype=torch.int32),
    )
    _launch(
        _align_kernel,
        ids,
        num_experts,
        sorted_ptr=sorted_ids,
        block_experts_ptr=block_experts,
        total_ptr=total,
        block_size=block_size,
        capacity=capacity,
        PAIR_IDS=pair_ids,
    )
    return sorted_ids, block_experts, total


@ops.moe_build_pairs_by_token.impl("triton")
def moe_build_pairs_by_token(
    ids: Tensor, num_experts: int, *, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_pairs = ids.numel()
    pairs, packed_tokens, expert_offsets = out or (
        ids.new_empty(ids.shape, dtype=torch.int32),
        ids.new_empty(num_pairs, dtype=torch.int32),
        ids.new_empty(num_experts + 1, dtype=torch.int32),
    )
    _launch(
        _build_pairs_kernel,
        ids,
        num_experts,
        pairs_ptr=pairs,
        packed_tokens_ptr=packed_tokens,
        expert_offsets_ptr=expert_offsets,
        stride_pairs_token=pairs.stride(0),
    )
    return pairs, packed_tokens, expert_offsets
