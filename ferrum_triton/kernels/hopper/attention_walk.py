"""The way of Hopper's warps through the sequences of a prefill, and their pages.

Sequences differ in length and lie in device memory. Every warp walks through them from the last to
the first, in step with the blocks that its program takes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ferrum_triton.kernels.attention.pages import Steps
from ferrum_triton.kernels.hopper.attention_tiles import ROWS, Block, Variant, next_rank

# How a program's threads share out the sequences before they part.
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# A position from which a query sees no key, whatever its place in its block.
BEFORE_ALL = gl.constexpr(-(1 << 30))

# How what is no matrix lies in shared memory.
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True)
class PagedVariant(Variant):
    """What the kernel specialises on beside flash attention's.

    Attributes:
        heads: a power of two >= group, the rows of one query.
        block_size: keys of a page.
        few: queries up to which a sequence is another launch's.
        value_dim: columns of the result.
        num_kv_heads: KV heads of the pool.
        codes: the format of an 8-bit pool, ``"e4m3"`` or ``"int8"``; else "".
        asks: who widens codes asks for them too; else a warp of its own does.
        k_scales, v_scales: strides of the pool's scales; None where it has none.
        token_step, head_step: strides of the result. Constants, as the pool's are to the plain
            kernel, take no registers.
        shared: SMs are left to the decode launch that follows.
        block_b: power of two >= num_seqs, where they are.
    """

    heads: int = 1
    block_size: int = 0
    few: int = 0
    value_dim: int = 0
    num_kv_heads: int = 1
    codes: str = ""
    asks: bool = False
    k_scales: Steps | None = None
    v_scales: Steps | None = None
    token_step: int = 0
    head_step: int = 0
    shared: bool = False
    block_b: int = 0

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
        num_tokens: queries of all sequences: none past them exist.
        num_blocks: blocks of the pool.
        programs: room for the number of programs that take blocks, in shared memory, where SMs are
            left to decodes; else None.
        splits: the most parts that a block's keys are cut into, where they are.
        least_keys: keys of its sequence for each of them.
    """

    tables_ptr: Any
    pos_offsets_ptr: Any
    cu_seqlens_q_ptr: Any
    stride_table: Any
    num_seqs: Any
    capacity: Any
    num_tokens: Any
    num_blocks: Any
    sliding_window: Any
    scale_log2: Any
    softcap_log2: Any
    programs: Any
    splits: Any = None
    least_keys: Any = None


class Walk(NamedTuple):
    """Where a warp is on its way through the sequences, which begins behind the last one.

    Attributes:
        seq: the sequence.
        end: blocks of it and of those after it, which come first.
        pivot: the index, among all blocks, of the block of its first queries, where its others come
            before that one; where they come after it, -1 minus the index.
    """

    seq: Any
    end: Any
    pivot: Any


class Part(NamedTuple):
    """A block of queries of a sequence, and its keys, or one part of them.

    Attributes:
        block: as flash attention takes it; its rows are queries of the sequence.
        token: the sequence's first query, among all.
        num_queries: how many queries the sequence has.
        keys: how many keys it has.
        number: which part of the keys, from the last ones on; 0 where they are whole.
    """

    block: Any
    token: Any
    num_queries: Any
    keys: Any
    number: Any


@gluon.jit
def tokens_of(seq, batch):
    """Where the tokens of a sequence of the call begin and end, among those that exist.

    The loads have no mask. :func:`share_sms` needs one, and loads for itself: with a mask here,
    programs that take pages of 8 bits keep words in local memory (``test_machine_code`` of
    ``tests/test_hopper_paged_codes.py``).
    """
    starts = batch.cu_seqlens_q_ptr + seq
    first = gl.minimum(gl.maximum(gl.load(starts), 0), batch.num_tokens)
    end = gl.minimum(gl.maximum(gl.load(starts + 1), 0), batch.num_tokens)
    return first.to(gl.int32), end.to(gl.int32)


