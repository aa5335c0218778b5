"""What the writers of a paged pool share: where tokens go, quantisation, stores in any layout.

The layouts differ in strides only: a cached vector is one piece, or pieces of a few elements that
lie ``stride_piece`` apart (keys of ``vllm_x``: x elements; its values: one).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.heads import Heads, store_heads
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.ops.kv_pool import pool_strides, scale_strides, token_view

# What kernels call the quantised dtypes.
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class PoolFormat:
    """How vectors are stored in a pool.

    Attributes:
        codes: ``"int8"`` or ``"fp8"``, or ``""`` in a pool of floats.
        k_piece: elements of a piece of a key; 0 where a key is one piece.
        v_piece: elements of a piece of a value; 0 where a value is one piece.
    """

    codes: str
    k_piece: int
    v_piece: int


class PoolStrides(NamedTuple):
    """Strides of a cache, in elements."""

    block: Any
    head: Any
    slot: Any
    piece: Any


class ScaleStrides(NamedTuple):
    """Strides of a cache's scales, in elements."""

    block: Any
    head: Any
    slot: Any


class Pool(NamedTuple):
    """One cache, of keys or of values, and its scales."""

    ptr: Any
    scales_ptr: Any  # None where nothing is quantised
    strides: Any  # PoolStrides
    scale_strides: Any  # ScaleStrides


class Placement(NamedTuple):
    """What tells where tokens go: slots, or block tables and the sequences' positions."""

    slots_ptr: Any  # [num_tokens] or None
    block_tables_ptr: Any  # [num_seqs, max_blocks], used without slots
    pos_offsets_ptr: Any  # [num_seqs]
    cu_seqlens_q_ptr: Any  # [num_seqs + 1] or None
    stride_block_tables_seq: Any
    block_size: Any
    num_seqs: Any
    max_blocks: Any
    num_blocks: Any


