"""Activations as integers of 16 bits, made once for all programs by a launch of their own.

Chosen where too many programs would each make those of the groups that they take, as
:mod:`ferrum_triton.kernels.quant.thread_products` says how.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.planes import is_aligned, load_words, uses_ptx
from ferrum_triton.kernels.quant.thread_products import (
    Activations,
    IntegerGroup,
    integers_of,
    load_floats,
)
from ferrum_triton.kernels.rows import cdiv


class Int16Activations(NamedTuple):
    """Activations of 16 bits, with a step for each 32.

    Attributes:
        codes: int32 [m, K / 2], two integers a word, the first lower.
        scales_and_sums: int32 [m, K / 32, 4]: the bits of a step as float32, the sums of the first
            16 integers and of the others, and nothing.
    """

    codes: Tensor
    scales_and_sums: Tensor


@triton.jit
def load_integers(a, part, mask, M: tl.constexpr, SPAN: tl.constexpr, PTX: tl.constexpr):
    """SPAN groups of M tokens, :class:`IntegerGroup` each.

    Args:
        a: Activations that :func:`int16_activations` made.
        part: parts of SPAN groups, [threads].
        mask: parts that there are, [threads] or None.
    """
    groups = ()
    for s in tl.static_range(SPAN):
        group = part * SPAN + s
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
        groups += (IntegerGroup(words, steps, lows, highs),)
    return groups


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
    a = Activations(a_ptr + token * stride_a_token, 0, None, 0)
    loaded = load_floats(a, group, mask, 1, 1, WIDE)
    words, steps, lows, highs = integers_of(loaded, a_ptr.dtype.element_ty, 1, WIDE, PTX)[0]
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
    return Int16Activations(codes, found)
