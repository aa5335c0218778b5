"""Activations as integers of 16 bits, for products with weights that are integers.

Every thread makes them for the groups of 32 that it takes at a time; or, where too many programs
would do so, a launch of its own makes them once: :func:`int16_activations`.

x = step · integer, the step a power of two with which the group's largest magnitude takes 15 bits.
Activations down to 2^-7 of that keep all the bits a bfloat16 has, and down to 2^-4 a float16's;
smaller ones are off by at most 2^-15 of the largest, the last bit of a float16 as large being 2^-10
of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.plane_groups import eight_activations, float_pair
from ferrum_triton.kernels.quant.planes import GROUP, is_aligned, load_words, uses_ptx
from ferrum_triton.kernels.quant.words import ONES, dp2a, packed
from ferrum_triton.kernels.rows import cdiv

# Added to a float32 of less than 2^22, leaves the nearest integer in the lowest bits.
ROUND = tl.constexpr(1.5 * 2**23)


class Activations(NamedTuple):
    """Rows of activations in memory.

    Attributes:
        ptr: [m, k] floats; or codes, int32 [m, k / 2], two integers a word.
        scales_and_sums_ptr: int32 [m, k / 32, 4] of codes; None of floats.
        stride, scales_and_sums_stride: elements from one token to the next.
    """

    ptr: Any
    scales_and_sums_ptr: Any
    stride: Any
    scales_and_sums_stride: Any


class IntegerGroup(NamedTuple):
    """A group of 32 activations of each token, [m].

    Attributes:
        words: 16 words of two integers.
        steps: what an integer is worth, float32.
        lows, highs: sums of the first and the last 16 integers, int32.
    """

    words: Any
    steps: Any
    lows: Any
    highs: Any


@triton.jit
def _load_codes(a, group, mask, M: tl.constexpr, PTX: tl.constexpr):
    """A group that :func:`int16_activations` made."""
    words, steps, lows, highs = (), (), (), ()
    for m in tl.static_range(M):
        ptr = a.ptr + m * a.stride + group * 16
        codes = ()
        for i in tl.static_range(4):
            codes += load_words(ptr + 4 * i, mask, 4, PTX, "")
        words += (codes,)
        ptr = a.scales_and_sums_ptr + m * a.scales_and_sums_stride + group * 4
        found = load_words(ptr, mask, 4, PTX, "")
        steps += (found[0].to(tl.float32, bitcast=True),)
        lows += (found[1],)
        highs += (found[2],)
    return IntegerGroup(words, steps, lows, highs)


@triton.jit
def load_activations(
    a, part, mask, M: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr
):
    """SPAN groups of M tokens as they are stored: what :func:`integers_of` takes.

    Args:
        a: Activations.
        part: parts of SPAN groups, [threads].
        mask: parts that there are, [threads] or None.
        WIDE: rows start at multiples of 16 bytes.
        PTX: PTX is used.
    """
    loaded = ()
    if a.scales_and_sums_ptr is None:
        for m in tl.static_range(M):
            ptr = a.ptr + m * a.stride + part * (SPAN * GROUP)
            x = ()
            for e in tl.static_range(4 * SPAN):
                if WIDE:
                    words = (ptr + 8 * e).to(tl.pointer_type(tl.int32))
                    x += load_words(words, mask, 4, True, "")
                else:
                    x += eight_activations(ptr + 8 * e, mask, False)
            loaded += (x,)
    else:
        for s in tl.static_range(SPAN):
            loaded += (_load_codes(a, part * SPAN + s, mask, M, PTX),)
    return loaded


@triton.jit
def integers_of(
    loaded, a, M: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr
):
    """The SPAN groups that :func:`load_activations` loaded, as :class:`IntegerGroup` each.

    Groups of floats have one step for all SPAN.
    """
    groups = loaded
    if a.scales_and_sums_ptr is None:
        groups = _made(loaded, a.ptr.dtype.element_ty, M, SPAN, WIDE, PTX)
    return groups


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
def _largest(raw, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """The bits of the largest magnitude, as float32, of activations as they were loaded."""
    if WIDE:
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
def _integers(raw, DTYPE: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr):
    """Activations as integers of 16 bits, two a word; their step, NaN of what is lost."""
    # Of magnitudes below 2^-111, the step is that of those.
    exponent = tl.maximum(_largest(raw, DTYPE, WIDE) >> 23, 16)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    words = ()
    for i in tl.static_range(len(raw) if WIDE else len(raw) // 2):
        x = float_pair(raw[i], DTYPE) if WIDE else (raw[2 * i], raw[2 * i + 1])
        low = tl.fma(x[0], factor, ROUND).to(tl.int32, bitcast=True)
        high = tl.fma(x[1], factor, ROUND).to(tl.int32, bitcast=True)
        words += (packed(low, high, PTX),)
    return words, step.to(tl.float32, bitcast=True)


@triton.jit
def _made(
    loaded,
    DTYPE: tl.constexpr,
    M: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Groups of integers of activations as they were loaded."""
    words, steps = (), ()
    for m in tl.static_range(M):
        integers, step = _integers(loaded[m], DTYPE, WIDE, PTX)
        words += (integers,)
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
                low = dp2a(each[2 * i], each[2 * i + 1], ones, low, PTX)
                high = dp2a(each[2 * i + 8], each[2 * i + 9], ones, high, PTX)
            x += (each,)
            lows += (low,)
            highs += (high,)
        groups += (IntegerGroup(x, steps, lows, highs),)
    return groups


