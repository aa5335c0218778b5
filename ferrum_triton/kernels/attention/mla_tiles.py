"""Tiles of latents folded into a softmax: a loop through tensor maps and one through pointers.

Tensor maps are chosen on Hopper where each tile lies in one block of a cache of the queries' dtype;
pointers everywhere else.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.attention.softmax import Softmax, fold_tile, weigh


@triton.jit
def widen_e4m3(code):
    """Bytes of float8_e4m3fn as float32, in integers: not every GPU converts them.

    A float32 of the same exponent bits and mantissa is 2^-120 times the value, subnormals
    included.
    """
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def load_latents(address, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """Part of a tile's rows, in ``dtype``, 0 where masked; FP8 is "", "native" or "integer"."""
    x = tl.load(address, mask=mask, other=0)
    if FP8 == "native":
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == "integer":
        x = widen_e4m3(x)
    return x.to(dtype)


class Latents(NamedTuple):
    """The cache, and the keys of one sequence in it.

    Attributes:
        ptr: cache, read where there are no tensor maps.
        latent_desc, rope_desc: tensor maps of its two parts, or None.
        stride_block: stride of its blocks.
        num_blocks: blocks it has.
        table_ptr: the sequence's block table, or of a contiguous cache None.
        sequence: the sequence's index, which names its block in a contiguous cache.
    """

    ptr: Any
    latent_desc: Any
    rope_desc: Any
    stride_block: Any
    num_blocks: Any
    table_ptr: Any
    sequence: Any


class Queries(NamedTuple):
    """A block of rows, which are (query, head).

    Attributes:
        latent, rope: the two parts of the queries, [BLOCK_M, BLOCK_L] and [BLOCK_M, BLOCK_R].
        bound: keys each row sees, [BLOCK_M].
        scale_log2: factor of scores.
    """

    latent: Any
    rope: Any
    bound: Any
    scale_log2: Any


