"""Pairs of experts' tiles on Hopper: which a tile has, where their rows lie, how rows are written.

Entries of a block of PAIRS are pairs of one expert, and then padding, whose entries are the number
of pairs.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.hopper.gemm_tiles import ROWS, TOKENS

# Pairs of a tile, and threads of the producer, each of which arrives at a stage's barrier.
PAIRS, FILLERS = gl.constexpr(2 * TOKENS.value), gl.constexpr(128)
# A pair a thread, and rows as they are written to y: 16 bytes a thread.
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class Sorted(NamedTuple):
    """Pairs by expert: pointers to entries and to blocks' experts; how many tiles and pairs."""

    pairs: Any
    experts: Any
    num_tiles: Any
    num_pairs: Any


class Ids(NamedTuple):
    """The pairs' experts as they were given."""

    ids: Any
    stride_token: Any
    num_experts: Any


@gluon.jit
def pairs_of(of, block, first, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """SIZE entries of a block."""
    return gl.load(of.pairs + block.to(gl.int64) * PAIRS + first + gl.arange(0, SIZE, LAYOUT))


@gluon.jit
def begins(of, pairs, stride_token, stride_slot, TOP_K: gl.constexpr):
    """Where rows of pairs begin, [TOKENS, 1], and which of the entries are pairs."""
    pair = pairs.to(gl.int64)
    at = pair // TOP_K * stride_token + pair % TOP_K * stride_slot
    return at[:, None], (pairs < of.num_pairs)[:, None]


@gluon.jit
def expert_of(of, tile, tiles_n, PART: gl.constexpr):
    """A tile's expert, int64, and a consumer's first entry; of a tile past the last any."""
    block = gl.maximum(gl.minimum(tile, of.num_tiles - 1), 0) // tiles_n
    entry = gl.load(of.pairs + block.to(gl.int64) * PAIRS + PART * TOKENS)
    return gl.load(of.experts + block).to(gl.int64), entry


@gluon.jit
def store(result, sums, at, known, first_row):
    """Write sums [TOKENS, ROWS] to rows, 16 bytes a thread."""
    y = gl.convert_layout(sums.to(result.y.dtype.element_ty), STORED)
    n = (first_row + gl.arange(0, ROWS, gl.SliceLayout(0, STORED)))[None, :]
    gl.store(at + n, y, mask=known & (n < result.num_rows))


@gluon.jit
def _lost(ids, pair, num_pairs, TOP_K: gl.constexpr):
    """Which of some pairs, int64, have no expert."""
    named = ids.ids + pair // TOP_K * ids.stride_token + pair % TOP_K
    expert = gl.load(named, mask=pair < num_pairs, other=0)
    return (expert < 0) | (expert >= ids.num_experts)


@gluon.jit
def clear_lost(result, ids, num_pairs, TOP_K: gl.constexpr):
    """Fill y's rows of pairs without an expert with zeros, of this program's share of pairs."""
    SOME: gl.constexpr = 16  # rows at a time: what more take of registers would be spilled
    # Every warp has all of them, so that none asks another.
    each = gl.arange(0, PAIRS, gl.BlockedLayout([4], [32], [4], [0])).to(gl.int64)
    row = gl.arange(0, SOME, gl.SliceLayout(1, STORED)).to(gl.int64)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, STORED))[None, :]
    zeros = gl.zeros([SOME, ROWS], result.y.dtype.element_ty, STORED)
    for first in range(gl.program_id(0) * PAIRS, num_pairs, gl.num_programs(0) * PAIRS):
        if gl.max(_lost(ids, first + each, num_pairs, TOP_K).to(gl.int32), 0) > 0:
            for begin in range(first, first + PAIRS, SOME):
                pair = begin + row
                lost = _lost(ids, pair, num_pairs, TOP_K)[:, None]
                at = pair // TOP_K * result.stride_token + pair % TOP_K * result.stride_slot
                for n in range(0, result.num_rows, ROWS):
                    mask = lost & (n + column < result.num_rows)
                    gl.store((result.y + at)[:, None] + (n + column), zeros, mask=mask)
