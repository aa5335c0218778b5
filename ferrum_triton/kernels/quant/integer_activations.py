"""Groups of 32 activations as integers: of 8 bits or of 16 as they were made, or made here.

Those of 8 bits come with their steps (``quantize_q8``). Those of 16 bits each thread makes for the
groups it takes at a time, of float16 or bfloat16: the step is a power of two with which the largest
magnitude takes 15 bits. So activations down to 2^-7 of that keep all the bits a bfloat16 has, and
down to 2^-4 a float16's; smaller ones are off by at most 2^-15 of the largest, the last bit of a
float16 as large being 2^-10 of it.
"""

import triton
import triton.language as tl

from ferrum_triton.kernels.quant.plane_groups import eight_activations, float_pair
from ferrum_triton.kernels.quant.planes import GROUP, load_words
from ferrum_triton.kernels.quant.words import ONES, dp2a, packed

# Added to a float32 of less than 2^22, leaves the nearest integer in the lowest bits.
ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def _load_int8(
    x_ptr, info_ptr, stride_x_token, stride_info_token, group, mask, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A group of M activations as ``quantize_activations`` leaves them, in words of four."""
    x, steps, lows, highs = (), (), (), ()
    for m in tl.static_range(M):
        at = (x_ptr + m * stride_x_token).to(tl.pointer_type(tl.int32)) + group * 8
        x += (load_words(at, mask, 4, ASM, "") + load_words(at + 4, mask, 4, ASM, ""),)
        info = load_words(info_ptr + m * stride_info_token + group * 2, mask, 2, ASM, "")
        steps += (info[0].to(tl.float32, bitcast=True),)
        lows += ((info[1] << 16) >> 16,)
        highs += (info[1] >> 16,)
    return x, steps, lows, highs


@triton.jit
def _load_int16(
    x_ptr, info_ptr, stride_x_token, stride_info_token, group, mask, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A group of M activations of ``int16_activations``, in words of two."""
    x, steps, lows, highs = (), (), (), ()
    for m in tl.static_range(M):
        at = x_ptr + m * stride_x_token + group * 16
        words = ()
        for i in tl.static_range(4):
            words += load_words(at + 4 * i, mask, 4, ASM, "")
        x += (words,)
        info = load_words(info_ptr + m * stride_info_token + group * 4, mask, 4, ASM, "")
        steps += (info[0].to(tl.float32, bitcast=True),)
        lows += (info[1],)
        highs += (info[2],)
    return x, steps, lows, highs


@triton.constexpr_function
def _extreme_asm(which, dtype):
    return f"{which}.NaN.{'f16x2' if dtype == tl.float16 else 'bf16x2'} $0, $1, $2;"


@triton.jit
def _extreme(x, y, WHICH: tl.constexpr, DTYPE: tl.constexpr):
    """The larger ("max") or smaller ("min") of each of two words' two floats; NaN of a NaN."""
    return tl.inline_asm_elementwise(
        _extreme_asm(WHICH, DTYPE), "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest(raw, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """The bits of the largest magnitude, as float32, of activations as they were loaded."""
    if VECTOR:
        most, least = raw[0], raw[0]
        for i in tl.static_range(1, len(raw)):
            most = _extreme(most, raw[i], "max", DTYPE)
            least = _extreme(least, raw[i], "min", DTYPE)
        x = float_pair(most, DTYPE) + float_pair(least, DTYPE)
    else:
        x = raw
    largest = x[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, x[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return largest


@triton.jit
def _integers(raw, DTYPE: tl.constexpr, VECTOR: tl.constexpr, ASM: tl.constexpr):
    """Activations as integers of 16 bits, two a word; their step, NaN of what is lost."""
    # Of magnitudes below 2^-111, the step is that of those.
    exponent = tl.maximum(_largest(raw, DTYPE, VECTOR) >> 23, 16)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    words = ()
    for i in tl.static_range(len(raw) if VECTOR else len(raw) // 2):
        x = float_pair(raw[i], DTYPE) if VECTOR else (raw[2 * i], raw[2 * i + 1])
        low = tl.fma(x[0], factor, ROUND).to(tl.int32, bitcast=True)
        high = tl.fma(x[1], factor, ROUND).to(tl.int32, bitcast=True)
        words += (packed(low, high, ASM),)
    return words, step.to(tl.float32, bitcast=True)


@triton.jit
def _make_int16(
    loaded, DTYPE: tl.constexpr, M: tl.constexpr, SPAN: tl.constexpr, VECTOR: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    words, steps = (), ()
    for m in tl.static_range(M):
        ints, step = _integers(loaded[m], DTYPE, VECTOR, ASM)
        words += (ints,)
        steps += (step,)
    zero = tl.zeros_like(words[0][0])
    ones = zero + ONES
    groups = ()
    for s in tl.static_range(SPAN):
        x, lows, highs = (), (), ()
        for m in tl.static_range(M):
            low, high = zero, zero
            each = ()
            for i in tl.static_range(16):
                each += (words[m][16 * s + i],)
            for i in tl.static_range(4):
                low = dp2a(each[2 * i], each[2 * i + 1], ones, low, ASM)
                high = dp2a(each[2 * i + 8], each[2 * i + 9], ones, high, ASM)
            x += (each,)
            lows += (low,)
            highs += (high,)
        groups += ((x, steps, lows, highs),)
    return groups


@triton.jit
def load_activations(
    a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask, M: tl.constexpr,
    SPAN: tl.constexpr, VECTOR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """SPAN groups of M activations, those of number SPAN · group and on, as they are stored.

    Returns:
        What :func:`integers_of` takes: without info [m] of what was loaded of 16-bit floats, with
        it integers already.
    """
    loaded = ()
    if info_ptr is None:
        for m in tl.static_range(M):
            at = a_ptr + m * stride_a_token + group * (SPAN * GROUP)
            x = ()
            for e in tl.static_range(4 * SPAN):
                if VECTOR:
                    words = (at + 8 * e).to(tl.pointer_type(tl.int32))
                    x += load_words(words, mask, 4, True, "")
                else:
                    x += eight_activations(at + 8 * e, mask, False)
            loaded += (x,)
    else:
        for s in tl.static_range(SPAN):
            at = group * SPAN + s
            if a_ptr.dtype.element_ty == tl.int8:
                one = _load_int8(
                    a_ptr, info_ptr, stride_a_token, stride_info_token, at, mask, M, ASM
                )
            else:
                one = _load_int16(
                    a_ptr, info_ptr, stride_a_token, stride_info_token, at, mask, M, ASM
                )
            loaded += (one,)
    return loaded


@triton.jit
def integers_of(
    loaded, a_ptr, info_ptr, M: tl.constexpr, SPAN: tl.constexpr, VECTOR: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """SPAN groups of M activations as integers, of what :func:`load_activations` returned.

    Without info they are made here, with the same step for all groups.

    Returns:
        Of each group, and in that [m] each: words of the integers; what an integer is worth,
        float32; sums of the integers of the group's first half, int32; and of its second half.
    """
    if info_ptr is None:
        groups = _make_int16(loaded, a_ptr.dtype.element_ty, M, SPAN, VECTOR, ASM)
    else:
        groups = loaded
    return groups
