"""What products of few pairs start from: arranged tokens, and by ids the pairs of each expert.

One launch, where :mod:`ferrum_triton.kernels.moe.prepare` takes buckets that a launch before sorts.
Each expert's program reads all ids, which are few for each of its lanes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.lanes import Ids, find, lowest_bit
from ferrum_triton.kernels.moe.prepare import PairTable, room_for_pairs
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import (
    TICKETS,
    Arranged,
    Order,
    arrange_token,
    block_and_warps,
    clear_tickets,
    room_for,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Consecutive ids of a lane, 16 bytes of them, and the most lanes.
WIDTH, MAX_LANES = 4, 512


@triton.jit
def find_pairs_of_ids(
    table, ids, expert, TOP_K: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
):
    """Write down which pairs are an expert's, their number and their places.

    Args:
        ids: :class:`Ids`.
    """
    row_ptr = table.pairs + expert.to(tl.int64) * table.capacity
    count = tl.zeros([], tl.int32)
    for first in range(0, ids.num_pairs, LANES * WIDTH):
        found = find(ids, first, expert, count, TOP_K, LANES, WIDTH)
        bits = found.bits
        for i in range(tl.max(found.matches, axis=0)):
            pair, at, mine = found.lane + lowest_bit(bits), found.place + i, i < found.matches
            tl.store(row_ptr + at, pair, mask=mine)
            place = (expert.to(tl.int64) << 32) | at.to(tl.int64)
            tl.store(table.places + pair, place, mask=mine)
            bits &= bits - 1
        count += tl.sum(found.matches, axis=0)
    tl.store(table.counts + expert, count)


@kernel(dynamic=("num_pairs",))
def _prepare_ids_kernel(
    x_ptr,  # [num_tokens, padded k], float16
    sums_ptr,  # [num_tokens, padded k / 8], float16
    factor_ptr,  # [num_tokens], float32
    tickets_ptr,  # [TICKETS], int32
    pairs_ptr,  # int32 [num_experts, num_pairs]
    counts_ptr,  # int32 [num_experts]
    places_ptr,  # int64 [num_pairs]
    a_ptr,  # [num_tokens, k]
    ids_ptr,  # [num_tokens, top_k]
    stride_a_token,
    stride_ids_token,  # or None of dense ids
    num_experts,
    num_weights,
    num_padded,
    num_pairs,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    INTERLEAVE: tl.constexpr,  # 1 where a thread's words lie together, or 0
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of two kinds: an expert's find its pairs, the others arrange a token each."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    clear_tickets(tickets_ptr)
    program = tl.program_id(0)
    if program < num_experts:
        table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, num_pairs)
        ids = Ids(ids_ptr, stride_ids_token, num_pairs, num_experts)
        find_pairs_of_ids(table, ids, program, TOP_K, LANES, WIDTH)
    else:
        token = (program - num_experts).to(tl.int64)
        to = Arranged(x_ptr, sums_ptr, factor_ptr)
        a_row = a_ptr + token * stride_a_token
        arrange_token(
            to, token, a_row, num_weights, num_padded, COLUMNS, HALVES, BLOCK_K, INTERLEAVE
        )


def prepare_ids(
    a: Tensor, ids: Tensor, num_experts: int, order: Order
) -> tuple[Arranged, PairTable, Tensor]:
    """Arrange every token of a, and find each expert's pairs.

    Args:
        a: [num_tokens, k].
        ids: [num_tokens, top_k].

    Returns:
        The arranged activations, the pairs of each expert, and tickets int32 [TICKETS], zeros.
    """
    num_tokens, num_weights = a.shape
    num_pairs, is_dense = ids.numel(), ids.is_contiguous()
    to = room_for(num_tokens, num_weights, a.device, order)
    tickets = ids.new_empty(TICKETS.value, dtype=torch.int32)
    table = room_for_pairs(num_experts, num_pairs, num_pairs, a.device)
    block_k, warps = block_and_warps(to.x.shape[1])
    _prepare_ids_kernel.launch(
        (num_experts + num_tokens,),
        x_ptr=to.x,
        sums_ptr=to.sums,
        factor_ptr=to.factor,
        tickets_ptr=tickets,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        a_ptr=a,
        ids_ptr=ids,
        stride_a_token=a.stride(0),
        stride_ids_token=None if is_dense else ids.stride(0),
        num_experts=num_experts,
        num_weights=num_weights,
        num_padded=to.x.shape[1],
        num_pairs=num_pairs,
        TOP_K=ids.shape[1],
        COLUMNS=order.words // order.halves,
        HALVES=order.halves,
        INTERLEAVE=order.interleave,
        BLOCK_K=block_k,
        LANES=min(max(next_power_of_2(cdiv(num_pairs, WIDTH)), 32), MAX_LANES),
        WIDTH=WIDTH,
        num_warps=warps,
    )
    return to, table, tickets
