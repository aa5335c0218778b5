"""Activations in the order the products of :mod:`ferrum_triton.kernels.quant.fragments` sum in."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ferrum_triton.kernels.jit import kernel

# K is filled up with zeros to whole steps of the products' loops.
STEP = 256


@triton.jit
def arrange_token(
    token, x_ptr, sums_ptr, factor_ptr, a_ptr, stride_a_token, num_weights, num_padded,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token: x = a / factor, its largest magnitude in [2^11, 2^12), and sums over words.

    factor is a power of two, so that x is exact down to 2^-35 of its row's largest: bfloat16 has
    fewer bits than float16. Eight of them sum to a float16.
    """
    a_row = a_ptr + token * stride_a_token
    largest = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, num_padded, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_row + k, mask=k < num_weights, other=0.0).to(tl.float32)
        # Ordered as integers, a NaN is above infinity and so is not lost.
        largest = tl.maximum(
            largest.to(tl.int32, bitcast=True), tl.abs(a).to(tl.int32, bitcast=True)
        ).to(tl.float32, bitcast=True)
    exponent = tl.max(largest.to(tl.int32, bitcast=True), axis=0) >> 23
    inverse = tl.minimum(265 - exponent, 253)
    tl.store(factor_ptr + token, ((254 - inverse) << 23).to(tl.float32, bitcast=True))
    inverse = (inverse << 23).to(tl.float32, bitcast=True)

    for first in range(0, num_padded, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        column = at % COLUMNS
        half, product = at // (8 * COLUMNS) % HALVES, at // COLUMNS % 8
        word = column // 2 * (2 * HALVES) + 2 * half + column % 2
        k = at // (8 * HALVES * COLUMNS) * (8 * HALVES * COLUMNS) + word // 2 * 16
        k += product // 4 * 8 + product // 2 % 2 * 4 + word % 2 * 2 + product % 2
        a = tl.load(a_row + k, mask=k < num_weights, other=0.0).to(tl.float32)
        tl.store(
            x_ptr + token * num_padded + at, (a * inverse).to(tl.float16), mask=at < num_padded
        )

        word = first // 8 + tl.arange(0, BLOCK_K // 8)
        k = word[:, None] * 8 + tl.arange(0, 8)[None, :]
        a = tl.load(a_row + k, mask=k < num_weights, other=0.0).to(tl.float32)
        sums = tl.sum(a * inverse, axis=1).to(tl.float16)
        tl.store(sums_ptr + token * (num_padded // 8) + word, sums, mask=word < num_padded // 8)


@kernel
def _arrange_kernel(
    x_ptr,  # [m, padded k], float16
    sums_ptr,  # [m, padded k / 8], float16
    factor_ptr,  # [m], float32
    a_ptr,  # [m, k]
    stride_a_token,
    num_weights,
    num_padded,
    COLUMNS: tl.constexpr,  # of a product
    HALVES: tl.constexpr,
    RELEASE: tl.constexpr,  # the kernel after this one may start; it waits for the end by itself
    BLOCK_K: tl.constexpr,
):
    if RELEASE:
        gdc_launch_dependents()
    arrange_token(
        tl.program_id(0).to(tl.int64), x_ptr, sums_ptr, factor_ptr, a_ptr, stride_a_token,
        num_weights, num_padded, COLUMNS, HALVES, BLOCK_K,
    )  # fmt: skip


def room_for(num_tokens: int, num_weights: int, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for what :func:`arrange` returns."""
    padded = triton.cdiv(num_weights, STEP) * STEP
    x = torch.empty((num_tokens, padded), dtype=torch.float16, device=device)
    sums = torch.empty((num_tokens, padded // 8), dtype=torch.float16, device=device)
    return x, sums, torch.empty((num_tokens,), dtype=torch.float32, device=device)


def block_and_warps(padded: int) -> tuple[int, int]:
    """Elements of a token at a time, and a program's warps."""
    # Few tokens are a matter of latency: all of K at once where the registers hold it.
    block = min(triton.next_power_of_2(max(padded, 1)), 16384)
    return block, 16 if block > 4096 else (8 if block > 1024 else 4)


def arrange(
    a: Tensor, words: int, halves: int = 1, release: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [m, k] as products whose steps are ``words`` words, 16 or 32, take them.

    Returns:
        x, float16 [m, k up to whole steps], a step being [product, word]; of two halves, every
        other pair of words first and then the others. The sums over the
        eight weights of each word, float16. What x has to be multiplied by, float32 [m].
    """
    num_tokens, num_weights = a.shape
    x, sums, factor = room_for(num_tokens, num_weights, a.device)
    block, warps = block_and_warps(x.shape[1])
    _arrange_kernel.launch(
        (num_tokens,),
        x,
        sums,
        factor,
        a,
        a.stride(0),
        num_weights,
        x.shape[1],
        COLUMNS=words // halves,
        HALVES=halves,
        RELEASE=release,
        BLOCK_K=block,
        num_warps=warps,
    )
    return x, sums, factor
