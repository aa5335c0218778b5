"""Integers of 8 and 16 bits in words of 32: their products, and moving them.

By PTX one instruction each, or two; elsewhere plainly.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.ptx import lookup_asm, word_of_values

ONES = tl.constexpr(0x01010101)


@triton.jit
def dp4a(a, b, acc, ASM: tl.constexpr):
    """acc + the products of the four int8 of a and of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def dp2a(low, high, b, acc, ASM: tl.constexpr):
    """acc + the products of the int16 of low and high and the four int8 of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "{ .reg .s32 t; dp2a.lo.s32.s32 t, $1, $3, $4; dp2a.hi.s32.s32 $0, $2, $3, t; }",
            "=r,r,r,r,r", [low, high, b, acc], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        acc += ((low << 16) >> 16) * ((b << 24) >> 24) + (low >> 16) * ((b << 16) >> 24)
        acc += ((high << 16) >> 16) * ((b << 8) >> 24) + (high >> 16) * (b >> 24)
    return acc


@triton.constexpr_function
def _two_asm(upper):
    return f"dp2a.{'hi' if upper else 'lo'}.s32.u32 $0, $1, $2, $3;"


@triton.jit
def dot_two(pair, b, acc, UPPER: tl.constexpr, ASM: tl.constexpr):
    """acc + the products of the two int16 of ``pair`` and the lower or upper two uint8 of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            _two_asm(UPPER), "=r,r,r,r", [pair, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b = b >> (16 * UPPER)
        acc += ((pair << 16) >> 16) * (b & 0xFF) + (pair >> 16) * ((b >> 8) & 0xFF)
    return acc


@triton.jit
def dot_bytes(a, b, ASM: tl.constexpr):
    """The products of the four uint8 of a and of b."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        acc = tl.zeros_like(a)
        for i in tl.static_range(4):
            acc += ((a >> (8 * i)) & 0xFF) * ((b >> (8 * i)) & 0xFF)
    return acc


@triton.constexpr_function
def _permute_asm(bytes_):
    return f"prmt.b32 $0, $1, $2, {bytes_:#06x};"


@triton.jit
def permuted(a, b, BYTES: tl.constexpr, ASM: tl.constexpr):
    """Four bytes of a and b, which have numbers 0 to 3 and 4 to 7: a digit of BYTES each."""
    if ASM:
        word = tl.inline_asm_elementwise(
            _permute_asm(BYTES), "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            source = b if (BYTES >> (4 * i)) & 4 else a
            word |= ((source >> (8 * ((BYTES >> (4 * i)) & 3))) & 0xFF) << (8 * i)
    return word


_LOOKUP_CONSTRAINTS = tl.constexpr("=r,=r,r")


@triton.jit
def looked_up(word, VALUES: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """What the codes of four bits in a word stand for, plus BIAS, as the bytes of two words.

    Returns:
        The values of the lower codes of each byte, and of the upper ones.
    """
    if ASM:
        low, high = tl.inline_asm_elementwise(
            lookup_asm(VALUES, BIAS),
            _LOOKUP_CONSTRAINTS,
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = tl.zeros_like(word), tl.zeros_like(word)
        for i in tl.static_range(4):
            low |= ((value_of(word >> (8 * i), VALUES) + BIAS) & 0xFF) << (8 * i)
            high |= ((value_of(word >> (8 * i + 4), VALUES) + BIAS) & 0xFF) << (8 * i)
    return low, high


@triton.jit
def value_of(code, VALUES: tl.constexpr):
    """What the lowest four bits of an int32 stand for, int32."""
    code = code & 15
    low = tl.where(code < 4, word_of_values(VALUES, 0, 0), word_of_values(VALUES, 1, 0))
    high = tl.where(code < 12, word_of_values(VALUES, 2, 0), word_of_values(VALUES, 3, 0))
    word = tl.where(code < 8, low, high)
    return (word >> (8 * (code & 3)).to(word.dtype)).to(tl.int8).to(tl.int32)


@triton.jit
def byte_of(word, AT: tl.constexpr, ASM: tl.constexpr):
    """One of a word's bytes, in one instruction where the compiler takes two."""
    return permuted(word, tl.zeros_like(word), 0x4440 + AT, ASM)


@triton.jit
def packed(low, high, ASM: tl.constexpr):
    """The lower 16 bits of both, in a word."""
    return permuted(low, high, 0x5410, ASM)


@triton.jit
def low_bytes(a, b, ASM: tl.constexpr):
    """The lower bytes of the two int16 of a and of b, in a word."""
    return permuted(a, b, 0x6420, ASM)
