"""Tiles of a paged cache of floats, folded into the softmax of a large block of queries."""

import triton
import triton.language as tl

from ferrum_triton.kernels.attention.pages import capped
from ferrum_triton.kernels.attention.softmax import fold_tile
from ferrum_triton.kernels.heads import in_pieces


@triton.jit
def _tile_blocks(
    tile,
    end_tile,
    keys,
    table_ptr,
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
        page = tl.minimum(page, tl.maximum(keys - 1, 0) // BLOCK_SIZE).to(tl.uint32)
    entry = tl.load(table_ptr + page, mask=tile < end_tile, other=0)
    return tl.minimum(entry.to(tl.uint32), (num_blocks - 1).to(tl.uint32))


@triton.jit
def attend_floats(
    acc,  # [BLOCK_M, BLOCK_D]
    m_i,  # [BLOCK_M], the largest score so far, in base 2
    l_i,  # [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M], of each row's query
    first_tile,
    end_tile,
    keys,  # of the sequence
    table_ptr,
    k_head_ptr,
    v_head_ptr,
    stride_k_block,
    stride_k_slot,
    stride_k_piece,
    stride_v_block,
    stride_v_slot,
    stride_v_piece,
    num_blocks,
    sliding_window,
    score_factor,  # > 0
    softcap,
    NARROW: tl.constexpr,  # 32 bits hold the offset of every slot
    ALIKE: tl.constexpr,  # keys and values have the same strides
    MASKED: tl.constexpr,  # tiles may hold keys that some query does not see
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """attend_pages for caches of floats, made for products large enough to keep tensor cores busy.

    Blocks are read a tile ahead of the keys they tell of, by hand: where the compiler's pipeline
    has to, it takes a stage from the loads of keys and values, which then have no time to arrive.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    k_d, v_d = in_pieces(d, stride_k_piece, K_PIECE), in_pieces(d, stride_v_piece, V_PIECE)
    k_head, v_head = k_head_ptr + k_d, v_head_ptr + v_d
    # Offsets are unsigned and as narrow as the pool allows: 64 bits take twice the registers.
    k_block = tl.cast(stride_k_block, tl.uint32 if NARROW else tl.uint64)
    v_block = tl.cast(stride_v_block, tl.uint32 if NARROW else tl.uint64)
    k_slot = tl.cast(stride_k_slot, tl.uint32 if NARROW else tl.uint64)
    v_slot = tl.cast(stride_v_slot, tl.uint32 if NARROW else tl.uint64)
    columns = tl.arange(0, BLOCK_N)
    block = _tile_blocks(
        first_tile, end_tile, keys, table_ptr, num_blocks, MASKED, BLOCK_SIZE, BLOCK_N
    )
    for tile in range(first_tile, end_tile):
        # Where pages are no larger than tiles, a key's slot is the same in all tiles.
        slot = columns
        if BLOCK_SIZE > BLOCK_N:
            slot += tile * BLOCK_N
        slot = slot.to(tl.uint32) % BLOCK_SIZE
        k_row = block * k_block + slot * k_slot
        v_row = k_row if ALIKE else block * v_block + slot * v_slot
        k_at, v_at = k_head + k_row[:, None], v_head + v_row[:, None]
        if MASKED:
            # Past the sequence's end a page may hold anything, NaN as well.
            mask = (tile * BLOCK_N + columns < keys)[:, None] & (d < HEAD_DIM)
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_at, mask=d < HEAD_DIM, other=0.0)
            v = tl.load(v_at, mask=d < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        block = _tile_blocks(
            tile + 1, end_tile, keys, table_ptr, num_blocks, MASKED, BLOCK_SIZE, BLOCK_N
        )

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = score_factor
        if HAS_CAP:
            scores = capped(scores * score_factor, softcap, HAS_CAP, q.dtype == tl.float32)
            factor = 1.0
        if MASKED:
            # A query's position lies inside the sequence.
            last = (position - tile * BLOCK_N)[:, None]
            visible = columns[None, :] <= last
            if HAS_WINDOW:
                visible = visible & (columns[None, :] > last - sliding_window)
            scores = tl.where(visible, scores, float("-inf"))
        acc, m_i, l_i = fold_tile(scores, factor, v, acc, m_i, l_i, PRECISION)
    return acc, m_i, l_i
