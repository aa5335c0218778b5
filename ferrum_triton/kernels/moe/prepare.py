"""What products of tiles of pairs start from, in one launch.

Programs come in three kinds: some arrange a row of activations each, as
:mod:`ferrum_triton.kernels.quant.activations` does; some write down which entries of a bucket are
pairs; and some fill the result with zeros, which pairs without an expert keep.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.quant.activations import arrange_token, block_and_warps, room_for
from ferrum_triton.kernels.rows import cdiv

CLEARED = 4  # rows of the result a program fills


@kernel(dynamic=("num_pairs", "capacity"))
def _prepare_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    x_ptr,  # [num_tokens * slots, padded k], float16
    sums_ptr,  # [num_tokens * slots, padded k / 8], float16
    factor_ptr,  # [num_tokens * slots], float32
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,
    stride_buckets_expert,
    num_experts,
    num_rows,
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
    BLOCK_P: tl.constexpr,  # rows of y a program
    BLOCK_N: tl.constexpr,
):
    num_arranged = num_pairs // TOP_K * SLOTS
    program = tl.program_id(0)
    if program < num_experts:
        count = tl.load(tpe_ptr + program)
        # Clamped before it is narrowed: an int64 count may be any.
        count = tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)
        bucket_ptr = buckets_ptr + program.to(tl.int64) * stride_buckets_expert
        row_ptr = pairs_ptr + program.to(tl.int64) * capacity
        kept = tl.zeros([], tl.int32)
        for first in range(0, count, BLOCK_C):
            entry = first + tl.arange(0, BLOCK_C)
            pair = tl.load(bucket_ptr + entry, mask=entry < count, other=-1)
            known = (pair >= 0) & (pair < num_pairs)
            ones = known.to(tl.int32)
            at = kept + tl.cumsum(ones, axis=0) - 1
            tl.store(row_ptr + at, pair.to(tl.int32), mask=known)
            kept += tl.sum(ones, axis=0)
        tl.store(counts_ptr + program, kept)
    elif program < num_experts + num_arranged:
        row = (program - num_experts).to(tl.int64)
        a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
        arrange_token(
            row, x_ptr, sums_ptr, factor_ptr, a_row, 0, num_weights, num_padded, COLUMNS, HALVES,
            BLOCK_K,
        )  # fmt: skip
    else:
        first = (program - num_experts - num_arranged).to(tl.int64) * BLOCK_P
        pair = first + tl.arange(0, BLOCK_P)
        y_rows = y_ptr + (pair // TOP_K * stride_y_token + pair % TOP_K * stride_y_slot)[:, None]
        zeros = tl.zeros([BLOCK_P, BLOCK_N], y_ptr.dtype.element_ty)
        for first in range(0, num_rows, BLOCK_N):
            n = (first + tl.arange(0, BLOCK_N))[None, :]
            tl.store(y_rows + n, zeros, mask=(pair < num_pairs)[:, None] & (n < num_rows))


class Prepared(NamedTuple):
    """Arranged activations, and buckets that hold pairs alone.

    Attributes:
        x: float16 [rows, padded k], of each row of activations.
        sums: float16 [rows, padded k / 8].
        factor: float32 [rows].
        pairs: int32 [num_experts, capacity], up to their number.
        counts: int32 [num_experts], their number.
    """

    x: Tensor
    sums: Tensor
    factor: Tensor
    pairs: Tensor
    counts: Tensor


def prepare(
    y: Tensor, a: Tensor, bucket_ids: Tensor, tpe: Tensor, words: int, halves: int
) -> Prepared:
    """Fill y [num_tokens, top_k, n] with zeros, arrange a, and drop entries that are no pair.

    As each pair is in one bucket, there are no more tiles than ``tile_bound`` says then.

    Args:
        y: what the product will write to.
        a: [num_tokens, k] or [num_tokens, top_k, k].
        bucket_ids, tpe: of ``compute_ids_tpe``.
        words, halves: as ``arrange`` takes them.
    """
    (num_experts, capacity), (num_tokens, top_k, num_rows) = bucket_ids.shape, y.shape
    num_pairs, slots = num_tokens * top_k, top_k if a.dim() == 3 else 1
    x, sums, factor = room_for(num_tokens * slots, a.shape[-1], y.device)
    pairs = torch.empty(num_experts, capacity, dtype=torch.int32, device=y.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=y.device)
    block_k, warps = block_and_warps(x.shape[1])
    _prepare_kernel.launch(
        (num_experts + num_tokens * slots + cdiv(num_pairs, CLEARED),),
        y,
        x,
        sums,
        factor,
        pairs,
        counts,
        a,
        bucket_ids,
        tpe,
        y.stride(0),
        y.stride(1),
        a.stride(0),
        slot_stride(a),
        bucket_ids.stride(0),
        num_experts,
        num_rows,
        a.shape[-1],
        x.shape[1],
        num_pairs,
        capacity,
        TOP_K=top_k,
        SLOTS=slots,
        COLUMNS=words // halves,
        HALVES=halves,
        BLOCK_K=block_k,
        BLOCK_C=512,
        BLOCK_P=CLEARED,
        BLOCK_N=1024,
        num_warps=warps,
    )
    return Prepared(x, sums, factor, pairs, counts)
