"""Pools of 8 bits for Hopper's prefill over pages: a warpgroup widens codes for tensor cores.

It reads a tile's codes when they have landed as they are stored, writes them as 16 bits into the
consumers' ring, and arrives there in the place of a copy. Keys and values have room for one tile of
codes each: the next lands while the other kind is widened, or consumers have yet to make room.

In 16 bits codes are exact. Scales go where the plain kernel has them
(:mod:`ferrum_triton.kernels.attention.pages`): they lie beside the tile's rows, and consumers
multiply scores and weights by them in float32. Keys multiplied here would be rounded, by more than
the float32 logarithms of sums allow. One scale for many keys takes the same way.

By estimate, the keys and values of a tile of 128 cost each of the four warps some 350 instructions
in float16 and 620 in bfloat16, while tensor cores need 2048 cycles for 128 rows of 128 columns. A
decoded copy of all that is seen would cost less where there are many queries. But the host knows
its size by a bound alone, the capacity of the block tables, often many times what is in use.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ferrum_triton.kernels.hopper.attention_roles import ask, tile_of
from ferrum_triton.kernels.hopper.attention_walk import (
    begin,
    copy_pages,
    has_part,
    next_of,
    part_of,
    walk_to,
)
from ferrum_triton.kernels.hopper.rings import release, wait_empty, wait_full

# How the warpgroup's threads share out the keys of a tile.
KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# The two conversions of four codes that the compiler would make by the unit of the exponentials,
# which has no time to spare. NaN stays NaN.
E4M3_IN_BF16 = gl.constexpr("""{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 x, y;
    .reg .f32 fa, fb, fc, fd;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 x, low;
    cvt.rn.f16x2.e4m3x2 y, high;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.f32.f16 fa, a;
    cvt.f32.f16 fb, b;
    cvt.f32.f16 fc, c;
    cvt.f32.f16 fd, d;
    cvt.rn.bf16x2.f32 $0, fb, fa;
    cvt.rn.bf16x2.f32 $1, fd, fc;
}""")
# As attention.codes.INT8_PAIRS: of a code plus 128 the mantissa of 1024, which is subtracted.
INT8_IN_F16 = gl.constexpr("""{
    .reg .b32 x, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x4140;
    prmt.b32 $1, x, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
}""")


class Scales(NamedTuple):
    """Pointers to the scales of keys and of values, or the scales of a tile's."""

    k: Any
    v: Any


@gluon.constexpr_function
def codes_layout(columns: int) -> gl.DistributedLinearLayout:
    """How threads share out rows of codes, 16 bytes at a time; its shape is what they take at once.

    Shared memory serves a quarter of a warp at once. That reads 64 bytes of two rows, and writes
    every other 16 bytes of 128 of them. The rows are five apart, that is in the first and the third
    bit of their numbers, so that the swizzles of rows of 128 bytes put both in banks of their own.
    """
    chunks = [[0, 1 << bit] for bit in range(4, columns.bit_length() - 1)]
    lanes, registers, warps = chunks[:2], chunks[2:3], chunks[3:]
    rows = [[row, 0] for row in (5, 1, 2, 8, 16, 32)]
    of_lanes, of_warps = 5 - len(lanes), 2 - len(warps)
    more = rows[of_lanes : of_lanes + of_warps]
    idle = [[0, 0]] * (of_warps - len(more))
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *registers],
        lane_bases=[*lanes, *rows[:of_lanes]],
        warp_bases=[*warps, *more, *idle],
        block_bases=[],
        shape=[1 << (of_lanes + len(more)), columns],
    )


@gluon.constexpr_function
def rows_at_once(columns: int) -> int:
    """Rows of codes that the threads take at once."""
    return codes_layout(columns).shape[0]


