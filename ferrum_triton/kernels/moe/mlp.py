"""What experts in planes make of few pairs by expert: three launches from ids to slots.

Between gate and up and down their activations are arranged once more, by a row's largest magnitude,
which no program of a part of the row knows. The programs of a tile of pairs draw tickets, and the
last of them arranges what all have written. By tiles that gather activations, of pairs that few
programs can sort. Of more, these are the products of buckets
(:mod:`ferrum_triton.kernels.moe.plane_gemm`), and pairs are sorted once for both.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, pairs_of_tile, tile_bound
from ferrum_triton.kernels.moe.expert_gemm import (
    gemm_quant_moe_id,
    gemm_quant_moe_id_gate_up_silu,
)
from ferrum_triton.kernels.moe.pairs import sorted_pairs
from ferrum_triton.kernels.moe.plane_config import (
    GATE_UP_TILES,
    TILES,
    Mix,
    steps_of,
    tiles_each,
)
from ferrum_triton.kernels.moe.plane_gemm import (
    Activations,
    Buckets,
    Work,
    gemm_plane_pairs,
    launch_tiles,
    multiply_pairs,
)
from ferrum_triton.kernels.moe.plane_gemv import Stacks
from ferrum_triton.kernels.moe.prepare import PairTable, Result
from ferrum_triton.kernels.moe.prepare_ids import prepare_ids
from ferrum_triton.kernels.moe.tile_table import Found
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import (
    STEP,
    TICKETS,
    Arranged,
    Order,
    arranged,
    factor_of,
    inverse_of,
    room_for,
)
from ferrum_triton.kernels.quant.mma import options_of
from ferrum_triton.kernels.quant.mma_operands import (
    MatrixTma,
    PlaneRows,
    TokensTma,
    halves_of,
    tile_of,
)
from ferrum_triton.kernels.quant.planes import row_sizes, row_units
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import mlp as ops
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN

# Pairs up to which each expert's program reads all ids.
FEW_PAIRS = 1024
# Elements that a program arranges at once: 64 registers of a thread.
MOST_ARRANGED = 8192


@dataclass(frozen=True)
class Then:
    """How the product behind takes a tile's rows.

    Attributes:
        columns: words of a part of a step.
        halves: parts of a step.
        padded: elements of a row, filled up to whole steps.
        block_k: power of two >= padded.
    """

    columns: int
    halves: int
    padded: int
    block_k: int


@triton.jit
def _arrange_pairs(
    to, y, pairs_ptr, left, BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, THEN: tl.constexpr
):
    """Rows of a tile's pairs in the order of the product behind, which has a row for each pair.

    Args:
        to: :class:`Arranged` pointers.
        y: :class:`Result`, which other programs wrote too.
        pairs_ptr: the tile's first pair.
        left: pairs from there on.
    """
    BLOCK_K: tl.constexpr = THEN.block_k
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    pair = tl.load(pairs_ptr + m, mask=m < left, other=0).to(tl.int64)
    y_row = y.y + pair // TOP_K * y.stride_token + pair % TOP_K * y.stride_slot
    kept = (m < left)[:, None]
    at = y_row[:, None] + k[None, :]
    inside = kept & (k < y.num_rows)[None, :]
    # Past L1, which may hold lines of before.
    a = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    inverse = inverse_of(tl.abs(a).to(tl.int32, bitcast=True), 1)
    tl.store(to.factor + pair, factor_of(inverse), mask=m < left)
    inverse = tl.broadcast_to(inverse[:, None], [BLOCK_M, BLOCK_K])
    SIZE: tl.constexpr = BLOCK_M * BLOCK_K
    x, sums = arranged(
        tl.reshape(a, [SIZE]), tl.reshape(inverse, [SIZE]), THEN.columns, THEN.halves
    )
    x_row = to.x + pair[:, None] * THEN.padded + k[None, :]
    tl.store(x_row, tl.reshape(x, [BLOCK_M, BLOCK_K]), mask=kept & (k < THEN.padded)[None, :])
    word = tl.arange(0, BLOCK_K // 8)
    sums_row = to.sums + pair[:, None] * (THEN.padded // 8) + word[None, :]
    sums = tl.reshape(sums, [BLOCK_M, BLOCK_K // 8])
    tl.store(sums_row, sums, mask=kept & (word < THEN.padded // 8)[None, :])


@kernel(dynamic=("num_pairs", "tiles_each"))
def _gate_up_arranged_kernel(
    then_x_ptr,  # [num_pairs, padded n], float16
    then_sums_ptr,  # [num_pairs, padded n / 8], float16
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
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == chunks - 1:
        to = Arranged(then_x_ptr, then_sums_ptr, then_factor_ptr)
        mine = pairs_ptr + found.expert * num_pairs + found.first
        _arrange_pairs(to, y, mine, found.left, BLOCK_M, BUCKETS.top_k, THEN)


def tiles_of(
    a: Tensor, gate: Tensor, ids: Tensor, gate_kind: str, up_kind: str, down_kind: str
) -> tuple[Mix, Mix] | None:
    """Tiles of gate and up and of down, or None where they do not go together."""
    num_experts, inner = gate.shape[:2]
    kinds, num_pairs = {gate_kind, up_kind, down_kind}, ids.numel()
    if not kinds <= PLANE_FORMATS.keys() or gate_kind != up_kind or a.dtype == torch.float32:
        return None
    if not 0 < num_pairs <= FEW_PAIRS or 0 in (inner, a.shape[1]):
        return None
    found = []
    for tunable, kind in ((GATE_UP_TILES, gate_kind), (TILES, down_kind)):
        choice = tunable.pick(a.device, num_pairs, num_experts, kind)
        if choice.get("path") == "packed":
            return None
        mix = Mix.of(choice)
        if mix.config.use_tma or mix.rest is not None:
            return None
        found.append(mix)
    gate_up, down = found
    tokens = gate_up.config.tokens
    stripes = tile_bound(num_pairs, num_experts, num_pairs, tokens)
    arranged_at_once = tokens * next_power_of_2(cdiv(inner, STEP) * STEP)
    if stripes > TICKETS.value or arranged_at_once > MOST_ARRANGED:
        return None
    return gate_up, down


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
    mixes = tiles_of(a, gate_blocks, ids, gate_kind, up_kind, down_kind)
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
    mix, down = mixes
    gate_up = mix.config
    order = Order(gate_up.words, halves_of(gate_kind))
    x, table, tickets = prepare_ids(a, ids, num_experts, order)
    order = Order(down.config.words, halves_of(down_kind))
    then = room_for(ids.numel(), inner, a.device, order)
    middle = a.new_empty(*ids.shape, inner)
    stripes = tile_bound(ids.numel(), num_experts, ids.numel(), gate_up.tokens)
    tiles, each = cdiv(inner, gate_up.rows // 2), 1
    if inner % (gate_up.rows // 2) == 0:  # else as in ``launch_tiles``
        each = tiles_each(tiles, cdiv(k, 8 * gate_up.words), steps_of(mix))
    padded = then.x.shape[1]
    _gate_up_arranged_kernel.launch(
        (stripes * cdiv(tiles, each),),
        then_x_ptr=then.x,
        then_sums_ptr=then.sums,
        then_factor_ptr=then.factor,
        y_ptr=middle,
        tickets_ptr=tickets,
        x_ptr=x.x,
        sums_ptr=x.sums,
        factor_ptr=x.factor,
        planes_ptr=gate_blocks,
        up_ptr=up_blocks,
        pairs_ptr=table.pairs,
        counts_ptr=table.counts,
        stride_y_token=middle.stride(0),
        stride_y_slot=middle.stride(1),
        stride_x=x.x.stride(0),
        stride_expert=gate_blocks.stride(0) // ROW_ALIGN,
        stride_up_expert=up_blocks.stride(0) // ROW_ALIGN,
        **row_units(row_sizes(gate_blocks, gate_kind, k)),
        num_experts=num_experts,
        num_rows=inner,
        num_words=k // 8,
        num_pairs=ids.numel(),
        tiles_each=each,
        TILE=tile_of(gate_kind, gate_up, k, a.device),
        BUCKETS=Buckets(top_k, False, next_power_of_2(num_experts), 0, 0),
        THEN=Then(order.words // order.halves, order.halves, padded, next_power_of_2(padded)),
        **options_of(gate_up),
    )
    launch_tiles(y, then, table, down_blocks, None, down_kind, inner, True, down, 0)
    return y
