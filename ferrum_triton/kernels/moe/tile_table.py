"""Which pairs each tile has, written down for programs that take many tiles in turn."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.moe.buckets import bucket_tiles, tile_bound
from ferrum_triton.kernels.moe.pairs import pairs_by_expert
from ferrum_triton.kernels.moe.prepare import PairTable, expert_and_entry, pairs_in

# Numbers of a tile: its expert, the first of its pairs among all by expert, and how many the expert
# has from there.
FIELDS = tl.constexpr(3)


class TileTable(NamedTuple):
    """Tiles of pairs of one expert each; those of at most half as many as a tile has come last.

    Attributes:
        tiles: int32 [bound, FIELDS].
        total: int32 [1], how many tiles there are.
        pairs: int32 [num_pairs], by expert; -1 for one that another bucket has too, and is taken
            from there.
    """

    tiles: Any
    total: Any
    pairs: Any


@triton.constexpr_function
def tiles_at_once(cells: int, block_e: int, block_m: int) -> int:
    """Tiles that a program writes, a power of two."""
    return max(cells // max(block_e, block_m), 1)


@triton.jit
def write_tiles(
    to,
    table,
    num_experts,
    program,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CELLS: tl.constexpr,
):
    """A program's part of a tile table.

    Args:
        to: :class:`TileTable` pointers.
        table: :class:`PairTable`.
        program: its number among those that write the table.
        BLOCK_E: power of two >= num_experts.
        BLOCK_M: pairs of a tile.
        CELLS: tiles by experts, or by their pairs, that a program looks at.
    """
    BLOCK_T: tl.constexpr = tiles_at_once(CELLS, BLOCK_E, BLOCK_M)
    capacity, num_pairs = table.capacity, table.num_pairs
    buckets = bucket_tiles(table.counts, num_experts, capacity, BLOCK_E, BLOCK_M)
    tile = program * BLOCK_T + tl.arange(0, BLOCK_T)
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
    at = to.tiles + tl.where(is_short, behind, tile - short_before) * FIELDS
    tl.store(at, expert, mask=known)
    tl.store(at + 1, row, mask=known)
    tl.store(at + 2, left, mask=known)
    if program == 0:
        tl.store(to.total, buckets.total)
    m = tl.arange(0, BLOCK_M)[None, :]
    is_pair = known[:, None] & (m < left[:, None])
    entry = first[:, None] + m
    at = table.pairs + expert.to(tl.int64)[:, None] * capacity + entry
    pair = tl.load(at, mask=is_pair, other=0)
    home, place = expert_and_entry(tl.load(table.places + pair, mask=is_pair, other=-1))
    pair = tl.where((home == expert[:, None]) & (place == entry), pair, -1)
    tl.store(to.pairs + row[:, None] + m, pair, mask=is_pair)


def room_for_tiles(pairs: PairTable, block_m: int) -> TileTable:
    """Memory for the tiles of ``block_m`` pairs."""
    bound = tile_bound(pairs.num_pairs, len(pairs.counts), pairs.capacity, block_m)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=pairs.counts.device)

    return TileTable(ints(bound, FIELDS.value), ints(1), ints(pairs.num_pairs))


class Found:
    """What products of the same buckets need to know of them, each found once.

    Args:
        bucket_ids, tpe: the buckets of ``compute_ids_tpe``.
        num_pairs: how many pairs there are.
    """

    def __init__(self, bucket_ids: Tensor, tpe: Tensor, num_pairs: int) -> None:
        self.bucket_ids, self.tpe, self.num_pairs = bucket_ids, tpe, num_pairs
        self.tiles: dict[int, TileTable] = {}  # those written, by their pairs

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
