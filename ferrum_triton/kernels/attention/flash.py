"""Flash attention over a contiguous cache: one program per block of queries, head and split.

Keys and values stream through in tiles with an online softmax. Most tiles are seen whole by every
query of the block and run unmasked; only those that a diagonal, a window's edge or the end of the
keys crosses are masked. Where queries are few, the query heads that share a KV head are packed
into the block's rows, so that the cache is read once for all of them, and the keys are split among
programs whose partial results :func:`~ferrum_triton.kernels.attention.merge.merge_parts` merges.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.attention.flash_config import padded, split_columns
from ferrum_triton.kernels.attention.flash_plan import choose_plan
from ferrum_triton.kernels.attention.flash_tiles import (
    CROSSED,
    MIXED,
    WHOLE,
    Cache,
    Queries,
    Variant,
    attend,
    keys_seen,
)
from ferrum_triton.kernels.attention.merge import merge_parts, strides_of
from ferrum_triton.kernels.attention.softmax import (
    LEAST_SCALE,
    LOG2_E,
    finish,
    first_state,
    store_rows,
)
from ferrum_triton.kernels.attention.tensor_maps import describe
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops.attention import flash as ops


@kernel(dynamic=("heads_at_once", "q_len", "kv_len", "pos_offset", "scale_log2", "softcap_log2"))
def _flash_attention_kernel(
    out_ptr,  # [batch, num_heads, q_len, value_dim], in float32 for each split if there are several
    lse_ptr,  # [batch, num_heads, q_len], for each split if there are several, or None
    q_ptr,  # [batch, num_heads, q_len, head_dim]
    k_ptr,  # [batch, num_kv_heads, capacity, head_dim]
    v_ptr,  # [batch, num_kv_heads, capacity, value_dim]
    sinks_ptr,  # [num_heads] or None
    kv_lens_ptr,  # [batch] or None
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
    stride_lse_split,
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
    pos_offset,  # position of query 0, read if has_pos_offset
    scale_log2,  # |softmax scale| · log2(e); with a cap twice that over the cap
    softcap_log2,  # softcap · log2(e)
    VARIANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v over a split of the keys."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    GROUP: tl.constexpr = VARIANT.group
    BLOCK_M: tl.constexpr = VARIANT.block_m
    BLOCK_D: tl.constexpr = VARIANT.block_d
    BLOCK_E: tl.constexpr = VARIANT.block_e
    BLOCK_V: tl.constexpr = VARIANT.block_v
    VALUE_DIM: tl.constexpr = VARIANT.value_dim
    # The last blocks see the most keys when causal: they start first, those of all heads (as many
    # as have room in the cache) side by side, a KV head's own next to each other.
    num_blocks = tl.cdiv(q_len * VARIANT.rows_per_query, BLOCK_M)
    section = tl.program_id(0) // (num_blocks * heads_at_once)
    inside = tl.program_id(0) % (num_blocks * heads_at_once)
    first_row = (num_blocks - 1 - inside // heads_at_once) * BLOCK_M
    pair = section * heads_at_once + inside % heads_at_once
    heads_here = num_kv_heads if VARIANT.packed else num_kv_heads * GROUP
    batch = pair // heads_here
    head = pair % heads_here
    kv_head = head if VARIANT.packed else head // GROUP
    split = tl.program_id(1)

    m = first_row + tl.arange(0, BLOCK_M)
    query = m // VARIANT.rows_per_query
    in_queries = query < q_len
    q_head = head * GROUP + m % VARIANT.rows_per_query if VARIANT.packed else head + m * 0

    if kv_lens_ptr is not None:
        kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch), 0), kv_len).to(tl.int32)
    first_position = pos_offset if VARIANT.has_pos_offset else kv_len - q_len
    span = keys_seen(first_row, first_position, q_len, kv_len, sliding_window, split, VARIANT)

    d = tl.arange(0, BLOCK_D)[None, :]
    if q_desc is not None:
        q = q_desc.load([batch, head, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
        q_rest = q
        if BLOCK_E > 0:
            q_rest = q_rest_desc.load([batch, head, first_row, 0])
            q_rest = q_rest.reshape(BLOCK_M, BLOCK_E)
    else:
        q_row = q_ptr + batch.to(tl.int64) * stride_q_batch + q_head.to(tl.int64) * stride_q_head
        q_row += query.to(tl.int64) * stride_q_token
        in_q = in_queries[:, None] & (d < VARIANT.head_dim)
        q = tl.load(q_row[:, None] + d, mask=in_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        q_rest = q
        if BLOCK_E > 0:
            e = BLOCK_D + tl.arange(0, BLOCK_E)[None, :]
            in_rest = in_queries[:, None] & (e < VARIANT.head_dim)
            q_rest = tl.load(q_row[:, None] + e, mask=in_rest, other=0.0)
    if VARIANT.negate:
        q, q_rest = -q, -q_rest
    queries = Queries(
        q, q_rest, first_row, first_position, sliding_window, scale_log2, softcap_log2
    )
    k_head_ptr = k_ptr + batch.to(tl.int64) * stride_k_batch + kv_head.to(tl.int64) * stride_k_head
    v_head_ptr = v_ptr + batch.to(tl.int64) * stride_v_batch + kv_head.to(tl.int64) * stride_v_head
    cache = Cache(
        k_desc,
        k_rest_desc,
        v_desc,
        batch,
        kv_head,
        k_head_ptr,
        v_head_ptr,
        stride_k_row,
        stride_v_row,
        kv_len,
    )

    sink_log2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=in_queries, other=0.0).to(tl.float32)
        sink_log2 = tl.where(split == 0, sink * LOG2_E, sink_log2)
    state = first_state(tl.zeros([BLOCK_M, BLOCK_V], tl.float32), sink_log2)

    CLEAR_V: tl.constexpr = k_desc is not None and kv_lens_ptr is not None
    if VARIANT.one_loop:
        state = attend(state, queries, cache, span.start, span.end, span, MIXED, CLEAR_V, VARIANT)
    else:
        if VARIANT.has_window:
            head_end = tl.minimum(span.whole_start, span.end)
            state = attend(
                state, queries, cache, span.start, head_end, span, CROSSED, CLEAR_V, VARIANT
            )
        state = attend(
            state, queries, cache, span.whole_start, span.whole_end, span, WHOLE, CLEAR_V, VARIANT
        )
        tail_start = tl.maximum(span.whole_start, span.whole_end)
        state = attend(state, queries, cache, tail_start, span.end, span, CROSSED, CLEAR_V, VARIANT)

    out, lse = finish(state, 1.0)
    lse_rows = lse_ptr
    if lse_ptr is not None:
        lse_rows += batch.to(tl.int64) * stride_lse_batch + q_head.to(tl.int64) * stride_lse_head
        lse_rows += query.to(tl.int64) * stride_lse_token + split.to(tl.int64) * stride_lse_split
    if out_desc is not None:
        out = out.to(out_ptr.dtype.element_ty).reshape(1, 1, BLOCK_M, BLOCK_V)
        out_desc.store([batch, head, first_row, 0], out)
        if lse_ptr is not None:
            tl.store(lse_rows, lse, mask=in_queries)
    else:
        out_rows = out_ptr + batch.to(tl.int64) * stride_out_batch
        out_rows += q_head.to(tl.int64) * stride_out_head + query.to(tl.int64) * stride_out_token
        out_rows += split.to(tl.int64) * stride_out_split
        store_rows(out_rows, lse_rows, out, lse, in_queries, VALUE_DIM)


def describe_columns(
    x: Tensor, num_rows: int, block: int, block_d: int, block_e: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """The first block_d columns of x's rows, and the other ones where block_e > 0."""
    if not block_e:
        return describe(x, num_rows, block, block_d), None
    first = describe(x[..., :block_d], num_rows, block, block_d)
    return first, describe(x[..., block_d:], num_rows, block, block_e)


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
    window = sliding_window if has_window else 0
    plan = choose_plan(q, k, v, y, most_keys, kv_lens, window, causal)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    factor = abs(scale) * LOG2_E.value * (2.0 / softcap if softcap > 0 else 1.0)
    factor = max(factor, LEAST_SCALE.value)
    if "path" in plan.tile:
        from ferrum_triton.kernels.hopper.attention import Masks, attend_prefill

        masks = Masks(most_keys, kv_lens, pos_offset, causal, window)
        attend_prefill(y, lse, q, k, v, sinks, masks, factor, softcap, plan, negate=scale < 0)
        return y
    block_m, block_n = plan.tile["BLOCK_M"], plan.tile["BLOCK_N"]
    block_d, block_e = split_columns(head_dim)
    block_v = padded(value_dim)
    out_desc = q_desc = q_rest_desc = k_desc = k_rest_desc = v_desc = None
    if plan.use_tma:
        if not plan.packed and plan.splits == 1:
            q_desc, q_rest_desc = describe_columns(q, q_len, block_m, block_d, block_e)
            out_desc = describe(y, q_len, block_m, block_v)
        k_desc, k_rest_desc = describe_columns(k, most_keys, block_n, block_d, block_e)
        v_desc = describe(v, most_keys, block_n, block_v)

    target, sums = y, lse
    parts = part_lses = None
    if plan.splits > 1:
        rows = (plan.splits, batch, q_len, num_heads)
        parts = torch.empty((*rows, value_dim), dtype=torch.float32, device=q.device)
        part_lses = torch.empty(rows, dtype=torch.float32, device=q.device)
        target, sums = parts.permute(1, 3, 2, 0, 4), part_lses.permute(1, 3, 2, 0)
    pairs = batch * (num_kv_heads if plan.packed else num_heads)
    blocks = cdiv(q_len * (group if plan.packed else 1), block_m)
    axes = ("batch", "head", "token")
    steps = strides_of("out", target, *axes) | {"stride_out_split": 0, "stride_lse_split": 0}
    steps |= strides_of("lse", sums, *axes) | strides_of("q", q, *axes)
    if parts is not None:
        steps |= {"stride_out_split": parts.stride(0), "stride_lse_split": part_lses.stride(0)}
    steps |= strides_of("k", k, "batch", "head", "row") | strides_of("v", v, "batch", "head", "row")
    variant = Variant(
        head_dim=head_dim,
        value_dim=value_dim,
        group=group,
        packed=plan.packed,
        negate=scale < 0,
        is_causal=causal,
        has_window=has_window,
        has_softcap=softcap > 0,
        has_pos_offset=pos_offset is not None,
        one_loop=plan.one_loop,
        min_tiles=plan.min_tiles,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_e=block_e,
        block_v=block_v,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
    )
    _flash_attention_kernel.launch(
        (blocks * pairs, plan.splits),
        out_ptr=target,
        lse_ptr=sums,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        sinks_ptr=sinks,
        kv_lens_ptr=kv_lens,
        out_desc=out_desc,
        q_desc=q_desc,
        q_rest_desc=q_rest_desc,
        k_desc=k_desc,
        k_rest_desc=k_rest_desc,
        v_desc=v_desc,
        **steps,
        num_kv_heads=num_kv_heads,
        sliding_window=sliding_window,
        heads_at_once=plan.heads_at_once,
        q_len=q_len,
        kv_len=most_keys,
        pos_offset=0 if pos_offset is None else pos_offset,
        scale_log2=factor,
        softcap_log2=softcap * LOG2_E.value,
        VARIANT=variant,
        num_warps=plan.tile["num_warps"],
        num_stages=plan.tile["num_stages"],
    )
    if parts is not None:
        merged_lse = None if lse is None else lse.transpose(1, 2)
        merge_parts(y.transpose(1, 2), merged_lse, parts, part_lses)
    return y
