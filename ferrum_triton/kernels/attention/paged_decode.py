"""Attention of few queries a sequence over paged pools: split over keys, then merged.

A program has one unit of the plan: a run of tiles of one sequence and KV head, for all queries of
the heads that share it, which are the rows of its products. Where a sequence is one unit its
program writes the result; else programs write float32 parts, and
:func:`~ferrum_triton.kernels.attention.merge.merge_parts` merges them in a second launch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.decode_config import INVARIANT_KEYS, unit_sizes
from ferrum_triton.kernels.attention.merge import merge_parts, strides_of
from ferrum_triton.kernels.attention.pages import (
    Attention,
    Pool,
    PoolTensors,
    Tiles,
    head_of,
    is_narrow,
    prefetch_pages,
    scaled_queries,
    sink_logits,
)
from ferrum_triton.kernels.attention.plan import (
    Sequences,
    blocks_of_rows,
    most_units,
    sequence_lengths,
    tile_range,
    tokens_of,
    unit_of,
    unit_range,
    units_of_sequences,
)
from ferrum_triton.kernels.attention.softmax import (
    LEAST_SCALE,
    LOG2_E,
    finish,
    first_state,
    store_rows,
)
from ferrum_triton.kernels.attention.strips import strip_of
from ferrum_triton.kernels.attention.units import attend_unit
from ferrum_triton.kernels.jit import OPTIONS, kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config


@dataclass(frozen=True)
class Units:
    """What the kernel specialises on of the plan.

    Attributes:
        max_q: queries of a sequence; with cu_seqlens_q sequences of more are left out.
        fixed: units are of up to least_tiles whatever the batch.
        block_b: power of two >= num_seqs.
        after_prefill: the launch before is the prefill of the same batch, which waited before it
            triggered. What this one reads is complete then, so programs do not wait, but for the
            last one, which has no unit: what follows waits for this launch alone, so that must not
            end first. If all waited, those that are done could not make room for others.
        prefetch: first tiles of a unit that are asked for into L2 before the PDL wait.
    """

    max_q: int
    fixed: bool
    block_b: int
    after_prefill: bool
    prefetch: int


# Scalars that change from call to call.
DYNAMIC = "num_seqs capacity num_tokens num_blocks sliding_window shares least_tiles scale softcap"


@triton.jit
def units_of_batch(
    batch,
    sliding_window,
    shares,
    least_tiles,
    UNITS: tl.constexpr,
    ATTENTION: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The plan, the same in every program: units of each sequence, and where the next's begin."""
    return units_of_sequences(
        batch,
        sliding_window,
        shares,
        least_tiles,
        MAX_Q=UNITS.max_q,
        HAS_WINDOW=ATTENTION.has_window,
        FIXED=UNITS.fixed,
        BLOCK_N=ATTENTION.block_n,
        BLOCK_B=UNITS.block_b,
        CACHE=CACHE,
    )


@triton.jit
def store_cuts(cu_parts_ptr, units, ends, num_seqs):
    """Where each sequence's units begin, and where the last's end, for the merge."""
    if tl.program_id(0) == 0:
        seqs = tl.arange(0, units.shape[0])
        tl.store(cu_parts_ptr + seqs, ends - units, mask=seqs < num_seqs)
        tl.store(cu_parts_ptr + num_seqs, tl.sum(units, axis=0))


