"""Flash attention over a contiguous cache: one program per block of queries, head and split.

Keys and values stream through in tiles with an online softmax. Most tiles are seen whole by every
query of the block and run unmasked; only those that a diagonal, a window's edge or the end of the
keys crosses are masked. Where queries are few, the query heads that share a KV head are packed
into the block's rows, so that the cache is read once for all of them, and the keys are split among
programs whose partial results a second kernel merges.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.attention.flash_plan import choose_plan
from ferrum_triton.kernels.attention.softmax import (
    LEAST_SCALE,
    LOG2_E,
    finish,
    first_state,
    fold_tile,
    merge_splits,
    soft_cap,
)
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.attention import flash as ops

# How a loop over tiles masks them: none, all, or those that are not whole, in a branch.
WHOLE, CROSSED, MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _load_tile(
    desc,
    head_ptr,
    batch,
    kv_head,
    first,
    stride_row,
    kv_len,
    MASKING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of keys or values from row ``first`` on."""
    if desc is not None:
        return desc.load([batch, kv_head, first, 0]).reshape(BLOCK_N, BLOCK_D)
    n = first + tl.arange(0, BLOCK_N)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = head_ptr + n.to(tl.int64) * stride_row + d
    if MASKING != WHOLE:
        return tl.load(at, mask=(n < kv_len) & (d < HEAD_DIM), other=0.0)
    if HEAD_DIM >= BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=d < HEAD_DIM, other=0.0)