@gluon.jit
def blocks_of(seq, batch, VARIANT: gl.constexpr):
    """Blocks of queries of a sequence: none if it is another launch's."""
    first, end = tokens_of(seq, batch)
    queries = end - first
    blocks = gl.cdiv(queries, VARIANT.consumers * VARIANT.queries)
    return gl.where(queries > VARIANT.few, blocks, 0)


@gluon.jit
def share_sms(batch, sms, block_cost, block_keys, VARIANT: gl.constexpr):
    """Find out how many programs take blocks, where the others leave their SMs to decodes.

    Blocks of queries and decodes share the SMs as they share the work, which is counted in keys of
    one KV head, a block's queries taken at their sequence's middle. Of the programs that makes,
    those end too without which the blocks take no more turns. Without decodes all programs work.

    Args:
        sms: how many SMs the GPU has.
        block_cost: time an SM takes for a block and a key, over that for one of decode's keys.
        block_keys: keys that take as long as a block's beginning and its end.
    """
    seq = gl.arange(0, VARIANT.block_b, SEQUENCES)
    known = seq < batch.num_seqs
    starts = batch.cu_seqlens_q_ptr + seq
    first = gl.maximum(gl.load(starts, mask=known, other=0), 0)
    end = gl.minimum(gl.load(starts + 1, mask=known, other=0), batch.num_tokens)
    queries = (end - first).to(gl.int32)
    keys = gl.load(batch.pos_offsets_ptr + seq, mask=known, other=0) + queries
    keys = gl.minimum(gl.maximum(keys, 0), batch.capacity).to(gl.int32)
    step: gl.constexpr = VARIANT.consumers * VARIANT.queries
    reach, few_reach = keys - queries // 2, keys
    if VARIANT.has_window:
        reach = gl.minimum(reach, batch.sliding_window + step)
        few_reach = gl.minimum(few_reach, batch.sliding_window + VARIANT.few)
    blocks = gl.where(queries > VARIANT.few, gl.cdiv(queries, step), 0)
    is_few = (queries > 0) & (queries <= VARIANT.few)
    own = gl.sum(blocks * (reach + block_keys).to(gl.float32), 0) * block_cost
    others = gl.sum(gl.where(is_few, few_reach, 0).to(gl.float32), 0)
    pairs = gl.sum(blocks, 0) * VARIANT.num_kv_heads
    share = (sms * (own / gl.maximum(own + others, 1.0)) + 0.5).to(gl.int32)
    programs = gl.maximum(gl.minimum(share, gl.num_programs(0)), 1)
    fewest = gl.cdiv(pairs, gl.maximum(gl.cdiv(pairs, programs), 1))
    programs = gl.where(others > 0, fewest, programs)
    batch.programs.store(gl.full([1], programs, gl.int32, SEQUENCES))


@gluon.jit
def programs_of(batch, VARIANT: gl.constexpr):
    """The programs that take blocks. Read where needed, it holds no register meanwhile."""
    programs = gl.num_programs(0)
    if VARIANT.shared:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        programs = gl.max(batch.programs.load(LAYOUT), 0)
    return programs


@gluon.jit
def begin(batch, VARIANT: gl.constexpr):
    """A program's first rank, and the walk before it, which has ended where it has no part.

    0 is added to all, as attention_roles.store_rows says why.
    """
    nothing = (gl.load(batch.cu_seqlens_q_ptr) >> 31).to(gl.int32) & (batch.num_seqs >> 31)
    seq = batch.num_seqs + nothing
    if VARIANT.shared:
        seq = gl.where(gl.program_id(0) < programs_of(batch, VARIANT), seq, 0)
    return gl.program_id(0) + nothing, Walk(seq, 0, nothing - 1)


@gluon.jit
def next_of(rank, turn, batch, VARIANT: gl.constexpr):
    """The rank of the block that this program takes in a turn after that of the one before."""
    return next_rank(rank, turn, programs_of(batch, VARIANT))


