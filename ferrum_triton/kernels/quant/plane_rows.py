"""Weights in planes, decoded: what large products multiply by through torch.

Decoding takes float32 in the order of operations of :mod:`ferrum_triton.quant.formats`, so that
results have its bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.codebooks import value_of
from ferrum_triton.kernels.quant.fragments import spread
from ferrum_triton.kernels.quant.planes import (
    fp16_pair,
    halved_power,
    row_sizes,
    row_units,
    small_e4m3,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.kinds import file_kind

# Rows decoded at a time before a product: their bfloat16 weights, at 4096 columns, leave room in an
# L2 of 50 MB for what else the product reads.
ROWS = 4096


@triton.jit
def _codes_of(ptr, first, num_words, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of BITS bits of rows of a plane, int32 [rows, BLOCK_K]; 0 past the end."""
    EACH: tl.constexpr = 32 // BITS
    word = first // EACH + tl.arange(0, BLOCK_K // EACH)[None, :]
    words = tl.load(ptr + word, mask=word < num_words, other=0)
    i = tl.arange(0, EACH)[None, None, :]
    codes = (words[:, :, None] >> (i % 4 * 8 + i // 4 * BITS)) & ((1 << BITS) - 1)
    return tl.reshape(codes, [words.shape[0], BLOCK_K])


@triton.jit
def _integers(q_ptr, h_ptr, first, num_weights, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The weights' integers from ``first`` on, float32 [rows, BLOCK_K]."""
    LOW: tl.constexpr = FORMAT.low_bits
    HIGH: tl.constexpr = FORMAT.high_bits
    words = q_ptr.to(tl.pointer_type(tl.int32))
    q = _codes_of(words, first, num_weights * LOW // 32, LOW, BLOCK_K)
    if FORMAT.signed:
        q = (q << 24) >> 24
    if HIGH > 0:
        more = h_ptr.to(tl.pointer_type(tl.int32))
        q = q | (_codes_of(more, first, num_weights * HIGH // 32, HIGH, BLOCK_K) << LOW)
    VALUES: tl.constexpr = FORMAT.values
    if VALUES is None:
        q -= FORMAT.offset
    else:
        q = value_of(q, VALUES)
    return q.to(tl.float32)


@triton.jit
def _sub_scales(s_ptr, t_ptr, sub, mask, FORMAT: tl.constexpr):
    """Scales and minimums of sub-blocks, int32 [rows, sub-blocks]; without minimums scales only."""
    CODE: tl.constexpr = FORMAT.scale_code
    low = 0
    if CODE == "pair":
        pairs = s_ptr.to(tl.pointer_type(tl.int16))
        both = tl.load(pairs + sub, mask=mask, other=0).to(tl.int32)
        scale, low = both & 255, (both >> 8) & 255
    elif CODE == "nibbles":
        both = tl.load(s_ptr + sub, mask=mask, other=0).to(tl.int32)
        scale, low = both & 15, (both >> 4) & 15
    elif CODE == "byte" or CODE == "byte32":
        signed = s_ptr.to(tl.pointer_type(tl.int8))
        scale = tl.load(signed + sub, mask=mask, other=0).to(tl.int32)
    else:
        scale = tl.load(s_ptr + sub // 2, mask=mask, other=0).to(tl.int32)
        high = tl.load(t_ptr + sub // 4, mask=mask, other=0).to(tl.int32)
        scale = (scale >> (sub % 2 * 4)) & 15 | ((high >> (sub % 4 * 2)) & 3) << 4
        scale -= FORMAT.scales.offset
    return scale, low


@triton.jit
def _scaled(q, s_ptr, t_ptr, d_ptr, first, num_weights, FORMAT: tl.constexpr):
    """Weights from their integers q [rows, BLOCK_K], those of a row from ``first`` on."""
    BLOCK_K: tl.constexpr = q.shape[1]
    block = first // FORMAT.block_size + tl.arange(0, BLOCK_K // FORMAT.block_size)[None, :]
    if FORMAT.is_exponent:
        d_ptr = s_ptr
    else:
        D_TYPE: tl.constexpr = tl.int32 if FORMAT.has_minimum else tl.float16
        d_ptr = d_ptr.to(tl.pointer_type(D_TYPE))
    d = tl.load(d_ptr + block, mask=block < num_weights // FORMAT.block_size, other=0)
    if FORMAT.has_minimum:
        d, m = fp16_pair(d)
    elif FORMAT.is_exponent:
        d = halved_power(d)
    else:
        d = d.to(tl.float32)
    if FORMAT.has_zero:
        w = spread(d, BLOCK_K) * (q - spread(m, BLOCK_K))
    elif FORMAT.scales is None:
        w = spread(d, BLOCK_K) * q
        if FORMAT.has_minimum:
            w = w + spread(m, BLOCK_K)
    else:
        SUB_BLOCKS: tl.constexpr = BLOCK_K // FORMAT.sub_size
        sub = first // FORMAT.sub_size + tl.arange(0, SUB_BLOCKS)[None, :]
        mask = sub < num_weights // FORMAT.sub_size
        scale, low = _sub_scales(s_ptr, t_ptr, sub, mask, FORMAT)
        step = spread(d, SUB_BLOCKS) * scale.to(tl.float32)
        w = spread(step, BLOCK_K) * q
        if FORMAT.has_minimum:
            w = w - spread(spread(m, SUB_BLOCKS) * low.to(tl.float32), BLOCK_K)
    return w


@triton.jit
def _row_scaled(q, s_ptr, d_ptr, first, num_weights, FORMAT: tl.constexpr):
    """The same, of sub-blocks with scales in E4M3 and rows with a ratio."""
    SUB_BLOCKS: tl.constexpr = q.shape[1] // FORMAT.sub_size
    sub = first // FORMAT.sub_size + tl.arange(0, SUB_BLOCKS)[None, :]
    scale = tl.load(s_ptr + sub, mask=sub < num_weights // FORMAT.sub_size, other=0)
    scale = small_e4m3(scale.to(tl.int32)) * 128.0
    parts = d_ptr.to(tl.pointer_type(tl.float32)) + 1  # behind the factor of products
    return tl.div_rn(spread(scale, q.shape[1]) * q * tl.load(parts), tl.load(parts + 1))


@kernel(dynamic=("first_row",))
def _decode_planes_kernel(
    y_ptr,  # [n, k]
    planes_ptr,  # [table_rows, row_bytes]
    ids_ptr,  # [n], the rows to decode; None for those from first_row on
    stride_y_row,
    q_row,  # of a row of each plane, units of 16 bytes
    h_row,
    s_row,
    t_row,
    d_row,
    table_rows,
    num_rows,
    num_weights,
    first_row,
    FORMAT: tl.constexpr,  # BlockFormat
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = first_row + tl.minimum(n, num_rows - 1)
    known = n < num_rows
    if ids_ptr is not None:
        row = tl.load(ids_ptr + tl.minimum(n, num_rows - 1)).to(tl.int64)
        known = (row >= 0) & (row < table_rows)
        row = tl.where(known, row, 0)
    first = tl.program_id(1) * BLOCK_K
    row = row[:, None] * 16
    plane = tl.full((), 16, tl.int64) * table_rows  # bytes of a plane whose rows are a unit
    q_ptr = planes_ptr + row * q_row
    planes_ptr += plane * q_row
    h_ptr = planes_ptr + row * h_row
    planes_ptr += plane * h_row
    s_ptr = planes_ptr + row * s_row
    planes_ptr += plane * s_row
    t_ptr = planes_ptr + row * t_row
    planes_ptr += plane * t_row
    d_ptr = planes_ptr + row * d_row

    q = _integers(q_ptr, h_ptr, first, num_weights, FORMAT, BLOCK_K)
    if FORMAT.is_row_scaled:
        w = _row_scaled(q, s_ptr, d_ptr, first, num_weights, FORMAT)
    else:
        w = _scaled(q, s_ptr, t_ptr, d_ptr, first, num_weights, FORMAT)

    k = first + tl.arange(0, BLOCK_K)[None, :]
    mask = (n < num_rows)[:, None] & (k < num_weights)
    w = tl.where(known[:, None], w, 0.0)
    tl.store(y_ptr + n[:, None] * stride_y_row + k, w.to(y_ptr.dtype.element_ty), mask=mask)


def decode_planes(
    y: Tensor, planes: Tensor, ids: Tensor | None, kind: str, first_row: int = 0
) -> None:
    """Decode to y [n, k]: n rows of a matrix from ``first_row`` on, or those that ids [n] names.

    An id of no row gives zeros.
    """
    num_rows, k = y.shape
    block_n, block_k = 4, 512
    if y.numel():
        _decode_planes_kernel.launch(
            (cdiv(num_rows, block_n), cdiv(k, block_k)),
            y_ptr=y,
            planes_ptr=planes,
            ids_ptr=ids,
            stride_y_row=y.stride(0),
            **row_units(row_sizes(planes, kind, k)),
            table_rows=planes.shape[0],
            num_rows=num_rows,
            num_weights=k,
            first_row=first_row,
            FORMAT=FORMATS[file_kind(kind)],
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            enable_fp_fusion=False,  # weights with the bits of their definition
        )


def product_by_torch(
    a: Tensor, planes: Tensor, kind: str, *, rows: int = ROWS, out: Tensor | None = None
) -> Tensor:
    """a Wᵀ for many rows of a: some rows of W at a time, decoded to a's dtype."""
    num_rows = planes.shape[0]
    y = a.new_empty((a.shape[0], num_rows)) if out is None else out
    weights = a.new_empty((min(rows, num_rows), a.shape[1]))
    for first in range(0, num_rows, rows):
        last = min(first + rows, num_rows)
        some = weights[: last - first]
        decode_planes(some, planes, None, kind, first)
        part = y[:, first:last]
        if y.dtype == a.dtype:
            torch.mm(a, some.T, out=part)
        elif a.is_cuda:  # float32 sums, unrounded; torch's mm takes out_dtype or out, not both
            part.copy_(torch.mm(a, some.T, out_dtype=y.dtype))
        else:
            part.copy_(a.to(y.dtype) @ some.to(y.dtype).T)
    return y
