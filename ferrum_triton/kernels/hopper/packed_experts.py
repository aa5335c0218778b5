"""Many tokens by their experts' weights in planes on Hopper.

As :mod:`.packed`, whose products these are, with tiles of an expert's pairs by rows of its matrix.
Activations have a row for each pair, those of an expert one after the other, so that a tile of
pairs is a tile of memory; one that ends in another expert's rows multiplies them in vain. Which
tiles there are lies on the device (:mod:`ferrum_triton.kernels.moe.tile_table`), and the programs
take them in turn.

Matrices of all experts are one map for each plane, [expert, row, column].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ferrum_triton.kernels.gluon import describe, gluon_kernel
from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.hopper.packed import (
    WeightRing,
    add_blocks,
    buffers_of,
    go_barriers,
    part_of,
    token_ring,
)
from ferrum_triton.kernels.hopper.packed_fetch import (
    Source,
    TokenMaps,
    copy_stage,
    copy_tokens,
)
from ferrum_triton.kernels.hopper.packed_products import descriptors_of, plane_offsets, tile_of
from ferrum_triton.kernels.hopper.packed_stores import gated, output_layout
from ferrum_triton.kernels.hopper.packed_weights import Planes
from ferrum_triton.kernels.hopper.packed_work import WARPGROUPS, Segment
from ferrum_triton.kernels.hopper.rings import acquire, make_barriers
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.moe.prepare import Result
from ferrum_triton.kernels.moe.tile_table import FIELDS, TileTable
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import Arranged
from ferrum_triton.kernels.quant.packed_config import (
    BLOCK,
    ROWS,
    STEP,
    PackedConfig,
    usual_registers,
)
from ferrum_triton.kernels.quant.planes import ROW_ALIGN, row_sizes
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.kinds import file_kind

# A pair a thread.
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Tiles(NamedTuple):
    """Tiles of pairs, and of rows by which each is multiplied.

    Attributes:
        table: what :func:`~ferrum_triton.kernels.moe.tile_table.write_tiles` wrote.
        total: tiles of both.
        rows: tiles of rows of a matrix.
        blocks: blocks of K.
    """

    table: Any
    total: Any
    rows: Any
    blocks: Any


class OfTile(NamedTuple):
    """A tile's expert, its first pair among all by expert, and how many that has from there on."""

    expert: Any
    row: Any
    left: Any


class Pairs(NamedTuple):
    """Pairs by expert, and the factors of their activations: all of them, or a tile's."""

    pairs: Any
    factor: Any


@gluon.jit
def of_tile(tiles, tile):
    """The :class:`OfTile` of a tile; of one past the last any."""
    tile = gl.maximum(gl.minimum(tile, tiles.total - 1), 0)
    at = tiles.table + tile // tiles.rows * FIELDS
    return OfTile(gl.load(at), gl.load(at + 1), gl.load(at + 2))


@gluon.jit
def as_map(desc, buffers):
    """Buffers [number, rows, columns] as a map's tiles, of one expert each; None of no plane."""
    if desc is not None:
        NUMBER: gl.constexpr = buffers.shape[0]
        ROWS: gl.constexpr = desc.block_type.shape[1]
        COLUMNS: gl.constexpr = desc.block_type.shape[2]
        tiles = buffers._reinterpret(desc.dtype, [NUMBER, 1, ROWS, COLUMNS], desc.layout)
    else:
        tiles = None
    return tiles


