"""The two warps of a packed product that ask for what others multiply: weights, and activations.

Weights are asked for before the kernel that arranges the activations has ended (PDL). TMA works
through its requests in order, so weights that are asked for too soon keep the first activations
waiting. A program that begins while activations are arranged asks for up to three stages, and
leaves one free; these land in time. A program that begins later asks for one stage. Both ask for
all further weights behind the first block's activations.

Tokens past the last one are zeros by the tensor map, and so are rows past a matrix's last one.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ferrum_triton.kernels.hopper.packed_weights import D_WORDS, columns_of, word_of_d
from ferrum_triton.kernels.hopper.packed_work import (
    WARPGROUPS,
    corner_of,
    place_of,
    segment,
    share_of_program,
)
from ferrum_triton.kernels.hopper.rings import acquire
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait

# Stages that a program asks for ahead of the activations, at most.
MOST_AHEAD = 3


class TokenMaps(NamedTuple):
    """Tensor maps of activations, and of their sums over groups or None."""

    x: Any
    sums: Any


class Source(NamedTuple):
    """Where a tile's rows begin: in which matrix, of maps that have several; and the first row."""

    matrix: Any
    row: Any


@gluon.jit
def copy_rows(desc, source, column, full, buffers, first, APART: gl.constexpr):
    """Ask for the tiles of a plane, one for each warpgroup.

    Args:
        source: :class:`Source`.
        first: buffer of the first of them.
        APART: buffers from one to the next.
    """
    if desc is not None:
        RANK: gl.constexpr = len(desc.block_type.shape)
        ROWS: gl.constexpr = desc.block_type.shape[RANK - 2]
        for w in gl.static_range(WARPGROUPS):
            to, row = buffers.index(first + w * APART), source.row + w * ROWS
            if RANK == 3:
                at = [source.matrix, row, column]
            else:
                at = [row, column]
            tma.async_copy_global_to_shared(desc, at, full, to)


@gluon.jit
def copy_block(planes, source, block, full, to, first, APART: gl.constexpr, TILE: gl.constexpr):
    """Ask for a block of K of a matrix's rows, every plane of it.

    TMA reads from multiples of 16 bytes, so that d of a whole block comes with its neighbours'.
    Copying the scales of four blocks at once, to a ring of their own, is slower. With it Q4_K by 64
    tokens takes 25.8 us for 4096x14336 and 41.2 for 28672x4096, without it 24.7 and 40.0
    (``bench.timing.Replay`` of ``gemm_quant``, H200, 186cdb5 with and without that change).

    Args:
        source: :class:`Source`.
    """
    FORMAT: gl.constexpr = TILE.format
    Q: gl.constexpr = columns_of("q", FORMAT)
    H: gl.constexpr = columns_of("h", FORMAT)
    S: gl.constexpr = columns_of("s", FORMAT)
    D: gl.constexpr = columns_of("d", FORMAT)
    if FORMAT.scale_code != "":
        d_column = word_of_d(block, TILE) // D_WORDS * D_WORDS
    else:
        d_column = block * D
    copy_rows(planes.q, source, block * Q, full, to.q, first, APART)
    copy_rows(planes.h, source, block * H, full, to.h, first, APART)
    copy_rows(planes.s, source, block * S, full, to.s, first, APART)
    copy_rows(planes.d, source, d_column, full, to.d, first, APART)


@gluon.jit
def copy_stage(matrices, source, block, full, to, stage, TILE: gl.constexpr):
    """Ask for a stage: a block of the first matrix, or of gate and up, theirs in turn."""
    if TILE.activation != "":
        first = stage * (2 * WARPGROUPS)
        copy_block(matrices[0], source, block, full, to, first, 2, TILE)
        copy_block(matrices[1], source, block, full, to, first + 1, 2, TILE)
    else:
        copy_block(matrices[0], source, block, full, to, stage * WARPGROUPS, 1, TILE)


