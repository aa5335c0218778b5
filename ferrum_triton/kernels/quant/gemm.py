"""Many activations by blocks as a file has them: one program per tile of the product.

Chosen for more rows than :mod:`ferrum_triton.kernels.quant.gemv` takes. The weights are the tensor
cores' first operand, which may come from registers, where decoding leaves them; the product is
computed transposed. A step of K takes whole groups, plane by plane: the order of K within a sum is
free as long as the activations are read in the same one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.decode import block_layout, decode, first_weight, groups_of
from ferrum_triton.kernels.quant.planes import uses_ptx
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tensor_cores import settled

# Rows of W in a tile.
TILE_ROWS = 64


@triton.jit
def block_products(
    a_rows,
    has_a,
    rows,
    has_row,
    num_groups,
    LAYOUT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PTX: tl.constexpr,
):
    """W · aᵀ, float32 [BLOCK_N, BLOCK_M], K taken BLOCK_G groups at a time.

    Args:
        a_rows: pointers to rows of activations, [BLOCK_M, 1].
        has_a: which of them there are, [BLOCK_M, 1].
        rows: pointers to the first bytes of W's rows, [BLOCK_N, 1, 1].
        has_row: which of them there are, [BLOCK_N, 1, 1].
    """
    LANES: tl.constexpr = LAYOUT.lanes
    PLANES: tl.constexpr = LAYOUT.planes
    BLOCK_N: tl.constexpr = rows.shape[0]
    BLOCK_M: tl.constexpr = a_rows.shape[0]
    lane = tl.arange(0, LANES)[None, None, :]
    flat = tl.arange(0, BLOCK_G * LANES)[None, :]  # the groups' lanes, end to end
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)[None, :, None]
        mask = (g < num_groups) & has_row
        a_g = first + flat // LANES
        a_mask = (a_g < num_groups) & has_a
        a_block = a_rows + a_g // LAYOUT.groups * LAYOUT.format.block_size + flat % LANES
        for PLANE in tl.static_range(PLANES):
            # [BLOCK_M, BLOCK_G * LANES]
            k = first_weight(a_g % LAYOUT.groups, PLANE, LAYOUT)
            a = tl.load(a_block + k, mask=a_mask, other=0.0)
            weights = decode(rows, g, lane, mask, PLANE, LAYOUT)
            weights = tl.reshape(weights.to(a.dtype), [BLOCK_N, BLOCK_G * LANES])
            acc = tl.dot(weights, tl.trans(a), acc, input_precision="ieee")
            acc = settled(acc, PTX)
    return acc


@kernel(dynamic=("num_tokens",))
def _gemm_quant_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    blocks_ptr,  # [n, row_bytes]
    stride_y_token,
    stride_a_token,
    stride_blocks_row,  # in units of LAYOUT.align bytes
    num_rows,
    num_groups,
    num_tokens,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = a_ptr + m[:, None] * stride_a_token
    rows = blocks_ptr + n[:, None, None] * stride_blocks_row * LAYOUT.align
    has_a, has_row = (m < num_tokens)[:, None], (n < num_rows)[:, None, None]
    acc = block_products(a_rows, has_a, rows, has_row, num_groups, LAYOUT, BLOCK_G, PTX)
    tl.store(
        y_ptr + m[None, :] * stride_y_token + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=(m < num_tokens)[None, :] & (n < num_rows)[:, None],
    )


def gemm_blocks(a: Tensor, blocks: Tensor, kind: str, y: Tensor) -> Tensor:
    """y = a · Wᵀ of at least one element, W's rows packed as a file has them."""
    num_tokens, num_rows = y.shape
    # float32 products run without tensor cores and hold their operands in registers.
    block_m, block_k = (32, 64) if a.dtype == torch.float32 else (64, 128)
    if kind == "MXFP4":
        block_k = 64  # with 128 it spills on sm_80
    block_m = min(next_power_of_2(max(num_tokens, 16)), block_m)
    layout = block_layout(kind, blocks)
    _gemm_quant_kernel.launch(
        (cdiv(num_tokens, block_m) * cdiv(num_rows, TILE_ROWS),),
        y_ptr=y,
        a_ptr=a,
        blocks_ptr=blocks,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_blocks_row=blocks.stride(0) // layout.align,
        num_rows=num_rows,
        num_groups=groups_of(a.shape[1], layout),
        num_tokens=num_tokens,
        LAYOUT=layout,
        BLOCK_M=block_m,
        BLOCK_N=TILE_ROWS,
        BLOCK_G=block_k // (layout.planes * layout.lanes),
        PTX=uses_ptx(a) and a.dtype != torch.float32,
        num_warps=8,  # with 4, Q8_0 on sm_100 and Q4_K on sm_80 spill
        num_stages=3,
        enable_fp_fusion=False,
    )
    return y
