"""Tiles of buckets that lie on the device: which there are, and which pairs one has.

The grid is what the fullest routing of so many pairs can need (:func:`tile_bound`). A program finds
its tile by counting those of the experts before it; where pairs are unevenly spread, programs past
the last tile end at once.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.rows import cdiv


@triton.jit
def bucket_tiles(
    tpe_ptr, num_experts, capacity, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    SPARED: tl.constexpr = 0, BIG: tl.constexpr = 0,
):  # fmt: skip
    """Entries of each bucket, how many of them to skip, its tiles and one past the last of those.

    Args:
        SPARED: entries that a bucket's last tile has to have more of, or there is none of them.
        BIG: skip what tiles of so many entries take, with that number spared.

    Returns:
        Those four, int32 [BLOCK_E], and the number of all tiles.
    """
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(tpe_ptr + e, mask=e < num_experts, other=0)
    # Clamped before it is narrowed: an int64 count may be any.
    counts = tl.minimum(tl.maximum(counts, 0), capacity).to(tl.int32)
    if BIG > 0:
        skipped = tl.minimum((counts + (BIG - 1 - SPARED)) // BIG * BIG, counts)
        tiles = tl.cdiv(counts - skipped, BLOCK_M)
    else:
        skipped = tl.zeros_like(counts)
        tiles = (counts + (BLOCK_M - 1 - SPARED)) // BLOCK_M
    return counts, skipped, tiles, tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)


@triton.jit
def start_of_tile(
    tile, counts, skipped, tiles, last, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """The tile's expert, int64, its first entry, and how many its bucket has from there."""
    e = tl.arange(0, BLOCK_E)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    first = tl.sum(tl.where(e == expert, skipped - (last - tiles) * BLOCK_M, 0), axis=0)
    first += tile * BLOCK_M
    return expert.to(tl.int64), first, count - first


def tile_bound(num_pairs: int, num_experts: int, capacity: int, block_m: int) -> int:
    """Tiles of block_m entries there can be, each pair being in one bucket at most.

    Every bucket in use ends in a tile that may be part full, and the full ones need block_m pairs.
    """
    in_use = min(num_pairs, num_experts)
    return max(min(in_use + num_pairs // block_m, num_experts * cdiv(capacity, block_m)), 1)
