"""A unit of paged decode: its tiles of keys folded into the softmax of few queries."""

import triton
import triton.language as tl

from ferrum_triton.kernels.attention.codes import from_quarters, in_quarters
from ferrum_triton.kernels.attention.float_tiles import attend_floats
from ferrum_triton.kernels.attention.pages import Queries, Tiles, attend_pages
from ferrum_triton.kernels.attention.softmax import Softmax
from ferrum_triton.kernels.attention.strips import from_strips, in_strips


@triton.jit
def attend_unit(
    state,
    queries,
    num_queries,
    keys,
    first,
    end,
    pool_head,
    table_ptr,
    POOL: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """The softmax of a sequence's newest queries over its tiles [first, end) as well.

    Args:
        state: that before them, whose ``acc`` is float32 [BLOCK_M, BLOCK_D].
    """
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    IN_WORDS: tl.constexpr = pool_head.k_ptr.dtype.element_ty == tl.int32
    STRIP: tl.constexpr = ATTENTION.strip
    if IN_WORDS:
        state = Softmax(in_quarters(state.acc), state.row_max, state.row_sum)
    elif STRIP > 0:
        state = Softmax(in_strips(state.acc, STRIP), state.row_max, state.row_sum)
        queries = Queries(
            in_strips(queries.q, STRIP),
            queries.position,
            queries.score_factor,
            queries.value_factor,
            queries.softcap,
            queries.sliding_window,
        )
    # Tiles that every query sees whole, then the last ones; with a window every tile is an edge.
    whole_end = first
    if not ATTENTION.has_window:
        seen_by_all = tl.maximum((keys - num_queries + 1) // BLOCK_N, 0)
        whole_end = tl.minimum(tl.maximum(seen_by_all, first), end)
    tiles = Tiles(first, first, whole_end, end, keys, table_ptr)
    if not ATTENTION.has_window:
        state = _fold(state, queries, pool_head, tiles, first, whole_end, False, POOL, ATTENTION)
    state = _fold(state, queries, pool_head, tiles, whole_end, end, True, POOL, ATTENTION)
    if IN_WORDS:
        state = Softmax(from_quarters(state.acc), state.row_max, state.row_sum)
    elif STRIP > 0:
        state = Softmax(from_strips(state.acc), state.row_max, state.row_sum)
    return state


@triton.jit
def _fold(
    state,
    queries,
    pool_head,
    tiles,
    first,
    end,
    MASKED: tl.constexpr,
    POOL: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """The softmax over the tiles [first, end) as well, by the loop that was chosen."""
    if ATTENTION.ahead:
        state = attend_floats(
            state, queries, pool_head, tiles, first, end, MASKED, True, POOL, ATTENTION
        )
    else:
        state = attend_pages(state, queries, pool_head, tiles, first, end, MASKED, POOL, ATTENTION)
    return state
