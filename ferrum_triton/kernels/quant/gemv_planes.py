"""Few activations by weights in planes: one program some rows, its threads all along K.

Every byte of a plane is read once, for all activations; each thread keeps float32 partial sums,
which meet once, at the end. K and the strides of rows are constants, so that the rows of a program
differ by an immediate of their loads' addresses.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.int8 import Int8Activations
from ferrum_triton.kernels.quant.int16 import Int16Activations
from ferrum_triton.kernels.quant.integer_activations import integers_of, load_activations
from ferrum_triton.kernels.quant.integer_groups import add_integers
from ferrum_triton.kernels.quant.matrix_parts import (
    entry,
    layout_of,
    part_of,
    rows_of,
    span_of_both,
)
from ferrum_triton.kernels.quant.plane_groups import LARGE, add_group
from ferrum_triton.kernels.quant.planes import (
    MANY_GROUPS,
    group_of,
    is_aligned,
    may_chain,
    span_of,
    tied_zero,
    uses_ptx,
)
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.ops import quant_int8 as ops
from ferrum_triton.quant.kinds import file_kind

# Weights are read once: they leave the first-level cache to the activations.
STREAM = ".L1::evict_first"
# Rows of W up to which they are few, and from which on they are many, and most: the tiles differ.
FEW_ROWS, MANY_ROWS, MOST_ROWS = 2048, 8192, 16384
# Of 32 weights: four warps take such a row, or a shorter one, in one step.
STEP_GROUPS = 128


class Tile(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: of W a program, a power of two, at most n.
        warps: of a program.
        prefetch: load a step's weights before the step before is computed.
        chained: let the launch begin, and load weights, while the one before ends: that one may
            write the activations but not the weights. For GPUs of capability 9.0 or more.
        late: of a chained launch, let the next one begin when the one before has ended, not at
            once. Programs of three launches take processors unevenly, which costs one that runs all
            its programs at once up to a fifth of its time; one with more programs gains by it.
    """

    rows: int
    warps: int
    prefetch: bool = False
    chained: bool = True
    late: bool = False


