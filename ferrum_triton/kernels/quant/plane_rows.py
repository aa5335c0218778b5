"""Weights in planes, decoded: what large products multiply by through torch.

Decoding takes float32 in the order of operations of :mod:`ferrum_triton.quant.formats`, so that
results have its bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.fragments import CODES, spread
from ferrum_triton.kernels.quant.planes import fp16_pair, place
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN

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


@kernel
def _decode_planes_kernel(
    y_ptr,  # [n, k]
    planes_ptr,  # [table_rows, row_bytes]
    ids_ptr,  # [n], the rows of planes to decode; None for all in order
    stride_y_row,
    stride_row,  # of planes, in units of 16 bytes
    h_at,  # where the planes of a row begin, in bytes; q is the first
    s_at,
    t_at,
    d_at,
    table_rows,
    num_rows,
    num_weights,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    known = n < num_rows
    if ids_ptr is not None:
        row = tl.load(ids_ptr + row).to(tl.int64)
        known = (row >= 0) & (row < table_rows)
        row = tl.where(known, row, 0)
    first = tl.program_id(1) * BLOCK_K
    row_ptr = (planes_ptr + row * stride_row * 16)[:, None]

    LOW: tl.constexpr = BITS if BITS == 8 or BITS < 3 else (2 if BITS == 3 else 4)
    words = row_ptr.to(tl.pointer_type(tl.int32))
    q = _codes_of(words, first, num_weights * LOW // 32, LOW, BLOCK_K)
    if BITS == 8:
        q = (q << 24) >> 24
    elif BITS != LOW:
        more = (row_ptr + h_at).to(tl.pointer_type(tl.int32))
        high = _codes_of(more, first, num_weights * (BITS - LOW) // 32, BITS - LOW, BLOCK_K)
        q = q | (high << LOW)
    q = (q - OFFSET).to(tl.float32)

    EACH: tl.constexpr = 32 if SCALES == "" else 256
    block = first // EACH + tl.arange(0, BLOCK_K // EACH)[None, :]
    D_TYPE: tl.constexpr = tl.int32 if MINS else tl.float16
    d_row = (row_ptr + d_at).to(tl.pointer_type(D_TYPE))
    d = tl.load(d_row + block, mask=block < num_weights // EACH, other=0)
    if MINS:
        d, m = fp16_pair(d)
    else:
        d = d.to(tl.float32)
    if SCALES == "":
        w = spread(d, BLOCK_K) * q
        if MINS:
            w = w + spread(m, BLOCK_K)
    else:
        SUB: tl.constexpr = 32 if SCALES == "pair" else 16
        sub = first // SUB + tl.arange(0, BLOCK_K // SUB)[None, :]
        mask = sub < num_weights // SUB
        if SCALES == "pair":
            pairs = (row_ptr + s_at).to(tl.pointer_type(tl.int16))
            both = tl.load(pairs + sub, mask=mask, other=0).to(tl.int32)
            scale, low = both & 255, (both >> 8) & 255
        elif SCALES == "nibbles":
            both = tl.load(row_ptr + s_at + sub, mask=mask, other=0).to(tl.int32)
            scale, low = both & 15, (both >> 4) & 15
        elif SCALES == "byte":
            signed = (row_ptr + s_at).to(tl.pointer_type(tl.int8))
            scale = tl.load(signed + sub, mask=mask, other=0).to(tl.int32)
        else:
            scale = tl.load(row_ptr + s_at + sub // 2, mask=mask, other=0).to(tl.int32)
            high = tl.load(row_ptr + t_at + sub // 4, mask=mask, other=0).to(tl.int32)
            scale = (scale >> (sub % 2 * 4)) & 15 | ((high >> (sub % 4 * 2)) & 3) << 4
            scale -= 32
        step = spread(d, BLOCK_K // SUB) * scale.to(tl.float32)
        w = spread(step, BLOCK_K) * q
        if MINS:
            w = w - spread(spread(m, BLOCK_K // SUB) * low.to(tl.float32), BLOCK_K)

    k = first + tl.arange(0, BLOCK_K)[None, :]
    mask = (n < num_rows)[:, None] & (k < num_weights)
    w = tl.where(known[:, None], w, 0.0)
    tl.store(y_ptr + n[:, None] * stride_y_row + k, w.to(y_ptr.dtype.element_ty), mask=mask)


def decode_planes(y: Tensor, planes: Tensor, ids: Tensor | None, kind: str) -> None:
    """Decode to y [n, k]: all rows in planes [n, row_bytes], or those that ids [n] names.

    An id of no row gives zeros.
    """
    codes = CODES[file_kind(kind)]
    num_rows, k = y.shape
    offsets = place(planes, kind, k)
    block_n, block_k = 4, 512
    if y.numel():
        _decode_planes_kernel.launch(
            (triton.cdiv(num_rows, block_n), triton.cdiv(k, block_k)),
            y,
            planes,
            ids,
            y.stride(0),
            planes.stride(0) // ROW_ALIGN,
            offsets["H"],
            offsets["S"],
            offsets["T"],
            offsets["D"],
            planes.shape[0],
            num_rows,
            k,
            BITS=codes.bits,
            OFFSET=codes.offset,
            SCALES=codes.scales,
            MINS=codes.mins,
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
        decode_planes(some, planes[first:last], None, kind)
        torch.mm(a, some.T, out=y[:, first:last])
    return y
