"""What experts in planes make of few pairs by expert: three launches from ids to slots.

By tiles that gather activations, of pairs that few programs can sort. The last program of a tile of
gate and up arranges what they give for down (:mod:`ferrum_triton.kernels.moe.next_product`). More
pairs take the products of buckets (:mod:`ferrum_triton.kernels.moe.plane_gemm`), and are sorted
once for both.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import Buckets, bucket_tiles, pairs_of_tile, tile_bound
from ferrum_triton.kernels.moe.expert_gemm import (
    gemm_quant_moe_id,
    gemm_quant_moe_id_gate_up_silu,
)
from ferrum_triton.kernels.moe.next_product import NextProduct, arrange_if_last, next_product
from ferrum_triton.kernels.moe.pairs import sorted_pairs
from ferrum_triton.kernels.moe.plane_config import (
    Mix,
    Quads,
    steps_of,
    tiles_each,
)
from ferrum_triton.kernels.moe.plane_gemm import (
    Activations,
    Work,
    gemm_plane_pairs,
    launch_tiles,
    multiply_pairs,
)
from ferrum_triton.kernels.moe.plane_gemv import Stacks
from ferrum_triton.kernels.moe.prepare import PairTable, Result
from ferrum_triton.kernels.moe.prepare_ids import prepare_ids
from ferrum_triton.kernels.moe.quad_tiles import (
    PAIRS,
    choice_of,
    launch_quads,
    order_of_quads,
)
from ferrum_triton.kernels.moe.tile_table import Found
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant import mma
from ferrum_triton.kernels.quant.activations import STEP, Arranged, Order
from ferrum_triton.kernels.quant.mma_operands import (
    MatrixTma,
    PlaneRows,
    TokensTma,
    tile_of,
)
from ferrum_triton.kernels.quant.planes import row_sizes, row_units
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import mlp as ops
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN

# Pairs up to which each expert's program reads all ids.
FEW_PAIRS = 1024
# Tiles of pairs, at most, of the calls that were timed. Each takes a ticket.
MOST_STRIPES = 256
# Elements that a program arranges at once: 64 registers of a thread.
MOST_ARRANGED = 8192


@kernel(dynamic=("num_pairs", "tiles_each"))
def _gate_up_arranged_kernel(
    then_x_ptr,  # [num_pairs, padded n], float16
    then_sums_ptr,  # [num_pairs, padded n / 8], float16, or None
    then_factor_ptr,  # [num_pairs], float32
    y_ptr,  # [num_tokens, top_k, n]
    tickets_ptr,  # int32 [tiles of pairs], zeros
    x_ptr,  # [num_tokens, padded k]
    sums_ptr,  # [num_tokens, padded k / 8]
    factor_ptr,  # [num_tokens]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # likewise: y = silu(planes x) * (up x)
    pairs_ptr,  # [num_experts, num_pairs]
    counts_ptr,  # [num_experts]
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
    tiles_each,  # of rows of W, one after the other
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    THEN: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    BLOCK_M: tl.constexpr = TILE.tokens
    BLOCK_E: tl.constexpr = BUCKETS.block_e
    buckets = bucket_tiles(counts_ptr, num_experts, num_pairs, BLOCK_E, BLOCK_M)
    tiles_n = tl.cdiv(num_rows, TILE.rows // 2)
    chunks = tl.cdiv(tiles_n, tiles_each)
    tile = tl.program_id(0) // chunks
    if tile >= buckets.total:
        return
    first = tl.program_id(0) % chunks * tiles_each
    tiles_n = tl.minimum(tiles_n - first, tiles_each)
    found = pairs_of_tile(tile, buckets, BLOCK_E, BLOCK_M)
    y = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    table = PairTable(pairs_ptr, counts_ptr, None, num_pairs, num_pairs)
    x_tma = TokensTma(None, None, 0)
    a = Activations(Arranged(x_ptr, sums_ptr, factor_ptr), stride_x, x_tma)
    stacks = Stacks(planes_ptr, up_ptr, stride_expert, stride_up_expert, num_experts, num_rows)
    no_tma = MatrixTma(None, None, None, None, 0)
    rows = PlaneRows(q_row, h_row, s_row, t_row, d_row)
    work = Work(found, first, tiles_n, num_words)
    multiply_pairs(y, a, stacks, no_tma, no_tma, rows, table, buckets, work, TILE, BUCKETS)
    to = Arranged(then_x_ptr, then_sums_ptr, then_factor_ptr)
    TOP_K: tl.constexpr = BUCKETS.top_k
    arrange_if_last(to, y, tickets_ptr + tile, table, found, 1, chunks, BLOCK_M, TOP_K, THEN)


Tiles = Mix | Quads


def tiles_of(
    a: Tensor,
    gate: Tensor,
    down: Tensor,
    ids: Tensor,
    gate_kind: str,
    up_kind: str,
    down_kind: str,
) -> tuple[Tiles, Tiles] | None:
    """Tiles of gate and up and of down, or None where they do not go together."""
    num_experts, inner = gate.shape[:2]
    kinds, num_pairs = {gate_kind, up_kind, down_kind}, ids.numel()
    if not kinds <= PLANE_FORMATS.keys() or gate_kind != up_kind or a.dtype == torch.float32:
        return None
    if not 0 < num_pairs <= FEW_PAIRS or 0 in (inner, a.shape[1]):
        return None
    gate_up = _tiles(choice_of(gate, gate_kind, num_pairs, a.shape[1], 2))
    then = _tiles(choice_of(down, down_kind, num_pairs, inner, 1))
    if gate_up is None or then is None:
        return None
    tokens = tokens_of(gate_up)
    stripes = tile_bound(num_pairs, num_experts, num_pairs, tokens)
    arranged_at_once = tokens * next_power_of_2(cdiv(inner, STEP) * STEP)
    if stripes > MOST_STRIPES or arranged_at_once > MOST_ARRANGED:
        return None
    return gate_up, then


def _tiles(choice: Config) -> Tiles | None:
    """The tiles of a launch choice, or None of those that take activations sorted by expert."""
    if choice.get("path") == "packed":
        return None
    if choice.get("path") == "quads":
        return Quads.of(choice)
    mix = Mix.of(choice)
    return None if mix.config.use_tma or mix.rest is not None else mix


def tokens_of(tiles: Tiles) -> int:
    """Pairs of a tile."""
    return PAIRS.value if isinstance(tiles, Quads) else tiles.config.tokens


def order_of(tiles: Tiles, kind: str) -> Order:
    """What a product's activations are arranged in."""
    if isinstance(tiles, Quads):
        return order_of_quads(kind)
    return mma.order_of(kind, tiles.config)


