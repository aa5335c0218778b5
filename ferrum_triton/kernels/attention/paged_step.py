"""Paged attention of one new token a sequence, from the QKV product on, in one launch.

Every program of a sequence and KV head normalises and rotates the queries of that head for itself:
they are a few vectors, and a launch of their own takes longer. The program whose tiles end with the
new key prepares that too, writes key and value to the pool, and attends to them from registers:
reading back what was written would wait for it. With tickets, the program that stores the last part
of a sequence and KV head merges them. All else is that of
:mod:`~ferrum_triton.kernels.attention.paged_decode`.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.decode_config import is_plain, step_config
from ferrum_triton.kernels.attention.merge import merge_rows
from ferrum_triton.kernels.attention.new_heads import (
    Rotary,
    Turn,
    load_turn,
    load_vectors,
    prepare,
)
from ferrum_triton.kernels.attention.paged_decode import (
    Call,
    Units,
    merge_plan,
    plan_launch,
    prefetch_unit,
    sizes_of,
    store_cuts,
    units_of_batch,
)
from ferrum_triton.kernels.attention.pages import (
    Pool,
    as_pool,
    capped,
    head_of,
    scaled_queries,
    sink_logits,
)
from ferrum_triton.kernels.attention.plan import (
    Sequences,
    sequence_lengths,
    tile_range,
    unit_of,
    unit_range,
)
from ferrum_triton.kernels.attention.softmax import finish, first_state, fold_key, store_rows
from ferrum_triton.kernels.attention.units import attend_unit
from ferrum_triton.kernels.heads import COPY, NORM_ROPE, in_pieces
from ferrum_triton.kernels.jit import OPTIONS, kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rope import as_heads
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.ops import rope
from ferrum_triton.ops.attention.paged_step import qkv_paged_decode_attention as step_op
from ferrum_triton.ops.kv_pool import token_view


@triton.jit
def _write_key(
    pool,  # one KV head of the pool
    k,  # [1, BLOCK_D]
    v,  # [1, BLOCK_D]
    block,
    slot,
    is_new,  # whether it is this program's to write
    POOL: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """Key and value into their slot of a block."""
    d = tl.arange(0, ATTENTION.block_d)[None, :]
    mask = is_new & (d < ATTENTION.head_dim)
    k_at = pool.k_ptr + block * POOL.k.block + slot * POOL.k.slot
    v_at = pool.v_ptr + block * POOL.v.block + slot * POOL.v.slot
    K_STEP: tl.constexpr = POOL.k.piece
    V_STEP: tl.constexpr = POOL.v.piece
    k_at += in_pieces(d, K_STEP, POOL.k_piece)
    v_at += in_pieces(d, V_STEP, POOL.v_piece)
    tl.store(k_at, k.to(k_at.dtype.element_ty), mask=mask)
    tl.store(v_at, v.to(v_at.dtype.element_ty), mask=mask)


@triton.jit
def _repeated(x, ROWS: tl.constexpr):
    """The rows of x again and again, [ROWS, columns]."""
    x = tl.broadcast_to(x[None, :, :], (ROWS // x.shape[0], x.shape[0], x.shape[1]))
    return tl.reshape(x, (ROWS, x.shape[2]))


DYNAMIC = "num_seqs capacity num_blocks sliding_window shares least_tiles max_positions"


@kernel(dynamic=(*DYNAMIC.split(), "eps", "scale", "softcap"))
def _paged_step_kernel(
    out_ptr,  # [num_seqs, num_heads, head_dim]
    parts_ptr,  # [units, num_heads, head_dim] float32, or None if no sequence is cut
    part_lses_ptr,  # [units, num_heads] float32, or None
    cu_parts_ptr,  # [num_seqs + 1] where each sequence's units begin, written, or None
    x_ptr,  # [num_seqs, num_heads + 2 * num_kv_heads, head_dim]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    cos_ptr,  # [max_positions, half]
    sin_ptr,  # [max_positions, half]
    k_cache_ptr,  # pool, updated
    v_cache_ptr,  # pool, updated
    sinks_ptr,  # [num_heads] or None
    block_tables_ptr,  # [num_seqs, max_blocks]
    kv_lens_ptr,  # [num_seqs]
    tickets_ptr,  # [num_seqs * num_kv_heads] zeros, which are left so, or None
    stride_out_seq,
    stride_out_head,
    stride_x_seq,
    stride_x_head,
    stride_cos_position,
    stride_sin_position,
    stride_table,
    stride_ticket,
    num_kv_heads,
    num_seqs,
    capacity,  # keys a block table can hold
    num_blocks,
    sliding_window,
    shares,  # units a head the tiles are shared among
    least_tiles,  # that are worth a cut
    max_positions,
    eps,
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    POOL: tl.constexpr,  # PoolLayout
    ATTENTION: tl.constexpr,  # Attention
    UNITS: tl.constexpr,  # Units
    ROTARY: tl.constexpr,  # Rotary
    BLOCK_P: tl.constexpr,  # parts that are merged at a time
    PDL: tl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v over a unit's keys, where q and the last key are new."""
    GROUP: tl.constexpr = ATTENTION.group
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    BLOCK_M: tl.constexpr = ATTENTION.block_m
    BLOCK_D: tl.constexpr = ATTENTION.block_d
    # Heads that are prepared; the rows of a product are as many again and again.
    BLOCK_G: tl.constexpr = min(triton.next_power_of_2(GROUP), BLOCK_M)
    CACHE: tl.constexpr = ".cg" if UNITS.prefetch > 0 else ""
    batch = Sequences(kv_lens_ptr, None, None, num_seqs, capacity, None)
    # Scales of a pool without any, which stand for none: they are not read.
    pool = Pool(k_cache_ptr, v_cache_ptr, k_cache_ptr, v_cache_ptr, num_blocks)
    ROW_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    column = tl.program_id(0) % (num_kv_heads * ROW_BLOCKS)
    index = tl.program_id(0) // (num_kv_heads * ROW_BLOCKS)
    kv_head = (column // ROW_BLOCKS).to(tl.int64)
    if PDL and UNITS.prefetch > 0:
        prefetch_unit(
            index,
            kv_head,
            batch,
            pool,
            block_tables_ptr,
            stride_table,
            sliding_window,
            shares,
            least_tiles,
            POOL,
            UNITS,
            ATTENTION,
        )
    pdl_wait(PDL)
    pdl_trigger(PDL)
    units, ends = units_of_batch(
        batch, sliding_window, shares, least_tiles, UNITS, ATTENTION, CACHE
    )
    if cu_parts_ptr is not None:
        store_cuts(cu_parts_ptr, units, ends, num_seqs)
    if index >= tl.sum(units, axis=0):
        return
    unit = unit_of(index, units, ends)
    _, keys, _ = sequence_lengths(batch, unit.seq, 1, CACHE)
    first, end = tile_range(1, keys, sliding_window, ATTENTION.has_window, ATTENTION.block_n)
    first, end = unit_range(first, end, unit)
    seq = unit.seq.to(tl.int64)
    position = tl.load(kv_lens_ptr + seq, cache_modifier=CACHE).to(tl.int64) - 1
    table_ptr = block_tables_ptr + seq * stride_table
    # The program whose tiles end with the new key has it, if there is a place to write it to.
    last = (keys - 1) // ATTENTION.block_n
    in_table = (first <= last) & (last < end) & (position >= 0) & (position < capacity)
    place = tl.where(in_table, position, 0)
    block = tl.load(table_ptr + place // POOL.block_size, mask=in_table, other=-1).to(tl.int64)
    is_new = in_table & (block >= 0) & (block < num_blocks)

    rows = column % ROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_G)
    one = tl.arange(0, 1)
    x_rows = x_ptr + seq * stride_x_seq
    q_rows = x_rows + (kv_head * GROUP + rows) * stride_x_head
    k_row = x_rows + (num_kv_heads * GROUP + kv_head + one) * stride_x_head
    # All that is new is asked for before any of it is waited for, the block among it.
    q = load_vectors(q_rows, rows < GROUP, ROTARY, ATTENTION)
    k = load_vectors(k_row, (one == 0) & in_table, ROTARY, ATTENTION)
    d = tl.arange(0, ATTENTION.block_d)[None, :]
    q_weights, k_weights = q, k
    if ROTARY.mode == NORM_ROPE:
        q_weights = load_vectors(q_weight_ptr + one, one == 0, ROTARY, ATTENTION)
        k_weights = load_vectors(k_weight_ptr + one, (one == 0) & in_table, ROTARY, ATTENTION)
    v_row = k_row + num_kv_heads * stride_x_head
    v = tl.load(v_row[:, None] + d, mask=in_table & (d < HEAD_DIM), other=0.0)
    turn = Turn(0.0, 0.0)
    if ROTARY.mode != COPY:
        turn = load_turn(
            position,
            cos_ptr,
            sin_ptr,
            stride_cos_position,
            stride_sin_position,
            max_positions,
            ROTARY,
            ATTENTION,
        )
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    q = prepare(q, q_weights, turn, eps, ROTARY, ATTENTION).to(DTYPE)
    k = prepare(k, k_weights, turn, eps, ROTARY, ATTENTION).to(DTYPE)
    pool_head = head_of(pool, kv_head, POOL)
    _write_key(pool_head, k, v, block, place % POOL.block_size, is_new, POOL, ATTENTION)

    # The tiles are of the keys before the new one, which is folded in from registers.
    new = is_new.to(tl.int32)
    cached = keys - new
    row = column % ROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    head, in_rows = kv_head * GROUP + row, row < GROUP
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
    scores = _repeated(scores[:, None], BLOCK_M)
    q = _repeated(q, BLOCK_M)
    at = tl.zeros([BLOCK_M], tl.int32) + cached - 1
    queries = scaled_queries(q, at, scale, softcap, sliding_window - new, pool_head, POOL)
    scores = tl.sum(scores, axis=1) * queries.score_factor
    if ATTENTION.has_softcap:
        scores = capped(scores, softcap, DTYPE == tl.float32)
    sink_log2 = tl.where(unit.part == 0, sink_logits(sinks_ptr, head, in_rows), float("-inf"))
    state = first_state(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), sink_log2)
    end = tl.minimum(end, tl.cdiv(cached, ATTENTION.block_n))
    state = attend_unit(
        state, queries, 1, cached, first, end, pool_head, table_ptr, POOL, ATTENTION
    )
    state = fold_key(state, tl.where(is_new, scores, float("-inf")), v)
    out, lse = finish(state, queries.value_factor)
    if unit.parts == 1:
        out_rows = out_ptr + seq * stride_out_seq + head * stride_out_head
        store_rows(out_rows, None, out, lse, in_rows, HEAD_DIM)
    elif parts_ptr is not None:
        num_heads = num_kv_heads * GROUP
        part_rows = index.to(tl.int64) * num_heads + head
        at_part = parts_ptr + part_rows * HEAD_DIM
        store_rows(at_part, part_lses_ptr + part_rows, out, lse, in_rows, HEAD_DIM)
        if tickets_ptr is not None:
            ticket = tickets_ptr + (seq * num_kv_heads + kv_head) * stride_ticket
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(ticket, 1, sem="acq_rel") == unit.parts - 1:
                q_head = kv_head * GROUP + rows
                first_row = (index - unit.part).to(tl.int64) * num_heads + q_head
                merge_rows(
                    out_ptr + seq * stride_out_seq + q_head * stride_out_head,
                    None,
                    parts_ptr + first_row * HEAD_DIM,
                    part_lses_ptr + first_row,
                    num_heads * HEAD_DIM,
                    num_heads,
                    rows * 0 + unit.parts,
                    unit.parts,
                    rows < GROUP,
                    tl.arange(0, BLOCK_D),
                    HEAD_DIM=HEAD_DIM,
                    READ_ALL=True,
                    ROOM=0,
                    BLOCK_P=BLOCK_P,
                )
                tl.store(ticket, 0)


