"""Which tiles of a packed product a program takes.

All of a product's work is ``tiles`` x ``blocks``: tiles of W's rows by tokens, and blocks of 256
weights of K.

A program takes whole tiles, one in as many as there are programs. The last tokens may fill a half
of a tile or less, and take less time (``TILE.ragged``). Their tiles come last then, so that
programs begin with what takes longest.

Or the work is *streamed*: every SM reads as much of W as another, whatever the number of tiles is.
Each tile then has as many programs as another, which take equal parts of its K (``TILE.slices``),
where none of them has much more to do for it. Elsewhere the work is laid end to end, tile by tile,
and cut into as many equal parts as there are programs, wherever a cut may fall. How the sums of a
tile's programs are added up is said in :mod:`.packed_sums`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.quant import packed_config

WARPGROUPS = gl.constexpr(packed_config.WARPGROUPS)


class Sizes(NamedTuple):
    """A product's work: tiles, those of them that share rows of W, and blocks of K in each."""

    tiles: Any
    tiles_m: Any
    blocks: Any


class Corner(NamedTuple):
    """Where a tile begins: its number among tiles of rows, and its first token."""

    rows: Any
    token: Any


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
def contributors(sizes):
    """How many programs every tile has, where each has as many."""
    return gl.num_programs(0) // sizes.tiles


@gluon.jit
def share_of_program(sizes, TILE: gl.constexpr):
    """This program's :class:`Share`; of a streamed product there is a unit at least for each."""
    program, units = gl.program_id(0), sizes.tiles * sizes.blocks
    if TILE.slices > 1:
        each = contributors(sizes)
        tile, number = program // each, program % each
        first = tile * sizes.blocks
        begin = first + sizes.blocks * number // each
        end = first + sizes.blocks * (number + 1) // each
        share = Share(tile, gl.to_tensor(1), gl.to_tensor(1), begin, end)
    elif TILE.streamed:
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


@gluon.jit
def corner_of(tile, sizes, TILE: gl.constexpr):
    """The :class:`Corner` of a tile."""
    if TILE.ragged:
        tiles_m = sizes.tiles_m - 1
        full = sizes.tiles // sizes.tiles_m * tiles_m
        rows = gl.where(tile < full, tile // tiles_m, tile - full)
        number = gl.where(tile < full, tile % tiles_m, tiles_m)
    else:
        rows, number = tile // sizes.tiles_m, tile % sizes.tiles_m
    return Corner(rows, number * TILE.tokens)


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
