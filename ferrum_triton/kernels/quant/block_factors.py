"""Factors of activations by block: what arranges them writes one for each 256 elements.

A factor for a whole row has to be known before the first element is written, so that one program
sees all of it. A block's factor is the usual one, 8, unless its magnitudes are a reason for
another. Products take all for 8, and ask at their end whether they are; where one is not they add
up again. A factor is kept as a byte, the exponent bits of a power of two in float32.

The usual factor serves blocks whose largest magnitude is from 0.002 to 32,768. In a model of 135M
parameters blocks of what its products took had from 0.025 to 3,065 (SmolLM2-135M in Q4_1, 86
tokens, 30,580 blocks: the first arguments of its products under ``ferrum-triton generate --backend
cpu --max-tokens 40``, f3a62bf).
"""

import triton
import triton.language as tl

# Elements of a block, and of a part of a row, whose PER_WORD factors are one word.
BLOCK, PER_WORD = tl.constexpr(256), tl.constexpr(4)
PART = tl.constexpr(BLOCK.value * PER_WORD.value)
# The usual factor's exponent bits, the factor, and an int32 of PER_WORD of those bits.
_EXPONENT = tl.constexpr(130)
USUAL = tl.constexpr(2.0 ** (_EXPONENT.value - 127))
_WORD_OF_USUAL = tl.constexpr(_EXPONENT.value * 0x01010101 - (1 << 32))

# The thread's word of $2 words at $1, that many behind its own as $3 says; usual ones past the end.
# What each thread has then differs, though Triton sees a scalar: only _ANY may read it.
_WORD = tl.constexpr(
    "{\n.reg .pred is_there;\n.reg .u32 i;\n.reg .u64 at;\n"
    "mov.u32 i, %tid.x;\nadd.u32 i, i, $3;\nsetp.lt.u32 is_there, i, $2;\n"
    f"mad.wide.u32 at, i, 4, $1;\nmov.b32 $0, {_WORD_OF_USUAL.value};\n"
    "@is_there ld.global.b32 $0, [at];\n}"
)
# Whether $1 is other than 0 in any thread of the program, by one barrier.
_ANY = tl.constexpr(
    "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, $1, 0;\nbar.red.or.pred any, 0, mine;\n"
    "selp.b32 $0, 1, 0, any;\n}"
)


@triton.jit
def factors_of_blocks(a):
    """Exponent bits of the factor of each block of a, float32, and of its inverse for each element.

    It is the usual one where that brings the block's largest magnitude to [2^-12, 2^12), or where
    that is 0. An element is then off by 2^-25 at most as a float16, 2^-13 of the block's largest.
    Elsewhere it brings the largest to [2^11, 2^12), where 2^-123 does.
    """
    BLOCKS: tl.constexpr = a.shape[0] // BLOCK
    # Ordered as integers, a NaN is above infinity and so is not lost.
    magnitudes = tl.abs(a).to(tl.int32, bitcast=True)
    largest = tl.max(tl.reshape(magnitudes, [BLOCKS, BLOCK]), axis=1)
    least, most = (_EXPONENT - 12) << 23, (_EXPONENT + 12) << 23
    fits = ((largest >= least) & (largest < most)) | (largest == 0)
    inverse = tl.where(fits, 254 - _EXPONENT, tl.minimum(265 - (largest >> 23), 250))
    of_each = tl.broadcast_to(inverse[:, None], [BLOCKS, BLOCK])
    return 254 - inverse, tl.reshape(of_each, [a.shape[0]])


@triton.jit
def words_of_factors(ptr, count, MOST: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr):
    """What :func:`any_is_other` takes, asked for ahead of it: a program's words of factors.

    By PTX a thread has its own, which takes one register and no exchange.

    Args:
        count: words at ptr, MOST at most.
    """
    ptr = ptr.to(tl.pointer_type(tl.int32))
    words = ()
    if PTX:
        for i in tl.static_range((MOST + 32 * WARPS - 1) // (32 * WARPS)):
            args = (ptr.to(tl.int64), count, i * 32 * WARPS)
            words += (
                tl.inline_asm_elementwise(
                    _WORD, "=r,l,r,r", args, dtype=tl.int32, is_pure=False, pack=1
                ),
            )
    else:
        i = tl.arange(0, triton.next_power_of_2(MOST))
        words += (tl.load(ptr + i, mask=i < count, other=_WORD_OF_USUAL),)
    return words


@triton.jit
def any_is_other(words, PTX: tl.constexpr):
    """Whether any factor in a program's words is other than the usual one."""
    if PTX:
        others = words[0] ^ _WORD_OF_USUAL
        for i in tl.static_range(1, len(words)):
            others |= words[i] ^ _WORD_OF_USUAL
        found = tl.inline_asm_elementwise(
            _ANY, "=r,r", [others], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        found = tl.max((words[0] != _WORD_OF_USUAL).to(tl.int32), axis=0)
    return found > 0


@triton.jit
def relative_factor(ptr):
    """Factors at ptr over the usual one, float32."""
    relative = tl.load(ptr).to(tl.int32) - (_EXPONENT - 127)
    return (relative << 23).to(tl.float32, bitcast=True)


@triton.jit
def hidden_zero(ptr):
    """0, of any factor, which no compiler knows: an exponent's byte is below 255."""
    return (tl.load(ptr).to(tl.int32) + 1) >> 8
