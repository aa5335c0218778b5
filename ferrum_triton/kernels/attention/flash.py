"""Flash attention over a contiguous cache: one program per block of queries and head.

Keys and values stream through in blocks with an online softmax in base 2. When queries are few
(decode), the query heads that share a KV head are packed into the block's rows, so that the cache
is read once for all of them and the tensor cores' 16 rows are used.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.attention import flash as ops

LOG2_E = 1.4426950408889634


@triton.jit
def online_softmax_step(scores, visible, v, acc, m_i, l_i, PRECISION: tl.constexpr):
    """Fold one block of scores (in base 2) and values into the running softmax.

    A row that has seen nothing yet keeps m = -inf; subtracting 0 instead of it avoids inf - inf.
    """
    scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, l_i


@kernel(dynamic=("q_len", "kv_len", "pos_offset", "scale_log2"))
def _flash_attention_kernel(
    out_ptr,  # [batch, num_heads, q_len, head_dim]
    q_ptr,  # [batch, num_heads, q_len, head_dim]
    k_ptr,  # [batch, num_kv_heads, capacity, head_dim]
    v_ptr,  # [batch, num_kv_heads, capacity, head_dim]
    kv_lens_ptr,  # [batch] or None
    stride_out_batch,
    stride_out_head,
    stride_out_token,
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
    head_dim,
    sliding_window,
    q_len,
    kv_len,  # valid keys, or the capacity where kv_lens is given
    pos_offset,  # read if HAS_POS_OFFSET
    scale_log2,  # softmax scale times log2(e)
    GROUP: tl.constexpr,  # query heads per KV head
    PACKED: tl.constexpr,  # rows are (query, head of the group); else queries of one head
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_POS_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= head_dim
    PRECISION: tl.constexpr,  # of float32 products
):
    heads_here = num_kv_heads if PACKED else num_kv_heads * GROUP
    rows_per_query = GROUP if PACKED else 1
    batch = (tl.program_id(1) // heads_here).to(tl.int64)
    head = (tl.program_id(1) % heads_here).to(tl.int64)
    kv_head = head if PACKED else head // GROUP

    # The last blocks see the most keys when causal: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    m = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // rows_per_query
    q_head = head * GROUP + m % rows_per_query if PACKED else head + m * 0
    in_queries = query < q_len
    d = tl.arange(0, BLOCK_D)[None, :]
    in_head = d < head_dim

    if kv_lens_ptr is not None:
        kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch).to(tl.int32), 0), kv_len)
    first_position = pos_offset if HAS_POS_OFFSET else kv_len - q_len
    position = query + first_position  # [BLOCK_M]

    start, end = 0, kv_len
    if IS_CAUSAL:
        first_query = block * BLOCK_M // rows_per_query
        last_query = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // rows_per_query, q_len - 1)
        end = tl.minimum(kv_len, last_query + first_position + 1)
        if HAS_WINDOW:
            oldest = first_query + first_position + 1 - sliding_window
            start = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N

    q_block = q_ptr + batch * stride_q_batch + q_head[:, None] * stride_q_head
    q = tl.load(
        q_block + query[:, None] * stride_q_token + d,
        mask=in_queries[:, None] & in_head,
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    k_head = k_ptr + batch * stride_k_batch + kv_head * stride_k_head
    v_head = v_ptr + batch * stride_v_batch + kv_head * stride_v_head

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row = n.to(tl.int64)[:, None]
        loaded = (n < end)[:, None] & in_head
        k = tl.load(k_head + row * stride_k_row + d, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_head + row * stride_v_row + d, mask=loaded, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = (n < kv_len)[None, :] & in_queries[:, None]
        if IS_CAUSAL:
            visible = visible & (n[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (n[None, :] > position[:, None] - sliding_window)
        acc, m_i, l_i = online_softmax_step(scores, visible, v, acc, m_i, l_i, PRECISION)

    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_block = out_ptr + batch * stride_out_batch + q_head[:, None] * stride_out_head
    tl.store(
        out_block + query[:, None] * stride_out_token + d,
        out.to(out_ptr.dtype.element_ty),
        mask=in_queries[:, None] & in_head,
    )


class FlashConfig(NamedTuple):
    """Tile shape of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def pick_config(rows: int, head_dim: int, dtype: torch.dtype) -> FlashConfig:
    """Tiles that fit 99 KB of shared memory (sm_86 and up); rows are queries × packed heads."""
    if dtype == torch.float32:
        return FlashConfig(16 if rows <= 16 else 32, 32, 4, 1 if head_dim > 64 else 2)
    if rows <= 16:
        return FlashConfig(16, 64, 4, 2 if head_dim > 128 else 3)
    if head_dim > 128:
        return FlashConfig(64, 32, 4, 2)
    return FlashConfig(64, 64, 4, 2) if rows <= 64 else FlashConfig(128, 64, 8, 2)


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    y = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.numel() == 0:
        return y
    group = num_heads // num_kv_heads
    packed = group > 1 and q_len <= 16
    rows = q_len * group if packed else q_len
    heads = num_kv_heads if packed else num_heads
    config = pick_config(rows, head_dim, q.dtype)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    _flash_attention_kernel.launch(
        (cdiv(rows, config.block_m), heads * batch),
        y,
        q,
        k,
        v,
        kv_lens,
        *(y.stride()[:3]),
        *(q.stride()[:3]),
        *(k.stride()[:3]),
        *(v.stride()[:3]),
        num_kv_heads,
        head_dim,
        sliding_window,
        q_len,
        capacity if kv_lens is not None or kv_len is None else kv_len,
        0 if pos_offset is None else pos_offset,
        scale * LOG2_E,
        GROUP=group,
        PACKED=packed,
        IS_CAUSAL=causal,
        HAS_WINDOW=causal and sliding_window > 0,
        HAS_POS_OFFSET=pos_offset is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y
