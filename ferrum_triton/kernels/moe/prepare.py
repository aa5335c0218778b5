"""What products of tiles of pairs start from: arranged activations, and buckets of pairs alone.

:func:`prepare` is one launch, for products that gather activations by token. :func:`pairs_in` and
``prepare_sorted`` (:mod:`.prepare_sorted`) are two, for products that take them by TMA: a row of
activations for each pair, those of an expert one after the other, so that a tile of pairs is a tile
of memory. The first does not depend on activations, and serves all products of the same buckets.

A pair in no bucket gets zeros. Nobody wrote its place, which is any number, and what the place
names is then another pair: so is a lost pair known.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import clamped_count
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import (
    Arranged,
    Order,
    arrange_token,
    block_and_warps,
    room_for,
)

# Entries of a bucket at a time.
ENTRIES = 512
# Pairs that a program clears at a time, of those that no tile may write.
CLEARED = tl.constexpr(64)


class PairTable(NamedTuple):
    """Buckets that hold pairs alone: tensors, or pointers and sizes in a kernel.

    Attributes:
        pairs: int32 [num_experts, capacity], up to their number.
        counts: int32 [num_experts], their number.
        places: int64 [num_pairs], where in pairs each is: the expert in the upper half, the entry
            in the lower one; of one in no bucket any number.
        num_pairs, capacity: the sizes.
    """

    pairs: Any
    counts: Any
    places: Any
    num_pairs: Any
    capacity: Any


class Result(NamedTuple):
    """Where a kernel writes y [num_tokens, top_k, num_rows]."""

    y: Any
    stride_token: Any
    stride_slot: Any
    num_rows: Any


@triton.jit
def expert_and_entry(place):
    """The halves of a place, int64: which bucket, and which of its pairs; int32."""
    return (place >> 32).to(tl.int32), place.to(tl.int32)


@triton.jit
def clear_rows(result, pair, lost, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Fill y's rows of the pairs under ``lost`` with zeros; int64 [P] and bool [P]."""
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        y = result.y + pair // TOP_K * result.stride_token + pair % TOP_K * result.stride_slot
        zeros = tl.zeros([pair.shape[0], BLOCK_N], result.y.dtype.element_ty)
        for first in range(0, result.num_rows, BLOCK_N):
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            tl.store(y[:, None] + n, zeros, mask=lost[:, None] & (n < result.num_rows))


