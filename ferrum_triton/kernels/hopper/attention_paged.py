"""Prefill over paged pools on Hopper: a producer gathers pages, consumers are flash attention's.

A sequence's tiles are counted backwards from that of the last key which a block sees, and begin at
multiples of their size, so that a page, or a part of it, is one box of a tensor map. The page of a
sequence's last keys may be full of stale ones: its box begins before the page, where a map reads
zeros, and ends with the last key. So its keys lie at the end of their places (``Block.shift``), and
what is stale gets near no product.

Sequences differ in length and lie in device memory. Every warp walks through them from the last to
the first, in step with the blocks that its program takes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ferrum_triton.kernels.attention.flash_plan import HOPPER_REGISTERS, padded, split_columns
from ferrum_triton.kernels.attention.merge import strides_of
from ferrum_triton.kernels.attention.paged_decode import Call
from ferrum_triton.kernels.attention.softmax import LEAST_SCALE, LOG2_E
from ferrum_triton.kernels.attention.tensor_maps import steps_fit
from ferrum_triton.kernels.gluon import gluon_kernel
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.hopper.attention import LAUNCH_REGISTERS, columns_of
from ferrum_triton.kernels.hopper.attention_roles import (
    Rows,
    Stream,
    Streams,
    allocate,
    ask,
    attend,
    make_ring,
)
from ferrum_triton.kernels.hopper.attention_tiles import (
    ROWS,
    Block,
    Variant,
    finish,
    next_rank,
    whole_tiles,
)
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.kernels.tuning import Config

# Pages whose boxes are worth a copy, and that a tile or a part of one holds.
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class PagedVariant(Variant):
    """What the kernel specialises on beside flash attention's.

    Attributes:
        heads: a power of two >= group, the rows of one query.
        block_size: keys of a page.
        few: queries up to which a sequence is another launch's.
        value_dim: columns of the result.
        num_kv_heads: of the pool.
        token_step, head_step: strides of the result. Constants, as the pool's are to the plain
            kernel, take no registers.
    """

    heads: int = 1
    block_size: int = 0
    few: int = 0
    value_dim: int = 0
    num_kv_heads: int = 1
    token_step: int = 0
    head_step: int = 0

    @property
    def queries(self) -> int:
        """Queries of a consumer."""
        return ROWS.value // self.heads

    @property
    def pieces(self) -> int:
        """Boxes of a tile."""
        return self.block_n // self.piece


class Batch(NamedTuple):
    """The sequences of a call, and what all warps know beside them.

    Attributes:
        tables_ptr: blocks of each sequence, [num_seqs, max_blocks].
        pos_offsets_ptr: position of each sequence's first query, [num_seqs].
        cu_seqlens_q_ptr: where each sequence's queries begin, [num_seqs + 1].
        capacity: keys a block table can hold.
        num_blocks: of the pool.
    """

    tables_ptr: Any
    pos_offsets_ptr: Any
    cu_seqlens_q_ptr: Any
    stride_table: Any
    num_seqs: Any
    capacity: Any
    num_blocks: Any
    sliding_window: Any
    scale_log2: Any
    softcap_log2: Any


class Walk(NamedTuple):
    """Where a warp is on its way through the sequences, which begins behind the last one.

    Attributes:
        seq: the sequence.
        end: blocks of it and of those after it, which come first.
    """

    seq: Any
    end: Any


class Part(NamedTuple):
    """A block of queries of a sequence.

    Attributes:
        block: as flash attention takes it; its rows are queries of the sequence.
        token: the sequence's first query, among all.
        num_queries: of the sequence.
        keys: of the sequence.
    """

    block: Any
    token: Any
    num_queries: Any
    keys: Any


@gluon.jit
def blocks_of(seq, batch, VARIANT: gl.constexpr):
    """Blocks of queries of a sequence: none if it is another launch's."""
    starts = batch.cu_seqlens_q_ptr + seq
    queries = (gl.load(starts + 1) - gl.load(starts)).to(gl.int32)
    blocks = gl.cdiv(queries, VARIANT.consumers * VARIANT.queries)
    return gl.where(queries > VARIANT.few, blocks, 0)


