"""Codebooks: the signed bytes that codes of four bits stand for."""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.ptx import Asm, word_of_values

_TWO = tl.constexpr((tl.int32, tl.int32))


@triton.constexpr_function
def _lookup_asm(values, bias):
    """PTX: the eight codes of $2 looked up, to $0 and $1."""
    asm = Asm()
    asm.looked_up("$2", values, bias, to=("$0", "$1"))
    return asm.text()


@triton.jit
def looked_up(word, VALUES: tl.constexpr, BIAS: tl.constexpr, PTX: tl.constexpr):
    """What the codes of four bits in a word stand for, plus BIAS, as the bytes of two words.

    Returns:
        The values of the lower codes of each byte, and of the upper ones.
    """
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _lookup_asm(VALUES, BIAS), "=r,=r,r", [word], dtype=_TWO, is_pure=True, pack=1
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
