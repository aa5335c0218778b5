"""Heads of two strips of columns: 64 and 32 of a head of 96, 128 and 64 of one of 192.

Blocks are powers of two. In one block of 128, a head of 96 is loaded under a mask, takes a third
more shared memory, and is multiplied by zeros; in strips none of it.
"""

import triton
import triton.language as tl

# Columns that tensor cores multiply at a time at least.
NARROWEST = 16


def strip_of(head_dim: int) -> int:
    """Columns of a head's second strip; 0 where the head is no two powers of two."""
    first = 1 << head_dim.bit_length() - 1
    rest = head_dim - first
    return 0 if rest < NARROWEST or rest & (rest - 1) else rest


@triton.jit
def _halves(x):
    """The first half of x's columns, and the second."""
    x = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(x, (0, 2, 1)))


@triton.jit
def _joined(first, second):
    """What :func:`_halves` took apart."""
    x = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(x, (first.shape[0], 2 * first.shape[1]))


@triton.constexpr_function
def _halvings(width, strip):
    """How often columns are halved down to those of a strip."""
    return (width // strip).bit_length() - 1


@triton.jit
def in_strips(x, STRIP: tl.constexpr):
    """The first half of the columns of x [M, D], and the STRIP columns behind it."""
    first, rest = _halves(x)
    for _ in tl.static_range(_halvings(first.shape[1], STRIP)):
        rest, _none = _halves(rest)
    return first, rest


@triton.jit
def from_strips(strips):
    """What :func:`in_strips` took apart, with zeros behind the last column."""
    first, rest = strips
    for _ in tl.static_range(_halvings(first.shape[1], rest.shape[1])):
        rest = _joined(rest, tl.zeros_like(rest))
    return _joined(first, rest)


@triton.jit
def load_strips(rows, STRIP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Vectors of a cache, in strips.

    Args:
        rows: pointers to their first elements, [N, 1].
    """
    FIRST: tl.constexpr = HEAD_DIM - STRIP
    first = tl.load(rows + tl.arange(0, FIRST)[None, :])
    rest = tl.load(rows + (FIRST + tl.arange(0, STRIP)[None, :]))
    return first, rest


@triton.jit
def dot_strips(q, k, PRECISION: tl.constexpr):
    """q kᵀ, both in strips of one dtype."""
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    return tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION)


@triton.jit
def add_strips(acc, rescale, weights, v, PRECISION: tl.constexpr):
    """acc · rescale + weights v, in strips."""
    p = weights.to(v[0].dtype)
    return (
        tl.dot(p, v[0], acc[0] * rescale[:, None], input_precision=PRECISION),
        tl.dot(p, v[1], acc[1] * rescale[:, None], input_precision=PRECISION),
    )
