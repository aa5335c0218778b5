"""Prefill over paged pools on Hopper: a producer gathers pages, consumers are flash attention's.

A sequence's tiles are counted backwards from that of the last key which a block sees, and begin at
multiples of their size, so that a page, or a part of it, is one box of a tensor map. The page of a
sequence's last keys may be full of stale ones: its box begins before the page, where a map reads
zeros, and ends with the last key. So its keys lie at the end of their places (``Block.shift``), and
what is stale gets near no product.

Over a pool of 8 bits a warpgroup between the two widens them (:mod:`.attention_codes`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ferrum_triton.kernels.attention.flash_config import (
    HOPPER_REGISTERS,
    WIDE_REGISTERS,
    padded,
    split_columns,
)
from ferrum_triton.kernels.attention.merge import strides_of
from ferrum_triton.kernels.attention.paged_decode import Call
from ferrum_triton.kernels.attention.prefill_merge import LEAST_KEYS, merge_prefill
from ferrum_triton.kernels.attention.softmax import LEAST_SCALE, LOG2_E
from ferrum_triton.kernels.attention.tensor_maps import steps_fit
from ferrum_triton.kernels.gluon import gluon_kernel
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.hopper.attention import LAUNCH_REGISTERS, columns_of
from ferrum_triton.kernels.hopper.attention_codes import Scales, widen_pages
from ferrum_triton.kernels.hopper.attention_roles import (
    Rows,
    Stream,
    Streams,
    allocate,
    ask,
    attend,
    make_ring,
)
from ferrum_triton.kernels.hopper.attention_tiles import ROWS, finish, whole_tiles
from ferrum_triton.kernels.hopper.attention_walk import (
    FLAT,
    Batch,
    PagedVariant,
    begin,
    copy_pages,
    has_part,
    next_of,
    part_of,
    share_sms,
    walk_to,
)
from ferrum_triton.kernels.hopper.rings import Ring, make_barriers, wait_empty
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.kernels.tuning import Config

# Pages whose boxes are worth a copy, and that a tile or a part of one holds.
BLOCK_SIZES = (16, 32, 64, 128)

# Time an SM takes for a block of queries and a key, over that for one of decode's keys, and keys
# that take as long as a block's beginning and its end. By costs of 1.8, 2.4 and 3.2, seven of ten
# mixed batches took within 4 % the same. A prompt of 2,048 and 63 decodes on 4,096 keys took 370,
# 395 and 400 us, one of 8,192 and 72 on 8,192 keys 1,226, 1,365 and 1,382, but one of 1,024 and 40
# on 3,000 keys 181, 180 and 166 (``bench.timing.Replay`` of ``paged_varlen_attention``, H200,
# copies of 97d9a7c).
BLOCK_COST, BLOCK_KEYS = 1.8, 300


@gluon.jit
def ask_pages(stream, step, first_key, part, batch, VARIANT: gl.constexpr):
    """Ask for the keys or values of a tile, once there is room for them."""
    wait_empty(stream.ring, step)
    stage = step % stream.ring.full.shape[0]
    copy_pages(stream, stage, first_key, part, batch, VARIANT)


@gluon.jit
def produce_pages(streams, batch, VARIANT: gl.constexpr):
    """Ask for all that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    BLOCK_N: gl.constexpr = VARIANT.block_n
    turn, done = 0, 0  # blocks and tiles before
    rank, walk = begin(batch, VARIANT)
    walk = walk_to(walk, rank, batch, VARIANT)
    while has_part(walk, rank, batch, VARIANT):
        part = part_of(walk, rank, batch, VARIANT)
        block = part.block
        key = block.end - BLOCK_N
        ask_pages(streams.k, done, key, part, batch, VARIANT)
        for c in gl.static_range(CONSUMERS):
            token = part.token + block.first_row + c * VARIANT.queries
            ask(streams.q, turn * CONSUMERS + c, block.head, token, 0)
        for n in range(1, block.tiles):
            ask_pages(streams.k, done + n, key - BLOCK_N, part, batch, VARIANT)
            ask_pages(streams.v, done + n - 1, key, part, batch, VARIANT)
            key -= BLOCK_N
        done += block.tiles
        ask_pages(streams.v, done - 1, key, part, batch, VARIANT)
        turn += 1
        rank = next_of(rank, turn, batch, VARIANT)
        walk = walk_to(walk, rank, batch, VARIANT)


