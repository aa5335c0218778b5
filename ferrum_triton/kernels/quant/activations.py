"""Activations in the order the products of :mod:`ferrum_triton.kernels.quant.fragments` sum in."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2

# K is filled up with zeros to whole steps of the products' loops.
STEP = 256


@triton.jit
def load_block(a_row, first, num_weights, BLOCK_K: tl.constexpr):
    """Elements [first, first + BLOCK_K) of a row as float32, 0 past its end."""
    k = first + tl.arange(0, BLOCK_K)
    return tl.load(a_row + k, mask=k < num_weights, other=0.0).to(tl.float32)


@triton.jit
def first_block(a_row, num_weights, num_padded, BLOCK_K: tl.constexpr):
    """A row's first block, and the exponent bits of its factor's inverse: :func:`arrange_token`."""
    a = load_block(a_row, 0, num_weights, BLOCK_K)
    # Ordered as integers, a NaN is above infinity and so is not lost.
    largest = tl.abs(a).to(tl.int32, bitcast=True)
    for first in range(BLOCK_K, num_padded, BLOCK_K):
        more = load_block(a_row, first, num_weights, BLOCK_K)
        largest = tl.maximum(largest, tl.abs(more).to(tl.int32, bitcast=True))
    return a, tl.minimum(265 - (tl.max(largest, axis=0) >> 23), 253)


@triton.jit
def arranged(a, inverse, COLUMNS: tl.constexpr, HALVES: tl.constexpr, QUADS: tl.constexpr = False):
    """Whole steps of a row, float32, as an arranged row has them, and sums over words; float16."""
    a = a * (inverse << 23).to(tl.float32, bitcast=True)
    BLOCK_K: tl.constexpr = a.shape[0]
    sums = tl.sum(tl.reshape(a, [BLOCK_K // 8, 8]), axis=1).to(tl.float16)
    STEPS: tl.constexpr = BLOCK_K // (8 * HALVES * COLUMNS)
    # Weight 16 i + 8 h + 4 n + 2 e + o, see fragments.py; i is every HALVES-th pair of words.
    if QUADS:
        # Of 256 elements each thread of a quad has 64: four times those of a pair of words.
        x = tl.reshape(a.to(tl.float16), [STEPS, 4, 4, 2, 2, 2, 2])
        x = tl.permute(x, (0, 2, 3, 1, 4, 6, 5))
    else:
        x = tl.reshape(a.to(tl.float16), [STEPS, COLUMNS // 2, HALVES, 2, 2, 2, 2])
        x = tl.permute(x, (0, 2, 3, 4, 6, 1, 5))
    return tl.reshape(x, [BLOCK_K]), sums


@triton.jit
def _place(row, i, num_padded, BESIDE: tl.constexpr):
    """Of element i of a row: rows lie one after the other, or 32 of each of BESIDE rows in turn."""
    if BESIDE > 0:
        place = (i // 32 * BESIDE + row) * 32 + i % 32
    else:
        place = row * num_padded + i
    return place


@triton.jit
def store_arranged(row, first, x, sums, x_ptr, sums_ptr, num_padded, BESIDE: tl.constexpr = 0):
    """Write what :func:`arranged` returned to a row of x and of the sums."""
    BLOCK_K: tl.constexpr = x.shape[0]
    at = first + tl.arange(0, BLOCK_K)
    tl.store(x_ptr + _place(row, at, num_padded, BESIDE), x, mask=at < num_padded)
    word, num_words = first // 8 + tl.arange(0, BLOCK_K // 8), num_padded // 8
    tl.store(sums_ptr + _place(row, word, num_words, BESIDE), sums, mask=word < num_words)


@triton.jit
def arrange_token(
    token, x_ptr, sums_ptr, factor_ptr, a_ptr, stride_a_token, num_weights, num_padded,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr, BESIDE: tl.constexpr = 0,
):  # fmt: skip
    """One token: x = a / factor, its largest magnitude in [2^11, 2^12), and sums over words.

    factor is a power of two, so that x is exact down to 2^-35 of its row's largest: bfloat16 has
    fewer bits than float16. Eight of them sum to a float16.
    """
    a_row = a_ptr + token * stride_a_token
    a, inverse = first_block(a_row, num_weights, num_padded, BLOCK_K)
    tl.store(factor_ptr + token, ((254 - inverse) << 23).to(tl.float32, bitcast=True))
    for first in range(0, num_padded, BLOCK_K):
        x, sums = arranged(a, inverse, COLUMNS, HALVES, BESIDE > 0)
        store_arranged(token, first, x, sums, x_ptr, sums_ptr, num_padded, BESIDE)
        if first + BLOCK_K < num_padded:
            a = load_block(a_row, first + BLOCK_K, num_weights, BLOCK_K)


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
    BESIDE: tl.constexpr,  # tokens, pieces of which lie beside each other; 0: each by itself
    RELEASE: tl.constexpr,  # the kernel after this one may start; it waits for the end by itself
    BLOCK_K: tl.constexpr,
):
    if RELEASE:
        gdc_launch_dependents()
    arrange_token(
        tl.program_id(0).to(tl.int64), x_ptr, sums_ptr, factor_ptr, a_ptr, stride_a_token,
        num_weights, num_padded, COLUMNS, HALVES, BLOCK_K, BESIDE,
    )  # fmt: skip


def room_for(num_tokens: int, num_weights: int, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for what :func:`arrange` returns."""
    padded = cdiv(num_weights, STEP) * STEP
    x = torch.empty((num_tokens, padded), dtype=torch.float16, device=device)
    sums = torch.empty((num_tokens, padded // 8), dtype=torch.float16, device=device)
    return x, sums, torch.empty((num_tokens,), dtype=torch.float32, device=device)


def block_and_warps(padded: int) -> tuple[int, int]:
    """Elements of a token at a time, and a program's warps."""
    # Few tokens are a matter of latency: all of K at once where the registers hold it.
    block = min(next_power_of_2(max(padded, 1)), 16384)
    return block, 16 if block > 4096 else (8 if block > 1024 else 2)


def arrange(
    a: Tensor, words: int, halves: int = 1, release: bool = False, beside: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [m, k] as products whose steps are ``words`` words, 16 or 32, take them.

    Returns:
        x, float16 [m, k up to whole steps], a step being [product, word]; of two halves, every
        other pair of words first and then the others. The sums over the
        eight weights of each word, float16. What x has to be multiplied by, float32 [m].
        Or for up to ``beside`` tokens both as [32 elements, token].
    """
    num_tokens, num_weights = a.shape
    x, sums, factor = room_for(beside or num_tokens, num_weights, a.device)
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
        BESIDE=beside,
        RELEASE=release,
        BLOCK_K=block,
        num_warps=warps,
    )
    return x, sums, factor