@dataclass(frozen=True, eq=False)
class Int16Activations:
    """Activations of 16 bits, with a step for each 32.

    Attributes:
        codes: int32 [m, K / 2], two integers a word, the first lower.
        scales_and_sums: int32 [m, K / 32, 4]: the bits of a step as float32, the sums of the first
            16 integers and of the others, and nothing.
        dtype: dtype they had, which products have too.
    """

    codes: Tensor
    scales_and_sums: Tensor
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.codes.shape[0]

    @property
    def num_weights(self) -> int:
        return self.codes.shape[1] * 2


@kernel
def _int16_kernel(
    codes_ptr,  # int32 [m, k / 2]
    scales_and_sums_ptr,  # int32 [m, k / 32, 4]
    a_ptr,  # [m, k]
    stride_codes_token,
    stride_scales_and_sums_token,
    stride_a_token,
    num_groups,  # groups of 32 in a row
    THREADS: tl.constexpr,
    WIDE: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each token and THREADS groups, of which a thread makes one."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    token = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    mask = group < num_groups
    a = Activations(a_ptr + token * stride_a_token, None, 0, 0)
    loaded = load_activations(a, group, mask, 1, 1, WIDE, PTX)
    words, steps, lows, highs = integers_of(loaded, a, 1, 1, WIDE, PTX)[0]
    codes = codes_ptr + token * stride_codes_token + group * 16
    for i in tl.static_range(16):
        tl.store(codes + i, words[0][i], mask=mask)
    found = scales_and_sums_ptr + token * stride_scales_and_sums_token + group * 4
    tl.store(found, steps[0].to(tl.int32, bitcast=True), mask=mask)
    tl.store(found + 1, lows[0], mask=mask)
    tl.store(found + 2, highs[0], mask=mask)


def int16_activations(a: Tensor) -> Int16Activations:
    """Activations [m, K], float16 or bfloat16, as integers of 16 bits."""
    (num_tokens, k), device = a.shape, a.device
    codes = torch.empty(num_tokens, k // 2, dtype=torch.int32, device=device)
    found = torch.empty(num_tokens, k // 32, 4, dtype=torch.int32, device=device)
    ptx = uses_ptx(a)
    if a.numel():
        _int16_kernel.launch(
            (cdiv(k // 32, 32), num_tokens),
            codes_ptr=codes,
            scales_and_sums_ptr=found,
            a_ptr=a,
            stride_codes_token=codes.stride(0),
            stride_scales_and_sums_token=found.stride(0),
            stride_a_token=a.stride(0),
            num_groups=k // 32,
            THREADS=32,
            WIDE=ptx and is_aligned(a),
            PTX=ptx,
            num_warps=1,
        )
    return Int16Activations(codes, found, a.dtype)
