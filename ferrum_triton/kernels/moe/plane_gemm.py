"""Many tokens by their experts' rows in planes, on tensor cores: one program per tile of an expert.

Chosen where an expert has more than about one pair. Activations are arranged once
(:mod:`ferrum_triton.kernels.moe.prepare`) and gathered by pair, or sorted by expert for TMA. A loop
takes the steps that :mod:`ferrum_triton.kernels.quant.mma` takes for one matrix, one tile of rows
after the other. Of gate and up a tile has rows of both. float32 activations are never rounded: each
of their pairs is a product of its own.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import Buckets, bucket_tiles, pairs_of_tile, tile_bound
from ferrum_triton.kernels.moe.plane_config import (
    Mix,
    Quads,
    mix_heuristic,
    steps_of,
    tiles_each,
)
from ferrum_triton.kernels.moe.plane_gemv import Stacks, gemv_plane_pairs
from ferrum_triton.kernels.moe.prepare import (
    CLEARED,
    PairTable,
    Result,
    clear_lost,
    experts_of_pairs,
    prepare,
)
from ferrum_triton.kernels.moe.prepare_sorted import prepare_sorted
from ferrum_triton.kernels.moe.quad_tiles import choice_of, launch_quads, order_of_quads
from ferrum_triton.kernels.moe.tile_table import Found
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import Arranged
from ferrum_triton.kernels.quant.descriptors import descriptors_of, no_descriptors
from ferrum_triton.kernels.quant.mma import options_of, order_of
from ferrum_triton.kernels.quant.mma_operands import (
    MatrixTma,
    Operands,
    Place,
    PlaneRows,
    TokensTma,
    block_scales,
    pointers,
    tile_of,
    times_row_scales,
)
from ferrum_triton.kernels.quant.mma_steps import add_step, gated
from ferrum_triton.kernels.quant.packed_config import ORDER, PackedConfig, packed_tile
from ferrum_triton.kernels.quant.planes import row_sizes, row_units
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.planes import ROW_ALIGN


@triton.jit
def _store_tile(
    result,
    acc,
    factor_ptr,
    table,
    pairs_ptr,
    n,
    left,
    first_place,
    BUCKETS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Write a tile's rows ``n`` of y.

    Args:
        acc: float32 [rows, tokens], of gate and up together.
        factor_ptr: the activations' factors, if SORTED from the tile's first row on.
        pairs_ptr: the tile's first pair.
        left: pairs from there on.
        first_place: the first pair's place.
    """
    m = tl.arange(0, acc.shape[1])
    # Read again, of L2: they would take registers all the while.
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0, cache_modifier=".cg").to(tl.int64)
    token, slot = pair // BUCKETS.top_k, pair % BUCKETS.top_k
    kept = m < left
    if SORTED:
        # Of a pair that is in two places, one has activations.
        kept &= tl.load(table.places + pair, mask=kept, other=-1) == first_place + m
        factor = tl.load(factor_ptr + m, mask=m < left, other=0)
    else:
        factor = tl.load(factor_ptr + (pair if BUCKETS.per_pair else token))
    acc *= factor[None, :]
    if n.shape[0] < acc.shape[0]:
        acc = gated(acc, "silu")
    y_row = result.y + (token * result.stride_token + slot * result.stride_slot)[None, :]
    tl.store(
        y_row + n[:, None],
        acc.to(result.y.dtype.element_ty),
        mask=kept[None, :] & (n < result.num_rows)[:, None],
    )


class Activations(NamedTuple):
    """Arranged activations of tiles of pairs, by pointers or descriptors."""

    arranged: Any
    stride: Any
    tma: Any  # :class:`TokensTma`


class Work(NamedTuple):
    """What a program does: some tiles of rows of one tile of pairs."""

    found: Any  # :class:`TilePairs`
    first: Any  # tile of rows
    tiles: Any  # how many
    num_words: Any  # of eight weights in a row