class Places(NamedTuple):
    """Where tokens go: [tokens] each."""

    block: Any  # int64
    offset: Any  # int64, inside the block
    known: Any  # whether there is such a place
    position: Any  # in the sequence, int64; -1 where it is not known


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
    in_batch,  # [tokens]
    placement,
    ONE_SEQUENCE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The :class:`Places` of tokens."""
    block_size, num_blocks = placement.block_size, placement.num_blocks
    if placement.slots_ptr is not None:
        slot = tl.load(placement.slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
        known = (slot >= 0) & (slot < num_blocks.to(tl.int64) * block_size)
        slot = tl.where(known, slot, 0).to(tl.int32)
        block = (slot // block_size).to(tl.int64)
        position = tl.full(token.shape, -1, tl.int64)
    else:
        cu_seqlens_q_ptr, num_seqs = placement.cu_seqlens_q_ptr, placement.num_seqs
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
        in_sequence = in_batch & (seq < num_seqs) & (local >= 0)
        start = tl.load(placement.pos_offsets_ptr + seq, mask=in_sequence, other=0).to(tl.int64)
        position = tl.where(in_sequence, start + local, -1)
        in_table = (position >= 0) & (position < placement.max_blocks.to(tl.int64) * block_size)
        slot = tl.where(in_table, position, 0).to(tl.int32)
        table = placement.block_tables_ptr + seq * placement.stride_block_tables_seq
        block = tl.load(table + slot // block_size, mask=in_table, other=-1).to(tl.int64)
        known = in_table & (block >= 0) & (block < num_blocks)
    return Places(block, (slot % block_size).to(tl.int64), known, position)


@triton.jit
def magnitude_bits(x):
    """|x| as an integer that orders like it, with infinity and then NaN above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e4m3_bits(y):
    """The bits of E4M3 that are nearest to y, float32 from -448 to 448, as bytes.

    In integers, since no GPU before sm_89 converts to it and AMD's have another format: of normal
    codes the low 20 bits of the mantissa are rounded away, and 120 is taken off the exponent. Those
    below are multiples of 2^-9, rounded where the unit in the last place is one.
    """
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 2^-6 and 1.5 * 2^23 by their bits.
    below = (tl.abs(y) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(magnitude < 0x3C800000, below, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(x, factor, FORMAT: tl.constexpr):
    """Codes of x · factor: signed bytes ("int8") or the bits of E4M3 ("fp8")."""
    y = x * factor
    y = tl.where(y == y, y, 0.0)
    if FORMAT.codes == "int8":
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # At 1.5 * 2^23 the unit in the last place is one: the sum rounds to the nearest even.
        code = ((y + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        code = e4m3_bits(tl.minimum(tl.maximum(y, -448.0), 448.0))
    return code


@triton.jit
def store_cached(
    pool,
    heads,
    head,  # [heads], int64: KV heads
    places,
    PIECE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Heads into their places of one cache, quantised as FORMAT, a PoolFormat, says."""
    if FORMAT.codes != "":
        x0, x1, tail = heads
        largest = tl.max(tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), axis=2)
        if TILE.block_rest > 0:
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=2))
        maximum = largest.to(tl.float32, bitcast=True)
        maximum = tl.where(maximum < 1e-8, 1e-8, maximum)
        limit = tl.full(maximum.shape, 127.0 if FORMAT.codes == "int8" else 448.0, tl.float32)
        factor = tl.div_rn(limit, maximum)[:, :, None]
        x0, x1 = encode(x0, factor, FORMAT), encode(x1, factor, FORMAT)
        if TILE.block_rest > 0:
            tail = encode(tail, factor, FORMAT)
        heads = Heads(x0, x1, tail)
        strides = pool.scale_strides
        slot = places.block * strides.block + places.offset * strides.slot
        scales = pool.scales_ptr + slot[:, None]
        scales += (head * strides.head)[None, :]
        scale = tl.div_rn(maximum, limit).to(pool.scales_ptr.dtype.element_ty)
        tl.store(scales, scale, mask=places.known[:, None] & (head >= 0)[None, :])
    slot = places.block * pool.strides.block + places.offset * pool.strides.slot
    start = pool.ptr + slot[:, None]
    start += (head * pool.strides.head)[None, :]
    mask = places.known[:, None, None]
    store_heads(start[:, :, None], mask, heads, pool.strides.piece, PIECE, TILE)


def pool_arguments(name: str, cache: Tensor, scales: Tensor | None, layout: str) -> dict[str, Any]:
    """What the writers take of the cache ``name``, by parameter name."""
    quantised = cache.dtype in FORMATS
    cache_strides = PoolStrides(*pool_strides(cache, layout))
    scales_strides = ScaleStrides(*(scale_strides(scales, layout) if quantised else (0, 0, 0)))
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    return {
        f"{name}_cache_ptr": cache,
        f"{name}_scales_ptr": scales if quantised else None,
        f"{name}_cache_strides": cache_strides,
        f"{name}_scales_strides": scales_strides,
    }


def placement_arguments(
    k_cache: Tensor,
    layout: str,
    slots: Tensor | None,
    block_tables: Tensor | None,
    pos_offsets: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> dict[str, Any]:
    """What the writers take to place tokens, by parameter name."""
    num_blocks, block_size = token_view(k_cache, layout).shape[:2]
    num_seqs, max_blocks = (0, 0) if block_tables is None else block_tables.shape
    return {
        "slots_ptr": slots,
        "block_tables_ptr": block_tables,
        "pos_offsets_ptr": pos_offsets,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "stride_block_tables_seq": 0 if block_tables is None else block_tables.stride(0),
        "block_size": block_size,
        "num_seqs": num_seqs,
        "max_blocks": max_blocks,
        "num_blocks": num_blocks,
        "ONE_SEQUENCE": num_seqs == 1,
        # One load covers the sequences of most batches; more take turns.
        "BLOCK_S": 1 if cu_seqlens_q is None else min(next_power_of_2(max(num_seqs, 1)), 128),
    }


@functools.lru_cache(64)
def pool_format(dtype: torch.dtype, layout: str, x: int) -> PoolFormat:
    """How a pool of ``dtype`` stores vectors; x: the last dimension of ``vllm_x``'s keys."""
    k_piece, v_piece = (x, 1) if layout == "vllm_x" else (0, 0)
    return PoolFormat(FORMATS.get(dtype, ""), k_piece, v_piece)
