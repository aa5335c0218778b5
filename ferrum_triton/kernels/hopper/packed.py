"""Activations by weights in planes, unpacked in registers while tensor cores multiply.

y[m, n] = Σₖ a[m, k] · W[n, k] + bias[n] + residual[m, n], for nine tokens and more; or gate and up
with the activation between them, or Q, K and V side by side. W is the tensor cores' first operand,
from registers (:mod:`.packed_weights`), tokens are the second, from shared memory.

A program has two warpgroups that multiply, of 64 rows of W each, and two warps that ask for what
they take, a ring of stages ahead (:mod:`.packed_fetch`). Which tiles it takes, and how sums are
added up where several programs share a tile's K, is said in :mod:`.packed_work`.

A step is 64 of K, and several may be multiplied in a row. In turns, a warpgroup unpacks a row,
multiplies it and waits, and other warpgroups fill the time: with few tokens, two programs on an SM.
Overlapped, it unpacks the next row of a block while the row before is multiplied, and only at the
block's end waits for all of them. Unpacking takes four instructions for a pair of weights either
way, and three where what a group of weights has in common is a product of its own
(:mod:`.packed_offsets`).

A stage of weights may come with its block's activations. *Joined*, a warpgroup waits once for a
block; with two rings it waits for the weights, and for the activations of every row of steps. 256
tokens have no room for joined stages: their activations of a block are 128 KiB.

The two warpgroups wait for the same stage, so both unpack at once, and then both multiply. With
*ping-pong*, each begins its products once the other has begun its own but for the last step's, and
one unpacks while the other's products run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferrum_triton.kernels.gluon import gluon_kernel
from ferrum_triton.kernels.hopper.layouts import operand_layout, sums_layout
from ferrum_triton.kernels.hopper.packed_fetch import (
    TokenMaps,
    fetch_tokens,
    fetch_weights,
)
from ferrum_triton.kernels.hopper.packed_offsets import coded, offsets, offsets_operand, scaled
from ferrum_triton.kernels.hopper.packed_stores import Output, factors, store_sums
from ferrum_triton.kernels.hopper.packed_sums import (
    depart,
    departs_early,
    hand_on,
    slice_sums,
    summed,
)
from ferrum_triton.kernels.hopper.packed_weights import (
    Planes,
    fragment,
    load_block,
    unpacked,
)
from ferrum_triton.kernels.hopper.packed_work import (
    WARPGROUPS,
    Sizes,
    corner_of,
    segment,
    share_of_program,
)
from ferrum_triton.kernels.hopper.rings import Ring, make_barriers, release, wait_full
from ferrum_triton.kernels.pdl import pdl_wait


@gluon.jit
def offsets_of(block, TILE: gl.constexpr):
    """A block's offsets, where they are a product of their own: one in a tuple, or none."""
    found = ()
    if TILE.sums_offsets:
        found += (offsets(block, TILE),)
    return found


@gluon.jit
def operands(block, below, FIRST: gl.constexpr, TILE: gl.constexpr):
    """First operands of a row of steps; a block's first row has its offsets' behind them.

    Args:
        below: the block's offsets, as :func:`offsets_of` returns them.
        FIRST: the first of the row's steps in its block.
    """
    LAYOUT: gl.constexpr = operand_layout(TILE.tokens)
    SPAN: gl.constexpr = TILE.span
    steps, a = (), ()
    for j in gl.static_range(SPAN):
        if TILE.sums_offsets:
            steps += (coded(block, FIRST + j, TILE),)
        else:
            steps += (unpacked(block, FIRST + j, TILE),)
    for j in gl.static_range(SPAN):
        if TILE.sums_offsets:
            a += (scaled(steps[j], TILE, LAYOUT),)
        else:
            a += (fragment(steps[j], TILE, LAYOUT),)
    if TILE.sums_offsets and FIRST == 0:
        a += (offsets_operand(below[0], LAYOUT),)
    return a


