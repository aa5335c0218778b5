"""What products of tiles of pairs start from, in one launch.

Programs come in two kinds: some arrange a row of activations each, as
:mod:`ferrum_triton.kernels.quant.activations` does; and some write down which entries of a bucket
are pairs, and where each pair is. Pairs in no bucket get zeros from :func:`clear_lost`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.quant.activations import arrange_token, block_and_warps, room_for

# Entries of a bucket at a time.
ENTRIES = 512


@triton.jit
def expert_and_entry(place):
    """The halves of a place, int64: which bucket, and which of its pairs; int32."""
    return (place >> 32).to(tl.int32), place.to(tl.int32)


@triton.jit
def clear_lost(
    y_ptr, places_ptr, pairs_ptr, counts_ptr, pair, stride_y_token, stride_y_slot, num_experts,
    num_rows, num_pairs, capacity, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fill y's rows of pairs that are in no bucket with zeros.

    Nobody wrote the place of such a pair: it is any number, and what lies there another pair.

    Args:
        pair: int64 [P], any there are or more.
    """
    place = tl.load(places_ptr + pair, mask=pair < num_pairs, other=-1)
    expert, entry = expert_and_entry(place)
    known = (expert >= 0) & (expert < num_experts)
    count = tl.load(counts_ptr + expert, mask=known, other=0)
    at = pairs_ptr + expert.to(tl.int64) * capacity + entry
    found = tl.load(at, mask=known & (entry >= 0) & (entry < count), other=-1)
    lost = (found != pair) & (pair < num_pairs)
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        y_rows = y_ptr + (pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot)[:, None]
        zeros = tl.zeros([pair.shape[0], BLOCK_N], y_ptr.dtype.element_ty)
        for first in range(0, num_rows, BLOCK_N):
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            tl.store(y_rows + n, zeros, mask=lost[:, None] & (n < num_rows))


@triton.jit
def find_pairs(
    expert, pairs_ptr, counts_ptr, places_ptr, buckets_ptr, tpe_ptr, stride_buckets_expert,
    num_pairs, capacity, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write down which entries of an expert's bucket are pairs, their number and their places."""
    count = tl.load(tpe_ptr + expert)
    # Clamped before it is narrowed: an int64 count may be any.
    count = tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)
    bucket_ptr = buckets_ptr + expert.to(tl.int64) * stride_buckets_expert
    row_ptr = pairs_ptr + expert.to(tl.int64) * capacity
    kept = tl.zeros([], tl.int32)
    for first in range(0, count, BLOCK_C):
        entry = first + tl.arange(0, BLOCK_C)
        pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1)
        known = (pair >= 0) & (pair < num_pairs)
        ones = known.to(tl.int32)
        at = kept + tl.cumsum(ones, axis=0) - 1
        tl.store(row_ptr + at, pair.to(tl.int32), mask=known)
        place = (expert.to(tl.int64) << 32) | at.to(tl.int64)
        tl.store(places_ptr + pair, place, mask=known)
        kept += tl.sum(ones, axis=0)
    tl.store(counts_ptr + expert, kept)


@kernel(dynamic=("num_pairs", "capacity"))
def _prepare_kernel(
    x_ptr,  # [num_tokens * slots, padded k], float16
    sums_ptr,  # [num_tokens * slots, padded k / 8], float16
    factor_ptr,  # [num_tokens * slots], float32
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    places_ptr,  # int64 [num_pairs]
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
    capacity,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # rows of a that a token has
    COLUMNS: tl.constexpr,  # of a product
    HALVES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,  # entries of a bucket at a time
    RELEASE: tl.constexpr,  # the kernel after this one may start; it waits for the end by itself
):
    if RELEASE:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    if program < num_experts:
        find_pairs(
            program, pairs_ptr, counts_ptr, places_ptr, buckets_ptr, tpe_ptr,
            stride_buckets_expert, num_pairs, capacity, BLOCK_C,
        )  # fmt: skip
    else:
        row = (program - num_experts).to(tl.int64)
        a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
        arrange_token(
            row, x_ptr, sums_ptr, factor_ptr, a_row, 0, num_weights, num_padded, COLUMNS, HALVES,
            BLOCK_K,
        )  # fmt: skip


class Prepared(NamedTuple):
    """Arranged activations, and buckets that hold pairs alone.

    Attributes:
        x: float16 [rows, padded k], of each row of activations.
        sums: float16 [rows, padded k / 8].
        factor: float32 [rows].
        pairs: int32 [num_experts, capacity], up to their number.
        counts: int32 [num_experts], their number.
        places: int64 [num_pairs], where in pairs each is: the expert in the upper half, the entry
            in the lower one; of one in no bucket any number.
    """

    x: Tensor
    sums: Tensor
    factor: Tensor
    pairs: Tensor
    counts: Tensor
    places: Tensor


def room_for_pairs(
    num_experts: int, capacity: int, num_pairs: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for pairs, counts and places."""
    pairs = torch.empty(num_experts, capacity, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    return pairs, counts, torch.empty(num_pairs, dtype=torch.int64, device=device)


def prepare(
    a: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    top_k: int,
    words: int,
    halves: int,
    release: bool = False,
) -> Prepared:
    """Arrange a, and drop entries that are no pair.

    As each pair is in one bucket, there are no more tiles than ``tile_bound`` says then.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        bucket_ids, tpe: of ``compute_ids_tpe``.
        top_k: slots of a token.
        words, halves: as ``arrange`` takes them.
        release: the kernel after this one may start early, as this one may.
    """
    (num_experts, capacity), num_tokens, device = bucket_ids.shape, a.shape[0], a.device
    num_pairs, slots = num_tokens * top_k, top_k if a.dim() == 3 else 1
    x, sums, factor = room_for(num_tokens * slots, a.shape[-1], device)
    pairs, counts, places = room_for_pairs(num_experts, capacity, num_pairs, device)
    block_k, warps = block_and_warps(x.shape[1])
    _prepare_kernel.launch(
        (num_experts + num_tokens * slots,),
        x,
        sums,
        factor,
        pairs,
        counts,
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
        capacity,
        TOP_K=top_k,
        SLOTS=slots,
        COLUMNS=words // halves,
        HALVES=halves,
        BLOCK_K=block_k,
        BLOCK_C=ENTRIES,
        RELEASE=release,
        num_warps=warps,
        **({"launch_pdl": True} if release else {}),
    )
    return Prepared(x, sums, factor, pairs, counts, places)
