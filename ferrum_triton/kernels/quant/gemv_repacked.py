"""One or two tokens by weights in the repacked layout: y = a · Wᵀ + bias + residual.

Chosen for up to two tokens, whose product takes as long as W is read, and for up to eight that the
tensor cores' kernels do not take: float32 activations, rows of other than whole blocks of 256.

The threads of a program lie along K. Each takes one or two groups of 32 weights of every row of a
block of rows, multiplies them by activations that are integers of 16 bits, and keeps float32 sums,
which are added up over the threads at the end. A program takes one block of rows; or it is
persistent, keeps its activations in registers, and loads a block while it multiplies another.

One launch takes one matrix, up to three side by side (Q, K and V), or gate and up with the
activation between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.int16 import Int16Activations
from ferrum_triton.kernels.quant.integer_activations import integers_of, load_activations
from ferrum_triton.kernels.quant.integer_groups import add_integers
from ferrum_triton.kernels.quant.plane_groups import LARGE, add_group
from ferrum_triton.kernels.quant.planes import (
    group_of,
    is_aligned,
    load_rows,
    row_sizes,
    span_of,
    tied_zero,
    uses_ptx,
)
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind

# Weights are read once: they leave the first-level cache to the activations.
STREAM = tl.constexpr(".L1::evict_first")
# Sums of a persistent program that are reduced together at most: more find no registers.
MOST_SUMS = 32


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


class Activations(NamedTuple):
    """Rows of activations.

    Attributes:
        ptr: [m, k] floats; or codes, int32 [m, k / 2].
        scales_and_sums_ptr: int32 [m, k / 32, 4] of codes; None of floats.
        stride, scales_and_sums_stride: elements from one token to the next.
    """

    ptr: Any
    scales_and_sums_ptr: Any
    stride: Any
    scales_and_sums_stride: Any


class Matrix(NamedTuple):
    """W [num_rows, k] in the repacked layout; ``ptr`` None where there is no such matrix."""

    ptr: Any
    num_rows: Any


class Part(NamedTuple):
    """One program's share of a launch.

    Attributes:
        matrix: Matrix that its rows belong to.
        block: number of its block of rows in the matrix.
        column: column of y where the matrix' products start.
        number: number of the matrix.
    """

    matrix: Any
    block: Any
    column: Any
    number: Any


class Output(NamedTuple):
    """Where products go: y [m, n], and what is added to them where it is not None."""

    ptr: Any
    bias_ptr: Any
    residual_ptr: Any
    stride: Any
    residual_stride: Any


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
def _block_of_rows(matrix, row, at, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr):
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
        parts += (_block_of_rows(matrix, row, at * PARTS + i, mask, LAYOUT, PLAN),)
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
            totals = _add_integers(totals, zero, parts[i], groups, a, KIND, PLAN)
    return totals


@triton.jit
def _add_integers(totals, zero, rows, groups, a, KIND: tl.constexpr, PLAN: tl.constexpr):
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
def _load(a, at, mask, SPAN: tl.constexpr, PLAN: tl.constexpr):
    """SPAN groups of activations as they are stored."""
    return load_activations(
        a.ptr,
        a.scales_and_sums_ptr,
        a.stride,
        a.scales_and_sums_stride,
        at,
        mask,
        M=PLAN.tokens,
        SPAN=SPAN,
        VECTOR=PLAN.wide,
        ASM=PLAN.ptx,
    )


@triton.jit
def _as_integers(loaded, a, SPAN: tl.constexpr, PLAN: tl.constexpr):
    """Those groups as integers."""
    return integers_of(loaded, a.ptr, a.scales_and_sums_ptr, PLAN.tokens, SPAN, PLAN.wide, PLAN.ptx)


@triton.jit
def _wait_and_trigger(PLAN: tl.constexpr, PDL: tl.constexpr):
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
                _wait_and_trigger(PLAN, PDL)
        if PLAN.ordered:
            start = tied_zero(rows, zero)
        else:
            start = tl.zeros([THREADS], tl.int32)
        integers = None
        if PLAN.integers:
            integers = _as_integers(_load(a, at, mask, SPAN, PLAN), a, SPAN, PLAN)
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


@triton.jit
def store_each(y, out, token, row, mask):
    """out.ptr[token[i], row[i]] ← y[i] + bias + residual where the mask holds."""
    token = token.to(tl.int64)
    if out.bias_ptr is not None:
        y += tl.load(out.bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if out.residual_ptr is not None:
        residual = out.residual_ptr + token * out.residual_stride + row
        y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out.ptr + token * out.stride + row, y.to(out.ptr.dtype.element_ty), mask=mask)


@triton.constexpr_function
def padded(count):
    """The power of two from ``count`` on."""
    return triton.next_power_of_2(count)


@triton.jit
def _store_block(totals, out, first, PLAN: tl.constexpr):
    """Totals [row][token] added up over the threads, and stored to the rows from ``first`` on."""
    M: tl.constexpr = PLAN.tokens
    ROWS: tl.constexpr = PLAN.rows
    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, padded(PLAN.rows * M), PLAN.ptx)
    i = tl.arange(0, padded(PLAN.rows * M))
    store_each(y, out, i % M, first + i // M, i < PLAN.rows * M)


@triton.jit
def _store_gate_up(totals, out, first, ACTIVATION: tl.constexpr, PLAN: tl.constexpr):
    """act(gate) · up of totals [row][token], gate's rows before up's, likewise."""
    M: tl.constexpr = PLAN.tokens
    ROWS: tl.constexpr = PLAN.rows
    SUMS: tl.constexpr = padded(ROWS * M)
    # A product of gate beside that of up, so that one exchange of threads does for both.
    flat = ()
    for r in tl.static_range(ROWS):
        for m in tl.static_range(M):
            flat += (totals[r][m], totals[ROWS + r][m])
    gate, up = tl.split(tl.reshape(summed(flat, 2 * SUMS, PLAN.ptx), (SUMS, 2)))
    i = tl.arange(0, SUMS)
    y = activated(gate, ACTIVATION) * up
    store_each(y, out, i % M, first + i // M, i < PLAN.rows * M)


@triton.jit
def _one_block(out, a, part, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr):
    """One block of rows of one matrix."""
    first = first_row(part.block, part.matrix.num_rows, PLAN.rows)
    totals = row_sums(a, part.matrix, part.matrix, first, LAYOUT, None, PLAN, PDL)
    _store_block(totals, out, part.column + first, PLAN)


@triton.jit
def part_of_grid(matrices, ROWS: tl.constexpr):
    """Part of a launch whose programs take blocks of ROWS rows of three matrices side by side.

    The last matrix may have no rows.
    """
    block = tl.program_id(0)
    first, second, third = matrices
    start_2 = tl.cdiv(first.num_rows, ROWS)
    start_3 = start_2 + tl.cdiv(second.num_rows, ROWS)
    ptr, num_rows, start, column, number = first.ptr, first.num_rows, 0, 0, 0
    if block >= start_3:
        ptr, num_rows, start, number = third.ptr, third.num_rows, start_3, 2
        column = first.num_rows + second.num_rows
    elif block >= start_2:
        ptr, num_rows, start, number = second.ptr, second.num_rows, start_2, 1
        column = first.num_rows
    return Part(Matrix(ptr, num_rows), block - start, column, number)


@triton.jit
def _side_by_side(
    out,
    a,
    matrices,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of one of three matrices."""
    part = part_of_grid(matrices, PLAN.rows)
    # Matrices of one layout share one copy of the code, which then compiles once.
    if FIRST == SECOND and SECOND == THIRD:
        _one_block(out, a, part, FIRST, PLAN, PDL)
    elif part.number == 0:
        _one_block(out, a, part, FIRST, PLAN, PDL)
    elif SECOND == THIRD:
        _one_block(out, a, part, SECOND, PLAN, PDL)
    elif part.number == 1:
        _one_block(out, a, part, SECOND, PLAN, PDL)
    else:
        _one_block(out, a, part, THIRD, PLAN, PDL)


