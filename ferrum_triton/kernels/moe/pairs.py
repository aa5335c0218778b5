"""Sorting pairs by expert: one program an expert, which reads every id.

A program finds its expert's pairs in order, so the sort is stable and needs no atomics. The ids are
few and come from L2. Each lane has some consecutive ones, of which a word tells by a bit each which
are the expert's: a scan over the lanes then says where each one's begin, and threads meet once for
all of them.

Where an expert's region begins depends on how many pairs the others have. One histogram in every
program tells of few pairs; of many, a launch before it counts them, an expert a program.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import Kernel, kernel
from ferrum_triton.kernels.moe.lanes import (
    Ids,
    bits_of,
    count_bits,
    find,
    load_experts,
    lowest_bit,
)
from ferrum_triton.kernels.moe.prepare import PairTable, room_for_pairs
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import pairs as ops

# Lanes, and consecutive pairs of each: a 16-byte load at least, a word's bits at most. Of ids that
# are not dense each has an address of its own, and registers hold fewer.
MAX_LANES, LEAST_WIDTH, MAX_WIDTH, MAX_STRIDED_WIDTH = 1024, 4, 32, 8
# Pairs up to which a program counts those of all experts by itself. Of more a launch counts them.
# By histograms, and ids read a lane at a time, compute_ids_tpe/e128k8/m4096 took 20.8 us and
# moe_align_block_size/e128k8/m4096 34.9; now they take 9.8 and 11.2 (``bench.run``, 4f3641f and
# 6050f43).
FEW_PAIRS = MAX_LANES * LEAST_WIDTH


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


@kernel
def _count_kernel(
    counts_ptr,  # [num_experts] int32
    ids_ptr,  # [num_tokens, top_k]
    stride_ids_token,  # or None of dense ids
    num_pairs,
    num_experts,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, num_pairs, num_experts)
    program = tl.program_id(0)
    matches = tl.zeros([LANES], tl.int32)
    for first in range(0, num_pairs, LANES * WIDTH):
        expert = load_experts(ids, first, TOP_K, LANES, WIDTH)
        matches += count_bits(bits_of(expert, program, WIDTH))
    tl.store(counts_ptr + program, tl.sum(matches, axis=0))


@triton.jit
def load_counts(counts_ptr, num_experts, BLOCK_E: tl.constexpr):
    """Pairs of all experts, int32 [BLOCK_E], as a launch before counted them."""
    e = tl.arange(0, BLOCK_E)
    return tl.load(counts_ptr + e, mask=e < num_experts, other=0)


@triton.jit
def counts_of(
    ids,
    counts_ptr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Pairs of all experts, int32 [BLOCK_E]: counted before, or few enough to be counted here."""
    if counts_ptr is None:
        expert = load_experts(ids, 0, TOP_K, LANES, WIDTH)
        counts = tl.histogram(tl.ravel(expert), BLOCK_E, mask=tl.ravel(expert >= 0))
    else:
        counts = load_counts(counts_ptr, ids.num_experts, BLOCK_E)
    return counts


class GridArgs(NamedTuple):
    """Where sizes of products' grids go, [2, 3], and what they are made of."""

    grid: Any  # pointer
    stride_part: Any
    gate_up_tiles: Any
    down_tiles: Any
    token_tile: Any


@triton.jit
def store_grid_args(args, counts, num_experts):
    """Write the sizes of both products' grids, which the expert of most pairs decides."""
    tiles = tl.maximum(tl.cdiv(tl.max(counts, axis=0), args.token_tile), 1)
    for part in tl.static_range(2):
        tl.store(args.grid + part * args.stride_part, tiles)
        tl.store(args.grid + part * args.stride_part + 2, num_experts)
    tl.store(args.grid + 1, args.gate_up_tiles)
    tl.store(args.grid + args.stride_part + 1, args.down_tiles)