@gluon.jit
def copy_tokens(maps, row, k, ring, step, TILE: gl.constexpr):
    """Ask for the k-th stage of steps of K of a tile of tokens, from a row on.

    Args:
        maps: :class:`TokenMaps`.
    """
    STEPS: gl.constexpr = TILE.x_steps
    SUMS: gl.constexpr = TILE.sums_bytes if TILE.joined else 0
    BYTES: gl.constexpr = TILE.x_steps * maps.x.block_type.nbytes + SUMS
    stage = acquire(ring, step, BYTES)
    full = ring.full.index(stage)
    for j in gl.static_range(STEPS):
        to = ring.buffers.index(stage * STEPS + j)
        tma.async_copy_global_to_shared(maps.x, [row, (k * STEPS + j) * 64], full, to)
    if SUMS > 0:
        tma.async_copy_global_to_shared(maps.sums, [row, k * 16], full, ring.sums.index(stage))


@gluon.jit
def copy_sums(maps, row, k, x, w, step, TILE: gl.constexpr):
    """Ask for the sums of the k-th block, which come with a stage of weights."""
    BYTES: gl.constexpr = TILE.sums_bytes
    stage = acquire(w, step, BYTES)
    to = x.sums.index(stage)
    tma.async_copy_global_to_shared(maps.sums, [row, k * 16], w.full.index(stage), to)


@gluon.constexpr_function
def stages_ahead(tile):
    """Stages that a program which begins early asks for ahead of the activations."""
    return min(tile.stages - 1, MOST_AHEAD)


@gluon.jit
def fetch_weights(matrices, ring, asked, early, out, sizes, TILE: gl.constexpr):
    """The warp that asks for weights.

    Before, each program asked for two stages, and then for weights and activations at once. Since,
    Q4_K 4096x14336 by 32 tokens takes 17.7 us for 18.5, 8192x8192 19.0 for 20.7, and 28672x4096 by
    16 24.5 for 25.4; but 6144x4096 by 64 15.3 for 15.1 (``bench.timing.Replay`` of ``gemm_quant``,
    H200, a copy of 3cf5b90 for 3cf5b90; the copy also departs sooner, as
    :func:`.packed_sums.slice_sums` says). docs/packed-lessons.md has more shapes. Then early
    programs asked for all of their ring but a stage. With MOST_AHEAD at most, 4096x14336 by 32, of
    five stages, takes 17.4 us for 17.6 (the same, a copy of dfe9d82 for dfe9d82, in turns).

    Args:
        asked: a barrier, complete once the first block's activations have been asked for.
        early: programs that begin while activations are arranged, the first of all.
    """
    share = share_of_program(sizes, TILE)
    AHEAD: gl.constexpr = stages_ahead(TILE)
    ahead = gl.where(gl.program_id(0) < early, AHEAD, 1)
    BYTES: gl.constexpr = TILE.block_bytes
    MATRICES: gl.constexpr = TILE.matrices
    to = ring.buffers
    step = 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        place = place_of(corner_of(part.tile, sizes, TILE).rows, out.num_rows, TILE)
        rows = Source(0, place.row)
        for k in range(part.begin, part.end):
            if step == ahead:
                mbarrier.wait(asked.index(0), 0)
            stage = acquire(ring, step, BYTES)
            full = ring.full.index(stage)
            if TILE.activation != "" or MATRICES == 1:
                copy_stage(matrices, rows, k, full, to, stage, TILE)
            elif place.matrix == 0:
                copy_stage(matrices, rows, k, full, to, stage, TILE)
            elif MATRICES == 2 or place.matrix == 1:
                copy_block(matrices[1], rows, k, full, to, stage * WARPGROUPS, 1, TILE)
            else:
                copy_block(matrices[2], rows, k, full, to, stage * WARPGROUPS, 1, TILE)
            step += 1


@gluon.jit
def fetch_tokens(maps, x, w, asked, sizes, TILE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for activations, and for their sums.

    Args:
        maps: :class:`TokenMaps`.
        x, w: the rings.
        asked: the barrier of :func:`fetch_weights`.
    """
    share = share_of_program(sizes, TILE)
    STAGES: gl.constexpr = 4 // TILE.x_steps  # of a block
    pdl_wait(PDL)
    pdl_trigger(PDL)
    block = 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        token = corner_of(part.tile, sizes, TILE).token
        for k in range(part.begin, part.end):
            if TILE.sums_offsets and not TILE.joined:
                copy_sums(maps, token, k, x, w, block, TILE)
            for j in gl.static_range(STAGES):
                copy_tokens(maps, token, k * STAGES + j, x, block * STAGES + j, TILE)
            if block == 0:
                mbarrier.arrive(asked.index(0), count=1)
            block += 1
