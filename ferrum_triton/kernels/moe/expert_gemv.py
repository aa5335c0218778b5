"""Few tokens by their experts' blocks as a file has them: one program per pair and some rows.

Chosen where pairs name their experts; stacks in planes go to
:mod:`ferrum_triton.kernels.moe.plane_gemv`, or sorted by expert to
:mod:`ferrum_triton.kernels.moe.plane_gemm` where an expert has more than about one pair. Pairs of
one expert read its rows side by side, the later ones from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated, silu_mul
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.pairs import sorted_pairs
from ferrum_triton.kernels.moe.plane_config import GATE_UP_PATH, PATH
from ferrum_triton.kernels.moe.plane_gemm import gemm_plane_pairs
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs, slot_stride
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.decode import (
    block_layout,
    decode,
    first_weight,
    groups_of,
    rows_and_groups,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.moe import experts as ops
from ferrum_triton.quant.planes import PLANE_FORMATS

# Lanes of weights one program holds, 16 a thread; 8 where it reads two matrices, of which some
# pairs of formats spill with 16, Q4_K and Q6_K on sm_80 for one.
TILE_LANES, GATE_UP_LANES, NUM_WARPS = 2048, 1024, 4


@triton.jit
def row_products(
    a_row,
    rows,
    has_row,
    num_groups,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One activation row by some rows of W, float32 [BLOCK_N].

    Args:
        a_row: pointer to the activations, [k].
        rows: pointers to the first bytes of W's rows, [BLOCK_N].
        has_row: which of them there are, [BLOCK_N, 1, 1].
    """
    GROUPS: tl.constexpr = LAYOUT.groups
    BLOCK_SIZE: tl.constexpr = LAYOUT.format.block_size
    LANES: tl.constexpr = LAYOUT.lanes
    PLANES: tl.constexpr = LAYOUT.planes
    lane = tl.arange(0, LANES)[None, None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_G, LANES], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)[None, :, None]
        in_row = g < num_groups
        for PLANE in tl.static_range(PLANES):
            # [BLOCK_N, BLOCK_G, LANES]
            weights = decode(rows[:, None, None], g, lane, in_row & has_row, PLANE, LAYOUT)
            k = g // GROUPS * BLOCK_SIZE + first_weight(g % GROUPS, PLANE, LAYOUT) + lane
            a = tl.load(a_row + k, mask=in_row, other=0.0)
            acc = tl.fma(tl.broadcast_to(a.to(tl.float32), acc.shape), weights, acc)
    return tl.sum(tl.sum(acc, axis=2), axis=1)


