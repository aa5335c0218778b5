"""Writing into a paged pool: the QKV preparation of ``rope.py``, aimed at the slots of pages."""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.kv_pool import place_tokens, pool_arguments, pool_shapes, store_cached
from ferrum_triton.kernels.rope import (
    as_heads,
    head_blocks,
    head_group,
    load_heads,
    normalize_heads,
    qkv_tile,
    rotate_heads,
    store_heads,
)
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
    cos_ptr,  # [max_positions, HALF]
    sin_ptr,  # [max_positions, HALF]
    positions_ptr,  # [num_tokens] or None
    slots_ptr,  # [num_tokens] or None
    block_tables_ptr,  # [num_seqs, max_blocks] or None
    pos_offsets_ptr,  # [num_seqs] or None
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    stride_q_token,
    stride_q_head,
    stride_k_cache_block,
    stride_k_cache_head,
    stride_k_cache_slot,
    stride_k_cache_piece,
    stride_v_cache_block,
    stride_v_cache_head,
    stride_v_cache_slot,
    stride_v_cache_piece,
    stride_k_scales_block,
    stride_k_scales_head,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_head,
    stride_v_scales_slot,
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
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the pool: "" (a float's), "int8" or "fp8"
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    ONE_SEQUENCE: tl.constexpr,  # every token is of the one sequence, else each of its own
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,  # a program; divides num_heads and num_kv_heads
    HALF: tl.constexpr,  # pairs rotated
    REST: tl.constexpr,  # head_dim - 2 * HALF, passed through
    BLOCK_HALF: tl.constexpr,  # power of two >= HALF
    BLOCK_REST: tl.constexpr,  # power of two >= REST, or 0
):
    tile, first_head, is_query, is_value = head_group(num_heads, num_kv_heads, HEADS)
    token = tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    in_batch = token < num_tokens

    source = x_ptr + (token * stride_x_token)[:, None] + (head * stride_x_head)[None, :]
    x0, x1, tail = load_heads(
        source[:, :, None], in_batch[:, None, None], HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3
    )
    block, offset, placed, position = place_tokens(
        token,
        in_batch,
        slots_ptr,
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_block_tables_seq,
        block_size,
        num_seqs,
        max_blocks,
        num_blocks,
        ONE_SEQUENCE,
        BLOCK_S,
    )

    if MODE == 1:
        if is_query:
            x0, x1, tail = normalize_heads(
                x0, x1, tail, q_weight_ptr, eps, HALF, REST, BLOCK_HALF, BLOCK_REST
            )
        elif not is_value:
            x0, x1, tail = normalize_heads(
                x0, x1, tail, k_weight_ptr, eps, HALF, REST, BLOCK_HALF, BLOCK_REST
            )
    if MODE != 0:
        if not is_value:
            if positions_ptr is not None:
                position = tl.load(positions_ptr + token, mask=in_batch, other=-1).to(tl.int64)
            x0, x1 = rotate_heads(
                x0,
                x1,
                position,
                cos_ptr,
                sin_ptr,
                stride_cos_position,
                stride_sin_position,
                max_positions,
                HALF,
                BLOCK_HALF,
            )

    # Each branch has its own store: of a pointer that comes out of a branch, the compiler does not
    # know the alignment.
    if is_query:
        out = q_ptr + (token * stride_q_token)[:, None] + (head * stride_q_head)[None, :]
        store_heads(
            out[:, :, None], in_batch[:, None, None], x0, x1, tail, 0, 0,
            HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip
    elif is_value:
        store_cached(
            v_cache_ptr, v_scales_ptr, x0, x1, tail,
            head - num_heads - num_kv_heads, block, offset, placed,
            stride_v_cache_block, stride_v_cache_head, stride_v_cache_slot, stride_v_cache_piece,
            stride_v_scales_block, stride_v_scales_head, stride_v_scales_slot,
            V_PIECE, FORMAT, HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip
    else:
        store_cached(
            k_cache_ptr, k_scales_ptr, x0, x1, tail,
            head - num_heads, block, offset, placed,
            stride_k_cache_block, stride_k_cache_head, stride_k_cache_slot, stride_k_cache_piece,
            stride_k_scales_block, stride_k_scales_head, stride_k_scales_slot,
            K_PIECE, FORMAT, HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip


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
    stride_k_cache_block,
    stride_k_cache_head,
    stride_k_cache_slot,
    stride_k_cache_piece,
    stride_v_cache_block,
    stride_v_cache_head,
    stride_v_cache_slot,
    stride_v_cache_piece,
    stride_k_scales_block,
    stride_k_scales_head,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_head,
    stride_v_scales_slot,
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
    FORMAT: tl.constexpr,  # of the pool: "" (a float's), "int8" or "fp8"
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    ONE_SEQUENCE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,  # a program; divides num_kv_heads
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    tile, first_head, _, is_value = head_group(0, num_kv_heads, HEADS)
    token = tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    in_batch = token < num_tokens
    block, offset, placed, _ = place_tokens(
        token,
        in_batch,
        slots_ptr,
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_block_tables_seq,
        block_size,
        num_seqs,
        max_blocks,
        num_blocks,
        ONE_SEQUENCE,
        BLOCK_S,
    )

    if is_value:
        head -= num_kv_heads
        source = v_ptr + (token * stride_v_token)[:, None] + (head * stride_v_head)[None, :]
        x0, x1, tail = load_heads(
            source[:, :, None], in_batch[:, None, None], HALF, REST, BLOCK_HALF, BLOCK_REST, False
        )
        store_cached(
            v_cache_ptr, v_scales_ptr, x0, x1, tail, head, block, offset, placed,
            stride_v_cache_block, stride_v_cache_head, stride_v_cache_slot, stride_v_cache_piece,
            stride_v_scales_block, stride_v_scales_head, stride_v_scales_slot,
            V_PIECE, FORMAT, HALF, REST, BLOCK_HALF, BLOCK_REST, False,
        )  # fmt: skip
    else:
        source = k_ptr + (token * stride_k_token)[:, None] + (head * stride_k_head)[None, :]
        x0, x1, tail = load_heads(
            source[:, :, None], in_batch[:, None, None], HALF, REST, BLOCK_HALF, BLOCK_REST, False
        )
        store_cached(
            k_cache_ptr, k_scales_ptr, x0, x1, tail, head, block, offset, placed,
            stride_k_cache_block, stride_k_cache_head, stride_k_cache_slot, stride_k_cache_piece,
            stride_k_scales_block, stride_k_scales_head, stride_k_scales_slot,
            K_PIECE, FORMAT, HALF, REST, BLOCK_HALF, BLOCK_REST, False,
        )  # fmt: skip


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
    k_pool, k_scales, k_strides, k_scale_strides = pool_arguments(k_cache, k_scales, layout)
    v_pool, v_scales, v_strides, v_scale_strides = pool_arguments(v_cache, v_scales, layout)
    block_size, sizes, constexprs = pool_shapes(k_cache, layout, block_tables, cu_seqlens_q)
    block_t, heads, num_warps = qkv_tile(
        num_tokens, num_heads, num_kv_heads, head_dim, processors(x.device)
    )
    _paged_qkv_norm_rope_kernel.launch(
        (cdiv(num_tokens, block_t) * ((num_heads + 2 * num_kv_heads) // heads),),
        q,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        x,
        *((q_weight, k_weight) if qk_mode == NORM_ROPE else (None, None)),
        cos,
        sin,
        positions,
        slots,
        block_tables,
        pos_offsets,
        cu_seqlens_q,
        q.stride(0),
        q.stride(1),
        *k_strides,
        *v_strides,
        *k_scale_strides,
        *v_scale_strides,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        0 if block_tables is None else block_tables.stride(0),
        num_heads,
        num_kv_heads,
        block_size,
        num_tokens,
        *sizes,
        cos.shape[0],
        float(eps),
        MODE=qk_mode,
        **constexprs,
        BLOCK_T=block_t,
        HEADS=heads,
        **head_blocks(head_dim, cos.shape[1] if qk_mode != COPY else head_dim // 2),
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
    k_pool, k_scales, k_strides, k_scale_strides = pool_arguments(k_cache, k_scales, layout)
    v_pool, v_scales, v_strides, v_scale_strides = pool_arguments(v_cache, v_scales, layout)
    block_size, sizes, constexprs = pool_shapes(k_cache, layout, block_tables, cu_seqlens_q)
    block_t, heads, num_warps = qkv_tile(
        num_tokens, 0, num_kv_heads, head_dim, processors(k.device)
    )
    _kv_cache_append_paged_kernel.launch(
        (cdiv(num_tokens, block_t) * (2 * num_kv_heads // heads),),
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        k,
        v,
        slots,
        block_tables,
        pos_offsets,
        cu_seqlens_q,
        *k_strides,
        *v_strides,
        *k_scale_strides,
        *v_scale_strides,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if block_tables is None else block_tables.stride(0),
        num_kv_heads,
        block_size,
        num_tokens,
        *sizes,
        **constexprs,
        BLOCK_T=block_t,
        HEADS=heads,
        **head_blocks(head_dim, head_dim // 2),
        num_warps=num_warps,
    )
