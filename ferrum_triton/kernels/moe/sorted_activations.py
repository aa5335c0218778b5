"""Activations by expert: a row for each pair, those of an expert one after the other.

So a tile of pairs is a tile of memory, which a tensor descriptor can bring. The first launch finds
where pairs are (:mod:`ferrum_triton.kernels.moe.prepare`), the second arranges a row of activations
and writes it to each of its pairs' places.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.prepare import (
    ENTRIES,
    Prepared,
    expert_and_entry,
    find_pairs,
    room_for_pairs,
)
from ferrum_triton.kernels.quant.activations import (
    arranged,
    block_and_warps,
    first_block,
    load_block,
    room_for,
    store_arranged,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Rows of activations from which on a program writes all copies of its row: before, programs are
# too few to hide what each waits for.
MANY_ROWS = 1024


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
    RELEASE: tl.constexpr,  # the kernel after this one may start; it waits for the end by itself
):
    if RELEASE:
        gdc_launch_dependents()
        gdc_wait()
    find_pairs(
        tl.program_id(0), pairs_ptr, counts_ptr, places_ptr, buckets_ptr, tpe_ptr,
        stride_buckets_expert, num_pairs, capacity, BLOCK_C,
    )  # fmt: skip


@kernel(dynamic=("num_pairs", "capacity"))
def _arrange_pairs_kernel(
    x_ptr,  # [num_pairs, padded k], float16
    sums_ptr,  # [num_pairs, padded k / 8], float16
    factor_ptr,  # [num_pairs], float32
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    places_ptr,  # int64 [num_pairs]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,
    num_experts,
    num_rows,  # of the result
    num_weights,
    num_padded,
    num_pairs,
    capacity,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # rows of a that a token has
    COLUMNS: tl.constexpr,  # of a product
    HALVES: tl.constexpr,
    COPIES: tl.constexpr,  # rows of x for one of a
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_C: tl.constexpr,  # of them a program makes
    BLOCK_N: tl.constexpr,  # of the result at a time
    RELEASE: tl.constexpr,  # the kernel after this one may start; it waits for the end by itself
):
    if RELEASE:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    # Where each copy goes, all found at once. Nobody wrote the place of a pair that is in no
    # bucket: it is any number.
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    e = tl.arange(0, BLOCK_E)
    pair = row * COPIES + c
    place = tl.load(places_ptr + pair, mask=c < COPIES, other=-1)
    counts = tl.load(counts_ptr + e, mask=e < num_experts, other=0)
    a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
    a, inverse = first_block(a_row, num_weights, num_padded, BLOCK_K)
    expert, entry = expert_and_entry(place)
    count = tl.sum(tl.where(e[None, :] == expert[:, None], counts[None, :], 0), axis=1)
    at = pairs_ptr + expert.to(tl.int64) * capacity + entry
    found = tl.load(at, mask=(entry >= 0) & (entry < count), other=-1) == pair
    before = tl.sum(tl.where(e[None, :] < expert[:, None], counts[None, :], 0), axis=1)
    to = before.to(tl.int64) + entry
    to = tl.where(found & (to < num_pairs), to, -1)  # not beyond, should pairs be in two places
    for first in range(0, num_padded, BLOCK_K):
        x, sums = arranged(a, inverse, COLUMNS, HALVES)
        for copy in tl.static_range(BLOCK_C):
            to_row = tl.sum(tl.where(tl.arange(0, BLOCK_C) == copy, to, 0), axis=0)
            if to_row >= 0:
                store_arranged(to_row, first, x, sums, x_ptr, sums_ptr, num_padded)
        if first + BLOCK_K < num_padded:
            a = load_block(a_row, first + BLOCK_K, num_weights, BLOCK_K)
    factor = ((254 - inverse) << 23).to(tl.float32, bitcast=True)
    tl.store(factor_ptr + to, tl.zeros([BLOCK_C], tl.float32) + factor, mask=to >= 0)
    lost = (to < 0) & (c < COPIES)
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        y_rows = y_ptr + pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot
        for first in range(0, num_rows, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            zeros = tl.zeros([BLOCK_C, BLOCK_N], y_ptr.dtype.element_ty)
            mask = lost[:, None] & (n < num_rows)[None, :]
            tl.store(y_rows[:, None] + n[None, :], zeros, mask=mask)


def prepare_sorted(
    a: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    top_k: int,
    words: int,
    halves: int,
    y: Tensor,
    release: bool = False,
) -> Prepared:
    """As ``prepare``, but x, sums and factor have a row for each pair, by expert.

    Rows of an expert begin where those of the experts before it end. Pairs in no bucket have none,
    and their rows of y [num_tokens, top_k, n] are filled with zeros here.
    """
    (num_experts, capacity), num_tokens, device = bucket_ids.shape, a.shape[0], a.device
    num_pairs, slots = num_tokens * top_k, top_k if a.dim() == 3 else 1
    x, sums, factor = room_for(num_pairs, a.shape[-1], device)
    pairs, counts, places = room_for_pairs(num_experts, capacity, num_pairs, device)
    overlapped = {"launch_pdl": True} if release else {}
    _find_pairs_kernel.launch(
        (num_experts,),
        pairs,
        counts,
        places,
        bucket_ids,
        tpe,
        bucket_ids.stride(0),
        num_pairs,
        capacity,
        BLOCK_C=ENTRIES,
        RELEASE=release,
        num_warps=4,
        **overlapped,
    )
    copies, (block_k, warps) = top_k // slots, block_and_warps(x.shape[1])
    each = next_power_of_2(copies) if num_tokens * slots >= MANY_ROWS else 1
    _arrange_pairs_kernel.launch(
        (num_tokens * slots, cdiv(copies, each)),
        x,
        sums,
        factor,
        y,
        a,
        pairs,
        counts,
        places,
        y.stride(0),
        y.stride(1),
        a.stride(0),
        slot_stride(a),
        num_experts,
        y.shape[2],
        a.shape[-1],
        x.shape[1],
        num_pairs,
        capacity,
        TOP_K=top_k,
        SLOTS=slots,
        COLUMNS=words // halves,
        HALVES=halves,
        COPIES=copies,
        BLOCK_K=block_k,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_C=each,
        BLOCK_N=128,
        RELEASE=release,
        num_warps=warps,
        **overlapped,
    )
    return Prepared(x, sums, factor, pairs, counts, places)
