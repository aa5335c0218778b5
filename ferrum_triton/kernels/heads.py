"""Tiles of heads: what the kernels that prepare queries, keys and values share.

A program holds the same few heads of a block of tokens in registers. The heads are of one kind
(queries, keys or values) and share one read of each token's table row: in float32 that row is
twice the bytes of a 16-bit head.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.ops import rope as ops

# Modes of a tile that device functions ask for.
COPY = tl.constexpr(ops.COPY)
NORM_ROPE = tl.constexpr(ops.NORM_ROPE)


@dataclass(frozen=True)
class HeadTile:
    """What a program of a QKV kernel holds, some heads of some tokens, and how it prepares them.

    Attributes:
        tokens: tokens of the tile.
        heads: heads of the tile, which divide the numbers of query heads and of KV heads.
        half: rotary pairs of a head.
        rest: dimensions of a head past its pairs, which pass through.
        mode: what is done to queries and keys, a ``qk_mode`` of :mod:`ferrum_triton.ops.rope`.
    """

    tokens: int
    heads: int
    half: int
    rest: int
    mode: int

    @property
    def interleaved(self) -> bool:
        """Whether the pairs are (2i, 2i + 1) rather than (i, i + half)."""
        return self.mode == ops.ROPE_INTERLEAVED

    @property
    def block_half(self) -> int:
        """The smallest power of two that holds the pairs."""
        return next_power_of_2(max(self.half, 1))

    @property
    def block_rest(self) -> int:
        """The smallest power of two that holds the rest, or 0 where there is none."""
        return next_power_of_2(self.rest) if self.rest else 0


@functools.lru_cache(4096)
def head_tile(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_half: int,
    qk_mode: int,
    num_processors: int,
) -> tuple[HeadTile, int]:
    """The tile of a program, and its warps.

    The heads of a tile are the largest power of two up to 8 that divides both counts: no lane
    idles, no tile mixes kinds, and eight heads bring the traffic of the tables below a quarter of
    the heads' own.

    Tokens are added once every processor has eight programs, until a thread of four warps holds 16
    elements, two 16-byte loads. Few tokens keep four warps too, of shorter loads: with more threads
    than a table row has elements, the compiler reads the row in the layout of the heads, and
    exchanges nothing through shared memory.

    Args:
        num_tokens: tokens of the call.
        num_heads: query heads, or 0 where there are only keys and values.
        num_kv_heads: KV heads, or 0 where there are only queries.
        head_dim: elements of a head.
        rotary_half: pairs that are rotated; read unless qk_mode copies.
        qk_mode: the mode of the call.
        num_processors: SMs of the GPU.
    """
    common = math.gcd(num_heads, num_kv_heads)
    heads = min(common & -common, 8)
    elements = heads * next_power_of_2(head_dim)
    fill = num_tokens * (num_heads + 2 * num_kv_heads) // (heads * 8 * num_processors)
    most = min(max(2048 // elements, 1), next_power_of_2(num_tokens))
    tokens = min(next_power_of_2(max(fill, 1)), most)
    # A copy rotates nothing; any split into halves will do, and this one is the widest.
    half = head_dim // 2 if qk_mode == ops.COPY else rotary_half
    tile = HeadTile(tokens, heads, half, head_dim - 2 * half, qk_mode)
    return tile, min(max(tokens * elements // 256, 1), 4)


class Group(NamedTuple):
    """The part of a QKV product that a program prepares."""

    token: Any  # [tokens], int64
    head: Any  # heads of q, then k, then v: [heads], int64
    is_query: Any
    is_value: Any


class Heads(NamedTuple):
    """Vectors of a tile of heads, in float32."""

    x0: Any  # first members of the rotary pairs, [tokens, heads, block_half]
    x1: Any  # second members, as x0
    tail: Any  # dimensions past the pairs, [tokens, heads, block_rest]; x0 where there are none


class Tables(NamedTuple):
    """Cosines and sines of a rotary embedding."""

    cos_ptr: Any  # [max_positions, half]
    sin_ptr: Any  # [max_positions, half]
    stride_cos_position: Any
    stride_sin_position: Any
    max_positions: Any


@triton.jit
def group_of_program(num_heads, num_kv_heads, TILE: tl.constexpr):
    """The tokens and heads of this program, a :class:`Group`.

    Neighbouring programs hold the same tokens, whose table rows they find in the caches.
    """
    groups = (num_heads + 2 * num_kv_heads) // TILE.heads
    first = tl.program_id(0) % groups * TILE.heads
    token = (tl.program_id(0) // groups).to(tl.int64) * TILE.tokens + tl.arange(0, TILE.tokens)
    head = (first + tl.arange(0, TILE.heads)).to(tl.int64)
    return Group(token, head, first < num_heads, first >= num_heads + num_kv_heads)


@triton.jit
def vectors_of(ptr, token, head, stride_token, stride_head):
    """Pointers to the vectors of tokens and heads: [tokens, heads, 1]."""
    return (ptr + (token * stride_token)[:, None] + (head * stride_head)[None, :])[:, :, None]


@triton.jit
def load_heads(
    start,  # [tokens, heads, 1] pointers
    mask,  # [tokens, 1, 1]
    TILE: tl.constexpr,
):
    """The vectors at ``start``, as :class:`Heads`."""
    if TILE.interleaved:
        # As one vector, taken apart in registers: every second element is no 16-byte load.
        d = tl.arange(0, 2 * TILE.block_half)[None, None, :]
        x = tl.load(start + d, mask=mask & (d < 2 * TILE.half), other=0.0).to(tl.float32)
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], TILE.block_half, 2)))
    else:
        pair = tl.arange(0, TILE.block_half)[None, None, :]
        in_half = mask & (pair < TILE.half)
        x0 = tl.load(start + pair, mask=in_half, other=0.0).to(tl.float32)
        x1 = tl.load(start + TILE.half + pair, mask=in_half, other=0.0).to(tl.float32)
    tail = x0
    if TILE.block_rest > 0:
        r = tl.arange(0, TILE.block_rest)[None, None, :]
        tail = tl.load(start + 2 * TILE.half + r, mask=mask & (r < TILE.rest), other=0.0)
        tail = tail.to(tl.float32)
    return Heads(x0, x1, tail)


@triton.jit
def normalize_heads(
    heads,
    weight_ptr,  # [head_dim]
    eps,
    TILE: tl.constexpr,
):
    """x / sqrt(mean(x²) + eps) · weight of every head x, whose pairs are (i, i + half)."""
    x0, x1, tail = heads
    squares = tl.sum(x0 * x0 + x1 * x1, axis=2)
    if TILE.block_rest > 0:
        squares += tl.sum(tail * tail, axis=2)
    rstd = tl.rsqrt(squares / (2 * TILE.half + TILE.rest) + eps)[:, :, None]
    pair = tl.arange(0, TILE.block_half)[None, None, :]
    in_half = pair < TILE.half
    w0 = tl.load(weight_ptr + pair, mask=in_half, other=0.0).to(tl.float32)
    w1 = tl.load(weight_ptr + TILE.half + pair, mask=in_half, other=0.0).to(tl.float32)
    if TILE.block_rest > 0:
        r = tl.arange(0, TILE.block_rest)[None, None, :]
        w = tl.load(weight_ptr + 2 * TILE.half + r, mask=r < TILE.rest, other=0.0).to(tl.float32)
        tail = tail * rstd * w
    return Heads(x0 * rstd * w0, x1 * rstd * w1, tail)


@triton.jit
def rotate_heads(
    heads,
    position,  # [tokens], int64; outside the table, tokens are not rotated
    tables,
    TILE: tl.constexpr,
):
    """(x0 cos - x1 sin, x1 cos + x0 sin) of every pair, with the angles of its token."""
    x0, x1, tail = heads
    pair = tl.arange(0, TILE.block_half)[None, :]
    known = ((position >= 0) & (position < tables.max_positions))[:, None] & (pair < TILE.half)
    cos_row = tables.cos_ptr + (position * tables.stride_cos_position)[:, None]
    sin_row = tables.sin_ptr + (position * tables.stride_sin_position)[:, None]
    cos = tl.load(cos_row + pair, mask=known, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(sin_row + pair, mask=known, other=0.0).to(tl.float32)[:, None, :]
    return Heads(x0 * cos - x1 * sin, x1 * cos + x0 * sin, tail)


@triton.jit
def prepare_heads(
    heads,
    group,
    position,  # [tokens], int64; used where positions_ptr is None
    in_batch,  # [tokens]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    positions_ptr,  # [num_tokens] or None
    tables,
    eps,
    TILE: tl.constexpr,
):
    """Heads normalised and rotated as the tile's mode says; values stay as they are."""
    if TILE.mode == NORM_ROPE:
        if group.is_query:
            heads = normalize_heads(heads, q_weight_ptr, eps, TILE)
        elif not group.is_value:
            heads = normalize_heads(heads, k_weight_ptr, eps, TILE)
    if TILE.mode != COPY:
        if not group.is_value:
            if positions_ptr is not None:
                position = tl.load(positions_ptr + group.token, mask=in_batch, other=-1)
                position = position.to(tl.int64)
            heads = rotate_heads(heads, position, tables, TILE)
    return heads


