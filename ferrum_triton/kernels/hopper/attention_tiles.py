"""What a program of Hopper's attention takes in turn, what its rows see, and their softmax.

Tiles of keys are counted from the end of what a block of queries sees, backwards, and the first
ends exactly there. So nothing past it is ever read: no row of a cache that is not valid yet, or not
any more, gets near a product, also where only the device knows the lengths. The last tile may begin
before the first key; a tensor map reads zeros there, and the mask hides them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E, LOWEST, Softmax
from ferrum_triton.kernels.hopper.layouts import operand_layout, sums_layout

# Rows of a consumer: a warpgroup's product has 64.
ROWS = gl.constexpr(64)


@dataclass(frozen=True)
class Variant:
    """What the kernel specialises on.

    Attributes:
        consumers: warpgroups of 64 queries each.
        registers: of a consumer's thread.
        block_n: keys of a tile.
        stages: tiles of keys, and of values, in flight.
        block_d: columns of q and k a product takes at once, a power of two.
        block_e: those of the product for the other columns, or 0.
        block_v: columns of v and of the result, a power of two.
        own_out: results leave through buffers of their own; else through those of the queries,
            which then come in later.
        ahead: a block's queries come in while the block before is still at work.
        group: query heads per KV head.
        negate: the softmax scale is negative.
        newest: the queries are the newest of what only the device knows the length of.
        piece: keys of a page, or of a part of it, that lie together in a tile; 0 without pages.
        round_first: weights are rounded before the next scores begin: fewer registers, but the
            tensor cores wait for it.
        is_split: a block's keys are cut into parts, whose results are merged.
    """

    consumers: int
    registers: int
    block_n: int
    stages: int
    block_d: int
    block_e: int
    block_v: int
    own_out: bool
    group: int
    negate: bool
    is_causal: bool
    has_window: bool
    has_softcap: bool
    newest: bool
    piece: int = 0
    round_first: bool = False
    is_split: bool = False
    ahead: bool = False

    @property
    def query_stages(self) -> int:
        """Buffers of queries: for each consumer one, or two in turn."""
        return self.consumers * (2 if self.ahead else 1)

    @property
    def block_m(self) -> int:
        return self.consumers * ROWS.value

    @property
    def in_words(self) -> bool:
        """Weights go from tile to tile as words of two: three consumers lack registers for more."""
        return self.consumers == 3 and self.block_n > 64

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """How a warpgroup holds scores [64, block_n]."""
        return sums_layout(self.block_n)

    @property
    def result(self) -> gl.NVMMADistributedLayout:
        """How a warpgroup holds its result [64, block_v]."""
        return sums_layout(self.block_v)

    @property
    def weights(self) -> gl.DotOperandLayout:
        """How it holds weights of 16 bits that a product takes from registers."""
        return operand_layout(self.block_v)


class Call(NamedTuple):
    """What every warp of every program knows.

    Attributes:
        kv_lens_ptr: [batch] valid keys on the device, or None.
        blocks: of queries, of all heads of all sequences.
        blocks_at_once: those of the heads that run side by side.
        heads_at_once: these heads; divides the number of all.
        last_row: where a head's last block begins.
        num_heads: of a sequence.
        q_len: queries.
        kv_len: valid keys, or the capacity where the device knows the lengths.
        pos_offset: position of query 0, unless the queries are the newest.
        sliding_window: keys a query sees, with a window.
        scale_log2: factor of scores; with a cap, of what the cap takes.
        softcap_log2: cap times log2(e).
    """

    kv_lens_ptr: Any
    blocks: Any
    blocks_at_once: Any
    heads_at_once: Any
    last_row: Any
    num_heads: Any
    q_len: Any
    kv_len: Any
    pos_offset: Any
    sliding_window: Any
    scale_log2: Any
    softcap_log2: Any


class Block(NamedTuple):
    """A block of queries and the keys that it sees.

    Attributes:
        first_row: its first query.
        position: of query 0.
        end: one past the last key that a query of the block sees.
        tiles: of keys up to there, at least 1.
        edge: with pages, the first key of one that is not full, which lie at its end.
        shift: by as many places.
    """

    batch: Any
    head: Any
    first_row: Any
    position: Any
    end: Any
    tiles: Any
    edge: Any
    shift: Any


@gluon.jit
def next_rank(rank, turn, programs):
    """The rank of the block that this program takes in a turn after that of the one before.

    Every other turn goes through the programs backwards: the one that had the longest block of a
    turn has the shortest of the next.
    """
    return 2 * turn * programs - 1 - rank


@gluon.jit
def block_of_rank(rank, call, VARIANT: gl.constexpr):
    """A block by its rank.

    The last blocks see the most keys when causal: they come first, those of all heads (as many as
    have room in the cache) side by side, a KV head's own next to each other. Every other section of
    such heads comes backwards, so that a section begins with blocks as long as the last ones before
    it, and all programs have their share of long ones. The last section ends with the shortest.
    """
    section = rank // call.blocks_at_once
    inside = rank - section * call.blocks_at_once
    row = inside // call.heads_at_once * VARIANT.block_m
    first_row = call.last_row - row
    if VARIANT.is_causal:
        sections_after = (call.blocks - 1 - rank) // call.blocks_at_once
        first_row = gl.where(sections_after % 2 == 0, first_row, row)
    pair = section * call.heads_at_once + inside % call.heads_at_once
    batch = pair // call.num_heads

    kv_len = call.kv_len
    if call.kv_lens_ptr is not None:
        kv_len = gl.minimum(gl.maximum(gl.load(call.kv_lens_ptr + batch), 0), kv_len)
        kv_len = kv_len.to(gl.int32)
    position = call.pos_offset
    if VARIANT.newest:
        position = kv_len - call.q_len
    start, end = 0, kv_len
    if VARIANT.is_causal:
        newest = gl.minimum(first_row + VARIANT.block_m, call.q_len) - 1 + position
        end = gl.maximum(gl.minimum(kv_len, newest + 1), 0).to(gl.int32)
        if VARIANT.has_window:
            start = gl.maximum(first_row + position + 1 - call.sliding_window, 0).to(gl.int32)
    # A block that sees nothing takes a tile too, and hides all of it.
    tiles = gl.maximum(gl.cdiv(end - start, VARIANT.block_n), 1)
    head = pair - batch * call.num_heads
    return Block(batch, head, first_row, position, end, tiles, 0, 0)


@gluon.jit
def whole_tiles(oldest, newest, block, call, VARIANT: gl.constexpr):
    """The tiles [begin, end) behind the first that queries see whole, every one of them.

    Args:
        oldest: the first query's position.
        newest: the last one's.
    """
    begin, low = 1, 0
    if VARIANT.is_causal:
        begin = gl.maximum(gl.cdiv(block.end - 1 - oldest, VARIANT.block_n), 1)
        if VARIANT.has_window:
            low = gl.maximum(newest + 1 - call.sliding_window, 0)
    begin = gl.minimum(begin, block.tiles)
    end = gl.minimum((block.end - low) // VARIANT.block_n, block.tiles)
    return begin.to(gl.int32), gl.maximum(end, begin).to(gl.int32)


@gluon.jit
def hide(scores, n, block, position, call, VARIANT: gl.constexpr):
    """-inf where a row at a position does not see a key of tile n of a block."""
    first_key = block.end - (n + 1) * VARIANT.block_n
    visible = is_seen(first_key, 0, position, call, VARIANT)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def hide_in_first(scores, block, position, call, VARIANT: gl.constexpr):
    """The same of a block's first tile, which alone may hold a page that is not full."""
    if VARIANT.piece == 0:
        return hide(scores, 0, block, position, call, VARIANT)
    first_key = block.end - VARIANT.block_n
    eights, first = keys_by_eights(first_key, VARIANT)
    visible = is_seen(first_key, 0, position, call, VARIANT) & (eights < block.edge - first)
    shifted = is_seen(first_key - block.shift, block.edge, position, call, VARIANT)
    return gl.where(visible | shifted, scores, float("-inf"))


