"""Many activations by packed weights: one program per tile of the product.

The weights are the tensor cores' first operand, which may come from registers, where decoding
leaves them; the product is computed transposed. A step of K takes whole groups, plane by plane: the
order of K within a sum is free as long as the activations are read in the same one.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.decode import LAYOUTS, alignment, decode, first_weight, groups_of
from ferrum_triton.kernels.quant.gemv import gemv_quant
from ferrum_triton.kernels.quant.planes import uses_ptx
from ferrum_triton.kernels.quant.products import product
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tensor_cores import settled
from ferrum_triton.ops import quant as ops
from ferrum_triton.quant.planes import PLANE_FORMATS

BLOCK_N = 64


@kernel(dynamic=("num_tokens",))
def _gemm_quant_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    blocks_ptr,  # [n, row_bytes]
    stride_y_token,
    stride_a_token,
    stride_blocks_row,  # in units of ALIGN bytes
    num_rows,
    num_groups,
    num_tokens,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PTX: tl.constexpr,
):
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, LANES)[None, None, :]
    row = blocks_ptr + n[:, None, None] * stride_blocks_row * ALIGN
    a_row = a_ptr + m[:, None] * stride_a_token
    flat = tl.arange(0, BLOCK_G * LANES)[None, :]  # the groups' lanes, end to end

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)[None, :, None]
        mask = (g < num_groups) & (n < num_rows)[:, None, None]
        block = row + g // GROUPS * BLOCK_BYTES
        a_g = first + flat // LANES
        a_mask = (a_g < num_groups) & (m < num_tokens)[:, None]
        a_block = a_row + a_g // GROUPS * BLOCK_SIZE + flat % LANES
        for PLANE in tl.static_range(PLANES):
            # [BLOCK_M, BLOCK_G * LANES]
            a = tl.load(a_block + first_weight(a_g % GROUPS, PLANE, KIND), mask=a_mask, other=0.0)
            weights = decode(block, g % GROUPS, lane, mask, PLANE, KIND, ALIGN)
            weights = tl.reshape(weights.to(a.dtype), [BLOCK_N, BLOCK_G * LANES])
            acc = tl.dot(weights, tl.trans(a), acc, input_precision="ieee")
            acc = settled(acc, PTX)

    tl.store(
        y_ptr + m[None, :] * stride_y_token + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=(m < num_tokens)[None, :] & (n < num_rows)[:, None],
    )


@ops.gemm_quant.impl("triton")
def gemm_quant(a: Tensor, blocks: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    if kind in PLANE_FORMATS:
        return product(a, blocks, kind, out=out)
    layout = LAYOUTS[kind]
    num_tokens, num_rows = a.shape[0], blocks.shape[0]
    if num_tokens <= ops.MAX_GEMV_ROWS:
        return gemv_quant(a, blocks, kind, out=out)
    shape = (num_tokens, num_rows)
    y = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
    if y.numel() == 0:
        return y
    num_groups = groups_of(a.shape[1], kind)
    # float32 products run without tensor cores and hold their operands in registers.
    block_m, block_k = (32, 64) if a.dtype == torch.float32 else (64, 128)
    if kind == "MXFP4":
        block_k = 64  # with 128 it spills on sm_80
    block_m = min(next_power_of_2(max(num_tokens, 16)), block_m)
    align = alignment(blocks)
    _gemm_quant_kernel.launch(
        (cdiv(num_tokens, block_m) * cdiv(num_rows, BLOCK_N),),
        y,
        a,
        blocks,
        y.stride(0),
        a.stride(0),
        blocks.stride(0) // align,
        num_rows,
        num_groups,
        num_tokens,
        **layout,
        ALIGN=align,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_G=block_k // (layout["PLANES"] * layout["LANES"]),
        PTX=uses_ptx(a) and a.dtype != torch.float32,
        num_warps=8,  # with 4, Q8_0 on sm_100 and Q4_K on sm_80 spill
        num_stages=3,
        enable_fp_fusion=False,
    )
    return y
