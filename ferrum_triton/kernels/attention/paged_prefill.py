"""Attention of many queries a sequence over paged pools: a block of queries and KV head at a time.

The heads that share a KV head are rows of one block, so that a tile of keys is read once for all.
Sequences differ in length and lie in device memory: a program finds its blocks by a running sum
over the sequences.

As many programs as there are SMs take the blocks in turns, and those that the work of the decodes
in the batch would fill end at once: their launch, which starts while this one runs, then has its
memory traffic beside these products instead of after them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ferrum_triton.kernels.attention.float_tiles import attend_floats
from ferrum_triton.kernels.attention.merge import strides_of
from ferrum_triton.kernels.attention.paged_decode import Call
from ferrum_triton.kernels.attention.pages import (
    Pool,
    Queries,
    Tiles,
    attend_pages,
    head_of,
    is_narrow,
    scaled_queries,
    sink_logits,
)
from ferrum_triton.kernels.attention.plan import ANY, Sequences, sequence_lengths, tokens_of
from ferrum_triton.kernels.attention.prefill_config import plain_heuristic, prefill_config
from ferrum_triton.kernels.attention.prefill_merge import LEAST_KEYS
from ferrum_triton.kernels.attention.softmax import LEAST_SCALE, finish, first_state, store_rows
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.kernels.tuning import Config

# A sum over more sequences than a warp has lanes passes through shared memory. The assembler then
# sees that all threads have the same, and with it the same loops, whose counters and matrix
# descriptors go to uniform registers; without it the tiles below spill.
LEAST_SUMMED = 64

# The most parts of a block's keys.
MAX_SPLITS = 32

# Time an SM takes for a block of queries and a key, over that for one of decode's keys.
BLOCK_COST = 2.0

# Keys that take as long as a block's beginning and its end. Without them a prompt of 256 beside 63
# decodes on 4,096 keys had one SM: all took 610 us, and 266 with them (``bench.timing.Replay`` of
# ``paged_varlen_attention`` by this kernel, two runs of an H200, copies of 97d9a7c).
BLOCK_KEYS = 300


@dataclass(frozen=True)
class Prefill:
    """What the kernel specialises on beside the pool and the attention.

    Attributes:
        few: queries up to which a sequence is another launch's.
        negate: whether the scale is negative.
        narrow: whether 32 bits hold the offset of every slot of a head.
        shared: whether SMs are left to the decode launch that follows.
        block_b: power of two >= num_seqs.
    """

    few: int
    negate: bool
    narrow: bool
    shared: bool
    block_b: int


@triton.jit
def own_programs(
    seq_queries,
    seq_keys,
    known,
    blocks,
    pairs,
    sliding_window,
    sms,
    block_cost,
    block_keys,
    FEW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The programs that keep working, where the others leave their SMs to the decode launch."""
    # Both kinds of work in keys of one KV head, a block's queries taken at their middle.
    reach, few_reach = seq_keys - seq_queries // 2, seq_keys
    if HAS_WINDOW:
        reach = tl.minimum(reach, sliding_window + BLOCK_Q)
        few_reach = tl.minimum(few_reach, sliding_window + FEW)
    own = tl.sum(blocks * (reach + block_keys).to(tl.float32), axis=0) * block_cost
    few = known & (seq_queries <= FEW)
    others = tl.sum(tl.where(few, few_reach, 0).to(tl.float32), axis=0)
    share = (sms * (own / tl.maximum(own + others, 1.0)) + 0.5).to(tl.int32)
    programs = tl.maximum(tl.minimum(share, tl.num_programs(0)), 1)
    # As few as need no more turns.
    return tl.cdiv(pairs, tl.maximum(tl.cdiv(pairs, programs), 1))