@gluon.jit
def rows_of(part, batch, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """A consumer's rows: (query, head of the group)."""
    first = part.block.first_row + OWN * VARIANT.queries
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VARIANT.scores))
    position = first + row // VARIANT.heads + part.block.position
    head = part.block.head * VARIANT.group + gl.minimum(row % VARIANT.heads, VARIANT.group - 1)
    oldest = first + part.block.position
    newest = gl.minimum(first + VARIANT.queries, part.num_queries) - 1 + part.block.position
    whole_begin, whole_end = whole_tiles(oldest, newest, part.block, batch, VARIANT)
    return Rows(first, head, position, whole_begin, whole_end, part.number)


class Targets(NamedTuple):
    """Where results and the logarithms of sums go, and what sinks these begin with.

    Parts of the same rows lie ``stride_out_part`` and ``stride_lse_part`` apart.
    """

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    stride_out_part: Any
    stride_lse_part: Any
    stride_lse_token: Any
    stride_lse_head: Any


@gluon.jit
def consume_pages(streams, targets, batch, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """The part of a consumer: 64 rows of each of the program's blocks."""
    turn, done = 0, 0  # blocks and tiles before
    rank, walk = begin(batch, VARIANT)
    walk = walk_to(walk, rank, batch, VARIANT)
    while has_part(walk, rank, batch, VARIANT):
        part = part_of(walk, rank, batch, VARIANT)
        rows = rows_of(part, batch, OWN, VARIANT)
        state = attend(part.block, rows, done, turn, streams, targets, batch, OWN, VARIANT)
        done += part.block.tiles
        # Found anew, which costs less than registers that the products need.
        store_part(state, part_of(walk, rank, batch, VARIANT), targets, OWN, VARIANT)
        turn += 1
        rank = next_of(rank, turn, batch, VARIANT)
        walk = walk_to(walk, rank, batch, VARIANT)


@gluon.jit
def store_part(state, part, targets, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """Store those of a consumer's rows that exist: what follows is another sequence's."""
    result, lse = finish(state, VARIANT)
    if targets.lse_ptr is not None:
        query, head, exists = members(part, OWN, gl.SliceLayout(1, VARIANT.scores), VARIANT)
        at = query * targets.stride_lse_token + head * targets.stride_lse_head
        if VARIANT.is_split:
            at += part.number.to(gl.int64) * targets.stride_lse_part
        gl.store(targets.lse_ptr + at, lse, mask=exists)
    query, head, exists = members(part, OWN, gl.SliceLayout(1, VARIANT.result), VARIANT)
    at = query * VARIANT.token_step + head * VARIANT.head_step
    if VARIANT.is_split:
        at += part.number.to(gl.int64) * targets.stride_out_part
    column = gl.arange(0, VARIANT.block_v, gl.SliceLayout(0, VARIANT.result))[None, :]
    result = result.to(targets.out_ptr.dtype.element_ty)
    mask = exists[:, None] & (column < VARIANT.value_dim)
    gl.store(targets.out_ptr + at[:, None] + column, result, mask=mask)


@gluon.jit
def members(part, OWN: gl.constexpr, LAYOUT: gl.constexpr, VARIANT: gl.constexpr):
    """The token and the head of each of a consumer's rows, and which of the rows exist."""
    # 0 is added, which compilers cannot tell: see attention_roles.store_rows.
    row = gl.arange(0, ROWS, LAYOUT) + (part.block.head >> 31)
    query = part.block.first_row + OWN * VARIANT.queries + row // VARIANT.heads
    member = row % VARIANT.heads
    exists = (query < part.num_queries) & (member < VARIANT.group)
    head = part.block.head * VARIANT.group + member
    return (part.token + query).to(gl.int64), head.to(gl.int64), exists


# Scalars that change from call to call.
DYNAMIC = (
    "stride_lse_part num_seqs capacity num_tokens num_blocks splits least_keys sliding_window "
    "sms block_cost block_keys scale_log2 softcap_log2"
)


@gluon_kernel(dynamic=DYNAMIC.split())
def _hopper_paged_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim], or such parts of it in float32
    lse_ptr,  # as out without its last dimension, or None
    sinks_ptr,  # [num_heads] or None
    k_scales_ptr,  # of slots or heads of a pool of codes, or None
    v_scales_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks]
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    q_desc,  # q as [num_kv_heads, num_tokens, group, head_dim], in blocks of 64 rows
    q_rest_desc,  # the columns of q and k from block_d on, block_e wide, or None
    k_desc,  # pools as [num_blocks, num_kv_heads, block_size, head_dim], in blocks of a piece
    k_rest_desc,
    v_desc,
    stride_out_part,  # with VARIANT.is_split, as the next
    stride_lse_token,
    stride_lse_head,
    stride_table,
    stride_lse_part,
    num_seqs,
    capacity,
    num_tokens,
    num_blocks,
    splits,  # the most parts of a block's keys; this and the next are used with VARIANT.is_split
    least_keys,  # of a part
    sliding_window,
    sms,  # of the GPU; this and the next two are share_sms's
    block_cost,
    block_keys,
    scale_log2,
    softcap_log2,
    VARIANT: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v of the sequences of many queries."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    CONSUMERS: gl.constexpr = VARIANT.consumers
    # Of pages as they are stored, and who makes room for others: the consumers, or who widens them.
    # Where that is also who asks, nobody waits for room, and barriers for it must not be made:
    # Triton would give their memory to a buffer.
    STAGES: gl.constexpr = VARIANT.stages if VARIANT.codes == "" else 1
    READERS: gl.constexpr = CONSUMERS if VARIANT.codes == "" else 0 if VARIANT.asks else 1
    q_rest, k_rest = None, None
    if q_rest_desc is not None:
        q_rest = allocate(q_rest_desc, CONSUMERS)
        k_rest = allocate_tiles(k_rest_desc, STAGES, VARIANT)
    q = Stream(q_desc, q_rest_desc, make_ring(q_desc, CONSUMERS, 1), q_rest)
    k_full, v_full = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    k_empty, v_empty = None, None
    if READERS > 0:
        k_empty, v_empty = make_barriers(STAGES, READERS), make_barriers(STAGES, READERS)
    k_ring = Ring(allocate_tiles(k_desc, STAGES, VARIANT), k_full, k_empty)
    v_ring = Ring(allocate_tiles(v_desc, STAGES, VARIANT), v_full, v_empty)
    k, v = Stream(k_desc, k_rest_desc, k_ring, k_rest), Stream(v_desc, None, v_ring, None)
    asked = Streams(q, k, v, None, None)
    streams, scales = asked, Scales(k_scales_ptr, v_scales_ptr)
    if VARIANT.codes != "":
        k_rest = None
        if q_rest_desc is not None:
            k_rest = allocate_widened(k_rest_desc, q_desc.dtype, VARIANT)
        wide = make_widened(k_desc, q_desc.dtype, VARIANT)
        k = Stream(None, None, wide, k_rest, allocate_scales(VARIANT))
        wide = make_widened(v_desc, q_desc.dtype, VARIANT)
        v = Stream(None, None, wide, None, allocate_scales(VARIANT))
        streams = Streams(q, k, v, None, None)
    fence_async_shared()
    targets = Targets(
        out_ptr,
        lse_ptr,
        sinks_ptr,
        stride_out_part,
        stride_lse_part,
        stride_lse_token,
        stride_lse_head,
    )
    programs = None
    if VARIANT.shared:
        programs = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    batch = Batch(
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_table,
        num_seqs,
        capacity,
        num_tokens,
        num_blocks,
        sliding_window,
        scale_log2,
        softcap_log2,
        programs,
        splits,
        least_keys,
    )
    if VARIANT.shared:
        share_sms(batch, sms, block_cost, block_keys, VARIANT)
    if VARIANT.codes == "":
        gl.warp_specialize(
            [
                (consume_pages, (streams, targets, batch, 0, VARIANT)),
                (consume_pages, (streams, targets, batch, 1, VARIANT)),
                (produce_pages, (asked, batch, VARIANT)),
            ],
            [4, 1],
            [VARIANT.registers, 24],
        )
    elif VARIANT.asks:
        gl.warp_specialize(
            [
                (consume_pages, (streams, targets, batch, 0, VARIANT)),
                (consume_pages, (streams, targets, batch, 1, VARIANT)),
                (widen_pages, (streams, asked, scales, batch, VARIANT)),
            ],
            [4, 4],
            [VARIANT.registers, 72],
        )
    else:
        gl.warp_specialize(
            [
                (consume_pages, (streams, targets, batch, 0, VARIANT)),
                (consume_pages, (streams, targets, batch, 1, VARIANT)),
                (widen_pages, (streams, asked, scales, batch, VARIANT)),
                (produce_pages, (asked, batch, VARIANT)),
            ],
            [4, 4, 1],
            [VARIANT.registers, 56, 24],
        )


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr, VARIANT: gl.constexpr):
    """Room for tiles that are gathered from a map's blocks."""
    shape: gl.constexpr = [STAGES, 1, 1, VARIANT.block_n, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_widened(desc, DTYPE: gl.constexpr, VARIANT: gl.constexpr):
    """Buffers of tiles in 16 bits of what a map brings as codes."""
    STAGES: gl.constexpr = VARIANT.stages
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, VARIANT.consumers)
    return Ring(allocate_widened(desc, DTYPE, VARIANT), full, empty)


