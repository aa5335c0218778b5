"""Tiles of a paged pool of floats, folded into a softmax; blocks are read a tile ahead by hand.

Paged prefill takes them so where the pool holds floats, and decode where ``AHEAD`` says so;
:func:`.pages.attend_pages` serves the others.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.attention.pages import capped
from ferrum_triton.kernels.attention.softmax import fold_tile
from ferrum_triton.kernels.heads import in_pieces


@triton.jit
def tile_blocks(
    tile,
    end_tile,
    tiles,
    num_blocks,
    CROSSED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The block of each of a tile's keys, or of all where they lie in one page.

    Unsigned, so that one comparison holds an entry to the pool's blocks, negative ones too. No
    entry is read past end_tile, nor, where CROSSED, past that of the sequence's last key.
    """
    if BLOCK_SIZE >= BLOCK_N:
        page = tile * BLOCK_N // BLOCK_SIZE
    else:
        page = tile * (BLOCK_N // BLOCK_SIZE) + tl.arange(0, BLOCK_N) // BLOCK_SIZE
    if CROSSED:
        page = tl.minimum(page, tl.maximum(tiles.keys - 1, 0) // BLOCK_SIZE).to(tl.uint32)
    entry = tl.load(tiles.table_ptr + page, mask=tile < end_tile, other=0)
    return tl.minimum(entry.to(tl.uint32), (num_blocks - 1).to(tl.uint32))


@triton.jit
def attend_floats(
    state,
    queries,  # of a score_factor > 0
    head,  # a KV head of the pool
    tiles,
    first_tile,
    end_tile,
    MASKED: tl.constexpr,  # tiles may hold keys that some query does not see
    NARROW: tl.constexpr,  # 32 bits hold the offset of every slot
    POOL: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """attend_pages for pools of floats, which leaves keys and values all of the pipeline's stages.

    Blocks are read a tile ahead of the keys they tell of, by hand: where the compiler's pipeline
    has to, it takes a stage from the loads of keys and values, which then have no time to arrive.
    """
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    BLOCK_D: tl.constexpr = ATTENTION.block_d
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    PRECISION: tl.constexpr = ATTENTION.precision
    BLOCK_SIZE: tl.constexpr = POOL.block_size
    K_STEP: tl.constexpr = POOL.k.piece
    V_STEP: tl.constexpr = POOL.v.piece
    K_PIECE: tl.constexpr = POOL.k_piece
    V_PIECE: tl.constexpr = POOL.v_piece
    EXACT: tl.constexpr = queries.q.dtype == tl.float32
    # Offsets are unsigned and as narrow as the pool allows: 64 bits take twice the registers.
    OFFSET: tl.constexpr = tl.uint32 if NARROW else tl.uint64
    d = tl.arange(0, BLOCK_D)[None, :]
    k_head = head.k_ptr + in_pieces(d, K_STEP, K_PIECE)
    v_head = head.v_ptr + in_pieces(d, V_STEP, V_PIECE)
    k_block = tl.full([], POOL.k.block, OFFSET)
    v_block = tl.full([], POOL.v.block, OFFSET)
    k_slot = tl.full([], POOL.k.slot, OFFSET)
    v_slot = tl.full([], POOL.v.slot, OFFSET)
    columns = tl.arange(0, BLOCK_N)
    block = tile_blocks(first_tile, end_tile, tiles, head.num_blocks, MASKED, BLOCK_SIZE, BLOCK_N)
    for tile in range(first_tile, end_tile):
        # Where pages are no larger than tiles, a key's slot is the same in all tiles.
        slot = columns
        if BLOCK_SIZE > BLOCK_N:
            slot += tile * BLOCK_N
        slot = slot.to(tl.uint32) % BLOCK_SIZE
        k_row = block * k_block + slot * k_slot
        v_row = k_row if POOL.alike else block * v_block + slot * v_slot
        k_at, v_at = k_head + k_row[:, None], v_head + v_row[:, None]
        if MASKED:
            # Past the sequence's end a page may hold anything, NaN as well.
            mask = (tile * BLOCK_N + columns < tiles.keys)[:, None] & (d < HEAD_DIM)
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_at, mask=d < HEAD_DIM, other=0.0)
            v = tl.load(v_at, mask=d < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        block = tile_blocks(tile + 1, end_tile, tiles, head.num_blocks, MASKED, BLOCK_SIZE, BLOCK_N)

        scores = tl.dot(queries.q, tl.trans(k), input_precision=PRECISION)
        factor = queries.score_factor
        if ATTENTION.has_softcap:
            scores = capped(scores * queries.score_factor, queries.softcap, EXACT)
            factor = 1.0
        if MASKED:
            # A query's position lies inside the sequence.
            last = (queries.position - tile * BLOCK_N)[:, None]
            visible = columns[None, :] <= last
            if ATTENTION.has_window:
                visible = visible & (columns[None, :] > last - queries.sliding_window)
            scores = tl.where(visible, scores, float("-inf"))
        state = fold_tile(state, scores, factor, v, PRECISION)
    return state