@triton.jit
def prefetch_unit(
    index,
    kv_head,
    batch,
    pool,
    block_tables_ptr,
    stride_table,
    sliding_window,
    shares,
    least_tiles,
    POOL: tl.constexpr,
    UNITS: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """Ask for the first tiles of a unit before the PDL wait, by the lengths as they are then."""
    HAS_WINDOW: tl.constexpr = ATTENTION.has_window
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    units, ends = units_of_batch(
        batch, sliding_window, shares, least_tiles, UNITS, ATTENTION, ".cg"
    )
    if index < tl.sum(units, axis=0):
        unit = unit_of(index, units, ends)
        queries, keys, _ = sequence_lengths(batch, unit.seq, UNITS.max_q, ".cg")
        first, end = tile_range(queries, keys, sliding_window, HAS_WINDOW, BLOCK_N)
        first, end = unit_range(first, end, unit)
        end = tl.minimum(end, first + UNITS.prefetch)
        table_ptr = block_tables_ptr + unit.seq.to(tl.int64) * stride_table
        tiles = Tiles(first, first, end, end, keys, table_ptr)
        prefetch_pages(head_of(pool, kv_head.to(tl.int64), POOL), tiles, POOL, ATTENTION)


@kernel(dynamic=DYNAMIC.split())
def _paged_decode_kernel(
    out_ptr,  # [num_seqs, q_len, num_heads, head_dim], or [num_tokens, ...] with cu_seqlens_q
    lse_ptr,  # as out without its last dimension, or None
    parts_ptr,  # [units, max_q, num_heads, head_dim] float32, or None if no sequence is cut
    part_lses_ptr,  # [units, max_q, num_heads] float32, or None
    cu_parts_ptr,  # [num_seqs + 1] where each sequence's units begin, written, or None
    q_ptr,  # as out
    k_cache_ptr,  # pool
    v_cache_ptr,  # pool
    k_scales_ptr,  # of slots or heads, or None
    v_scales_ptr,
    sinks_ptr,  # [num_heads] or None
    block_tables_ptr,  # [num_seqs, max_blocks]
    kv_lens_ptr,  # [num_seqs], used without cu_seqlens_q
    pos_offsets_ptr,  # [num_seqs], used with cu_seqlens_q
    cu_seqlens_q_ptr,  # [num_seqs + 1] or None
    stride_out_seq,
    stride_out_token,
    stride_out_head,
    stride_lse_seq,
    stride_lse_token,
    stride_lse_head,
    stride_q_seq,
    stride_q_token,
    stride_q_head,
    stride_table,
    num_kv_heads,
    num_seqs,
    capacity,  # keys a block table can hold
    num_tokens,  # used with cu_seqlens_q
    num_blocks,
    sliding_window,
    shares,  # units a head the tiles are shared among
    least_tiles,  # that are worth a cut
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    POOL: tl.constexpr,  # PoolLayout
    ATTENTION: tl.constexpr,  # Attention
    UNITS: tl.constexpr,  # Units
    PDL: tl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v over a unit's keys, for one KV head's queries."""
    GROUP: tl.constexpr = ATTENTION.group
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    HAS_WINDOW: tl.constexpr = ATTENTION.has_window
    BLOCK_M: tl.constexpr = ATTENTION.block_m
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    BLOCK_D: tl.constexpr = ATTENTION.block_d
    MAX_Q: tl.constexpr = UNITS.max_q
    CACHE: tl.constexpr = ".cg" if UNITS.prefetch > 0 else ""
    batch = Sequences(
        kv_lens_ptr, pos_offsets_ptr, cu_seqlens_q_ptr, num_seqs, capacity, num_tokens
    )
    if PDL and UNITS.prefetch > 0:
        row_blocks = blocks_of_rows(batch, MAX_Q, GROUP, BLOCK_M, UNITS.block_b, CACHE)
        prefetch_unit(
            tl.program_id(0) // (num_kv_heads * row_blocks),
            tl.program_id(0) % (num_kv_heads * row_blocks) // row_blocks,
            batch,
            Pool(k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, num_blocks),
            block_tables_ptr,
            stride_table,
            sliding_window,
            shares,
            least_tiles,
            POOL,
            UNITS,
            ATTENTION,
        )
    if UNITS.after_prefill:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            pdl_wait(PDL)
    else:
        pdl_wait(PDL)
    pdl_trigger(PDL)
    units, ends = units_of_batch(
        batch, sliding_window, shares, least_tiles, UNITS, ATTENTION, CACHE
    )
    if cu_parts_ptr is not None:
        store_cuts(cu_parts_ptr, units, ends, num_seqs)
    row_blocks = blocks_of_rows(batch, MAX_Q, GROUP, BLOCK_M, UNITS.block_b, CACHE)
    # Heads of one unit are neighbours: their keys lie side by side in the same pages.
    column = tl.program_id(0) % (num_kv_heads * row_blocks)
    index = tl.program_id(0) // (num_kv_heads * row_blocks)
    kv_head = (column // row_blocks).to(tl.int64)
    if index >= tl.sum(units, axis=0):
        return
    unit = unit_of(index, units, ends)
    seq = unit.seq
    num_queries, keys, _ = sequence_lengths(batch, seq, MAX_Q, CACHE)
    if column % row_blocks * BLOCK_M >= num_queries * GROUP:
        return

    row = column % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    in_rows = query < num_queries
    position = keys - num_queries + query
    first_token = tl.zeros_like(kv_head)
    if cu_seqlens_q_ptr is not None:
        first, _ = tokens_of(batch, seq, CACHE)
        first_token += first
    seq_index = seq.to(tl.int64)
    token = first_token + query
    d = tl.arange(0, BLOCK_D)[None, :]

    q_rows = q_ptr + seq_index * stride_q_seq + token * stride_q_token + head * stride_q_head
    q = tl.load(q_rows[:, None] + d, mask=in_rows[:, None] & (d < HEAD_DIM), other=0.0)
    pool = Pool(k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, num_blocks)
    pool_head = head_of(pool, kv_head, POOL)
    queries = scaled_queries(q, position, scale, softcap, sliding_window, pool_head, POOL)
    first, end = tile_range(num_queries, keys, sliding_window, HAS_WINDOW, BLOCK_N)
    first, end = unit_range(first, end, unit)
    table_ptr = block_tables_ptr + seq_index * stride_table
    sink_log2 = tl.where(unit.part == 0, sink_logits(sinks_ptr, head, in_rows), float("-inf"))
    state = first_state(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), sink_log2)
    state = attend_unit(
        state, queries, num_queries, keys, first, end, pool_head, table_ptr, POOL, ATTENTION
    )
    out, lse = finish(state, queries.value_factor)
    if unit.parts == 1:
        out_rows = out_ptr + seq_index * stride_out_seq + token * stride_out_token
        out_rows += head * stride_out_head
        lse_rows = lse_ptr
        if lse_ptr is not None:
            lse_rows += seq_index * stride_lse_seq + token * stride_lse_token
            lse_rows += head * stride_lse_head
        store_rows(out_rows, lse_rows, out, lse, in_rows, HEAD_DIM)
    elif parts_ptr is not None:
        part_rows = (index.to(tl.int64) * MAX_Q + query) * (num_kv_heads * GROUP) + head
        part_lse_rows = part_lses_ptr + part_rows
        store_rows(parts_ptr + part_rows * HEAD_DIM, part_lse_rows, out, lse, in_rows, HEAD_DIM)


class Call(NamedTuple):
    """A call of one of the paged ops.

    Attributes:
        out: [num_seqs, q_len, num_heads, head_dim], or [1, num_tokens, ...] with cu_seqlens_q.
        q: as out; its heads may be followed by those of new keys and values.
        lse: as out without its last dimension, or None.
        block_tables: [num_seqs, max_blocks].
        kv_lens: [num_seqs], None with cu_seqlens_q.
        pos_offsets, cu_seqlens_q: [num_seqs] and [num_seqs + 1], or None.
        sinks: [num_heads] or None.
    """

    out: Tensor
    lse: Tensor | None
    q: Tensor
    pool: PoolTensors
    block_tables: Tensor
    kv_lens: Tensor | None
    pos_offsets: Tensor | None
    cu_seqlens_q: Tensor | None
    sinks: Tensor | None
    scale: float
    sliding_window: int
    softcap: float

    @property
    def group(self) -> int:
        return self.out.shape[2] // self.pool.num_kv_heads

    @property
    def capacity(self) -> int:
        """Keys a block table can hold."""
        return self.block_tables.shape[1] * self.pool.layout.block_size

    @property
    def scale_log2(self) -> float:
        """The scale as kernels take it: a cap brings its own log2(e)."""
        return self.scale if self.softcap > 0 else self.scale * LOG2_E.value

    def attention(self, block_m: int, block_n: int, config: Config | None = None) -> Attention:
        """What kernels specialise on.

        Args:
            config: decode's, which can take a head in strips, and blocks ahead of keys. In float32,
                or by more rows than tensor cores take at least, strips would spill.
        """
        head_dim, pool = self.out.shape[3], self.pool
        is_plain = self.q.itemsize == 2 and not (pool.layout.quantised or pool.layout.k_piece)
        strip = strip_of(head_dim) if config and is_plain and block_m == 16 else 0
        ahead = is_plain and not strip and is_narrow(pool) and self.scale >= LEAST_SCALE.value
        return Attention(
            group=self.group,
            head_dim=head_dim,
            has_window=self.sliding_window > 0,
            has_softcap=self.softcap > 0,
            block_m=block_m,
            block_n=block_n,
            block_d=max(next_power_of_2(head_dim), 16),
            precision="ieee" if self.q.dtype == torch.float32 else "tf32",
            strip=strip,
            ahead=bool(config and config["AHEAD"] and ahead),
        )


def sizes_of(call: Call, cache: torch.dtype, batch_invariant: bool) -> tuple[int, int, int, int]:
    """Sequences, KV heads, capacity and bytes of a key and its value, by which to configure."""
    batch, capacity = call.block_tables.shape[0], call.capacity
    if batch_invariant:
        # What must not depend on the batch may not depend on what suits the batch either.
        batch, capacity = 1, INVARIANT_KEYS
    return batch, call.pool.num_kv_heads, capacity, 2 * call.out.shape[3] * cache.itemsize


class Plan(NamedTuple):
    """How the units of a call are launched.

    Attributes:
        block_m, block_n: rows and keys of a tile.
        row_blocks: blocks of rows of a unit and KV head.
        units: the most units a head.
        shares, least_tiles: what :func:`unit_sizes` says of them.
        most_parts: the most units of a sequence.
        parts: [units, 1, max_q, num_heads, head_dim] float32, None where no sequence is cut.
        part_lses: as parts without the last dimension.
        cu_parts: int32 [num_seqs + 1].
    """

    block_m: int
    block_n: int
    row_blocks: int
    units: int
    shares: int
    least_tiles: int
    most_parts: int
    parts: Tensor | None
    part_lses: Tensor | None
    cu_parts: Tensor | None


def plan_launch(call: Call, config: Config, max_q: int, batch_invariant: bool) -> Plan:
    """Units of the sequences of up to ``max_q`` queries, and room for their parts."""
    num_seqs, window = call.block_tables.shape[0], call.sliding_window
    rows, is_varlen = max_q * call.group, call.cu_seqlens_q is not None
    # In a mixed batch most sequences have one query: no program of theirs multiplies by more rows,
    # and those of further queries end at once.
    block_m = min(max(next_power_of_2(call.group if is_varlen else rows), 16), 64)
    row_blocks = cdiv(rows, block_m)
    block_n = config["BLOCK_N"]
    at_work = call.pool.num_kv_heads * (1 if is_varlen else row_blocks)
    least_tiles, shares = unit_sizes(config, at_work, batch_invariant)
    reach = min(call.capacity, window + max_q + block_n) if window else call.capacity
    most_tiles = cdiv(reach, block_n)
    units = most_units(num_seqs, most_tiles, shares, least_tiles, batch_invariant)
    most_parts = cdiv(most_tiles, least_tiles)
    most_parts = most_parts if batch_invariant else min(most_parts, shares)
    parts = part_lses = cu_parts = None
    if units > num_seqs:
        shape = (units, 1, max_q, call.out.shape[2])
        parts = call.out.new_empty((*shape, call.out.shape[3]), dtype=torch.float32)
        part_lses = call.out.new_empty(shape, dtype=torch.float32)
        cu_parts = call.out.new_empty(num_seqs + 1, dtype=torch.int32)
    sizes = (block_m, block_n, row_blocks, units, shares, least_tiles, most_parts)
    return Plan(*sizes, parts, part_lses, cu_parts)


def launch_decode(
    call: Call, config: Config, max_q: int, batch_invariant: bool, after_prefill: bool = False
) -> None:
    """Attention of the sequences of up to ``max_q`` queries, and the merge of their parts.

    Args:
        after_prefill: whether the launch before is the prefill of the other sequences.
    """
    pool, q = call.pool, call.q
    num_seqs = call.block_tables.shape[0]
    plan = plan_launch(call, config, max_q, batch_invariant)
    # The prefill of the same batch is all that comes before, and pieces of vectors are no lines.
    prefetch = 0 if after_prefill or pool.layout.k_piece else config["PREFETCH"]
    axes = ("seq", "token", "head")
    _paged_decode_kernel.launch(
        (plan.units * pool.num_kv_heads * plan.row_blocks + after_prefill,),
        out_ptr=call.out,
        lse_ptr=call.lse,
        parts_ptr=plan.parts,
        part_lses_ptr=plan.part_lses,
        cu_parts_ptr=plan.cu_parts,
        q_ptr=q,
        **pool.pointers(),
        sinks_ptr=call.sinks,
        block_tables_ptr=call.block_tables,
        kv_lens_ptr=call.kv_lens,
        pos_offsets_ptr=call.pos_offsets,
        cu_seqlens_q_ptr=call.cu_seqlens_q,
        **strides_of("out", call.out, *axes),
        **strides_of("lse", call.lse, *axes),
        **strides_of("q", q, *axes),
        stride_table=call.block_tables.stride(0),
        num_kv_heads=pool.num_kv_heads,
        num_seqs=num_seqs,
        capacity=call.capacity,
        num_tokens=q.shape[1],
        num_blocks=pool.num_blocks,
        sliding_window=call.sliding_window,
        shares=plan.shares,
        least_tiles=plan.least_tiles,
        scale=call.scale_log2,
        softcap=float(call.softcap),
        POOL=pool.layout,
        ATTENTION=call.attention(plan.block_m, plan.block_n, config=config),
        UNITS=Units(max_q, batch_invariant, next_power_of_2(num_seqs), after_prefill, prefetch),
        **{option: config[option] for option in OPTIONS if option in config},
    )
    merge_plan(call, plan)


def merge_plan(call: Call, plan: Plan) -> None:
    """Merge the parts of sequences that were cut, if any may be."""
    if plan.parts is not None:
        cuts = plan.cu_parts, call.cu_seqlens_q, plan.most_parts
        merge_parts(call.out, call.lse, plan.parts, plan.part_lses, *cuts)
