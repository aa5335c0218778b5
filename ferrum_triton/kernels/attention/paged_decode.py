"""Attention of few queries a sequence over paged caches: split over keys, then merged.

A program has one unit of the plan: a run of tiles of one sequence and KV head, for all queries of
the heads that share it, which are the rows of its products. Where a sequence is one unit its
program writes the result; else programs write float32 parts, and a second launch merges them.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.attention.codes import from_quarters, in_quarters
from ferrum_triton.kernels.attention.decode_config import INVARIANT_KEYS
from ferrum_triton.kernels.attention.pages import (
    Pool,
    attend_range,
    finish_rows,
    scaled_queries,
    sink_state,
    token_strides,
)
from ferrum_triton.kernels.attention.plan import (
    most_units,
    pick,
    sequence_lengths,
    tile_range,
    unit_range,
    units_of_sequences,
)
from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E
from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config

# Units a merging program reads at a time, at most.
MERGED_UNITS = 64


@kernel(
    dynamic=(
        "num_seqs", "capacity", "num_blocks", "q_len", "sliding_window", "shares", "least_tiles",
        "scale", "softcap",
    )
)  # fmt: skip
def _paged_decode_kernel(
    out_ptr,  # [num_seqs, q_len, num_heads, HEAD_DIM], or [num_tokens, ...] with cu_seqlens_q
    lse_ptr,  # as out without its last dimension, or None
    part_ptr,  # [units, num_kv_heads, rows, HEAD_DIM] float32, or None if no sequence is cut
    part_lse_ptr,  # [units, num_kv_heads, rows] float32, in base 2, or None
    q_ptr,  # as out
    k_cache_ptr,  # pool
    v_cache_ptr,  # pool
    block_tables_ptr,  # [num_seqs, max_blocks]
    kv_lens_ptr,  # [num_seqs], used without cu_seqlens_q
    pos_offsets_ptr,  # [num_seqs], used with cu_seqlens_q
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    k_scales_ptr,  # of slots or heads, or None
    v_scales_ptr,
    sinks_ptr,  # [num_heads] or None
    stride_out_seq,
    stride_out_token,
    stride_out_head,
    stride_lse_seq,
    stride_lse_token,
    stride_lse_head,
    stride_q_seq,
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
    row_blocks,  # of BLOCK_M rows, a unit and KV head
    num_seqs,
    capacity,  # keys a block table can hold
    num_blocks,
    q_len,
    sliding_window,
    shares,
    least_tiles,
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    GROUP: tl.constexpr,  # query heads a KV head
    MAX_Q: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FIXED: tl.constexpr,
    SCALES: tl.constexpr,  # "slot", "head" or ""
    FORMAT: tl.constexpr,  # "e4m3" if fp8 comes as bits, else ""
    PAIRS: tl.constexpr,  # how words of codes are unpacked, or ""
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
    BESIDE: tl.constexpr,  # the launch before may still run, and the last program has no unit
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    if BESIDE:
        # What follows waits for this launch alone, so that must not end first. One program sees to
        # it: were it all, those that have ended could not make room for others.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()
    units, ends = units_of_sequences(
        num_seqs, kv_lens_ptr, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, q_len, sliding_window,
        shares, least_tiles, MAX_Q, HAS_WINDOW, FIXED, BLOCK_N, BLOCK_B,
    )  # fmt: skip
    # Heads of one unit are neighbours: their keys lie side by side in the same pages.
    column = tl.program_id(0) % (num_kv_heads * row_blocks)
    unit = tl.program_id(0) // (num_kv_heads * row_blocks)
    kv_head = (column // row_blocks).to(tl.int64)
    if unit >= tl.sum(units, axis=0):
        return
    seq = tl.sum((ends <= unit).to(tl.int32), axis=0)
    own_units = pick(units, seq, BLOCK_B)
    part = unit - (pick(ends, seq, BLOCK_B) - own_units)
    queries, keys, _ = sequence_lengths(
        seq, num_seqs, kv_lens_ptr, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, q_len, MAX_Q
    )
    if column % row_blocks * BLOCK_M >= queries * GROUP:
        return
    first_tile, end_tile = tile_range(queries, keys, sliding_window, HAS_WINDOW, BLOCK_N)
    first_tile, end_tile = unit_range(first_tile, end_tile, part, own_units)

    row = column % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    in_rows = query < queries
    position = keys - queries + query
    first_token = tl.zeros_like(kv_head)
    if cu_seqlens_q_ptr is not None:
        first_token += tl.load(cu_seqlens_q_ptr + seq)
    seq_index = seq.to(tl.int64)
    token = first_token + query
    d = tl.arange(0, BLOCK_D)[None, :]
    in_tile = in_rows[:, None] & (d < HEAD_DIM)

    q_rows = q_ptr + seq_index * stride_q_seq + token * stride_q_token + head * stride_q_head
    q = tl.load(q_rows[:, None] + d, mask=in_tile, other=0.0)
    q, score_factor, v_factor = scaled_queries(
        q, scale, k_scales_ptr, v_scales_ptr, kv_head * stride_k_scales_head,
        kv_head * stride_v_scales_head, SCALES, FORMAT, QUANTISED,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    IN_WORDS: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.int32
    if IN_WORDS:
        q, acc = in_quarters(q), in_quarters(acc)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        if part == 0:
            m_i, l_i = sink_state(sinks_ptr, head, in_rows)

    # Tiles that every query sees whole, then the last ones; with a window every tile is an edge.
    whole_end = first_tile
    if not HAS_WINDOW:
        seen_by_all = tl.maximum((keys - queries + 1) // BLOCK_N, 0)
        whole_end = tl.minimum(tl.maximum(seen_by_all, first_tile), end_tile)
    acc, m_i, l_i = attend_range(
        acc, m_i, l_i, q, position, first_tile, first_tile, whole_end, end_tile, keys, seq, kv_head,
        block_tables_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr,
        stride_table, stride_k_block, stride_k_head, stride_k_slot, stride_k_piece, stride_v_block,
        stride_v_head, stride_v_slot, stride_v_piece, stride_k_scales_block, stride_k_scales_head,
        stride_k_scales_slot, stride_v_scales_block, stride_v_scales_head, stride_v_scales_slot,
        num_blocks, sliding_window, score_factor, softcap, False, not HAS_WINDOW, WIDE, HAS_WINDOW,
        HAS_CAP, SCALES, FORMAT, PAIRS, BLOCK_SIZE, K_PIECE, V_PIECE, HEAD_DIM, BLOCK_N, BLOCK_D,
        PRECISION,
    )  # fmt: skip
    if IN_WORDS:
        acc = from_quarters(acc)
    acc, lse = finish_rows(acc, m_i, l_i, v_factor)
    if own_units == 1:
        out_rows = out_ptr + seq_index * stride_out_seq + token * stride_out_token
        out_rows += head * stride_out_head
        tl.store(out_rows[:, None] + d, acc.to(out_ptr.dtype.element_ty), mask=in_tile)
        if lse_ptr is not None:
            lse_rows = lse_ptr + seq_index * stride_lse_seq + token * stride_lse_token
            tl.store(lse_rows + head * stride_lse_head, lse * LN_2, mask=in_rows)
    elif part_ptr is not None:
        rows = MAX_Q * GROUP
        part_rows = (unit.to(tl.int64) * num_kv_heads + kv_head) * rows + row
        tl.store(part_ptr + part_rows[:, None] * HEAD_DIM + d, acc, mask=in_tile)
        tl.store(part_lse_ptr + part_rows, lse, mask=in_rows)


@kernel(
    dynamic=(
        "num_seqs", "capacity", "q_len", "sliding_window", "shares", "least_tiles",
    )
)  # fmt: skip
def _merge_units_kernel(
    out_ptr,  # [num_seqs, q_len, num_heads, HEAD_DIM], or [num_tokens, ...] with cu_seqlens_q
    lse_ptr,  # as out without its last dimension, or None
    part_ptr,  # [units, num_kv_heads, rows, HEAD_DIM] float32
    part_lse_ptr,  # [units, num_kv_heads, rows] float32, in base 2
    kv_lens_ptr,
    pos_offsets_ptr,
    cu_seqlens_q_ptr,
    stride_out_seq,
    stride_out_token,
    stride_out_head,
    stride_lse_seq,
    stride_lse_token,
    stride_lse_head,
    num_kv_heads,
    num_seqs,
    capacity,
    q_len,
    sliding_window,
    shares,
    least_tiles,
    GROUP: tl.constexpr,
    MAX_Q: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIXED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_U: tl.constexpr,
    GRID_Q: tl.constexpr,  # queries of a sequence with programs of their own; those take the others
    CHAINED: tl.constexpr,
):
    """Started while the parts are still being written, where CHAINED: the plan is made meanwhile.

    Every program waits, those with nothing to merge as well: what follows this launch waits for it
    alone, and must not overtake the first.
    """
    rows = MAX_Q * GROUP
    row = tl.program_id(0) % (GRID_Q * GROUP)
    kv_head = (tl.program_id(0) // (GRID_Q * GROUP) % num_kv_heads).to(tl.int64)
    seq = tl.program_id(0) // (GRID_Q * GROUP * num_kv_heads)
    units, ends = units_of_sequences(
        num_seqs, kv_lens_ptr, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, q_len, sliding_window,
        shares, least_tiles, MAX_Q, HAS_WINDOW, FIXED, BLOCK_N, BLOCK_B,
    )  # fmt: skip
    own_units = pick(units, seq, BLOCK_B)
    queries, _, _ = sequence_lengths(
        seq, num_seqs, kv_lens_ptr, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, q_len, MAX_Q
    )
    if CHAINED:
        gdc_wait()
    if own_units <= 1:
        return
    start = pick(ends, seq, BLOCK_B) - own_units
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    for query in range(row // GROUP, queries, GRID_Q):
        m_i, l_i = float("-inf"), 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, own_units, BLOCK_U):
            u = first + tl.arange(0, BLOCK_U)
            part_row = ((start + u).to(tl.int64) * num_kv_heads + kv_head) * rows
            part_row += query * GROUP + row % GROUP
            lse = tl.load(part_lse_ptr + part_row, mask=u < own_units, other=float("-inf"))
            mask = (u < own_units)[:, None] & (d < HEAD_DIM)[None, :]
            part = part_ptr + part_row[:, None] * HEAD_DIM + d[None, :]
            values = tl.load(part, mask=mask, other=0.0)
            m_new = tl.maximum(m_i, tl.max(lse, axis=0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight, alpha = tl.exp2(lse - shift), tl.exp2(m_i - shift)
            acc = acc * alpha + tl.sum(weight[:, None] * values, axis=0)
            l_i = l_i * alpha + tl.sum(weight, axis=0)
            m_i = m_new

        token = tl.zeros_like(kv_head) + query
        if cu_seqlens_q_ptr is not None:
            token += tl.load(cu_seqlens_q_ptr + seq)
        out_row = out_ptr + seq.to(tl.int64) * stride_out_seq + token * stride_out_token
        out_row += head * stride_out_head
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)
        tl.store(out_row + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
        if lse_ptr is not None:
            lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(l_i)) * LN_2
            lse_row = lse_ptr + seq.to(tl.int64) * stride_lse_seq + token * stride_lse_token
            tl.store(lse_row + head * stride_lse_head, lse)


def launch_decode(
    config: Config,
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    pool: Pool,
    block_tables: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, Tensor | None],
    sinks: Tensor | None,
    max_q: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    batch_invariant: bool,
    beside: bool = False,
) -> None:
    """Both launches, for q [num_seqs, q_len, ...] with lengths (kv_lens, None, None), or
    [1, num_tokens, ...] with (None, pos_offsets, cu_seqlens_q).

    ``beside``: they may start before the launch before them has ended, where GPUs can do that.
    """
    num_seqs, max_blocks = block_tables.shape
    num_heads, head_dim = q.shape[2:]
    group, capacity = num_heads // pool.num_kv_heads, max_blocks * pool.block_size
    rows = max_q * group
    is_varlen = lengths[2] is not None
    # In a mixed batch most sequences have one query: no program of theirs multiplies by more rows,
    # and those of further queries end at once.
    block_m = min(max(next_power_of_2(group if is_varlen else rows), 16), 64)
    row_blocks = cdiv(rows, block_m)
    block_n = config["BLOCK_N"]
    if batch_invariant:
        least_tiles, shares = cdiv(INVARIANT_KEYS, block_n), 0
    else:
        least_tiles = cdiv(config["LEAST_KEYS"], block_n)
        at_work = pool.num_kv_heads * (1 if is_varlen else row_blocks)
        shares = max(config["PROGRAMS"] // at_work, 1)
    reach = min(capacity, sliding_window + max_q + block_n) if sliding_window else capacity
    most_tiles = cdiv(reach, block_n)
    units = most_units(num_seqs, most_tiles, shares, least_tiles, batch_invariant)
    is_cut = units > num_seqs
    part = part_lse = None
    if is_cut:
        shape = (units, pool.num_kv_heads, rows)
        part = q.new_empty((*shape, head_dim), dtype=torch.float32)
        part_lse = q.new_empty(shape, dtype=torch.float32)
    out_strides = token_strides(out, is_varlen)
    lse_strides = (0, 0, 0) if lse is None else token_strides(lse, is_varlen)
    plan = {
        "GROUP": group,
        "MAX_Q": max_q,
        "HAS_WINDOW": sliding_window > 0,
        "FIXED": batch_invariant,
        "HEAD_DIM": head_dim,
        "BLOCK_B": next_power_of_2(num_seqs),
        "BLOCK_N": block_n,
        "BLOCK_D": max(next_power_of_2(head_dim), 16),
        # From sm_90 on a launch may start before the one it depends on has ended.
        "CHAINED": is_cut and capability(q.device) >= (9, 0),
    }
    beside = beside and capability(q.device) >= (9, 0)
    _paged_decode_kernel.launch(
        (units * pool.num_kv_heads * row_blocks + beside,),
        out,
        lse,
        part,
        part_lse,
        q,
        pool.k,
        pool.v,
        block_tables,
        *lengths,
        pool.k_scales,
        pool.v_scales,
        sinks,
        *out_strides,
        *lse_strides,
        *token_strides(q, is_varlen),
        *pool.strides,
        block_tables.stride(0),
        pool.num_kv_heads,
        row_blocks,
        num_seqs,
        capacity,
        pool.num_blocks,
        max_q,
        sliding_window,
        shares,
        least_tiles,
        scale if softcap > 0 else scale * LOG2_E.value,
        float(softcap),
        HAS_CAP=softcap > 0,
        BLOCK_M=block_m,
        BESIDE=beside,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **pool.constexprs,
        **plan,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **({"launch_pdl": True} if beside else {}),
    )
    if is_cut:
        # Units of one sequence, at most.
        most = cdiv(most_tiles, least_tiles)
        most = most if batch_invariant else min(most, shares)
        grid_q = 1 if is_varlen else max_q
        _merge_units_kernel.launch(
            (num_seqs * pool.num_kv_heads * grid_q * group,),
            out,
            lse,
            part,
            part_lse,
            *lengths,
            *out_strides,
            *lse_strides,
            pool.num_kv_heads,
            num_seqs,
            capacity,
            max_q,
            sliding_window,
            shares,
            least_tiles,
            **plan,
            BLOCK_U=min(next_power_of_2(most), MERGED_UNITS),
            GRID_Q=grid_q,
            num_warps=4,
            **({"launch_pdl": True} if plan["CHAINED"] else {}),
        )
