"""Attention of many queries a sequence over paged caches: a block of queries and KV head at a time.

The heads that share a KV head are rows of one block, so that a tile of keys is read once for all.
Sequences differ in length and lie in device memory: a program finds its blocks by a running sum
over the sequences.

As many programs as there are processors take the blocks in turns, and those that the work of the
decodes in the batch would fill end at once: their launch, which starts while this one runs, then
has its memory traffic beside these products instead of after them.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ferrum_triton.kernels.attention.flash_plan import LARGE
from ferrum_triton.kernels.attention.pages import (
    Pool,
    attend_range,
    finish_rows,
    scaled_queries,
    sink_state,
    token_strides,
)
from ferrum_triton.kernels.attention.plan import sequence_lengths
from ferrum_triton.kernels.attention.prefill_tiles import attend_floats
from ferrum_triton.kernels.attention.softmax import LEAST_SCALE, LN_2, LOG2_E, LOWEST
from ferrum_triton.kernels.jit import capability, kernel, processors
from ferrum_triton.kernels.rows import next_power_of_2

# More queries than any sequence has: no upper bound.
ANY = tl.constexpr(2**31 - 1)

# A sum over more sequences than a warp has lanes passes through shared memory. The assembler then
# sees that all threads have the same, and with it the same loops, whose counters and matrix
# descriptors go to uniform registers; without it the tiles below spill.
LEAST_SUMMED = 64

# Time a processor takes for a block of queries and a key, over that for one of decode's keys: to be
# judged by the mixed case of `bench.run paged_varlen_attention`.
BLOCK_COST = 2.0


@kernel(
    dynamic=(
        "num_seqs", "capacity", "num_blocks", "sliding_window", "block_cost", "scale", "softcap",
    )
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
    block_cost,  # over that of one of decode's keys; used if SHARED
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    GROUP: tl.constexpr,  # query heads a KV head
    FEW: tl.constexpr,  # sequences of no more queries are another launch's
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NEGATE: tl.constexpr,  # the scale is negative
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    QUANTISED: tl.constexpr,
    NARROW: tl.constexpr,
    ALIKE: tl.constexpr,
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
    SHARED: tl.constexpr,  # processors are left to the decode launch that follows
    CHAINED: tl.constexpr,  # it need not wait for this one
):
    if CHAINED:
        gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    seqs = tl.arange(0, BLOCK_B)
    seq_queries, seq_keys, known = sequence_lengths(
        seqs, num_seqs, None, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, 0, ANY
    )
    blocks = tl.where(known & (seq_queries > FEW), tl.cdiv(seq_queries, BLOCK_Q), 0)
    ends = tl.cumsum(blocks, axis=0)
    pairs = tl.sum(blocks, axis=0) * num_kv_heads  # of a block of queries and a KV head
    programs = tl.num_programs(0)
    if SHARED:
        # Both kinds of work in keys of one KV head, a block's queries taken at their middle.
        reach, few_reach = seq_keys - seq_queries // 2, seq_keys
        if HAS_WINDOW:
            reach = tl.minimum(reach, sliding_window + BLOCK_Q)
            few_reach = tl.minimum(few_reach, sliding_window + FEW)
        own = tl.sum(blocks * reach.to(tl.float32), axis=0) * block_cost
        few = known & (seq_queries <= FEW)
        others = tl.sum(tl.where(few, few_reach, 0).to(tl.float32), axis=0)
        share = programs * (own / tl.maximum(own + others, 1.0))
        programs = tl.maximum((share + 0.5).to(tl.int32), 1)
        # As few as need no more turns.
        programs = tl.cdiv(pairs, tl.maximum(tl.cdiv(pairs, programs), 1))
        if tl.program_id(0) >= programs:
            return
    # Rows of a block are the same in all turns, but not worth registers throughout.
    for turn in tl.range(0, tl.cdiv(pairs, programs), disable_licm=True):
        # Every other turn backwards: who had the most work in one has the least in the next.
        place = tl.program_id(0)
        if turn % 2 == 1:
            place = programs - 1 - place
        index = turn * programs + place
        if index < pairs:
            kv_head = (index % num_kv_heads).to(tl.int64)
            # The last blocks of a sequence see the most keys: they start first.
            block = pairs // num_kv_heads - 1 - index // num_kv_heads
            seq = tl.sum((ends <= block).to(tl.int32), axis=0)
            first_query = (block - tl.max(tl.where(ends <= block, ends, 0), axis=0)) * BLOCK_Q
            queries, keys, _ = sequence_lengths(
                seq, num_seqs, None, pos_offsets_ptr, cu_seqlens_q_ptr, capacity, 0, ANY
            )

            first_token = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64) + first_query
            row = tl.arange(0, BLOCK_M)
            query, group_head = row // GROUP, row % GROUP
            in_rows = (query < queries - first_query) & (row < BLOCK_Q * GROUP)
            first_position = keys - queries + first_query
            last_position = tl.minimum(first_position + BLOCK_Q, keys) - 1
            d = tl.arange(0, BLOCK_D)[None, :]
            in_tile = in_rows[:, None] & (d < HEAD_DIM)

            q_block = q_ptr + first_token * stride_q_token + kv_head * GROUP * stride_q_head
            q_rows = query.to(tl.int64) * stride_q_token + group_head.to(tl.int64) * stride_q_head
            q = tl.load(q_block + q_rows[:, None] + d, mask=in_tile, other=0.0)
            q, score_factor, v_factor = scaled_queries(
                q, scale, k_scales_ptr, v_scales_ptr, kv_head * stride_k_scales_head,
                kv_head * stride_v_scales_head, SCALES, FORMAT, QUANTISED,
            )  # fmt: skip

            m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
            if sinks_ptr is not None:
                m_i, l_i = sink_state(sinks_ptr, kv_head * GROUP + group_head, in_rows)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

            first_tile = 0
            if HAS_WINDOW:
                first_tile = tl.maximum(first_position + 1 - sliding_window, 0) // BLOCK_N
            end_tile = tl.cdiv(tl.maximum(last_position + 1, 0), BLOCK_N)
            # Edges of the window, tiles that every query sees whole, and the diagonal.
            whole_end = tl.maximum((first_position + 1) // BLOCK_N, first_tile)
            whole_end = tl.minimum(whole_end, end_tile)
            whole_start = first_tile
            if HAS_WINDOW:
                seen_from = tl.maximum(last_position + 1 - sliding_window, 0)
                whole_start = tl.minimum(tl.cdiv(seen_from, BLOCK_N), whole_end)
            position = first_position + query
            if QUANTISED:
                acc, m_i, l_i = attend_range(
                    acc, m_i, l_i, q, position, first_tile, whole_start, whole_end, end_tile, keys,
                    seq, kv_head, block_tables_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr,
                    v_scales_ptr, stride_table, stride_k_block, stride_k_head, stride_k_slot,
                    stride_k_piece, stride_v_block, stride_v_head, stride_v_slot, stride_v_piece,
                    stride_k_scales_block, stride_k_scales_head, stride_k_scales_slot,
                    stride_v_scales_block, stride_v_scales_head, stride_v_scales_slot, num_blocks,
                    sliding_window, score_factor, softcap, HAS_WINDOW, True, WIDE, HAS_WINDOW,
                    HAS_CAP, SCALES, FORMAT, PAIRS, BLOCK_SIZE, K_PIECE, V_PIECE, HEAD_DIM, BLOCK_N,
                    BLOCK_D, PRECISION,
                )  # fmt: skip
            else:
                if NEGATE:
                    q = -q
                m_i = tl.maximum(m_i, LOWEST)
                score_factor = tl.maximum(tl.abs(score_factor), LEAST_SCALE)
                table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
                k_head_ptr = k_cache_ptr + kv_head * stride_k_head
                v_head_ptr = v_cache_ptr + kv_head * stride_v_head
                for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
                    start = first_tile if part == 0 else whole_start if part == 1 else whole_end
                    end = whole_start if part == 0 else whole_end if part == 1 else end_tile
                    acc, m_i, l_i = attend_floats(
                        acc, m_i, l_i, q, position, start, end, keys, table_ptr, k_head_ptr,
                        v_head_ptr, stride_k_block, stride_k_slot, stride_k_piece, stride_v_block,
                        stride_v_slot, stride_v_piece, num_blocks, sliding_window, score_factor,
                        softcap, NARROW, ALIKE, part != 1, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, K_PIECE,
                        V_PIECE, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
                    )  # fmt: skip
            acc, lse = finish_rows(acc, m_i, l_i, v_factor)

            out_block = out_ptr + first_token * stride_out_token
            out_block += kv_head * GROUP * stride_out_head
            out_rows = query.to(tl.int64) * stride_out_token
            out_rows += group_head.to(tl.int64) * stride_out_head
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_block + out_rows[:, None] + d, out, mask=in_tile)
            if lse_ptr is not None:
                lse_block = lse_ptr + first_token * stride_lse_token
                lse_block += kv_head * GROUP * stride_lse_head
                lse_rows = query.to(tl.int64) * stride_lse_token
                lse_rows += group_head.to(tl.int64) * stride_lse_head
                tl.store(lse_block + lse_rows, lse * LN_2, mask=in_rows)


def _is_narrow(pool: Pool) -> bool:
    """Whether 32 bits hold the offset of every slot of a head."""
    ends = (
        pool.num_blocks * block + pool.block_size * slot
        for block, _, slot, _ in (pool.strides[:4], pool.strides[4:8])
    )
    return max(ends) <= 2**32


def prefill_config(
    compute: tuple[int, int], head_dim: int, dtype: torch.dtype, is_simple: bool
) -> dict[str, int]:
    """Rows, keys, warps and stages of a program.

    ``is_simple``: without a window, whose edges cost larger tiles more, over a cache of floats
    whose vectors are contiguous. The other kinds leave no registers for tiles of 128 keys, nor
    does Blackwell; those and three stages of loads are what keeps Hopper's tensor cores busy.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if head_dim > 128 or compute[0] not in LARGE:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    block_n = 128 if is_simple and compute[0] == 9 else 64
    return {"BLOCK_M": 128, "BLOCK_N": block_n, "num_warps": 8, "num_stages": 3}


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
    """For q [1, num_tokens, num_heads, head_dim]; skips sequences of up to ``few`` queries.

    A decode launch must follow that takes those, told that it is ``beside`` this one.
    """
    num_seqs, max_blocks = block_tables.shape
    num_tokens, num_heads, head_dim = q.shape[1:]
    group = num_heads // pool.num_kv_heads
    compute = capability(q.device)
    is_simple = not (sliding_window or pool.constexprs["QUANTISED"] or pool.constexprs["K_PIECE"])
    config = prefill_config(compute, head_dim, q.dtype, is_simple)
    block_m = max(config["BLOCK_M"], next_power_of_2(group))
    # A sequence of these has more than `few` queries, so there are at most so many.
    most_seqs = min(num_seqs, num_tokens // (few + 1))
    blocks = num_tokens // (block_m // group) + most_seqs
    programs = blocks * pool.num_kv_heads
    # Where a program is all that a processor holds. In the interpreter always, for tests to see.
    is_shared = config["num_warps"] == 8 or q.device.type == "cpu"
    if is_shared:
        programs = min(programs, processors(q.device))
    _paged_prefill_kernel.launch(
        (programs,),
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
        BLOCK_COST,
        scale if softcap > 0 else scale * LOG2_E.value,
        float(softcap),
        GROUP=group,
        FEW=few,
        HAS_WINDOW=sliding_window > 0,
        HAS_CAP=softcap > 0,
        NEGATE=scale < 0,
        NARROW=_is_narrow(pool),
        ALIKE=pool.strides[:4] == pool.strides[4:8],
        HEAD_DIM=head_dim,
        BLOCK_B=max(next_power_of_2(num_seqs), LEAST_SUMMED),
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SHARED=is_shared,
        CHAINED=compute >= (9, 0),
        **pool.constexprs,
        **{**config, "BLOCK_M": block_m},
    )
