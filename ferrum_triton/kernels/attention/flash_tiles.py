"""Tiles of a contiguous cache, folded into the softmax of a block of queries.

The loop of flash attention: which keys a block sees, how a tile of them is loaded, through tensor
maps or pointers, and which tiles are masked.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.attention.softmax import fold_tile, soft_cap

# How a loop over tiles masks them: none, all, or those that are not whole, in a branch.
WHOLE, CROSSED, MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Variant:
    """What the kernel specialises on.

    Attributes:
        group: query heads per KV head.
        packed: rows are (query, head of the group); else queries of one head.
        negate: the softmax scale is negative.
        one_loop: masks in a branch; else in loops before and after the whole tiles.
        min_tiles: tiles of keys a split has at least.
        block_d: columns of q and k a product takes at once, a power of two.
        block_e: those of the product for the other columns, or 0.
        block_v: a power of two >= value_dim.
        precision: how tensor cores multiply float32, as ``tl.dot`` takes it.
    """

    head_dim: int
    value_dim: int
    group: int
    packed: bool
    negate: bool
    is_causal: bool
    has_window: bool
    has_softcap: bool
    has_pos_offset: bool
    one_loop: bool
    min_tiles: int
    block_m: int
    block_n: int
    block_d: int
    block_e: int
    block_v: int
    precision: str

    @property
    def rows_per_query(self) -> int:
        return self.group if self.packed else 1


class Cache(NamedTuple):
    """One KV head of one sequence, read through the tensor maps or, without, the pointers."""

    k_desc: Any
    k_rest_desc: Any
    v_desc: Any
    batch: Any
    kv_head: Any
    k_ptr: Any
    v_ptr: Any
    stride_k_row: Any
    stride_v_row: Any
    kv_len: Any


class Queries(NamedTuple):
    """A block of queries.

    Attributes:
        q: first columns, [BLOCK_M, BLOCK_D].
        q_rest: other columns, [BLOCK_M, BLOCK_E], where there are some.
        first_row: first row of the block.
        first_position: position of query 0.
        sliding_window: keys a query sees, with a window.
        scale_log2: factor of scores; with a cap, of what the cap takes.
        softcap_log2: cap times log2(e).
    """

    q: Any
    q_rest: Any
    first_row: Any
    first_position: Any
    sliding_window: Any
    scale_log2: Any
    softcap_log2: Any


class Span(NamedTuple):
    """The keys [start, end) that some query of a block sees, and [whole_start, whole_end) all."""

    start: Any
    whole_start: Any
    whole_end: Any
    end: Any


@triton.jit
def load_tile(
    desc,
    head_ptr,
    stride_row,
    cache,
    first,
    MASKING: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of keys or values from row ``first`` on."""
    if desc is not None:
        return desc.load([cache.batch, cache.kv_head, first, 0]).reshape(BLOCK_N, BLOCK_D)
    n = first + tl.arange(0, BLOCK_N)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = head_ptr + n.to(tl.int64) * stride_row + d
    if MASKING != WHOLE:
        return tl.load(at, mask=(n < cache.kv_len) & (d < WIDTH), other=0.0)
    if WIDTH >= BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=d < WIDTH, other=0.0)


@triton.jit
def hide(scores, first, queries, kv_len, VARIANT: tl.constexpr):
    """-inf where a row of the block does not see a key of the tile from ``first`` on."""
    n = first + tl.arange(0, VARIANT.block_n)
    visible = (n < kv_len)[None, :]
    if VARIANT.is_causal:
        row = queries.first_row + tl.arange(0, VARIANT.block_m)
        position = row // VARIANT.rows_per_query + queries.first_position
        visible = visible & (n[None, :] <= position[:, None])
        if VARIANT.has_window:
            visible = visible & (n[None, :] > (position - queries.sliding_window)[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def attend(
    state,
    queries,
    cache,
    begin,
    end,
    span,
    MASKING: tl.constexpr,
    CLEAR_V: tl.constexpr,  # tensor maps bring rows past kv_len, which may be NaN
    VARIANT: tl.constexpr,
):
    """Fold the tiles of keys [begin, end) into the running softmax."""
    BLOCK_N: tl.constexpr = VARIANT.block_n
    BLOCK_D: tl.constexpr = VARIANT.block_d
    BLOCK_E: tl.constexpr = VARIANT.block_e
    BLOCK_V: tl.constexpr = VARIANT.block_v
    HEAD_DIM: tl.constexpr = VARIANT.head_dim
    VALUE_DIM: tl.constexpr = VARIANT.value_dim
    PRECISION: tl.constexpr = VARIANT.precision
    for first in range(begin, end, BLOCK_N):
        k = load_tile(
            cache.k_desc,
            cache.k_ptr,
            cache.stride_k_row,
            cache,
            first,
            MASKING=MASKING,
            WIDTH=HEAD_DIM,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
        )
        v = load_tile(
            cache.v_desc,
            cache.v_ptr,
            cache.stride_v_row,
            cache,
            first,
            MASKING=MASKING,
            WIDTH=VALUE_DIM,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_V,
        )
        scores = tl.dot(queries.q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_E > 0:
            k_rest = load_tile(
                cache.k_rest_desc,
                cache.k_ptr + BLOCK_D,
                cache.stride_k_row,
                cache,
                first,
                MASKING=MASKING,
                WIDTH=HEAD_DIM - BLOCK_D,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_E,
            )
            scores = tl.dot(queries.q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        factor = queries.scale_log2
        if VARIANT.has_softcap:
            exact: tl.constexpr = queries.q.dtype == tl.float32
            scores = soft_cap(scores * queries.scale_log2, queries.softcap_log2, exact)
            factor = 1.0
        if MASKING == MIXED:
            if (first < span.whole_start) | (first >= span.whole_end):
                scores = hide(scores, first, queries, cache.kv_len, VARIANT)
        elif MASKING == CROSSED:
            scores = hide(scores, first, queries, cache.kv_len, VARIANT)
            if CLEAR_V:
                n = first + tl.arange(0, BLOCK_N)
                v = tl.where((n < cache.kv_len)[:, None], v, 0.0)
        state = fold_tile(state, scores, factor, v, PRECISION)
    return state


@triton.jit
def keys_seen(
    first_row, first_position, q_len, kv_len, sliding_window, split, VARIANT: tl.constexpr
):
    """The keys of a block of queries that a split attends to, and those all queries see."""
    BLOCK_N: tl.constexpr = VARIANT.block_n
    start, end = 0, kv_len
    whole_start, whole_end = 0, kv_len
    if VARIANT.is_causal:
        oldest = first_row // VARIANT.rows_per_query + first_position
        newest = (first_row + VARIANT.block_m - 1) // VARIANT.rows_per_query
        newest = tl.minimum(newest, q_len - 1) + first_position
        whole_end = tl.maximum(tl.minimum(kv_len, oldest + 1), 0)
        end = tl.minimum(kv_len, newest + 1)
        if VARIANT.has_window:
            start = tl.maximum(oldest + 1 - sliding_window, 0)
            whole_start = tl.maximum(newest + 1 - sliding_window, 0)
    start = start // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, tl.num_programs(1)), VARIANT.min_tiles) * BLOCK_N
    start += split * share
    end = tl.minimum(end, start + share)
    whole_start = tl.maximum(tl.cdiv(whole_start, BLOCK_N) * BLOCK_N, start)
    whole_end = tl.minimum(whole_end, end) // BLOCK_N * BLOCK_N
    return Span(start, whole_start, whole_end, end)