@gluon.jit
def widened(codes, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Codes, held as integers of 8 bits, in 16 bits: exactly."""
    if FORMAT == "e4m3" and DTYPE == gl.bfloat16:
        x = gl.inline_asm_elementwise(E4M3_IN_BF16, "=r,=r,r", [codes], gl.bfloat16, True, 4)
    elif FORMAT == "e4m3":
        x = codes.to(gl.float8e4nv, bitcast=True).to(DTYPE)
    elif DTYPE == gl.float16:
        x = gl.inline_asm_elementwise(INT8_IN_F16, "=r,=r,r", [codes], gl.float16, True, 4)
    else:
        x = codes.to(DTYPE)
    return x


@gluon.jit
def widen_rows(codes, to, VARIANT: gl.constexpr):
    """Widen a tile of codes into one of 16 bits."""
    COLUMNS: gl.constexpr = codes.shape[1]
    LAYOUT: gl.constexpr = codes_layout(COLUMNS)
    ROWS: gl.constexpr = rows_at_once(COLUMNS)
    FORMAT: gl.constexpr = VARIANT.codes
    for i in gl.static_range(codes.shape[0] // ROWS):
        x = codes.slice(i * ROWS, ROWS).load(LAYOUT)
        to.slice(i * ROWS, ROWS).store(widened(x, to.dtype, FORMAT))


@gluon.jit
def widen_tile(codes, stream, step, scales, VARIANT: gl.constexpr):
    """Widen the keys or values of a step, and hand them on with their scales.

    Args:
        codes: their stream as they are stored.
        stream: that of the consumers.
    """
    wait_full(codes.ring, step)
    wait_empty(stream.ring, step)
    stage = step % VARIANT.stages
    widen_rows(tile_of(codes.ring.buffers, 0), tile_of(stream.ring.buffers, stage), VARIANT)
    if codes.rest is not None:
        widen_rows(tile_of(codes.rest, 0), tile_of(stream.rest, stage), VARIANT)
    stream.scales.index(stage).store(scales)
    fence_async_shared()
    gl.thread_barrier()
    if not VARIANT.asks:
        release(codes.ring, step)
    mbarrier.arrive(stream.ring.full.index(stage), count=1)


@gluon.jit
def scales_of(first_key, part, scales, batch, VARIANT: gl.constexpr):
    """The scales of a tile's keys; 0 in the places of none, whose codes may be NaN with another."""
    # Places as attention_paged.ask_pages fills them.
    PIECE: gl.constexpr = VARIANT.piece
    place = gl.arange(0, VARIANT.block_n, KEYS)
    key = first_key + place // PIECE * PIECE
    valid = gl.minimum(gl.maximum(part.keys - key, 0), PIECE)
    own = place % PIECE + valid - PIECE
    exists = own >= 0
    table = batch.tables_ptr + part.block.batch.to(gl.int64) * batch.stride_table
    page = gl.load(table + key // VARIANT.block_size, mask=exists, other=0).to(gl.uint32)
    page = gl.minimum(page, (batch.num_blocks - 1).to(gl.uint32)).to(gl.int64)
    slot = (key % VARIANT.block_size + own).to(gl.int64)
    head = part.block.head.to(gl.int64)
    k_at = page * VARIANT.k_scales.block + slot * VARIANT.k_scales.slot
    v_at = page * VARIANT.v_scales.block + slot * VARIANT.v_scales.slot
    k_head = scales.k + head * VARIANT.k_scales.head
    v_head = scales.v + head * VARIANT.v_scales.head
    k_scale = gl.load(k_head + k_at, mask=exists, other=0.0).to(gl.float32)
    v_scale = gl.load(v_head + v_at, mask=exists, other=0.0).to(gl.float32)
    return Scales(k_scale, v_scale)


@gluon.jit
def ask_first(streams, codes, part, turn, batch, VARIANT: gl.constexpr):
    """Ask for a block's queries, and for its first keys and values in the place of the last."""
    CONSUMERS: gl.constexpr = VARIANT.consumers
    block = part.block
    key = block.end - VARIANT.block_n
    copy_pages(codes.k, 0, key, part, batch, VARIANT)
    copy_pages(codes.v, 0, key, part, batch, VARIANT)
    for c in gl.static_range(CONSUMERS):
        token = part.token + block.first_row + c * VARIANT.queries
        ask(streams.q, turn * CONSUMERS + c, block.head, token, 0)


@gluon.jit
def widen_pages(streams, codes, scales, batch, VARIANT: gl.constexpr):
    """Widen all that the consumers take, in their order, and ask for it where no warp does.

    A tile's scales are asked for before its keys are waited for.
    """
    BLOCK_N: gl.constexpr = VARIANT.block_n
    turn, done = 0, 0  # blocks and tiles before
    rank, walk = begin(batch, VARIANT)
    walk = walk_to(walk, rank, batch, VARIANT)
    while has_part(walk, rank, batch, VARIANT):
        part = part_of(walk, rank, batch, VARIANT)
        tiles = part.block.tiles
        key = part.block.end - BLOCK_N
        if VARIANT.asks:
            ask_first(streams, codes, part, turn, batch, VARIANT)
        held = scales_of(key, part, scales, batch, VARIANT)
        widen_tile(codes.k, streams.k, done, held.k, VARIANT)
        if VARIANT.asks:
            if tiles > 1:
                copy_pages(codes.k, 0, key - BLOCK_N, part, batch, VARIANT)
        for n in range(1, tiles):
            key -= BLOCK_N
            after = scales_of(key, part, scales, batch, VARIANT)
            widen_tile(codes.k, streams.k, done + n, after.k, VARIANT)
            if VARIANT.asks:
                if n + 1 < tiles:
                    copy_pages(codes.k, 0, key - BLOCK_N, part, batch, VARIANT)
            widen_tile(codes.v, streams.v, done + n - 1, held.v, VARIANT)
            if VARIANT.asks:
                copy_pages(codes.v, 0, key, part, batch, VARIANT)
            held = after
        done += tiles
        widen_tile(codes.v, streams.v, done - 1, held.v, VARIANT)
        turn += 1
        rank = next_of(rank, turn, batch, VARIANT)
        walk = walk_to(walk, rank, batch, VARIANT)