@gluon.jit
def fetch_experts(matrices, ring, tiles, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for weights.

    Args:
        matrices: maps of the stacks, :class:`Planes`; of gate and up, or one and None.
    """
    GATED: gl.constexpr = TILE.activation != ""
    BYTES: gl.constexpr = TILE.block_bytes
    ROWS: gl.constexpr = WARPGROUPS * (32 if GATED else 64)
    pdl_wait(PDL)
    maps, buffers, step = matrices[0], ring.buffers, 0
    to = Planes(
        as_map(maps.q, buffers.q),
        as_map(maps.h, buffers.h),
        as_map(maps.s, buffers.s),
        as_map(maps.d, buffers.d),
    )
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        rows = Source(of_tile(tiles, tile).expert, tile % tiles.rows * ROWS)
        for k in range(tiles.blocks):
            stage = acquire(ring, step, BYTES)
            full = ring.full.index(stage)
            copy_stage(matrices, rows, k, full, to, stage, TILE)
            step += 1


@gluon.jit
def fetch_pairs(maps, ring, tiles, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for activations."""
    STEPS: gl.constexpr = TILE.x_steps
    pdl_wait(PDL)
    pdl_trigger(PDL)
    step = 0
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        row = of_tile(tiles, tile).row
        for k in range(tiles.blocks * 4 // STEPS):
            copy_tokens(maps, row, k, ring, step, TILE)
            step += 1


@gluon.jit
def pairs_of_tile(pairs, here, TILE: gl.constexpr):
    """The :class:`Pairs` of a tile, a token a thread: as few registers as it takes."""
    m = gl.arange(0, TILE.tokens, EACH)
    known = m < here.left
    pair = gl.load(pairs.pairs + here.row + m, mask=known, other=-1)
    return Pairs(pair, gl.load(pairs.factor + here.row + m, mask=known, other=0.0))


@gluon.jit
def store_pairs(
    acc,
    result,
    mine,
    row_tile,
    TOP_K: gl.constexpr,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
):
    """Write a tile's sums to its pairs' rows of y.

    Args:
        acc: float32 [64, tokens].
        result: :class:`Result`.
        mine: :class:`Pairs` of the tile.
        row_tile: number of the tile of rows.
    """
    GATED: gl.constexpr = TILE.activation != ""
    ROWS: gl.constexpr = 32 if GATED else 64
    factor = gl.convert_layout(mine.factor, gl.SliceLayout(0, acc.type.layout))
    y = acc * factor[None, :]
    if GATED:
        y = gated(y, TILE)
    LAYOUT: gl.constexpr = output_layout(ROWS)
    y = gl.convert_layout(y, LAYOUT)
    pair = gl.convert_layout(mine.pairs, gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    # Of a pair that is in two places, one has activations.
    known, token, slot = pair >= 0, pair // TOP_K, pair % TOP_K
    row = (row_tile * WARPGROUPS + WARPGROUP) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    to = result.y + (token * result.stride_token + slot * result.stride_slot)[None, :]
    mask = (row < result.num_rows)[:, None] & known[None, :]
    gl.store(to + row[:, None], y.to(result.y.dtype.element_ty), mask=mask)


@gluon.jit
def multiply_tile(
    result,
    pairs,
    here,
    w,
    x,
    at,
    x_at,
    tile,
    tiles,
    TOP_K: gl.constexpr,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply and store a tile, or the first tokens of one."""
    TOKENS: gl.constexpr = TILE.tokens
    LAYOUT: gl.constexpr = sums_layout(TOKENS)
    # Asked for before the products, so that no store waits for where it goes.
    mine = pairs_of_tile(pairs, here, TILE)
    part = Segment(tile, gl.to_tensor(0), tiles.blocks)
    acc = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
    acc, at, x_at = add_blocks(acc, w, x, at, x_at, part, WARPGROUP, TILE)
    store_pairs(acc, result, mine, tile % tiles.rows, TOP_K, WARPGROUP, TILE)


@gluon.jit
def multiply_pairs(
    result,
    pairs,
    w,
    x,
    tiles,
    TOP_K: gl.constexpr,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warpgroup that multiplies.

    An expert's last tile may have few pairs: up to a half or a quarter of one takes less time.
    """
    SPAN: gl.constexpr = TILE.span
    HALF: gl.constexpr = part_of(TILE, 2)
    QUARTER: gl.constexpr = part_of(TILE, 4)
    pdl_wait(PDL)
    at, x_at = 0, 0
    here = of_tile(tiles, gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        later = of_tile(tiles, tile + gl.num_programs(0))
        common = (result, pairs, here, w, x, at, x_at, tile, tiles)
        if TILE.tokens >= 16 and here.left <= HALF.tokens:
            if TILE.tokens >= 32 and here.left <= QUARTER.tokens:
                multiply_tile(*common, TOP_K, WARPGROUP, QUARTER)
            else:
                multiply_tile(*common, TOP_K, WARPGROUP, HALF)
        else:
            multiply_tile(*common, TOP_K, WARPGROUP, TILE)
        here = later
        at += tiles.blocks
        x_at += tiles.blocks * 4 // SPAN


@gluon_kernel
def packed_experts_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    table_ptr,  # int32 [tiles, FIELDS]
    total_ptr,  # int32 [1]
    pairs_ptr,  # int32 [num_pairs], by expert
    factor_ptr,  # float32 [num_pairs]
    q_desc,  # of planes of all experts
    h_desc,
    s_desc,
    d_desc,
    up_q_desc,  # of up; or None
    up_h_desc,
    up_s_desc,
    up_d_desc,
    x_desc,  # of activations by expert, float16 [num_pairs, padded k]
    stride_y_token,
    stride_y_slot,
    num_rows,
    blocks,  # of K
    row_tiles,
    TOP_K: gl.constexpr,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[pair] = W[e] · x[pair], or silu(W[e] · x[pair]) * (up[e] · x[pair])."""
    first, second = Planes(q_desc, h_desc, s_desc, d_desc), None
    if up_q_desc is not None:
        second = Planes(up_q_desc, up_h_desc, up_s_desc, up_d_desc)
    # Made here and not in a function, which could not return a plane that there is not.
    TILES: gl.constexpr = TILE.stages * WARPGROUPS * (2 if TILE.activation != "" else 1)
    buffers = Planes(
        buffers_of(q_desc, TILES),
        buffers_of(h_desc, TILES),
        buffers_of(s_desc, TILES),
        buffers_of(d_desc, TILES),
    )
    full = make_barriers(TILE.stages, TILE.producers)
    w = WeightRing(buffers, full, make_barriers(TILE.stages, WARPGROUPS), go_barriers(TILE))
    x = token_ring(x_desc, w, TILE)
    fence_async_shared()
    pdl_wait(PDL)
    tiles = Tiles(table_ptr, gl.load(total_ptr) * row_tiles, row_tiles, blocks)
    pairs = Pairs(pairs_ptr, factor_ptr)
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    # Arguments stand where they are passed: in a variable, constants would become numbers.
    gl.warp_specialize(
        [
            (multiply_pairs, (result, pairs, w, x, tiles, TOP_K, 0, TILE, PDL)),
            (multiply_pairs, (result, pairs, w, x, tiles, TOP_K, 1, TILE, PDL)),
            (fetch_experts, ((first, second), w, tiles, TILE, PDL)),
            (fetch_pairs, (TokenMaps(x_desc, None), x, tiles, TILE, PDL)),
        ],
        [4, 1, 1],
        [TILE.registers, 24, 24],
    )


def has_maps(stack: Tensor) -> bool:
    """Whether a stack can be described to TMA: its experts are apart, by multiples of 16 bytes."""
    between = stack.stride(0)
    return between > 0 and between % ROW_ALIGN == 0


def _maps(stack: Tensor, kind: str, num_weights: int, num_rows: int) -> list[Any]:
    """Tensor maps of a stack's planes."""
    sizes, (num_experts, matrix_rows, row_bytes) = row_sizes(stack, kind, num_weights), stack.shape
    begins, between = plane_offsets(sizes, matrix_rows), stack.stride(0)
    room = (num_experts - 1) * between + matrix_rows * row_bytes
    data = stack.as_strided((room,), (1,))

    def plane_rows(plane: str, dtype: torch.dtype) -> Tensor | None:
        if plane not in begins:
            return None
        size, wide = sizes[plane], dtype.itemsize
        rows = data[begins[plane] :].view(dtype)
        shape = num_experts, matrix_rows, size // wide
        return rows.as_strided(shape, (between // wide, size // wide, 1))

    return descriptors_of(plane_rows, kind, num_weights, num_rows)


def packed_pairs(
    y: Tensor,
    arranged: Arranged,
    table: TileTable,
    stacks: Sequence[Tensor],
    kind: str,
    k: int,
    config: PackedConfig,
) -> None:
    """y ← the products of pairs with their experts, of those in a bucket.

    Args:
        y: [num_tokens, top_k, n], of at least one element.
        arranged: activations that ``prepare_sorted`` brought into :data:`~.packed_config.ORDER`.
        table: tiles of ``config.tokens`` pairs.
        stacks: W, uint8 [num_experts, n, row_bytes]; or gate and up of one shape, where y is
            silu(gate[e] · a[p]) * (up[e] · a[p]).
        kind: theirs, such as ``"Q4_K:planes"``.
        k: weights of a row.
        config: the launch's configuration, of whole tiles.
    """
    num_rows, activation = y.shape[2], "silu" if len(stacks) > 1 else ""
    rows = ROWS // 2 if activation else ROWS
    row_tiles, registers = cdiv(num_rows, rows * WARPGROUPS.value), usual_registers(config)
    most = len(table.tiles) * row_tiles
    maps: dict[str, Any] = {f"up_{plane}_desc": None for plane in "qhsd"}
    for prefix, stack in zip(("", "up_"), stacks, strict=False):
        for plane, descriptor in zip("qhsd", _maps(stack, kind, k, rows), strict=True):
            maps[f"{prefix}{plane}_desc"] = descriptor
    packed_experts_kernel.launch(
        (min(processors(y.device) * config.ctas_per_sm, most),),
        y_ptr=y,
        table_ptr=table.tiles,
        total_ptr=table.total,
        pairs_ptr=table.pairs,
        factor_ptr=arranged.factor,
        **maps,
        x_desc=describe(arranged.x, (config.tokens, STEP)),
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        num_rows=num_rows,
        blocks=cdiv(k, BLOCK),
        row_tiles=row_tiles,
        TOP_K=y.shape[1],
        TILE=tile_of(FORMATS[file_kind(kind)], config, registers.multiplying, activation, 1),
        num_warps=4,
        maxnreg=registers.average,
    )