@gluon.jit
def allocate_widened(desc, DTYPE: gl.constexpr, VARIANT: gl.constexpr):
    """Room for tiles in 16 bits of what a map brings as codes."""
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    tile: gl.constexpr = [1, 1, VARIANT.block_n, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(tile, DTYPE)
    shape: gl.constexpr = [VARIANT.stages, 1, 1, VARIANT.block_n, COLUMNS]
    return gl.allocate_shared_memory(DTYPE, shape, layout)


@gluon.jit
def allocate_scales(VARIANT: gl.constexpr):
    """Room for scales of the rows of tiles."""
    return gl.allocate_shared_memory(gl.float32, [VARIANT.stages, VARIANT.block_n], FLAT)


def can_gather(call: Call) -> bool:
    """Whether tensor maps can have a call's queries and the pages of its pool."""
    layout = call.pool.layout
    strides = [
        step for steps in (layout.k, layout.v) for step in (steps.block, steps.head, steps.slot)
    ]
    tensors = (call.q, call.pool.k, call.pool.v)
    size, of_pool = call.q.element_size(), call.pool.k.element_size()
    return (
        not (layout.k_piece or layout.v_piece)
        and layout.block_size in BLOCK_SIZES
        and call.group <= ROWS.value
        and all(x.data_ptr() % 16 == 0 for x in tensors)
        and call.out.shape[3] * of_pool % 16 == 0
        and steps_fit(call.q.stride()[1:3], size)
        and steps_fit(strides, of_pool)
    )


def attend_pages(call: Call, few: int, config: Config, shared: bool, splits: int = 1) -> None:
    """Attention of a varlen call's sequences of more than ``few`` queries.

    Args:
        shared: whether others may be decodes, to whose launch SMs are left.
        splits: the most parts that a block's keys are cut into; if more than one, ``few`` is 0.
    """
    if splits == 1:
        _launch(call, few, config, shared, call.out, call.lse)
        return
    shape = (splits, *call.out.shape[1:])
    parts = call.out.new_empty(shape, dtype=torch.float32)
    part_lses = call.out.new_empty(shape[:-1], dtype=torch.float32)
    _launch(call, few, config, shared, parts, part_lses)
    lse = None if call.lse is None else call.lse[0]
    sequences = call.pos_offsets, call.cu_seqlens_q, call.capacity
    merge_prefill(call.out[0], lse, parts, part_lses, *sequences)


def _launch(
    call: Call,
    few: int,
    config: Config,
    shared: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Launch the kernel.

    Args:
        out: [splits, num_tokens, num_heads, head_dim], the result or in float32 parts of it.
        lse: as out without its last dimension, or None.
    """
    head_dim, group, pool = call.out.shape[3], call.group, call.pool
    heads, (block_d, block_e) = next_power_of_2(group), split_columns(head_dim)
    block_n, layout = config["BLOCK_N"], pool.layout
    q, num_seqs = call.q[0], call.block_tables.shape[0]
    splits = out.shape[0]
    factor = abs(call.scale) * LOG2_E.value * (2.0 / call.softcap if call.softcap > 0 else 1.0)
    codes = pool.codes
    # With a warp to ask a program has 512 threads. For products of 256 columns, each has too few
    # registers then.
    asks = codes != "" and padded(head_dim) > 128
    # Tensor maps know no codes: they bring bytes.
    k_pages, v_pages = (x.view(torch.int8) if codes else x for x in (pool.k, pool.v))
    variant = PagedVariant(
        consumers=2,
        registers=WIDE_REGISTERS if codes else HOPPER_REGISTERS[2],
        block_n=block_n,
        stages=config["num_stages"],
        block_d=block_d,
        block_e=block_e,
        block_v=padded(head_dim),
        own_out=True,
        group=group,
        negate=call.scale < 0,
        is_causal=True,
        has_window=call.sliding_window > 0,
        has_softcap=call.softcap > 0,
        newest=True,
        piece=min(layout.block_size, block_n),
        heads=heads,
        block_size=layout.block_size,
        few=few,
        value_dim=head_dim,
        num_kv_heads=pool.num_kv_heads,
        codes=codes,
        asks=asks,
        round_first=bool(codes),
        k_scales=layout.k_scales if codes else None,
        v_scales=layout.v_scales if codes else None,
        token_step=out.stride(1),
        head_step=out.stride(2),
        shared=shared,
        block_b=next_power_of_2(num_seqs) if shared else 0,
        is_split=splits > 1,
    )
    # A sequence of these has more than `few` queries, so there are at most so many.
    most_seqs = min(num_seqs, q.shape[0] // (few + 1))
    most_blocks = q.shape[0] // (variant.consumers * variant.queries) + most_seqs
    sms = gpu_of(q.device).num_sms
    programs = min(most_blocks * pool.num_kv_heads * splits, sms)
    rows = ([pool.num_kv_heads, q.shape[0], group], [group * q.stride(1), q.stride(0), q.stride(1)])
    pages = [pool.num_blocks, pool.num_kv_heads, layout.block_size]
    k_steps, v_steps = ([s.block, s.head, s.slot] for s in (layout.k, layout.v))
    of_q, of_page = (1, variant.queries, heads), (1, 1, variant.piece)
    _hopper_paged_kernel.launch(
        (programs,),
        out_ptr=out,
        lse_ptr=lse,
        sinks_ptr=call.sinks,
        k_scales_ptr=pool.k_scales,
        v_scales_ptr=pool.v_scales,
        block_tables_ptr=call.block_tables,
        pos_offsets_ptr=call.pos_offsets,
        cu_seqlens_q_ptr=call.cu_seqlens_q,
        q_desc=columns_of(q, *rows, of_q, 0, block_d),
        q_rest_desc=columns_of(q, *rows, of_q, block_d, block_e),
        k_desc=columns_of(k_pages, pages, k_steps, of_page, 0, block_d),
        k_rest_desc=columns_of(k_pages, pages, k_steps, of_page, block_d, block_e),
        v_desc=columns_of(v_pages, pages, v_steps, of_page, 0, variant.block_v),
        **strides_of("out", out, "part"),
        **strides_of("lse", lse, "part", "token", "head"),
        stride_table=call.block_tables.stride(0),
        num_seqs=num_seqs,
        capacity=call.capacity,
        num_tokens=q.shape[0],
        num_blocks=pool.num_blocks,
        splits=splits,
        least_keys=LEAST_KEYS,
        sliding_window=call.sliding_window,
        sms=sms,
        block_cost=BLOCK_COST,
        block_keys=BLOCK_KEYS,
        scale_log2=max(factor, LEAST_SCALE.value),
        softcap_log2=call.softcap * LOG2_E.value,
        VARIANT=variant,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[3 if codes and not asks else 2],
    )