@lru_cache(maxsize=4096)
def tile_of(kind: str, num_rows: int, num_groups: int, num_tokens: int, bits: int = 16) -> Tile:
    """The fastest of those that ``bench.quant_tiles`` timed at its sizes, or nearly.

    Args:
        kind: of the weights, as in the file.
        num_rows: of W.
        num_groups: of 32 weights in a row.
        num_tokens: up to 8.
        bits: of an activation: 8, 16 or 32.
    """
    is_long, is_tall = num_groups > MANY_GROUPS, num_rows >= MOST_ROWS
    if bits == 16:
        tile = _tile_for_int16(kind, num_rows, num_groups, num_tokens)
    elif num_tokens > 2:
        # Four rows of Q3_K would spill by float32 activations.
        are_two = num_tokens > 4 or (kind == "Q3_K" and bits == 32)
        tile = Tile(2 if are_two else 4, 1)
    elif num_tokens == 2:
        tile = Tile(4, 2) if bits == 8 else Tile(8, 2)
    elif is_tall and not is_long:
        tile = Tile(8, 2) if bits == 8 else Tile(8, 4)
    elif kind == "Q8_0":
        tile = Tile(8, 4)
    elif is_long and kind in ("Q5_K", "Q6_K"):
        tile = Tile(4, 2, prefetch=True)
    else:
        tile = Tile(4, 4)
    # Tall matrices wait for memory, short ones for the last of their few programs' passes.
    idle = 1 / 8 if is_tall else (1 / 2 if num_tokens == 1 else 1 / 4)
    return tile._replace(
        rows=min(tile.rows, previous_power_of_2(num_rows)),
        warps=_warps_for(num_groups // span_of(kind, num_groups), tile.warps, idle),
    )


def _tile_for_int16(kind: str, num_rows: int, num_groups: int, num_tokens: int) -> Tile:
    is_long, is_tall = num_groups > MANY_GROUPS, num_rows >= MOST_ROWS
    is_wide, is_step = kind in ("Q5_1", "Q5_K", "Q6_K", "Q8_0"), num_groups <= STEP_GROUPS
    are_many = num_rows >= (MANY_ROWS if is_step else MOST_ROWS)
    if num_tokens > 1 and is_long:
        tile = Tile(4, 2) if is_wide else Tile(8, 4 if num_tokens == 2 else 2)
    elif num_tokens > 1:
        tile = Tile(8, 4)
    elif num_rows < FEW_ROWS:
        tile = Tile(4, 8)
    elif kind in ("Q2_K", "Q3_K"):
        tile = Tile(4 if kind == "Q2_K" and not is_long and not is_tall else 16, 4)
    elif is_long and kind == "Q8_0":
        tile = Tile(8, 2, prefetch=True)
    elif is_long:
        tile = Tile(4, 2, prefetch=True) if is_wide else Tile(8, 4)
    elif STEP_GROUPS // 2 < num_groups <= STEP_GROUPS and not are_many:
        tile = Tile(16, 4)  # of shorter rows there would be too few warps
    elif is_step and (not is_tall or kind in ("Q5_1", "Q5_K")):
        tile = Tile(8, 2)
    else:
        tile = Tile(8, 4)
    return tile._replace(late=not are_many)


def _warps_for(num_spans: int, most: int, idle: float) -> int:
    """As many, or fewer where more than ``idle`` of their threads would have nothing of a row."""
    warps = min(most, next_power_of_2(max(cdiv(num_spans, 32), 1)))
    while warps > 1 and num_spans < (1 - idle) * cdiv(num_spans, 32 * warps) * 32 * warps:
        warps //= 2
    return warps


@triton.jit
def _add_parts(
    totals, none, parts, integers, a_ptr, stride_a_token, group, mask, KIND: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, SAME: tl.constexpr,
    VECTOR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of one kind by activations: ``integers``, or float32 ones where that is None.

    Args:
        group: the first of those that the parts have.
        SAME: integers have the same steps.
    """
    EACH: tl.constexpr = span_of(KIND, GROUPS)
    for i in tl.static_range(len(parts)):
        if integers is None:
            for j in tl.static_range(EACH):
                rows = ()
                for r in tl.static_range(ROWS):
                    rows += (group_of(parts[i][r], j, KIND, EACH),)
                totals = add_group(
                    totals, none, rows, a_ptr, stride_a_token, group + (EACH * i + j), mask, KIND,
                    ROWS, M, VECTOR, ASM,
                )  # fmt: skip
        else:
            groups = part_of(integers, EACH * i, EACH)
            totals = add_integers(totals, none, parts[i], groups, KIND, ROWS, M, SAME, ASM)
    return totals


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
def store_totals(
    y_ptr, totals, stride_y_token, first, bias_ptr, residual_ptr, stride_residual_token,
    M: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum totals [row][token] over threads, and store them as :func:`store_rows` does."""
    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, SUMS, ASM)
    store_rows(
        y_ptr, y, stride_y_token, first, M, ROWS, bias_ptr, residual_ptr, stride_residual_token
    )


@triton.jit
def row_sums(
    a_ptr, info_ptr, first_ptr, second_ptr, stride_a_token, stride_info_token, num_rows, row,
    FIRST: tl.constexpr, SECOND: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr, TIED: tl.constexpr,
    ASM: tl.constexpr, HINT: tl.constexpr, VECTOR: tl.constexpr, NARROW: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Activations by ROWS rows of one or two matrices: [matrix, row][token], [threads] each.

    What threads hold of one product is to be summed.

    Args:
        a_ptr: [m, k]; codes of Int8Activations or Int16Activations where there is info.
        info_ptr: theirs, else None.
        NARROW: a is float16 or bfloat16, which the interpreter widens.
        first_ptr, second_ptr: the matrices, of num_rows rows each.
        row: the first of ROWS, int64.
        FIRST, SECOND: the matrices' layouts, see :func:`entry`; of one matrix SECOND is None.
        GROUPS: of 32 in a row.
        CHAINED: weights are loaded while the launch before may still run; 2 to let the next one
            begin once that has ended, see :class:`Tile`.
    """
    zero = num_rows >> 31  # 0, as no compiler can know
    num_rows = tl.full((), 1, tl.int64) * num_rows
    thread = tl.arange(0, THREADS)
    SPAN: tl.constexpr = span_of_both(FIRST, SECOND, GROUPS)
    SPANS: tl.constexpr = GROUPS // SPAN
    EVEN: tl.constexpr = SPANS % THREADS == 0
    STEPS: tl.constexpr = (SPANS + THREADS - 1) // THREADS
    KIND: tl.constexpr = entry(FIRST, 5)
    COUNT: tl.constexpr = ROWS if SECOND is None else 2 * ROWS

    totals = no_totals(THREADS, COUNT, M)
    if PREFETCH:
        rows = rows_of(
            first_ptr, second_ptr, num_rows, row, thread, thread < SPANS, FIRST, SECOND, GROUPS,
            SPAN, ROWS, ASM, HINT,
        )  # fmt: skip
    for step in range(STEPS):
        at = step * THREADS + thread
        mask = at < SPANS
        if EVEN:
            mask = None
        if PREFETCH:
            ahead = at + THREADS
            later = rows_of(
                first_ptr, second_ptr, num_rows, row, ahead, ahead < SPANS, FIRST, SECOND,
                GROUPS, SPAN, ROWS, ASM, HINT,
            )  # fmt: skip
        else:
            rows = rows_of(
                first_ptr, second_ptr, num_rows, row, at, mask, FIRST, SECOND, GROUPS, SPAN, ROWS,
                ASM, HINT,
            )  # fmt: skip
        if CHAINED:
            if step == 0:
                gdc_wait()
                if CHAINED == 2:
                    gdc_launch_dependents()
        if TIED:
            none = tied_zero(rows, zero)
        else:
            none = tl.zeros([THREADS], tl.int32)
        if info_ptr is None and not NARROW:
            integers = None
        else:
            loaded = load_activations(
                a_ptr, info_ptr, stride_a_token, stride_info_token, at, mask, M, SPAN, VECTOR, ASM
            )
            integers = integers_of(loaded, a_ptr, info_ptr, M, SPAN, VECTOR, ASM)
        if SECOND is None or entry(SECOND, 5) == KIND:
            # Rows of one kind share what is made of float32 activations.
            totals = _add_parts(
                totals, none, rows, integers, a_ptr, stride_a_token, at * SPAN, mask, KIND,
                GROUPS, COUNT, M, info_ptr is None, VECTOR, ASM,
            )  # fmt: skip
        else:
            OWN: tl.constexpr = SPAN // span_of(KIND, GROUPS)
            totals = _add_parts(
                part_of(totals, 0, ROWS), none, part_of(rows, 0, OWN), integers, a_ptr,
                stride_a_token, at * SPAN, mask, KIND, GROUPS, ROWS, M, info_ptr is None, VECTOR,
                ASM,
            ) + _add_parts(
                part_of(totals, ROWS, ROWS), none, part_of(rows, OWN, len(rows) - OWN), integers,
                a_ptr, stride_a_token, at * SPAN, mask, entry(SECOND, 5), GROUPS, ROWS, M,
                info_ptr is None, VECTOR, ASM,
            )  # fmt: skip
        if PREFETCH:
            rows = later
    if info_ptr is None and not NARROW:
        scaled = ()
        for r in tl.static_range(COUNT):
            each = ()
            for m in tl.static_range(M):
                each += (totals[r][m] * LARGE,)
            scaled += (each,)
        totals = scaled
    return totals


@triton.jit
def first_row(program, num_rows, ROWS: tl.constexpr):
    """A program's first row: the last one starts early enough to have all; some are done twice."""
    return tl.minimum(program * ROWS, num_rows - ROWS).to(tl.int64)


@triton.jit
def store_rows(
    y_ptr, y, stride_y_token, first, M: tl.constexpr, ROWS: tl.constexpr, bias_ptr=None,
    residual_ptr=None, stride_residual_token=0,
):  # fmt: skip
    """y[i % m, first + i // m] of [m, n] ← y[i] + bias + residual for the rows of a program."""
    i = tl.arange(0, y.shape[0])
    store_each(
        y_ptr, y, stride_y_token, i % M, first + i // M, i < ROWS * M, bias_ptr, residual_ptr,
        stride_residual_token,
    )  # fmt: skip


@triton.jit
def store_each(
    y_ptr, y, stride_y_token, token, row, mask, bias_ptr, residual_ptr, stride_residual_token
):
    """y[token[i], row[i]] of [m, n] ← y[i] + bias + residual where the mask holds."""
    token = token.to(tl.int64)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + token * stride_residual_token + row
        y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + row, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("num_rows",))
def _gemv_planes_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]; integers' codes where there is info
    info_ptr,  # int32 [m, groups, 2 or 4]
    planes_ptr,  # [n, row_bytes]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_a_token,
    stride_info_token,
    stride_residual_token,
    num_rows,
    LAYOUT: tl.constexpr,  # see entry
    GROUPS: tl.constexpr,  # of 32 in a row
    M: tl.constexpr,
    ROWS: tl.constexpr,  # at most num_rows
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,
    PREFETCH: tl.constexpr,
    TIED: tl.constexpr,
    ASM: tl.constexpr,
    HINT: tl.constexpr,
    VECTOR: tl.constexpr,
    NARROW: tl.constexpr,  # a is float16 or bfloat16
    CHAINED: tl.constexpr,  # 1, or 2: late
):
    if CHAINED == 1:
        gdc_launch_dependents()
    first = first_row(tl.program_id(0), num_rows, ROWS)
    totals = row_sums(
        a_ptr, info_ptr, planes_ptr, None, stride_a_token, stride_info_token, num_rows, first,
        LAYOUT, None, GROUPS, M, ROWS, THREADS, PREFETCH, TIED,
        ASM, HINT, VECTOR, NARROW, CHAINED,
    )  # fmt: skip
    store_totals(
        y_ptr, totals, stride_y_token, first, bias_ptr, residual_ptr, stride_residual_token, M,
        ROWS, SUMS, ASM,
    )  # fmt: skip


