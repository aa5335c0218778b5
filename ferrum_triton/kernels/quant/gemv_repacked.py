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
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger
from ferrum_triton.kernels.quant.gemv_rows import (
    GemvPlan,
    Layout,
    Matrix,
    add_integers_to,
    block_of_rows,
    first_row,
    layout_of,
    no_totals,
    row_sums,
    wait_and_trigger,
)
from ferrum_triton.kernels.quant.integer_activations import (
    Activations,
    Int16Activations,
    integers_of,
    load_activations,
)
from ferrum_triton.kernels.quant.planes import is_aligned, uses_ptx
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2

# Sums of a persistent program that are reduced together at most: more find no registers.
MOST_SUMS = 32


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
    rows = block_of_rows(matrix, first, thread, mask, LAYOUT, PLAN)
    wait_and_trigger(PLAN, PDL)
    SPAN: tl.constexpr = LAYOUT.span
    loaded = load_activations(a, thread, mask, PLAN.tokens, SPAN, PLAN.wide, PLAN.ptx)
    integers = integers_of(loaded, a, PLAN.tokens, SPAN, PLAN.wide, PLAN.ptx)
    for block in range(program, blocks, programs):
        after = block + programs
        first = first_row(after, matrix.num_rows, PLAN.rows)
        later = block_of_rows(matrix, first, thread, mask & (after < blocks), LAYOUT, PLAN)
        totals = no_totals(THREADS, PLAN.rows, PLAN.tokens)
        totals = add_integers_to(totals, zero, rows, integers, a, KIND, PLAN)
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
    queue = (block_of_rows(matrix, first, inside, None, LAYOUT, PLAN),)
    wait_and_trigger(PLAN, PDL)
    SPAN: tl.constexpr = LAYOUT.span
    loaded = load_activations(a, inside, None, M, SPAN, PLAN.wide, PLAN.ptx)
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
            queue += (block_of_rows(matrix, first, at, known, LAYOUT, PLAN),)
        if step == 0:
            integers = integers_of(loaded, a, M, SPAN, PLAN.wide, PLAN.ptx)
        totals = no_totals(THREADS, PLAN.rows, M)
        totals = add_integers_to(totals, none, queue[step], integers, a, KIND, PLAN)
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


def launch_matrices(
    parts: Sequence[tuple[Tensor, str]], layouts: Sequence[Any], is_pair: bool
) -> dict[str, Any]:
    """The arguments of a launch that tell of its matrices.

    Args:
        parts: one to three matrices and their kinds.
        layouts: their layouts, constants of the kernel.
        is_pair: the matrices are gate and up, not side by side.
    """
    pointers: list[Tensor | None] = [planes for planes, _ in parts]
    counts, all_layouts = [planes.shape[0] for planes, _ in parts], list(layouts)
    if len(parts) == 2 and not is_pair:  # the third has no rows
        pointers, counts = [*pointers, pointers[1]], [*counts, 0]
        all_layouts.append(layouts[1])
    missing = 3 - len(pointers)
    pointers += [None] * missing
    counts += [0] * missing
    all_layouts += [None] * missing
    names = ("", "_2", "_3")
    return {
        **{f"planes{name}_ptr": ptr for name, ptr in zip(names, pointers, strict=True)},
        **{f"num_rows{name}": count for name, count in zip(names, counts, strict=True)},
        **{f"LAYOUT{name}": layout for name, layout in zip(names, all_layouts, strict=True)},
    }


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
        x, scales_and_sums, k = a.codes, a.scales_and_sums, a.num_weights
    else:
        x, scales_and_sums, k = a, None, a.shape[1]
    counts = [planes.shape[0] for planes, _ in parts]
    layouts = [layout_of(planes, kind, k) for planes, kind in parts]
    plan, programs = plan_of(config, layouts, counts, x, k // 32, activation)
    maxnreg = config.get("maxnreg", 0)
    _gemv_repacked_kernel.launch(
        (programs,),
        y_ptr=out,
        a_ptr=x,
        scales_and_sums_ptr=scales_and_sums,
        bias_ptr=bias,
        residual_ptr=residual,
        stride_y_token=out.stride(0),
        stride_a_token=x.stride(0),
        stride_scales_and_sums_token=0 if scales_and_sums is None else scales_and_sums.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        **launch_matrices(parts, layouts, bool(activation)),
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
