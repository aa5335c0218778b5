"""Few tokens by their experts' packed weights: one program per pair and some rows of its expert.

Pairs of one expert read its rows side by side, the later ones from L2.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated, silu_mul
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs, slot_stride
from ferrum_triton.kernels.quant.decode import LAYOUTS, alignment, decode, first_weight, groups_of
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import experts as ops
from ferrum_triton.quant.planes import PLANE_FORMATS

# Lanes of weights one program holds, 16 a thread; 8 where it reads two matrices, of which some
# pairs of formats spill with 16, Q4_K and Q6_K on sm_80 for one.
TILE_LANES, GATE_UP_LANES, NUM_WARPS = 2048, 1024, 4


@triton.jit
def row_products(
    a_row,  # [k]
    rows,  # [BLOCK_N, 1, 1] pointers to the first bytes of W's rows
    in_rows,  # [BLOCK_N, 1, 1], which of them there are
    num_groups,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One activation row by some rows of W, float32 [BLOCK_N]."""
    lane = tl.arange(0, LANES)[None, None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_G, LANES], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)[None, :, None]
        in_row = g < num_groups
        block = rows + g // GROUPS * BLOCK_BYTES
        for PLANE in tl.static_range(PLANES):
            # [BLOCK_N, BLOCK_G, LANES]
            weights = decode(block, g % GROUPS, lane, in_row & in_rows, PLANE, KIND, ALIGN)
            k = g // GROUPS * BLOCK_SIZE + first_weight(g % GROUPS, PLANE, KIND) + lane
            a = tl.load(a_row + k, mask=in_row, other=0.0)
            acc = tl.fma(tl.broadcast_to(a.to(tl.float32), acc.shape), weights, acc)
    return tl.sum(tl.sum(acc, axis=2), axis=1)


@triton.jit
def pair_of_program(ids_ptr, stride_ids_token, num_experts, num_pairs, TOP_K: tl.constexpr):
    """This program's token, slot and expert, int64, whether there is one, and its tile of rows."""
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    expert = tl.load(ids_ptr + token * stride_ids_token + slot).to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    return token, slot, expert, known, tl.program_id(0) // num_pairs


@kernel(dynamic=("num_pairs",))
def _gemv_quant_moe_id_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    blocks_ptr,  # [num_experts, n, row_bytes]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_blocks_expert,  # in units of ALIGN bytes
    stride_blocks_row,  # in units of ALIGN bytes
    stride_ids_token,
    num_experts,
    num_rows,
    num_groups,
    num_pairs,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    token, slot, expert, known, tile = pair_of_program(
        ids_ptr, stride_ids_token, num_experts, num_pairs, TOP_K
    )
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = blocks_ptr + (expert * stride_blocks_expert + n * stride_blocks_row) * ALIGN
    y = row_products(
        a_ptr + token * stride_a_token + slot * stride_a_slot,
        rows[:, None, None],
        (n < num_rows)[:, None, None],
        tl.where(known, num_groups, 0),  # without an expert nothing is read, and sums are zeros
        KIND,
        BLOCK_SIZE,
        BLOCK_BYTES,
        GROUPS,
        LANES,
        PLANES,
        ALIGN,
        BLOCK_N,
        BLOCK_G,
    )
    y_row = y_ptr + token * stride_y_token + slot * stride_y_slot
    tl.store(y_row + n, y.to(y_ptr.dtype.element_ty), mask=n < num_rows)


@kernel(dynamic=("num_pairs",))
def _gate_up_silu_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    gate_ptr,  # [num_experts, n, gate_row_bytes]
    up_ptr,  # [num_experts, n, up_row_bytes]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_gate_expert,  # in units of GATE_ALIGN bytes
    stride_gate_row,  # in units of GATE_ALIGN bytes
    stride_up_expert,  # in units of UP_ALIGN bytes
    stride_up_row,  # in units of UP_ALIGN bytes
    stride_ids_token,
    num_experts,
    num_rows,
    num_gate_groups,
    num_up_groups,
    num_pairs,
    TOP_K: tl.constexpr,
    GATE_KIND: tl.constexpr,
    GATE_BLOCK_SIZE: tl.constexpr,
    GATE_BLOCK_BYTES: tl.constexpr,
    GATE_GROUPS: tl.constexpr,
    GATE_LANES: tl.constexpr,
    GATE_PLANES: tl.constexpr,
    GATE_ALIGN: tl.constexpr,
    GATE_BLOCK_G: tl.constexpr,
    UP_KIND: tl.constexpr,
    UP_BLOCK_SIZE: tl.constexpr,
    UP_BLOCK_BYTES: tl.constexpr,
    UP_GROUPS: tl.constexpr,
    UP_LANES: tl.constexpr,
    UP_PLANES: tl.constexpr,
    UP_ALIGN: tl.constexpr,
    UP_BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token, slot, expert, known, tile = pair_of_program(
        ids_ptr, stride_ids_token, num_experts, num_pairs, TOP_K
    )
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = (n < num_rows)[:, None, None]
    a_row = a_ptr + token * stride_a_token + slot * stride_a_slot
    gate_rows = gate_ptr + (expert * stride_gate_expert + n * stride_gate_row) * GATE_ALIGN
    up_rows = up_ptr + (expert * stride_up_expert + n * stride_up_row) * UP_ALIGN
    gate = row_products(
        a_row,
        gate_rows[:, None, None],
        in_rows,
        tl.where(known, num_gate_groups, 0),
        GATE_KIND,
        GATE_BLOCK_SIZE,
        GATE_BLOCK_BYTES,
        GATE_GROUPS,
        GATE_LANES,
        GATE_PLANES,
        GATE_ALIGN,
        BLOCK_N,
        GATE_BLOCK_G,
    )
    up = row_products(
        a_row,
        up_rows[:, None, None],
        in_rows,
        tl.where(known, num_up_groups, 0),
        UP_KIND,
        UP_BLOCK_SIZE,
        UP_BLOCK_BYTES,
        UP_GROUPS,
        UP_LANES,
        UP_PLANES,
        UP_ALIGN,
        BLOCK_N,
        UP_BLOCK_G,
    )
    y = activated(gate, "silu") * up
    y_row = y_ptr + token * stride_y_token + slot * stride_y_slot
    tl.store(y_row + n, y.to(y_ptr.dtype.element_ty), mask=n < num_rows)


