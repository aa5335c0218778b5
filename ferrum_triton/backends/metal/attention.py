"""Attention over a cache, contiguous or in pages, as shaders."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.backends.metal.pool import Pool, contiguous, pages
from ferrum_triton.backends.metal.shader import (
    LANES,
    MAX_GRID,
    Shader,
    all_there,
    delivered,
    strides,
    types_of,
)
from ferrum_triton.errors import FerrumError
from ferrum_triton.ops.attention import flash, paged_decode, paged_varlen

_READ = "q k v k_scales v_scales sinks kv_lens block_tables pos_offsets cu_seqlens_q"
_STRIDED = "y lse q k v k_scales v_scales block_tables"
_PARAMS = (
    "num_heads num_kv_heads is_packed num_seqs q_len head_dim value_dim capacity kv_len "
    "has_kv_lens pos_offset has_pos_offset is_causal sliding_window softmax_scale softcap "
    "has_sinks has_lse has_tables num_blocks block_size stride_table splits "
    "stride_q_batch stride_q_head stride_q_query stride_y_batch stride_y_head stride_y_query "
    "stride_lse_batch stride_lse_head stride_lse_query "
    "stride_k_block stride_k_head stride_k_slot stride_k_piece "
    "stride_v_block stride_v_head stride_v_slot stride_v_piece "
    "stride_k_scales_block stride_k_scales_head stride_k_scales_slot "
    "stride_v_scales_block stride_v_scales_head stride_v_scales_slot"
)
TILES = Shader("attention attention_tiles", "attend_tiles", f"y lse {_READ}", _PARAMS, _STRIDED)
SPLIT = Shader(
    "attention attention_split", "attend_split", f"y lse {_READ} partial", _PARAMS, _STRIDED
)
MERGE = Shader("attention attention_split", "merge_splits", "y lse partial", _PARAMS, _STRIDED)

# As in the source: rows of a tile; threads of a tile or a split; columns of values at a time.
TILE, THREADS, CHUNK = 16, 128, 64
# Up to so many queries a sequence, and so many rows at a time of those that share a KV head.
FEW_QUERIES, MOST_ROWS = 8, 4
# Keys of a split, until there are so many of them.
SPLIT_KEYS, MOST_SPLITS = 512, 32


class Sight(NamedTuple):
    """What queries see, and how scores are made.

    Attributes:
        kv_len: keys of a sequence where kv_lens does not say.
        pos_offset: position of query 0; None where the queries are the newest keys.
        pos_offsets, cu_seqlens_q: positions of the sequences' first queries, and where each starts
            among all, where they are one batch.
    """

    kv_len: int
    kv_lens: Tensor | None
    pos_offset: int | None
    is_causal: bool
    sliding_window: int
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    pos_offsets: Tensor | None = None
    cu_seqlens_q: Tensor | None = None


def _splits(keys: int) -> int:
    """Into how many parts so many keys are cut, whatever the batch."""
    return min(max(-(-keys // SPLIT_KEYS), 1), MOST_SPLITS)


def _by_query(of: str, x: Tensor | None, is_packed: bool) -> dict[str, int]:
    """Strides by sequence, head and query, of which packed sequences are one batch."""
    batch, head, query = (0, 0, 0) if x is None else x.stride()[:3]
    return strides(of, "batch head query", (0 if is_packed else batch, head, query))


def _attend(
    y: Tensor,
    lse: Tensor | None,
    q: Tensor,
    pool: Pool,
    tables: Tensor | None,
    sight: Sight,
    in_tiles: bool,
) -> None:
    """Write y [batch, num_heads, q_len, value_dim] for q [batch, num_heads, q_len, head_dim].

    Without tables a sequence's keys are the block of its number.
    """
    batch, num_heads, q_len, head_dim = q.shape
    value_dim = y.shape[3]
    if q.numel() == 0:
        return
    num_kv_heads = pool.num_kv_heads
    capacity = pool.block_size * (1 if tables is None else tables.shape[1])
    capacity = capacity if pool.num_blocks else 0
    if capacity > MAX_GRID:
        raise FerrumError(f"attention on Metal takes up to {MAX_GRID} keys, not {capacity}")
    has_window = sight.is_causal and sight.sliding_window > 0
    keys = min(capacity, sight.sliding_window + q_len) if has_window else capacity
    splits = 1 if in_tiles else _splits(keys)
    rows = q_len * (num_heads // num_kv_heads)
    rows_at_once = next(n for n in (1, 2, MOST_ROWS) if n >= min(rows, MOST_ROWS))
    scale = sight.softmax_scale
    is_packed = sight.cu_seqlens_q is not None
    num_seqs = tables.shape[0] if is_packed and tables is not None else batch
    given = {
        "LENGTH": sight.kv_lens,
        "BLOCK": tables,
        "OFFSET": sight.pos_offsets,
        "START": sight.cu_seqlens_q,
    }
    types = {
        "SCALAR": q.dtype,
        **pool.types(),
        **types_of(given),
        "ROWS": str(rows_at_once),
        "COLUMNS": str(-(-head_dim // LANES)),
        "VALUE_COLUMNS": str(-(-value_dim // LANES)),
        "VALUE_CHUNKS": str(-(-value_dim // CHUNK)),
    }
    params = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "is_packed": int(is_packed),
        "num_seqs": num_seqs,
        "q_len": q_len,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "capacity": capacity,
        "kv_len": min(sight.kv_len, capacity),
        "has_kv_lens": int(sight.kv_lens is not None),
        "pos_offset": sight.pos_offset or 0,
        "has_pos_offset": int(sight.pos_offset is not None),
        "is_causal": int(sight.is_causal),
        "sliding_window": sight.sliding_window,
        "softmax_scale": float(head_dim**-0.5 if scale is None else scale),
        "softcap": float(sight.softcap),
        "has_sinks": int(sight.sinks is not None),
        "has_lse": int(lse is not None),
        "has_tables": int(tables is not None),
        "stride_table": 0 if tables is None else tables.stride(0),
        "splits": splits,
        **_by_query("q", q, is_packed),
        **_by_query("y", y, is_packed),
        **_by_query("lse", lse, is_packed),
        **pool.params(),
    }
    sinks = None if sight.sinks is None else sight.sinks.float().contiguous()
    lists = [
        ids if ids is None or name == "BLOCK" else ids.contiguous() for name, ids in given.items()
    ]
    read = (y, lse, q, pool.k, pool.v, pool.k_scales, pool.v_scales, sinks, *lists)
    some = q[0, 0, 0, :1]
    buffers = all_there(read, some)
    if in_tiles:
        # Of packed sequences as many as there may be: each may end in a tile of its own.
        tiles = rows // TILE + num_seqs if is_packed else batch * -(-rows // TILE)
        groups = tiles * num_kv_heads
        TILES.launch(types, buffers, params, groups=groups, threads=THREADS)
        return
    partial = some
    if splits > 1:
        shape = (batch * num_heads * q_len, splits, value_dim + 2)
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
    groups = batch * num_kv_heads * -(-rows // rows_at_once) * splits
    SPLIT.launch(types, (*buffers, partial), params, groups=groups, threads=THREADS)
    if splits > 1:
        launch = {"groups": batch * num_heads * q_len, "threads": LANES}
        MERGE.launch(types, (*buffers[:2], partial), params, **launch)


@flash.flash_attention.impl("metal")
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: int | None = None,
    kv_lens: Tensor | None = None,
    pos_offset: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = q.new_empty(*q.shape[:3], v.shape[3]) if out is None else out
    length = k.shape[2] if kv_len is None else kv_len
    sight = Sight(
        length, kv_lens, pos_offset, causal, sliding_window, softmax_scale, softcap, sinks
    )
    in_tiles = q.shape[2] > FEW_QUERIES
    _attend(y, lse, q, contiguous(k, v), None, sight, in_tiles)
    return y


@paged_decode.paged_decode_attention.impl("metal")
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
    batch_invariant: bool = False,  # which it always is: nothing depends on the batch
    *,
    out: Tensor | None = None,
) -> Tensor:
    if k_cache.dtype == torch.float8_e4m3fn:  # which MPS has no tensors of
        y = paged_decode.paged_decode_attention.reference(
            q, k_cache, v_cache, block_tables, kv_lens, k_scales, v_scales, sinks, lse,
            softmax_scale, sliding_window, softcap, layout,
        )  # fmt: skip
        return delivered(y.contiguous(), out)
    y = q.new_empty(q.shape) if out is None else out
    pool = pages(k_cache, v_cache, k_scales, v_scales, layout)
    sight = Sight(0, kv_lens, None, True, sliding_window, softmax_scale, softcap, sinks)
    by_head = None if lse is None else lse.transpose(1, 2)
    queries, results = q.transpose(1, 2), y.transpose(1, 2)
    _attend(results, by_head, queries, pool, block_tables, sight, in_tiles=False)
    return y


@paged_varlen.paged_varlen_attention.impl("metal")
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
    if k_cache.dtype == torch.float8_e4m3fn:
        y = paged_varlen.paged_varlen_attention.reference(
            q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales,
            sinks, lse, max_q_len, softmax_scale, sliding_window, softcap, layout,
        )  # fmt: skip
        return delivered(y.contiguous(), out)
    y = q.new_empty(q.shape) if out is None else out
    pool = pages(k_cache, v_cache, k_scales, v_scales, layout)
    sight = Sight(
        0,
        None,
        None,
        True,
        sliding_window,
        softmax_scale,
        softcap,
        sinks,
        pos_offsets,
        cu_seqlens_q,
    )
    by_head, queries, results = (
        None if t is None else t.transpose(0, 1)[None] for t in (lse, q, y)
    )
    _attend(results, by_head, queries, pool, block_tables, sight, in_tiles=True)
    return y
