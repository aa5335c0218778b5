"""Tiles of buckets that lie on the device: which there are, and which pairs one has.

The grid is what the fullest routing of so many pairs can need (:func:`tile_bound`). A program finds
its tile by counting those of the experts before it; where pairs are unevenly spread, programs past
the last tile end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv


@triton.jit
def bucket_tiles(
    tpe_ptr, num_experts, capacity, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Entries of each bucket, their tiles and one past the last of those, [BLOCK_E]; all tiles."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(tpe_ptr + e, mask=e < num_experts, other=0)
    # Clamped before it is narrowed: an int64 count may be any.
    counts = tl.minimum(tl.maximum(counts, 0), capacity).to(tl.int32)
    tiles = tl.cdiv(counts, BLOCK_M)
    return counts, tiles, tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)


@triton.jit
def start_of_tile(
    tile, counts, tiles, last, buckets_ptr, stride_buckets_expert,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The tile's expert, int64, where its entries begin, and how many its bucket has from there."""
    e = tl.arange(0, BLOCK_E)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(e == expert, last - tiles, 0), axis=0)
    expert, first = expert.to(tl.int64), (tile - first_tile) * BLOCK_M
    return expert, buckets_ptr + expert * stride_buckets_expert + first, count - first


@kernel(dynamic=("num_pairs", "capacity"))
def _clean_kernel(
    y_ptr,  # [num_tokens, top_k, n], to be filled with zeros
    clean_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_y_token,
    stride_y_slot,
    stride_buckets_expert,
    num_experts,
    num_rows,
    num_pairs,
    capacity,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,  # of entries
    BLOCK_P: tl.constexpr,  # of pairs
    BLOCK_N: tl.constexpr,
):
    """The first programs do a bucket each, the others BLOCK_P rows of y each."""
    expert = tl.program_id(0)
    if expert < num_experts:
        count = tl.load(tpe_ptr + expert)
        # Clamped before it is narrowed: an int64 count may be any.
        count = tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * stride_buckets_expert
        row_ptr = clean_ptr + expert.to(tl.int64) * capacity
        kept = tl.zeros([], tl.int32)
        for first in range(0, count, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1)
            known = (pair >= 0) & (pair < num_pairs)
            ones = known.to(tl.int32)
            at = kept + tl.cumsum(ones, axis=0) - 1
            tl.store(row_ptr + at, pair.to(tl.int32), mask=known)
            kept += tl.sum(ones, axis=0)
        tl.store(counts_ptr + expert, kept)
    else:
        pair = (expert - num_experts).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        y_rows = y_ptr + (pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot)[:, None]
        zeros = tl.zeros([BLOCK_P, BLOCK_N], y_ptr.dtype.element_ty)
        for first in range(0, num_rows, BLOCK_N):
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            tl.store(y_rows + n, zeros, mask=(pair < num_pairs)[:, None] & (n < num_rows))


def clean_buckets(y: Tensor, bucket_ids: Tensor, tpe: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of each bucket that are pairs of y [num_tokens, top_k, n], and their number.

    y is filled with zeros, which pairs without an expert keep: one launch for both. As each pair is
    in one bucket, there are no more tiles than :func:`tile_bound` then.
    """
    (num_experts, capacity), top_k = bucket_ids.shape, y.shape[1]
    num_pairs, num_rows = y.shape[0] * top_k, y.shape[2]
    clean = torch.empty(num_experts, capacity, dtype=torch.int32, device=y.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=y.device)
    block_p = 4
    _clean_kernel.launch(
        (num_experts + cdiv(num_pairs, block_p),),
        y,
        clean,
        counts,
        bucket_ids,
        tpe,
        y.stride(0),
        y.stride(1),
        bucket_ids.stride(0),
        num_experts,
        num_rows,
        num_pairs,
        capacity,
        TOP_K=top_k,
        BLOCK=512,
        BLOCK_P=block_p,
        BLOCK_N=512,
        num_warps=4,
    )
    return clean, counts


def tile_bound(num_pairs: int, num_experts: int, capacity: int, block_m: int) -> int:
    """Tiles of block_m entries there can be, each pair being in one bucket at most.

    Every bucket in use ends in a tile that may be part full, and the full ones need block_m pairs.
    """
    in_use = min(num_pairs, num_experts)
    return max(min(in_use + num_pairs // block_m, num_experts * cdiv(capacity, block_m)), 1)