@ops.mlp_quant_moe_id.impl("triton")
def mlp_quant_moe_id(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    down_blocks: Tensor,
    ids: Tensor,
    gate_kind: str,
    up_kind: str,
    down_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_experts, inner = gate_blocks.shape[:2]
    top_k, k = ids.shape[1], a.shape[1]
    mixes = tiles_of(a, gate_blocks, down_blocks, ids, gate_kind, up_kind, down_kind)
    if mixes is None:
        if gate_kind == up_kind and {gate_kind, down_kind} <= PLANE_FORMATS.keys():
            found = Found.by_ids(ids, num_experts)
            once = {"top_k": top_k, "found": found}
            buckets = found.bucket_ids, found.tpe
            middle = gemm_plane_pairs(a, gate_blocks, *buckets, gate_kind, up=up_blocks, **once)
            return gemm_plane_pairs(middle, down_blocks, *buckets, down_kind, out=out, **once)
        buckets = sorted_pairs(ids, num_experts)
        middle = gemm_quant_moe_id_gate_up_silu(
            a, gate_blocks, up_blocks, *buckets, gate_kind, up_kind, top_k
        )
        return gemm_quant_moe_id(middle, down_blocks, *buckets, down_kind, top_k, out=out)
    y = a.new_empty(*ids.shape, down_blocks.shape[1]) if out is None else out
    if y.numel() == 0:
        return y
    gate_up, down = mixes
    x, table, tickets = prepare_ids(a, ids, num_experts, order_of(gate_up, gate_kind))
    behind = next_product(ids.numel(), inner, order_of(down, down_kind), tickets)
    middle, matrices = a.new_empty(*ids.shape, inner), (gate_blocks, up_blocks, gate_kind)
    if isinstance(gate_up, Quads):
        launch_quads(middle, x, table, *matrices, False, gate_up, behind=behind)
    else:
        _gate_up_arranged(middle, x, table, *matrices, k, gate_up, behind)
    to = behind.to
    if isinstance(down, Quads):
        launch_quads(y, to, table, down_blocks, None, down_kind, True, down, is_early=True)
    else:
        launch_tiles(y, to, table, down_blocks, None, down_kind, inner, True, down, 0)
    return y


def _gate_up_arranged(
    y: Tensor,
    x: Arranged,
    table: PairTable,
    gate: Tensor,
    up: Tensor,
    kind: str,
    k: int,
    mix: Mix,
    behind: NextProduct,
) -> None:
    """silu(gate · a) * (up · a) of each pair to y, and arranged to the product behind."""
    config, (num_experts, num_rows) = mix.config, gate.shape[:2]
    stripes = tile_bound(table.num_pairs, num_experts, table.capacity, config.tokens)
    tiles, each = cdiv(num_rows, config.rows // 2), 1
    if num_rows % (config.rows // 2) == 0:  # else as in ``launch_tiles``
        each = tiles_each(tiles, cdiv(k, 8 * config.words), steps_of(mix))
    _gate_up_arranged_kernel.launch(
        (stripes * cdiv(tiles, each),),
        then_x_ptr=behind.to.x,
        then_sums_ptr=behind.to.sums,
        then_factor_ptr=behind.to.factor,
        y_ptr=y,
        tickets_ptr=behind.to.tickets,
        x_ptr=x.x,
        sums_ptr=x.sums,
        factor_ptr=x.factor,
        planes_ptr=gate,
        up_ptr=up,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_x=x.x.stride(0),
        stride_expert=gate.stride(0) // ROW_ALIGN,
        stride_up_expert=up.stride(0) // ROW_ALIGN,
        **row_units(row_sizes(gate, kind, k)),
        num_experts=num_experts,
        num_rows=num_rows,
        num_words=k // 8,
        num_pairs=table.num_pairs,
        tiles_each=each,
        TILE=tile_of(kind, config, k, y.device),
        BUCKETS=Buckets(y.shape[1], False, next_power_of_2(num_experts), 0, 0),
        THEN=behind.then,
        **mma.options_of(config),
    )
