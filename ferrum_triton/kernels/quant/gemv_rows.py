"""Activations by a block of rows of repacked weights: what a program of a GEMV computes.

sums[row][token] = Σ over a thread's k of a[token, k] · W[row, k]. The threads of a program lie
along K. Each takes one or two groups of 32 weights of every row of a block of rows, multiplies them
by activations that are integers of 16 bits, or float32, and keeps float32 sums, which are to be
added up over the threads. ``gemv_repacked`` launches it for tokens, ``moe.plane_gemv`` for experts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.integer_activations import integers_of, load_activations
from ferrum_triton.kernels.quant.integer_groups import add_integers
from ferrum_triton.kernels.quant.plane_groups import LARGE, add_group
from ferrum_triton.kernels.quant.planes import group_of, load_rows, row_sizes, span_of, tied_zero
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind

# Weights are read once: they leave the first-level cache to the activations.
STREAM = tl.constexpr(".L1::evict_first")


@dataclass(frozen=True)
class Layout:
    """A matrix in the repacked layout: its format, and bytes of a row in each plane.

    Attributes:
        format: format's description.
        q, h, s, t, d: bytes of low bits, high bits, scales, their high bits, and block scales.
        span: groups of 32 weights a thread takes at a time.
    """

    format: BlockFormat
    q: int
    h: int
    s: int
    t: int
    d: int
    span: int


@dataclass(frozen=True)
class GemvPlan:
    """What is constant in a launch.

    Attributes:
        tokens: rows of activations.
        groups: groups of 32 weights in a row of W.
        rows: rows of W in a block, a power of two, at most those of the smallest matrix.
        threads: threads of a program.
        persistent: programs take several blocks of rows, K in one step.
        deferred: blocks of a persistent program whose sums are reduced together at its end; 0 to
            reduce after each block.
        ordered: loads of scales stay beside those of weights; of deferred sums, a block's loads
            stay behind the sums of the block two before it.
        prefetch: a step's weights are loaded before the step before is computed.
        late_trigger: the next launch may begin when the one before this has ended, not at once.
        integers: activations are integers or become such; else float32.
        wide: rows of activations start at multiples of 16 bytes.
        ptx: PTX is used.
    """

    tokens: int
    groups: int
    rows: int
    threads: int
    persistent: bool = False
    deferred: int = 0
    ordered: bool = True
    prefetch: bool = False
    late_trigger: bool = False
    integers: bool = True
    wide: bool = False
    ptx: bool = False


class Matrix(NamedTuple):
    """W [num_rows, k] in the repacked layout; ``ptr`` None where there is no such matrix."""

    ptr: Any
    num_rows: Any


def layout_of(planes: Tensor, kind: str, num_weights: int) -> Layout:
    """The layout of a matrix whose rows have ``num_weights`` weights."""
    sizes = {plane.lower(): size for plane, size in row_sizes(planes, kind, num_weights).items()}
    fmt = FORMATS[file_kind(kind)]
    return Layout(fmt, **sizes, span=span_of(fmt, num_weights // 32))


@triton.jit
def first_row(block, num_rows, ROWS: tl.constexpr):
    """First row of a block. The last block starts early enough to be whole: some rows twice."""
    return tl.minimum(block * ROWS, num_rows - ROWS).to(tl.int64)


@triton.jit
def block_of_rows(matrix, row, at, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr):
    """What threads need of a block of rows from ``row`` on: [row] of (low, high, scales).

    Args:
        matrix: Matrix.
        row: first row, int64.
        at: parts of LAYOUT.span groups, [threads].
        mask: parts that there are, [threads] or None.
    """
    KIND: tl.constexpr = LAYOUT.format
    num_rows = tl.full((), 1, tl.int64) * matrix.num_rows
    return load_rows(
        matrix.ptr,
        num_rows,
        row,
        at,
        mask,
        Q=LAYOUT.q,
        H=LAYOUT.h,
        S=LAYOUT.s,
        T=LAYOUT.t,
        D=LAYOUT.d,
        KIND=KIND,
        SPAN=LAYOUT.span,
        ROWS=PLAN.rows,
        ASM=PLAN.ptx,
        HINT=STREAM,
    )


@triton.jit
def _parts_of(matrix, row, at, mask, LAYOUT: tl.constexpr, SPAN: tl.constexpr, PLAN: tl.constexpr):
    """SPAN groups of a block of rows, in the parts that are loaded at once: [part][row]."""
    PARTS: tl.constexpr = SPAN // LAYOUT.span
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (block_of_rows(matrix, row, at * PARTS + i, mask, LAYOUT, PLAN),)
    return parts


@triton.constexpr_function
def span_of_both(first, second):
    """Groups a thread takes at a time of two matrices over one K; the second may be None."""
    return max(layout.span for layout in (first, second) if layout is not None)


@triton.constexpr_function
def same_kind(first, second):
    """Whether rows of both matrices can be multiplied as those of one."""
    return second is None or first.format == second.format


@triton.jit
def _parts_of_both(
    first, second, row, at, mask, FIRST: tl.constexpr, SECOND: tl.constexpr, PLAN: tl.constexpr
):
    """A block of rows of each matrix: [part][row], rows of one format beside each other."""
    SPAN: tl.constexpr = span_of_both(FIRST, SECOND)
    parts = _parts_of(first, row, at, mask, FIRST, SPAN, PLAN)
    if SECOND is not None:
        others = _parts_of(second, row, at, mask, SECOND, SPAN, PLAN)
        if same_kind(FIRST, SECOND):
            both = ()
            for i in tl.static_range(len(parts)):
                both += (parts[i] + others[i],)
            parts = both
        else:
            parts += others
    return parts


@triton.jit
def part_of(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT entries of a tuple from FIRST on."""
    part = ()
    for i in tl.static_range(COUNT):
        part += (values[FIRST + i],)
    return part


