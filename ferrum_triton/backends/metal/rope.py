"""Heads normalised, rotated and written to a cache as one shader: a simdgroup a head of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.backends.metal.pool import Pool, contiguous, pages
from ferrum_triton.backends.metal.shader import (
    LANES,
    Shader,
    all_there,
    delivered,
    strides,
    types_of,
)
from ferrum_triton.ops import paged_cache, rope
from ferrum_triton.ops.kv_pool import LEAST_MAXIMUM, LIMITS

PREPARE = Shader(
    "rope",
    "prepare_heads",
    "q k_cache v_cache k_scales v_scales qkv q_weight k_weight cosines sines positions slots "
    "block_tables pos_offsets cu_seqlens_q",
    "num_tokens num_heads num_kv_heads head_dim half_rotary_dim max_positions qk_mode eps "
    "has_positions pos_offset placement cache_len num_blocks block_size num_seqs max_blocks "
    "stride_table stride_x_token stride_x_head stride_q_token stride_q_head "
    "stride_k_block stride_k_head stride_k_slot stride_k_piece "
    "stride_v_block stride_v_head stride_v_slot stride_v_piece "
    "stride_k_scales_block stride_k_scales_head stride_k_scales_slot "
    "stride_v_scales_block stride_v_scales_head stride_v_scales_slot",
    strided="q k_cache v_cache k_scales v_scales qkv block_tables",
)
THREADS = 128
TO_SLOTS, COUNTED, ONE_SEQUENCE, ONE_EACH, PACKED = range(5)  # where tokens go, as in the source


class Place(NamedTuple):
    """Where tokens go: to slots, else where block tables say, else counted up from cache_len."""

    cache_len: int = 0
    slots: Tensor | None = None
    block_tables: Tensor | None = None
    pos_offsets: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    def placement(self) -> int:
        if self.slots is not None:
            return TO_SLOTS
        if self.block_tables is None:
            return COUNTED
        if self.cu_seqlens_q is not None:
            return PACKED
        return ONE_SEQUENCE if self.block_tables.shape[0] == 1 else ONE_EACH


COUNTED_UP = Place()


def _prepare(
    q: Tensor,
    x: Tensor,
    heads: tuple[int, int],
    weights: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor],
    positions: Tensor | None,
    pos_offset: int,
    eps: float,
    qk_mode: int,
    pool: Pool,
    place: Place = COUNTED_UP,
) -> None:
    """Write the queries of x [num_tokens, heads, head_dim] to q [num_tokens, num_heads, head_dim],
    and its keys and values to a pool.
    """
    if x.numel() == 0:
        return
    cos, sin = (table.contiguous() for table in tables)
    given = {
        "POSITION": positions,
        "SLOT": place.slots,
        "BLOCK": place.block_tables,
        "OFFSET": place.pos_offsets,
        "START": place.cu_seqlens_q,
    }
    types = {
        "SCALAR": x.dtype,
        "WEIGHT_TABLE": cos.dtype,
        **pool.types(),
        "LIMIT": f"{LIMITS.get(pool.k.dtype, 0.0)}f",
        "LEAST_MAXIMUM": f"{LEAST_MAXIMUM}f",
        **types_of(given),
    }
    num_seqs, max_blocks = (0, 0) if place.block_tables is None else place.block_tables.shape
    params = {
        "num_tokens": x.shape[0],
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": x.shape[2],
        "half_rotary_dim": cos.shape[1],
        "max_positions": cos.shape[0],
        "qk_mode": qk_mode,
        "eps": float(eps),
        "has_positions": int(positions is not None),
        "pos_offset": pos_offset,
        "placement": place.placement(),
        "cache_len": place.cache_len,
        "num_seqs": num_seqs,
        "max_blocks": max_blocks,
        "stride_table": 0 if place.block_tables is None else place.block_tables.stride(0),
        **strides("x", "token head", x.stride()[:2]),
        **strides("q", "token head", q.stride()[:2]),
        **pool.params(),
    }
    lists = [
        ids if ids is None or name == "BLOCK" else ids.contiguous() for name, ids in given.items()
    ]
    wide = [None if weight is None else weight.float().contiguous() for weight in weights]
    given_buffers = (q, pool.k, pool.v, pool.k_scales, pool.v_scales, x, *wide, cos, sin, *lists)
    buffers = all_there(given_buffers, x[0, 0, :1])
    num_simdgroups = x.shape[0] * x.shape[1]
    groups = -(-num_simdgroups // (THREADS // LANES))
    PREPARE.launch(types, buffers, params, groups=groups, threads=THREADS)


def _queries(like: Tensor, shape: tuple[int, int, int], out: Tensor | None) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device) if out is None else out


@rope.qk_norm_rope.impl("metal")
def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = rope.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    q = _queries(x, (num_heads, num_tokens, head_dim), out)
    heads, weights = (num_heads, 0), (weight, weight)
    by_token = q.transpose(0, 1)
    pool = contiguous(x[None, :0], x[None, :0])  # of no keys
    _prepare(by_token, x, heads, weights, (cos, sin), positions, pos_offset, eps, qk_mode, pool)
    return q


def _split(qkv: Tensor, heads: tuple[int, int]) -> Tensor:
    """Rows as [num_tokens, heads, head_dim]; shares memory."""
    count = heads[0] + 2 * heads[1]
    return qkv.as_strided(
        (qkv.shape[0], count, qkv.shape[1] // count),
        (qkv.stride(0), qkv.shape[1] // count, 1),
        qkv.storage_offset(),
    )


@rope.split_qkv_norm_rope.impl("metal")
def split_qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = rope.NORM_ROPE,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    heads = (num_heads, num_kv_heads)
    x = _split(qkv, heads)
    outs = out or (None,) * 3
    counts = (num_heads, num_kv_heads, num_kv_heads)
    shapes = [(count, x.shape[0], x.shape[2]) for count in counts]
    q, k, v = (_queries(qkv, shape, o) for shape, o in zip(shapes, outs, strict=True))
    weights, tables = (q_weight, k_weight), (cos, sin)
    by_token, pool = q.transpose(0, 1), contiguous(k[None], v[None])
    _prepare(by_token, x, heads, weights, tables, positions, pos_offset, eps, qk_mode, pool)
    return q, k, v


@rope.split_qkv_norm_rope_into_cache.impl("metal")
def split_qkv_norm_rope_into_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    cache_len: int = 0,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = rope.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    heads = (num_heads, k_cache.shape[0])
    x = _split(qkv, heads)
    q = _queries(qkv, (num_heads, x.shape[0], x.shape[2]), out)
    weights, tables = (q_weight, k_weight), (cos, sin)
    by_token, pool = q.transpose(0, 1), contiguous(k_cache[None], v_cache[None])
    place = Place(cache_len, slots)
    _prepare(by_token, x, heads, weights, tables, positions, pos_offset, eps, qk_mode, pool, place)
    return q


@paged_cache.split_qkv_norm_rope_into_paged_cache.impl("metal")
def split_qkv_norm_rope_into_paged_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    slots: Tensor | None = None,
    block_tables: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    positions: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    eps: float = 1e-6,
    qk_mode: int = rope.NORM_ROPE,
    layout: str = "hnd",
    *,
    out: Tensor | None = None,
) -> Tensor:
    if k_cache.dtype == torch.float8_e4m3fn:  # which MPS has no tensors of
        q = paged_cache.split_qkv_norm_rope_into_paged_cache.reference(
            qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, slots, block_tables,
            pos_offsets, cu_seqlens_q, positions, k_scales, v_scales, eps, qk_mode, layout,
        )  # fmt: skip
        return delivered(q, out)
    pool = pages(k_cache, v_cache, k_scales, v_scales, layout)
    heads = (num_heads, pool.num_kv_heads)
    x = _split(qkv, heads)
    q = _queries(qkv, (x.shape[0], num_heads, x.shape[2]), out)
    weights, tables = (q_weight, k_weight), (cos, sin)
    place = Place(0, slots, block_tables, pos_offsets, cu_seqlens_q)
    _prepare(q, x, heads, weights, tables, positions, 0, eps, qk_mode, pool, place)
    return q
