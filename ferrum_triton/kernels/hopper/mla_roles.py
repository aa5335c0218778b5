"""The roles of Hopper's latent attention: two warpgroups that weigh every other tile of keys each.

A program has 64 heads of one query. Their result, [64, latents] in float32, has no room in one
warpgroup's registers, so each has half of its columns. A tile of 64 keys, [latents | rope], comes
in three parts: the left and the right half of the latents, and the rope. Consumer 0 makes scores
and weights of the even tiles, consumer 1 of the odd ones, and each adds the values of every tile to
its half of the columns:

    consumer 0    scores 0 | softmax 0 | values 0      | values 1      | scores 2 | ...
    consumer 1               scores 1, values 0  | softmax 1 | values 1      | ...

So tensor cores have the work of one consumer while the other one's threads compute a softmax.

Weights go from one consumer to the other through shared memory, in the place of the tile's rope,
which has as many bytes and is done with once the scores are there. With them goes the maximum so
far, which the other one's results are then brought to. So a maximum follows from the tile before,
in the order of the keys, and results repeat bit for bit.

The left half of a tile is consumer 0's to let go of, and the right half consumer 1's: whoever made
the scores read both before it handed on the weights. Each half is let go of right behind the
product with its values. Where a call waits for memory, what counts is that copies never stop, and
there is room for two tiles.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferrum_triton.kernels.attention.softmax import LN_2, LOWEST, Softmax
from ferrum_triton.kernels.hopper.attention_roles import ask, tile_of
from ferrum_triton.kernels.hopper.attention_tiles import ROWS, keys_by_eights, scale_rows
from ferrum_triton.kernels.hopper.layouts import operand_layout, sums_layout
from ferrum_triton.kernels.hopper.rings import release, wait_full

# Keys of a tile, columns of its rope, and tiles there is room for. A tile's weights take the place
# of its rope, so these are one size.
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)


@dataclass(frozen=True)
class LatentVariant:
    """What the kernel specialises on.

    Attributes:
        half: columns of half of the latents.
        block_size: rows of a block of the cache, 0 of a contiguous one.
        min_keys: keys of a split, at least.
        negate: the softmax scale is negative.
        registers: registers that a consumer's thread has.
        scores_first: what consumer 1 begins first, see :func:`fold_odd`.
    """

    half: int
    block_size: int
    min_keys: int
    negate: bool
    registers: int
    scores_first: bool

    @property
    def block_n(self) -> int:
        return KEYS.value

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """How a warpgroup holds scores [64, keys]."""
        return sums_layout(KEYS.value)

    @property
    def result(self) -> gl.NVMMADistributedLayout:
        """How a warpgroup holds its half of the result."""
        return sums_layout(self.half)

    @property
    def weights(self) -> gl.DotOperandLayout:
        """How it holds weights of 16 bits that a product takes from registers."""
        return operand_layout(self.half)


class Room(NamedTuple):
    """What a program has in shared memory.

    Attributes:
        q_left, q_right, q_rope: the parts of the queries, one buffer each.
        left, right, rope: the parts of the tiles.
        weighed: a ring of barriers without buffers: a tile's weights and maximum are there.
        maxima: [stages, 64].
        summed: barriers, one for each consumer's sums of weights.
        sums: these, [2, 64].
    """

    q_left: Any
    q_right: Any
    q_rope: Any
    left: Any
    right: Any
    rope: Any
    weighed: Any
    maxima: Any
    summed: Any
    sums: Any


class Work(NamedTuple):
    """A program's keys of a sequence, and what becomes of them.

    Attributes:
        start, end: the keys [start, end), all of which every row sees.
        tiles: number of tiles of keys, which may be 0.
        sequence: the sequence's index, which names its block in a contiguous cache.
        table_ptr: its block table, or None.
        num_blocks: number of blocks in the cache.
        query, head: the query of all rows, and the first row's head.
        factor: positive number that scores are multiplied by.
        out_ptr: the first row's result.
        lse_ptr: the logarithm of its sum, or None.
        stride_out, stride_lse: elements from a head's result or logarithm to the next one's.
        writes: whether the result is asked for: not that of a split without keys.
    """

    start: Any
    end: Any
    tiles: Any
    sequence: Any
    table_ptr: Any
    num_blocks: Any
    query: Any
    head: Any
    factor: Any
    out_ptr: Any
    lse_ptr: Any
    stride_out: Any
    stride_lse: Any
    writes: Any


@gluon.jit
def block_of(n, work, VARIANT: gl.constexpr):
    """The block of the cache that holds tile n: one past the last where the table names none."""
    block = work.sequence
    if work.table_ptr is not None:
        entry = gl.load(work.table_ptr + (work.start + n * KEYS) // VARIANT.block_size)
        known = (entry >= 0) & (entry < work.num_blocks)
        block = gl.where(known, entry, work.num_blocks).to(gl.int32)
    return block


@gluon.jit
def produce(room, work, VARIANT: gl.constexpr):
    """Ask for the queries, and for tiles as far ahead as there is room.

    The last tile ends with the last key: no row past it, which may hold NaN, is read. In front of
    it are keys of the tile before, which are hidden, or rows before the block's first, which read
    as zeros. So do those of no block.
    """
    if work.tiles > 0:
        ask(room.q_left, 0, work.sequence, work.query, work.head)
        ask(room.q_rope, 0, work.sequence, work.query, work.head)
        ask(room.q_right, 0, work.sequence, work.query, work.head)
    for n in range(work.tiles):
        block = block_of(n, work, VARIANT)
        first = work.start + n * KEYS
        row = gl.minimum(first, work.end - KEYS)
        if VARIANT.block_size > 0:
            row += first % VARIANT.block_size - first
        ask(room.left, n, block, 0, row)
        ask(room.rope, n, block, 0, row)
        ask(room.right, n, block, 0, row)


@gluon.jit
def add_scores(scores, q, k, n, USE_ACC: gl.constexpr):
    """Begin to add the products of a part of the queries with that of tile n."""
    wait_full(k.ring, n)
    keys = tile_of(k.ring.buffers, n % STAGES)
    queries = tile_of(q.ring.buffers, n >> 31)  # 0, which compilers cannot tell: see consume
    return warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def begin_scores(room, n, VARIANT: gl.constexpr):
    """Begin the scores of tile n, without the right half of the latents."""
    scores = gl.full([ROWS, KEYS], 0.0, gl.float32, VARIANT.scores)
    scores = add_scores(scores, room.q_left, room.left, n, False)
    return add_scores(scores, room.q_rope, room.rope, n, True)


@gluon.jit
def weigh(scores, block, n, row_max, work, VARIANT: gl.constexpr):
    """Weights of tile n, which lies in a block; what earlier sums become; the new maximum."""
    if VARIANT.negate:
        scores = -scores
    # Keys in front of the tile's own, or all of them.
    hidden = gl.maximum(work.start + (n + 1) * KEYS - work.end, 0)
    if work.table_ptr is not None:
        hidden = gl.where(block < work.num_blocks, hidden, KEYS)
    if hidden > 0:
        eights, first = keys_by_eights(0, VARIANT)
        scores = gl.where(eights >= hidden - first, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * work.factor)
    weights = gl.exp2(scores * work.factor - new_max[:, None])
    return weights, gl.exp2(row_max - new_max), new_max


@gluon.jit
def hand_on(weights, row_max, n, room):
    """Give the other consumer the weights of tile n, in the place of its rope, and the maximum."""
    stage = n % STAGES
    # No warp may write over the rope while another one's scores are still being made of it.
    gl.thread_barrier()  # redundant: to the emulator, which has no threads within a partition
    tile_of(room.rope.ring.buffers, stage).store(weights.to(room.rope.desc.dtype))
    room.maxima.index(stage).store(row_max)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(room.weighed.full.index(stage), count=1)


@gluon.jit
def add_own(state, weights, rescale, row_max, n, values, VARIANT: gl.constexpr):
    """Add the consumer's half of the values of tile n, by weights that its threads hold."""
    acc = scale_rows(state.acc, rescale, VARIANT)
    operand = weights.to(values.desc.dtype)
    operand = gl.convert_layout(operand, VARIANT.weights, assert_trivial=True)
    acc = warpgroup_mma(operand, tile_of(values.ring.buffers, n % STAGES), acc, is_async=True)
    row_sum = state.row_sum * rescale + gl.sum(weights, 1)
    acc, _ = warpgroup_mma_wait(0, deps=(acc, operand))
    release(values.ring, n)
    return Softmax(acc, row_max, row_sum)


