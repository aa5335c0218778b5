"""The roles of Hopper's attention: one warp that asks for tiles, warpgroups that take them.

The producer asks for a block's queries, and its keys and values tile by tile. A consumer owns 64
queries and does, for every tile n:

1. begin the scores S(n) = Q K(n)ᵀ and, right behind, O += P(n-1) V(n-1);
2. wait for S(n) alone, and let K(n) go;
3. P(n) = softmax of S(n), by threads, while tensor cores still add to O;
4. wait for O, let V(n-1) go, and bring O to the new maximum.

So tensor cores and threads work at once within a warpgroup, and another warpgroup fills what gaps
are left.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferrum_triton.kernels.attention.softmax import Softmax
from ferrum_triton.kernels.hopper.attention_tiles import (
    ROWS,
    block_of_rank,
    finish,
    first_state,
    hide,
    hide_in_first,
    next_rank,
    scale_rows,
    scale_scores,
    weigh,
    whole_tiles,
)
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers, release, wait_full

# A word of two floats in 16 bits, the second one's in the upper half.
TWO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TWO_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


class Stream(NamedTuple):
    """A tensor on its way through shared memory, in blocks [1, 1, rows, columns].

    Attributes:
        desc: its first columns.
        rest_desc: its other columns, or None.
        ring: buffers of the first columns.
        rest: buffers of the others, which come and go with those.
        scales: float32 [stages, rows], a scale of each row, under the ring's barriers; or None.
    """

    desc: Any
    rest_desc: Any
    ring: Any
    rest: Any
    scales: Any = None


class Streams(NamedTuple):
    """What goes through a program's shared memory.

    Attributes:
        q: queries, a buffer for each consumer or two in turn.
        k: tiles of keys.
        v: tiles of values.
        out_desc: the results.
        outs: a buffer for each consumer's.
    """

    q: Any
    k: Any
    v: Any
    out_desc: Any
    outs: Any


class Outputs(NamedTuple):
    """Where the logarithms of sums go, and what sinks they begin with; None for neither."""

    lse_ptr: Any
    sinks_ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_token: Any


@gluon.jit
def allocate(desc, NUMBER: gl.constexpr):
    """Room for a number of blocks."""
    block: gl.constexpr = desc.block_type.shape
    shape: gl.constexpr = [NUMBER, 1, block[1], block[2], block[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers of blocks that a number of consumers let go of together."""
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)
    return Ring(allocate(desc, STAGES), full, empty)


@gluon.jit
def ask(stream, step, batch, head, row):
    """Ask for the block from a row on, once there is room for it."""
    others: gl.constexpr = 0 if stream.rest_desc is None else stream.rest_desc.block_type.nbytes
    num_bytes: gl.constexpr = stream.desc.block_type.nbytes + others
    acquire(stream.ring, step, num_bytes)
    STAGES: gl.constexpr = stream.ring.full.shape[0]
    stage = step % STAGES
    full = stream.ring.full.index(stage)
    at = [batch, head, row, 0]
    tma.async_copy_global_to_shared(stream.desc, at, full, stream.ring.buffers.index(stage))
    if stream.rest_desc is not None:
        tma.async_copy_global_to_shared(stream.rest_desc, at, full, stream.rest.index(stage))


@gluon.jit
def produce(streams, call, VARIANT: gl.constexpr):
    """Ask for all that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    rank = gl.program_id(0)
    turn, done = 0, 0  # blocks and tiles before
    while rank < call.blocks:
        block = block_of_rank(rank, call, VARIANT)
        batch, kv_head = block.batch, block.head // VARIANT.group
        # Keys first: there is room for them before the consumers are done with the last queries.
        key = block.end - VARIANT.block_n
        ask(streams.k, done, batch, kv_head, key)
        for c in gl.static_range(CONSUMERS):
            row = block.first_row + c * ROWS
            ask(streams.q, turn * CONSUMERS + c, batch, block.head, row)
        for n in range(1, block.tiles):
            ask(streams.k, done + n, batch, kv_head, key - VARIANT.block_n)
            ask(streams.v, done + n - 1, batch, kv_head, key)
            key -= VARIANT.block_n
        done += block.tiles
        ask(streams.v, done - 1, batch, kv_head, key)
        turn += 1
        rank = next_rank(rank, turn, gl.num_programs(0))


@gluon.jit
def tile_of(buffers, stage):
    """A buffer as a matrix."""
    buffer = buffers.index(stage)
    return buffer.reshape([buffer.shape[1] * buffer.shape[2], buffer.shape[3]])


@gluon.jit
def buffer_of(turn, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """The buffer of a consumer's queries of a turn. Constant where it can be."""
    own = OWN
    if VARIANT.ahead:
        own = OWN + (turn & 1) * VARIANT.consumers
    return own


