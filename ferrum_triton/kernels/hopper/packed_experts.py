"""Many tokens by their experts' weights in planes on Hopper.

As :mod:`.packed`, whose products these are, with tiles of an expert's pairs by rows of its matrix.
Activations have a row for each pair, those of an expert one after the other, so that a tile of
pairs is a tile of memory; one that ends in another expert's rows multiplies them in vain. Which
tiles there are lies on the device (:mod:`ferrum_triton.kernels.moe.tile_table`), and the programs
take them in turn.

Matrices of all experts are one map for each plane, in whose rows an expert's begin a number of rows
apart: so stacks are taken whose experts are a multiple of each plane's rows apart.
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
    add_blocks,
    buffers_of,
    gated,
    output_layout,
    token_ring,
)
from ferrum_triton.kernels.hopper.packed_fetch import copy_block, copy_tokens
from ferrum_triton.kernels.hopper.packed_products import descriptors_of, plane_offsets, tile_of
from ferrum_triton.kernels.hopper.packed_weights import Planes
from ferrum_triton.kernels.hopper.packed_work import WARPGROUPS, Segment
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.moe.prepare import PairTable, Result
from ferrum_triton.kernels.moe.tile_table import FIELDS
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import Arranged
from ferrum_triton.kernels.quant.packed_config import BLOCK, REGISTERS, ROWS, STEP, PackedConfig
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.kinds import file_kind


class Tiles(NamedTuple):
    """Tiles of pairs, and of rows by which each is multiplied.

    Attributes:
        table: what :func:`~ferrum_triton.kernels.moe.tile_table.tile_table` wrote.
        total: tiles of both.
        rows: tiles of rows of a matrix.
        blocks: blocks of K.
    """

    table: Any
    total: Any
    rows: Any
    blocks: Any


class OfTile(NamedTuple):
    """A tile's expert, its first pair in the bucket and among all, and how many it has."""

    expert: Any
    first: Any
    row: Any
    left: Any


class Pairs(NamedTuple):
    """Pairs by expert as :class:`PairTable` has them, and the factors of their activations."""

    pairs: Any
    places: Any
    capacity: Any
    factor: Any


@gluon.jit
def of_tile(tiles, tile):
    """The :class:`OfTile` of a tile."""
    at = tiles.table + tile // tiles.rows * FIELDS
    return OfTile(gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3))