@gluon.jit
def multiply(
    acc, a, w, x, first, stage, FIRST: gl.constexpr, WARPGROUP: gl.constexpr, TILE: gl.constexpr
):
    """Start the products of a row of steps; ``a`` must be left alone until they are done.

    With ping-pong, the other warpgroup may begin ahead of the last step's products. Q4_K 4096x14336
    by 32 tokens takes 18.3 us so and 18.6 where it may begin behind them, by 64 21.3 and 21.6; Q4_0
    by 64 20.6 and 20.5. Ahead of the last two steps' it takes 18.4 and 22.1, and Q4_0 21.3
    (``bench.timing.Replay`` of ``gemm_quant`` under ``products.forced``, and ``bench.run`` of the
    rows, H200, ed6a981 and copies of it).

    Args:
        w: the ring of weights, :class:`WeightRing`.
        first: number of the buffer of the row's first activations.
        stage: the stage that holds the block of weights, and sums of its activations.
        FIRST: the first of the row's steps in its block.
    """
    SPAN: gl.constexpr = TILE.span
    TOKENS: gl.constexpr = TILE.tokens  # of a stage the first
    for j in gl.static_range(SPAN):
        tokens = x.buffers.index(first + j).slice(0, TOKENS)
        acc = warpgroup_mma(a[j], tokens.permute((1, 0)), acc, is_async=True)
        if j == max(SPAN - 2, 0):
            hand_over(w, WARPGROUP, TILE)
    if TILE.sums_offsets and FIRST == 0:
        sums = x.sums.index(stage).slice(0, TOKENS)
        acc = warpgroup_mma(a[SPAN], sums.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def wait_tokens(x, x_at, stage, FIRST: gl.constexpr, TILE: gl.constexpr):
    """Wait for the activations of a row of steps; the number of the row's first buffer.

    Args:
        stage: the stage that holds the block of weights, and its activations where they are joined.
        FIRST: the first of the row's steps in its block.
    """
    if TILE.joined:
        first = stage * TILE.x_steps + FIRST
    else:
        first = wait_full(x, x_at) * TILE.x_steps
    return first


@gluon.jit
def release_tokens(x, x_at, TILE: gl.constexpr):
    """Let go of the activations of a row of steps, but of those that go with their weights."""
    if not TILE.joined:
        release(x, x_at)


@gluon.jit
def take_over(w, row, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """Wait until the other warpgroup has begun its products, but for the last step's.

    The second warpgroup waits for the first one's products of the same row of steps, the first for
    the second one's of the row before.

    Args:
        row: number of the row of steps among all that a warpgroup multiplies.
    """
    if TILE.pingpong:
        mbarrier.wait(w.go.index(WARPGROUP), (row & 1) ^ (1 - WARPGROUP))


@gluon.jit
def hand_over(w, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """Let the other warpgroup begin its products of a row of steps."""
    if TILE.pingpong:
        mbarrier.arrive(w.go.index(1 - WARPGROUP), count=1)


@gluon.jit
def wait_for_products(acc, a, OUTSTANDING: gl.constexpr = 0):
    """Their sums, once all products are done but the last ``OUTSTANDING``."""
    held = (acc,)
    held += a
    held = warpgroup_mma_wait(OUTSTANDING, deps=held)
    return held[0]


@gluon.jit
def add_blocks(acc, w, x, at, x_at, part, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """acc plus the products of a segment's blocks, a row of steps after the other.

    In turns, each row's products are waited for. Overlapped, they are waited for at the end of a
    block, and a row's activations are let go of once its own products are done and the next row's
    have begun. The operands of a block's products are different registers, which nothing writes
    before the last of them is done. A product in flight at the end of the loop would have the
    assembler wait for each product (C7513), so none is.

    A block of weights is let go of behind its products, which prove that every warp has its words.
    Neither a barrier nor an arrival waits for loads in flight: let go of right behind its loads, a
    block was overwritten by the next one's copy (``python -m tests.soak --minutes 8 --seed 1``
    beside other processes on an H200, a2d8e4f).

    Ping-pong gains where a row is a whole block. Q4_K 4096x14336 takes 18.6 us so by 32 tokens and
    21.7 by 64, and without it 19.1 and 22.4; Q4_0 by 64 tokens 20.1 and 20.8. By 128 it gains
    nothing, 32.3 us for 32.1. Where a block has two rows it loses: Q4_K takes 20.3 us by 32 tokens
    and 22.4 by 64, and without it 19.0 and 21.8 (``bench.timing.Replay`` of ``gemm_quant`` under
    ``products.forced``, H200, cbdf1ce and a copy of it in turns, two runs).

    Args:
        w: the ring of weights, :class:`WeightRing`.
        x: the ring of activations.
        at, x_at: their steps.
    """
    SPAN: gl.constexpr = TILE.span
    for k in range(part.begin, part.end):
        stage = wait_full(w, at)
        block = load_block(w.buffers, stage, k, WARPGROUP, TILE)
        below = offsets_of(block, TILE)
        held = ()
        for first in gl.static_range(0, 4, SPAN):
            a = operands(block, below, first, TILE)
            tokens = wait_tokens(x, x_at, stage, first, TILE)
            take_over(w, x_at, WARPGROUP, TILE)
            acc = multiply(acc, a, w, x, tokens, stage, first, WARPGROUP, TILE)
            if not TILE.overlapped:
                acc = wait_for_products(acc, a)
                release_tokens(x, x_at, TILE)
            else:
                held += a
                if first > 0 and not TILE.joined:
                    acc = wait_for_products(acc, held, SPAN)
                    release(x, x_at - 1)
            x_at += 1
        if TILE.overlapped:
            acc = wait_for_products(acc, held)
            release_tokens(x, x_at - 1, TILE)
        release(w, at)
        at += 1
    return acc, at, x_at


@gluon.jit
def finish(
    acc, out, part, corner, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr
):
    """Add up a tile's sums where they were shared out, and store it, or this program's slices."""
    pdl_wait(PDL)
    rows, first = corner.rows, corner.token
    if TILE.slices > 1:
        SLICE: gl.constexpr = TILE.tokens // TILE.slices
        slices = hand_on(acc, out.partial, out.tickets, part, sizes, WARPGROUP, TILE)
        for s in range(TILE.slices):
            if (slices.taken >> s) & 1 != 0:
                factor = factors(out, first + s * SLICE, SLICE)
                sums = slice_sums(slices, s, out.partial, sizes, WARPGROUP, TILE)
                store_sums(sums, factor, out, rows, first + s * SLICE, WARPGROUP, TILE)
        if not departs_early(TILE) or slices.taken == 0:
            depart(slices, sizes)
    else:
        factor = factors(out, first, TILE.tokens)
        finishes = True
        if TILE.streamed:
            acc, finishes = summed(acc, out.partial, out.tickets, part, sizes, WARPGROUP, TILE)
        if finishes:
            store_sums(acc, factor, out, rows, first, WARPGROUP, TILE)


@gluon.constexpr_function
def part_of(tile, parts):
    """A tile of fewer tokens."""
    return tile.part(parts)


@gluon.jit
def multiply_tile(
    out,
    w,
    x,
    at,
    x_at,
    part,
    sizes,
    WARPGROUP: gl.constexpr,
    TILE: gl.constexpr,
    WHOLE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply and store a tile, or the first tokens of one: the rings' steps behind it.

    Where a tile lies is found before its products, or behind them where programs share it. Found
    before, it leaves the compiler with a quarter fewer instructions for Q4_0 by 256 tokens, and
    28672x4096 of Q4_K takes 55.6 us and not 58.0 by 128 tokens, 93.7 and not 99.5 by 256. But
    4096x14336 by 128, which is shared, takes 34.9 and not 33.3 (``bench.timing.Replay`` of
    ``gemm_quant``, both in one run on an H200, what became 449e373).

    Args:
        WHOLE: the tile that ``TILE`` is all or a part of.
    """
    TOKENS: gl.constexpr = TILE.tokens
    if not TILE.streamed:
        corner = corner_of(part.tile, sizes, WHOLE)
    acc = gl.zeros([64, TOKENS], gl.float32, sums_layout(TOKENS))
    acc, at, x_at = add_blocks(acc, w, x, at, x_at, part, WARPGROUP, TILE)
    if TILE.streamed:
        corner = corner_of(part.tile, sizes, WHOLE)
    finish(acc, out, part, corner, sizes, WARPGROUP, TILE, PDL)
    return at, x_at


@gluon.jit
def multiply_tiles(
    out, w, x, sizes, WARPGROUP: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr
):
    """A warpgroup that multiplies."""
    share = share_of_program(sizes, TILE)
    at, x_at = 0, 0
    for i in range(share.count):
        part = segment(share, i, sizes)
        common = (out, w, x, at, x_at, part, sizes)
        if TILE.ragged:
            HALF: gl.constexpr = part_of(TILE, 2)
            QUARTER: gl.constexpr = part_of(TILE, 4)
            left = out.num_tokens - corner_of(part.tile, sizes, TILE).token
            if left <= QUARTER.tokens:
                at, x_at = multiply_tile(*common, WARPGROUP, QUARTER, TILE, PDL)
            elif left <= HALF.tokens:
                at, x_at = multiply_tile(*common, WARPGROUP, HALF, TILE, PDL)
            else:
                at, x_at = multiply_tile(*common, WARPGROUP, TILE, TILE, PDL)
        else:
            at, x_at = multiply_tile(*common, WARPGROUP, TILE, TILE, PDL)


@gluon.constexpr_function
def flat_layout(layout):
    """The layout of a map's tile as rows, whatever the map's rank."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.jit
def buffers_of(desc, NUMBER: gl.constexpr):
    """Shared memory for so many tiles of a tensor map, None of a plane that there is not."""
    if desc is not None:
        RANK: gl.constexpr = len(desc.block_type.shape)
        ROWS: gl.constexpr = desc.block_type.shape[RANK - 2]
        COLUMNS: gl.constexpr = desc.block_type.shape[RANK - 1]
        LAYOUT: gl.constexpr = flat_layout(desc.layout)
        buffers = gl.allocate_shared_memory(desc.dtype, [NUMBER, ROWS, COLUMNS], LAYOUT)
    else:
        buffers = None
    return buffers


class WeightRing(NamedTuple):
    """A :class:`Ring` of weights, and barriers by which warpgroups begin products, or None.

    The barrier of a warpgroup is complete once the other one lets it begin.
    """

    buffers: Any
    full: Any
    empty: Any
    go: Any


@gluon.jit
def go_barriers(TILE: gl.constexpr):
    """Barriers of a :class:`WeightRing`, or None where warpgroups begin when they like."""
    if TILE.pingpong:
        go = make_barriers(WARPGROUPS, 1)
    else:
        go = None
    return go


class TokenRing(NamedTuple):
    """A :class:`Ring` of activations, and their sums or None, which use the barriers of weights."""

    buffers: Any
    full: Any
    empty: Any
    sums: Any


@gluon.jit
def token_ring(x_desc, w, TILE: gl.constexpr):
    """The ring of activations; where they come with weights, by the barriers of that ring."""
    if TILE.joined:
        x = Ring(buffers_of(x_desc, TILE.stages * TILE.x_steps), w.full, w.empty)
    else:
        x = Ring(
            buffers_of(x_desc, TILE.x_stages * TILE.x_steps),
            make_barriers(TILE.x_stages, 1),
            make_barriers(TILE.x_stages, WARPGROUPS),
        )
    return x


@gluon_kernel(dynamic=("tiles", "tiles_m", "num_tokens", "early"))
def packed_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # float32 [programs, 2, warpgroups, 64, tokens], or None of whole tiles
    tickets_ptr,  # int32 zeros, which are left so; see packed_sums
    factor_ptr,  # [m]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    q_desc,  # of planes, see _descriptors
    h_desc,
    s_desc,
    d_desc,
    second_q_desc,  # of up, or what follows in y; or None
    second_h_desc,
    second_s_desc,
    second_d_desc,
    third_q_desc,
    third_h_desc,
    third_s_desc,
    third_d_desc,
    x_desc,  # of activations, float16 [m, padded k]
    sums_desc,  # of their sums over groups, float16 [m, padded k / 16], or None
    stride_y_token,
    stride_residual_token,
    num_rows,
    num_rows_second,
    num_rows_third,
    blocks,  # of K
    tiles,
    tiles_m,
    num_tokens,
    early,  # programs that begin while activations are arranged, the first ones
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    """y = factor · x · Wᵀ + bias + residual, or activation(gate) * up of two such products."""
    first = Planes(q_desc, h_desc, s_desc, d_desc)
    second, third = None, None
    if second_q_desc is not None:
        second = Planes(second_q_desc, second_h_desc, second_s_desc, second_d_desc)
    if third_q_desc is not None:
        third = Planes(third_q_desc, third_h_desc, third_s_desc, third_d_desc)
    # Made here and not in a function, which could not return a plane that there is not.
    TILES: gl.constexpr = TILE.stages * WARPGROUPS * (2 if TILE.activation != "" else 1)
    buffers = Planes(
        buffers_of(q_desc, TILES),
        buffers_of(h_desc, TILES),
        buffers_of(s_desc, TILES),
        buffers_of(d_desc, TILES),
    )
    full = make_barriers(TILE.stages, TILE.producers)
    w = WeightRing(buffers, full, make_barriers(TILE.stages, WARPGROUPS), go_barriers(TILE))
    ring = token_ring(x_desc, w, TILE)
    x = TokenRing(ring.buffers, ring.full, ring.empty, buffers_of(sums_desc, TILE.stages))
    asked = make_barriers(1, 1)
    fence_async_shared()
    matrices = (first, second, third)
    sizes = Sizes(tiles, tiles_m, blocks)
    out = Output(
        y_ptr,
        partial_ptr,
        tickets_ptr,
        factor_ptr,
        bias_ptr,
        residual_ptr,
        stride_y_token,
        stride_residual_token,
        num_tokens,
        (num_rows, num_rows_second, num_rows_third),
    )
    # Arguments stand where they are passed: in a variable, constants would become numbers.
    gl.warp_specialize(
        [
            (multiply_tiles, (out, w, x, sizes, 0, TILE, PDL)),
            (multiply_tiles, (out, w, x, sizes, 1, TILE, PDL)),
            (fetch_weights, (matrices, w, asked, early, out, sizes, TILE)),
            (fetch_tokens, (TokenMaps(x_desc, sums_desc), x, w, asked, sizes, TILE, PDL)),
        ],
        [4, 1, 1],
        [TILE.registers, 24, 24],
    )