@triton.jit
def _hide(
    scores,
    first,
    first_row,
    first_position,
    sliding_window,
    kv_len,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS_PER_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """-inf where a row of the block does not see a key of the tile from ``first`` on."""
    n = first + tl.arange(0, BLOCK_N)
    visible = (n < kv_len)[None, :]
    if IS_CAUSAL:
        row = first_row + tl.arange(0, BLOCK_M)
        position = row // ROWS_PER_QUERY + first_position
        visible = visible & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (n[None, :] > (position - sliding_window)[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _attend(
    acc,
    m_i,
    l_i,
    q,
    q_rest,
    k_desc,
    k_rest_desc,
    v_desc,
    k_head_ptr,
    v_head_ptr,
    batch,
    kv_head,
    stride_k_row,
    stride_v_row,
    begin,
    end,
    whole_start,
    whole_end,
    first_row,
    first_position,
    sliding_window,
    kv_len,
    scale_log2,
    softcap_log2,
    MASKING: tl.constexpr,
    CLEAR_V: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS_PER_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the tiles of keys [begin, end) into the running softmax."""
    for first in range(begin, end, BLOCK_N):
        k = _load_tile(
            k_desc, k_head_ptr, batch, kv_head, first, stride_k_row, kv_len,
            MASKING, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = _load_tile(
            v_desc, v_head_ptr, batch, kv_head, first, stride_v_row, kv_len,
            MASKING, VALUE_DIM, BLOCK_N, BLOCK_V,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_E > 0:
            k_rest = _load_tile(
                k_rest_desc, k_head_ptr + BLOCK_D, batch, kv_head, first, stride_k_row, kv_len,
                MASKING, HEAD_DIM - BLOCK_D, BLOCK_N, BLOCK_E,
            )  # fmt: skip
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        tile_scale = scale_log2
        if HAS_SOFTCAP:
            scores = soft_cap(scores * scale_log2, softcap_log2, q.dtype == tl.float32)
            tile_scale = 1.0
        if MASKING == MIXED:
            if (first < whole_start) | (first >= whole_end):
                scores = _hide(
                    scores, first, first_row, first_position, sliding_window, kv_len,
                    IS_CAUSAL, HAS_WINDOW, ROWS_PER_QUERY, BLOCK_M, BLOCK_N,
                )  # fmt: skip
        elif MASKING == CROSSED:
            scores = _hide(
                scores, first, first_row, first_position, sliding_window, kv_len,
                IS_CAUSAL, HAS_WINDOW, ROWS_PER_QUERY, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if CLEAR_V:
                n = first + tl.arange(0, BLOCK_N)
                v = tl.where((n < kv_len)[:, None], v, 0.0)
        acc, m_i, l_i = fold_tile(scores, tile_scale, v, acc, m_i, l_i, PRECISION)
    return acc, m_i, l_i


@kernel(dynamic=("heads_at_once", "q_len", "kv_len", "pos_offset", "scale_log2", "softcap_log2"))
def _flash_attention_kernel(
    out_ptr,  # [batch, num_heads, q_len, value_dim], in float32 for each split if there are several
    q_ptr,  # [batch, num_heads, q_len, head_dim]
    k_ptr,  # [batch, num_kv_heads, capacity, head_dim]
    v_ptr,  # [batch, num_kv_heads, capacity, value_dim]
    kv_lens_ptr,  # [batch] or None
    sinks_ptr,  # [num_heads] or None
    lse_ptr,  # [batch, num_heads, q_len] or None
    out_desc,  # out and q in blocks of [1, 1, BLOCK_M, BLOCK_V or _D], or None: by pointers
    q_desc,
    q_rest_desc,  # the columns of q and k from BLOCK_D on, BLOCK_E wide
    k_desc,  # k and v in blocks of [1, 1, BLOCK_N, BLOCK_D or _V], or None: by pointers
    k_rest_desc,
    v_desc,
    stride_out_batch,
    stride_out_head,
    stride_out_token,
    stride_out_split,
    stride_lse_batch,
    stride_lse_head,
    stride_lse_token,
    stride_q_batch,
    stride_q_head,
    stride_q_token,
    stride_k_batch,
    stride_k_head,
    stride_k_row,
    stride_v_batch,
    stride_v_head,
    stride_v_row,
    num_kv_heads,
    sliding_window,
    heads_at_once,  # heads whose blocks run side by side; divides batch times heads
    q_len,
    kv_len,  # valid keys, or the capacity where kv_lens is given
    pos_offset,  # read if HAS_POS_OFFSET
    scale_log2,  # |softmax scale| · log2(e); with a cap twice that over the cap
    softcap_log2,  # softcap · log2(e)
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PACKED: tl.constexpr,  # rows are (query, head of the group); else queries of one head
    NEGATE: tl.constexpr,  # the scale is negative
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_POS_OFFSET: tl.constexpr,
    ONE_LOOP: tl.constexpr,  # masks in a branch; else in loops before and after the whole tiles
    MIN_TILES: tl.constexpr,  # a split's share of the keys, at least
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # columns of q and k a product takes at once, a power of two
    BLOCK_E: tl.constexpr,  # those of the product for the other columns, or 0
    BLOCK_V: tl.constexpr,  # power of two >= value_dim
    PRECISION: tl.constexpr,  # of float32 products
):
    # The last blocks see the most keys when causal: they start first, those of all heads (as many
    # as have room in the cache) side by side, a KV head's own next to each other.
    rows_per_query: tl.constexpr = GROUP if PACKED else 1
    num_blocks = tl.cdiv(q_len * rows_per_query, BLOCK_M)
    section = tl.program_id(0) // (num_blocks * heads_at_once)
    inside = tl.program_id(0) % (num_blocks * heads_at_once)
    block = num_blocks - 1 - inside // heads_at_once
    pair = section * heads_at_once + inside % heads_at_once
    heads_here = num_kv_heads if PACKED else num_kv_heads * GROUP
    batch = pair // heads_here
    head = pair % heads_here
    kv_head = head if PACKED else head // GROUP
    split = tl.program_id(1)

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // rows_per_query
    in_queries = query < q_len
    q_head = head * GROUP + m % rows_per_query if PACKED else head + m * 0

    if kv_lens_ptr is not None:
        kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch).to(tl.int32), 0), kv_len)
    first_position = pos_offset if HAS_POS_OFFSET else kv_len - q_len

    # Keys [start, end) are seen by a query of the block, keys [whole_start, whole_end) by all.
    start, end = 0, kv_len
    whole_start, whole_end = 0, kv_len
    if IS_CAUSAL:
        oldest = block * BLOCK_M // rows_per_query + first_position
        newest = (block * BLOCK_M + BLOCK_M - 1) // rows_per_query
        newest = tl.minimum(newest, q_len - 1) + first_position
        whole_end = tl.maximum(tl.minimum(kv_len, oldest + 1), 0)
        end = tl.minimum(kv_len, newest + 1)
        if HAS_WINDOW:
            start = tl.maximum(oldest + 1 - sliding_window, 0)
            whole_start = tl.maximum(newest + 1 - sliding_window, 0)
    start = start // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, tl.num_programs(1)), MIN_TILES) * BLOCK_N
    start += split * share
    end = tl.minimum(end, start + share)

    d = tl.arange(0, BLOCK_D)[None, :]
    if q_desc is not None:
        q = q_desc.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
        q_rest = q
        if BLOCK_E > 0:
            q_rest = q_rest_desc.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_E)
    else:
        q_row = q_ptr + batch.to(tl.int64) * stride_q_batch + q_head.to(tl.int64) * stride_q_head
        q_row += query.to(tl.int64) * stride_q_token
        in_q = in_queries[:, None] & (d < HEAD_DIM)
        q = tl.load(q_row[:, None] + d, mask=in_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        q_rest = q
        if BLOCK_E > 0:
            e = BLOCK_D + tl.arange(0, BLOCK_E)[None, :]
            in_rest = in_queries[:, None] & (e < HEAD_DIM)
            q_rest = tl.load(q_row[:, None] + e, mask=in_rest, other=0.0)
    if NEGATE:
        q, q_rest = -q, -q_rest
    k_head_ptr = k_ptr + batch.to(tl.int64) * stride_k_batch + kv_head.to(tl.int64) * stride_k_head
    v_head_ptr = v_ptr + batch.to(tl.int64) * stride_v_batch + kv_head.to(tl.int64) * stride_v_head

    sink_log2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=in_queries, other=0.0).to(tl.float32)
        sink_log2 = tl.where(split == 0, sink * LOG2_E, sink_log2)
    m_i, l_i = first_state(sink_log2)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    whole_start = tl.maximum(tl.cdiv(whole_start, BLOCK_N) * BLOCK_N, start)
    whole_end = tl.minimum(whole_end, end) // BLOCK_N * BLOCK_N
    clear_v: tl.constexpr = k_desc is not None and kv_lens_ptr is not None
    if ONE_LOOP:
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, q_rest, k_desc, k_rest_desc, v_desc, k_head_ptr, v_head_ptr, batch,
            kv_head, stride_k_row, stride_v_row, start, end, whole_start, whole_end,
            block * BLOCK_M, first_position, sliding_window, kv_len, scale_log2, softcap_log2,
            MIXED, clear_v, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM, rows_per_query,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, PRECISION,
        )  # fmt: skip
    else:
        if HAS_WINDOW:
            head_end = tl.minimum(whole_start, end)
            acc, m_i, l_i = _attend(
                acc, m_i, l_i, q, q_rest, k_desc, k_rest_desc, v_desc, k_head_ptr, v_head_ptr,
                batch, kv_head, stride_k_row, stride_v_row, start, head_end, whole_start, whole_end,
                block * BLOCK_M, first_position, sliding_window, kv_len, scale_log2, softcap_log2,
                CROSSED, clear_v, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM,
                rows_per_query, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, PRECISION,
            )  # fmt: skip
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, q_rest, k_desc, k_rest_desc, v_desc, k_head_ptr, v_head_ptr, batch,
            kv_head, stride_k_row, stride_v_row, whole_start, whole_end, whole_start, whole_end,
            block * BLOCK_M, first_position, sliding_window, kv_len, scale_log2, softcap_log2,
            WHOLE, clear_v, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM, rows_per_query,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, PRECISION,
        )  # fmt: skip
        tail_start = tl.maximum(whole_start, whole_end)
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, q_rest, k_desc, k_rest_desc, v_desc, k_head_ptr, v_head_ptr, batch,
            kv_head, stride_k_row, stride_v_row, tail_start, end, whole_start, whole_end,
            block * BLOCK_M, first_position, sliding_window, kv_len, scale_log2, softcap_log2,
            CROSSED, clear_v, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, VALUE_DIM,
            rows_per_query, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, PRECISION,
        )  # fmt: skip

    out, lse = finish(acc, m_i, l_i)
    out = out.to(out_ptr.dtype.element_ty)
    if out_desc is not None:
        at = [batch, head, block * BLOCK_M, 0]
        out_desc.store(at, out.reshape(1, 1, BLOCK_M, BLOCK_V))
    else:
        out_row = out_ptr + batch.to(tl.int64) * stride_out_batch
        out_row += q_head.to(tl.int64) * stride_out_head + query.to(tl.int64) * stride_out_token
        out_row += split * stride_out_split
        v_d = tl.arange(0, BLOCK_V)[None, :]
        tl.store(out_row[:, None] + v_d, out, mask=in_queries[:, None] & (v_d < VALUE_DIM))
    if lse_ptr is not None:
        lse_row = lse_ptr + batch.to(tl.int64) * stride_lse_batch + split
        lse_row += q_head.to(tl.int64) * stride_lse_head + query.to(tl.int64) * stride_lse_token
        tl.store(lse_row, lse, mask=in_queries)


def split_columns(head_dim: int) -> tuple[int, int]:
    """Columns of the two products that make scores: 192 are 128 and 64, where 256 would be padded.

    The second is 0 where it would save nothing.
    """
    whole = max(next_power_of_2(head_dim), 16)
    first = whole // 2
    second = max(next_power_of_2(head_dim - first), 16) if head_dim > first else 0
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


def describe_rows(x: Tensor, num_rows: int, block: int, block_d: int) -> TensorDescriptor:
    """The first ``num_rows`` rows of x [batch, heads, rows, head_dim], in blocks of rows.

    What a block has beyond them, or beyond head_dim, reads as zero and is not written: no row of
    a cache that is not valid yet gets near a product.
    """
    batch, heads, _, head_dim = x.shape
    # The stride of a single index is never used, but must look like one.
    used = [s if n > 1 else head_dim for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(
        x, [batch, heads, num_rows, head_dim], [*used, 1], [1, 1, block, block_d]
    )


@ops.flash_attention.impl("triton")
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
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity, value_dim = k.shape[1], k.shape[2], v.shape[3]
    y = q.new_empty(batch, num_heads, q_len, value_dim) if out is None else out
    if batch * num_heads * q_len == 0:
        return y
    group = num_heads // num_kv_heads
    most_keys = capacity if kv_lens is not None or kv_len is None else kv_len
    has_window = causal and sliding_window > 0
    plan = choose_plan(q, k, v, y, most_keys, kv_lens, sliding_window if has_window else 0)
    block_d, block_e = split_columns(head_dim)
    block_v = max(next_power_of_2(value_dim), 16)
    out_desc = q_desc = q_rest_desc = k_desc = k_rest_desc = v_desc = None
    if plan.described:
        if not plan.packed and plan.splits == 1:
            q_first = q[..., :block_d] if block_e else q
            q_desc = describe_rows(q_first, q_len, plan.block_m, block_d)
            if block_e:
                q_rest_desc = describe_rows(q[..., block_d:], q_len, plan.block_m, block_e)
            out_desc = describe_rows(y, q_len, plan.block_m, block_v)
        k_first = k[..., :block_d] if block_e else k
        k_desc = describe_rows(k_first, most_keys, plan.block_n, block_d)
        if block_e:
            k_rest_desc = describe_rows(k[..., block_d:], most_keys, plan.block_n, block_e)
        v_desc = describe_rows(v, most_keys, plan.block_n, block_v)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    factor = abs(scale) * LOG2_E.value * (2.0 / softcap if softcap > 0 else 1.0)
    factor = max(factor, LEAST_SCALE.value)

    if plan.splits > 1:
        shape = (batch, num_heads, q_len, plan.splits)
        partial = torch.empty((*shape, value_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        target, target_strides = partial, partial.stride()[:4]
        sums, sums_strides = partial_lse, partial_lse.stride()[:3]
    else:
        target, target_strides = y, (*y.stride()[:3], 0)
        sums, sums_strides = lse, (0, 0, 0) if lse is None else lse.stride()
    pairs = batch * (num_kv_heads if plan.packed else num_heads)
    blocks = cdiv(q_len * (group if plan.packed else 1), plan.block_m)
    _flash_attention_kernel.launch(
        (blocks * pairs, plan.splits),
        target,
        q,
        k,
        v,
        kv_lens,
        sinks,
        sums,
        out_desc,
        q_desc,
        q_rest_desc,
        k_desc,
        k_rest_desc,
        v_desc,
        *target_strides,
        *sums_strides,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        num_kv_heads,
        sliding_window,
        plan.heads_at_once,
        q_len,
        most_keys,
        0 if pos_offset is None else pos_offset,
        factor,
        softcap * LOG2_E.value,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        GROUP=group,
        PACKED=plan.packed,
        NEGATE=scale < 0,
        IS_CAUSAL=causal,
        HAS_WINDOW=has_window,
        HAS_SOFTCAP=softcap > 0,
        HAS_POS_OFFSET=pos_offset is not None,
        ONE_LOOP=plan.one_loop,
        MIN_TILES=plan.min_tiles,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        BLOCK_V=block_v,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.splits > 1:
        merge_splits(y, lse, partial, partial_lse)
    return y
