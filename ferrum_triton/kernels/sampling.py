"""Choosing tokens: argmax in two steps, penalties by gather and scatter, sampling by bisection.

No kernel sorts. Sampling looks for the logit where a filter cuts the row by halving the range of
logits and counting, or weighing, what lies above. Every step moves an end of the range to a logit
that occurs, so the search ends at one exactly, after reading the row a dozen times or two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import sampling as ops

LIST_BLOCK, MAX_LIST_CHUNKS = 256, 64
# 32 bytes of a row a thread, two loads in flight; more and the running sums spill.
SAMPLE_BYTES, SAMPLE_WARPS = 16384, 16
UNIFORM_BLOCK = 128

NOTHING = tl.constexpr(-(2**63))  # the key of what must not be chosen
NO_COLUMN = tl.constexpr(2**31 - 1)
LARGEST = tl.constexpr(ops.LARGEST)


@triton.jit
def ordered_key(value, index, usable):
    """An int64 that orders by float32 value, then by lower index; NOTHING where not usable."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # one zero, not two
    # Negative floats order backwards as integers: flip all but the sign.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(usable, (order << 32) | (0x7FFFFFFF - index), NOTHING)


@triton.jit
def index_of_key(key, MASKED: tl.constexpr):
    none = -1 if MASKED else 0
    return tl.where(key == NOTHING, none, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def keep_larger(largest, at, logits_row, mask_ptr, v, vocab_size, mask_size):
    """Lanes keep the first of their largest logits and its column; NaN is larger than nothing."""
    logits = tl.load(logits_row + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    larger = logits > largest
    if mask_ptr is not None:
        allowed = tl.load(mask_ptr + v, mask=v < mask_size, other=0)
        larger = larger & (allowed != 0) & (logits < float("inf"))
    return tl.where(larger, logits, largest), tl.where(larger, v, at)


@kernel(dynamic=("num_blocks",))
def _argmax_chunk_kernel(
    result_ptr,  # [num_rows, num_chunks] int64 keys, or [num_rows] int32 if there is one chunk
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,  # [mask_size] or None
    stride_logits_row,
    vocab_size,
    mask_size,
    num_chunks,
    num_blocks,  # of a chunk
    BLOCK_V: tl.constexpr,
    LOOPED: tl.constexpr,  # a chunk is longer than a block
    ONE_CHUNK: tl.constexpr,
):
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    # In blocks, so that the compiler sees that addresses are aligned.
    start = tl.program_id(0) % num_chunks * num_blocks * BLOCK_V
    logits_row = logits_ptr + row * stride_logits_row
    v = tl.arange(0, BLOCK_V)

    largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    at = tl.full([BLOCK_V], NO_COLUMN, tl.int32)
    if LOOPED:
        end = tl.minimum(start + num_blocks * BLOCK_V, vocab_size)
        for first in tl.range(start, end, BLOCK_V, num_stages=3):
            largest, at = keep_larger(
                largest, at, logits_row, mask_ptr, first + v, vocab_size, mask_size
            )
    else:
        largest, at = keep_larger(
            largest, at, logits_row, mask_ptr, start + v, vocab_size, mask_size
        )

    top = tl.max(largest, axis=0)
    first = tl.min(tl.where(largest == top, at, NO_COLUMN), axis=0)
    key = ordered_key(top, first, first != NO_COLUMN)
    if ONE_CHUNK:
        tl.store(result_ptr + row, index_of_key(key, mask_ptr is not None))
    else:
        tl.store(result_ptr + tl.program_id(0), key)


@kernel
def _argmax_merge_kernel(
    y_ptr,  # [num_rows] int32
    key_ptr,  # [num_rows, num_chunks] int64
    num_chunks,
    MASKED: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two >= num_chunks
):
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    keys = tl.load(key_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=NOTHING)
    tl.store(y_ptr + row, index_of_key(tl.max(keys, axis=0), MASKED))


def argmax_heuristic(gpu: Gpu, num_rows: int, vocab_size: int) -> Config:
    """Columns a program scans: blocks of 2048 on 4 warps, two 16-byte loads of fp16 a thread.

    Few rows: a block a program, a small one if even that leaves processors without any. More than
    four programs a processor: loops over equal chunks, which load ahead and reduce once.
    """
    blocks_a_row = cdiv(vocab_size, 2048)
    if num_rows * blocks_a_row < gpu.num_sms:
        return {"BLOCK_V": 1024, "BLOCKS": 1, "num_warps": 4}
    blocks = max(num_rows * blocks_a_row // (4 * gpu.num_sms), 1)
    chunks = cdiv(blocks_a_row, min(blocks, 20))
    return {"BLOCK_V": 2048, "BLOCKS": cdiv(blocks_a_row, chunks), "num_warps": 4}


def argmax_candidates(gpu: Gpu, num_rows: int, vocab_size: int) -> list[Config]:
    """8 to 32 logits of a block a thread; chunks of 1 to 32 blocks."""
    return [
        {"BLOCK_V": block, "BLOCKS": blocks, "num_warps": warps}
        for block in (512, 1024, 2048, 4096)
        for blocks in (1, 4, 8, 16, 32)
        for warps in (2, 4, 8)
        if 8 <= block // (32 * warps) <= 32 and blocks <= cdiv(vocab_size, block)
    ]


argmax_config = Tunable(
    "argmax_rows", ("num_rows", "vocab_size"), argmax_heuristic, argmax_candidates
)


@ops.argmax_rows.impl("triton")
def argmax_rows(logits: Tensor, mask: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    num_rows, vocab_size = logits.shape
    device = logits.device
    y = torch.empty(num_rows, dtype=torch.int32, device=device) if out is None else out
    if num_rows == 0:
        return y
    config = argmax_config.pick(device, num_rows, vocab_size)
    block, num_blocks = config["BLOCK_V"], config["BLOCKS"]
    num_chunks = cdiv(vocab_size, block * num_blocks)
    result = y
    if num_chunks > 1:
        result = torch.empty(num_rows * num_chunks, dtype=torch.int64, device=device)
    _argmax_chunk_kernel.launch(
        (num_rows * num_chunks,),
        result,
        logits,
        mask,
        logits.stride(0),
        vocab_size,
        0 if mask is None else mask.shape[0],
        num_chunks,
        num_blocks,
        BLOCK_V=block,
        LOOPED=num_blocks > 1,
        ONE_CHUNK=num_chunks == 1,
        num_warps=config["num_warps"],
    )
    if num_chunks > 1:
        merged = next_power_of_2(num_chunks)
        _argmax_merge_kernel.launch(
            (num_rows,),
            y,
            result,
            num_chunks,
            MASKED=mask is not None,
            BLOCK_C=merged,
            num_warps=min(max(merged // 128, 1), 4),
        )
    return y


@triton.jit
def listed_range(row_offsets_ptr, row, num_listed):
    """Where the row's list starts and ends, inside the list whatever the offsets say."""
    start = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    return tl.maximum(start, 0).to(tl.int32), tl.minimum(end, num_listed).to(tl.int32)


@kernel(dynamic=("num_listed",))
def _penalise_kernel(
    values_ptr,  # [num_listed], written by the gather, read by the scatter
    logits_ptr,  # [num_rows, vocab_size], updated by the scatter
    penalties_ptr,  # [num_rows]
    row_offsets_ptr,  # [num_rows + 1]
    token_ids_ptr,  # [num_listed]
    stride_logits_row,
    vocab_size,
    num_chunks,
    num_listed,
    SCATTER: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    start, end = listed_range(row_offsets_ptr, row, num_listed)
    penalty = tl.load(penalties_ptr + row).to(tl.float32)
    end = tl.where(penalty == 1.0, start, end)

    for first in range(start + chunk * BLOCK_L, end, num_chunks * BLOCK_L):
        i = first + tl.arange(0, BLOCK_L)
        token = tl.load(token_ids_ptr + i, mask=i < end, other=-1).to(tl.int64)
        known = (token >= 0) & (token < vocab_size)
        logit_ptr = logits_ptr + row * stride_logits_row + token
        if SCATTER:
            tl.store(logit_ptr, tl.load(values_ptr + i, mask=known), mask=known)
        else:
            logit = tl.load(logit_ptr, mask=known, other=0.0).to(tl.float32)
            penalised = tl.where(logit > 0, logit / penalty, logit * penalty)
            tl.store(values_ptr + i, penalised.to(values_ptr.dtype.element_ty), mask=known)


@ops.repetition_penalty_inplace.impl("triton")
def repetition_penalty_inplace(
    logits: Tensor, row_offsets: Tensor, token_ids: Tensor, penalties: Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    num_listed = token_ids.shape[0]
    if num_rows == 0 or num_listed == 0:
        return
    # Every listed logit is read before any is written, so that a token listed twice is penalised
    # once, and the same bits are stored twice.
    values = logits.new_empty(num_listed)
    num_chunks = min(cdiv(cdiv(num_listed, num_rows), LIST_BLOCK), MAX_LIST_CHUNKS)
    for scatter in (False, True):
        _penalise_kernel.launch(
            (num_rows * num_chunks,),
            values,
            logits,
            penalties,
            row_offsets,
            token_ids,
            logits.stride(0),
            vocab_size,
            num_chunks,
            num_listed,
            SCATTER=scatter,
            BLOCK_L=LIST_BLOCK,
            num_warps=4,
        )


@kernel(dynamic=("num_rows",))
def _uniform_kernel(
    y_ptr,  # [num_rows] float32
    seeds_ptr,  # [num_rows]
    offsets_ptr,  # [num_rows]
    num_rows,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    seed = tl.load(seeds_ptr + row, mask=mask, other=0).to(tl.int64)
    offset = tl.load(offsets_ptr + row, mask=mask, other=0).to(tl.int64)
    word = tl.randint(seed, offset).to(tl.uint32, bitcast=True)
    tl.store(y_ptr + row, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=mask)


@ops.uniform_rows.impl("triton")
def uniform_rows(seeds: Tensor, offsets: Tensor, *, out: Tensor | None = None) -> Tensor:
    num_rows = seeds.shape[0]
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=seeds.device)
    if num_rows:
        grid = (cdiv(num_rows, UNIFORM_BLOCK),)
        _uniform_kernel.launch(
            grid, out, seeds, offsets, num_rows, BLOCK_R=UNIFORM_BLOCK, num_warps=4
        )
    return out


@triton.jit
def choosable(row_ptr, v, vocab_size):
    """The logits of columns ``v``: -inf for NaN and past the end, +inf as the largest float32."""
    x = tl.load(row_ptr + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def weight_of(x, top, temperature):
    """e^((x - top) / temperature), and 0 for -inf at any temperature."""
    return tl.where(x == float("-inf"), 0.0, tl.exp((x - top) / temperature))


@triton.jit
def cut_of_row(
    row_ptr,
    vocab_size,
    low,  # the least and the largest logit the cut may be, both in the row
    high,
    wanted,
    top,
    temperature,
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
        for first in range(0, vocab_size, BLOCK_V):
            x = choosable(row_ptr, first + tl.arange(0, BLOCK_V), vocab_size)
            amount = weight_of(x, top, temperature) if BY_WEIGHT else 1.0
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
def kept_weight(
    row_ptr, vocab_size, threshold, ties, floor, top, temperature, BLOCK_V: tl.constexpr
):
    """The sum of the weights kept: above the threshold and ``ties`` equal to it, from floor up."""
    sums, equals = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, vocab_size, BLOCK_V):
        x = choosable(row_ptr, first + tl.arange(0, BLOCK_V), vocab_size)
        weight = weight_of(x, top, temperature)
        sums += tl.where((x > threshold) & (weight >= floor), weight, 0.0)
        equals += tl.where(x == threshold, 1.0, 0.0)
    each = weight_of(threshold, top, temperature)
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
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_row
    temperature = tl.full([], 1.0, tl.float32)
    top_k = tl.full([], 0.0, tl.float32)
    top_p = tl.full([], 1.0, tl.float32)
    floor = tl.full([], 0.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * stride_temperature).to(tl.float32)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row * stride_top_k).to(tl.float32)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row * stride_top_p).to(tl.float32)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row * stride_min_p).to(tl.float32)
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

    # Kept is what lies above the threshold, and the first ``ties`` columns equal to it.
    limited = (top_k > 0) & (top_k < vocab_size)
    searched = limited & (top_k > 1)
    kth, above = cut_of_row(
        row_ptr, vocab_size, tl.where(searched, bottom, top), top, top_k, top, temperature,
        BY_WEIGHT=False, BLOCK_V=BLOCK_V,
    )  # fmt: skip
    threshold = tl.where(limited, kth, float("-inf"))
    ties = tl.where(limited, top_k - above, 0.0)
    if top_p < 1.0:
        candidates = kept_weight(
            row_ptr, vocab_size, threshold, ties, 0.0, top, temperature, BLOCK_V
        )
        wanted = top_p * candidates
        least, above = cut_of_row(
            row_ptr, vocab_size, tl.maximum(bottom, threshold), top, wanted, top, temperature,
            BY_WEIGHT=True, BLOCK_V=BLOCK_V,
        )  # fmt: skip
        each = weight_of(least, top, temperature)
        needed = tl.ceil((wanted - above) / each)
        needed = tl.where(each > 0, tl.maximum(needed, 1.0), vocab_size)
        # No more than top-k left, which only rounding could exceed.
        ties = tl.where(least == threshold, tl.minimum(needed, ties), needed)
        threshold = least

    total = kept_weight(row_ptr, vocab_size, threshold, ties, floor, top, temperature, BLOCK_V)
    target = tl.load(u_ptr + row).to(tl.float32) * total

    chosen = tl.full([], NO_COLUMN, tl.int32)
    last = tl.full([], 0, tl.int32)
    walked = tl.full([], 0.0, tl.float32)
    equals = tl.full([], 0.0, tl.float32)
    first = tl.full([], 0, tl.int32)
    while (first < vocab_size) & (chosen == NO_COLUMN):
        v = first + tl.arange(0, BLOCK_V)
        x = choosable(row_ptr, v, vocab_size)
        weight = weight_of(x, top, temperature)
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
    tl.store(y_ptr + row, tl.where(chosen == NO_COLUMN, last, chosen))


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
    filters = (temperature, top_k, top_p, min_p)
    _sample_kernel.launch(
        (num_rows,),
        out,
        logits,
        u,
        *filters,
        logits.stride(0),
        *(int(f is not None and f.shape[0] > 1) for f in filters),
        vocab_size,
        BLOCK_V=SAMPLE_BYTES // logits.element_size(),
        num_warps=SAMPLE_WARPS,
    )
    return out
