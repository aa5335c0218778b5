"""Which pairs each tile has, written down for programs that take many tiles in turn."""

from functools import cached_property
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, tile_bound
from ferrum_triton.kernels.moe.pairs import pairs_by_expert
from ferrum_triton.kernels.moe.prepare import PairTable, expert_and_entry, pairs_in
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Numbers of a tile: its expert, the first of its pairs among all by expert, and how many the expert
# has from there.
FIELDS = tl.constexpr(3)
# Tiles by experts, or by their pairs, that a program looks at.
CELLS = 4096


class TileTable(NamedTuple):
    """Tiles of pairs in device memory.

    Attributes:
        tiles: int32 [bound, FIELDS].
        total: int32 [1], how many tiles there are.
        pairs: int32 [num_pairs], by expert; -1 for one that another bucket has too, and is taken
            from there.
    """

    tiles: Tensor
    total: Tensor
    pairs: Tensor


@kernel(dynamic=("num_pairs", "capacity"))
def _tile_table_kernel(
    tiles_ptr,  # int32 [bound, FIELDS]
    total_ptr,  # int32 [1]
    by_expert_ptr,  # int32 [num_pairs]
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # [num_experts]
    places_ptr,  # int64 [num_pairs]
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
    # Short tiles, which take less time, come last: programs that take turns then end together.
    of_last = buckets.counts - (buckets.tiles - 1) * BLOCK_M
    short = ((of_last > 0) & (2 * of_last <= BLOCK_M)).to(tl.int32)
    short_before = tl.sum(tl.where(is_before, short[None, :], 0), axis=1)
    is_short = 2 * (count - first) <= BLOCK_M
    behind = buckets.total - tl.sum(short, axis=0) + short_before
    at = tiles_ptr + tl.where(is_short, behind, tile - short_before) * FIELDS
    tl.store(at, expert, mask=known)
    tl.store(at + 1, row, mask=known)
    tl.store(at + 2, left, mask=known)
    if tl.program_id(0) == 0:
        tl.store(total_ptr, buckets.total)
    m = tl.arange(0, BLOCK_M)[None, :]
    is_pair = known[:, None] & (m < left[:, None])
    entry = first[:, None] + m
    at = pairs_ptr + expert.to(tl.int64)[:, None] * capacity + entry
    pair = tl.load(at, mask=is_pair, other=0)
    home, place = expert_and_entry(tl.load(places_ptr + pair, mask=is_pair, other=-1))
    pair = tl.where((home == expert[:, None]) & (place == entry), pair, -1)
    tl.store(by_expert_ptr + row[:, None] + m, pair, mask=is_pair)


def tile_table(pairs: PairTable, block_m: int) -> TileTable:
    """Tiles of ``block_m`` pairs of one expert each; those of at most half as many come last."""
    num_experts, device = len(pairs.counts), pairs.counts.device
    bound = tile_bound(pairs.num_pairs, num_experts, pairs.capacity, block_m)
    table = TileTable(
        torch.empty(bound, FIELDS.value, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(pairs.num_pairs, dtype=torch.int32, device=device),
    )
    block_e = next_power_of_2(num_experts)
    block_t = max(min(CELLS // max(block_e, block_m), next_power_of_2(bound)), 1)
    _tile_table_kernel.launch(
        (cdiv(bound, block_t),),
        tiles_ptr=table.tiles,
        total_ptr=table.total,
        by_expert_ptr=table.pairs,
        pairs_ptr=pairs.pairs,
        counts_ptr=pairs.counts,
        places_ptr=pairs.places,
        num_experts=num_experts,
        num_pairs=pairs.num_pairs,
        capacity=pairs.capacity,
        BLOCK_E=block_e,
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        num_warps=8,
    )
    return table


class Found:
    """What products of the same buckets need to know of them, each found once.

    Args:
        bucket_ids, tpe: the buckets of ``compute_ids_tpe``.
        num_pairs: how many pairs there are.
    """

    def __init__(self, bucket_ids: Tensor, tpe: Tensor, num_pairs: int) -> None:
        self.bucket_ids, self.tpe, self.num_pairs = bucket_ids, tpe, num_pairs
        self._tiles: dict[int, TileTable] = {}

    @classmethod
    def by_ids(cls, ids: Tensor, num_experts: int) -> "Found":
        """Of pairs that name their experts, [num_tokens, top_k]."""
        pairs = pairs_by_expert(ids, num_experts)
        found = cls(pairs.pairs, pairs.counts, ids.numel())
        found.pairs = pairs
        return found

    @cached_property
    def pairs(self) -> PairTable:
        """The pairs in the buckets."""
        return pairs_in(self.bucket_ids, self.tpe, self.num_pairs)

    def tiles(self, block_m: int) -> TileTable:
        """Their tiles of ``block_m``."""
        if block_m not in self._tiles:
            self._tiles[block_m] = tile_table(self.pairs, block_m)
        return self._tiles[block_m]
