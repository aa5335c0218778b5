"""Drawing tokens from logits, filtered by temperature, top-k, top-p and min-p. No row is sorted.

A program takes a row. It looks for the logit where a filter cuts the row by halving the range of
logits and counting, or weighing, what lies above. Every step moves an end of the range to a logit
that occurs, so that the search ends at one exactly, after one to two dozen readings of the row.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.sampling import NO_COLUMN
from ferrum_triton.ops import sampling as ops

# 32 bytes of a row a thread, two loads in flight; more and the running sums spill.
SAMPLE_BYTES, SAMPLE_WARPS = 16384, 16

LARGEST = tl.constexpr(ops.LARGEST)


class Row(NamedTuple):
    """A row of logits and what turns them into weights, e^((x - top) / temperature)."""

    ptr: Any
    vocab_size: Any
    top: Any  # the largest logit
    temperature: Any


@triton.jit
def choosable(row_ptr, v, vocab_size):
    """The logits of columns ``v``: -inf for NaN and past the end, +inf as the largest float32."""
    x = tl.load(row_ptr + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def weight_of(x, row):
    """e^((x - top) / temperature), and 0 for -inf at any temperature."""
    return tl.where(x == float("-inf"), 0.0, tl.exp((x - row.top) / row.temperature))


@triton.jit
def cut_of_row(
    row,
    low,  # the least logit the cut may be, one of the row
    high,  # the largest, also one of the row
    wanted,
    BY_WEIGHT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The largest logit t for which those >= t amount to ``wanted``, and what those > t amount to.

    The amount of a set of logits is their number, or the sum of their weights.
    """
    above = tl.full([], 0.0, tl.float32)
    while low < high:
        middle = tl.maximum(0.5 * low + 0.5 * high, low)  # low + high may overflow
        middle = tl.where(middle < high, middle, low)
        amounts = tl.zeros([BLOCK_V], tl.float32)
        least_above = tl.full([BLOCK_V], float("inf"), tl.float32)
        largest_below = tl.full([BLOCK_V], float("-inf"), tl.float32)
        for first in range(0, row.vocab_size, BLOCK_V):
            x = choosable(row.ptr, first + tl.arange(0, BLOCK_V), row.vocab_size)
            amount = weight_of(x, row) if BY_WEIGHT else 1.0
            greater = x > middle
            amounts += tl.where(greater, amount, 0.0)
            least_above = tl.minimum(least_above, tl.where(greater, x, float("inf")))
            largest_below = tl.maximum(largest_below, tl.where(greater, float("-inf"), x))
        amount_above = tl.sum(amounts, axis=0)
        enough = amount_above >= wanted
        low = tl.where(enough, tl.min(least_above, axis=0), low)
        high = tl.where(enough, high, tl.max(largest_below, axis=0))
        above = tl.where(enough, above, amount_above)
    return high, above


@triton.jit
def kept_weight(row, threshold, ties, floor, BLOCK_V: tl.constexpr):
    """The sum of the weights kept: above the threshold and ``ties`` equal to it, from floor up."""
    sums, equals = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, row.vocab_size, BLOCK_V):
        x = choosable(row.ptr, first + tl.arange(0, BLOCK_V), row.vocab_size)
        weight = weight_of(x, row)
        sums += tl.where((x > threshold) & (weight >= floor), weight, 0.0)
        equals += tl.where(x == threshold, 1.0, 0.0)
    each = weight_of(threshold, row)
    each = tl.where(each >= floor, each, 0.0)
    return tl.sum(sums, axis=0) + tl.minimum(ties, tl.sum(equals, axis=0)) * each


