"""Few pairs of an expert by its rows in planes: a warp multiplies 16 rows by eight pairs at a time.

Products of :mod:`ferrum_triton.kernels.quant.quad_products`, which need no shared memory. A tile is
eight pairs of an expert by rows of it, and each warp of a program has its own of these: 16 of one
matrix, or eight of gate and the same of up. A warp takes all blocks of its rows, one tile after the
other, and loads the weights of a block while it multiplies the one before.

Programs run at once, and share all tiles in equal parts: those of one expert follow each other, so
that a program has one expert, seldom two. How many tiles there are is known on the device alone.

Activations are arranged by launches before (:mod:`ferrum_triton.kernels.moe.prepare`), and gathered
by pair. Of gate and up, the last program of a tile may arrange what they give for the product
behind (:mod:`ferrum_triton.kernels.moe.next_product`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.moe.buckets import Buckets, bucket_tiles, pairs_of_tile, tile_bound
from ferrum_triton.kernels.moe.next_product import NextProduct, arrange_if_last
from ferrum_triton.kernels.moe.plane_config import GATE_UP_TILES, TILES, Quads, mix_heuristic
from ferrum_triton.kernels.moe.plane_gemv import Stacks
from ferrum_triton.kernels.moe.prepare import CLEARED, PairTable, Result, clear_lost
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import WORD, Arranged, Order
from ferrum_triton.kernels.quant.planes import Layout, Matrix, load_words
from ferrum_triton.kernels.quant.quad_products import (
    WORDS,
    activations_of,
    add_block,
    two_rows,
)
from ferrum_triton.kernels.quant.quad_weights import BLOCK, quad_layout, sums_minimums
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN

# Pairs of a tile.
PAIRS = tl.constexpr(8)
# Rows that a warp multiplies at a time, of all matrices together.
WARP_ROWS = 16
# Elements of a pair that a program clears at a time.
CLEARED_ROWS = tl.constexpr(64)


@dataclass(frozen=True)
class QuadTile:
    """What is constant in a launch.

    Attributes:
        layout: the matrices' layout; gate and up have the same.
        matrices: one, or gate and up.
        quads: the launch choice.
    """

    layout: Layout
    matrices: int
    quads: Quads

    @property
    def each(self) -> int:
        """Rows of a matrix that a warp multiplies at a time."""
        return WARP_ROWS // self.matrices

    @property
    def rows(self) -> int:
        """Rows of a matrix that a program's warps multiply at a time."""
        return self.quads.warps * self.each


class Column(NamedTuple):
    """One of a thread's two pairs: an even one of the tile, or the odd one behind it."""

    pair: Any
    factor: Any
    kept: Any