def _parts_at_a_time(most_parts: int, group: int, head_dim: int, num_warps: int) -> int:
    """Parts of a KV head's queries that a program merges at once: 64 registers a thread."""
    rows = next_power_of_2(group) * next_power_of_2(head_dim)
    return min(next_power_of_2(most_parts), max(2048 * num_warps // rows, 1))


@step_op.impl("triton")
def qkv_paged_decode_attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None = None,
    eps: float = 1e-6,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    qk_mode: int = rope.NORM_ROPE,
    layout: str = "hnd",
    tickets: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_kv_heads, head_dim = token_view(v_cache, layout).shape[2:]
    x = as_heads(qkv, qkv.shape[1] // head_dim)
    num_seqs, num_heads = x.shape[0], x.shape[1] - 2 * num_kv_heads
    y = qkv.new_empty(num_seqs, num_heads, head_dim) if out is None else out
    if num_seqs == 0:
        return y
    call = Call(
        out=y[:, None],
        lse=None,
        q=x[:, None],
        pool=as_pool(k_cache, v_cache, None, None, layout),
        block_tables=block_tables,
        kv_lens=kv_lens,
        pos_offsets=None,
        cu_seqlens_q=None,
        sinks=sinks,
        scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    sizes = sizes_of(call, k_cache.dtype, batch_invariant=False)
    plain = is_plain(head_dim, k_cache.dtype, layout)
    config = step_config.pick(x.device, *sizes, call.group, plain)
    plan = plan_launch(call, config, 1, batch_invariant=False)
    if plan.parts is None or plan.row_blocks > 1 or not config["MERGES"]:
        tickets = None
    pool = call.pool
    prefetch = 0 if pool.layout.k_piece else config["PREFETCH"]
    has_norm = qk_mode == rope.NORM_ROPE
    _paged_step_kernel.launch(
        (plan.units * num_kv_heads * plan.row_blocks,),
        out_ptr=y,
        parts_ptr=plan.parts,
        part_lses_ptr=plan.part_lses,
        cu_parts_ptr=plan.cu_parts if tickets is None else None,
        x_ptr=x,
        q_weight_ptr=q_weight if has_norm else None,
        k_weight_ptr=k_weight if has_norm else None,
        cos_ptr=cos,
        sin_ptr=sin,
        k_cache_ptr=pool.k,
        v_cache_ptr=pool.v,
        sinks_ptr=sinks,
        block_tables_ptr=block_tables,
        kv_lens_ptr=kv_lens,
        tickets_ptr=tickets,
        stride_out_seq=y.stride(0),
        stride_out_head=y.stride(1),
        stride_x_seq=x.stride(0),
        stride_x_head=x.stride(1),
        stride_cos_position=cos.stride(0),
        stride_sin_position=sin.stride(0),
        stride_table=block_tables.stride(0),
        stride_ticket=0 if tickets is None else tickets.stride(0),
        num_kv_heads=num_kv_heads,
        num_seqs=num_seqs,
        capacity=call.capacity,
        num_blocks=pool.num_blocks,
        sliding_window=sliding_window,
        shares=plan.shares,
        least_tiles=plan.least_tiles,
        max_positions=cos.shape[0],
        eps=float(eps),
        scale=call.scale_log2,
        softcap=float(softcap),
        POOL=pool.layout,
        ATTENTION=call.attention(plan.block_m, plan.block_n, config=config),
        UNITS=Units(1, False, next_power_of_2(num_seqs), False, prefetch),
        ROTARY=Rotary(qk_mode, 0 if qk_mode == rope.COPY else cos.shape[1]),
        BLOCK_P=_parts_at_a_time(plan.most_parts, call.group, head_dim, config["num_warps"]),
        **{option: config[option] for option in OPTIONS if option in config},
    )
    if tickets is None:
        merge_plan(call, plan)
    return y
