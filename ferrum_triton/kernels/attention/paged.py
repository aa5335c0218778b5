"""Attention over paged pools: which launches a call takes.

Sequences of few queries go to paged decode, which splits their keys; longer ones to paged prefill,
a launch of its own before it. Where prefill has too few blocks for the GPU, it takes all sequences
and splits their keys too.
"""

import torch
from torch import Tensor

from ferrum_triton.kernels.attention.decode_config import decode_config, is_plain
from ferrum_triton.kernels.attention.paged_decode import Call, launch_decode, sizes_of
from ferrum_triton.kernels.attention.paged_prefill import (
    choose_prefill,
    launch_prefill,
    may_differ,
    splits_of,
)
from ferrum_triton.kernels.attention.pages import as_pool
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.tuning import Config
from ferrum_triton.ops.attention.paged_decode import paged_decode_attention as decode_op
from ferrum_triton.ops.attention.paged_varlen import paged_varlen_attention as varlen_op

# The most queries of a sequence that paged decode takes, and the rows of a KV head, queries times
# heads, that it always takes.
FEW_QUERIES, FEW_ROWS = 8, 16


def configure(
    call: Call,
    cache: torch.dtype,
    layout: str,
    rows: int,
    batch_invariant: bool = False,
    beside_prefill: bool = False,
) -> Config:
    """The configuration of a decode launch.

    Args:
        rows: queries times heads of a sequence and KV head.
        beside_prefill: whether it has the other sequences of a batch whose prefill is under way.
    """
    sizes = sizes_of(call, cache, batch_invariant)
    is_varlen, plain = call.cu_seqlens_q is not None, is_plain(call.out.shape[3], cache, layout)
    return decode_config.pick(call.q.device, *sizes, rows, is_varlen, beside_prefill, plain)


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
    q_len, head_dim = q.shape[1], q.shape[3]
    call = Call(
        out=y,
        lse=lse,
        q=q,
        pool=as_pool(k_cache, v_cache, k_scales, v_scales, layout, in_words=q.itemsize == 2),
        block_tables=block_tables,
        kv_lens=kv_lens,
        pos_offsets=None,
        cu_seqlens_q=None,
        sinks=sinks,
        scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    config = configure(call, k_cache.dtype, layout, q_len * call.group, batch_invariant)
    launch_decode(call, config, q_len, batch_invariant)
    return y


def _prefill_of_few(call: Call, longest: int) -> Config | None:
    """Hopper's prefill for sequences of few queries, where it takes less time than decode.

    It does over floats, where a sequence's rows are more than FEW_ROWS, sequences have about as
    many, and there is work for two fifths of the SMs, or keys can be cut into parts: decode has
    tiles of 32 rows, and prefill of 128. With 32 heads over 8 of 128, eight sequences of five
    queries on 4,096 keys take 60 us for 73, and 64 of them 270 us for 355 (``bench.timing.Replay``
    of ``paged_varlen_attention`` with ``FEW_QUERIES`` of 4 under ``prefill_config.forced``, and
    under ``decode_config.forced``, H200, cdd887f). One takes 19.9 us for 33.9 on 8,192 keys, 12.2
    for 12.8 on 1,024, and 11.0 for 10.4 on 512 (``device_us`` of it with ``FEW_QUERIES`` of 2 and
    of 8, what became 2a405fe).
    """
    if longest > FEW_QUERIES or longest * call.group <= FEW_ROWS or call.pool.layout.quantised:
        return None
    if may_differ(call, longest):
        return None
    config = choose_prefill(call)
    programs = call.block_tables.shape[0] * call.pool.num_kv_heads
    has_work = 5 * programs >= 2 * processors(call.q.device) or splits_of(call, config, longest) > 1
    return config if has_work and "path" in config else None


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
    num_tokens, _, head_dim = q.shape
    if q.numel() == 0:
        return y
    if block_tables.shape[0] == 0:
        y.zero_()
        return y if lse is None else (lse.fill_(-torch.inf), y)[1]
    caches = k_cache, v_cache, k_scales, v_scales, layout
    call = Call(
        out=y[None],
        lse=None if lse is None else lse[None],
        q=q[None],
        pool=as_pool(*caches, in_words=q.itemsize == 2),
        block_tables=block_tables,
        kv_lens=None,
        pos_offsets=pos_offsets,
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
        scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    longest = num_tokens if max_q_len is None else min(max_q_len, num_tokens)
    of_few = _prefill_of_few(call, longest)
    few = min(FEW_QUERIES, longest) if of_few is None else max(FEW_ROWS // call.group, 1)
    has_long = longest > few
    if has_long:
        # Only decode takes codes in words.
        in_words = call.pool.layout.quantised
        prompts = call._replace(pool=as_pool(*caches)) if in_words else call
        prefill = of_few or choose_prefill(prompts)
        splits = splits_of(prompts, prefill, longest)
        if splits > 1:
            launch_prefill(prompts, 0, longest, prefill, splits)
            return y
        launch_prefill(prompts, few, longest, prefill)
    config = configure(call, k_cache.dtype, layout, call.group, beside_prefill=has_long)
    launch_decode(call, config, few, False, after_prefill=has_long)
    return y
