"""Paged caches in the ``"torch"`` provider: on a CPU the host reads tables and lengths itself.

The references take any pool and any table without looking at their values, at the price of a copy
of the pool a call. Here each sequence's pages are found first; those that lie one after the other
in an ``nhd`` pool are read where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferrum_triton.backends.torch_ops import rotate_halves, rotate_pairs
from ferrum_triton.ops import paged_cache, rope
from ferrum_triton.ops.attention import paged_decode, paged_varlen
from ferrum_triton.ops.kv_pool import token_view


def _pages(table: Tensor, length: int, pool: Tensor) -> list[int] | None:
    """Pages of a sequence's first ``length`` positions; None if one is not in the pool."""
    num_blocks, block_size = pool.shape[:2]
    count = -(-length // block_size)
    pages = table[:count].tolist()
    known = len(pages) == count and all(0 <= page < num_blocks for page in pages)
    return pages if known else None


def _vectors(pool: Tensor, pages: list[int], start: int, end: int) -> Tensor:
    """[end - start, num_kv_heads, head_dim] of a sequence's positions, a view if it can be one."""
    size = pool.shape[1]
    first = start // size
    pages = pages[first:]
    if pages == list(range(pages[0], pages[0] + len(pages))):
        chosen = pool[pages[0] : pages[0] + len(pages)]
    else:
        chosen = pool[torch.tensor(pages)]
    return chosen.flatten(0, 1)[start - first * size : end - first * size]


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, start: int, window: int, scale) -> Tensor:
    """Attention of q [q_len, num_heads, head_dim], the first at position ``first``, over keys and
    values [keys, num_kv_heads, head_dim], the first at position ``start``.
    """
    mask = None
    if q.shape[0] > 1:
        position = torch.arange(first, first + q.shape[0])[:, None]
        key = torch.arange(start, start + k.shape[0])
        mask = key <= position
        if window:
            mask &= key > position - window
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[0].transpose(0, 1)


def _plain(q: Tensor, k_cache: Tensor, layout: str, sinks, lse, softcap: float) -> bool:
    """Whether torch's fused attention computes a call."""
    same = k_cache.dtype == q.dtype and layout != "vllm_x"
    return same and sinks is None and lse is None and softcap == 0 and q.device.type == "cpu"


@paged_decode.paged_decode_attention.impl("torch")
def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    layout: str = "hnd",
    batch_invariant: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A sequence after the other by torch's fused attention; the reference for what it lacks."""
    q_len = q.shape[1]
    found: list[tuple[int, list[int]]] | None = None
    if _plain(q, k_cache, layout, sinks, lse, softcap):
        found = _sequences(token_view(k_cache, layout), block_tables, kv_lens.tolist(), q_len)
    if found is None:
        y = paged_decode.paged_decode_attention.reference(
            q, k_cache, v_cache, block_tables, kv_lens, k_scales, v_scales, sinks, lse,
            softmax_scale, sliding_window, softcap, layout, batch_invariant,
        )  # fmt: skip
        return y.contiguous() if out is None else out.copy_(y)
    y = torch.zeros(q.shape, dtype=q.dtype) if out is None else out.zero_()
    pools = [token_view(cache, layout) for cache in (k_cache, v_cache)]
    for b, (length, pages) in enumerate(found):
        if length:
            start = max(0, length - q_len + 1 - sliding_window) if sliding_window else 0
            k, v = (_vectors(pool, pages, start, length) for pool in pools)
            y[b] = _attend(q[b], k, v, length - q_len, start, sliding_window, softmax_scale)
    return y


def _sequences(
    pool: Tensor, tables: Tensor, lengths: list[int], q_len: int
) -> list[tuple[int, list[int]]] | None:
    """Length and pages of each sequence; None if one has fewer keys than queries, or no page."""
    found = []
    for table, length in zip(tables, lengths, strict=True):
        length = min(max(length, 0), tables.shape[1] * pool.shape[1])
        pages = _pages(table, length, pool)
        if pages is None or 0 < length < q_len:
            return None
        found.append((length, pages))
    return found


@paged_varlen.paged_varlen_attention.impl("torch")
def paged_varlen_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    pos_offsets: Tensor,
    block_tables: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    layout: str = "hnd",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A sequence after the other by torch's fused attention; the reference for what it lacks."""
    found: list[tuple[int, int, int, list[int]]] | None = None
    if _plain(q, k_cache, layout, sinks, lse, softcap):
        pool = token_view(k_cache, layout)
        found = _spans(pool, block_tables, cu_seqlens_q.tolist(), pos_offsets.tolist(), q.shape[0])
    if found is None:
        y = paged_varlen.paged_varlen_attention.reference(
            q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales, sinks,
            lse, max_q_len, softmax_scale, sliding_window, softcap, layout,
        )  # fmt: skip
        return y.contiguous() if out is None else out.copy_(y)
    y = torch.zeros(q.shape, dtype=q.dtype) if out is None else out.zero_()
    pools = [token_view(cache, layout) for cache in (k_cache, v_cache)]
    for begin, end, first, pages in found:
        if begin < end:
            length = first + end - begin
            start = max(0, first + 1 - sliding_window) if sliding_window else 0
            k, v = (_vectors(pool, pages, start, length) for pool in pools)
            y[begin:end] = _attend(q[begin:end], k, v, first, start, sliding_window, softmax_scale)
    return y