@triton.jit
def clear_lost(result, table, pair, num_experts, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Fill y's rows of pairs that are in no bucket with zeros.

    Args:
        result: :class:`Result`.
        table: :class:`PairTable`.
        pair: int64 [P], any there are or more.
    """
    place = tl.load(table.places + pair, mask=pair < table.num_pairs, other=-1)
    expert, entry = expert_and_entry(place)
    known = (expert >= 0) & (expert < num_experts)
    count = tl.load(table.counts + expert, mask=known, other=0)
    at = table.pairs + expert.to(tl.int64) * table.capacity + entry
    found = tl.load(at, mask=known & (entry >= 0) & (entry < count), other=-1)
    clear_rows(result, pair, (found != pair) & (pair < table.num_pairs), TOP_K, BLOCK_N)


@triton.jit
def find_pairs(table, expert, buckets_ptr, tpe_ptr, stride_buckets_expert, BLOCK_C: tl.constexpr):
    """Write down which entries of an expert's bucket are pairs, their number and their places."""
    count = clamped_count(tl.load(tpe_ptr + expert), table.capacity)
    bucket_ptr = buckets_ptr + expert.to(tl.int64) * stride_buckets_expert
    row_ptr = table.pairs + expert.to(tl.int64) * table.capacity
    kept = tl.zeros([], tl.int32)
    for first in range(0, count, BLOCK_C):
        entry = first + tl.arange(0, BLOCK_C)
        pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1)
        known = (pair >= 0) & (pair < table.num_pairs)
        ones = known.to(tl.int32)
        at = kept + tl.cumsum(ones, axis=0) - 1
        tl.store(row_ptr + at, pair.to(tl.int32), mask=known)
        place = (expert.to(tl.int64) << 32) | at.to(tl.int64)
        tl.store(table.places + pair, place, mask=known)
        kept += tl.sum(ones, axis=0)
    tl.store(table.counts + expert, kept)


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
    SLOTS: tl.constexpr,  # rows of a that a token has
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    INTERLEAVE: tl.constexpr,  # 1 where a thread's words lie together, or 0
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,  # entries of a bucket at a time
    PDL: tl.constexpr,
):
    """Programs of two kinds: an expert's find its pairs, the others arrange a row each."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    program = tl.program_id(0)
    if program < num_experts:
        table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, capacity)
        find_pairs(table, program, buckets_ptr, tpe_ptr, stride_buckets_expert, BLOCK_C)
    else:
        row = (program - num_experts).to(tl.int64)
        a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
        to = Arranged(x_ptr, sums_ptr, factor_ptr)
        arrange_token(to, row, a_row, num_weights, num_padded, COLUMNS, HALVES, BLOCK_K, INTERLEAVE)


@kernel(dynamic=("num_pairs", "capacity"))
def _find_pairs_kernel(
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    places_ptr,  # int64 [num_pairs]
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_buckets_expert,
    num_pairs,
    capacity,
    BLOCK_C: tl.constexpr,  # entries of a bucket at a time
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, capacity)
    find_pairs(table, tl.program_id(0), buckets_ptr, tpe_ptr, stride_buckets_expert, BLOCK_C)


def room_for_pairs(
    num_experts: int, capacity: int, num_pairs: int, device: torch.device
) -> PairTable:
    """Memory for a table of the pairs in buckets."""
    return PairTable(
        pairs=torch.empty(num_experts, capacity, dtype=torch.int32, device=device),
        counts=torch.empty(num_experts, dtype=torch.int32, device=device),
        places=torch.empty(num_pairs, dtype=torch.int64, device=device),
        num_pairs=num_pairs,
        capacity=capacity,
    )


def pairs_in(
    bucket_ids: Tensor, tpe: Tensor, num_pairs: int, *, absent: int | None = None
) -> PairTable:
    """The table of the pairs in buckets.

    Args:
        absent: the place of pairs in no bucket; it is any without.
    """
    table = room_for_pairs(*bucket_ids.shape, num_pairs, bucket_ids.device)
    if absent is not None:
        table.places.fill_(absent)
    _find_pairs_kernel.launch(
        (len(bucket_ids),),
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        buckets_ptr=bucket_ids,
        tpe_ptr=tpe,
        stride_buckets_expert=bucket_ids.stride(0),
        num_pairs=table.num_pairs,
        capacity=table.capacity,
        BLOCK_C=ENTRIES,
        num_warps=4,
    )
    return table


def experts_of_pairs(bucket_ids: Tensor, tpe: Tensor, num_pairs: int) -> Tensor:
    """int64 [num_pairs], the expert of each pair in a bucket, -1 of the others."""
    return pairs_in(bucket_ids, tpe, num_pairs, absent=-1).places >> 32


def prepare(
    a: Tensor, bucket_ids: Tensor, tpe: Tensor, top_k: int, order: Order
) -> tuple[Arranged, PairTable]:
    """Arrange every row of a, and drop entries that are no pair.

    As each pair is in one bucket, there are no more tiles than ``tile_bound`` says then.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        bucket_ids, tpe: the buckets of ``compute_ids_tpe``.
        top_k: slots of a token.
        order: how the products take activations.

    Returns:
        The arranged activations, and the pairs of each expert.
    """
    num_experts, slots = len(bucket_ids), top_k if a.dim() == 3 else 1
    num_rows, num_weights = a.shape[0] * slots, a.shape[-1]
    to = room_for(num_rows, num_weights, a.device, order)
    table = room_for_pairs(*bucket_ids.shape, a.shape[0] * top_k, a.device)
    block_k, warps = block_and_warps(to.x.shape[1])
    _prepare_kernel.launch(
        (num_experts + num_rows,),
        x_ptr=to.x,
        sums_ptr=to.sums,
        factor_ptr=to.factor,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        a_ptr=a,
        buckets_ptr=bucket_ids,
        tpe_ptr=tpe,
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_buckets_expert=bucket_ids.stride(0),
        num_experts=num_experts,
        num_weights=num_weights,
        num_padded=to.x.shape[1],
        num_pairs=table.num_pairs,
        capacity=table.capacity,
        SLOTS=slots,
        COLUMNS=order.words // order.halves,
        HALVES=order.halves,
        INTERLEAVE=order.interleave,
        BLOCK_K=block_k,
        BLOCK_C=ENTRIES,
        num_warps=warps,
    )
    return to, table
