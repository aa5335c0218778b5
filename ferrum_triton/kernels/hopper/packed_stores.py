"""Stores of packed products: scaled, added to or passed through an activation, rounded once."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.hopper.packed_work import place_of


class Output(NamedTuple):
    """Where products go, and what is added to them."""

    y: Any
    partial: Any
    tickets: Any
    factor: Any
    bias: Any
    residual: Any
    stride_y: Any
    stride_residual: Any
    num_tokens: Any
    num_rows: Any  # of each matrix


@gluon.constexpr_function
def output_layout(rows):
    """Each thread with eight rows of a token, which lie together in y."""
    across = rows // 8
    return gl.BlockedLayout([8, 1], [across, 32 // across], [1, 4], [0, 1])


@gluon.jit
def gated(y, TILE: gl.constexpr):
    """activation(gate) · up, [32, tokens], of a tile with eight rows of each in turn."""
    TOKENS: gl.constexpr = y.shape[1]
    ACTIVATION: gl.constexpr = TILE.activation
    gate, up = gl.split(y.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    return (activated(gate, ACTIVATION) * up).reshape([32, TOKENS])


@gluon.jit
def factors(out, first, COUNT: gl.constexpr):
    """Factors of the sums of ``COUNT`` tokens, loaded before the sums are complete."""
    token = first + gl.arange(0, COUNT, gl.SliceLayout(0, sums_layout(COUNT)))
    return gl.load(out.factor + token, mask=token < out.num_tokens, other=0.0)


@gluon.jit
def store_sums(acc, factor, out, rows, first, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """Store sums of a tile's rows by tokens from one on, float32 [64, tokens].

    Args:
        rows: number of the tile of rows.
        first: the first token.
    """
    GATED: gl.constexpr = TILE.activation != ""
    ROWS: gl.constexpr = 32 if GATED else 64
    place = place_of(rows, out.num_rows, TILE)
    y = acc * factor[None, :]
    if GATED:
        y = gated(y, TILE)
    LAYOUT: gl.constexpr = output_layout(ROWS)
    y = gl.convert_layout(y, LAYOUT)
    token = first.to(gl.int64) + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    row = place.row + WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    has_row = row < place.num_rows
    mask = has_row[:, None] & (token < out.num_tokens)[None, :]
    column = (place.column + row).to(gl.int64)
    if out.bias is not None:
        y += gl.load(out.bias + column, mask=has_row, other=0.0).to(gl.float32)[:, None]
    if out.residual is not None:
        residual = out.residual + token[None, :] * out.stride_residual + column[:, None]
        y += gl.load(residual, mask=mask, other=0.0).to(gl.float32)
    to = out.y + token[None, :] * out.stride_y + column[:, None]
    gl.store(to, y.to(out.y.dtype.element_ty), mask=mask)
