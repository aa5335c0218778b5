"""One or two tokens by a matrix in planes: y = a · Wᵀ + bias + residual.

Chosen for up to two tokens, whose product takes as long as W is read, and for up to eight that the
tensor cores' kernels do not take: float32 activations, rows of other than whole blocks of 256.

The threads of a program lie along K. Each takes one or two groups of 32 weights of every row of a
block of rows (``planes``), multiplies them by activations that are integers of 16 bits
(``thread_products``) or float32 (``float_groups``), and keeps float32 sums, which are added up over
the threads at the end. A program takes one block of rows; or it is persistent, keeps its
activations in registers, and loads a block while it multiplies another.

Several matrices of a layer (``gemv_fused``), and experts (``moe.plane_gemv``), start from
:func:`row_sums` too; sums over experts (``moe.expert_sum``) from :func:`sums_by_lane`.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.float_groups import add_group, group_of, whole_sums
from ferrum_triton.kernels.quant.gemv_plan import (
    NormOpening,
    Squares,
    closing,
    launch_plan,
    opened_arguments,
)
from ferrum_triton.kernels.quant.half_groups import add_halves
from ferrum_triton.kernels.quant.integer_activations import Int16Activations, load_integers
from ferrum_triton.kernels.quant.planes import (
    Matrix,
    layout_of,
    load_rows,
    tied_zero,
)
from ferrum_triton.kernels.quant.thread_products import (
    Activations,
    add_groups,
    integers_of,
    load_floats,
    no_totals,
)
from ferrum_triton.kernels.quant.thread_sums import (
    Opening,
    OpenNorm,
    Output,
    closed,
    open_norm,
    store_each,
    store_rows,
    summed,
)


@triton.jit
def first_row(block, num_rows, ROWS: tl.constexpr):
    """First row of a block. The last block starts early enough to be whole: some rows twice."""
    return tl.minimum(block * ROWS, num_rows - ROWS).to(tl.int64)


@triton.constexpr_function
def _same_kind(first, second):
    """Whether rows of two layouts can be multiplied as those of one; the second may be None."""
    return second is None or first.format == second.format


@triton.jit
def _load_parts(
    matrix, row, at, mask, LAYOUT: tl.constexpr, SPAN: tl.constexpr, PLAN: tl.constexpr
):
    """SPAN groups of a block of rows, in the parts that are loaded at once: [part][row]."""
    PARTS: tl.constexpr = SPAN // LAYOUT.span
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (load_rows(matrix, row, at * PARTS + i, mask, LAYOUT, PLAN),)
    return parts


@triton.constexpr_function
def _span_of_both(first, second):
    """Groups a thread takes at a time of two matrices over one K; the second may be None."""
    return max(layout.span for layout in (first, second) if layout is not None)


@triton.jit
def _load_both(
    first, second, row, at, mask, FIRST: tl.constexpr, SECOND: tl.constexpr, PLAN: tl.constexpr
):
    """A block of rows of each matrix: [part][row], rows of one format beside each other."""
    SPAN: tl.constexpr = _span_of_both(FIRST, SECOND)
    parts = _load_parts(first, row, at, mask, FIRST, SPAN, PLAN)
    if SECOND is not None:
        others = _load_parts(second, row, at, mask, SECOND, SPAN, PLAN)
        if _same_kind(FIRST, SECOND):
            both = ()
            for i in tl.static_range(len(parts)):
                both += (parts[i] + others[i],)
            parts = both
        else:
            parts += others
    return parts


@triton.jit
def _part_of(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT entries of a tuple from FIRST on."""
    part = ()
    for i in tl.static_range(COUNT):
        part += (values[FIRST + i],)
    return part