def gemv_planes(
    a: Tensor | Int8Activations | Int16Activations,
    planes: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
    tied: bool = True,
    asm: bool | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, summed in float32, for m <= 8.

    Args:
        a: [m, K] in float32, magnitudes below 2^41, float16 or bfloat16, which become integers of
            16 bits; or what ``quantize_activations`` or ``int16_activations`` made of it.
        planes: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
        out: [m, n] to write to.
        tile: of the launch; None for :func:`tile_of`'s.
        tied: keep the loads of scales beside those of weights.
        asm: use PTX; if None, where it can be.
    """
    x, info = (a, None) if isinstance(a, Tensor) else (a.codes, a.info)
    num_tokens, num_rows = x.shape[0], planes.shape[0]
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=a.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_weights = a.num_weights if isinstance(a, Int16Activations) else x.shape[1]
    if asm is None:
        asm = uses_ptx(x)
    if tile is None:
        bits = {torch.int8: 8, torch.float32: 32}.get(x.dtype, 16)
        tile = tile_of(file_kind(kind), num_rows, num_weights // 32, num_tokens, bits)
        if num_tokens > 2 and not asm:  # AMD's compiler spills with more
            tile = tile._replace(rows=min(tile.rows, 4))
    chained = tile.chained and may_chain(x)
    _gemv_planes_kernel.launch(
        (cdiv(num_rows, tile.rows),),
        out,
        x,
        info,
        planes,
        bias,
        residual,
        out.stride(0),
        x.stride(0),
        0 if info is None else info.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        LAYOUT=layout_of(planes, kind, num_weights),
        GROUPS=num_weights // 32,
        M=num_tokens,
        ROWS=tile.rows,
        SUMS=next_power_of_2(tile.rows * num_tokens),
        THREADS=32 * tile.warps,
        PREFETCH=tile.prefetch,
        TIED=tied and asm,
        ASM=asm,
        HINT=STREAM,
        VECTOR=asm and is_aligned(x),
        NARROW=x.dtype != torch.float32,
        CHAINED=(2 if tile.late else 1) if chained else 0,
        num_warps=tile.warps,
        **({"launch_pdl": True} if chained else {}),
    )
    return out


@ops.gemv_quant_q8.impl("triton")
def gemv_quant_q8(
    codes: Tensor,
    info: Tensor,
    blocks: Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    return gemv_planes(Int8Activations.of(codes, info, dtype), blocks, kind, out=out)
