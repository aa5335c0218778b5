"""Which pairs each tile has, written down for programs that take many tiles in turn."""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, tile_bound
from ferrum_triton.kernels.moe.prepare import PairTable
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Numbers of a tile: its expert, the first of its pairs in the expert's bucket and among all pairs
# by expert, and how many it has.
FIELDS = tl.constexpr(4)
# Tiles by experts that a program looks at.
CELLS = 8192


@kernel(dynamic=("num_pairs", "capacity"))
def _tile_table_kernel(
    table_ptr,  # int32 [bound, FIELDS]
    total_ptr,  # int32 [1]
    counts_ptr,  # [num_experts]
    num_experts,
    num_pairs,
    capacity,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_M: tl.constexpr,  # pairs of a tile
    BLOCK_T: tl.constexpr,  # tiles of a program
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    buckets = bucket_tiles(counts_ptr, num_experts, capacity, BLOCK_E, BLOCK_M)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    expert = tl.sum((buckets.end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    is_own, is_before = e == expert[:, None], e < expert[:, None]
    begin = tl.sum(tl.where(is_own, (buckets.end - buckets.tiles)[None, :], 0), axis=1)
    count = tl.sum(tl.where(is_own, buckets.counts[None, :], 0), axis=1)
    first = (tile - begin) * BLOCK_M
    row = tl.sum(tl.where(is_before, buckets.counts[None, :], 0), axis=1) + first
    # There are no more rows than pairs, should pairs be in two places.
    left = tl.maximum(tl.minimum(count - first, num_pairs - row), 0)
    known = tile < buckets.total
    at = table_ptr + tile * FIELDS
    tl.store(at, expert, mask=known)
    tl.store(at + 1, first, mask=known)
    tl.store(at + 2, row, mask=known)
    tl.store(at + 3, left, mask=known)
    if tl.program_id(0) == 0:
        tl.store(total_ptr, buckets.total)


def tile_table(pairs: PairTable, block_m: int) -> tuple[Tensor, Tensor]:
    """Tiles of ``block_m`` pairs, int32 [bound, FIELDS], and their number, int32 [1]."""
    num_experts, device = len(pairs.counts), pairs.counts.device
    bound = tile_bound(pairs.num_pairs, num_experts, pairs.capacity, block_m)
    table = torch.empty(bound, FIELDS.value, dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    block_e = next_power_of_2(num_experts)
    block_t = max(min(CELLS // block_e, next_power_of_2(bound)), 1)
    _tile_table_kernel.launch(
        (cdiv(bound, block_t),),
        table_ptr=table,
        total_ptr=total,
        counts_ptr=pairs.counts,
        num_experts=num_experts,
        num_pairs=pairs.num_pairs,
        capacity=pairs.capacity,
        BLOCK_E=block_e,
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        num_warps=8,
    )
    return table, total