@triton.jit
def _add_integers(
    totals, none, rows, groups, SAME: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr
):
    """totals[row][token] plus the products of what a thread took of each row.

    Args:
        none: a 0 to start sums at.
        groups: IntegerGroup of each group that was taken of a row.
        SAME: they have the same step.
    """
    if FORMAT.has_halves and FORMAT.low_bits == 2:
        totals = add_halves(totals, none, rows, groups, SAME, FORMAT, PTX)
    else:
        totals = add_groups(totals, none, rows, groups[0], FORMAT, PTX)
    return totals


@triton.jit
def _add_parts(
    totals, zero, parts, integers, a, group, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr
):
    """totals[row][token] plus the products of parts [part][row] of one format.

    Args:
        zero: a 0 to start sums at, int32 [threads].
        integers: IntegerGroup of each group; None of float32 activations, which are read here.
        a: Activations.
        group: first group of the parts, [threads].
        mask: groups that there are, [threads] or None.
    """
    FORMAT: tl.constexpr = LAYOUT.format
    SPAN: tl.constexpr = LAYOUT.span
    SAME: tl.constexpr = a.scales_and_sums_ptr is None
    for i in tl.static_range(len(parts)):
        if integers is None:
            for j in tl.static_range(SPAN):
                rows = ()
                for r in tl.static_range(len(totals)):
                    rows += (group_of(parts[i][r], j, FORMAT, SPAN),)
                at = group + (SPAN * i + j)
                totals = add_group(totals, zero, rows, a, at, mask, FORMAT, PLAN.wide, PLAN.ptx)
        else:
            groups = _part_of(integers, SPAN * i, SPAN)
            totals = _add_integers(totals, zero, parts[i], groups, SAME, FORMAT, PLAN.ptx)
    return totals


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
    SPAN: tl.constexpr = _span_of_both(FIRST, SECOND)
    SPANS: tl.constexpr = FIRST.groups // SPAN
    STEPS: tl.constexpr = (SPANS + THREADS - 1) // THREADS
    COUNT: tl.constexpr = PLAN.rows if SECOND is None else 2 * PLAN.rows
    zero = first.num_rows >> 31  # 0, but the compiler cannot know it
    thread = tl.arange(0, THREADS)

    totals = no_totals(THREADS, COUNT, M)
    if PLAN.prefetch:
        rows = _load_both(first, second, row, thread, thread < SPANS, FIRST, SECOND, PLAN)
    for step in range(STEPS):
        at = step * THREADS + thread
        mask = at < SPANS
        if SPANS % THREADS == 0:
            mask = None
        if PLAN.prefetch:
            ahead = at + THREADS
            later = _load_both(first, second, row, ahead, ahead < SPANS, FIRST, SECOND, PLAN)
        else:
            rows = _load_both(first, second, row, at, mask, FIRST, SECOND, PLAN)
        if PDL:
            if step == 0:
                _wait_and_trigger(PLAN, PDL)
        if PLAN.ordered:
            start = tied_zero(rows, zero)
        else:
            start = tl.zeros([THREADS], tl.int32)
        integers = None
        if PLAN.integers:
            if a.scales_and_sums_ptr is None:
                floats = load_floats(a, at, mask, M, SPAN, PLAN.wide)
                integers = integers_of(floats, a.ptr.dtype.element_ty, SPAN, PLAN.wide, PLAN.ptx)
            else:
                integers = load_integers(a, at, mask, M, SPAN, PLAN.ptx)
        if _same_kind(FIRST, SECOND):
            totals = _add_parts(totals, start, rows, integers, a, at * SPAN, mask, FIRST, PLAN)
        else:
            OWN: tl.constexpr = SPAN // FIRST.span
            mine = _part_of(totals, 0, PLAN.rows)
            others = _part_of(totals, PLAN.rows, PLAN.rows)
            of_second = _part_of(rows, OWN, len(rows) - OWN)
            rows_of_first = _part_of(rows, 0, OWN)
            mine = _add_parts(mine, start, rows_of_first, integers, a, at * SPAN, mask, FIRST, PLAN)
            others = _add_parts(
                others, start, of_second, integers, a, at * SPAN, mask, SECOND, PLAN
            )
            totals = mine + others
        if PLAN.prefetch:
            rows = later
    if not PLAN.integers:
        totals = whole_sums(totals)
    return totals


