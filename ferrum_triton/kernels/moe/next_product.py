"""Pairs' results in the order of the product behind, by the last program that wrote some of them.

Between gate and up and down, activations are arranged once more, by a row's largest magnitude,
which no program of a part of the row knows. The programs of a tile of pairs draw tickets, and the
last of them arranges what all have written.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.quant.activations import (
    Arranged,
    Order,
    arranged,
    factor_of,
    inverse_of,
    room_for,
)
from ferrum_triton.kernels.rows import next_power_of_2


@dataclass(frozen=True)
class Then:
    """How the product behind takes a tile's rows.

    Attributes:
        columns: words of a part of a step.
        halves: parts of a step.
        interleave: 1 where a thread's words lie together, or 0.
        padded: elements of a row, filled up to whole steps.
        block_k: power of two >= padded.
    """

    columns: int
    halves: int
    interleave: int
    padded: int
    block_k: int


@triton.jit
def _arrange_pairs(
    to, y, pairs_ptr, left, BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, THEN: tl.constexpr
):
    """Rows of a tile's pairs in the order of the product behind, which has a row for each pair.

    Args:
        to: :class:`Arranged` pointers.
        y: :class:`Result`, which other programs wrote too.
        pairs_ptr: the tile's first pair.
        left: pairs from there on.
    """
    BLOCK_K: tl.constexpr = THEN.block_k
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0).to(tl.int64)
    y_row = y.y + pair // TOP_K * y.stride_token + pair % TOP_K * y.stride_slot
    kept = (m < left)[:, None]
    at = y_row[:, None] + k[None, :]
    inside = kept & (k < y.num_rows)[None, :]
    # Past L1, which may hold lines of before.
    a = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    inverse = inverse_of(tl.abs(a).to(tl.int32, bitcast=True), 1)
    tl.store(to.factor + pair, factor_of(inverse), mask=m < left)
    inverse = tl.broadcast_to(inverse[:, None], [BLOCK_M, BLOCK_K])
    SIZE: tl.constexpr = BLOCK_M * BLOCK_K
    a, inverse = tl.reshape(a, [SIZE]), tl.reshape(inverse, [SIZE])
    x, sums = arranged(a, inverse, THEN.columns, THEN.halves, THEN.interleave > 0)
    x_row = to.x + pair[:, None] * THEN.padded + k[None, :]
    tl.store(x_row, tl.reshape(x, [BLOCK_M, BLOCK_K]), mask=kept & (k < THEN.padded)[None, :])
    if to.sums is not None:
        word = tl.arange(0, BLOCK_K // 8)
        sums_row = to.sums + pair[:, None] * (THEN.padded // 8) + word[None, :]
        sums = tl.reshape(sums, [BLOCK_M, BLOCK_K // 8])
        tl.store(sums_row, sums, mask=kept & (word < THEN.padded // 8)[None, :])


@triton.jit
def arrange_if_last(
    to,
    y,
    ticket_ptr,
    table,
    found,
    done,
    parts,
    BLOCK_M: tl.constexpr,
    TOP_K: tl.constexpr,
    THEN: tl.constexpr,
):
    """Arrange a tile's pairs if this program wrote the last part of them.

    Args:
        to: :class:`Arranged` pointers.
        y: :class:`Result`, of which this program has stored its part.
        ticket_ptr: the tile's int32, at first a zero.
        table: :class:`PairTable`.
        found: the tile's :class:`TilePairs`.
        done, parts: how many parts of the tile this program wrote, and how many it has.
    """
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, done, sem="acq_rel") == parts - done:
        mine = table.pairs + found.expert * table.capacity + found.first
        _arrange_pairs(to, y, mine, found.left, BLOCK_M, TOP_K, THEN)


class NextProduct(NamedTuple):
    """The product behind: how it takes activations, and where they go."""

    then: Then
    to: Arranged  # with tickets of the programs before it


def next_product(num_pairs: int, num_weights: int, order: Order, tickets: Tensor) -> NextProduct:
    """Memory for what the product behind takes: a row of ``num_weights`` elements for each pair.

    Args:
        order: how it takes them.
        tickets: int32 [tiles], zeros, for the programs before it.
    """
    to = room_for(num_pairs, num_weights, tickets.device, order)._replace(tickets=tickets)
    padded, columns = to.x.shape[1], order.words // order.halves
    then = Then(columns, order.halves, order.interleave, padded, next_power_of_2(padded))
    return NextProduct(then, to)
