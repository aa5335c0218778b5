"""The online softmax, in base 2: what every attention kernel does with a tile of scores.

A row's running maximum starts at the lowest finite number, not at -inf: a hidden score is -inf, and
-inf minus the maximum is then -inf, never NaN, without a guard in the loop. The running sum is 0 as
long as the row has seen nothing.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)

# Stands for a scale of zero, which would make NaN of the -inf that hides a score.
LEAST_SCALE = tl.constexpr(1e-30)


class Softmax(NamedTuple):
    """The softmax over the keys seen so far.

    Attributes:
        acc: sum of the weighted values, [rows, columns] float32; a kernel may keep it in parts.
        row_max: largest score times log2(e), [rows].
        row_sum: sum of exp2(score - row_max), [rows].
    """

    acc: Any
    row_max: Any
    row_sum: Any


@triton.jit
def first_state(acc, sink_log2):
    """The state before any key, for an ``acc`` of zeros.

    Args:
        sink_log2: logits in base 2 that count as keys without a value, -inf for none, [rows].
    """
    row_sum = tl.where(sink_log2 == float("-inf"), 0.0, 1.0)
    return Softmax(acc, tl.maximum(sink_log2, LOWEST), row_sum)


@triton.jit
def soft_cap(y, softcap_log2, EXACT: tl.constexpr):
    """softcap_log2 · tanh(x), where y is 2 · log2(e) · x; overflows nowhere.

    Near 0 the difference cancels, to an error of a float32's step at 1: softcap times that is more
    than scores of float32 inputs may be off, so EXACT takes the series there, whose next term is
    below 1e-8 of the result.
    """
    t = 2.0 / (1.0 + tl.exp2(-y)) - 1.0
    if EXACT:
        x = y * (0.5 * LN_2)
        square = x * x
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        t = tl.where(square < 0.0625, x * series, t)
    return softcap_log2 * t


@triton.jit
def weigh(scores, factor, row_max):
    """A tile's weights exp2(factor · score - maximum), and the change of the maximum.

    Args:
        scores: [rows, keys]; -inf hides a key.
        factor: > 0; multiplied in the instruction that subtracts the maximum.
        row_max: the maximum of the tiles before, [rows].

    Returns:
        The weights, the factor that brings earlier sums to the new maximum, and that maximum.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(scores * factor - new_max[:, None])
    return weights, tl.exp2(row_max - new_max), new_max


@triton.jit
def fold_tile(state, scores, factor, v, PRECISION: tl.constexpr):
    """The softmax with one more tile of scores [rows, keys] and values [keys, columns]."""
    weights, rescale, row_max = weigh(scores, factor, state.row_max)
    row_sum = state.row_sum * rescale + tl.sum(weights, axis=1)
    acc = state.acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return Softmax(acc, row_max, row_sum)


@triton.jit
def fold_key(state, scores, v):
    """The softmax with one more key, of scores times log2(e) [rows] and a value [1, columns]."""
    row_max = tl.maximum(state.row_max, scores)
    weights = tl.exp2(scores - row_max)
    rescale = tl.exp2(state.row_max - row_max)
    acc = state.acc * rescale[:, None] + weights[:, None] * v.to(tl.float32)
    return Softmax(acc, row_max, state.row_sum * rescale + weights)


@triton.jit
def finish(state, value_factor):
    """(attention · value_factor, natural log of the sum of exp): 0 and -inf without keys."""
    empty = state.row_sum == 0.0
    total = tl.where(empty, 1.0, state.row_sum)
    lse = tl.where(empty, float("-inf"), (state.row_max + tl.log2(total)) * LN_2)
    return state.acc * (value_factor / total)[:, None], lse


@triton.jit
def store_rows(out_rows, lse_rows, out, lse, in_rows, WIDTH: tl.constexpr):
    """Store attention [rows, columns] and its lse.

    Args:
        out_rows: pointers to the rows' first elements, [rows].
        lse_rows: pointers to the rows' lse, [rows], or None.
        in_rows: the rows that exist, [rows].
        WIDTH: columns that exist.
    """
    column = tl.arange(0, out.shape[1])[None, :]
    at = out_rows[:, None] + column
    tl.store(at, out.to(at.dtype.element_ty), mask=in_rows[:, None] & (column < WIDTH))
    if lse_rows is not None:
        tl.store(lse_rows, lse, mask=in_rows)