@kernel(dynamic=("gate_up_tiles", "down_tiles", "token_tile"))
def _grid_args_kernel(
    grid_ptr,  # [2, 3] int32
    counts_ptr,  # [num_experts] int32
    stride_grid_part,
    num_experts,
    gate_up_tiles,
    down_tiles,
    token_tile,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    counts = load_counts(counts_ptr, num_experts, BLOCK_E)
    args = GridArgs(grid_ptr, stride_grid_part, gate_up_tiles, down_tiles, token_tile)
    store_grid_args(args, counts, num_experts)


@kernel(dynamic=("gate_up_tiles", "down_tiles", "token_tile"))
def _ids_tpe_kernel(
    buckets_ptr,  # [num_experts, num_pairs] int32
    tpe_ptr,  # [num_experts] int32
    places_ptr,  # int64 [num_pairs], see PairTable; or None, and buckets end in -1
    grid_ptr,  # [2, 3] int32, which one more program writes; or None
    ids_ptr,  # [num_tokens, top_k]
    stride_buckets_expert,
    stride_grid_part,
    stride_ids_token,  # or None of dense ids
    num_pairs,
    num_experts,
    gate_up_tiles,
    down_tiles,
    token_tile,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, num_pairs, num_experts)
    program = tl.program_id(0)
    if program < num_experts:
        bucket_ptr = buckets_ptr + program.to(tl.int64) * stride_buckets_expert
        total = tl.zeros([], tl.int32)
        for first in range(0, num_pairs, LANES * WIDTH):
            found = find(ids, first, program, total, TOP_K, LANES, WIDTH)
            bits = found.bits
            for i in range(tl.max(found.matches, axis=0)):
                pair = found.lane + lowest_bit(bits)
                entry = found.place + i
                tl.store(bucket_ptr + entry, pair, mask=i < found.matches)
                if places_ptr is not None:
                    place = (program.to(tl.int64) << 32) | entry.to(tl.int64)
                    tl.store(places_ptr + pair, place, mask=i < found.matches)
                bits &= bits - 1
            total += tl.sum(found.matches, axis=0)
        tl.store(tpe_ptr + program, total)
        if places_ptr is None:
            fill(bucket_ptr, total, num_pairs, -1, LANES)
    elif grid_ptr is not None:
        counts = counts_of(ids, None, TOP_K, BLOCK_E, LANES, WIDTH)
        args = GridArgs(grid_ptr, stride_grid_part, gate_up_tiles, down_tiles, token_tile)
        store_grid_args(args, counts, num_experts)


@kernel
def _align_kernel(
    sorted_ptr,  # [capacity] int32
    block_experts_ptr,  # [capacity / block_size] int32
    total_ptr,  # [1] int32
    counts_ptr,  # [num_experts] int32; or None of few pairs
    ids_ptr,  # [num_tokens, top_k]
    stride_ids_token,  # or None of dense ids
    num_pairs,
    num_experts,
    block_size,
    capacity,
    PAIR_IDS: tl.constexpr,
    SHORT_LAST: tl.constexpr,  # blocks of at most half as many pairs come after all others
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, num_pairs, num_experts)
    program = tl.program_id(0)
    counts = counts_of(ids, counts_ptr, TOP_K, BLOCK_E, LANES, WIDTH)
    blocks = tl.cdiv(counts, block_size)
    short = tl.zeros_like(blocks)
    if SHORT_LAST:
        left = counts - (blocks - 1) * block_size
        short = ((left > 0) & (2 * left <= block_size)).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    first_block = tl.sum(tl.where(e < program, blocks - short, 0), axis=0)
    first_short = tl.sum(tl.where(e < program, blocks, blocks - short), axis=0)
    if program < num_experts:
        # How many pairs come before the expert's short block, and how far from them it lies.
        num_long = tl.sum(tl.where(e == program, blocks - short, 0), axis=0) * block_size
        begin = first_block * block_size
        apart = first_short * block_size - num_long - begin
        # Of an entry that is a row, rows of experts are without padding.
        first_row = tl.sum(tl.where(e < program, counts, 0), axis=0)
        count = tl.zeros([], tl.int32)
        for first in range(0, num_pairs, LANES * WIDTH):
            found = find(ids, first, program, count, TOP_K, LANES, WIDTH)
            bits = found.bits
            for i in range(tl.max(found.matches, axis=0)):
                row = found.place + i
                entry = found.lane + lowest_bit(bits) if PAIR_IDS else first_row + row
                place = begin + row + tl.where(row < num_long, 0, apart)
                tl.store(sorted_ptr + place, entry, mask=i < found.matches)
                bits &= bits - 1
            count += tl.sum(found.matches, axis=0)
        end = begin + count + tl.where(count > num_long, apart, 0)
        fill(sorted_ptr, end, tl.cdiv(end, block_size) * block_size, num_pairs, 128)
        fill(block_experts_ptr, first_block, first_block + num_long // block_size, program, 128)
        if count > num_long:
            tl.store(block_experts_ptr + first_short, program)
    else:
        # Every expert came before this program.
        num_blocks = first_block + tl.sum(short, axis=0)
        tl.store(total_ptr, num_blocks * block_size)
        fill(sorted_ptr, num_blocks * block_size, capacity, num_pairs, LANES)
        fill(block_experts_ptr, num_blocks, capacity // block_size, -1, LANES)


@kernel
def _build_pairs_kernel(
    pairs_ptr,  # [num_tokens, top_k] int32
    packed_tokens_ptr,  # [num_pairs] int32
    expert_offsets_ptr,  # [num_experts + 1] int32
    ids_ptr,  # [num_tokens, top_k]
    stride_pairs_token,
    stride_ids_token,  # or None of dense ids
    num_pairs,
    num_experts,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    ids = Ids(ids_ptr, stride_ids_token, num_pairs, num_experts)
    program = tl.program_id(0)
    orphans = program == num_experts
    wanted = tl.where(orphans, -1, program)
    earlier = tl.zeros([LANES], tl.int32)
    for first in range(0, num_pairs, LANES * WIDTH):
        expert = load_experts(ids, first, TOP_K, LANES, WIDTH)
        earlier += tl.sum(((expert >= 0) & (expert < program)).to(tl.int32), axis=1)
    begin = tl.sum(earlier, axis=0)
    tl.store(expert_offsets_ptr + program, begin)
    if orphans:
        fill(packed_tokens_ptr, begin, num_pairs, -1, LANES)
    for first in range(0, num_pairs, LANES * WIDTH):
        found = find(ids, first, wanted, begin, TOP_K, LANES, WIDTH)
        bits = found.bits
        for i in range(tl.max(found.matches, axis=0)):
            pair, row, mine = found.lane + lowest_bit(bits), found.place + i, i < found.matches
            token = pair // TOP_K
            target = pairs_ptr + token.to(tl.int64) * stride_pairs_token + pair % TOP_K
            tl.store(target, tl.where(orphans, -1, row), mask=mine)
            tl.store(packed_tokens_ptr + row, token, mask=mine & (program < num_experts))
            bits &= bits - 1
        begin += tl.sum(found.matches, axis=0)


def _launch(
    kernel_: Kernel, programs: int, ids: Tensor, num_experts: int, **arguments: Any
) -> None:
    """Launch programs of an expert each, with what every kernel here takes of ``ids``."""
    num_pairs, is_dense = max(ids.numel(), 1), ids.is_contiguous()
    most = MAX_WIDTH if is_dense else MAX_STRIDED_WIDTH
    width = min(max(next_power_of_2(cdiv(num_pairs, MAX_LANES)), LEAST_WIDTH), most)
    lanes = min(max(next_power_of_2(cdiv(num_pairs, width)), 32), MAX_LANES)
    kernel_.launch(
        (programs,),
        **arguments,
        ids_ptr=ids,
        stride_ids_token=None if is_dense else ids.stride(0),
        num_pairs=ids.numel(),
        num_experts=num_experts,
        TOP_K=max(ids.shape[1], 1),
        LANES=lanes,
        WIDTH=width,
        # A thread has 4 lanes, or 64 pairs where lanes have more.
        num_warps=max(lanes // 128, lanes * width // 2048, 1),
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
    is_few, block_e = num_pairs <= FEW_PAIRS, next_power_of_2(num_experts)
    sizes = {
        "stride_grid_part": grid_args.stride(0),
        "gate_up_tiles": cdiv(gate_up_rows, row_tile),
        "down_tiles": cdiv(down_rows, row_tile),
        "token_tile": token_tile,
        "BLOCK_E": block_e,
    }
    _launch(
        _ids_tpe_kernel,
        num_experts + 1 if is_few else num_experts,
        ids,
        num_experts,
        buckets_ptr=buckets,
        tpe_ptr=tpe,
        places_ptr=None,
        grid_ptr=grid_args if is_few else None,
        stride_buckets_expert=buckets.stride(0),
        **sizes,
    )
    if not is_few:
        _grid_args_kernel.launch(
            (1,), grid_ptr=grid_args, counts_ptr=tpe, num_experts=num_experts, **sizes
        )
    return buckets, tpe, grid_args


def sorted_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Buckets of pairs and their sizes, of which only the products' own tiles are asked."""
    buckets, tpe, _ = compute_ids_tpe(ids, num_experts, 1, 1)
    return buckets, tpe


def pairs_by_expert(ids: Tensor, num_experts: int) -> PairTable:
    """The table of pairs that name their experts; entries behind an expert's last are any."""
    table = room_for_pairs(num_experts, ids.numel(), ids.numel(), ids.device)
    _launch(
        _ids_tpe_kernel,
        num_experts,
        ids,
        num_experts,
        buckets_ptr=table.pairs,
        tpe_ptr=table.counts,
        places_ptr=table.places,
        grid_ptr=None,
        stride_buckets_expert=table.pairs.stride(0),
        stride_grid_part=0,
        gate_up_tiles=0,
        down_tiles=0,
        token_tile=0,
        BLOCK_E=next_power_of_2(num_experts),
    )
    return table


def aligned_pairs(
    ids: Tensor,
    num_experts: int,
    block_size: int,
    pair_ids: bool = True,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    short_last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``moe_align_block_size``; or with blocks of at most half as many pairs behind all others.

    Programs that take blocks in turn, and less time for a short one, then end together.
    """
    num_pairs = ids.numel()
    capacity = ops.align_capacity(num_pairs, num_experts, block_size)
    sorted_ids, block_experts, total = out or (
        ids.new_empty(capacity, dtype=torch.int32),
        ids.new_empty(capacity // block_size, dtype=torch.int32),
        ids.new_empty(1, dtype=torch.int32),
    )
    counts = None
    if num_pairs > FEW_PAIRS:
        counts = ids.new_empty(num_experts, dtype=torch.int32)
        _launch(_count_kernel, num_experts, ids, num_experts, counts_ptr=counts)
    _launch(
        _align_kernel,
        num_experts + 1,
        ids,
        num_experts,
        sorted_ptr=sorted_ids,
        block_experts_ptr=block_experts,
        total_ptr=total,
        counts_ptr=counts,
        block_size=block_size,
        capacity=capacity,
        PAIR_IDS=pair_ids,
        SHORT_LAST=short_last,
        BLOCK_E=next_power_of_2(num_experts),
    )
    return sorted_ids, block_experts, total


@ops.moe_align_block_size.impl("triton")
def moe_align_block_size(
    ids: Tensor,
    num_experts: int,
    block_size: int,
    pair_ids: bool = True,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return aligned_pairs(ids, num_experts, block_size, pair_ids, out)


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
        num_experts + 1,
        ids,
        num_experts,
        pairs_ptr=pairs,
        packed_tokens_ptr=packed_tokens,
        expert_offsets_ptr=expert_offsets,
        stride_pairs_token=pairs.stride(0),
    )
    return pairs, packed_tokens, expert_offsets
