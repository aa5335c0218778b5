"""Who attends to what in paged decode: sequences cut into units of equal work, on the device.

A unit is a run of key tiles of one sequence and KV head. Every program of a launch knows all
lengths, so each works out the same plan for itself: the tiles of all sequences, shared among as
many programs as fill the GPU, give the most tiles of a unit, each sequence is cut into as few equal
units as that allows, and a running sum over sequences tells which unit is whose. One sequence of
65536 keys beside 63 of 1024 becomes many units, not one straggler.

The grid depends on shapes alone. A captured graph replays it with other lengths, and the programs
that find no unit end at once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.rows import cdiv

# More queries than any sequence has: no upper bound.
ANY = tl.constexpr(2**31 - 1)


class Sequences(NamedTuple):
    """The lengths of a batch, in device memory.

    Attributes:
        kv_lens_ptr: keys of each sequence, [num_seqs], used without cu_seqlens_q.
        pos_offsets_ptr: position of each sequence's first query, [num_seqs].
        cu_seqlens_q_ptr: where each sequence's queries begin, [num_seqs + 1], or None: all have
            as many.
        num_seqs: sequences of the batch.
        capacity: keys a block table can hold.
        num_tokens: queries of all sequences, used with cu_seqlens_q: none past them exist.
    """

    kv_lens_ptr: Any
    pos_offsets_ptr: Any
    cu_seqlens_q_ptr: Any
    num_seqs: Any
    capacity: Any
    num_tokens: Any


@triton.jit
def tokens_of(batch, seq, CACHE: tl.constexpr):
    """Where the tokens of sequences begin and end, among those that exist.

    Args:
        CACHE: as :func:`sequence_lengths` has it.
    """
    known = seq < batch.num_seqs
    starts = batch.cu_seqlens_q_ptr + seq
    first = tl.load(starts, mask=known, other=0, cache_modifier=CACHE)
    end = tl.load(starts + 1, mask=known, other=0, cache_modifier=CACHE)
    first = tl.minimum(tl.maximum(first, 0), batch.num_tokens).to(tl.int32)
    return first, tl.minimum(tl.maximum(end, 0), batch.num_tokens).to(tl.int32)


@triton.jit
def sequence_lengths(batch, seq, MAX_Q: tl.constexpr, CACHE: tl.constexpr):
    """Queries and visible keys of sequences, and whether they are this launch's to attend.

    With cu_seqlens_q, sequences differ in their queries, and those of more than MAX_Q are left out.

    Args:
        CACHE: the cache modifier of loads: ``".cg"`` where lengths are also read before the PDL
            wait, so that L1 does not keep what they were.
    """
    known = seq < batch.num_seqs
    if batch.cu_seqlens_q_ptr is None:
        queries = tl.zeros_like(seq) + MAX_Q
        keys = tl.load(batch.kv_lens_ptr + seq, mask=known, other=0, cache_modifier=CACHE)
    else:
        first, end = tokens_of(batch, seq, CACHE)
        queries = end - first
        keys = tl.load(batch.pos_offsets_ptr + seq, mask=known, other=0, cache_modifier=CACHE)
        keys += queries
        known = known & (queries > 0) & (queries <= MAX_Q)
    # Clamped before 64-bit lengths lose their upper half.
    keys = tl.minimum(tl.maximum(keys, 0), batch.capacity).to(tl.int32)
    return queries, keys, known


@triton.jit
def tile_range(queries, keys, sliding_window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile that some query of a sequence sees, and the one past the last."""
    first = tl.zeros_like(keys)
    if HAS_WINDOW:
        first = tl.maximum(keys - queries + 1 - sliding_window, 0) // BLOCK_N
    return first, tl.cdiv(keys, BLOCK_N)


@triton.jit
def units_of_sequences(
    batch,
    sliding_window,
    shares,  # units a head the tiles are shared among
    least_tiles,  # that are worth a cut
    MAX_Q: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIXED: tl.constexpr,  # units are of up to least_tiles whatever the batch
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,  # power of two >= num_seqs
    CACHE: tl.constexpr,  # see sequence_lengths
):
    """Units of each sequence [BLOCK_B], and where the next sequence's begin."""
    queries, keys, known = sequence_lengths(batch, tl.arange(0, BLOCK_B), MAX_Q, CACHE)
    first, end = tile_range(queries, keys, sliding_window, HAS_WINDOW, BLOCK_N)
    tiles = tl.where(known, end - first, 0)
    most = least_tiles
    if not FIXED:
        most = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), shares), least_tiles)
    # A sequence without keys has a unit too: somebody must write its zeros.
    units = tl.where(known, tl.maximum(tl.cdiv(tiles, most), 1), 0)
    return units, tl.cumsum(units, axis=0)


@triton.jit
def blocks_of_rows(
    batch,
    MAX_Q: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Blocks of BLOCK_M rows that the sequence of the most queries fills for a KV head.

    The grid has programs for as many as a sequence may have. Those that no sequence needs have the
    last numbers, and end when SMs fall idle anyway. If each unit had its own, every second program
    of 63 single queries would plan and end, where eight of 32 heads over 8 are allowed.
    """
    blocks = tl.full([], (MAX_Q * GROUP + BLOCK_M - 1) // BLOCK_M, tl.int32)
    if batch.cu_seqlens_q_ptr is not None and MAX_Q * GROUP > BLOCK_M:
        queries, _, known = sequence_lengths(batch, tl.arange(0, BLOCK_B), MAX_Q, CACHE)
        most = tl.max(tl.where(known, queries, 1), axis=0)
        blocks = tl.cdiv(most * GROUP, BLOCK_M)
    return blocks


class Unit(NamedTuple):
    """A unit of a plan.

    Attributes:
        seq: its sequence.
        part: its place among the sequence's units.
        parts: units of the sequence.
    """

    seq: Any
    part: Any
    parts: Any


@triton.jit
def unit_of(index, units, ends):
    """The unit ``index``, where there is one.

    Args:
        units, ends: the plan, of :func:`units_of_sequences`.
    """
    seq = tl.sum((ends <= index).to(tl.int32), axis=0)
    parts = _pick(units, seq)
    return Unit(seq, index - (_pick(ends, seq) - parts), parts)


@triton.jit
def unit_range(first, end, unit):
    """The tiles of a unit, of [first, end) of its sequence, which units cut evenly."""
    size = tl.cdiv(end - first, unit.parts)
    first += unit.part * size
    return first, tl.maximum(tl.minimum(end, first + size), first)


@triton.jit
def _pick(values, index):
    """values[index] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), axis=0)


def most_units(num_seqs: int, most_tiles: int, shares: int, least_tiles: int, fixed: bool) -> int:
    """How many units a head a plan can have, whatever the lengths: what a grid must cover."""
    cut = num_seqs * max(cdiv(most_tiles, least_tiles), 1)
    return cut if fixed else min(cut, num_seqs + shares)