@triton.jit
def no_totals(THREADS: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr):
    """Zeros [row][token], float32 [THREADS] each."""
    totals = ()
    for _r in tl.static_range(COUNT):
        each = ()
        for _m in tl.static_range(M):
            each += (tl.zeros([THREADS], tl.float32),)
        totals += (each,)
    return totals


@triton.jit
def _add_parts(
    totals, zero, parts, integers, a, group, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr
):
    """totals[row][token] plus the products of parts [part][row] of one format.

    Args:
        zero: a 0 to start sums at, int32 [threads].
        integers: activations, of ``integers_of``; None of float32 ones, which are read here.
        a: Activations.
        group: first group of the parts, [threads].
        mask: groups that there are, [threads] or None.
    """
    KIND: tl.constexpr = LAYOUT.format
    ROWS: tl.constexpr = len(totals)
    SPAN: tl.constexpr = LAYOUT.span
    for i in tl.static_range(len(parts)):
        if integers is None:
            for j in tl.static_range(SPAN):
                rows = ()
                for r in tl.static_range(ROWS):
                    rows += (group_of(parts[i][r], j, KIND, SPAN),)
                totals = add_group(
                    totals,
                    zero,
                    rows,
                    a.ptr,
                    a.stride,
                    group + (SPAN * i + j),
                    mask,
                    KIND=KIND,
                    ROWS=ROWS,
                    M=PLAN.tokens,
                    VECTOR=PLAN.wide,
                    ASM=PLAN.ptx,
                )
        else:
            groups = part_of(integers, SPAN * i, SPAN)
            totals = add_integers_to(totals, zero, parts[i], groups, a, KIND, PLAN)
    return totals


@triton.jit
def add_integers_to(totals, zero, rows, groups, a, KIND: tl.constexpr, PLAN: tl.constexpr):
    """totals[row][token] plus the products of what a thread took of rows of one format."""
    return add_integers(
        totals,
        zero,
        rows,
        groups,
        KIND=KIND,
        ROWS=len(totals),
        M=PLAN.tokens,
        SAME=a.scales_and_sums_ptr is None,
        ASM=PLAN.ptx,
    )


@triton.jit
def wait_and_trigger(PLAN: tl.constexpr, PDL: tl.constexpr):
    """Wait for the launches before, then let the next one begin where that is to be late."""
    pdl_wait(PDL)
    if PLAN.late_trigger:
        pdl_trigger(PDL)


@triton.jit
def row_sums(
    a,
    first,
    second,
    row,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activations by a block of rows of one or two matrices: [row][token], [threads] each.

    What the threads hold is to be added up. Rows of the second matrix follow those of the first.

    Args:
        a: Activations.
        first, second: Matrix, over one K and of as many rows; the second of any content where
            SECOND is None.
        row: first row, int64.
        FIRST, SECOND: layouts.
        PDL: weights are loaded before the PDL wait.
    """
    THREADS: tl.constexpr = PLAN.threads
    M: tl.constexpr = PLAN.tokens
    SPAN: tl.constexpr = span_of_both(FIRST, SECOND)
    SPANS: tl.constexpr = PLAN.groups // SPAN
    STEPS: tl.constexpr = (SPANS + THREADS - 1) // THREADS
    COUNT: tl.constexpr = PLAN.rows if SECOND is None else 2 * PLAN.rows
    zero = first.num_rows >> 31  # 0, but the compiler cannot know it
    thread = tl.arange(0, THREADS)

    totals = no_totals(THREADS, COUNT, PLAN.tokens)
    if PLAN.prefetch:
        rows = _parts_of_both(first, second, row, thread, thread < SPANS, FIRST, SECOND, PLAN)
    for step in range(STEPS):
        at = step * THREADS + thread
        mask = at < SPANS
        if SPANS % THREADS == 0:
            mask = None
        if PLAN.prefetch:
            ahead = at + THREADS
            later = _parts_of_both(first, second, row, ahead, ahead < SPANS, FIRST, SECOND, PLAN)
        else:
            rows = _parts_of_both(first, second, row, at, mask, FIRST, SECOND, PLAN)
        if PDL:
            if step == 0:
                wait_and_trigger(PLAN, PDL)
        if PLAN.ordered:
            start = tied_zero(rows, zero)
        else:
            start = tl.zeros([THREADS], tl.int32)
        integers = None
        if PLAN.integers:
            loaded = load_activations(a, at, mask, M, SPAN, PLAN.wide, PLAN.ptx)
            integers = integers_of(loaded, a, M, SPAN, PLAN.wide, PLAN.ptx)
        if same_kind(FIRST, SECOND):
            totals = _add_parts(totals, start, rows, integers, a, at * SPAN, mask, FIRST, PLAN)
        else:
            OWN: tl.constexpr = SPAN // FIRST.span
            mine = part_of(totals, 0, PLAN.rows)
            others = part_of(totals, PLAN.rows, PLAN.rows)
            of_second = part_of(rows, OWN, len(rows) - OWN)
            rows_of_first = part_of(rows, 0, OWN)
            mine = _add_parts(mine, start, rows_of_first, integers, a, at * SPAN, mask, FIRST, PLAN)
            others = _add_parts(
                others, start, of_second, integers, a, at * SPAN, mask, SECOND, PLAN
            )
            totals = mine + others
        if PLAN.prefetch:
            rows = later
    if not PLAN.integers:
        scaled = ()
        for r in tl.static_range(COUNT):
            each = ()
            for m in tl.static_range(M):
                each += (totals[r][m] * LARGE,)
            scaled += (each,)
        totals = scaled
    return totals