@triton.jit
def _column(x, pairs_ptr, at, left, SLOTS: tl.constexpr):
    """The :class:`Column` of a tile's pairs ``at``; a row of x belongs to SLOTS of them."""
    kept = at < left
    pair = tl.load(pairs_ptr + at, mask=kept, other=0)
    return Column(pair, tl.load(x.factor + pair // SLOTS, mask=kept, other=0.0), kept)


@triton.jit
def _store(result, acc, column, row, TOP_K: tl.constexpr, MATRICES: tl.constexpr):
    """Write a thread's sums of one pair: of rows eight apart, or of gate and up."""
    pair = column.pair.to(tl.int64)
    to = result.y + pair // TOP_K * result.stride_token + pair % TOP_K * result.stride_slot + row
    dtype = to.dtype.element_ty
    first, second = acc[0] * column.factor, acc[1] * column.factor
    if MATRICES == 2:
        y = activated(first, "silu") * second
        tl.store(to, y.to(dtype), mask=column.kept)
    else:
        tl.store(to, first.to(dtype), mask=column.kept)
        tl.store(to + 8, second.to(dtype), mask=column.kept)


@triton.jit
def _row(tile, warp, quad, stacks, TILE: tl.constexpr):
    """A thread's first row of a tile, int64.

    The last warps start early enough to have all their rows; some are done twice.
    """
    first = tl.minimum(tile * TILE.rows + warp * TILE.each, stacks.num_rows - TILE.each)
    return (first + quad).to(tl.int64)


@triton.jit
def multiply_quads(
    result,
    x,
    stride_x,
    stacks,
    table,
    found,
    first_tile,
    tiles,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The products of one tile of pairs with some tiles of their expert's rows, to ``result``.

    The first weights are loaded before the wait for the launch before, which is here.

    Args:
        x: :class:`Arranged` pointers, in the order of :func:`order_of_quads`.
        stride_x: elements of a row of x.
        stacks: the experts' matrices.
        found: :class:`TilePairs`.
        first_tile, tiles: which tiles of rows, and how many.
    """
    LAYOUT: tl.constexpr = TILE.layout
    OF_UP: tl.constexpr = TILE.layout if TILE.matrices == 2 else None
    MATRICES: tl.constexpr = TILE.matrices
    WARPS: tl.constexpr = TILE.quads.warps
    LATE: tl.constexpr = TILE.quads.late_tokens
    BLOCKS: tl.constexpr = LAYOUT.groups // 8
    # Triton 3.6 fails where a turn of the loop is a whole row, of two blocks ("idx < size()").
    FACTOR: tl.constexpr = 2 if TILE.quads.unrolled and BLOCKS != 2 else 1
    TOP_K: tl.constexpr = BUCKETS.top_k
    SLOTS: tl.constexpr = 1 if BUCKETS.per_pair else TOP_K
    PTX: tl.constexpr = LAYOUT.asm != ""
    SUMS: tl.constexpr = sums_minimums(LAYOUT.format)
    i = tl.arange(0, 32 * WARPS)
    warp, quad, thread = i // 32, i // 4 % 8, i % 4
    expert, first_pair, left = found
    pairs_ptr = table.pairs + expert * table.capacity + first_pair
    first, second = Matrix(stacks.ptr + expert * stacks.stride * 16, stacks.num_rows), None
    if MATRICES == 2:
        second = Matrix(stacks.up_ptr + expert * stacks.up_stride * 16, stacks.num_rows)
    row = _row(first_tile, warp, quad, stacks, TILE)
    rows = two_rows(first, second, row, thread, 0, warp >= 0, LAYOUT, OF_UP)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    # Columns past the last pair are its again, and not stored.
    pair = tl.load(pairs_ptr + tl.minimum(quad, left - 1)).to(tl.int64)
    x_row = pair // SLOTS * stride_x
    x_ptr = x.x.to(tl.pointer_type(tl.int32)) + x_row // 2 + thread * 4
    if SUMS:
        sums_ptr = x.sums.to(tl.pointer_type(tl.int32)) + x_row // 16 + thread * 4
    even = _column(x, pairs_ptr, 2 * thread, left, SLOTS)
    odd = _column(x, pairs_ptr, 2 * thread + 1, left, SLOTS)
    none = tl.zeros([32 * WARPS], tl.float32)
    acc = (none, none, none, none)
    activations = ()
    if not LATE:
        activations = activations_of(x_ptr, 0, WORDS, PTX)
    tile, block, end = first_tile, 0, first_tile + tiles
    for _ in tl.range(tiles * BLOCKS, loop_unroll_factor=FACTOR):
        is_last = block == BLOCKS - 1
        next_tile, next_block = tl.where(is_last, tile + 1, tile), tl.where(is_last, 0, block + 1)
        sums = None
        if SUMS:
            sums = load_words(sums_ptr + block * WORDS, None, 4, PTX, "")
        if LATE:
            now = activations_of(x_ptr, block, WORDS, PTX)
        else:
            now = activations
            activations = activations_of(x_ptr, next_block, WORDS, PTX)
        next_row, there = _row(next_tile, warp, quad, stacks, TILE), (next_tile < end) & (warp >= 0)
        later = two_rows(first, second, next_row, thread, next_block, there, LAYOUT, OF_UP)
        acc = add_block(acc, rows, now, sums, LAYOUT, LAYOUT)
        rows = later
        if is_last:
            stored = _row(tile, warp, quad, stacks, TILE)
            _store(result, (acc[0], acc[2]), even, stored, TOP_K, MATRICES)
            _store(result, (acc[1], acc[3]), odd, stored, TOP_K, MATRICES)
            acc = (none, none, none, none)
        tile, block = next_tile, next_block


@triton.jit
def _share(total):
    """The tiles of this program, of all there are."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    each, longer = total // programs, total % programs
    begin = program * each + tl.minimum(program, longer)
    return begin, begin + each + (program < longer).to(tl.int32)


@kernel(dynamic=("num_pairs", "capacity"))
def _quad_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    then_x_ptr,  # [num_pairs, padded n], float16; or None
    then_sums_ptr,  # [num_pairs, padded n / 8], float16, or None
    then_factor_ptr,  # [num_pairs], float32
    tickets_ptr,  # int32 [tiles of pairs], zeros
    x_ptr,  # [num_tokens, k], or [num_pairs, k]
    sums_ptr,  # [rows of x, k / 8], or None
    factor_ptr,  # [rows of x]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # likewise: y = silu(planes x) * (up x); or None
    pairs_ptr,  # [num_experts, capacity]
    counts_ptr,  # [num_experts]
    places_ptr,  # [num_pairs]
    stride_y_token,
    stride_y_slot,
    stride_x,
    stride_expert,  # of planes, in units of 16 bytes
    stride_up_expert,
    num_experts,
    num_rows,
    num_pairs,
    capacity,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    THEN: tl.constexpr,  # or None
    EARLY: tl.constexpr,  # pairs were sorted before the launch before, which waited for them
    PDL: tl.constexpr,
):
    if not EARLY:
        pdl_wait(PDL)
    BLOCK_E: tl.constexpr = BUCKETS.block_e
    TOP_K: tl.constexpr = BUCKETS.top_k
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, capacity)
    x = Arranged(x_ptr, sums_ptr, factor_ptr)
    stacks = Stacks(planes_ptr, up_ptr, stride_expert, stride_up_expert, num_experts, num_rows)
    buckets = bucket_tiles(counts_ptr, num_experts, capacity, BLOCK_E, PAIRS)
    tiles_n = tl.cdiv(num_rows, TILE.rows)
    begin, end = _share(buckets.total * tiles_n)
    for of_pairs in range(begin // tiles_n, tl.cdiv(end, tiles_n)):
        found = pairs_of_tile(of_pairs, buckets, BLOCK_E, PAIRS)
        first = tl.maximum(begin - of_pairs * tiles_n, 0)
        tiles = tl.minimum(end - of_pairs * tiles_n, tiles_n) - first
        multiply_quads(result, x, stride_x, stacks, table, found, first, tiles, TILE, BUCKETS, PDL)
        if THEN is not None:
            to = Arranged(then_x_ptr, then_sums_ptr, then_factor_ptr)
            ticket = tickets_ptr + of_pairs
            arrange_if_last(to, result, ticket, table, found, tiles, tiles_n, PAIRS, TOP_K, THEN)
    if THEN is None:
        pdl_wait(PDL)  # of a program without a tile
        for i in range(tl.program_id(0), tl.cdiv(num_pairs, CLEARED), tl.num_programs(0)):
            pair = tl.cast(i, tl.int64) * CLEARED + tl.arange(0, CLEARED)
            clear_lost(result, table, pair, num_experts, TOP_K, CLEARED_ROWS)


def order_of_quads(kind: str) -> Order:
    """What activations are arranged in."""
    sums = sums_minimums(FORMATS[file_kind(kind)])
    return Order(BLOCK // 8, interleave=1, sums=WORD if sums else 0)


def takes_quads(num_rows: int, k: int, matrices: int) -> bool:
    """Whether this kernel multiplies matrices of ``num_rows`` rows of ``k`` weights."""
    return k % BLOCK == 0 < k and num_rows >= WARP_ROWS // matrices


def choice_of(stack: Tensor, kind: str, num_pairs: int, k: int, matrices: int) -> Config:
    """A product's launch choice; of path ``"quads"`` only where this kernel takes the matrices."""
    num_experts, num_rows = stack.shape[:2]
    shape, is_gated = (num_pairs, num_experts, kind), matrices == 2
    choice = (GATE_UP_TILES if is_gated else TILES).pick(stack.device, *shape)
    if choice.get("path") == "quads" and not takes_quads(num_rows, k, matrices):
        choice = mix_heuristic(gpu_of(stack.device), *shape, is_gated=is_gated)
    return choice


def launch_quads(
    y: Tensor,
    arranged: Arranged,
    table: PairTable,
    planes: Tensor,
    up: Tensor | None,
    kind: str,
    is_per_pair: bool,
    quads: Quads,
    *,
    behind: NextProduct | None = None,
    is_early: bool = False,
) -> None:
    """y[p // top_k, p mod top_k] = W[e] · a[p], or silu(W[e] · a[p]) * (up[e] · a[p]).

    Args:
        y: [num_tokens, top_k, n].
        arranged: a, a row for each token or each pair.
        table: the pairs of each expert; those of none become zeros.
        planes, up: uint8 [num_experts, n, row_bytes].
        kind: their kind, such as ``"Q4_K:planes"``.
        is_per_pair: a has a row for each pair.
        quads: the launch choice.
        behind: the product that takes y; pairs of no expert stay as they are then.
        is_early: the table was made before the launch before, which waited for it, so that weights
            may be loaded while that one ends.
    """
    (num_experts, num_rows), k = planes.shape[:2], arranged.x.shape[1]
    tile = QuadTile(quad_layout(planes, kind, k), 1 if up is None else 2, quads)
    stripes = tile_bound(table.num_pairs, num_experts, table.capacity, PAIRS.value)
    programs = min(processors(y.device) * quads.ctas_per_sm, stripes * cdiv(num_rows, tile.rows))
    then, to = behind or (None, Arranged(None, None, None))
    _quad_tiles_kernel.launch(
        (programs,),
        y_ptr=y,
        then_x_ptr=to.x,
        then_sums_ptr=to.sums,
        then_factor_ptr=to.factor,
        tickets_ptr=to.tickets,
        x_ptr=arranged.x,
        sums_ptr=arranged.sums,
        factor_ptr=arranged.factor,
        planes_ptr=planes,
        up_ptr=up,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_x=arranged.x.stride(0),
        stride_expert=planes.stride(0) // ROW_ALIGN,
        stride_up_expert=0 if up is None else up.stride(0) // ROW_ALIGN,
        num_experts=num_experts,
        num_rows=num_rows,
        num_pairs=table.num_pairs,
        capacity=table.capacity,
        TILE=tile,
        BUCKETS=Buckets(y.shape[1], is_per_pair, next_power_of_2(num_experts), 0, 0),
        THEN=then,
        EARLY=is_early,
        num_warps=quads.warps,
        maxnreg=quads.registers,
    )