@triton.jit
def tiles_seen(
    first_position,
    last_position,
    keys,
    table_ptr,
    sliding_window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Edges of the window, tiles that every query sees whole, and the diagonal."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first_position + 1 - sliding_window, 0) // BLOCK_N
    end = tl.cdiv(tl.maximum(last_position + 1, 0), BLOCK_N)
    whole_end = tl.maximum((first_position + 1) // BLOCK_N, first)
    whole_end = tl.minimum(whole_end, end)
    whole = first
    if HAS_WINDOW:
        seen_from = tl.maximum(last_position + 1 - sliding_window, 0)
        whole = tl.minimum(tl.cdiv(seen_from, BLOCK_N), whole_end)
    return Tiles(first, whole, whole_end, end, keys, table_ptr)


@triton.jit
def attend_tiles(
    state, queries, head, tiles, NARROW: tl.constexpr, POOL: tl.constexpr, ATTENTION: tl.constexpr
):
    """Fold all of a block's tiles into the softmax, masking only the edges."""
    FIRST: tl.constexpr = 0 if ATTENTION.has_window else 1
    for stage in tl.static_range(FIRST, 3):
        start = tiles.first if stage == 0 else tiles.whole if stage == 1 else tiles.whole_end
        end = tiles.whole if stage == 0 else tiles.whole_end if stage == 1 else tiles.end
        if POOL.quantised:
            state = attend_pages(
                state, queries, head, tiles, start, end, stage != 1, POOL, ATTENTION
            )
        else:
            state = attend_floats(
                state, queries, head, tiles, start, end, stage != 1, NARROW, POOL, ATTENTION
            )
    return state


# Scalars that change from call to call.
DYNAMIC = (
    "num_seqs capacity num_tokens num_blocks sliding_window sms block_cost block_keys scale softcap"
)


@kernel(dynamic=DYNAMIC.split())
def _paged_prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    lse_ptr,  # [num_tokens, num_heads] or None
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # pool
    v_cache_ptr,  # pool
    k_scales_ptr,  # of slots or heads, or None
    v_scales_ptr,
    sinks_ptr,  # [num_heads] or None
    block_tables_ptr,  # [num_seqs, max_blocks]
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_q_token,
    stride_q_head,
    stride_table,
    num_kv_heads,
    num_seqs,
    capacity,  # keys a block table can hold
    num_tokens,
    num_blocks,
    sliding_window,
    sms,  # of the GPU; this and the next two are used if shared
    block_cost,  # over that of one of decode's keys
    block_keys,  # that a block's beginning and end count as
    scale,  # of scores; times log2(e) unless they are capped
    softcap,
    POOL: tl.constexpr,  # PoolLayout
    ATTENTION: tl.constexpr,  # Attention
    PREFILL: tl.constexpr,  # Prefill
    PDL: tl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v, for one block of queries after the other."""
    # Triggered after the wait: the decode launch of the batch's other sequences begins then, and
    # need not wait for this one (see paged_decode.Units.after_prefill).
    pdl_wait(PDL)
    pdl_trigger(PDL)
    GROUP: tl.constexpr = ATTENTION.group
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    HAS_WINDOW: tl.constexpr = ATTENTION.has_window
    BLOCK_M: tl.constexpr = ATTENTION.block_m
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    BLOCK_D: tl.constexpr = ATTENTION.block_d
    BLOCK_B: tl.constexpr = PREFILL.block_b
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    FEW: tl.constexpr = PREFILL.few
    NARROW: tl.constexpr = PREFILL.narrow
    batch = Sequences(None, pos_offsets_ptr, cu_seqlens_q_ptr, num_seqs, capacity, num_tokens)
    seq_queries, seq_keys, known = sequence_lengths(batch, tl.arange(0, BLOCK_B), ANY, "")
    blocks = tl.where(known & (seq_queries > FEW), tl.cdiv(seq_queries, BLOCK_Q), 0)
    ends = tl.cumsum(blocks, axis=0)
    pairs = tl.sum(blocks, axis=0) * num_kv_heads  # of a block of queries and a KV head
    programs = tl.num_programs(0)
    if PREFILL.shared:
        programs = own_programs(
            seq_queries,
            seq_keys,
            known,
            blocks,
            pairs,
            sliding_window,
            sms,
            block_cost,
            block_keys,
            FEW=FEW,
            HAS_WINDOW=HAS_WINDOW,
            BLOCK_Q=BLOCK_Q,
        )
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
            num_queries, keys, _ = sequence_lengths(batch, seq, ANY, "")

            first_token, _ = tokens_of(batch, seq, "")
            first_token = first_token.to(tl.int64) + first_query
            row = tl.arange(0, BLOCK_M)
            query, group_head = row // GROUP, row % GROUP
            in_rows = (query < num_queries - first_query) & (row < BLOCK_Q * GROUP)
            first_position = keys - num_queries + first_query
            last_position = tl.minimum(first_position + BLOCK_Q, keys) - 1
            d = tl.arange(0, BLOCK_D)[None, :]
            in_tile = in_rows[:, None] & (d < HEAD_DIM)

            q_block = q_ptr + first_token * stride_q_token + kv_head * GROUP * stride_q_head
            q_rows = query.to(tl.int64) * stride_q_token + group_head.to(tl.int64) * stride_q_head
            q = tl.load(q_block + q_rows[:, None] + d, mask=in_tile, other=0.0)
            pool = Pool(k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, num_blocks)
            head = head_of(pool, kv_head, POOL)
            queries = scaled_queries(
                q, first_position + query, scale, softcap, sliding_window, head, POOL
            )
            if not POOL.quantised:
                queries = positive(queries, PREFILL.negate)
            sink_log2 = sink_logits(sinks_ptr, kv_head * GROUP + group_head, in_rows)
            state = first_state(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), sink_log2)
            table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
            tiles = tiles_seen(
                first_position, last_position, keys, table_ptr, sliding_window, HAS_WINDOW, BLOCK_N
            )
            state = attend_tiles(state, queries, head, tiles, NARROW, POOL, ATTENTION)
            out, lse = finish(state, queries.value_factor)

            out_block = out_ptr + first_token * stride_out_token
            out_block += kv_head * GROUP * stride_out_head
            out_rows = query.to(tl.int64) * stride_out_token
            out_rows += group_head.to(tl.int64) * stride_out_head
            lse_rows = lse_ptr
            if lse_ptr is not None:
                lse_rows += first_token * stride_lse_token + kv_head * GROUP * stride_lse_head
                lse_rows += query.to(tl.int64) * stride_lse_token
                lse_rows += group_head.to(tl.int64) * stride_lse_head
            store_rows(out_block + out_rows, lse_rows, out, lse, in_rows, HEAD_DIM)


@triton.jit
def positive(queries, NEGATE: tl.constexpr):
    """The same queries with a positive score_factor."""
    q = -queries.q if NEGATE else queries.q
    score_factor = tl.maximum(tl.abs(queries.score_factor), LEAST_SCALE)
    return Queries(
        q,
        queries.position,
        score_factor,
        queries.value_factor,
        queries.softcap,
        queries.sliding_window,
    )


def may_differ(call: Call, longest: int) -> bool:
    """Whether the mean of queries is under half of ``longest``, so that some may be decodes."""
    return longest * call.block_tables.shape[0] > 2 * call.q.shape[1]


def choose_prefill(call: Call) -> Config:
    """The configuration for a varlen call's sequences of many queries."""
    pool, q = call.pool, call.q
    head_dim = q.shape[3]
    is_simple = not (call.sliding_window or pool.layout.quantised or pool.layout.k_piece)
    shape = (head_dim, q.dtype == torch.float32, is_simple, pool.codes)
    config = prefill_config.pick(q.device, *shape)
    if "path" in config:
        from ferrum_triton.kernels.hopper.attention_paged import can_gather

        if not can_gather(call):
            config = plain_heuristic(gpu_of(q.device), *shape)
    return config


def splits_of(call: Call, config: Config, longest: int) -> int:
    """Parts that the keys of blocks are cut into, where all blocks are too few for the SMs; else 1.

    With 32 heads over 8 of 128, nine queries on 8,192 keys take 20.5 us for 103, 128 take 38.5 for
    105, and four sequences of 20 take 61 for 106 (``bench.timing.device_us`` of
    ``paged_varlen_attention`` with MAX_SPLITS of 32 and of 1, H200, what became 2a405fe).

    Hopper's kernel alone cuts them, but not where it widens codes of more than 128 columns, which
    leaves too few registers. Nor where some sequences may be decodes, whose own launch shares out
    the SMs by the keys that each has.

    Args:
        config: what :func:`choose_prefill` gave.
        longest: a bound on the queries of any sequence.
    """
    too_wide = call.pool.codes and call.out.shape[3] > 128
    if "path" not in config or too_wide or may_differ(call, longest):
        return 1
    num_seqs, num_tokens = call.block_tables.shape[0], call.q.shape[1]
    queries = config["BLOCK_M"] // next_power_of_2(call.group)
    seqs = min(num_seqs, num_tokens)
    blocks = (num_tokens - seqs) // queries + seqs  # at most
    keys = min(call.capacity, call.sliding_window + queries if call.sliding_window else ANY.value)
    most = min(keys // LEAST_KEYS, MAX_SPLITS)
    return max(min(processors(call.q.device) // (blocks * call.pool.num_kv_heads), most), 1)


def launch_prefill(call: Call, few: int, longest: int, config: Config, splits: int = 1) -> None:
    """Attention of a varlen call's sequences of more than ``few`` queries.

    A decode launch must follow that takes the others, told that it is ``after_prefill``.

    Args:
        longest: a bound on the queries of any sequence.
        config: what :func:`choose_prefill` gave.
        splits: what :func:`splits_of` gave, where there are no others.
    """
    if "path" in config:
        from ferrum_triton.kernels.hopper.attention_paged import attend_pages

        # Over a pool in e4m3, a prompt of 2,048 and 63 decodes on 4,096 keys take 475 us, and 484
        # to 586 with SMs left to decodes (``bench.timing.Replay`` of ``paged_varlen_attention``,
        # BLOCK_COST from 1.5 to 5, one run of an H200, copies of 97d9a7c). Most likely decode is
        # bound by the instructions that widen codes, which fewer SMs take longer for.
        shared = may_differ(call, longest) and not call.pool.codes
        attend_pages(call, few, config, shared, splits)
        return
    pool, q = call.pool, call.q
    num_seqs, num_tokens = call.block_tables.shape[0], q.shape[1]
    block_m = max(config["BLOCK_M"], next_power_of_2(call.group))
    # A sequence of these has more than `few` queries, so there are at most so many.
    most_seqs = min(num_seqs, num_tokens // (few + 1))
    programs = (num_tokens // (block_m // call.group) + most_seqs) * pool.num_kv_heads
    # Where a program is all that an SM holds. In the interpreter always, for tests to see.
    is_shared = config["num_warps"] == 8 or q.device.type == "cpu"
    if is_shared:
        programs = min(programs, processors(q.device))
    axes = ("token", "head")
    _paged_prefill_kernel.launch(
        (programs,),
        out_ptr=call.out,
        lse_ptr=call.lse,
        q_ptr=q,
        **pool.pointers(),
        sinks_ptr=call.sinks,
        block_tables_ptr=call.block_tables,
        pos_offsets_ptr=call.pos_offsets,
        cu_seqlens_q_ptr=call.cu_seqlens_q,
        **strides_of("out", call.out[0], *axes),
        **strides_of("lse", None if call.lse is None else call.lse[0], *axes),
        **strides_of("q", q[0], *axes),
        stride_table=call.block_tables.stride(0),
        num_kv_heads=pool.num_kv_heads,
        num_seqs=num_seqs,
        capacity=call.capacity,
        num_tokens=num_tokens,
        num_blocks=pool.num_blocks,
        sliding_window=call.sliding_window,
        sms=processors(q.device),
        block_cost=BLOCK_COST,
        block_keys=BLOCK_KEYS,
        scale=call.scale_log2,
        softcap=float(call.softcap),
        POOL=pool.layout,
        ATTENTION=call.attention(block_m, config["BLOCK_N"]),
        PREFILL=Prefill(
            few=few,
            negate=call.scale < 0,
            narrow=is_narrow(pool),
            shared=is_shared,
            block_b=max(next_power_of_2(num_seqs), LEAST_SUMMED),
        ),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
