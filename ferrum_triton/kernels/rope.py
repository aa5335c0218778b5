"""QKV preparation: the split into heads, their norm and their rotary embedding, in one launch.

A program prepares a tile of :mod:`heads`, and stores it in a tensor or a row of a cache.
"""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.heads import (
    Tables,
    group_of_program,
    head_tile,
    load_heads,
    prepare_heads,
    store_heads,
    vectors_of,
)
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import rope as ops


@kernel(dynamic=("num_tokens", "max_positions", "capacity", "pos_offset", "cache_len", "eps"))
def _qkv_norm_rope_kernel(
    q_ptr,  # [num_heads, num_tokens, head_dim]
    k_ptr,  # [num_kv_heads, capacity, head_dim]
    v_ptr,  # [num_kv_heads, capacity, head_dim]
    x_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    cos_ptr,  # [max_positions, half]
    sin_ptr,  # [max_positions, half]
    positions_ptr,  # [num_tokens] or None
    slots_ptr,  # [num_tokens] or None
    stride_q_head,
    stride_q_token,
    stride_k_head,
    stride_k_row,
    stride_v_head,
    stride_v_row,
    stride_x_token,
    stride_x_head,
    stride_cos_position,
    stride_sin_position,
    num_heads,
    num_kv_heads,
    num_tokens,
    max_positions,
    capacity,
    pos_offset,
    cache_len,
    eps,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """q[h, t] = rope(norm(x[t, h])), k[h, row(t)] = rope(norm(x[t, Hq + h])), v[h, row(t)] = x[..].

    A token's row of k and v is its slot, or cache_len + t.
    """
    pdl_trigger(PDL)
    group = group_of_program(num_heads, num_kv_heads, TILE)
    token, head, is_query, is_value = group
    in_batch = token < num_tokens
    source = vectors_of(x_ptr, token, head, stride_x_token, stride_x_head)
    pdl_wait(PDL)

    tables = Tables(cos_ptr, sin_ptr, stride_cos_position, stride_sin_position, max_positions)
    heads = prepare_heads(
        heads=load_heads(source, in_batch[:, None, None], TILE),
        group=group,
        position=token + pos_offset,
        in_batch=in_batch,
        q_weight_ptr=q_weight_ptr,
        k_weight_ptr=k_weight_ptr,
        positions_ptr=positions_ptr,
        tables=tables,
        eps=eps,
        TILE=TILE,
    )

    # Queries go to their token's row, keys and values to a row of the cache. Each branch has its
    # own store: of a pointer that comes out of a branch, the compiler does not know the alignment.
    row = token + cache_len
    if slots_ptr is not None:
        row = tl.load(slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
    in_cache = (in_batch & (row >= 0) & (row < capacity))[:, None, None]
    if is_query:
        out = vectors_of(q_ptr, token, head, stride_q_token, stride_q_head)
        store_heads(out, in_batch[:, None, None], heads, 0, 0, TILE)
    elif is_value:
        kv_head = head - (num_heads + num_kv_heads)
        out = vectors_of(v_ptr, row, kv_head, stride_v_row, stride_v_head)
        store_heads(out, in_cache, heads, 0, 0, TILE)
    else:
        out = vectors_of(k_ptr, row, head - num_heads, stride_k_row, stride_k_head)
        store_heads(out, in_cache, heads, 0, 0, TILE)


@kernel
def _split_qkv_kernel(
    q_ptr,  # [num_tokens, q_dim]
    k_ptr,  # [num_tokens, kv_dim]
    v_ptr,  # [num_tokens, kv_dim]
    qkv_ptr,  # [num_tokens, q_dim + 2 * kv_dim]
    stride_q_token,
    stride_k_token,
    stride_v_token,
    stride_qkv_token,
    q_dim,
    kv_dim,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """[q | k | v] = qkv of each token"""
    pdl_trigger(PDL)
    width = q_dim + 2 * kv_dim
    blocks_per_row = tl.cdiv(width, BLOCK_C)
    token = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    c = tl.program_id(0) % blocks_per_row * BLOCK_C + tl.arange(0, BLOCK_C)
    k_first, v_first = q_dim, q_dim + kv_dim
    pdl_wait(PDL)

    x = tl.load(qkv_ptr + token * stride_qkv_token + c, mask=c < width)

    tl.store(q_ptr + token * stride_q_token + c, x, mask=c < k_first)
    in_k = (c >= k_first) & (c < v_first)
    tl.store(k_ptr + token * stride_k_token + c - k_first, x, mask=in_k)
    in_v = (c >= v_first) & (c < width)
    tl.store(v_ptr + token * stride_v_token + c - v_first, x, mask=in_v)


def _launch_qkv(
    q: Tensor,  # [num_heads, num_tokens, head_dim]
    k: Tensor | None,  # [num_kv_heads, capacity, head_dim], None where there are only queries
    v: Tensor | None,
    x: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    weights: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor],
    positions: Tensor | None,
    pos_offset: int,
    eps: float,
    qk_mode: int,
    slots: Tensor | None = None,
    cache_len: int = 0,
) -> None:
    num_tokens, _, head_dim = x.shape
    num_heads = q.shape[0]
    num_kv_heads = 0 if k is None else k.shape[0]
    k, v = (q, q) if k is None else (k, v)
    cos, sin = tables
    q_weight, k_weight = weights if qk_mode == ops.NORM_ROPE else (None, None)
    tile, num_warps = head_tile(
        num_tokens, num_heads, num_kv_heads, head_dim, cos.shape[1], qk_mode, processors(x.device)
    )
    _qkv_norm_rope_kernel.launch(
        (cdiv(num_tokens, tile.tokens) * ((num_heads + 2 * num_kv_heads) // tile.heads),),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        x_ptr=x,
        q_weight_ptr=q_weight,
        k_weight_ptr=k_weight,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        slots_ptr=slots,
        stride_q_head=q.stride(0),
        stride_q_token=q.stride(1),
        stride_k_head=k.stride(0),
        stride_k_row=k.stride(1),
        stride_v_head=v.stride(0),
        stride_v_row=v.stride(1),
        stride_x_token=x.stride(0),
        stride_x_head=x.stride(1),
        stride_cos_position=cos.stride(0),
        stride_sin_position=sin.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        max_positions=cos.shape[0],
        capacity=k.shape[1],
        pos_offset=pos_offset,
        cache_len=cache_len,
        eps=float(eps),
        TILE=tile,
        num_warps=num_warps,
    )


@ops.qk_norm_rope.impl("triton")
def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    shape = (num_heads, num_tokens, head_dim)
    y = x.new_empty(shape) if out is None else out
    if x.numel():
        _launch_qkv(
            q=y,
            k=None,
            v=None,
            x=x,
            weights=(weight, weight),
            tables=(cos, sin),
            positions=positions,
            pos_offset=pos_offset,
            eps=eps,
            qk_mode=qk_mode,
        )
    return y


def as_heads(qkv: Tensor, heads: int) -> Tensor:
    """[num_tokens, heads · head_dim] as [num_tokens, heads, head_dim]."""
    num_tokens, width = qkv.shape
    head_dim = width // heads
    return qkv.as_strided((num_tokens, heads, head_dim), (qkv.stride(0), head_dim, 1))


@ops.split_qkv_norm_rope.impl("triton")
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
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = as_heads(qkv, num_heads + 2 * num_kv_heads)
    num_tokens, _, head_dim = x.shape
    if out is None:
        heads = (num_heads, num_kv_heads, num_kv_heads)
        out = tuple(qkv.new_empty((count, num_tokens, head_dim)) for count in heads)
    if num_tokens:
        q, k, v = out
        _launch_qkv(
            q=q,
            k=k,
            v=v,
            x=x,
            weights=(q_weight, k_weight),
            tables=(cos, sin),
            positions=positions,
            pos_offset=pos_offset,
            eps=eps,
            qk_mode=qk_mode,
        )
    return out


@ops.split_qkv_norm_rope_into_cache.impl("triton")
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
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    x = as_heads(qkv, num_heads + 2 * k_cache.shape[0])
    num_tokens, _, head_dim = x.shape
    q = qkv.new_empty((num_heads, num_tokens, head_dim)) if out is None else out
    if num_tokens:
        _launch_qkv(
            q=q,
            k=k_cache,
            v=v_cache,
            x=x,
            weights=(q_weight, k_weight),
            tables=(cos, sin),
            positions=positions,
            pos_offset=pos_offset,
            eps=eps,
            qk_mode=qk_mode,
            slots=slots,
            cache_len=cache_len,
        )
    return q


@ops.split_qkv.impl("triton")
def split_qkv(
    qkv: Tensor,
    q_dim: int,
    kv_dim: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, width = qkv.shape
    if out is None:
        out = tuple(qkv.new_empty((num_tokens, dim)) for dim in (q_dim, kv_dim, kv_dim))
    if qkv.numel():
        q, k, v = out
        block = min(next_power_of_2(width), 1024)
        _split_qkv_kernel.launch(
            (num_tokens * cdiv(width, block),),
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            qkv_ptr=qkv,
            stride_q_token=q.stride(0),
            stride_k_token=k.stride(0),
            stride_v_token=v.stride(0),
            stride_qkv_token=qkv.stride(0),
            q_dim=q_dim,
            kv_dim=kv_dim,
            BLOCK_C=block,
            num_warps=4,
        )
    return out