@triton.jit
def in_pieces(d, stride_piece, PIECE: tl.constexpr):
    """Element offset of dimension ``d`` in a vector of pieces, PIECE elements each; 0: of one."""
    if PIECE > 0:
        d = (d // PIECE).to(tl.int64) * stride_piece + d % PIECE
    return d


@triton.jit
def store_heads(
    start,  # [tokens, heads, 1] pointers
    mask,  # [tokens, 1, 1]
    heads,
    stride_piece,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The inverse of :func:`load_heads`, rounding to what ``start`` points at."""
    dtype = start.dtype.element_ty
    if TILE.interleaved:
        d = tl.arange(0, 2 * TILE.block_half)[None, None, :]
        x = tl.interleave(heads.x0, heads.x1).to(dtype)
        tl.store(start + in_pieces(d, stride_piece, PIECE), x, mask=mask & (d < 2 * TILE.half))
    else:
        pair = tl.arange(0, TILE.block_half)[None, None, :]
        in_half = mask & (pair < TILE.half)
        first, second = pair, TILE.half + pair
        tl.store(start + in_pieces(first, stride_piece, PIECE), heads.x0.to(dtype), mask=in_half)
        tl.store(start + in_pieces(second, stride_piece, PIECE), heads.x1.to(dtype), mask=in_half)
    if TILE.block_rest > 0:
        r = tl.arange(0, TILE.block_rest)[None, None, :]
        at = start + in_pieces(2 * TILE.half + r, stride_piece, PIECE)
        tl.store(at, heads.tail.to(dtype), mask=mask & (r < TILE.rest))
