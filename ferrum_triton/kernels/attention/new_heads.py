"""Heads of one new token, prepared in the program that attends with them.

Unlike :mod:`~ferrum_triton.kernels.heads`, which holds the two members of a pair apart, a dimension
keeps its place here, as products with cached keys want it, and its partner is loaded beside it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.kernels.heads import COPY, NORM_ROPE
from ferrum_triton.ops import rope


@dataclass(frozen=True)
class Rotary:
    """How heads are prepared.

    Attributes:
        mode: a ``qk_mode`` of :mod:`ferrum_triton.ops.rope`.
        half: rotary pairs of a head.
    """

    mode: int
    half: int

    @property
    def interleaved(self) -> bool:
        """Whether the pairs are (2i, 2i + 1) rather than (i, i + half)."""
        return self.mode == rope.ROPE_INTERLEAVED


class Vectors(NamedTuple):
    """Heads as they come: their elements, and beside each its partner in the rotation."""

    x: Any
    partner: Any


class Turn(NamedTuple):
    """Factors of a position: x · cos + partner · sin, whose sign is that of x's place in a pair."""

    cos: Any
    sin: Any


@triton.jit
def _partner_of(d, ROTARY: tl.constexpr, ATTENTION: tl.constexpr):
    """The other dimension of d's pair, the pair, and whether d is its first.

    Remainders, not choices: of those the compiler knows that neighbours stay neighbours.
    """
    # Without pairs there is nothing to divide by, and every dimension is its own partner.
    HALF: tl.constexpr = max(ROTARY.half, 1)
    if ROTARY.interleaved:
        first = d % 2 == 0
        partner = d + 1 - d % 2 * 2
        pair = d // 2
    else:
        first = d < HALF
        partner = (d + HALF) % (2 * HALF)
        pair = d % HALF
    if 2 * ROTARY.half < ATTENTION.head_dim:
        partner = tl.where(d < 2 * ROTARY.half, partner, d)
    return partner, pair, first


@triton.jit
def load_vectors(rows, mask, ROTARY: tl.constexpr, ATTENTION: tl.constexpr):
    """The heads that begin at ``rows``, [rows, BLOCK_D] float32."""
    d = tl.arange(0, ATTENTION.block_d)[None, :]
    mask = mask[:, None] & (d < ATTENTION.head_dim)
    x = tl.load(rows[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    partner = x
    if ROTARY.mode != COPY:
        other, _, _ = _partner_of(d, ROTARY, ATTENTION)
        partner = tl.load(rows[:, None] + other, mask=mask, other=0.0).to(tl.float32)
    return Vectors(x, partner)


@triton.jit
def load_turn(
    position,  # int64; outside the table nothing is turned
    cos_ptr,
    sin_ptr,
    stride_cos_position,
    stride_sin_position,
    max_positions,
    ROTARY: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """The turn of all dimensions, [1, BLOCK_D]; those past the pairs stay."""
    d = tl.arange(0, ATTENTION.block_d)[None, :]
    _, pair, first = _partner_of(d, ROTARY, ATTENTION)
    known = (position >= 0) & (position < max_positions) & (d < 2 * ROTARY.half)
    cos = tl.load(cos_ptr + position * stride_cos_position + pair, mask=known, other=1.0)
    sin = tl.load(sin_ptr + position * stride_sin_position + pair, mask=known, other=0.0)
    sin = sin.to(tl.float32)
    return Turn(cos.to(tl.float32), tl.where(first, -sin, sin))


@triton.jit
def prepare(vectors, weights, turn, eps, ROTARY: tl.constexpr, ATTENTION: tl.constexpr):
    """Heads normalised and rotated as ROTARY says."""
    x, partner = vectors
    if ROTARY.mode == NORM_ROPE:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / ATTENTION.head_dim + eps)[:, None]
        x, partner = x * rstd * weights.x, partner * rstd * weights.partner
    if ROTARY.mode != COPY:
        x = x * turn.cos + partner * turn.sin
    return x