@gluon.jit
def begin_scores(streams, step, turn, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """Begin the product of a consumer's queries with the keys of a step."""
    wait_full(streams.k.ring, step)
    stage = step % VARIANT.stages
    scores = gl.full([ROWS, VARIANT.block_n], 0.0, gl.float32, VARIANT.scores)
    own = buffer_of(turn, OWN, VARIANT)
    q = tile_of(streams.q.ring.buffers, own)
    k = tile_of(streams.k.ring.buffers, stage)
    scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
    if streams.q.rest is not None:
        q, k = tile_of(streams.q.rest, own), tile_of(streams.k.rest, stage)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def scale_keys(x, stream, step, VARIANT: gl.constexpr):
    """Scores or weights of a tile that is held, times the scales of its rows, if it has some."""
    if stream.scales is not None:
        scales = stream.scales.index(step % VARIANT.stages)
        x = x * scales.load(gl.SliceLayout(0, VARIANT.scores))[None, :]
    return x


@gluon.jit
def rounded(weights, streams, step, VARIANT: gl.constexpr):
    """The weights of a step's values, as they were carried, as a product reads them."""
    DTYPE: gl.constexpr = streams.v.ring.buffers.dtype
    if streams.v.scales is not None:
        wait_full(streams.v.ring, step)
        weights = scale_keys(weights, streams.v, step, VARIANT)
    if VARIANT.in_words:
        low, high = weights.to(gl.int16), (weights >> 16).to(gl.int16)
        operand = gl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
        operand = operand.reshape([ROWS, VARIANT.block_n])
    else:
        operand = weights.to(DTYPE)
    return gl.convert_layout(operand, VARIANT.weights, assert_trivial=True)


@gluon.jit
def carried(weights, DTYPE: gl.constexpr, VARIANT: gl.constexpr):
    """A tile's weights as they go on to the next tile, where they are multiplied.

    They go on in float32: carried as 16 bits they would be unpacked and packed again at every turn
    of the loop. Words are packed by assembly, into which compilers do not see.
    """
    if VARIANT.in_words:
        low, high = weights.reshape([ROWS, VARIANT.block_n // 2, 2]).split()
        weights = in_word(low, high, DTYPE)
    return weights


@gluon.jit
def in_word(low, high, DTYPE: gl.constexpr):
    """Two numbers in 16 bits each, rounded to the nearest."""
    ASM: gl.constexpr = TWO_BF16 if DTYPE == gl.bfloat16 else TWO_F16
    return gl.inline_asm_elementwise(
        ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def begin_sum(streams, step, operand, acc, VARIANT: gl.constexpr):
    """Begin to add the values of a step, weighted."""
    if streams.v.scales is None:
        wait_full(streams.v.ring, step)
    v = tile_of(streams.v.ring.buffers, step % VARIANT.stages)
    return warpgroup_mma(operand, v, acc, is_async=True)


class Rows(NamedTuple):
    """A consumer's rows of a block.

    Attributes:
        first: the first of them.
        head: the query head of all, or of each, [rows].
        position: of each, [rows].
        whole_begin: the tiles [whole_begin, whole_end) are seen whole by all of them.
        whole_end: see there.
        number: which part of their keys; 0 where they are whole.
    """

    first: Any
    head: Any
    position: Any
    whole_begin: Any
    whole_end: Any
    number: Any


@gluon.jit
def fold_tile(
    state,
    weights,
    n,
    done,
    turn,
    block,
    rows,
    streams,
    call,
    OWN: gl.constexpr,
    VARIANT: gl.constexpr,
):
    """Fold tile n of a block into the softmax, and add the values of tile n - 1.

    Args:
        state: without the values of tile n - 1.
        weights: the weights of the values of tile n - 1, as :func:`carried` gives them.
        done: tiles of the blocks before, which count the steps of the rings.
        turn: blocks before.

    Returns:
        The state without the values of tile n, and their weights, carried.
    """
    step = done + n
    if VARIANT.round_first:
        operand = rounded(weights, streams, step - 1, VARIANT)
        scores = begin_scores(streams, step, turn, OWN, VARIANT)
    else:
        scores = begin_scores(streams, step, turn, OWN, VARIANT)
        operand = rounded(weights, streams, step - 1, VARIANT)
    acc = begin_sum(streams, step - 1, operand, state.acc, VARIANT)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores = scale_keys(scores, streams.k, step, VARIANT)
    release(streams.k.ring, step)

    scores, factor = scale_scores(scores, call, VARIANT)
    if (n < rows.whole_begin) | (n >= rows.whole_end):
        scores = hide(scores, n, block, rows.position, call, VARIANT)
    weights, rescale, row_max, row_sum = weigh(scores, factor, state)
    # redundant: long over, since these values are held. ptxas moves the wait for tensor cores above
    # the softmax where nothing stands between the two; a loop, which this is, it leaves in place.
    wait_full(streams.v.ring, step - 1)
    acc, _ = warpgroup_mma_wait(0, deps=(acc, operand))
    release(streams.v.ring, step - 1)
    # Behind the wait: words, which take the registers of those before, may not be written sooner.
    weights = carried(weights, operand.dtype, VARIANT)
    return Softmax(scale_rows(acc, rescale, VARIANT), row_max, row_sum), weights


@gluon.jit
def attend(
    block, rows, done, turn, streams, outputs, call, OWN: gl.constexpr, VARIANT: gl.constexpr
):
    """The softmax of a consumer's rows over all keys of a block."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    state = first_state(outputs.sinks_ptr, rows.head, rows.number, VARIANT)
    wait_full(streams.q.ring, turn * CONSUMERS + OWN)
    scores = begin_scores(streams, done, turn, OWN, VARIANT)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = scale_keys(scores, streams.k, done, VARIANT)
    release(streams.k.ring, done)
    scores, factor = scale_scores(scores, call, VARIANT)
    scores = hide_in_first(scores, block, rows.position, call, VARIANT)
    weights, _, row_max, row_sum = weigh(scores, factor, state)
    state = Softmax(state.acc, row_max, row_sum)
    weights = carried(weights, streams.v.ring.buffers.dtype, VARIANT)
    for n in range(1, block.tiles):
        state, weights = fold_tile(
            state, weights, n, done, turn, block, rows, streams, call, OWN, VARIANT
        )
    if VARIANT.own_out:
        release(streams.q.ring, turn * CONSUMERS + OWN)
    last = done + block.tiles - 1
    operand = rounded(weights, streams, last, VARIANT)
    acc = begin_sum(streams, last, operand, state.acc, VARIANT)
    acc, _ = warpgroup_mma_wait(0, deps=(acc, operand))
    release(streams.v.ring, last)
    return Softmax(acc, state.row_max, state.row_sum)


@gluon.jit
def store_rows(
    state, block, rows, turn, streams, outputs, call, OWN: gl.constexpr, VARIANT: gl.constexpr
):
    """Store a consumer's rows of the result and their logarithms, those of them that exist."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    result, lse = finish(state, VARIANT)
    if outputs.lse_ptr is not None:
        row = rows.position - block.position
        at = outputs.lse_ptr + block.batch.to(gl.int64) * outputs.stride_batch
        at += block.head.to(gl.int64) * outputs.stride_head
        gl.store(at + row.to(gl.int64) * outputs.stride_token, lse, mask=row < call.q_len)
    # The consumer's own: 0 is added, which compilers cannot tell. They compute the addresses of a
    # known place before the first block, and keep them in registers that the products need.
    own = OWN + (block.head >> 31)
    tma.store_wait(0)  # what left through the buffer before
    gl.thread_barrier()
    tile_of(streams.outs, own).store(result.to(streams.out_desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    at = [block.batch, block.head, rows.first, 0]
    tma.async_copy_shared_to_global(streams.out_desc, at, streams.outs.index(own))
    if not VARIANT.own_out:
        tma.store_wait(0)
        gl.thread_barrier()
        release(streams.q.ring, turn * CONSUMERS + OWN)


@gluon.jit
def consume(streams, outputs, call, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """The part of a consumer: 64 rows of each of the program's blocks."""
    rank = gl.program_id(0)
    turn, done = 0, 0
    while rank < call.blocks:
        block = block_of_rank(rank, call, VARIANT)
        first = block.first_row + OWN * ROWS
        row = first + gl.arange(0, ROWS, gl.SliceLayout(1, VARIANT.scores))
        newest = gl.minimum(first + ROWS, call.q_len) - 1 + block.position
        oldest = first + block.position
        whole_begin, whole_end = whole_tiles(oldest, newest, block, call, VARIANT)
        rows = Rows(first, block.head, row + block.position, whole_begin, whole_end, 0)
        state = attend(block, rows, done, turn, streams, outputs, call, OWN, VARIANT)
        store_rows(state, block, rows, turn, streams, outputs, call, OWN, VARIANT)
        done += block.tiles
        turn += 1
        rank = next_rank(rank, turn, gl.num_programs(0))
    tma.store_wait(0)