@gluon.jit
def begin_others(state, n, values, room, VARIANT: gl.constexpr):
    """Begin to add the values of tile n, which the other consumer weighed."""
    wait_full(room.weighed, n)
    row_max = room.maxima.index(n % STAGES).load(gl.SliceLayout(1, VARIANT.scores))
    rescale = gl.exp2(state.row_max - row_max)
    acc = scale_rows(state.acc, rescale, VARIANT)
    weights = tile_of(room.rope.ring.buffers, n % STAGES)
    acc = warpgroup_mma(weights, tile_of(values.ring.buffers, n % STAGES), acc, is_async=True)
    return acc, row_max, state.row_sum * rescale


@gluon.jit
def add_others(state, n, values, room, VARIANT: gl.constexpr):
    """Add the values of tile n, which the other consumer weighed."""
    acc, row_max, row_sum = begin_others(state, n, values, room, VARIANT)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(values.ring, n)
    release(room.rope.ring, n)
    return Softmax(acc, row_max, row_sum)


@gluon.jit
def fold_even(state, n, room, work, VARIANT: gl.constexpr):
    """Consumer 0's part in tile n, which it weighs."""
    block = block_of(n, work, VARIANT)
    scores = begin_scores(room, n, VARIANT)
    scores = add_scores(scores, room.q_right, room.right, n, True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    weights, rescale, row_max = weigh(scores, block, n, state.row_max, work, VARIANT)
    hand_on(weights, row_max, n, room)
    return add_own(state, weights, rescale, row_max, n, room.left, VARIANT)


@gluon.jit
def fold_odd(state, n, room, work, VARIANT: gl.constexpr):
    """Consumer 1's part in tile n, which it weighs, and in tile n - 1.

    Either all scores come first, and the softmax runs beside the product with the values of tile
    n - 1. Or that product does not wait for the last part of tile n to arrive, and what is let go
    of behind it is sooner asked for anew.
    """
    block = block_of(n, work, VARIANT)
    scores = begin_scores(room, n, VARIANT)
    if VARIANT.scores_first:
        scores = add_scores(scores, room.q_right, room.right, n, True)
    # ptxas would wait here itself: it lets threads touch no results while products are in flight.
    scores = warpgroup_mma_wait(0, deps=(scores,))
    acc, row_max, row_sum = begin_others(state, n - 1, room.right, room, VARIANT)
    if not VARIANT.scores_first:
        scores = add_scores(scores, room.q_right, room.right, n, True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(room.right.ring, n - 1)
        release(room.rope.ring, n - 1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    weights, rescale, row_max = weigh(scores, block, n, row_max, work, VARIANT)
    hand_on(weights, row_max, n, room)
    if VARIANT.scores_first:
        # redundant: long over, since these weights are held. ptxas moves the wait for tensor cores
        # above the softmax where nothing stands between; a loop, which this is, it leaves in place.
        wait_full(room.weighed, n - 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(room.right.ring, n - 1)
        release(room.rope.ring, n - 1)
    state = Softmax(acc, row_max, row_sum)
    return add_own(state, weights, rescale, row_max, n, room.right, VARIANT)


@gluon.jit
def consume(room, work, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """The part of a consumer: half of the columns of all rows, and every other tile's weights."""
    row_layout: gl.constexpr = gl.SliceLayout(1, VARIANT.scores)
    state = Softmax(
        gl.full([ROWS, VARIANT.half], 0.0, gl.float32, VARIANT.result),
        gl.full([ROWS], LOWEST, gl.float32, row_layout),
        gl.full([ROWS], 0.0, gl.float32, row_layout),
    )
    wait_full(room.q_left.ring, 0, work.tiles > 0)
    wait_full(room.q_rope.ring, 0, work.tiles > 0)
    wait_full(room.q_right.ring, 0, work.tiles > 0)
    # 0 is added, which compilers cannot tell. Of stages that are known they compute all addresses
    # before the loop, and keep them in registers that the products need.
    nothing = work.num_blocks >> 31
    for n in range(1 + nothing, work.tiles, STAGES):
        if OWN == 0:
            state = fold_even(state, n - 1, room, work, VARIANT)
            state = add_others(state, n, room.left, room, VARIANT)
        else:
            state = fold_odd(state, n, room, work, VARIANT)
    if work.tiles % STAGES == 1:
        if OWN == 0:
            state = fold_even(state, work.tiles - 1, room, work, VARIANT)
        else:
            state = add_others(state, work.tiles - 1, room.right, room, VARIANT)
    store_rows(state, room, work, OWN, VARIANT)


@gluon.jit
def store_rows(state, room, work, OWN: gl.constexpr, VARIANT: gl.constexpr):
    """Store a consumer's columns of the result; consumer 0 the logarithms of the sums as well."""
    room.sums.index(OWN).store(state.row_sum)
    # One thread arrives for all, once they have stored.
    gl.thread_barrier()  # redundant: to the emulator, which has no threads within a partition
    mbarrier.arrive(room.summed.index(OWN), count=1)
    mbarrier.wait(room.summed.index(1 - OWN), 0)
    row_layout: gl.constexpr = gl.SliceLayout(1, VARIANT.scores)
    row_sum = state.row_sum + room.sums.index(1 - OWN).load(row_layout)
    empty = row_sum == 0.0
    total = gl.where(empty, 1.0, row_sum)
    if OWN == 0 and work.lse_ptr is not None:
        lse = gl.where(empty, float("-inf"), (state.row_max + gl.log2(total)) * LN_2)
        row = gl.arange(0, ROWS, row_layout).to(gl.int64)
        gl.store(work.lse_ptr + row * work.stride_lse, lse)
    if work.writes:
        result = scale_rows(state.acc, 1.0 / total, VARIANT)
        head = gl.arange(0, ROWS, gl.SliceLayout(1, VARIANT.result)).to(gl.int64)
        column = gl.arange(0, VARIANT.half, gl.SliceLayout(0, VARIANT.result))
        at = work.out_ptr + (head * work.stride_out)[:, None]
        at += OWN * VARIANT.half + column[None, :]
        gl.store(at, result.to(work.out_ptr.dtype.element_ty))
