"""Activations of pairs by expert, for products that take them by TMA, and the tiles of pairs."""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.prepare import PairTable, Result, clear_rows, expert_and_entry
from ferrum_triton.kernels.moe.tile_table import (
    Found,
    TileTable,
    room_for_tiles,
    tiles_at_once,
    write_tiles,
)
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import (
    Arranged,
    Order,
    arranged,
    block_and_warps,
    factor_of,
    first_block,
    load_block,
    room_for,
    store_arranged,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# Columns of the result that are cleared at a time.
CLEARED_COLUMNS = 128
# Rows of activations from which on a program writes all copies of its row: before, programs are
# too few to hide what each waits for.
MANY_ROWS = 1024
# Tiles by experts, or by their pairs, that each warp of a program looks at. Of 512 a thread has 173
# registers and more, of 64 it has 39 to 64, and without a table 31 to 58 (``compile_launch`` for
# sm_90 of the launches of ``bench.moe_layer`` by 256 and 1,024 tokens).
CELLS = 64


@kernel(dynamic=("num_pairs", "capacity", "tile_programs"))
def _arrange_pairs_kernel(
    x_ptr,  # [num_pairs, padded k], float16
    sums_ptr,  # [num_pairs, padded k / 8], float16; or None
    factor_ptr,  # [num_pairs], float32
    y_ptr,  # [num_tokens, top_k, n], written for pairs in no bucket
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    pairs_ptr,  # int32 [num_experts, capacity]
    counts_ptr,  # int32 [num_experts]
    places_ptr,  # int64 [num_pairs]
    tiles_ptr,  # int32 [bound, FIELDS], of a tile table; or None
    total_ptr,  # int32 [1]
    by_expert_ptr,  # int32 [num_pairs]
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
    tile_programs,  # which write the tile table
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # rows of a that a token has
    COLUMNS: tl.constexpr,  # words of a part of a step
    HALVES: tl.constexpr,  # parts of a step
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_C: tl.constexpr,  # rows of x that a program writes
    BLOCK_N: tl.constexpr,  # columns of the result at a time
    BLOCK_M: tl.constexpr,  # pairs of a tile
    CELLS: tl.constexpr,  # of the tile table, see write_tiles
    PDL: tl.constexpr,
):
    """A program arranges a row of a and writes it to BLOCK_C of its TOP_K / SLOTS pairs' places.

    The first programs write a tile table, if there is to be one.
    """
    pdl_wait(PDL)
    pdl_trigger(PDL)
    table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, capacity)
    if tiles_ptr is not None:
        if tl.program_id(0) < tile_programs:
            if tl.program_id(1) == 0:
                tiles = TileTable(tiles_ptr, total_ptr, by_expert_ptr)
                write_tiles(tiles, table, num_experts, tl.program_id(0), BLOCK_E, BLOCK_M, CELLS)
            return
    COPIES: tl.constexpr = TOP_K // SLOTS
    row = (tl.program_id(0) - tile_programs).to(tl.int64)
    # Where each copy goes, all found at once.
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    e = tl.arange(0, BLOCK_E)
    pair = row * COPIES + c
    place = tl.load(table.places + pair, mask=c < COPIES, other=-1)
    counts = tl.load(table.counts + e, mask=e < num_experts, other=0)
    a_row = a_ptr + row // SLOTS * stride_a_token + row % SLOTS * stride_a_slot
    a, inverse = first_block(a_row, num_weights, num_padded, BLOCK_K)
    expert, entry = expert_and_entry(place)
    count = tl.sum(tl.where(e[None, :] == expert[:, None], counts[None, :], 0), axis=1)
    at = table.pairs + expert.to(tl.int64) * capacity + entry
    found = tl.load(at, mask=(entry >= 0) & (entry < count), other=-1) == pair
    before = tl.sum(tl.where(e[None, :] < expert[:, None], counts[None, :], 0), axis=1)
    target = before.to(tl.int64) + entry
    # Not beyond, should pairs be in two places.
    target = tl.where(found & (target < num_pairs), target, -1)
    to = Arranged(x_ptr, sums_ptr, factor_ptr)
    for first in range(0, num_padded, BLOCK_K):
        x, sums = arranged(a, inverse, COLUMNS, HALVES)
        for copy in tl.static_range(BLOCK_C):
            to_row = tl.sum(tl.where(tl.arange(0, BLOCK_C) == copy, target, 0), axis=0)
            if to_row >= 0:
                store_arranged(to, to_row, first, x, sums, num_padded)
        if first + BLOCK_K < num_padded:
            a = load_block(a_row, first + BLOCK_K, num_weights, BLOCK_K)
    factor = tl.zeros([BLOCK_C], tl.float32) + factor_of(inverse)
    tl.store(factor_ptr + target, factor, mask=target >= 0)
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    clear_rows(result, pair, (target < 0) & (c < COPIES), TOP_K, BLOCK_N)


def prepare_sorted(a: Tensor, found: Found, order: Order, y: Tensor, tokens: int = 0) -> Arranged:
    """As ``prepare``, but x, sums and factor have a row for each pair, by expert.

    Rows of an expert begin where those of the experts before it end. Pairs in no bucket have none,
    and their rows of y [num_tokens, top_k, n] are filled with zeros here.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        found: what is known of the pairs.
        order: how the products take activations.
        tokens: pairs of a tile, the table of which ``found`` has after this; 0 without one.
    """
    table, top_k = found.pairs, y.shape[1]
    num_experts = len(table.counts)
    slots = top_k if a.dim() == 3 else 1
    num_rows, num_weights, copies = a.shape[0] * slots, a.shape[-1], top_k // slots
    to = room_for(table.num_pairs, num_weights, a.device, order)
    block_k, warps = block_and_warps(to.x.shape[1])
    each = next_power_of_2(copies) if num_rows >= MANY_ROWS else 1
    block_e, cells, tiles, tile_programs = next_power_of_2(num_experts), CELLS * warps, None, 0
    if tokens and tokens not in found.tiles:
        tiles = found.tiles[tokens] = room_for_tiles(table, tokens)
        tile_programs = cdiv(len(tiles.tiles), tiles_at_once(cells, block_e, tokens))
    _arrange_pairs_kernel.launch(
        (tile_programs + num_rows, cdiv(copies, each)),
        x_ptr=to.x,
        sums_ptr=to.sums,
        factor_ptr=to.factor,
        y_ptr=y,
        a_ptr=a,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        tiles_ptr=tiles and tiles.tiles,
        total_ptr=tiles and tiles.total,
        by_expert_ptr=tiles and tiles.pairs,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        num_experts=num_experts,
        num_rows=y.shape[2],
        num_weights=num_weights,
        num_padded=to.x.shape[1],
        num_pairs=table.num_pairs,
        capacity=table.capacity,
        tile_programs=tile_programs,
        TOP_K=top_k,
        SLOTS=slots,
        COLUMNS=order.words // order.halves,
        HALVES=order.halves,
        BLOCK_K=block_k,
        BLOCK_E=block_e,
        BLOCK_C=each,
        BLOCK_N=CLEARED_COLUMNS,
        BLOCK_M=tokens if tiles else 0,
        CELLS=cells if tiles else 0,
        num_warps=warps,
    )
    return to
