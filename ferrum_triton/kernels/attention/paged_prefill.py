"""Attention of many queries a sequence over paged caches: a block of queries and KV head a program.

The heads that share a KV head are rows of one block, so that a tile of keys is read once for all.
Sequences differ in length and lie in device memory: the grid covers the most blocks there can be,
and each program finds its block by a running sum over the sequences.
"""

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.pages import (
    Pool,
    attend_range,
    finish_rows,
    scaled_queries,
    sink_state,
    token_strides,
)
from ferrum_triton.kernels.attention.plan import pick, sequence_lengths
from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E
from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.rows import next_power_of_2

# More queries than any sequence has: no upper bound.
ANY = tl.constexpr(2**31 - 1)


@kernel(
    dynamic=("num_seqs", "capacity", "num_blocks", "sliding_window", "scale", "softcap")
)  # fmt: skip
def _paged_prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    lse_ptr,  # [num_tokens, num_heads] or None
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    k_cache_ptr,  # pool
    v_cache_ptr,  # pool
    block_tables_ptr,  # [num_seqs, max_blocks]
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    k_scales_ptr,  # of slots or heads, or None
    v_scales_ptr,
    sinks_ptr,  # [num_heads] or None
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_head,
    stride_k_slot,
    stride_k_piece,
    stride_v_block,
    stride_v_head,
    stride_v_slot,
    stride_v_piece,
    stride_k_scales_block,
    stride_k_scales_head,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_head,
    stride_v_scales_slot,
    stride_table,
    num_kv_heads,
    num_seqs,
    capacity,  # keys a block table can hold
    num_blocks,
    sliding_window,
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    GROUP: tl.constexpr,  # query heads a KV head
    FEW: tl.constexpr,  # sequences of no more queries are another launch's
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    QUANTISED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    # The last blocks of a sequence see the most keys: they start first.
    block = tl.num_programs(0) // num_kv_heads - 1 - tl.program_id(0) // num_kv_heads
    seqs = tl.arange(0, BLOCK_B)
    queries, _, known = sequence_lengths(
        seqs, num_seqs, None, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, 0, ANY
    )
    blocks = tl.where(known & (queries > FEW), tl.cdiv(queries, BLOCK_Q), 0)
    ends = tl.cumsum(blocks, axis=0)
    if block >= tl.sum(blocks, axis=0):
        return
    seq = tl.sum((ends <= block).to(tl.int32), axis=0)
    first_query = (block - (pick(ends, seq, BLOCK_B) - pick(blocks, seq, BLOCK_B))) * BLOCK_Q
    queries, keys, _ = sequence_lengths(
        seq, num_seqs, None, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, 0, ANY
    )

    row = tl.arange(0, BLOCK_M)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    in_rows = (query < queries) & (row < BLOCK_Q * GROUP)
    first_position = keys - queries + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, keys) - 1
    position = keys - queries + query
    token = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64) + query
    d = tl.arange(0, BLOCK_D)[None, :]
    in_tile = in_rows[:, None] & (d < HEAD_DIM)

    q_rows = q_ptr + token * stride_q_token + head * stride_q_head
    q = tl.load(q_rows[:, None] + d, mask=in_tile, other=0.0)
    q, score_factor, v_factor = scaled_queries(
        q, scale, k_scales_ptr, v_scales_ptr, kv_head * stride_k_scales_head,
        kv_head * stride_v_scales_head, SCALES, FORMAT, QUANTISED,
    )  # fmt: skip

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        m_i, l_i = sink_state(sinks_ptr, head, in_rows)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position + 1 - sliding_window, 0) // BLOCK_N
    end_tile = tl.cdiv(tl.maximum(last_position + 1, 0), BLOCK_N)
    # Edges of the window, tiles that every query sees whole, and the diagonal.
    whole_end = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N, first_tile), end_tile)
    whole_start = first_tile
    if HAS_WINDOW:
        seen_from = tl.maximum(last_position + 1 - sliding_window, 0)
        whole_start = tl.minimum(tl.cdiv(seen_from, BLOCK_N), whole_end)
    acc, m_i, l_i = attend_range(
        acc, m_i, l_i, q, position, first_tile, whole_start, whole_end, end_tile, keys, seq,
        kv_head, block_tables_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr,
        stride_table, stride_k_block, stride_k_head, stride_k_slot, stride_k_piece, stride_v_block,
        stride_v_head, stride_v_slot, stride_v_piece, stride_k_scales_block, stride_k_scales_head,
        stride_k_scales_slot, stride_v_scales_block, stride_v_scales_head, stride_v_scales_slot,
        num_blocks, sliding_window, score_factor, softcap, HAS_WINDOW, True, WIDE, HAS_WINDOW,
        HAS_CAP, SCALES, FORMAT, PAIRS, BLOCK_SIZE, K_PIECE, V_PIECE, HEAD_DIM, BLOCK_N, BLOCK_D,
        PRECISION,
    )  # fmt: skip
    acc, lse = finish_rows(acc, m_i, l_i, v_factor)

    out_rows = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(out_rows[:, None] + d, acc.to(out_ptr.dtype.element_ty), mask=in_tile)
    if lse_ptr is not None:
        lse_rows = lse_ptr + token * stride_lse_token + head * stride_lse_head
        tl.store(lse_rows, lse * LN_2, mask=in_rows)


def prefill_config(head_dim: int, dtype: torch.dtype, large: bool) -> dict[str, int]:
    """Rows, keys, warps and stages of a program; ``large`` from sm_90 on.

    Tiles of 128 keys would keep the tensor cores busier, but spill.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if head_dim > 128 or not large:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}


def launch_prefill(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    pool: Pool,
    block_tables: Tensor,
    pos_offsets: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    few: int,
    scale: float,
    sliding_window: int,
    softcap: float,
) -> None:
    """For q [1, num_tokens, num_heads, head_dim]; skips sequences of up to ``few`` queries."""
    num_seqs, max_blocks = block_tables.shape
    num_tokens, num_heads, head_dim = q.shape[1:]
    group = num_heads // pool.num_kv_heads
    config = prefill_config(head_dim, q.dtype, capability(q.device) >= (9, 0))
    block_m = max(config["BLOCK_M"], next_power_of_2(group))
    # A sequence of these has more than `few` queries, so there are at most so many.
    most_seqs = min(num_seqs, num_tokens // (few + 1))
    blocks = num_tokens // (block_m // group) + most_seqs
    _paged_prefill_kernel.launch(
        (blocks * pool.num_kv_heads,),
        out,
        lse,
        q,
        pool.k,
        pool.v,
        block_tables,
        pos_offsets,
        cu_seqlens_q,
        pool.k_scales,
        pool.v_scales,
        sinks,
        *token_strides(out, True)[1:],
        *((0, 0) if lse is None else token_strides(lse, True)[1:]),
        *token_strides(q, True)[1:],
        *pool.strides,
        block_tables.stride(0),
        pool.num_kv_heads,
        num_seqs,
        max_blocks * pool.block_size,
        pool.num_blocks,
        sliding_window,
        scale if softcap > 0 else scale * LOG2_E.value,
        float(softcap),
        GROUP=group,
        FEW=few,
        HAS_WINDOW=sliding_window > 0,
        HAS_CAP=softcap > 0,
        HEAD_DIM=head_dim,
        BLOCK_B=next_power_of_2(num_seqs),
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **pool.constexprs,
        **{**config, "BLOCK_M": block_m},
    )