@triton.jit
def _persistent(out, a, matrix, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr):
    """Every so many blocks of rows of a matrix, each reduced by itself."""
    THREADS: tl.constexpr = PLAN.threads
    thread = tl.arange(0, THREADS)
    mask = thread < PLAN.groups // LAYOUT.span
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (matrix.num_rows + PLAN.rows - 1) // PLAN.rows
    zero = tl.zeros([THREADS], tl.int32)
    KIND: tl.constexpr = LAYOUT.format

    first = first_row(program, matrix.num_rows, PLAN.rows)
    rows = _block_of_rows(matrix, first, thread, mask, LAYOUT, PLAN)
    _wait_and_trigger(PLAN, PDL)
    integers = _as_integers(_load(a, thread, mask, LAYOUT.span, PLAN), a, LAYOUT.span, PLAN)
    for block in range(program, blocks, programs):
        after = block + programs
        first = first_row(after, matrix.num_rows, PLAN.rows)
        later = _block_of_rows(matrix, first, thread, mask & (after < blocks), LAYOUT, PLAN)
        totals = no_totals(THREADS, PLAN.rows, PLAN.tokens)
        totals = _add_integers(totals, zero, rows, integers, a, KIND, PLAN)
        _store_block(totals, out, first_row(block, matrix.num_rows, PLAN.rows), PLAN)
        rows = later