def _tile(num_groups: int, kind: str, lanes: int) -> tuple[int, int]:
    """Rows and groups a step takes: a whole row, or several, if they fit the lanes."""
    groups = lanes // LAYOUTS[kind]["LANES"]
    block_g = min(next_power_of_2(max(num_groups, 1)), groups)
    return groups // block_g, block_g


@ops.gemv_quant_moe_id.impl("triton")
def gemv_quant_moe_id(
    a: Tensor, blocks: Tensor, ids: Tensor, kind: str, *, out: Tensor | None = None
) -> Tensor:
    if kind in PLANE_FORMATS:
        # A row a pair was made by a product with the same ids.
        guess = a.dim() == 3
        return gemv_plane_pairs(a, blocks, ids, kind, out=out, chained=True, guess=guess)
    num_experts, num_rows = blocks.shape[:2]
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    num_groups = groups_of(a.shape[-1], kind)
    block_n, block_g = _tile(num_groups, kind, TILE_LANES)
    block_n = min(next_power_of_2(num_rows), block_n)
    align = alignment(blocks)
    _gemv_quant_moe_id_kernel.launch(
        (ids.numel() * cdiv(num_rows, block_n),),
        y,
        a,
        blocks,
        ids,
        y.stride(0),
        y.stride(1),
        a.stride(0),
        slot_stride(a),
        blocks.stride(0) // align,
        blocks.stride(1) // align,
        ids.stride(0),
        num_experts,
        num_rows,
        num_groups,
        ids.numel(),
        TOP_K=ids.shape[1],
        **LAYOUTS[kind],
        ALIGN=align,
        BLOCK_N=block_n,
        BLOCK_G=block_g,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # weights with the bits of their definition; the sums use tl.fma
    )
    return y


@ops.gemv_quant_moe_id_gate_up_silu.impl("triton")
def gemv_quant_moe_id_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    ids: Tensor,
    gate_kind: str,
    up_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    in_planes = [kind in PLANE_FORMATS for kind in (gate_kind, up_kind)]
    if all(in_planes):
        return gemv_plane_pairs(
            a, gate_blocks, ids, gate_kind, up_blocks, up_kind, out=out, chained=True
        )
    num_experts, num_rows = gate_blocks.shape[:2]
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    if any(in_planes):
        wide = a.float()  # rounded once, at the end
        gate = gemv_quant_moe_id(wide, gate_blocks, ids, gate_kind)
        return y.copy_(silu_mul(gate, gemv_quant_moe_id(wide, up_blocks, ids, up_kind)))
    meta: dict[str, Any] = {}
    groups, block_n = [], next_power_of_2(num_rows)
    aligned = [alignment(blocks) for blocks in (gate_blocks, up_blocks)]
    for part, kind, align in zip(("GATE", "UP"), (gate_kind, up_kind), aligned, strict=True):
        groups.append(groups_of(a.shape[-1], kind))
        rows, block_g = _tile(groups[-1], kind, GATE_UP_LANES)
        block_n = min(block_n, rows)
        meta |= {f"{part}_{name}": value for name, value in LAYOUTS[kind].items()}
        meta |= {f"{part}_ALIGN": align, f"{part}_BLOCK_G": block_g}
    _gate_up_silu_kernel.launch(
        (ids.numel() * cdiv(num_rows, block_n),),
        y,
        a,
        gate_blocks,
        up_blocks,
        ids,
        y.stride(0),
        y.stride(1),
        a.stride(0),
        slot_stride(a),
        gate_blocks.stride(0) // aligned[0],
        gate_blocks.stride(1) // aligned[0],
        up_blocks.stride(0) // aligned[1],
        up_blocks.stride(1) // aligned[1],
        ids.stride(0),
        num_experts,
        num_rows,
        *groups,
        ids.numel(),
        TOP_K=ids.shape[1],
        **meta,
        BLOCK_N=block_n,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return y