@triton.jit
def attend_pointers(state, queries, cache, start, end, VARIANT: tl.constexpr):
    """Fold the keys [start, end) into the softmax, through pointers.

    Every tile is masked: a second loop, for tiles that need no mask, takes registers that 64 rows
    do not leave, and the mask is little beside products 576 columns deep.
    """
    BLOCK_N: tl.constexpr = VARIANT.block_n
    BLOCK_L: tl.constexpr = VARIANT.block_l
    BLOCK_R: tl.constexpr = VARIANT.block_r
    LORA: tl.constexpr = VARIANT.lora
    ROPE: tl.constexpr = VARIANT.rope
    BLOCK_SIZE: tl.constexpr = VARIANT.block_size
    STRIDE_ROW: tl.constexpr = VARIANT.stride_row
    FP8: tl.constexpr = VARIANT.fp8
    PRECISION: tl.constexpr = VARIANT.precision
    DTYPE: tl.constexpr = queries.latent.dtype
    tile = tl.arange(0, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        n = first + tile
        within = n < end
        if cache.table_ptr is None:
            origin = cache.sequence * cache.stride_block
            row = n
        elif VARIANT.one_block:
            block = tl.load(cache.table_ptr + first // BLOCK_SIZE).to(tl.int64)
            known = (block >= 0) & (block < cache.num_blocks)
            within = within & known
            origin = tl.where(known, block, 0) * cache.stride_block
            origin += tl.full([], first % BLOCK_SIZE, tl.int64) * STRIDE_ROW
            row = tile
        else:
            block = tl.load(cache.table_ptr + n // BLOCK_SIZE, mask=within, other=-1).to(tl.int64)
            within = within & (block >= 0) & (block < cache.num_blocks)
            origin = block[:, None] * cache.stride_block
            row = n % BLOCK_SIZE
        address = cache.ptr + origin + row.to(tl.int64)[:, None] * STRIDE_ROW
        col = tl.arange(0, BLOCK_L)[None, :]
        rope_col = tl.arange(0, BLOCK_R)[None, :]
        latent_mask = within[:, None] if LORA == BLOCK_L else within[:, None] & (col < LORA)
        rope_mask = within[:, None] if ROPE == BLOCK_R else within[:, None] & (rope_col < ROPE)
        # Values too: rows that no query sees are cleared, since 0 times what they hold may be NaN.
        latent = load_latents(address + col, latent_mask, DTYPE, FP8)  # [BLOCK_N, BLOCK_L]
        rope = load_latents(address + LORA + rope_col, rope_mask, DTYPE, FP8)

        scores = tl.dot(queries.latent, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(queries.rope, tl.trans(rope), scores, input_precision=PRECISION)
        scores *= queries.scale_log2
        # A key on no block lies past every bound: one comparison for each score masks them all.
        n = tl.where(within, n, 0x7FFFFFFF)
        scores = tl.where(n[None, :] < queries.bound[:, None], scores, float("-inf"))
        # The scale may be negative, so it is in the scores already.
        state = fold_tile(state, scores, 1.0, latent, PRECISION)
    return state


@triton.jit
def entry_at(table_ptr, sequence, n, BLOCK_SIZE: tl.constexpr):
    """What names the block that holds key n: a contiguous cache has one for each sequence."""
    if table_ptr is None:
        entry = sequence
    else:
        entry = tl.load(table_ptr + n // BLOCK_SIZE)
    return entry


@triton.jit
def attend_tma(
    state,
    queries,
    cache,
    start,
    whole,  # keys before it are seen by every row
    end,  # the largest bound
    VARIANT: tl.constexpr,
):
    """Fold the keys [start, end) into the softmax, through tensor maps.

    The branches of the loop are there for what Triton 3.6 makes of it on sm_90:

    - All work on a tile is one branch, which Triton moves behind the next tile's loads, so that
      they run meanwhile. Otherwise it puts the loads last, and waits for them at once.
    - Each product that makes scores has a branch to itself. Where a product leads to another in
      the same block of code, Triton lets 8 warps share rows only; tensor cores take 64 at a time,
      so either half of the warps would work out all scores. Like this each takes half of the keys.
    - The rotary part's product is in both arms of its branch: with a single use of that tile
      Triton would give it a third buffer, for which shared memory has no room.
    """
    BLOCK_M: tl.constexpr = VARIANT.block_m
    BLOCK_N: tl.constexpr = VARIANT.block_n
    BLOCK_L: tl.constexpr = VARIANT.block_l
    BLOCK_R: tl.constexpr = VARIANT.block_r
    BLOCK_SIZE: tl.constexpr = VARIANT.block_size
    PRECISION: tl.constexpr = VARIANT.precision
    NUM_STAGES: tl.constexpr = VARIANT.num_stages
    tile = tl.arange(0, BLOCK_N)
    acc, row_max = state.acc, state.row_max
    # Summed over the tile's columns at the end: a sum across warps takes barriers.
    row_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    next_entry = entry_at(cache.table_ptr, cache.sequence, start, BLOCK_SIZE)
    for first in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        # Looked up a tile ahead: a tile's load should not wait for its table entry.
        entry = next_entry
        following = tl.minimum(first + BLOCK_N, end - 1)
        next_entry = entry_at(cache.table_ptr, cache.sequence, following, BLOCK_SIZE)
        known = (entry >= 0) & (entry < cache.num_blocks)
        block = tl.where(known, entry, cache.num_blocks).to(tl.int32)
        # The last tile ends with the last key: no row past it, which may hold NaN, is read. In
        # front of it are keys of the tile before, which are masked, or rows before the block's
        # first, which read as zeros. So do those of no block.
        at = tl.minimum(first, end - BLOCK_N)
        row = at if cache.table_ptr is None else at - first + first % BLOCK_SIZE
        latent = cache.latent_desc.load([block, row, 0]).reshape(BLOCK_N, BLOCK_L)
        rope = cache.rope_desc.load([block, row, 0]).reshape(BLOCK_N, BLOCK_R)
        if known:
            scores = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
            if first < end:  # always
                scores = tl.dot(queries.latent, tl.trans(latent), input_precision=PRECISION)
            if first + BLOCK_N <= whole:
                scores = tl.dot(queries.rope, tl.trans(rope), scores, input_precision=PRECISION)
                scores *= queries.scale_log2
            else:
                scores = tl.dot(queries.rope, tl.trans(rope), scores, input_precision=PRECISION)
                n = tl.where(tile >= first - at, at + tile, 0x7FFFFFFF)
                hidden = n[None, :] >= queries.bound[:, None]
                scores = tl.where(hidden, float("-inf"), scores * queries.scale_log2)
            weights, rescale, row_max = weigh(scores, 1.0, row_max)
            row_sum = row_sum * rescale[:, None] + weights
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
    return Softmax(acc, row_max, tl.sum(row_sum, axis=1))