@triton.jit
def _persistent_deferred(
    out, a, matrix, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """The same for few blocks a program, all reduced at its end: warps never wait for each other.

    Only the last block may be missing.
    """
    KIND: tl.constexpr = LAYOUT.format
    PARTS: tl.constexpr = PLAN.groups // LAYOUT.span
    M: tl.constexpr = PLAN.tokens
    ROWS: tl.constexpr = PLAN.rows
    DEFERRED: tl.constexpr = PLAN.deferred
    SUMS: tl.constexpr = padded(DEFERRED * ROWS * M)
    THREADS: tl.constexpr = PLAN.threads
    thread = tl.arange(0, THREADS)
    mask = thread < PARTS
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (matrix.num_rows + PLAN.rows - 1) // PLAN.rows

    # Threads beyond the last group take that one again. What they sum up is left out.
    inside = tl.minimum(thread, PARTS - 1)
    first = first_row(program, matrix.num_rows, PLAN.rows)
    queue = (_block_of_rows(matrix, first, inside, None, LAYOUT, PLAN),)
    _wait_and_trigger(PLAN, PDL)
    loaded = _load(a, inside, None, LAYOUT.span, PLAN)
    integers, flat, at = (), (), inside
    zero = matrix.num_rows >> 31  # 0, but the compiler cannot know it
    none = tl.zeros([THREADS], tl.int32)
    for step in tl.static_range(DEFERRED):
        if step + 1 < PLAN.deferred:
            block = program + (step + 1) * programs
            known = None
            if step + 2 == PLAN.deferred:
                known = tl.full([THREADS], 1, tl.int1) & (block < blocks)
            first = first_row(block, matrix.num_rows, PLAN.rows)
            queue += (_block_of_rows(matrix, first, at, known, LAYOUT, PLAN),)
        if step == 0:
            integers = _as_integers(loaded, a, LAYOUT.span, PLAN)
        totals = no_totals(THREADS, PLAN.rows, M)
        totals = _add_integers(totals, none, queue[step], integers, a, KIND, PLAN)
        if PLAN.ordered:
            # The compiler would move the next but one block's loads of scales up here, and find
            # no registers for its weights.
            at = inside + (totals[PLAN.rows - 1][0].to(tl.int32, bitcast=True) & zero)
        for r in tl.static_range(ROWS):
            flat += totals[r]
    if PARTS == THREADS:
        mask = None
    y = summed(flat, SUMS, PLAN.ptx, mask, PARTS % 32 == 0)
    i = tl.arange(0, SUMS)
    block = program + i // (M * PLAN.rows) * programs
    row = first_row(block, matrix.num_rows, PLAN.rows) + i // M % PLAN.rows
    store_each(y, out, i % M, row, (i < PLAN.deferred * M * PLAN.rows) & (block < blocks))


@kernel(dynamic=("num_rows", "num_rows_2", "num_rows_3"))
def _gemv_repacked_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k], or codes [m, k / 2]
    scales_and_sums_ptr,  # int32 [m, k / 32, 4] of codes, else None
    planes_ptr,  # uint8 [num_rows, row_bytes]
    planes_2_ptr,  # uint8 [num_rows_2, row_bytes], or None
    planes_3_ptr,  # uint8 [num_rows_3, row_bytes], or None
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_a_token,
    stride_scales_and_sums_token,
    stride_residual_token,
    num_rows,
    num_rows_2,
    num_rows_3,
    LAYOUT: tl.constexpr,
    LAYOUT_2: tl.constexpr,  # None where there is one matrix
    LAYOUT_3: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gate, the first matrix; "" for matrices side by side
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if not PLAN.late_trigger:
        pdl_trigger(PDL)
    out = Output(y_ptr, bias_ptr, residual_ptr, stride_y_token, stride_residual_token)
    a = Activations(a_ptr, scales_and_sums_ptr, stride_a_token, stride_scales_and_sums_token)
    matrix = Matrix(planes_ptr, num_rows)
    if ACTIVATION != "":
        first = first_row(tl.program_id(0), num_rows, PLAN.rows)
        up = Matrix(planes_2_ptr, num_rows)
        totals = row_sums(a, matrix, up, first, LAYOUT, LAYOUT_2, PLAN, PDL)
        _store_gate_up(totals, out, first, ACTIVATION, PLAN)
    elif LAYOUT_2 is not None:
        matrices = (matrix, Matrix(planes_2_ptr, num_rows_2), Matrix(planes_3_ptr, num_rows_3))
        _side_by_side(out, a, matrices, LAYOUT, LAYOUT_2, LAYOUT_3, PLAN, PDL)
    elif PLAN.deferred > 0:
        _persistent_deferred(out, a, matrix, LAYOUT, PLAN, PDL)
    elif PLAN.persistent:
        _persistent(out, a, matrix, LAYOUT, PLAN, PDL)
    else:
        part = Part(matrix, tl.program_id(0), 0, 0)
        _one_block(out, a, part, LAYOUT, PLAN, PDL)


