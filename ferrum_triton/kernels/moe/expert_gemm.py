"""Many tokens by their experts' blocks as a file has them: one program per tile of a product.

Stacks in planes go to :mod:`ferrum_triton.kernels.moe.plane_gemm`. A program
finds its tile on the device (:mod:`ferrum_triton.kernels.moe.buckets`). Rows of activations are
gathered through the buckets as they are read, and the tile is computed transposed, as in
:mod:`ferrum_triton.kernels.quant.gemm`.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import silu_mul
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.moe.buckets import bucket_tiles, pairs_of_tile, tile_bound
from ferrum_triton.kernels.moe.plane_gemm import gemm_plane_pairs
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.decode import block_layout, groups_of
from ferrum_triton.kernels.quant.gemm import block_products
from ferrum_triton.kernels.quant.planes import uses_ptx
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import experts as ops
from ferrum_triton.quant.planes import PLANE_FORMATS

# With 128 weights a step, Q3_K and Q4_1 spill on sm_80.
BLOCK_N, BLOCK_K = 64, 64


@kernel(dynamic=("num_pairs", "capacity"))
def _gemm_quant_moe_id_kernel(
    y_ptr,  # [num_tokens, top_k, n], zeros
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    blocks_ptr,  # [num_experts, n, row_bytes]
    buckets_ptr,  # [num_experts, capacity]
    tpe_ptr,  # [num_experts]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's pairs share a row
    stride_blocks_expert,  # in units of LAYOUT.align bytes
    stride_blocks_row,  # in units of LAYOUT.align bytes
    stride_buckets_expert,
    num_experts,
    num_rows,
    num_groups,
    num_pairs,
    capacity,
    TOP_K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    buckets = bucket_tiles(tpe_ptr, num_experts, capacity, BLOCK_E, BLOCK_M)
    # Programs that share rows of W run side by side.
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    stripes = tl.num_programs(0) // tiles_n
    n = (tl.program_id(0) // stripes).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # One round, unless counts are of more pairs than there are.
    for tile in range(tl.program_id(0) % stripes, buckets.total, stripes):
        expert, first_entry, left = pairs_of_tile(tile, buckets, BLOCK_E, BLOCK_M)
        entries_ptr = buckets_ptr + expert * stride_buckets_expert + first_entry
        entry = tl.arange(0, BLOCK_M)
        pair = tl.load(entries_ptr + entry, mask=entry < left, other=-1).to(tl.int64)
        known = (pair >= 0) & (pair < num_pairs)
        token, slot = pair // TOP_K, pair % TOP_K
        a_rows = a_ptr + (token * stride_a_token + slot * stride_a_slot)[:, None]
        row = expert * stride_blocks_expert + n * stride_blocks_row
        rows = blocks_ptr + row[:, None, None] * LAYOUT.align
        has_row = (n < num_rows)[:, None, None]
        acc = block_products(
            a_rows, known[:, None], rows, has_row, num_groups, LAYOUT, BLOCK_G, PTX
        )
        y_row = y_ptr + (token * stride_y_token + slot * stride_y_slot)[None, :]
        tl.store(
            y_row + n[:, None],
            acc.to(y_ptr.dtype.element_ty),
            mask=known[None, :] & (n < num_rows)[:, None],
        )
    pdl_trigger(PDL)  # before the loop it would cost registers


@ops.gemm_quant_moe_id.impl("triton")
def gemm_quant_moe_id(
    a: Tensor,
    blocks: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    kind: str,
    top_k: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if kind in PLANE_FORMATS:
        return gemm_plane_pairs(a, blocks, bucket_ids, tpe, kind, top_k, out=out)
    num_experts, num_rows = blocks.shape[:2]
    num_pairs, capacity = a.shape[0] * top_k, bucket_ids.shape[1]
    y = a.new_empty(a.shape[0], top_k, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    y.zero_()  # what pairs without an expert keep: only the device knows which they are
    # float32 products run without tensor cores and hold their operands in registers.
    wide = a.dtype == torch.float32
    largest = 32 if wide else 64
    block_m = min(next_power_of_2(max(cdiv(num_pairs, num_experts), 16)), largest)
    # On sm_100 MXFP4 spills with 4 warps and Q3_K with 8.
    is_narrow = block_m == 16 and not wide and kind != "MXFP4"
    stripes = tile_bound(num_pairs, num_experts, capacity, block_m)
    layout = block_layout(kind, blocks)
    _gemm_quant_moe_id_kernel.launch(
        (stripes * cdiv(num_rows, BLOCK_N),),
        y_ptr=y,
        a_ptr=a,
        blocks_ptr=blocks,
        buckets_ptr=bucket_ids,
        tpe_ptr=tpe,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_blocks_expert=blocks.stride(0) // layout.align,
        stride_blocks_row=blocks.stride(1) // layout.align,
        stride_buckets_expert=bucket_ids.stride(0),
        num_experts=num_experts,
        num_rows=num_rows,
        num_groups=groups_of(a.shape[-1], layout),
        num_pairs=num_pairs,
        capacity=capacity,
        TOP_K=top_k,
        LAYOUT=layout,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_G=BLOCK_K // (layout.planes * layout.lanes),
        PTX=uses_ptx(a) and not wide,
        num_warps=4 if is_narrow else 8,
        num_stages=2 if wide else 3,
        enable_fp_fusion=False,
    )
    return y


@ops.gemm_quant_moe_id_gate_up_silu.impl("triton")
def gemm_quant_moe_id_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    gate_kind: str,
    up_kind: str,
    top_k: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if gate_kind == up_kind and gate_kind in PLANE_FORMATS:
        return gemm_plane_pairs(
            a, gate_blocks, bucket_ids, tpe, gate_kind, top_k, up_blocks, out=out
        )
    y = a.new_empty(a.shape[0], top_k, gate_blocks.shape[1]) if out is None else out
    # Sums are rounded once, at the end.
    gate, up = (y.new_empty(y.shape, dtype=torch.float32) for _ in range(2))
    gemm_quant_moe_id(a, gate_blocks, bucket_ids, tpe, gate_kind, top_k, out=gate)
    gemm_quant_moe_id(a, up_blocks, bucket_ids, tpe, up_kind, top_k, out=up)
    return y.copy_(silu_mul(gate, up))
