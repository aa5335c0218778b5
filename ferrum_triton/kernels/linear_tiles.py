"""Dense products of up to 64 tokens as tiles of weights by all tokens, for shapes that gain by it.

Rows of b are the rows of the tensor cores' tiles, and tokens are their columns. Hopper's
instructions take 64 rows, but as few as eight columns, so few tokens need little padding. K is
split among programs where there are fewer tiles than SMs: the parts, in float32, are added by the
launch behind.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.linear_config import tokens_of_tile
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.rows import cdiv


@kernel(dynamic=("num_rows", "num_tokens"))
def _tiles_kernel(
    y_ptr,  # [m, n], or float32 [splits, m, n]
    a_ptr,  # [m, k]
    b_ptr,  # [n, k]
    stride_y_split,
    stride_y_token,
    stride_a_token,
    stride_b_row,
    num_cols,
    part_cols,  # columns of a split, a multiple of BLOCK_K
    num_rows,
    num_tokens,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last step has columns past the end
    PDL: tl.constexpr,
):
    """y[s] = a · bᵀ over the columns of split s"""
    pdl_trigger(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    begin = split * part_cols
    end = tl.minimum(begin + part_cols, num_cols)
    k = tl.arange(0, BLOCK_K)
    # Past the end the last row is read again, and no token.
    b_at = b_ptr + tl.minimum(row, num_rows - 1)[:, None] * stride_b_row + k[None, :]
    a_at = a_ptr + token[None, :] * stride_a_token + k[:, None]
    known = (token < num_tokens)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    pdl_wait(PDL)
    for column in range(begin, end, BLOCK_K):
        if MASKED:
            inside = column + k < end
            a = tl.load(a_at + column, mask=known & inside[:, None], other=0.0)
            b = tl.load(b_at + column, mask=inside[None, :], other=0.0)
        else:
            a = tl.load(a_at + column, mask=known, other=0.0)
            b = tl.load(b_at + column, eviction_policy="evict_first")
        sums = tl.dot(b, a, sums)
    y_at = y_ptr + split.to(tl.int64) * stride_y_split
    y_at += token[None, :] * stride_y_token + row[:, None]
    mask = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=mask)


def product_of_tiles(a: Tensor, b: Tensor, config: Config, y: Tensor) -> None:
    """y ← a · bᵀ of 16 bits."""
    if config["SPLITS"] == 1:
        _launch(a, b, config, y[None])
    else:
        add_partials(y, partial_products(a, b, config))


def partial_products(a: Tensor, b: Tensor, config: Config) -> Tensor:
    """a · bᵀ of 16 bits in parts that are yet to be added: float32 [splits, m, n]."""
    shape = config["SPLITS"], a.shape[0], b.shape[0]
    partial = a.new_empty(shape, dtype=torch.float32)
    _launch(a, b, config, partial)
    return partial


def _launch(a: Tensor, b: Tensor, config: Config, y: Tensor) -> None:
    """y[s] ← a · bᵀ over the columns of split s."""
    (num_tokens, num_cols), num_rows = a.shape, b.shape[0]
    splits, columns = config["SPLITS"], config["BLOCK_K"]
    _tiles_kernel.launch(
        (cdiv(num_rows, config["BLOCK_N"]), splits),
        y_ptr=y,
        a_ptr=a,
        b_ptr=b,
        stride_y_split=y.stride(0) if splits > 1 else 0,
        stride_y_token=y.stride(1),
        stride_a_token=a.stride(0),
        stride_b_row=b.stride(0),
        num_cols=num_cols,
        part_cols=cdiv(cdiv(num_cols, columns), splits) * columns,
        num_rows=num_rows,
        num_tokens=num_tokens,
        BLOCK_M=tokens_of_tile(num_tokens),
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=columns,
        MASKED=num_cols % columns != 0,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