def _spans(
    pool: Tensor, tables: Tensor, cuts: list[int], offsets: list[int], num_tokens: int
) -> list[tuple[int, int, int, list[int]]] | None:
    """First and last token of each sequence, its position and pages; None for what is unusual."""
    capacity = tables.shape[1] * pool.shape[1]
    found = []
    for table, begin, end, first in zip(tables, cuts, cuts[1:], offsets, strict=False):
        length = first + end - begin
        if not 0 <= begin <= end <= num_tokens or first < 0 or length > capacity:
            return None
        pages = _pages(table, length if begin < end else 0, pool)
        if pages is None:
            return None
        found.append((begin, end, first, pages))
    return found


@paged_cache.split_qkv_norm_rope_into_paged_cache.impl("torch")
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
    """Whole heads in float32 at places that all exist; the reference for the rest."""
    weights = (q_weight, k_weight) if qk_mode == rope.NORM_ROPE else ()
    wide = all(t.dtype == torch.float32 for t in (qkv, cos, sin, k_cache, *weights))
    head_dim = k_cache.shape[-1]
    usual = wide and layout != "vllm_x" and slots is None and positions is None
    usual = usual and 2 * cos.shape[1] == head_dim and qk_mode != rope.COPY
    placed: tuple[list[int], list[int]] | None = None
    if usual and qkv.device.type == "cpu":
        pool = token_view(k_cache, layout)
        placed = _places(pool, block_tables, pos_offsets, cu_seqlens_q, qkv.shape[0], len(cos))
    if not placed:
        q = paged_cache.split_qkv_norm_rope_into_paged_cache.reference(
            qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, slots, block_tables,
            pos_offsets, cu_seqlens_q, positions, k_scales, v_scales, eps, qk_mode, layout,
        )  # fmt: skip
        return q.contiguous() if out is None else out.copy_(q)
    rows, places = placed
    num_kv_heads = token_view(k_cache, layout).shape[2]
    heads = qkv.unflatten(1, (-1, head_dim)).transpose(0, 1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
    if qk_mode == rope.NORM_ROPE:
        q = F.rms_norm(q, (head_dim,), q_weight, eps)
        k = F.rms_norm(k, (head_dim,), k_weight, eps)
    rotate = rotate_pairs if qk_mode == rope.ROPE_INTERLEAVED else rotate_halves
    if places == list(range(places[0], places[0] + len(places))):
        table = slice(places[0], places[0] + len(places))
    else:
        table = torch.tensor(places)
    turned = [rotate(t, cos[table], sin[table]) for t in (q, k)]
    _write(token_view(k_cache, layout), rows, turned[1].transpose(0, 1))
    _write(token_view(v_cache, layout), rows, v.transpose(0, 1))
    y = turned[0].transpose(0, 1)
    return y.contiguous() if out is None else out.copy_(y)


def _write(pool: Tensor, rows: list[int], new: Tensor) -> None:
    """pool[row // block_size, row % block_size] = new, row by row."""
    size = pool.shape[1]
    if len(rows) == 1:
        pool[rows[0] // size, rows[0] % size] = new[0]
    else:
        row = torch.tensor(rows)
        pool[row // size, row % size] = new


def _places(
    pool: Tensor,
    tables: Tensor | None,
    offsets: Tensor | None,
    cuts: Tensor | None,
    num_tokens: int,
    num_positions: int,
) -> tuple[list[int], list[int]] | None:
    """Row of the pool and position of each token; None if one has no place."""
    if tables is None or offsets is None or num_tokens == 0 or not len(tables):
        return None
    if cuts is not None:
        ends = cuts.tolist()
    else:
        ends = [0, num_tokens] if len(tables) == 1 else list(range(num_tokens + 1))
    if ends[0] != 0 or ends[-1] != num_tokens:
        return None
    num_blocks, size = pool.shape[:2]
    rows: list[int] = []
    places: list[int] = []
    for table, begin, end, first in zip(tables, ends, ends[1:], offsets.tolist(), strict=False):
        last = first + end - begin
        if begin > end or first < 0 or last > min(tables.shape[1] * size, num_positions):
            return None
        if begin == end:
            continue
        base = first // size
        pages = table[base : -(-last // size)].tolist()
        if not all(0 <= page < num_blocks for page in pages):
            return None
        rows += [pages[p // size - base] * size + p % size for p in range(first, last)]
        places += range(first, last)
    return rows, places