@gluon.jit
def fetch_experts(matrices, apart, ring, tiles, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for weights.

    Args:
        matrices: maps of the stacks, :class:`Planes`; of gate and up, or one and None.
        apart: rows of each map from an expert to the next, :class:`Planes` for each stack.
    """
    GATED: gl.constexpr = TILE.activation != ""
    BYTES: gl.constexpr = TILE.block_bytes
    EACH: gl.constexpr = WARPGROUPS * (32 if GATED else 64)
    pdl_wait(PDL)
    to, step = ring.buffers, 0
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        expert, row = of_tile(tiles, tile).expert, tile % tiles.rows * EACH
        rows, up_rows = rows_of(apart[0], expert, row), rows_of(apart[1], expert, row)
        for k in range(tiles.blocks):
            stage = acquire(ring, step, BYTES)
            full = ring.full.index(stage)
            if GATED:
                first = stage * (2 * WARPGROUPS)
                copy_block(matrices[0], rows, k, full, to, first, 2, TILE)
                copy_block(matrices[1], up_rows, k, full, to, first + 1, 2, TILE)
            else:
                copy_block(matrices[0], rows, k, full, to, stage * WARPGROUPS, 1, TILE)
            step += 1


@gluon.jit
def rows_of(apart, expert, row):
    """The first row of a tile in each plane's map."""
    return Planes(
        expert * apart.q + row,
        expert * apart.h + row,
        expert * apart.s + row,
        expert * apart.d + row,
    )


@gluon.jit
def fetch_pairs(x_desc, ring, tiles, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for activations."""
    SPAN: gl.constexpr = TILE.span
    pdl_wait(PDL)
    pdl_trigger(PDL)
    step = 0
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        row = of_tile(tiles, tile).row
        for k in range(tiles.blocks * 4 // SPAN):
            copy_tokens(x_desc, row, k, ring, step, TILE)
            step += 1


@gluon.jit
def store_pairs(
    acc,
    result,
    pairs,
    here,
    row_tile,
    TOP_K: gl.constexpr,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
):
    """Write a tile's sums to its pairs' rows of y.

    Args:
        acc: float32 [64, tokens].
        result: :class:`Result`.
        pairs: :class:`Pairs`.
        here: :class:`OfTile`.
        row_tile: number of the tile of rows.
    """
    GATED: gl.constexpr = TILE.activation != ""
    EACH: gl.constexpr = 32 if GATED else 64
    ACC: gl.constexpr = acc.type.layout
    m = gl.arange(0, TILE.tokens, gl.SliceLayout(0, ACC))
    factor = gl.load(pairs.factor + here.row + m, mask=m < here.left, other=0.0)
    y = acc * factor[None, :]
    if GATED:
        y = gated(y, TILE)
    LAYOUT: gl.constexpr = output_layout(EACH)
    y = gl.convert_layout(y, LAYOUT)
    m = gl.arange(0, TILE.tokens, gl.SliceLayout(0, LAYOUT))
    known = m < here.left
    expert, entry = here.expert.to(gl.int64), (here.first + m).to(gl.int64)
    pair = gl.load(pairs.pairs + expert * pairs.capacity + entry, mask=known, other=0).to(gl.int64)
    # Of a pair that is in two places, one has activations.
    known = known & (gl.load(pairs.places + pair, mask=known, other=-1) == (expert << 32) | entry)
    token, slot = pair // TOP_K, pair % TOP_K
    row = (row_tile * WARPGROUPS + WARPGROUP) * EACH + gl.arange(0, EACH, gl.SliceLayout(1, LAYOUT))
    to = result.y + (token * result.stride_token + slot * result.stride_slot)[None, :]
    mask = (row < result.num_rows)[:, None] & known[None, :]
    gl.store(to + row[:, None], y.to(result.y.dtype.element_ty), mask=mask)


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
    """A warpgroup that multiplies."""
    TOKENS: gl.constexpr = TILE.tokens
    LAYOUT: gl.constexpr = sums_layout(TOKENS)
    pdl_wait(PDL)
    at, x_at = 0, 0
    for tile in range(gl.program_id(0), tiles.total, gl.num_programs(0)):
        part = Segment(tile, gl.to_tensor(0), tiles.blocks)
        acc = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
        acc, at, x_at = add_blocks(acc, w, x, at, x_at, part, WARPGROUP, TILE)
        here = of_tile(tiles, tile)
        store_pairs(acc, result, pairs, here, tile % tiles.rows, TOP_K, WARPGROUP, TILE)


@gluon_kernel(dynamic=("capacity",))
def packed_experts_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    table_ptr,  # int32 [tiles, FIELDS]
    total_ptr,  # int32 [1]
    pairs_ptr,  # int32 [num_experts, capacity]
    places_ptr,  # int64 [num_pairs]
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
    q_apart,  # rows of each map from an expert to the next
    h_apart,
    s_apart,
    d_apart,
    up_q_apart,
    up_h_apart,
    up_s_apart,
    up_d_apart,
    num_rows,
    blocks,  # of K
    row_tiles,
    capacity,
    TOP_K: gl.constexpr,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[pair] = W[e] · x[pair], or silu(W[e] · x[pair]) * (up[e] · x[pair])."""
    first, second = Planes(q_desc, h_desc, s_desc, d_desc), None
    if up_q_desc is not None:
        second = Planes(up_q_desc, up_h_desc, up_s_desc, up_d_desc)
    apart = Planes(q_apart, h_apart, s_apart, d_apart)
    up_apart = Planes(up_q_apart, up_h_apart, up_s_apart, up_d_apart)
    # Made here and not in a function, which could not return a plane that there is not.
    TILES: gl.constexpr = TILE.stages * WARPGROUPS * (2 if TILE.activation != "" else 1)
    buffers = Planes(
        buffers_of(q_desc, TILES),
        buffers_of(h_desc, TILES),
        buffers_of(s_desc, TILES),
        buffers_of(d_desc, TILES),
    )
    w = Ring(buffers, make_barriers(TILE.stages, 1), make_barriers(TILE.stages, WARPGROUPS))
    x = token_ring(x_desc, TILE)
    fence_async_shared()
    pdl_wait(PDL)
    tiles = Tiles(table_ptr, gl.load(total_ptr) * row_tiles, row_tiles, blocks)
    pairs = Pairs(pairs_ptr, places_ptr, capacity, factor_ptr)
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    # Arguments stand where they are passed: in a variable, constants would become numbers.
    gl.warp_specialize(
        [
            (multiply_pairs, (result, pairs, w, x, tiles, TOP_K, 0, TILE, PDL)),
            (multiply_pairs, (result, pairs, w, x, tiles, TOP_K, 1, TILE, PDL)),
            (fetch_experts, ((first, second), (apart, up_apart), w, tiles, TILE, PDL)),
            (fetch_pairs, (x_desc, x, tiles, TILE, PDL)),
        ],
        [4, 1, 1],
        [TILE.registers, 24, 24],
    )


def rows_apart(stack: Tensor, kind: str, num_weights: int) -> Planes | None:
    """Rows from an expert to the next in each plane's map; None of a stack that has no maps."""
    sizes, between = row_sizes(stack, kind, num_weights), stack.stride(0)
    if between == 0 or any(size and between % size for size in sizes.values()):
        return None
    return Planes(*(between // sizes[plane] if sizes[plane] else 0 for plane in "qhsd"))


def _maps(stack: Tensor, kind: str, num_weights: int, num_rows: int) -> list[Any]:
    """Tensor maps of a stack's planes."""
    sizes, (num_experts, matrix_rows, row_bytes) = row_sizes(stack, kind, num_weights), stack.shape
    begins = plane_offsets(sizes, matrix_rows)
    room = (num_experts - 1) * stack.stride(0) + matrix_rows * row_bytes
    data = stack.as_strided((room,), (1,))

    def plane_rows(plane: str, dtype: torch.dtype) -> Tensor | None:
        if plane not in begins:
            return None
        count = (num_experts - 1) * stack.stride(0) // sizes[plane] + matrix_rows
        rows = data[begins[plane] : begins[plane] + count * sizes[plane]]
        return rows.view(dtype).view(count, -1)

    return descriptors_of(plane_rows, kind, num_weights, num_rows)


def packed_pairs(
    y: Tensor,
    arranged: Arranged,
    pairs: PairTable,
    tiles: tuple[Tensor, Tensor],
    stacks: Sequence[Tensor],
    apart: Sequence[Planes],
    kind: str,
    k: int,
    config: PackedConfig,
) -> None:
    """y ← the products of pairs with their experts, of those in a bucket.

    Args:
        y: [num_tokens, top_k, n], of at least one element.
        arranged, pairs: of ``prepare_sorted``, in :data:`~.packed_config.ORDER`.
        tiles: the table of tiles of ``config.tokens`` pairs, and their number.
        stacks: W, uint8 [num_experts, n, row_bytes]; or gate and up of one shape, where y is
            silu(gate[e] · a[p]) * (up[e] · a[p]).
        apart: :func:`rows_apart` of each.
        kind: theirs, such as ``"Q4_K:planes"``.
        k: weights of a row.
        config: the launch's configuration, of whole tiles.
    """
    num_rows, activation = y.shape[2], "silu" if len(stacks) > 1 else ""
    rows = ROWS // 2 if activation else ROWS
    table, total = tiles
    row_tiles = cdiv(num_rows, rows * WARPGROUPS.value)
    most = len(table) * row_tiles
    maps: dict[str, Any] = {f"up_{plane}_desc": None for plane in "qhsd"}
    maps |= {f"up_{plane}_apart": 0 for plane in "qhsd"}
    for prefix, stack, steps in zip(("", "up_"), stacks, apart, strict=False):
        found = zip("qhsd", _maps(stack, kind, k, rows), steps, strict=True)
        for plane, descriptor, step in found:
            maps[f"{prefix}{plane}_desc"] = descriptor
            maps[f"{prefix}{plane}_apart"] = step
    packed_experts_kernel.launch(
        (min(processors(y.device) * config.ctas_per_sm, most),),
        y_ptr=y,
        table_ptr=table,
        total_ptr=total,
        pairs_ptr=pairs.pairs,
        places_ptr=pairs.places,
        factor_ptr=arranged.factor,
        **maps,
        x_desc=describe(arranged.x, (config.tokens, STEP)),
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        num_rows=num_rows,
        capacity=pairs.capacity,
        blocks=cdiv(k, BLOCK),
        row_tiles=row_tiles,
        TOP_K=y.shape[1],
        TILE=tile_of(FORMATS[file_kind(kind)], config, activation, 1),
        num_warps=4,
        maxnreg=REGISTERS[config.ctas_per_sm][1],
    )