@gluon.jit
def is_seen(first_key, least, position, call, VARIANT: gl.constexpr):
    """Whether rows see the keys of a tile from ``first_key`` on, of those from ``least`` on."""
    eights, first = keys_by_eights(first_key, VARIANT)
    visible = eights >= least - first
    if VARIANT.is_causal:
        visible = visible & (eights <= position[:, None] - first)
        if VARIANT.has_window:
            visible = visible & (eights > (position - call.sliding_window)[:, None] - first)
    return visible


@gluon.jit
def keys_by_eights(first_key, VARIANT: gl.constexpr):
    """A tile's keys as sums of two parts, [1, keys] each.

    A thread holds pairs of columns eight apart. Compared by eights, which are constants, with
    bounds that only its place among its eights changes, they take no registers: 32 columns, kept
    through the loop, would push what the products need to memory.
    """
    column = gl.arange(0, VARIANT.block_n, gl.SliceLayout(0, VARIANT.scores))
    return (column & (VARIANT.block_n - 8))[None, :], (first_key + (column & 7))[None, :]


@gluon.jit
def first_state(sinks_ptr, head, number, VARIANT: gl.constexpr):
    """The softmax before any key: of nothing, or of the sink of the head, or of the rows' heads.

    Of a block's parts the first one has the sink. Of a row's sum each of four threads has a part.
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, VARIANT.scores)
    row_max = gl.full([ROWS], LOWEST, gl.float32, row_layout)
    nothing = gl.full([ROWS, VARIANT.block_n], 0.0, gl.float32, VARIANT.scores)
    row_sum = sums_of_threads(nothing)
    if sinks_ptr is not None:
        sink_log2 = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        if VARIANT.is_split:
            sink_log2 = gl.where(number == 0, sink_log2, float("-inf"))
        row_max = gl.maximum(row_max, sink_log2)
        quarter = gl.full([ROWS], 0.25, gl.float32, row_layout)
        quarter = gl.where(sink_log2 == float("-inf"), 0.0, quarter)
        row_sum += for_threads(quarter, row_sum)
    acc = gl.full([ROWS, VARIANT.block_v], 0.0, gl.float32, VARIANT.result)
    return Softmax(acc, row_max, row_sum)


@gluon.jit
def scale_scores(scores, call, VARIANT: gl.constexpr):
    """Scores of the right sign, capped, and the factor > 0 that is left for the softmax."""
    if VARIANT.negate:
        scores = -scores
    factor = call.scale_log2
    if VARIANT.has_softcap:
        # cap · tanh(x), where the product is 2 · log2(e) · x: overflows nowhere.
        tanh = 2.0 / (1.0 + gl.exp2(-scores * call.scale_log2)) - 1.0
        scores = call.softcap_log2 * tanh
        factor = 1.0
    return scores, factor


@gluon.jit
def sums_of_threads(weights):
    """The sums of a row's weights that each of the four threads has that hold it: [rows, 4].

    They are added up once, when all keys are seen. By sums of all threads at each tile, 2,048
    queries of four sequences of 32 heads over 8 of 128 took 229.9 us for 226.8, and 8,192 of four
    of 16 heads of 64 1,194 for 1,160 (``bench.timing.device_us`` of ``flash_attention``, H200,
    means of two in turns, a copy of a71f97f).
    """
    parts = weights.reshape([ROWS, weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def for_threads(x, row_sum):
    """A number of each row, as factor or summand of :func:`sums_of_threads`."""
    layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    return gl.convert_layout(x, layout, assert_trivial=True)[:, None]


@gluon.jit
def weigh(scores, factor, state):
    """A tile's weights, the factor of what was summed before, and the new maximum and sums.

    A hidden score is -inf, and the maximum never is, so that no guard against NaN is needed: see
    :mod:`ferrum_triton.kernels.attention.softmax`, which the arithmetic is of.
    """
    row_max = gl.maximum(state.row_max, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - row_max[:, None])
    rescale = gl.exp2(state.row_max - row_max)
    row_sum = state.row_sum * for_threads(rescale, state.row_sum) + sums_of_threads(weights)
    return weights, rescale, row_max, row_sum


@gluon.jit
def finish(state, VARIANT: gl.constexpr):
    """(result, natural log of the sum of exp): 0 and -inf without keys."""
    layout: gl.constexpr = gl.SliceLayout(1, VARIANT.scores)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), layout, assert_trivial=True)
    empty = row_sum == 0.0
    total = gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, float("-inf"), (state.row_max + gl.log2(total)) * LN_2)
    return scale_rows(state.acc, 1.0 / total, VARIANT), lse


@gluon.jit
def scale_rows(acc, factor, VARIANT: gl.constexpr):
    """A result times a factor for each row, which the same threads hold."""
    layout: gl.constexpr = gl.SliceLayout(1, VARIANT.result)
    return acc * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]
