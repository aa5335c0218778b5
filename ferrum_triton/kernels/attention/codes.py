"""Cached codes of 8 bits, widened exactly for the tensor cores.

A pool of codes is read in words of four, which are four products of a quarter of the head's columns
each: column 4 w + i belongs to product i. So codes are unpacked where they lie in registers, and of
values, whose rows are what a product sums over, the same column of two rows makes a pair without
a byte being fetched alone.
"""

import triton
import triton.language as tl

# Two words give four pairs of float16, a pair being the same column of both. Bytes are zipped; an
# int8 plus 128 becomes the mantissa of a float16 of 1024, which is subtracted again.
INT8_PAIRS = tl.constexpr("""{
    .reg .b32 lo, hi, bias;
    mov.b32 bias, 0x64806480;
    prmt.b32 lo, $4, $5, 0x5140;
    prmt.b32 hi, $4, $5, 0x7362;
    xor.b32 lo, lo, 0x80808080;
    xor.b32 hi, hi, 0x80808080;
    prmt.b32 $0, lo, 0x64646464, 0x4140;
    prmt.b32 $1, lo, 0x64646464, 0x4342;
    prmt.b32 $2, hi, 0x64646464, 0x4140;
    prmt.b32 $3, hi, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    sub.f16x2 $2, $2, bias;
    sub.f16x2 $3, $3, bias;
}""")
E4M3_PAIRS = tl.constexpr("""{
    .reg .b32 lo, hi;
    .reg .b16 a, b, c, d;
    prmt.b32 lo, $4, $5, 0x5140;
    prmt.b32 hi, $4, $5, 0x7362;
    mov.b32 {a, b}, lo;
    mov.b32 {c, d}, hi;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
    cvt.rn.f16x2.e4m3x2 $2, c;
    cvt.rn.f16x2.e4m3x2 $3, d;
}""")


@triton.jit
def decoded(codes, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Cached values in DTYPE, up to their scale, exactly. FORMAT "e4m3" are bits of fp8.

    The exponent and mantissa of E4M3, as float16's, are a 256th of the value: both have their bias
    in the exponent alone, so that subnormals are right too. ``pages.scaled_queries`` makes up for
    it.
    """
    if FORMAT == "e4m3":
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True).to(DTYPE)
    else:
        x = codes.to(DTYPE)
    return x


@triton.jit
def code_columns(words, DTYPE: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr):
    """The four columns of codes in words, in DTYPE.

    PAIRS: "int8" or "e4m3", unpacked two words at a time by PTX, which gives float16; or "".
    """
    if PAIRS != "":
        asm: tl.constexpr = INT8_PAIRS if PAIRS == "int8" else E4M3_PAIRS
        columns = tl.inline_asm_elementwise(
            asm,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        columns = (
            decoded((words << 24 >> 24).to(tl.int8), DTYPE, FORMAT),
            decoded((words << 16 >> 24).to(tl.int8), DTYPE, FORMAT),
            decoded((words << 8 >> 24).to(tl.int8), DTYPE, FORMAT),
            decoded((words >> 24).to(tl.int8), DTYPE, FORMAT),
        )
    return columns


@triton.jit
def in_quarters(x):
    """[M, D] as the four [M, D / 4] of columns 4 w + i."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def from_quarters(quarters):
    first, second, third, fourth = quarters
    x = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(x, (first.shape[0], 4 * first.shape[1]))


@triton.jit
def dot_keys(q, k, FORMAT: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """q kᵀ, for keys as they lie in the cache; quarters of q if those are words."""
    if k.dtype == tl.int32:
        first, second, third, fourth = code_columns(k, q[0].dtype, FORMAT, PAIRS)
        scores = tl.dot(q[0], tl.trans(first))
        scores = tl.dot(q[1], tl.trans(second), scores)
        scores = tl.dot(q[2], tl.trans(third), scores)
        scores = tl.dot(q[3], tl.trans(fourth), scores)
    else:
        k = decoded(k, q.dtype, FORMAT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return scores


@triton.jit
def add_values(
    acc,
    rescale,
    weights,
    v,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc · rescale + weights v, for v as it lies in the cache; in quarters if that is words."""
    p = weights.to(DTYPE)
    if v.dtype == tl.int32:
        first, second, third, fourth = code_columns(v, DTYPE, FORMAT, PAIRS)
        acc = (
            tl.dot(p, first, acc[0] * rescale[:, None]),
            tl.dot(p, second, acc[1] * rescale[:, None]),
            tl.dot(p, third, acc[2] * rescale[:, None]),
            tl.dot(p, fourth, acc[3] * rescale[:, None]),
        )
    else:
        v = decoded(v, DTYPE, FORMAT)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
    return acc
