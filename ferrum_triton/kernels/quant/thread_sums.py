"""Sums over threads, and what ends a product with them: bias, residual, norms around it.

Threads keep float32 partial sums of a row and token each. They are added up over lanes by exchanges
that halve what each lane keeps, then over warps, and stored with what follows the product.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ferrum_triton.ops import open_norm as ops

# Columns whose squares are summed together where a norm is open.
PART = tl.constexpr(ops.PART)


class Output(NamedTuple):
    """Where products go: y [m, n], and what is added to them where it is not None.

    Attributes:
        opened: OpenNorm of the activations, whose ``ptr`` is None where they are none.
        opens: Opening of a norm over y, whose ``h_ptr`` is None where there is none.
    """

    ptr: Any
    bias_ptr: Any
    residual_ptr: Any
    stride: Any
    residual_stride: Any
    opened: Any
    opens: Any


class OpenNorm(NamedTuple):
    """Sums of squares [m, parts] by which a norm of the activations is yet to be divided."""

    ptr: Any
    stride: Any
    eps: Any


class Opening(NamedTuple):
    """A norm over y that is opened: h [m, n] = y · weight, and sums of y² by PART columns."""

    h_ptr: Any
    h_stride: Any
    squares_ptr: Any
    squares_stride: Any
    weight_ptr: Any


@triton.jit
def _side_by_side(parts, PADDED: tl.constexpr):
    """Tensors [threads] laid beside each other in each thread: [threads, PADDED]."""
    THREADS: tl.constexpr = parts[0].shape[0]
    # The first half beside the second, so that the first new axis tells them apart; and so on.
    for _ in tl.static_range(6):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                joined += (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = joined
    return tl.reshape(parts[0], (THREADS, PADDED))


@triton.constexpr_function
def _swap_asm(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@triton.jit
def _halved(values, LANES: tl.constexpr):
    """Sums of lanes LANES apart, half the values each: the second half where the lane has LANES."""
    HALF: tl.constexpr = len(values) // 2
    upper = (tl.arange(0, values[0].shape[0]) & LANES) != 0
    out = ()
    for i in tl.static_range(HALF):
        low, high = values[i], values[i + HALF]
        given = [tl.where(upper, low, high)]
        other = tl.inline_asm_elementwise(
            _swap_asm(LANES), "=f,f", given, dtype=tl.float32, is_pure=True, pack=1
        )
        out += (tl.where(upper, high, low) + other,)
    return out


@triton.jit
def summed(values, PADDED: tl.constexpr, PTX: tl.constexpr, mask=None, WHOLE: tl.constexpr = False):
    """The sum over threads, of those in the mask, of each tensor [threads]: [PADDED].

    By PTX lanes exchange half of their values with each other, then a quarter, and so on.

    Args:
        values: a tuple of tensors, [threads] each.
        PADDED: a power of two, at least as many.
        PTX: use PTX.
        mask: [threads] or None.
        WHOLE: the mask is the same for all threads of a warp.
    """
    # Sums of a warp that is in the mask or out of it are masked, not values.
    LATE: tl.constexpr = WHOLE and PTX and PADDED > 1 and PADDED <= 32
    if mask is not None and not LATE:
        masked = ()
        for i in tl.static_range(len(values)):
            masked += (tl.where(mask, values[i], 0.0),)
        values = masked
    parts = values
    for _ in tl.static_range(PADDED - len(values)):
        parts += (tl.zeros_like(values[0]),)
    if PADDED == 1:
        total = tl.sum(parts[0], axis=0, keep_dims=True)
    elif PTX and PADDED <= 32:
        WARPS: tl.constexpr = parts[0].shape[0] // 32
        for i in tl.static_range(5):
            if len(parts) > 1:
                parts = _halved(parts, 16 >> i)
        part = parts[0]
        if mask is not None and LATE:
            part = tl.where(mask, part, 0.0)
        each = tl.reshape(part, (WARPS, PADDED, 32 // PADDED))
        total = tl.sum(tl.sum(each, axis=2), axis=0)
    else:
        total = tl.sum(_side_by_side(parts, PADDED), axis=0)
    return total


@triton.jit
def summed_over_warps(values, COUNT: tl.constexpr):
    """The sum over warps of COUNT tensors [threads]: [32 COUNT], a lane's beside each other.

    Halves are added to each other. Triton then moves all warps' values of an entry to one thread,
    by one barrier and in words of 16 bytes. For a sum along an axis of warps it stores them one by
    one, a warp's lanes 4 · warps · COUNT bytes apart: of eight warps all in one bank.
    """
    WARPS: tl.constexpr = values[0].shape[0] // 32
    total = tl.reshape(_side_by_side(values, COUNT), (WARPS * 32 * COUNT,))
    for _ in tl.static_range(5):
        if total.shape[0] > 32 * COUNT:
            both = tl.permute(tl.reshape(total, (2, total.shape[0] // 2)), (1, 0))
            first, second = tl.split(both)
            total = first + second
    return total


@triton.jit
def store_rows(totals, out, first, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Totals [row][token] added up over the threads, and stored to the rows from ``first`` on.

    Args:
        PARTS: sums of squares of an open norm of the activations; 0 for none.
    """
    M: tl.constexpr = len(totals[0])
    SUMS: tl.constexpr = len(totals) * M
    PADDED: tl.constexpr = triton.next_power_of_2(SUMS)
    flat = ()
    for r in tl.static_range(len(totals)):
        flat += totals[r]
    y = summed(flat, PADDED, PTX)
    i = tl.arange(0, PADDED)
    y = closed(y, i % M, out.opened, PARTS, M)
    store_each(y, out, i % M, first + i // M, i < SUMS)


@triton.jit
def closed(y, token, opened, PARTS: tl.constexpr, M: tl.constexpr, num_columns=None):
    """y[i] divided by the root mean square of token[i]'s activations, whose norm is open.

    Args:
        opened: OpenNorm.
        PARTS: its sums of squares, of PART columns each; 0 where activations are what they are.
        M: tokens.
        num_columns: columns of a row of activations; None where a row is whole parts.
    """
    if PARTS > 0:
        if num_columns is None:
            num_columns = PART * PARTS
        BLOCK: tl.constexpr = min(triton.next_power_of_2(PARTS), 1024)
        part = tl.arange(0, BLOCK)
        for m in tl.static_range(M):
            at = opened.ptr + m * opened.stride + part
            squares = tl.load(at, mask=part < PARTS, other=0.0)
            for first in tl.static_range(BLOCK, PARTS, BLOCK):
                squares += tl.load(at + first, mask=first + part < PARTS, other=0.0)
            mean = tl.sum(squares, axis=0) / num_columns
            y = tl.where(token == m, y * tl.rsqrt(mean + opened.eps), y)
    return y


@triton.jit
def store_each(y, out, token, row, mask):
    """out.ptr[token[i], row[i]] ← y[i] + bias + residual where the mask holds.

    Returns:
        Those sums.
    """
    token = token.to(tl.int64)
    if out.bias_ptr is not None:
        y += tl.load(out.bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if out.residual_ptr is not None:
        residual = out.residual_ptr + token * out.residual_stride + row
        y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out.ptr + token * out.stride + row, y.to(out.ptr.dtype.element_ty), mask=mask)
    return y


@triton.jit
def open_norm(y, opens, first, M: tl.constexpr):
    """Open the norm over y [rows, M], whole parts of rows that follow each other from ``first`` on.

    Args:
        y: end to end, a row's tokens beside each other.
        opens: Opening.
        first: a multiple of PART, int64.
    """
    COUNT: tl.constexpr = y.shape[0] // (M * PART)
    i = tl.arange(0, y.shape[0])
    token, row = (i % M).to(tl.int64), first + i // M
    h = y * tl.load(opens.weight_ptr + row).to(tl.float32)
    tl.store(opens.h_ptr + token * opens.h_stride + row, h.to(opens.h_ptr.dtype.element_ty))
    squares = tl.sum(tl.reshape(y * y, [COUNT, PART, M]), axis=1)  # [COUNT, M]
    token, part = tl.arange(0, M).to(tl.int64)[None, :], tl.arange(0, COUNT)[:, None]
    at = opens.squares_ptr + token * opens.squares_stride + first // PART + part
    tl.store(at, squares)