@gluon.jit
def begin(batch):
    """A program's first rank, and the walk before it.

    0 is added to both, as attention_roles.store_rows says why.
    """
    nothing = (gl.load(batch.cu_seqlens_q_ptr) >> 31).to(gl.int32)
    return gl.program_id(0) + nothing, Walk(batch.num_seqs + nothing, 0)


@gluon.jit
def walk_to(walk, index, batch, VARIANT: gl.constexpr):
    """Go on to the sequence of a block, or to the first one."""
    seq, end = walk.seq, walk.end
    while (index >= end) & (seq > 0):
        seq -= 1
        end += blocks_of(seq, batch, VARIANT)
    return Walk(seq, end)


@gluon.jit
def part_of(walk, rank, batch, VARIANT: gl.constexpr):
    """The block of queries of a rank; a sequence's last ones see the most keys and come first."""
    starts = batch.cu_seqlens_q_ptr + walk.seq
    token = gl.load(starts)
    num_queries = (gl.load(starts + 1) - token).to(gl.int32)
    keys = gl.load(batch.pos_offsets_ptr + walk.seq) + num_queries
    keys = gl.minimum(gl.maximum(keys, 0), batch.capacity).to(gl.int32)
    index = rank // VARIANT.num_kv_heads
    step: gl.constexpr = VARIANT.consumers * VARIANT.queries
    first_query = (walk.end - 1 - index) * step
    position = keys - num_queries
    seen = gl.minimum(gl.minimum(first_query + step, num_queries) + position, keys)
    end = gl.maximum(gl.cdiv(seen, VARIANT.block_n), 1) * VARIANT.block_n
    start = 0
    if VARIANT.has_window:
        start = gl.maximum(first_query + position + 1 - batch.sliding_window, 0)
        start = gl.minimum(start // VARIANT.block_n * VARIANT.block_n, end)
    tiles = gl.maximum((end - start) // VARIANT.block_n, 1)
    edge = keys // VARIANT.piece * VARIANT.piece
    shift = (VARIANT.piece - (keys - edge)) % VARIANT.piece
    kv_head = rank - index * VARIANT.num_kv_heads
    block = Block(walk.seq, kv_head, first_query, position, end, tiles, edge, shift)
    return Part(block, token.to(gl.int32), num_queries, keys)


@gluon.jit
def ask_pages(stream, step, first_key, part, batch, VARIANT: gl.constexpr):
    """Ask for the keys or values of a tile, page by page."""
    PIECE: gl.constexpr = VARIANT.piece
    PIECES: gl.constexpr = VARIANT.pieces
    others: gl.constexpr = 0 if stream.rest_desc is None else stream.rest_desc.block_type.nbytes
    num_bytes: gl.constexpr = (stream.desc.block_type.nbytes + others) * PIECES
    acquire(stream.ring, step, num_bytes)
    stage = step % VARIANT.stages
    full = stream.ring.full.index(stage)
    buffer = stream.ring.buffers.index(stage)
    table = batch.tables_ptr + part.block.batch.to(gl.int64) * batch.stride_table
    for i in gl.static_range(PIECES):
        key = first_key + i * PIECE
        valid = gl.minimum(gl.maximum(part.keys - key, 0), PIECE)
        page = gl.load(table + key // VARIANT.block_size, mask=valid > 0, other=0).to(gl.uint32)
        page = gl.minimum(page, (batch.num_blocks - 1).to(gl.uint32)).to(gl.int32)
        row = gl.where(valid > 0, key % VARIANT.block_size + valid - PIECE, -PIECE)
        at = [page, part.block.head, row, 0]
        place = buffer.slice(i * PIECE, PIECE, 2)
        tma.async_copy_global_to_shared(stream.desc, at, full, place)
        if stream.rest_desc is not None:
            place = stream.rest.index(stage).slice(i * PIECE, PIECE, 2)
            tma.async_copy_global_to_shared(stream.rest_desc, at, full, place)


@gluon.jit
def produce_pages(streams, batch, VARIANT: gl.constexpr):
    """Ask for all that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    BLOCK_N: gl.constexpr = VARIANT.block_n
    turn, done = 0, 0  # blocks and tiles before
    rank, walk = begin(batch)
    walk = walk_to(walk, rank // VARIANT.num_kv_heads, batch, VARIANT)
    while rank // VARIANT.num_kv_heads < walk.end:
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
        rank = next_rank(rank, turn)
        walk = walk_to(walk, rank // VARIANT.num_kv_heads, batch, VARIANT)


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
    return Rows(first, head, position, whole_begin, whole_end)


class Targets(NamedTuple):
    """Where results and the logarithms of sums go, and what sinks these begin with."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    stride_lse_token: Any
    stride_lse_head: Any


@gluon.jit
def consume_pages(streams, targets, batch, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """The part of a consumer: 64 rows of each of the program's blocks."""
    turn, done = 0, 0  # blocks and tiles before
    rank, walk = begin(batch)
    walk = walk_to(walk, rank // VARIANT.num_kv_heads, batch, VARIANT)
    while rank // VARIANT.num_kv_heads < walk.end:
        part = part_of(walk, rank, batch, VARIANT)
        rows = rows_of(part, batch, OWN, VARIANT)
        state = attend(part.block, rows, done, turn, streams, targets, batch, OWN, VARIANT)
        done += part.block.tiles
        # Found anew, which costs less than registers that the products need.
        store_part(state, part_of(walk, rank, batch, VARIANT), targets, OWN, VARIANT)
        turn += 1
        rank = next_rank(rank, turn)
        walk = walk_to(walk, rank // VARIANT.num_kv_heads, batch, VARIANT)


@gluon.jit
def store_part(state, part, targets, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """Store those of a consumer's rows that exist: what follows is another sequence's."""
    result, lse = finish(state, VARIANT)
    if targets.lse_ptr is not None:
        query, head, exists = members(part, OWN, gl.SliceLayout(1, VARIANT.scores), VARIANT)
        at = query * targets.stride_lse_token + head * targets.stride_lse_head
        gl.store(targets.lse_ptr + at, lse, mask=exists)
    query, head, exists = members(part, OWN, gl.SliceLayout(1, VARIANT.result), VARIANT)
    at = query * VARIANT.token_step + head * VARIANT.head_step
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


@gluon_kernel(dynamic="num_seqs capacity num_blocks sliding_window scale_log2 softcap_log2".split())
def _hopper_paged_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    lse_ptr,  # [num_tokens, num_heads] or None
    sinks_ptr,  # [num_heads] or None
    block_tables_ptr,  # [num_seqs, max_blocks]
    pos_offsets_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    q_desc,  # q as [num_kv_heads, num_tokens, group, head_dim], in blocks of 64 rows
    q_rest_desc,  # the columns of q and k from block_d on, block_e wide, or None
    k_desc,  # pools as [num_blocks, num_kv_heads, block_size, head_dim], in blocks of a piece
    k_rest_desc,
    v_desc,
    stride_lse_token,
    stride_lse_head,
    stride_table,
    num_seqs,
    capacity,
    num_blocks,
    sliding_window,
    scale_log2,
    softcap_log2,
    VARIANT: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = softmax(scale · q kᵀ + mask) v of the sequences of many queries."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    CONSUMERS: gl.constexpr = VARIANT.consumers
    STAGES: gl.constexpr = VARIANT.stages
    q_rest, k_rest = None, None
    if q_rest_desc is not None:
        q_rest = allocate(q_rest_desc, CONSUMERS)
        k_rest = allocate_tiles(k_rest_desc, STAGES, VARIANT)
    q = Stream(q_desc, q_rest_desc, make_ring(q_desc, CONSUMERS, 1), q_rest)
    k = Stream(k_desc, k_rest_desc, make_tiles(k_desc, VARIANT), k_rest)
    v = Stream(v_desc, None, make_tiles(v_desc, VARIANT), None)
    fence_async_shared()
    streams = Streams(q, k, v, None, None)
    targets = Targets(
        out_ptr,
        lse_ptr,
        sinks_ptr,
        stride_lse_token,
        stride_lse_head,
    )
    batch = Batch(
        block_tables_ptr,
        pos_offsets_ptr,
        cu_seqlens_q_ptr,
        stride_table,
        num_seqs,
        capacity,
        num_blocks,
        sliding_window,
        scale_log2,
        softcap_log2,
    )
    gl.warp_specialize(
        [
            (consume_pages, (streams, targets, batch, 0, VARIANT)),
            (consume_pages, (streams, targets, batch, 1, VARIANT)),
            (produce_pages, (streams, batch, VARIANT)),
        ],
        [4, 1],
        [VARIANT.registers, 24],
    )


@gluon.jit
def make_tiles(desc, VARIANT: gl.constexpr):
    """Buffers of tiles that are gathered from a map's blocks."""
    full = make_barriers(VARIANT.stages, 1)
    empty = make_barriers(VARIANT.stages, VARIANT.consumers)
    return Ring(allocate_tiles(desc, VARIANT.stages, VARIANT), full, empty)


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr, VARIANT: gl.constexpr):
    """Room for tiles that are gathered from a map's blocks."""
    shape: gl.constexpr = [STAGES, 1, 1, VARIANT.block_n, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


def can_gather(call: Call) -> bool:
    """Whether tensor maps can have a call's queries and the pages of its pool."""
    layout = call.pool.layout
    strides = [
        step for steps in (layout.k, layout.v) for step in (steps.block, steps.head, steps.slot)
    ]
    strides += call.q.stride()[1:3]
    tensors = (call.q, call.pool.k, call.pool.v)
    size = call.q.element_size()
    return (
        not (layout.quantised or layout.k_piece or layout.v_piece)
        and layout.block_size in BLOCK_SIZES
        and call.group <= ROWS.value
        and all(x.data_ptr() % 16 == 0 for x in tensors)
        and call.q.shape[3] * size % 16 == 0
        and steps_fit(strides, size)
    )


def attend_pages(call: Call, few: int, config: Config) -> None:
    """Attention of a varlen call's sequences of more than ``few`` queries."""
    head_dim, group, pool = call.out.shape[3], call.group, call.pool
    heads, (block_d, block_e) = next_power_of_2(group), split_columns(head_dim)
    block_n, layout = config["BLOCK_N"], pool.layout
    q, out = call.q[0], call.out[0]
    factor = abs(call.scale) * LOG2_E.value * (2.0 / call.softcap if call.softcap > 0 else 1.0)
    variant = PagedVariant(
        consumers=2,
        registers=HOPPER_REGISTERS[2],
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
        token_step=out.stride(0),
        head_step=out.stride(1),
    )
    # A sequence of these has more than `few` queries, so there are at most so many.
    most_seqs = min(call.block_tables.shape[0], q.shape[0] // (few + 1))
    most_blocks = q.shape[0] // (variant.consumers * variant.queries) + most_seqs
    programs = min(most_blocks * pool.num_kv_heads, gpu_of(q.device).num_sms)
    rows = ([pool.num_kv_heads, q.shape[0], group], [group * q.stride(1), q.stride(0), q.stride(1)])
    pages = [pool.num_blocks, pool.num_kv_heads, layout.block_size]
    k_steps, v_steps = ([s.block, s.head, s.slot] for s in (layout.k, layout.v))
    of_q, of_page = (1, variant.queries, heads), (1, 1, variant.piece)
    _hopper_paged_kernel.launch(
        (programs,),
        out_ptr=out,
        lse_ptr=call.lse,
        sinks_ptr=call.sinks,
        block_tables_ptr=call.block_tables,
        pos_offsets_ptr=call.pos_offsets,
        cu_seqlens_q_ptr=call.cu_seqlens_q,
        q_desc=columns_of(q, *rows, of_q, 0, block_d),
        q_rest_desc=columns_of(q, *rows, of_q, block_d, block_e),
        k_desc=columns_of(pool.k, pages, k_steps, of_page, 0, block_d),
        k_rest_desc=columns_of(pool.k, pages, k_steps, of_page, block_d, block_e),
        v_desc=columns_of(pool.v, pages, v_steps, of_page, 0, variant.block_v),
        **strides_of("lse", None if call.lse is None else call.lse[0], "token", "head"),
        stride_table=call.block_tables.stride(0),
        num_seqs=call.block_tables.shape[0],
        capacity=call.capacity,
        num_blocks=pool.num_blocks,
        sliding_window=call.sliding_window,
        scale_log2=max(factor, LEAST_SCALE.value),
        softcap_log2=call.softcap * LOG2_E.value,
        VARIANT=variant,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[2],
    )
