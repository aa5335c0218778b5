"""Writing into a paged pool: the QKV preparation of :mod:`rope`, aimed at the slots of pages.

A program prepares a tile of :mod:`heads`; what it stores of keys and values goes through
:mod:`kv_pool`, which knows places, layouts and quantisation.
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
from ferrum_triton.kernels.kv_pool import (
    Placement,
    Pool,
    place_tokens,
    placement_arguments,
    pool_arguments,
    pool_format,
    store_cached,
)
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rope import as_heads
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import paged_cache as ops
from ferrum_triton.ops.kv_pool import token_view
from ferrum_triton.ops.rope import COPY, NORM_ROPE


@kernel(dynamic=("num_tokens", "num_seqs", "max_blocks", "num_blocks", "max_positions", "eps"))
def _paged_qkv_norm_rope_kernel(
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # pool, updated
    v_cache_ptr,  # pool, updated
    k_scales_ptr,  # a scale a slot and head, updated, or None
    v_scales_ptr,  # as k_scales
    x_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    cos_ptr,  # [max_positions, half]
    sin_ptr,  # [max_positions, half]
    positions_ptr,  # [num_tokens] or None
    slots_ptr,  # [num_tokens] or None
    block_tables_ptr,  # [num_seqs, max_blocks] or None
    pos_offsets_ptr,  # [num_seqs] or None
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    stride_q_token,
    stride_q_head,
    k_cache_strides,  # PoolStrides
    v_cache_strides,
    k_scales_strides,  # ScaleStrides
    v_scales_strides,
    stride_x_token,
    stride_x_head,
    stride_cos_position,
    stride_sin_position,
    stride_block_tables_seq,
    num_heads,
    num_kv_heads,
    block_size,
    num_tokens,
    num_seqs,
    max_blocks,
    num_blocks,
    max_positions,
    eps,
    FORMAT: tl.constexpr,  # a PoolFormat
    ONE_SEQUENCE: tl.constexpr,  # every token is of the one sequence, else each of its own
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """q[t] = rope(norm(x[t, :Hq])), and k and v of token t into its place in the pool."""
    pdl_trigger(PDL)
    group = group_of_program(num_heads, num_kv_heads, TILE)
    token, head, is_query, is_value = group
    in_batch = token < num_tokens
    source = vectors_of(x_ptr, token, head, stride_x_token, stride_x_head)
    placement = Placement(
        slots_ptr,
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_block_tables_seq,
        block_size,
        num_seqs,
        max_blocks,
        num_blocks,
    )
    tables = Tables(cos_ptr, sin_ptr, stride_cos_position, stride_sin_position, max_positions)
    pdl_wait(PDL)

    heads = load_heads(source, in_batch[:, None, None], TILE)
    places = place_tokens(token, in_batch, placement, ONE_SEQUENCE, BLOCK_S)
    heads = prepare_heads(
        heads=heads,
        group=group,
        position=places.position,
        in_batch=in_batch,
        q_weight_ptr=q_weight_ptr,
        k_weight_ptr=k_weight_ptr,
        positions_ptr=positions_ptr,
        tables=tables,
        eps=eps,
        TILE=TILE,
    )

    # Each branch has its own store: of a pointer that comes out of a branch, the compiler does not
    # know the alignment.
    if is_query:
        out = vectors_of(q_ptr, token, head, stride_q_token, stride_q_head)
        store_heads(out, in_batch[:, None, None], heads, 0, 0, TILE)
    elif is_value:
        kv_head = head - num_heads - num_kv_heads
        pool = Pool(v_cache_ptr, v_scales_ptr, v_cache_strides, v_scales_strides)
        store_cached(pool, heads, kv_head, places, FORMAT.v_piece, FORMAT, TILE)
    else:
        pool = Pool(k_cache_ptr, k_scales_ptr, k_cache_strides, k_scales_strides)
        store_cached(pool, heads, head - num_heads, places, FORMAT.k_piece, FORMAT, TILE)


@kernel(dynamic=("num_tokens", "num_seqs", "max_blocks", "num_blocks"))
def _kv_cache_append_paged_kernel(
    k_cache_ptr,  # pool, updated
    v_cache_ptr,  # pool, updated
    k_scales_ptr,  # a scale a slot and head, updated, or None
    v_scales_ptr,  # as k_scales
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # [num_tokens, num_kv_heads, head_dim]
    slots_ptr,  # [num_tokens] or None
    block_tables_ptr,  # [num_seqs, max_blocks] or None
    pos_offsets_ptr,  # [num_seqs] or None
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    k_cache_strides,  # PoolStrides
    v_cache_strides,
    k_scales_strides,  # ScaleStrides
    v_scales_strides,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block_tables_seq,
    num_kv_heads,
    block_size,
    num_tokens,
    num_seqs,
    max_blocks,
    num_blocks,
    FORMAT: tl.constexpr,  # a PoolFormat
    ONE_SEQUENCE: tl.constexpr,  # every token is of the one sequence, else each of its own
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """k and v of token t into its place in the pool."""
    pdl_trigger(PDL)
    token, head, _, is_value = group_of_program(0, num_kv_heads, TILE)
    in_batch = token < num_tokens
    placement = Placement(
        slots_ptr,
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_block_tables_seq,
        block_size,
        num_seqs,
        max_blocks,
        num_blocks,
    )
    pdl_wait(PDL)

    places = place_tokens(token, in_batch, placement, ONE_SEQUENCE, BLOCK_S)
    if is_value:
        head -= num_kv_heads
        source = vectors_of(v_ptr, token, head, stride_v_token, stride_v_head)
        heads = load_heads(source, in_batch[:, None, None], TILE)
        pool = Pool(v_cache_ptr, v_scales_ptr, v_cache_strides, v_scales_strides)
        store_cached(pool, heads, head, places, FORMAT.v_piece, FORMAT, TILE)
    else:
        source = vectors_of(k_ptr, token, head, stride_k_token, stride_k_head)
        heads = load_heads(source, in_batch[:, None, None], TILE)
        pool = Pool(k_cache_ptr, k_scales_ptr, k_cache_strides, k_scales_strides)
        store_cached(pool, heads, head, places, FORMAT.k_piece, FORMAT, TILE)


@ops.split_qkv_norm_rope_into_paged_cache.impl("triton")
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
    qk_mode: int = NORM_ROPE,
    layout: str = "hnd",
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_kv_heads = token_view(k_cache, layout).shape[2]
    x = as_heads(qkv, num_heads + 2 * num_kv_heads)
    num_tokens, _, head_dim = x.shape
    q = qkv.new_empty((num_tokens, num_heads, head_dim)) if out is None else out
    if num_tokens == 0:
        return q
    tile, num_warps = head_tile(
        num_tokens, num_heads, num_kv_heads, head_dim, cos.shape[1], qk_mode, processors(x.device)
    )
    q_weight, k_weight = (q_weight, k_weight) if qk_mode == NORM_ROPE else (None, None)
    _paged_qkv_norm_rope_kernel.launch(
        (cdiv(num_tokens, tile.tokens) * ((num_heads + 2 * num_kv_heads) // tile.heads),),
        q_ptr=q,
        **pool_arguments("k", k_cache, k_scales, layout),
        **pool_arguments("v", v_cache, v_scales, layout),
        x_ptr=x,
        q_weight_ptr=q_weight,
        k_weight_ptr=k_weight,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        **placement_arguments(k_cache, layout, slots, block_tables, pos_offsets, cu_seqlens_q),
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_x_token=x.stride(0),
        stride_x_head=x.stride(1),
        stride_cos_position=cos.stride(0),
        stride_sin_position=sin.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        max_positions=cos.shape[0],
        eps=float(eps),
        FORMAT=pool_format(k_cache.dtype, layout, k_cache.shape[-1]),
        TILE=tile,
        num_warps=num_warps,
    )
    return q


@ops.kv_cache_append_paged.impl("triton")
def kv_cache_append_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None = None,
    block_tables: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    layout: str = "hnd",
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    tile, num_warps = head_tile(
        num_tokens, 0, num_kv_heads, head_dim, 0, COPY, processors(k.device)
    )
    _kv_cache_append_paged_kernel.launch(
        (cdiv(num_tokens, tile.tokens) * (2 * num_kv_heads // tile.heads),),
        **pool_arguments("k", k_cache, k_scales, layout),
        **pool_arguments("v", v_cache, v_scales, layout),
        k_ptr=k,
        v_ptr=v,
        **placement_arguments(k_cache, layout, slots, block_tables, pos_offsets, cu_seqlens_q),
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        FORMAT=pool_format(k_cache.dtype, layout, k_cache.shape[-1]),
        TILE=tile,
        num_warps=num_warps,
    )