@triton.jit
def multiply_pairs(
    result,
    a,
    stacks,
    planes_tma,
    up_tma,
    rows,
    table,
    buckets,
    work,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """The products of one tile of pairs with some tiles of their expert's rows, to ``result``.

    Args:
        a: :class:`Activations`.
        stacks: the experts' matrices.
        planes_tma, up_tma: their descriptors, or those of None.
        rows: :class:`PlaneRows`.
        work: :class:`Work`.
    """
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_M: tl.constexpr = TILE.tokens
    BLOCK_E: tl.constexpr = BUCKETS.block_e
    ROWS: tl.constexpr = BLOCK_N if stacks.up_ptr is None else BLOCK_N // 2
    num_rows, factor_ptr, first = stacks.num_rows, a.arranged.factor, work.first
    expert, first_pair, left = work.found
    pairs_ptr = table.pairs + expert * table.capacity + first_pair
    first_place = (expert << 32) | first_pair
    SORTED: tl.constexpr = planes_tma.q is not None
    if SORTED:
        e = tl.arange(0, BLOCK_E)
        first_pair += tl.sum(tl.where(e < expert, buckets.counts, 0), axis=0)
        left = tl.minimum(left, table.num_pairs - first_pair)  # of rows, if pairs are in two places
        factor_ptr += first_pair
    planes_ptr = stacks.ptr + expert * stacks.stride * 16
    row = tl.arange(0, BLOCK_N)
    if stacks.up_ptr is not None:
        # Eight rows of each in turn, as ``gated`` takes them.
        is_up = row // 8 % 2 == 1
        row = row // 16 * 8 + row % 8
        up_ptr = stacks.up_ptr + expert * stacks.up_stride * 16
        planes_ptr = tl.where(is_up, up_ptr, planes_ptr)
    row = tl.minimum(first.to(tl.int64) * ROWS + row, num_rows - 1)  # past the end the last again
    m = tl.arange(0, BLOCK_M)
    # Padding takes the tile's own pairs again, in turn: of one row, all programs would ask L2.
    pair = tl.load(pairs_ptr + m % tl.maximum(left, 1)).to(tl.int64)
    x_row = pair if BUCKETS.per_pair else pair // BUCKETS.top_k
    # A stack without a stride is one expert to a descriptor.
    tma_expert = tl.where(stacks.stride == 0, 0, expert).to(tl.int32)
    up_expert = tl.where(stacks.up_stride == 0, 0, expert).to(tl.int32)
    x, x_tma = a.arranged, a.tma
    operands = Operands(
        pointers(planes_ptr, x.x, x.sums, rows, a.stride, row, x_row, num_rows, TILE),
        rows,
        MatrixTma(planes_tma.q, planes_tma.h, planes_tma.s, planes_tma.d, tma_expert),
        MatrixTma(up_tma.q, up_tma.h, up_tma.s, up_tma.d, up_expert),
        TokensTma(x_tma.x, x_tma.sums, first_pair),
        first * ROWS,
    )
    # The steps of one tile after those of the other, so that the pipeline is filled once.
    steps = tl.cdiv(work.num_words, TILE.words)
    tile, step = 0, 0
    scales = block_scales(operands, Place(tl.full((), 0, tl.int64), 0), TILE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(work.tiles * steps):
        is_last = step == steps - 1
        next_step, next_tile = tl.where(is_last, 0, step + 1), tl.where(is_last, tile + 1, tile)
        here = Place(tl.cast(tile, tl.int64) * ROWS, step)
        after = Place(tl.minimum(next_tile, work.tiles - 1).to(tl.int64) * ROWS, next_step)
        acc, scales = add_step(acc, scales, operands, here, after, work.num_words, TILE)
        if is_last:
            acc = times_row_scales(acc, operands, here.rows, TILE)
            n = (first + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            _store_tile(
                result, acc, factor_ptr, table, pairs_ptr, n, left, first_place, BUCKETS, SORTED
            )
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        tile, step = next_tile, next_step


@kernel(dynamic=("num_pairs", "capacity", "tiles_each", "num_programs"))
def _plane_tiles_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    x_ptr,  # [num_tokens, padded k], or [num_pairs, padded k]; through descriptors by expert
    sums_ptr,  # [rows of x, padded k / 8]
    factor_ptr,  # [rows of x]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # likewise: y = silu(planes x) * (up x); or None
    pairs_ptr,  # [num_experts, capacity]
    counts_ptr,  # [num_experts]
    places_ptr,  # [num_pairs]
    q_desc,  # of planes, see descriptors_of; or None
    h_desc,
    s_desc,
    d_desc,
    up_q_desc,  # of up
    up_h_desc,
    up_s_desc,
    up_d_desc,
    x_desc,  # of activations, or None
    sums_desc,
    stride_y_token,
    stride_y_slot,
    stride_x,
    stride_expert,  # of planes, in units of 16 bytes
    stride_up_expert,
    q_row,  # units of 16 bytes of a row in each plane
    h_row,
    s_row,
    t_row,
    d_row,
    num_experts,
    num_rows,
    num_words,  # of eight weights in a row
    num_pairs,
    capacity,
    tiles_each,  # of rows of W, one after the other
    num_programs,  # with tiles; the others clear
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    TOP_K: tl.constexpr = BUCKETS.top_k
    BLOCK_N: tl.constexpr = TILE.rows
    pdl_wait(PDL)
    pdl_trigger(PDL)
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    table = PairTable(pairs_ptr, counts_ptr, places_ptr, num_pairs, capacity)
    if tl.program_id(0) >= num_programs:
        pair = (tl.program_id(0) - num_programs).to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        clear_lost(result, table, pair, num_experts, TOP_K, BLOCK_N)
        return
    BLOCK_E: tl.constexpr = BUCKETS.block_e
    BLOCK_M: tl.constexpr = TILE.tokens
    SPARED: tl.constexpr = BUCKETS.spared
    BIG: tl.constexpr = BUCKETS.big
    buckets = bucket_tiles(counts_ptr, num_experts, capacity, BLOCK_E, BLOCK_M, SPARED, BIG)
    # Programs of one tile of pairs run side by side, and those of one expert near each other.
    ROWS: tl.constexpr = BLOCK_N if up_ptr is None else BLOCK_N // 2
    tiles_n = tl.cdiv(num_rows, ROWS)
    chunks = tl.cdiv(tiles_n, tiles_each)
    tile = tl.program_id(0) // chunks
    if tile >= buckets.total:
        return
    first = tl.program_id(0) % chunks * tiles_each
    tiles_n = tl.minimum(tiles_n - first, tiles_each)
    found = pairs_of_tile(tile, buckets, BLOCK_E, BLOCK_M)
    x_tma = TokensTma(x_desc, sums_desc, 0)
    a = Activations(Arranged(x_ptr, sums_ptr, factor_ptr), stride_x, x_tma)
    stacks = Stacks(planes_ptr, up_ptr, stride_expert, stride_up_expert, num_experts, num_rows)
    planes_tma = MatrixTma(q_desc, h_desc, s_desc, d_desc, 0)
    up_tma = MatrixTma(up_q_desc, up_h_desc, up_s_desc, up_d_desc, 0)
    rows = PlaneRows(q_row, h_row, s_row, t_row, d_row)
    work = Work(found, first, tiles_n, num_words)
    multiply_pairs(result, a, stacks, planes_tma, up_tma, rows, table, buckets, work, TILE, BUCKETS)


def gemm_plane_pairs(
    a: Tensor,
    planes: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    kind: str,
    top_k: int,
    up: Tensor | None = None,
    *,
    out: Tensor | None = None,
    mix: Mix | None = None,
    found: Found | None = None,
) -> Tensor:
    """y[p // top_k, p mod top_k] = W[e] · a[p] for p in the first tpe[e] of bucket_ids[e].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        bucket_ids, tpe: the buckets of ``compute_ids_tpe``.
        kind: kind of planes, such as ``"Q4_K:planes"``.
        top_k: slots of a token.
        up: a stack of planes' shape: y is silu(W[e] · a[p]) * (up[e] · a[p]).
        out: [num_tokens, top_k, n] to write to.
        mix: tiles to launch.
        found: what is known of these buckets already.
    """
    (num_experts, num_rows), k = planes.shape[:2], a.shape[-1]
    num_pairs = a.shape[0] * top_k
    y = a.new_empty(a.shape[0], top_k, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if a.dtype == torch.float32:
        ids = experts_of_pairs(bucket_ids, tpe, num_pairs).view(-1, top_k)
        return gemv_plane_pairs(a, planes, ids, kind, up, "" if up is None else kind, out=y)
    if k == 0:
        return y.zero_()
    found = found or Found(bucket_ids, tpe, num_pairs)
    if mix is None:
        choice = choice_of(planes, kind, num_pairs, k, 1 if up is None else 2)
        if choice.get("path") == "packed":
            if _packed(y, a, planes, up, found, kind, packed_tile(choice)):
                return y
            shape = num_pairs, num_experts, kind
            choice = mix_heuristic(gpu_of(a.device), *shape, is_gated=up is not None)
        if choice.get("path") == "quads":
            prepared = prepare(a, bucket_ids, tpe, top_k, order_of_quads(kind))
            launch_quads(y, *prepared, planes, up, kind, a.dim() == 3, Quads.of(choice))
            return y
        mix = Mix.of(choice)
    order = order_of(kind, mix.config)
    if mix.config.use_tma:
        prepared = prepare_sorted(a, found, order, y), found.pairs
    else:
        prepared = prepare(a, bucket_ids, tpe, top_k, order)
    is_per_pair = a.dim() == 3
    launch_tiles(y, *prepared, planes, up, kind, k, is_per_pair, mix, 0)
    if mix.rest is not None:
        rest = mix._replace(config=mix.rest)
        launch_tiles(y, *prepared, planes, up, kind, k, is_per_pair, rest, mix.config.tokens)
    return y


def _packed(
    y: Tensor,
    a: Tensor,
    planes: Tensor,
    up: Tensor | None,
    found: Found,
    kind: str,
    tile: PackedConfig,
) -> bool:
    """The products by the kernel in Gluon, or False of stacks that it has no tensor maps of."""
    # Gluon moves between versions of Triton: it is imported where it may be used.
    from ferrum_triton.kernels.hopper.packed_experts import has_maps, packed_pairs

    stacks, k = [planes] if up is None else [planes, up], a.shape[-1]
    if not all(has_maps(stack) for stack in stacks):
        return False
    arranged = prepare_sorted(a, found, ORDER, y, tile.tokens)
    packed_pairs(y, arranged, found.tiles[tile.tokens], stacks, kind, k, tile)
    return True


def launch_tiles(
    y: Tensor,
    arranged: Arranged,
    table: PairTable,
    planes: Tensor,
    up: Tensor | None,
    kind: str,
    k: int,
    is_per_pair: bool,
    mix: Mix,
    big: int,
) -> None:
    """Products by a mix's tiles of one size; ``big`` as ``bucket_tiles`` has it."""
    config, spared = mix.config, mix.spared
    (num_experts, num_rows), top_k = planes.shape[:2], y.shape[1]
    sizes, tile = row_sizes(planes, kind, k), tile_of(kind, config, k, y.device)
    if big:
        stripes = min(table.num_pairs, num_experts) * cdiv(spared, config.tokens)
    else:
        stripes = tile_bound(table.num_pairs, num_experts, table.capacity, config.tokens)
    rows = config.rows if up is None else config.rows // 2
    tiles = cdiv(num_rows, rows)
    each = 1  # the rows that a last tile lacks can only be left out of a program's first
    if num_rows % rows == 0:
        each = tiles_each(tiles, cdiv(k, 8 * config.words), steps_of(mix))
    num_programs = stripes * cdiv(tiles, each)
    stacks = {"": planes, "up_": up}
    descriptors, clearing = no_descriptors(stacks), cdiv(table.num_pairs, CLEARED.value)
    if config.use_tma:
        descriptors = descriptors_of(tile, rows, arranged, stacks, sizes, k)
        clearing = 0  # done by prepare_sorted
    _plane_tiles_kernel.launch(
        (num_programs + clearing,),
        y_ptr=y,
        x_ptr=arranged.x,
        sums_ptr=arranged.sums,
        factor_ptr=arranged.factor,
        planes_ptr=planes,
        up_ptr=up,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        places_ptr=table.places,
        **descriptors,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_x=arranged.x.stride(0),
        stride_expert=planes.stride(0) // ROW_ALIGN,
        stride_up_expert=0 if up is None else up.stride(0) // ROW_ALIGN,
        **row_units(sizes),
        num_experts=num_experts,
        num_rows=num_rows,
        num_words=k // 8,
        num_pairs=table.num_pairs,
        capacity=table.capacity,
        tiles_each=each,
        num_programs=num_programs,
        TILE=tile,
        BUCKETS=Buckets(top_k, is_per_pair, next_power_of_2(num_experts), spared, big),
        **options_of(config),
    )