def launch_gemv(
    a: Tensor | Int16Activations,
    parts: Sequence[tuple[Tensor, str]],
    config: Config,
    out: Tensor,
    *,
    activation: str = "",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, summed in float32, for m <= 8.

    Args:
        a: activations [m, k]: float32 of magnitudes below 2^41, float16 or bfloat16, which become
            integers of 16 bits; or what ``int16_activations`` made of them.
        parts: one to three matrices side by side, or gate and up: uint8 [rows, row_bytes] in
            planes, and a kind such as ``"Q4_K:planes"``.
        config: launch choice of path ``"gemv"`` or ``"persistent"``.
        out: products, [m, n], of at least one element.
        activation: what gate passes through, ``"silu"`` or ``"gelu_tanh"``.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
    """
    if isinstance(a, Int16Activations):
        x, scales_and_sums, k = a.codes, a.info, a.num_weights
    else:
        x, scales_and_sums, k = a, None, a.shape[1]
    counts = [planes.shape[0] for planes, _ in parts]
    layouts = [layout_of(planes, kind, k) for planes, kind in parts]
    plan, programs = plan_of(config, layouts, counts, x, k // 32, activation)
    pointers = [planes for planes, _ in parts]
    if len(parts) == 2 and not activation:  # the third has no rows
        pointers, layouts, counts = [*pointers, pointers[1]], [*layouts, layouts[1]], [*counts, 0]
    second, third = (*pointers[1:], None, None)[:2]
    maxnreg = config.get("maxnreg", 0)
    _gemv_repacked_kernel.launch(
        (programs,),
        y_ptr=out,
        a_ptr=x,
        scales_and_sums_ptr=scales_and_sums,
        planes_ptr=pointers[0],
        planes_2_ptr=second,
        planes_3_ptr=third,
        bias_ptr=bias,
        residual_ptr=residual,
        stride_y_token=out.stride(0),
        stride_a_token=x.stride(0),
        stride_scales_and_sums_token=0 if scales_and_sums is None else scales_and_sums.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_rows=counts[0],
        num_rows_2=(*counts, 0)[1],
        num_rows_3=(*counts, 0, 0)[2],
        LAYOUT=layouts[0],
        LAYOUT_2=(*layouts, None)[1],
        LAYOUT_3=(*layouts, None, None)[2],
        ACTIVATION=activation,
        PLAN=plan,
        num_warps=plan.threads // 32,
        **({"maxnreg": maxnreg} if maxnreg else {}),
    )
    return out


def plan_of(
    config: Config,
    layouts: Sequence[Layout],
    counts: Sequence[int],
    x: Tensor,
    groups: int,
    activation: str,
) -> tuple[GemvPlan, int]:
    """What is constant in a launch, and its programs."""
    num_tokens, ptx = x.shape[0], uses_ptx(x)
    fewest = min(count for count in counts if count)
    rows = min(int(config["rows"]), previous_power_of_2(fewest))
    if not ptx:  # AMD's compiler spills with more, and is slow at it
        rows = min(rows, 2 if len(layouts) > 1 else 4 if num_tokens > 2 else rows)
    if activation:
        counts = counts[:1]
    programs = sum(cdiv(count, rows) for count in counts)
    plan = GemvPlan(
        tokens=num_tokens,
        groups=groups,
        rows=rows,
        threads=32 * int(config.get("warps", 1)),
        ordered=ptx and bool(config.get("ordered", True)),
        prefetch=bool(config.get("prefetch", False)),
        late_trigger=bool(config.get("late_trigger", False)),
        integers=x.dtype != torch.float32,
        wide=ptx and is_aligned(x),
        ptx=ptx,
    )
    if config["path"] != "persistent":
        return plan, programs
    blocks, programs = programs, min(programs, processors(x.device) * int(config["ctas_per_sm"]))
    steps = cdiv(blocks, programs)
    deferred = steps if config["deferred"] and steps * rows * num_tokens <= MOST_SUMS else 0
    threads = persistent_threads(groups // layouts[0].span)
    return replace(plan, persistent=True, deferred=deferred, threads=threads), programs


def persistent_threads(parts: int) -> int:
    """Threads of a persistent program, which has all parts of a row at once."""
    return max(next_power_of_2(parts), 32)