@kernel(dynamic=("num_pairs",))
def _expert_gemv_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    blocks_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # [num_experts, n, up_row_bytes]: y = silu(blocks · a) · (up · a); or None
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_blocks_expert,  # in units of LAYOUT.align bytes
    stride_blocks_row,
    stride_up_expert,  # in units of UP_LAYOUT.align bytes
    stride_up_row,
    stride_ids_token,
    num_experts,
    num_rows,
    num_groups,
    num_up_groups,
    num_pairs,
    TOP_K: tl.constexpr,
    LAYOUT: tl.constexpr,
    UP_LAYOUT: tl.constexpr,  # None without up
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UP_BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    expert = tl.load(ids_ptr + token * stride_ids_token + slot).to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    n = (tl.program_id(0) // num_pairs).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = (n < num_rows)[:, None, None]
    a_row = a_ptr + token * stride_a_token + slot * stride_a_slot
    rows = blocks_ptr + (expert * stride_blocks_expert + n * stride_blocks_row) * LAYOUT.align
    # Without an expert nothing is read, and sums are zeros.
    groups = tl.where(known, num_groups, 0)
    y = row_products(a_row, rows, has_row, groups, LAYOUT, BLOCK_N, BLOCK_G)
    if up_ptr is not None:
        rows = up_ptr + (expert * stride_up_expert + n * stride_up_row) * UP_LAYOUT.align
        groups = tl.where(known, num_up_groups, 0)
        up = row_products(a_row, rows, has_row, groups, UP_LAYOUT, BLOCK_N, UP_BLOCK_G)
        y = activated(y, "silu") * up
    y_row = y_ptr + token * stride_y_token + slot * stride_y_slot
    tl.store(y_row + n, y.to(y_ptr.dtype.element_ty), mask=n < num_rows)


def _products(
    y: Tensor,
    a: Tensor,
    blocks: Tensor,
    kind: str,
    ids: Tensor,
    up: Tensor | None = None,
    up_kind: str = "",
) -> Tensor:
    """Products of blocks, written to y [num_tokens, top_k, n]."""
    (num_experts, num_rows), k = blocks.shape[:2], a.shape[-1]
    if y.numel() == 0:
        return y
    lanes = TILE_LANES if up is None else GATE_UP_LANES
    layout = block_layout(kind, blocks)
    num_groups = groups_of(k, layout)
    block_n, block_g = rows_and_groups(num_rows, num_groups, layout, lanes)
    up_layout, num_up_groups, up_block_g, up_strides = None, 0, 0, (0, 0)
    if up is not None:
        up_layout = block_layout(up_kind, up)
        num_up_groups = groups_of(k, up_layout)
        up_block_n, up_block_g = rows_and_groups(num_rows, num_up_groups, up_layout, lanes)
        up_strides = up.stride(0) // up_layout.align, up.stride(1) // up_layout.align
        block_n = min(block_n, up_block_n)
    _expert_gemv_kernel.launch(
        (ids.numel() * cdiv(num_rows, block_n),),
        y_ptr=y,
        a_ptr=a,
        blocks_ptr=blocks,
        up_ptr=up,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_blocks_expert=blocks.stride(0) // layout.align,
        stride_blocks_row=blocks.stride(1) // layout.align,
        stride_up_expert=up_strides[0],
        stride_up_row=up_strides[1],
        stride_ids_token=ids.stride(0),
        num_experts=num_experts,
        num_rows=num_rows,
        num_groups=num_groups,
        num_up_groups=num_up_groups,
        num_pairs=ids.numel(),
        TOP_K=ids.shape[1],
        LAYOUT=layout,
        UP_LAYOUT=up_layout,
        BLOCK_N=block_n,
        BLOCK_G=block_g,
        UP_BLOCK_G=up_block_g,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # weights with the bits of their definition; the sums use tl.fma
    )
    return y


def _is_sorted(tunable: Tunable, a: Tensor, ids: Tensor, num_experts: int) -> bool:
    """Whether pairs by stacks in planes are sorted by expert; float32 ones never are."""
    if a.dtype == torch.float32 or ids.numel() == 0:
        return False
    return tunable.pick(a.device, ids.numel(), num_experts, True)["path"] == "sorted"


@ops.gemv_quant_moe_id.impl("triton")
def gemv_quant_moe_id(
    a: Tensor, blocks: Tensor, ids: Tensor, kind: str, *, out: Tensor | None = None
) -> Tensor:
    if kind not in PLANE_FORMATS:
        y = a.new_empty(*ids.shape, blocks.shape[1]) if out is None else out
        return _products(y, a, blocks, kind, ids)
    if _is_sorted(PATH, a, ids, len(blocks)):
        buckets, tpe = sorted_pairs(ids, len(blocks))
        return gemm_plane_pairs(a, blocks, buckets, tpe, kind, ids.shape[1], out=out)
    # A row a pair was made by a product with the same ids.
    guess = a.dim() == 3
    return gemv_plane_pairs(a, blocks, ids, kind, out=out, chained=True, guess=guess)


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
    y = a.new_empty(*ids.shape, gate_blocks.shape[1]) if out is None else out
    if not any(in_planes):
        return _products(y, a, gate_blocks, gate_kind, ids, up_blocks, up_kind)
    if not all(in_planes):
        wide = a.float()  # rounded once, at the end
        gate = gemv_quant_moe_id(wide, gate_blocks, ids, gate_kind)
        return y.copy_(silu_mul(gate, gemv_quant_moe_id(wide, up_blocks, ids, up_kind)))
    if gate_kind == up_kind and _is_sorted(GATE_UP_PATH, a, ids, len(gate_blocks)):
        buckets, tpe = sorted_pairs(ids, len(gate_blocks))
        top_k = ids.shape[1]
        return gemm_plane_pairs(a, gate_blocks, buckets, tpe, gate_kind, top_k, up_blocks, out=y)
    return gemv_plane_pairs(a, gate_blocks, ids, gate_kind, up_blocks, up_kind, out=y, chained=True)
