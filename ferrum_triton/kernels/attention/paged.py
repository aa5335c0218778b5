"""Attention over paged caches: the launchers."""

import torch
from torch import Tensor

from ferrum_triton.kernels.attention.decode_config import decode_launch
from ferrum_triton.kernels.attention.paged_decode import launch_decode
from ferrum_triton.kernels.attention.paged_prefill import launch_prefill
from ferrum_triton.kernels.attention.pages import as_pool
from ferrum_triton.ops.attention.paged_decode import paged_decode_attention as decode_op
from ferrum_triton.ops.attention.paged_varlen import paged_varlen_attention as varlen_op

# Queries of a sequence up to which it is a decode step's.
FEW_QUERIES = 8


@decode_op.impl("triton")
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
    y = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.numel() == 0:
        return y
    batch, q_len, num_heads, head_dim = q.shape
    pool = as_pool(k_cache, v_cache, k_scales, v_scales, layout, in_words=q.itemsize == 2)
    config = decode_launch(
        q.device,
        batch,
        pool.num_kv_heads,
        block_tables.shape[1] * pool.block_size,
        head_dim,
        k_cache.dtype,
        q_len * (num_heads // pool.num_kv_heads),
        layout == "vllm_x",
        batch_invariant,
    )
    scale = float(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    launch_decode(
        config,
        y,
        lse,
        q,
        pool,
        block_tables,
        (kv_lens, None, None),
        sinks,
        q_len,
        scale,
        sliding_window,
        softcap,
        batch_invariant,
    )
    return y


@varlen_op.impl("triton")
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
    y = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, max_blocks = block_tables.shape
    if q.numel() == 0:
        return y
    if num_seqs == 0:
        y.zero_()
        return y if lse is None else (lse.fill_(-torch.inf), y)[1]
    caches = k_cache, v_cache, k_scales, v_scales, layout
    scale = float(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    longest = num_tokens if max_q_len is None else min(max_q_len, num_tokens)
    few = min(FEW_QUERIES, longest)
    rows = y[None], None if lse is None else lse[None], q[None]
    options = sinks, few, scale, sliding_window, softcap
    has_long = longest > few
    pool = as_pool(*caches, in_words=q.itemsize == 2)
    if has_long:
        # Only decode takes codes in words.
        alone = pool if k_cache.dtype == q.dtype else as_pool(*caches)
        launch_prefill(*rows, alone, block_tables, pos_offsets, cu_seqlens_q, *options)
    config = decode_launch(
        q.device,
        num_seqs,
        pool.num_kv_heads,
        max_blocks * pool.block_size,
        head_dim,
        k_cache.dtype,
        num_heads // pool.num_kv_heads,
        layout == "vllm_x",
        batch_invariant=False,
        is_varlen=True,
    )
    lengths = None, pos_offsets, cu_seqlens_q
    launch_decode(config, *rows, pool, block_tables, lengths, *options, False, has_long)
    return y
