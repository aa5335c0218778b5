"""What the writers of a paged pool share: where tokens go, quantisation, stores in any layout.

The layouts differ in strides only: a cached vector is one piece, or pieces of PIECE elements that
lie ``stride_piece`` apart (keys of ``vllm_x``: x elements; its values: one).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.rope import store_heads
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.ops.kv_pool import pool_strides, scale_strides, token_view

# What kernels call the quantised dtypes.
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@triton.jit
def sequence_of(token, cu_seqlens_q_ptr, num_seqs, BLOCK_S: tl.constexpr):
    """The sequence each token belongs to: how many end at or before it.

    Counted, not searched for: a search is a chain of loads, each waiting for the one before.
    """
    seq = tl.zeros(token.shape, tl.int32)
    for first in range(0, num_seqs, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        end = tl.load(cu_seqlens_q_ptr + 1 + s, mask=s < num_seqs, other=0)
        ended = (end[None, :] <= token[:, None]) & (s < num_seqs)[None, :]
        seq += tl.sum(ended.to(tl.int32), axis=1)
    return seq.to(tl.int64)


@triton.jit
def place_tokens(
    token,  # [tokens], int64
    in_batch,
    slots_ptr,  # [num_tokens] or None
    block_tables_ptr,  # [num_seqs, max_blocks], used without slots
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    stride_block_tables_seq,
    block_size,
    num_seqs,
    max_blocks,
    num_blocks,
    ONE_SEQUENCE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Block and offset of every token, whether it has a place, and its position or -1."""
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
        placed = (slot >= 0) & (slot < num_blocks.to(tl.int64) * block_size)
        slot = tl.where(placed, slot, 0).to(tl.int32)
        block = (slot // block_size).to(tl.int64)
        position = tl.full(token.shape, -1, tl.int64)
        offset = slot % block_size
    else:
        if cu_seqlens_q_ptr is not None:
            seq = sequence_of(token, cu_seqlens_q_ptr, num_seqs, BLOCK_S)
            first = tl.load(cu_seqlens_q_ptr + seq, mask=in_batch & (seq < num_seqs), other=0)
            local = token - first
        elif ONE_SEQUENCE:
            seq = tl.zeros_like(token)
            local = token
        else:
            seq = token
            local = tl.zeros_like(token)
        known = in_batch & (seq < num_seqs) & (local >= 0)
        start = tl.load(pos_offsets_ptr + seq, mask=known, other=0).to(tl.int64)
        position = tl.where(known, start + local, -1)
        placed = (position >= 0) & (position < max_blocks.to(tl.int64) * block_size)
        slot = tl.where(placed, position, 0).to(tl.int32)
        entry = block_tables_ptr + seq * stride_block_tables_seq + slot // block_size
        block = tl.load(entry, mask=placed, other=-1).to(tl.int64)
        placed = placed & (block >= 0) & (block < num_blocks)
        offset = slot % block_size
    return block, offset.to(tl.int64), placed, position


@triton.jit
def magnitude_bits(x):
    """|x| as an integer that orders like it, with infinity and then NaN above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode(x, factor, FORMAT: tl.constexpr):
    """Codes of x · factor: signed bytes (FORMAT "int8") or the bits of E4M3 (FORMAT "fp8").

    E4M3 in integers, since no GPU before sm_89 converts to it and AMD's have another format: scaled
    by 2^-120, a value's exponent is E4M3's and its subnormals are E4M3's, so that rounding away the
    low 20 bits of the mantissa leaves the code.
    """
    y = x * factor
    y = tl.where(y == y, y, 0.0)
    if FORMAT == "int8":
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # At 1.5 * 2^23 the unit in the last place is one: the sum rounds to the nearest even.
        code = ((y + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        bits = (y * 7.52316384526264e-37).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        code = (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def store_cached(
    cache_ptr,
    scales_ptr,  # None where nothing is quantised
    x0,
    x1,
    tail,
    head,
    block,
    offset,
    placed,
    stride_block,
    stride_head,
    stride_slot,
    stride_piece,
    stride_scales_block,
    stride_scales_head,
    stride_scales_slot,
    PIECE: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads into their slots of one cache, quantised if FORMAT says so."""
    if FORMAT != "":
        largest = tl.max(tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), axis=2)
        if BLOCK_REST > 0:
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=2))
        maximum = largest.to(tl.float32, bitcast=True)
        maximum = tl.where(maximum < 1e-8, 1e-8, maximum)
        limit = tl.full(maximum.shape, 127.0 if FORMAT == "int8" else 448.0, tl.float32)
        factor = tl.div_rn(limit, maximum)[:, :, None]
        x0, x1 = encode(x0, factor, FORMAT), encode(x1, factor, FORMAT)
        if BLOCK_REST > 0:
            tail = encode(tail, factor, FORMAT)
        scales = scales_ptr + (block * stride_scales_block + offset * stride_scales_slot)[:, None]
        scales += (head * stride_scales_head)[None, :]
        scale = tl.div_rn(maximum, limit).to(scales_ptr.dtype.element_ty)
        tl.store(scales, scale, mask=placed[:, None] & (head >= 0)[None, :])
    start = cache_ptr + (block * stride_block + offset * stride_slot)[:, None]
    start += (head * stride_head)[None, :]
    store_heads(
        start[:, :, None],
        placed[:, None, None],
        x0,
        x1,
        tail,
        stride_piece,
        PIECE,
        HALF,
        REST,
        BLOCK_HALF,
        BLOCK_REST,
        INTERLEAVED,
    )


def pool_arguments(
    cache: Tensor, scales: Tensor | None, layout: str
) -> tuple[Tensor, Any, tuple, tuple]:
    """What the writers take of one cache: its memory, its scales and the strides of both."""
    strides = pool_strides(cache, layout)
    if cache.dtype not in FORMATS:
        return cache, None, strides, (0, 0, 0)
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    return cache, scales, strides, scale_strides(scales, layout)


def pool_shapes(k_cache, layout, block_tables, cu_seqlens_q) -> tuple[int, tuple, dict[str, Any]]:
    """block_size; num_seqs, max_blocks and num_blocks; and the constexprs of pool and placement."""
    num_blocks, block_size = token_view(k_cache, layout).shape[:2]
    num_seqs, max_blocks = (0, 0) if block_tables is None else block_tables.shape
    pieces = (k_cache.shape[-1], 1) if layout == "vllm_x" else (0, 0)
    return (
        block_size,
        (num_seqs, max_blocks, num_blocks),
        {
            "FORMAT": FORMATS.get(k_cache.dtype, ""),
            "K_PIECE": pieces[0],
            "V_PIECE": pieces[1],
            "ONE_SEQUENCE": num_seqs == 1,
            # One load covers the sequences of most batches; more take turns.
            "BLOCK_S": 1 if cu_seqlens_q is None else min(next_power_of_2(max(num_seqs, 1)), 128),
        },
    )