@triton.jit
def _add_step(totals, zero, rows, a, at, mask, LAYOUT: tl.constexpr, PLAN: tl.constexpr):
    """totals[row][0] plus the products of rows of one matrix, [row], and one token's activations.

    Args:
        zero: 0, which the compiler cannot know.
        at: parts of LAYOUT.span groups, [threads].
        mask: parts that there are, [threads].
    """
    SPAN: tl.constexpr = LAYOUT.span
    if PLAN.ordered:
        start = tied_zero((rows,), zero)
    else:
        start = tl.zeros_like(at)
    integers = None
    if PLAN.integers:
        floats = load_floats(a, at, mask, 1, SPAN, PLAN.wide)
        integers = integers_of(floats, a.ptr.dtype.element_ty, SPAN, PLAN.wide, PLAN.ptx)
    return _add_parts(totals, start, (rows,), integers, a, at * SPAN, mask, LAYOUT, PLAN)


@triton.jit
def sums_by_lane(a, matrix, row, rows, lane, known, LAYOUT: tl.constexpr, PLAN: tl.constexpr):
    """As :func:`row_sums`, of one token; matrices and activations may differ by thread.

    Args:
        a, matrix: Activations and Matrix, whose ``ptr`` may be each thread's own, [threads].
        row: first row, int64.
        rows: what :func:`load_rows` gave of the block for parts ``lane``.
        lane: a thread's place among the PLAN.threads that lie along one K, [threads].
        known: threads that have a matrix, [threads].
    """
    LANES: tl.constexpr = PLAN.threads
    SPANS: tl.constexpr = LAYOUT.groups // LAYOUT.span
    STEPS: tl.constexpr = (SPANS + LANES - 1) // LANES
    zero = matrix.num_rows >> 31  # 0, but the compiler cannot know it
    totals = no_totals(lane.shape[0], PLAN.rows, 1)
    totals = _add_step(totals, zero, rows, a, lane, known & (lane < SPANS), LAYOUT, PLAN)
    for step in range(1, STEPS):
        at = step * LANES + lane
        mask = known & (at < SPANS)
        rows = load_rows(matrix, row, at, mask, LAYOUT, PLAN)
        totals = _add_step(totals, zero, rows, a, at, mask, LAYOUT, PLAN)
    if not PLAN.integers:
        totals = whole_sums(totals)
    return totals