@gluon.jit
def ranks_of_block(batch, VARIANT: gl.constexpr):
    """How many ranks a block of queries has: one for each KV head and part of its keys."""
    ranks = VARIANT.num_kv_heads
    if VARIANT.is_split:
        ranks = batch.splits * ranks
    return ranks


@gluon.jit
def has_part(walk, rank, batch, VARIANT: gl.constexpr):
    """Whether there is a block of a rank, to which :func:`walk_to` went."""
    return rank // ranks_of_block(batch, VARIANT) < walk.end


@gluon.jit
def walk_to(walk, rank, batch, VARIANT: gl.constexpr):
    """Go on to the sequence of a rank's block, or to the first one.

    Of the sequences with blocks, the first's come from the last on, the next's from the first on,
    and so on.
    """
    index = rank // ranks_of_block(batch, VARIANT)
    seq, end, pivot = walk.seq, walk.end, walk.pivot
    while (index >= end) & (seq > 0):
        seq -= 1
        blocks = blocks_of(seq, batch, VARIANT)
        turned = gl.where(pivot < 0, end + blocks - 1, -1 - end)
        pivot = gl.where(blocks > 0, turned, pivot)
        end += blocks
    return Walk(seq, end, pivot)


@gluon.jit
def part_of(walk, rank, batch, VARIANT: gl.constexpr):
    """The block of queries of a rank.

    A sequence's last ones see the most keys and come first, but those of every other sequence come
    backwards. So a sequence begins with blocks about as long as the last ones before it, and all
    programs have their share of long ones.

    Where keys are split, a block's parts have the same number of tiles, but the last ones may be
    left with fewer or none. A part without tiles takes one all the same, of which its queries see
    nothing. A rank past the sequence's parts has no queries, and stores nothing.
    """
    token, token_end = tokens_of(walk.seq, batch)
    num_queries = token_end - token
    keys = gl.load(batch.pos_offsets_ptr + walk.seq) + num_queries
    keys = gl.minimum(gl.maximum(keys, 0), batch.capacity).to(gl.int32)
    index = rank // ranks_of_block(batch, VARIANT)
    step: gl.constexpr = VARIANT.consumers * VARIANT.queries
    first_query = gl.where(walk.pivot < 0, index + 1 + walk.pivot, walk.pivot - index) * step
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
    kv_head = rank - index * ranks_of_block(batch, VARIANT)
    number = 0
    if VARIANT.is_split:
        number = kv_head // VARIANT.num_kv_heads
        kv_head -= number * VARIANT.num_kv_heads
        # The merge counts parts in the same way.
        parts = gl.minimum(gl.maximum(keys // batch.least_keys, 1), batch.splits)
        num_queries = gl.where(number < parts, num_queries, 0)
        size = gl.cdiv(tiles, parts)
        before = number * size
        position = gl.where(before < tiles, position, BEFORE_ALL)
        end -= gl.minimum(before, tiles - 1) * VARIANT.block_n
        tiles = gl.maximum(gl.minimum(tiles - before, size), 1)
    block = Block(walk.seq, kv_head, first_query, position, end, tiles, edge, shift)
    return Part(block, token, num_queries, keys, number)


@gluon.jit
def copy_pages(stream, stage, first_key, part, batch, VARIANT: gl.constexpr):
    """Ask for the keys or values of a tile, page by page, for a stage that has room for them."""
    PIECE: gl.constexpr = VARIANT.piece
    PIECES: gl.constexpr = VARIANT.pieces
    others: gl.constexpr = 0 if stream.rest_desc is None else stream.rest_desc.block_type.nbytes
    num_bytes: gl.constexpr = (stream.desc.block_type.nbytes + others) * PIECES
    full = stream.ring.full.index(stage)
    mbarrier.expect(full, num_bytes)
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
