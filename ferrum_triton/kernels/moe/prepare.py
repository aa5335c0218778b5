"""What products of tiles of pairs start from, in one launch.

Some programs arrange a row of activations each, as :mod:`ferrum_triton.kernels.quant.activations`
does. The others lay an expert's pairs out in tiles, so that a program of the product reads a tile's
expert and pairs at once and nothing before them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, tile_bound
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.quant.activations import arrange_token, block_and_warps, room_for
from ferrum_triton.kernels.rows import next_power_of_2


@triton.jit
def _pairs_in_buckets(
    counts, buckets_ptr, stride_buckets_expert, num_pairs, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """How many of each bucket's first ``counts`` entries are pairs, [BLOCK_E]."""
    expert = tl.arange(0, BLOCK_E).to(tl.int64)
    bucket = buckets_ptr + (expert * stride_buckets_expert)[:, None]
    known = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.max(counts, axis=0), BLOCK_C):
        entry = (first + tl.arange(0, BLOCK_C))[None, :]
        pair = tl.load(bucket + entry, mask=entry < counts[:, None], other=-1)
        known += tl.sum(((pair >= 0) & (pair < num_pairs)).to(tl.int32), axis=1)
    return known


@kernel(dynamic=("num_pairs", "num_tiles", "capacity"))
def _prepare_kernel(
    x_ptr,  # [num_tokens * slots, padded k], float16
    sums_ptr,  # [num_tokens * slots, padded k / 8], float16
    factor_ptr,  # [num_tokens * slots], float32
    experts_ptr,  # int32 [num_tiles]
    pairs_ptr,  # int32 [num_tiles, BLOCK_M]
    places_ptr,  # int32 [num_pairs]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_a_token,
    stride_a_slot,
    stride_buckets_expert,
    num_experts,
    num_weights,
    num_padded,
    num_pairs,
    num_tiles,
    capacity,
    SLOTS: tl.constexpr,  # rows of a that a token has
    COLUMNS: tl.constexpr,  # of a product
    HALVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_M: tl.constexpr,  # pairs of a tile
    BLOCK_C: tl.constexpr,  # entries of a bucket at a time
    CHAINED: tl.constexpr,  # starts while the launch before ends, and lets the next one do so
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program >= num_experts:
        row = (program - num_experts).to(tl.int64)
        a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
        arrange_token(
            row, x_ptr, sums_ptr, factor_ptr, a_row, 0, num_weights, num_padded, COLUMNS, HALVES,
            BLOCK_K,
        )  # fmt: skip
        return

    counts, tiles, last, total = bucket_tiles(tpe_ptr, num_experts, capacity, BLOCK_E, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    count = tl.sum(tl.where(e == program, counts, 0), axis=0)
    if total > num_tiles:
        # So many entries cannot all be pairs: those that are have to be counted.
        known = _pairs_in_buckets(
            counts, buckets_ptr, stride_buckets_expert, num_pairs, BLOCK_E, BLOCK_C // 64
        )
        tiles = tl.cdiv(known, BLOCK_M)
        last = tl.cumsum(tiles, axis=0)
        total = tl.sum(tiles, axis=0)
    own_last = tl.sum(tl.where(e == program, last, 0), axis=0)
    first_tile = own_last - tl.sum(tl.where(e == program, tiles, 0), axis=0)

    c = tl.arange(0, BLOCK_C)
    # An expert a tile; the last program says of tiles past the last one that they have none.
    end = own_last
    if program == num_experts - 1:
        end = num_tiles
    for first in range(first_tile, end, BLOCK_C):
        tile = first + c
        expert = tl.where(tile < own_last, program, -1)
        tl.store(experts_ptr + tile, expert, mask=(tile < end) & (tile < num_tiles))

    bucket_ptr = buckets_ptr + program.to(tl.int64) * stride_buckets_expert
    place, room = first_tile * BLOCK_M, num_tiles * BLOCK_M
    for first in range(0, count, BLOCK_C):
        entry = first + c
        pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1)
        known = (pair >= 0) & (pair < num_pairs)
        ones = known.to(tl.int32)
        at = place + tl.cumsum(ones, axis=0) - 1
        known &= at < room
        tl.store(pairs_ptr + at, pair.to(tl.int32), mask=known)
        tl.store(places_ptr + pair, at, mask=known)
        place += tl.sum(ones, axis=0)
    for first in range(place, tl.minimum(own_last * BLOCK_M, room), BLOCK_C):
        at = first + c
        tl.store(pairs_ptr + at, -1, mask=(at < own_last * BLOCK_M) & (at < room))


class Prepared(NamedTuple):
    """Arranged activations, and tiles of pairs, each of one expert.

    Attributes:
        x: float16 [rows, padded k], of each row of activations.
        sums: float16 [rows, padded k / 8].
        factor: float32 [rows].
        experts: int32 [num_tiles], of each tile, -1 of those past the last.
        pairs: int32 [num_tiles, tokens], -1 past a tile's pairs; anything in tiles past the last.
        places: int32 [num_pairs], where in pairs each is; anything for one that is not there, so
            a place counts only if it holds the pair.
    """

    x: Tensor
    sums: Tensor
    factor: Tensor
    experts: Tensor
    pairs: Tensor
    places: Tensor


def prepare(
    a: Tensor, bucket_ids: Tensor, tpe: Tensor, top_k: int, tokens: int, words: int, halves: int
) -> Prepared:
    """Arrange a, and lay the entries of buckets that are pairs out in tiles.

    As each pair is in one bucket, there are no more tiles than ``tile_bound`` says.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        bucket_ids, tpe: of ``compute_ids_tpe``.
        top_k: slots of a token.
        tokens: pairs of a tile.
        words, halves: as ``arrange`` takes them.
    """
    (num_experts, capacity), num_pairs = bucket_ids.shape, len(a) * top_k
    slots = top_k if a.dim() == 3 else 1
    x, sums, factor = room_for(len(a) * slots, a.shape[-1], a.device)
    num_tiles = tile_bound(num_pairs, num_experts, capacity, tokens)
    experts, pairs, places = (
        torch.empty(shape, dtype=torch.int32, device=a.device)
        for shape in ((num_tiles,), (num_tiles, tokens), (num_pairs,))
    )
    block_k, warps = block_and_warps(x.shape[1])
    chained = capability(a.device) >= (9, 0)
    _prepare_kernel.launch(
        (num_experts + len(a) * slots,),
        x,
        sums,
        factor,
        experts,
        pairs,
        places,
        a,
        bucket_ids,
        tpe,
        a.stride(0),
        slot_stride(a),
        bucket_ids.stride(0),
        num_experts,
        a.shape[-1],
        x.shape[1],
        num_pairs,
        num_tiles,
        capacity,
        SLOTS=slots,
        COLUMNS=words // halves,
        HALVES=halves,
        BLOCK_K=block_k,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=tokens,
        BLOCK_C=512,
        CHAINED=chained,
        num_warps=warps,
        **({"launch_pdl": True} if chained else {}),
    )
    return Prepared(x, sums, factor, experts, pairs, places)
