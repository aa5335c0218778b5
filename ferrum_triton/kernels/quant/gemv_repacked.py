"""One or two tokens by a matrix in planes: y = a · Wᵀ + bias + residual.

Chosen for up to two tokens, whose product takes as long as W is read, and for up to eight that the
tensor cores' kernels do not take: float32 activations, rows of other than whole blocks of 256.

The threads of a program lie along K. Each takes one or two groups of 32 weights of every row of a
block of rows (``planes``), multiplies them by activations that are integers of 16 bits
(``thread_products``) or float32 (``float_groups``), and keeps float32 sums, which are added up over
the threads at the end. A program takes one block of rows; or it is persistent, keeps its
activations in registers, and loads a block while it multiplies another.

Several matrices of a layer (``gemv_fused``), and experts (``moe.plane_gemv``), start from
:func:`row_sums` too.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.float_groups import add_group, group_of, whole_sums
from ferrum_triton.kernels.quant.half_groups import add_halves
from ferrum_triton.kernels.quant.integer_activations import Int16Activations, load_integers
from ferrum_triton.kernels.quant.planes import (
    Layout,
    Matrix,
    is_aligned,
    layout_of,
    load_rows,
    tied_zero,
    uses_ptx,
)
from ferrum_triton.kernels.quant.thread_products import (
    Activations,
    Output,
    add_groups,
    integers_of,
    load_floats,
    no_totals,
    store_each,
    store_rows,
    summed,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2

# Sums of a persistent program that are reduced together at most: more find no registers.
MOST_SUMS = 32


@dataclass(frozen=True)
class GemvPlan:
    """What is constant in a launch.

    Attributes:
        tokens: rows of activations.
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
        parts += (load_rows(matrix, row, at * PARTS + i, mask, LAYOUT, PLAN.rows, PLAN.ptx),)
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
def one_block(
    out, a, matrix, block, column, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """A block of rows of one matrix, whose products start at a column of y."""
    first = first_row(block, matrix.num_rows, PLAN.rows)
    totals = row_sums(a, matrix, matrix, first, LAYOUT, None, PLAN, PDL)
    store_rows(totals, out, column + first, PLAN.ptx)


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
    rows = load_rows(matrix, first, thread, mask, LAYOUT, PLAN.rows, PLAN.ptx)
    _wait_and_trigger(PLAN, PDL)
    floats = load_floats(a, thread, mask, PLAN.tokens, SPAN, PLAN.wide)
    integers = integers_of(floats, a.ptr.dtype.element_ty, SPAN, PLAN.wide, PLAN.ptx)
    for block in range(program, blocks, programs):
        after = block + programs
        first = first_row(after, matrix.num_rows, PLAN.rows)
        known = mask & (after < blocks)
        later = load_rows(matrix, first, thread, known, LAYOUT, PLAN.rows, PLAN.ptx)
        totals = no_totals(THREADS, PLAN.rows, PLAN.tokens)
        totals = _add_integers(totals, zero, rows, integers, True, FORMAT, PLAN.ptx)
        store_rows(totals, out, first_row(block, matrix.num_rows, PLAN.rows), PLAN.ptx)
        rows = later


@triton.jit
def _persistent_deferred(
    out, a, matrix, LAYOUT: tl.constexpr, PLAN: tl.constexpr, PDL: tl.constexpr
):
    """The same for few blocks a program, all reduced at its end: warps never wait for each other.

    Only the last block may be missing.
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
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (matrix.num_rows + ROWS - 1) // ROWS

    # Threads beyond the last group take that one again. What they sum up is left out.
    inside = tl.minimum(thread, PARTS - 1)
    first = first_row(program, matrix.num_rows, ROWS)
    queue = (load_rows(matrix, first, inside, None, LAYOUT, ROWS, PLAN.ptx),)
    _wait_and_trigger(PLAN, PDL)
    floats = load_floats(a, inside, None, M, SPAN, PLAN.wide)
    integers, flat, at = (), (), inside
    zero = matrix.num_rows >> 31  # 0, but the compiler cannot know it
    none = tl.zeros([THREADS], tl.int32)
    for step in tl.static_range(DEFERRED):
        if step + 1 < DEFERRED:
            block = program + (step + 1) * programs
            known = None
            if step + 2 == DEFERRED:
                known = tl.full([THREADS], 1, tl.int1) & (block < blocks)
            first = first_row(block, matrix.num_rows, ROWS)
            queue += (load_rows(matrix, first, at, known, LAYOUT, ROWS, PLAN.ptx),)
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
    block = program + i // (M * ROWS) * programs
    row = first_row(block, matrix.num_rows, ROWS) + i // M % ROWS
    store_each(y, out, i % M, row, (i < DEFERRED * M * ROWS) & (block < blocks))


@kernel(dynamic=("num_rows",))
def _gemv_repacked_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k], or codes [m, k / 2]
    scales_and_sums_ptr,  # int32 [m, k / 32, 4] of codes, else None
    planes_ptr,  # uint8 [num_rows, row_bytes]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_a_token,
    stride_scales_and_sums_token,
    stride_residual_token,
    num_rows,
    LAYOUT: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if not PLAN.late_trigger:
        pdl_trigger(PDL)
    out = Output(y_ptr, bias_ptr, residual_ptr, stride_y_token, stride_residual_token)
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
    """
    if isinstance(a, Int16Activations):
        x, scales_and_sums, k = a.codes, a.scales_and_sums, 2 * a.codes.shape[1]
    else:
        x, scales_and_sums, k = a, None, a.shape[1]
    num_rows, layout = planes.shape[0], layout_of(planes, kind, k)
    plan = plan_of(config, x, x.shape[0], num_rows)
    programs = cdiv(num_rows, plan.rows)
    if config["path"] == "persistent":
        plan, programs = _persistent_plan(config, plan, layout, programs, x)
    maxnreg = config.get("maxnreg", 0)
    _gemv_repacked_kernel.launch(
        (programs,),
        y_ptr=out,
        a_ptr=x,
        scales_and_sums_ptr=scales_and_sums,
        planes_ptr=planes,
        bias_ptr=bias,
        residual_ptr=residual,
        stride_y_token=out.stride(0),
        stride_a_token=x.stride(0),
        stride_scales_and_sums_token=0 if scales_and_sums is None else scales_and_sums.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_rows=num_rows,
        LAYOUT=layout,
        PLAN=plan,
        num_warps=plan.threads // 32,
        **({"maxnreg": maxnreg} if maxnreg else {}),
    )
    return out


def plan_of(config: Config, x: Tensor, num_tokens: int, fewest: int) -> GemvPlan:
    """The plan of a launch whose programs each take ``num_tokens`` tokens of ``x``.

    Args:
        fewest: rows of the smallest matrix.
    """
    ptx = uses_ptx(x)
    rows = min(int(config["rows"]), previous_power_of_2(fewest))
    if not ptx and num_tokens > 2:  # AMD's compiler spills with more, and is slow at it
        rows = min(rows, 4)
    return GemvPlan(
        tokens=num_tokens,
        rows=rows,
        threads=32 * int(config.get("warps", 1)),
        ordered=ptx and bool(config.get("ordered", True)),
        prefetch=bool(config.get("prefetch", False)),
        late_trigger=bool(config.get("late_trigger", False)),
        integers=x.dtype != torch.float32,
        wide=ptx and is_aligned(x),
        ptx=ptx,
    )


def _persistent_plan(
    config: Config, plan: GemvPlan, layout: Layout, blocks: int, x: Tensor
) -> tuple[GemvPlan, int]:
    """A plan of persistent programs, and their number."""
    programs = min(blocks, processors(x.device) * int(config["ctas_per_sm"]))
    steps = cdiv(blocks, programs)
    deferred = steps if config["deferred"] and steps * plan.rows * plan.tokens <= MOST_SUMS else 0
    threads = persistent_threads(layout.groups // layout.span)
    return replace(plan, persistent=True, deferred=deferred, threads=threads), programs


def persistent_threads(parts: int) -> int:
    """Threads of a persistent program, which has all parts of a row at once."""
    return max(next_power_of_2(parts), 32)