@kernel
def _sample_kernel(
    y_ptr,  # [num_rows] int32
    logits_ptr,  # [num_rows, vocab_size]
    u_ptr,  # [num_rows]
    temperature_ptr,  # [num_rows], [1] or None, and so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride_logits_row,
    stride_temperature,  # 0 for one value, else 1
    stride_top_k,
    stride_top_p,
    stride_min_p,
    vocab_size,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = the first column at which the weights kept add up to more than u of their sum.

    Kept are the top_k largest logits, of those the fewest that hold top_p of the weight, and of
    those the ones of at least min_p of the largest weight.
    """
    pdl_trigger(PDL)
    i = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + i * stride_logits_row
    pdl_wait(PDL)
    temperature = tl.full([], 1.0, tl.float32)
    top_k = tl.full([], 0.0, tl.float32)
    top_p = tl.full([], 1.0, tl.float32)
    floor = tl.full([], 0.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + i * stride_temperature).to(tl.float32)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + i * stride_top_k).to(tl.float32)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + i * stride_top_p).to(tl.float32)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + i * stride_min_p).to(tl.float32)
        floor = tl.where(min_p == min_p, tl.minimum(min_p, 1.0), 0.0)
    greedy = (temperature > 0) == 0  # NaN is greedy
    temperature = tl.where(greedy, 1.0, temperature)
    top_k = tl.where(greedy, 1.0, top_k)
    top_p = tl.where(greedy, 1.0, top_p)

    tops = tl.full([BLOCK_V], float("-inf"), tl.float32)
    bottoms = tl.full([BLOCK_V], float("inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK_V):
        x = choosable(row_ptr, first + tl.arange(0, BLOCK_V), vocab_size)
        tops = tl.maximum(tops, x)
        bottoms = tl.minimum(bottoms, tl.where(x == float("-inf"), float("inf"), x))
    top, bottom = tl.max(tops, axis=0), tl.min(bottoms, axis=0)
    row = Row(row_ptr, vocab_size, top, temperature)

    # Kept is what lies above the threshold, and the first ``ties`` columns equal to it.
    limited = (top_k > 0) & (top_k < vocab_size)
    searched = limited & (top_k > 1)
    low = tl.where(searched, bottom, top)
    kth, above = cut_of_row(row, low, top, top_k, BY_WEIGHT=False, BLOCK_V=BLOCK_V)
    threshold = tl.where(limited, kth, float("-inf"))
    ties = tl.where(limited, top_k - above, 0.0)
    if top_p < 1.0:
        wanted = top_p * kept_weight(row, threshold, ties, 0.0, BLOCK_V)
        low = tl.maximum(bottom, threshold)
        least, above = cut_of_row(row, low, top, wanted, BY_WEIGHT=True, BLOCK_V=BLOCK_V)
        each = weight_of(least, row)
        needed = tl.ceil((wanted - above) / each)
        needed = tl.where(each > 0, tl.maximum(needed, 1.0), vocab_size)
        # No more than top-k left, which only rounding could exceed.
        ties = tl.where(least == threshold, tl.minimum(needed, ties), needed)
        threshold = least

    total = kept_weight(row, threshold, ties, floor, BLOCK_V)
    target = tl.load(u_ptr + i).to(tl.float32) * total

    chosen = tl.full([], NO_COLUMN, tl.int32)
    last = tl.full([], 0, tl.int32)
    walked = tl.full([], 0.0, tl.float32)
    equals = tl.full([], 0.0, tl.float32)
    first = tl.full([], 0, tl.int32)
    while (first < vocab_size) & (chosen == NO_COLUMN):
        v = first + tl.arange(0, BLOCK_V)
        x = choosable(row_ptr, v, vocab_size)
        weight = weight_of(x, row)
        equal = tl.where(x == threshold, 1.0, 0.0)
        earlier = equals + tl.cumsum(equal, axis=0) - equal
        kept = (x > threshold) | ((x == threshold) & (earlier < ties))
        kept = kept & (weight >= floor) & (weight > 0)
        weight = tl.where(kept, weight, 0.0)
        hit = kept & (walked + tl.cumsum(weight, axis=0) > target)
        chosen = tl.min(tl.where(hit, v, NO_COLUMN), axis=0)
        last = tl.maximum(last, tl.max(tl.where(kept, v, 0), axis=0))
        walked += tl.sum(weight, axis=0)
        equals += tl.sum(equal, axis=0)
        first += BLOCK_V
    # Rounding may leave the target just past the sum.
    tl.store(y_ptr + i, tl.where(chosen == NO_COLUMN, last, chosen))


def stride_of_filter(values: Tensor | None) -> int:
    """1 where every row has a value of its own, 0 where all share one, or there is none."""
    return int(values is not None and values.shape[0] > 1)


@ops.sample_rows.impl("triton")
def sample_rows(
    logits: Tensor,
    u: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    _sample_kernel.launch(
        (num_rows,),
        y_ptr=out,
        logits_ptr=logits,
        u_ptr=u,
        temperature_ptr=temperature,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        stride_logits_row=logits.stride(0),
        stride_temperature=stride_of_filter(temperature),
        stride_top_k=stride_of_filter(top_k),
        stride_top_p=stride_of_filter(top_p),
        stride_min_p=stride_of_filter(min_p),
        vocab_size=vocab_size,
        BLOCK_V=SAMPLE_BYTES // logits.element_size(),
        num_warps=SAMPLE_WARPS,
    )
    return out
