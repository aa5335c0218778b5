"""Tiles of buckets that lie on the device: which there are, and which pairs one has.

The grid is what the fullest routing of so many pairs can need (:func:`tile_bound`). A program finds
its tile by counting those of the experts before it; where pairs are unevenly spread, programs past
the last tile end at once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.rows import cdiv


@dataclass(frozen=True)
class Buckets:
    """What is constant of the pairs in buckets.

    Attributes:
        top_k: slots of a token.
        per_pair: a has a row for each pair, not for each token.
        block_e: power of two >= num_experts.
        spared, big: which pairs tiles take, see ``bucket_tiles``.
    """

    top_k: int
    per_pair: bool
    block_e: int
    spared: int
    big: int


class BucketTiles(NamedTuple):
    """Tiles of all buckets, int32 [BLOCK_E] each."""

    counts: Any  # entries of a bucket
    skipped: Any  # entries that tiles of another size take
    tiles: Any  # tiles of a bucket
    end: Any  # one past the last of them
    total: Any  # tiles of all buckets, a scalar


class TilePairs(NamedTuple):
    """What a tile holds: its expert, int64, its bucket's first entry and how many from there."""

    expert: Any
    first: Any
    left: Any


@triton.jit
def clamped_count(tpe, capacity):
    """A bucket's entries as int32; clamped before it is narrowed, as an int64 count may be any."""
    return tl.minimum(tl.maximum(tpe, 0), capacity).to(tl.int32)


@triton.jit
def bucket_tiles(
    tpe_ptr,
    num_experts,
    capacity,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPARED: tl.constexpr = 0,
    BIG: tl.constexpr = 0,
):
    """:class:`BucketTiles` of BLOCK_M entries.

    Args:
        SPARED: entries that a bucket's last tile has to have more of, or there is none of them.
        BIG: entries of the tiles before these, which had SPARED spared, and whose are skipped.
    """
    e = tl.arange(0, BLOCK_E)
    # Past L1, which may hold lines of before: some programs read them before they wait.
    counts = tl.load(tpe_ptr + e, mask=e < num_experts, other=0, cache_modifier=".cg")
    counts = clamped_count(counts, capacity)
    if BIG > 0:
        skipped = tl.minimum((counts + (BIG - 1 - SPARED)) // BIG * BIG, counts)
        tiles = tl.cdiv(counts - skipped, BLOCK_M)
    else:
        skipped = tl.zeros_like(counts)
        tiles = (counts + (BLOCK_M - 1 - SPARED)) // BLOCK_M
    return BucketTiles(counts, skipped, tiles, tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0))


@triton.jit
def pairs_of_tile(tile, buckets, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """:class:`TilePairs` of a tile."""
    e = tl.arange(0, BLOCK_E)
    expert = tl.sum((buckets.end <= tile).to(tl.int32), axis=0)
    count = tl.sum(tl.where(e == expert, buckets.counts, 0), axis=0)
    skipped = buckets.skipped - (buckets.end - buckets.tiles) * BLOCK_M
    first = tl.sum(tl.where(e == expert, skipped, 0), axis=0) + tile * BLOCK_M
    return TilePairs(expert.to(tl.int64), first, count - first)


def tile_bound(num_pairs: int, num_experts: int, capacity: int, block_m: int) -> int:
    """Tiles of block_m entries there can be, each pair being in one bucket at most.

    Every bucket in use ends in a tile that may be part full, and the full ones need block_m pairs.
    """
    in_use = min(num_pairs, num_experts)
    return max(min(in_use + num_pairs // block_m, num_experts * cdiv(capacity, block_m)), 1)
