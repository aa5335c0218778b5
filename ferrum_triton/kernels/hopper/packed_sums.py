"""How the sums of a tile whose K was shared out among programs are added up.

Such a tile has several contributors, which are programs that follow each other. Each writes its
float32 sums to memory and counts the tile's ticket up. All are added in the order of the programs,
whoever does it, so that results do not differ from run to run, and tickets are left at zero.

Where a tile has programs of its own, *each adds a slice* of the tile's tokens, once all of them
have counted: all SMs read, instead of one for a tile. Q4_K 4096x14336 by 128 tokens takes 32.5 us
so, and 33.9 where one program adds all; 4096x4096 by 64 12.1 and 12.7, by 128 15.8 and 16.9; Q6_K
1024x4096 by 64 9.7 and 13.0 (``bench.timing.Replay`` of ``gemm_quant``, trees of d35f2e3 and of
what became 31a4fc3 in turns on one H200). A program keeps its sums of the slices that it adds in
registers: where a tile has four programs, a quarter less is written and read.

A program must not wait without limit. The one that it waits for may not have begun, because
programs that wait, of this launch or of another one, hold every SM. So a program asks MOST_POLLS
times at most, and then leaves its slices to the last one to count. It says so in the ticket:
additions to one number have an order, so that either the last one to count sees what was left, or
the one that leaves sees that all have counted. Bits 0 to 11 of a ticket count arrivals, bits 12 to
23 departures, and the rest are slices that were left. The last one to depart sets it to zero.

Elsewhere work is cut anywhere, and a program may have parts of two tiles. It does not wait for the
first of them, since it has the second to do, and *the last one to count adds* all of a tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.hopper.packed_work import WARPGROUPS, contributors, program_of

# How often a program asks whether all others have counted, a round trip to L2 each.
MOST_POLLS = gl.constexpr(64)
# Parts of a ticket; slices have the bits behind them.
_COUNT, _DEPARTURE, _LEFT = gl.constexpr(0xFFF), gl.constexpr(12), gl.constexpr(24)


@gluon.jit
def _slot(partial_ptr, program, begins, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """Where a program leaves its sums of the tile that it begins (1) or goes on with (0)."""
    PART: gl.constexpr = 64 * TILE.tokens
    number = (program * 2 + begins) * WARPGROUPS + WARPGROUP
    return partial_ptr + number.to(gl.int64) * PART


@gluon.jit
def in_thread_order(acc):
    """Sums in a line, of which a thread has four in a row and a warp one part after the other.

    Of a tile's rows a thread has r and r + 8 of a warp's 16, and of eight tokens 2 t and 2 t + 1.
    """
    TOKENS: gl.constexpr = acc.shape[1]
    x = acc.reshape([4, 2, 8, TOKENS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([64 * TOKENS])


@gluon.jit
def in_tile_order(line, TOKENS: gl.constexpr):
    """What :func:`in_thread_order` made a line of."""
    x = line.reshape([TOKENS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(x.reshape([64, TOKENS]), sums_layout(TOKENS), assert_trivial=True)


@gluon.constexpr_function
def _room(tile):
    """Registers of a thread for sums; it has 48 for other things."""
    return tile.registers - 48


@gluon.constexpr_function
def _held_of(num_tokens):
    """Registers that sums of ``num_tokens`` tokens take: a thread has a 128th of their line."""
    return 64 * num_tokens // 128


@gluon.constexpr_function
def at_once(tile, num_tokens):
    """Others' sums that are asked for before any is added: as many as registers hold."""
    return min(max(_room(tile) // _held_of(num_tokens) - 1, 1), 8)


@gluon.constexpr_function
def slices_at_once(tile):
    """Others' sums of a slice that are asked for before any is added."""
    return min(at_once(tile, tile.tokens // tile.slices), tile.slices)


@gluon.constexpr_function
def departs_early(tile):
    """Whether registers hold what others have stored of a slice while a program departs.

    They also hold its own sums of all slices, and what it adds up. In tiles of 256 tokens they do
    not: a thread that departs early then spills 720 bytes of them, and 176 otherwise, and Q4_K's
    4096x14336 by 256 tokens took 63.4 us for 53.5 (``cuobjdump`` of both for sm_90; ``python -m
    bench.run gemm_quant``, H200, d0f9635 and 5f7c1b1).
    """
    slice_held = _held_of(tile.tokens // tile.slices)
    return _held_of(tile.tokens) + (slices_at_once(tile) + 2) * slice_held <= _room(tile)


@gluon.jit
def _stored(
    first,
    count,
    left_out,
    partial_ptr,
    at,
    AT_ONCE: gl.constexpr,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
):
    """Sums that ``count`` programs from one on have stored, the first ``AT_ONCE`` of them.

    Args:
        left_out: a program whose sums are not read and are zeros here; -1 if there is none.
        at: where a program's sums of a tile that it goes on with are read, from their first on.
    """
    sums = ()
    for j in gl.static_range(AT_ONCE):
        more = _slot(partial_ptr, first + j, 0, WARPGROUP, TILE)
        is_read = (j < count) & (first + j != left_out)
        sums += (gl.load(more + at, is_read, 0.0, cache_modifier=".cg"),)
    return sums


class Slices(NamedTuple):
    """A tile's sums in memory, and this program's part in adding them.

    Attributes:
        begin: the first of the tile's programs.
        ticket: the tile's, of this warpgroup.
        taken: a bit for each slice that this program adds.
        own: a bit for each slice that this program adds unless it leaves it to another.
        line: this program's sums, in a line. Those of its own slices may not be in memory.
    """

    begin: Any
    ticket: Any
    taken: Any
    own: Any
    line: Any


@gluon.jit
def _own_slices(number, each, SLICES: gl.constexpr):
    """Every ``each``-th slice from one on, a bit for each; there are fewer than twice as many."""
    taken = number * 0
    for s in gl.static_range(SLICES):
        taken |= ((s == number) | (s == number + each)).to(gl.int32) << s
    return taken


@gluon.jit
def hand_on(
    acc, partial_ptr, tickets_ptr, part, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr
):
    """Store this program's sums of a tile, and wait for the others': the :class:`Slices`.

    Sums of its own slices are stored only if it leaves these slices to another.

    Args:
        acc: this program's sums, float32 [64, tokens].
        partial_ptr: float32 [programs, 2, warpgroups, 64 tokens].
        tickets_ptr: int32 [tiles, warpgroups], zeros.
        part: the program's :class:`~.packed_work.Segment`.
    """
    SLICES: gl.constexpr = TILE.slices
    PART: gl.constexpr = 64 * TILE.tokens // SLICES
    each = contributors(sizes)
    own = _own_slices(gl.program_id(0) % each, each, SLICES)
    line = in_thread_order(acc)
    at = gl.arange(0, 64 * TILE.tokens, line.type.layout)
    mine = _slot(partial_ptr, gl.program_id(0), 0, WARPGROUP, TILE)
    is_own = (own >> (at // PART)) & 1 != 0
    gl.store(mine + at, line, ~is_own)
    # All threads have stored before one of them says so.
    gl.thread_barrier()
    ticket = tickets_ptr + part.tile * WARPGROUPS + WARPGROUP
    before = gl.atomic_add(ticket, 1, sem="acq_rel")
    arrived = (before & _COUNT) + 1
    taken = own
    if arrived == each:
        taken |= (before >> _LEFT) & ((1 << SLICES) - 1)
    elif own != 0:
        polls = 0
        while (arrived < each) & (polls < MOST_POLLS):
            arrived = gl.atomic_add(ticket, 0, sem="acquire") & _COUNT
            polls += 1
        if arrived < each:
            gl.store(mine + at, line, is_own)
            gl.thread_barrier()
            arrived = gl.atomic_add(ticket, own << _LEFT, sem="acq_rel") & _COUNT
            if arrived < each:
                taken *= 0
    return Slices(part.tile * each, ticket, taken, own, line)


@gluon.jit
def _held(slices, s, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """This program's sums of a slice, in a line, from its registers."""
    PART: gl.constexpr = 64 * TILE.tokens // TILE.slices
    parts = slices.line.reshape([TILE.slices, PART])
    number = gl.arange(0, TILE.slices, gl.SliceLayout(1, parts.type.layout))
    line = gl.sum(gl.where((number == s)[:, None], parts, 0.0), axis=0)
    return gl.convert_layout(line, LAYOUT, assert_trivial=True)


@gluon.jit
def slice_sums(slices, s, partial_ptr, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """The sums of a slice, float32 [64, tokens / slices].

    The program departs while the sums of its first slice are on their way, where registers hold
    these (:func:`departs_early`). Departing is a round trip to L2 as well, and a program that
    departs behind its last slice ends later by it. Q6_K 1024x4096 by 64 tokens takes 9.0 us so and
    9.3 that way, Q4_K 4096x4096 by 128 14.7 and 15.0 (``bench.timing.Replay`` of ``gemm_quant``,
    H200, a copy of 3cf5b90 and 3cf5b90).
    """
    TOKENS: gl.constexpr = TILE.tokens // TILE.slices
    AT_ONCE: gl.constexpr = slices_at_once(TILE)
    each = contributors(sizes)
    line = in_thread_order(gl.zeros([64, TOKENS], gl.float32, sums_layout(TOKENS)))
    LAYOUT: gl.constexpr = line.type.layout
    held = _held(slices, s, LAYOUT, TILE)
    is_own = (slices.own >> s) & 1 != 0
    left_out = gl.where(is_own, gl.program_id(0), -1)
    at = s * (64 * TOKENS) + gl.arange(0, 64 * TOKENS, LAYOUT)
    for number in range(0, each, AT_ONCE):
        first = slices.begin + number
        sums = _stored(first, each - number, left_out, partial_ptr, at, AT_ONCE, WARPGROUP, TILE)
        if departs_early(TILE):
            if (number == 0) & (slices.taken & ((1 << s) - 1) == 0):
                depart(slices, sizes)
        for j in gl.static_range(AT_ONCE):
            line += gl.where(first + j == left_out, held, sums[j])
    return in_tile_order(line, TOKENS)


@gluon.jit
def depart(slices, sizes):
    """Say that this program reads its tile's ticket no more; the last one to do so clears it."""
    before = gl.atomic_add(slices.ticket, 1 << _DEPARTURE, sem="relaxed")
    if (before >> _DEPARTURE) & _COUNT == contributors(sizes) - 1:
        gl.atomic_xchg(slices.ticket, 0, sem="relaxed")


@gluon.jit
def summed(acc, partial_ptr, tickets_ptr, part, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """A tile's sums, and whether this program is the one to finish it.

    Args:
        acc: this program's sums, float32 [64, tokens].
        partial_ptr: float32 [programs, 2, warpgroups, 64 tokens].
        tickets_ptr: int32, one for each tile, zeros; each warpgroup has 16 bits of its own.
        part: the program's :class:`~.packed_work.Segment`.
    """
    UNIT: gl.constexpr = 1 << (16 * WARPGROUP)
    AT_ONCE: gl.constexpr = at_once(TILE, TILE.tokens)
    finishes = part.end - part.begin == sizes.blocks
    if not finishes:
        units = sizes.tiles * sizes.blocks
        first = program_of(part.tile * sizes.blocks, units)
        last = program_of(part.tile * sizes.blocks + sizes.blocks - 1, units)
        line = in_thread_order(acc)
        at = gl.arange(0, 64 * TILE.tokens, line.type.layout)
        mine = _slot(partial_ptr, gl.program_id(0), (part.begin == 0).to(gl.int32), WARPGROUP, TILE)
        gl.store(mine + at, line)
        # All threads have stored before one of them says so.
        gl.thread_barrier()
        ticket = tickets_ptr + part.tile
        before = gl.atomic_add(ticket, UNIT, sem="acq_rel")
        finishes = ((before >> (16 * WARPGROUP)) & 0xFFFF) == last - first
        if finishes:
            gl.atomic_add(ticket, (first - last - 1) * UNIT, sem="relaxed")
            line = gl.load(_slot(partial_ptr, first, 1, WARPGROUP, TILE) + at, cache_modifier=".cg")
            for program in range(first + 1, last + 1, AT_ONCE):
                count = last + 1 - program
                sums = _stored(program, count, -1, partial_ptr, at, AT_ONCE, WARPGROUP, TILE)
                for j in gl.static_range(AT_ONCE):
                    line += sums[j]
            acc = in_tile_order(line, TILE.tokens)
    return acc, finishes