@triton.jit
def one_block(
    out, a, matrix, block, column, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """A block of rows of one matrix, whose products start at a column of y."""
    first = first_row(block, matrix.num_rows, PLAN.rows)
    totals = row_sums(a, matrix, matrix, first, LAYOUT, None, PLAN, PDL)
    store_rows(totals, out, column + first, PLAN.parts, PLAN.ptx)


@triton.jit
def _persistent(out, a, matrix, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr):
    """Every so many blocks of rows of a matrix, each reduced by itself."""
    THREADS: tl.constexpr = PLAN.threads
    FORMAT: tl.constexpr = LAYOUT.format
    SPAN: tl.constexpr = LAYOUT.span
    thread = tl.arange(0, THREADS)
    mask = thread < LAYOUT.groups // SPAN
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (matrix.num_rows + PLAN.rows - 1) // PLAN.rows
    zero = tl.zeros([THREADS], tl.int32)

    first = first_row(program, matrix.num_rows, PLAN.rows)
    rows = load_rows(matrix, first, thread, mask, LAYOUT, PLAN)
    _wait_and_trigger(PLAN, PDL)
    floats = load_floats(a, thread, mask, PLAN.tokens, SPAN, PLAN.wide)
    integers = integers_of(floats, a.ptr.dtype.element_ty, SPAN, PLAN.wide, PLAN.ptx)
    for block in range(program, blocks, programs):
        after = block + programs
        first = first_row(after, matrix.num_rows, PLAN.rows)
        known = mask & (after < blocks)
        later = load_rows(matrix, first, thread, known, LAYOUT, PLAN)
        totals = no_totals(THREADS, PLAN.rows, PLAN.tokens)
        totals = _add_integers(totals, zero, rows, integers, True, FORMAT, PLAN.ptx)
        first = first_row(block, matrix.num_rows, PLAN.rows)
        store_rows(totals, out, first, PLAN.parts, PLAN.ptx)
        rows = later


@triton.jit
def _persistent_deferred(
    out, a, matrix, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """The same for few blocks a program, all reduced at its end: warps never wait for each other.

    Only the last block may be missing. Where a norm is opened none is, and they follow each other.
    """
    FORMAT: tl.constexpr = LAYOUT.format
    SPAN: tl.constexpr = LAYOUT.span
    PARTS: tl.constexpr = LAYOUT.groups // SPAN
    M: tl.constexpr = PLAN.tokens
    ROWS: tl.constexpr = PLAN.rows
    DEFERRED: tl.constexpr = PLAN.deferred
    SUMS: tl.constexpr = triton.next_power_of_2(DEFERRED * ROWS * M)
    THREADS: tl.constexpr = PLAN.threads
    thread = tl.arange(0, THREADS)
    mask = thread < PARTS
    begin, step_blocks = tl.program_id(0), tl.num_programs(0)
    if PLAN.opens:
        begin, step_blocks = begin * DEFERRED, 1
    blocks = (matrix.num_rows + ROWS - 1) // ROWS

    # Threads beyond the last group take that one again. What they sum up is left out.
    inside = tl.minimum(thread, PARTS - 1)
    first = first_row(begin, matrix.num_rows, ROWS)
    queue = (load_rows(matrix, first, inside, None, LAYOUT, PLAN),)
    _wait_and_trigger(PLAN, PDL)
    floats = load_floats(a, inside, None, M, SPAN, PLAN.wide)
    integers, flat, at = (), (), inside
    zero = matrix.num_rows >> 31  # 0, but the compiler cannot know it
    none = tl.zeros([THREADS], tl.int32)
    for step in tl.static_range(DEFERRED):
        if step + 1 < DEFERRED:
            block = begin + (step + 1) * step_blocks
            known = None
            if step + 2 == DEFERRED and not PLAN.opens:
                known = tl.full([THREADS], 1, tl.int1) & (block < blocks)
            first = first_row(block, matrix.num_rows, ROWS)
            queue += (load_rows(matrix, first, at, known, LAYOUT, PLAN),)
        if step == 0:
            integers = integers_of(floats, a.ptr.dtype.element_ty, SPAN, PLAN.wide, PLAN.ptx)
        totals = no_totals(THREADS, ROWS, M)
        totals = _add_integers(totals, none, queue[step], integers, True, FORMAT, PLAN.ptx)
        if PLAN.ordered:
            # The compiler would move the next but one block's loads of scales up here, and find
            # no registers for its weights.
            at = inside + (totals[ROWS - 1][0].to(tl.int32, bitcast=True) & zero)
        for r in tl.static_range(ROWS):
            flat += totals[r]
    if PARTS == THREADS:
        mask = None
    y = summed(flat, SUMS, PLAN.ptx, mask, PARTS % 32 == 0)
    i = tl.arange(0, SUMS)
    y = closed(y, i % M, out.opened, PLAN.parts, M)
    block = begin + i // (M * ROWS) * step_blocks
    row = first_row(block, matrix.num_rows, ROWS) + i // M % ROWS
    y = store_each(y, out, i % M, row, (i < DEFERRED * M * ROWS) & (block < blocks))
    if PLAN.opens:
        open_norm(y, out.opens, begin.to(tl.int64) * ROWS, M)


@kernel(dynamic=("num_rows", "eps"))
def _gemv_repacked_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k], or codes [m, k / 2]
    scales_and_sums_ptr,  # int32 [m, k / 32, 4] of codes, else None
    planes_ptr,  # uint8 [num_rows, row_bytes]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    squares_ptr,  # float32 [m, k / 8] of an open norm of a, or None
    h_ptr,  # [m, n] of an open norm of y, or None
    y_squares_ptr,  # float32 [m, n / 8], or None
    norm_weight_ptr,  # [n], or None
    stride_y_token,
    stride_a_token,
    stride_scales_and_sums_token,
    stride_residual_token,
    stride_squares_token,
    stride_h_token,
    stride_y_squares_token,
    num_rows,
    eps,
    LAYOUT: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if not PLAN.late_trigger:
        pdl_trigger(PDL)
    opened = OpenNorm(squares_ptr, stride_squares_token, eps)
    opens = Opening(h_ptr, stride_h_token, y_squares_ptr, stride_y_squares_token, norm_weight_ptr)
    out = Output(
        y_ptr, bias_ptr, residual_ptr, stride_y_token, stride_residual_token, opened, opens
    )
    a = Activations(a_ptr, stride_a_token, scales_and_sums_ptr, stride_scales_and_sums_token)
    matrix = Matrix(planes_ptr, num_rows)
    if PLAN.deferred > 0:
        _persistent_deferred(out, a, matrix, LAYOUT, PLAN, PDL)
    elif PLAN.persistent:
        _persistent(out, a, matrix, LAYOUT, PLAN, PDL)
    else:
        one_block(out, a, matrix, tl.program_id(0), 0, LAYOUT, PLAN, PDL)


def launch_gemv(
    a: Tensor | Int16Activations,
    planes: Tensor,
    kind: str,
    config: Config,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    opened: Squares | None = None,
    opens: NormOpening | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, summed in float32, for m <= 8.

    Args:
        a: activations [m, k]: float32 of magnitudes below 2^41, float16 or bfloat16, which become
            integers of 16 bits; or, of path ``"gemv"``, what ``int16_activations`` made of them.
        planes: W, uint8 [n, row_bytes].
        kind: W's, such as ``"Q4_K:planes"``.
        config: launch choice of path ``"gemv"`` or ``"persistent"``.
        out: products, [m, n], of at least one element.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
        opened: what a norm of ``a`` is yet to be divided by.
        opens: a norm over y, where :func:`launch_plan` has a plan for that.
    """
    if isinstance(a, Int16Activations):
        x, scales_and_sums, k = a.codes, a.scales_and_sums, 2 * a.codes.shape[1]
    else:
        x, scales_and_sums, k = a, None, a.shape[1]
    num_rows, layout = planes.shape[0], layout_of(planes, kind, k)
    plan, programs = launch_plan(config, x, layout, num_rows, opens is not None)
    maxnreg = config.get("maxnreg", 0)
    _gemv_repacked_kernel.launch(
        (programs,),
        y_ptr=out,
        a_ptr=x,
        scales_and_sums_ptr=scales_and_sums,
        planes_ptr=planes,
        bias_ptr=bias,
        residual_ptr=residual,
        **opened_arguments(opened),
        h_ptr=None if opens is None else opens.h,
        y_squares_ptr=None if opens is None else opens.squares,
        norm_weight_ptr=None if opens is None else opens.weight,
        stride_y_token=out.stride(0),
        stride_a_token=x.stride(0),
        stride_scales_and_sums_token=0 if scales_and_sums is None else scales_and_sums.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        stride_h_token=0 if opens is None else opens.h.stride(0),
        stride_y_squares_token=0 if opens is None else opens.squares.stride(0),
        num_rows=num_rows,
        LAYOUT=layout,
        PLAN=closing(plan, opened),
        num_warps=plan.threads // 32,
        **({"maxnreg": maxnreg} if maxnreg else {}),
    )
    return out
