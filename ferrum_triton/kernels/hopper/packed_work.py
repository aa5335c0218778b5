"""Which tiles of a packed product a program takes, and how sums that were shared out are added up.

All of a product's work is ``tiles`` x ``blocks``: tiles of W's rows by tokens, and blocks of 256
weights of K. Either a program takes whole tiles, every so many of them. Or the work is *streamed*:
laid end to end, tile by tile, and cut into as many equal parts as there are programs, wherever a
cut may fall. Then every SM reads as much of W as another, whatever the number of tiles is.

A tile that was cut has several contributors, which are programs that follow each other. Each writes
its float32 sums to memory and counts a ticket up; the one that counts last adds all of them in the
order of the programs, whichever it is, so that results do not differ from run to run. It leaves the
ticket at zero.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.quant import packed_config

WARPGROUPS = gl.constexpr(packed_config.WARPGROUPS)


class Sizes(NamedTuple):
    """A product's work: tiles, those of them that share rows of W, and blocks of K in each."""

    tiles: Any
    tiles_m: Any
    blocks: Any


class Share(NamedTuple):
    """A program's work: its tiles, and the part of all tiles' blocks that they are taken from."""

    first: Any
    count: Any
    apart: Any
    begin: Any
    end: Any


class Segment(NamedTuple):
    """A program's part of one tile: blocks ``begin`` up to ``end`` of it."""

    tile: Any
    begin: Any
    end: Any


@gluon.jit
def part_begin(program, units):
    """The first of the units of work that a program takes of all."""
    programs = gl.num_programs(0)
    return units // programs * program + gl.minimum(program, units % programs)


@gluon.jit
def program_of(unit, units):
    """The program whose part a unit of work is in."""
    programs = gl.num_programs(0)
    each, longer = units // programs, units % programs
    in_longer = unit // (each + 1)
    return gl.where(in_longer < longer, in_longer, longer + (unit - longer * (each + 1)) // each)


@gluon.jit
def share_of_program(sizes, STREAMED: gl.constexpr):
    """This program's :class:`Share`; of a streamed product there is a unit at least for each."""
    program, units = gl.program_id(0), sizes.tiles * sizes.blocks
    if STREAMED:
        begin, end = part_begin(program, units), part_begin(program + 1, units)
        first = begin // sizes.blocks
        share = Share(first, (end - 1) // sizes.blocks - first + 1, gl.to_tensor(1), begin, end)
    else:
        apart = gl.num_programs(0)
        count = (sizes.tiles - program + apart - 1) // apart
        share = Share(program, count, apart, gl.to_tensor(0), units)
    return share


@gluon.jit
def segment(share, i, sizes):
    """The ``i``-th tile of a program."""
    tile = share.first + i * share.apart
    begin = gl.maximum(share.begin - tile * sizes.blocks, 0)
    return Segment(tile, begin, gl.minimum(share.end - tile * sizes.blocks, sizes.blocks))


class Place(NamedTuple):
    """The rows of a tile: their matrix, the first of them in it, and where its products start."""

    matrix: Any
    row: Any
    num_rows: Any
    column: Any


@gluon.jit
def place_of(tile, num_rows, TILE: gl.constexpr):
    """The :class:`Place` of a tile of rows, of gate and up or of three matrices side by side.

    Args:
        num_rows: of each of three matrices, 0 of one that there is not.
    """
    EACH: gl.constexpr = WARPGROUPS * (32 if TILE.activation != "" else 64)
    first, second, third = num_rows
    place = Place(tile * 0, tile * EACH, first, tile * 0)
    if TILE.activation == "":
        before = gl.cdiv(first, EACH)
        if tile >= before:
            place = Place(tile * 0 + 1, (tile - before) * EACH, second, first)
            before += gl.cdiv(second, EACH)
            if tile >= before:
                place = Place(tile * 0 + 2, (tile - before) * EACH, third, first + second)
    return place


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
def in_tile_order(line, TILE: gl.constexpr):
    """What :func:`in_thread_order` made a line of."""
    TOKENS: gl.constexpr = TILE.tokens
    x = line.reshape([TOKENS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(x.reshape([64, TOKENS]), sums_layout(TOKENS), assert_trivial=True)


@gluon.constexpr_function
def at_once(tile):
    """Others' sums that are asked for before any is added: as many as registers hold.

    A thread has a 128th of each line, and 48 registers for other things.
    """
    line = 64 * tile.tokens // 128
    return min(max((tile.registers - 48) // line - 1, 1), 8)


@gluon.jit
def summed(acc, partial_ptr, tickets_ptr, part, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """A tile's sums, and whether this program is the one to finish it.

    Args:
        acc: this program's sums, float32 [64, tokens].
        partial_ptr: float32 [programs, 2, warpgroups, 64 tokens].
        tickets_ptr: int32, one for each tile, zeros; each warpgroup has 16 bits of its own.
        part: the program's :class:`Segment`.
    """
    UNIT: gl.constexpr = 1 << (16 * WARPGROUP)
    AT_ONCE: gl.constexpr = at_once(TILE)
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
                others = ()
                for j in gl.static_range(AT_ONCE):
                    more = _slot(partial_ptr, program + j, 0, WARPGROUP, TILE)
                    there = program + j <= last
                    others += (gl.load(more + at, there, 0.0, cache_modifier=".cg"),)
                for j in gl.static_range(AT_ONCE):
                    line += others[j]
            acc = in_tile_order(line, TILE)
    return acc, finishes
