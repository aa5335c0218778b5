"""Few activations by packed weights: one program per some rows of W, all of K.

Every byte of W is read once, for all the activations together. Each thread keeps its own float32
partial sums to the end, so the loop over K needs no exchange between threads.
"""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.decode import (
    block_layout,
    decode,
    first_weight,
    groups_of,
    rows_and_groups,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

NUM_WARPS = 4


@kernel(dynamic=("num_tokens",))
def _gemv_quant_kernel(
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
    BLOCK_M: tl.constexpr,  # power of two >= m
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    GROUPS: tl.constexpr = LAYOUT.groups
    BLOCK_SIZE: tl.constexpr = LAYOUT.format.block_size
    LANES: tl.constexpr = LAYOUT.lanes
    PLANES: tl.constexpr = LAYOUT.planes
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)[:, None, None, None].to(tl.int64)
    lane = tl.arange(0, LANES)[None, None, :]
    row = blocks_ptr + n[:, None, None] * stride_blocks_row * LAYOUT.align
    a_row = a_ptr + m * stride_a_token

    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_G, LANES], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)[None, :, None]
        in_row = g < num_groups
        mask = in_row & (n < num_rows)[:, None, None]
        for PLANE in tl.static_range(PLANES):
            # [BLOCK_N, BLOCK_G, LANES]
            weights = decode(row, g, lane, mask, PLANE, LAYOUT)
            k = g // GROUPS * BLOCK_SIZE + first_weight(g % GROUPS, PLANE, LAYOUT) + lane
            # [BLOCK_M, 1, BLOCK_G, LANES]
            a = tl.load(a_row + k[None], mask=in_row[None] & (m < num_tokens), other=0.0)
            acc = tl.fma(a.to(tl.float32), weights[None], acc)

    y = tl.sum(tl.sum(acc, axis=3), axis=2)  # [BLOCK_M, BLOCK_N]
    m = tl.arange(0, BLOCK_M)[:, None]
    tl.store(
        y_ptr + m.to(tl.int64) * stride_y_token + n[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=(m < num_tokens) & (n < num_rows)[None, :],
    )


def gemv_blocks(a: Tensor, blocks: Tensor, kind: str, y: Tensor) -> Tensor:
    """y = a · Wᵀ of at least one element and up to 8 rows, W's packed as a file has them."""
    num_tokens, num_rows = y.shape
    layout = block_layout(kind, blocks)
    num_groups = groups_of(a.shape[1], layout)
    block_m = next_power_of_2(num_tokens)
    # 16 lanes a thread at one activation and fewer at more, for their partial sums.
    lanes = {1: 2048, 2: 2048, 4: 1024, 8: 512}[block_m]
    block_n, block_g = rows_and_groups(num_rows, num_groups, layout, lanes)
    _gemv_quant_kernel.launch(
        (cdiv(num_rows, block_n),),
        y_ptr=y,
        a_ptr=a,
        blocks_ptr=blocks,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_blocks_row=blocks.stride(0) // layout.align,
        num_rows=num_rows,
        num_groups=num_groups,
        num_tokens=num_tokens,
        LAYOUT=layout,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_G=block_g,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # weights with the bits of their definition; the sums use tl.fma
    )
    return y
