"""One or two activations by weights in planes: programs that walk over the rows.

A thread keeps its activations, as integers, and multiplies them by one block of rows while the next
one is loaded. :mod:`ferrum_triton.kernels.quant.gemv_planes` has a program for each block instead,
which loads and makes them anew.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import capability, kernel, processors
from ferrum_triton.kernels.quant.gemv_planes import (
    MANY_ROWS,
    STREAM,
    entry,
    first_row,
    layout_of,
    no_totals,
    store_totals,
)
from ferrum_triton.kernels.quant.int8 import Int8Activations
from ferrum_triton.kernels.quant.int16 import Int16Activations
from ferrum_triton.kernels.quant.integer_groups import add_integers, group_integers
from ferrum_triton.kernels.quant.planes import is_aligned, load_rows, may_chain, uses_ptx
from ferrum_triton.kernels.rows import cdiv, next_power_of_2


class Walk(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: of W in a block, a power of two, at most n.
        residents: programs for each processor.
    """

    rows: int
    residents: int


# Groups of a row that a thread each has to take so many of a program's threads, which are a power
# of two.
LEAST_FULL = 0.85
FEWEST_ROWS = 4096


def walk_of(
    kind: str, num_rows: int, num_groups: int, num_tokens: int, device: torch.device
) -> Walk | None:
    """The fastest that ``bench.quant_tiles`` timed at its sizes; None where ``gemv_planes`` is.

    Args:
        kind: of the weights, as in the file.
        num_rows: of W.
        num_groups: of 32 weights in a row.
        num_tokens: of activations in float16 or bfloat16.
        device: of theirs.
    """
    threads = _threads(num_groups)
    is_full = LEAST_FULL * threads <= num_groups <= threads
    if capability(device)[0] != 9 or not is_full or num_rows < FEWEST_ROWS:
        return None
    walk = None
    if threads == 512 and num_tokens == 1 and kind not in ("Q2_K", "Q5_1", "Q6_K"):
        walk = Walk(4 if kind == "Q8_0" else 8, 1)
    elif threads == 128 and num_tokens == 1:
        if num_rows >= MANY_ROWS and kind in ("Q4_0", "Q4_1", "Q5_0", "Q3_K"):
            walk = Walk(8, 10)
        elif num_rows < MANY_ROWS and kind in ("Q4_1", "Q8_0", "Q2_K"):
            walk = Walk(4, 4)
    elif threads == 128 and num_tokens == 2 and num_rows >= MANY_ROWS and kind != "Q5_0":
        walk = Walk(8, 3 if kind in ("Q8_0", "Q5_K", "Q6_K") else 4)
    return walk


def _threads(num_groups: int) -> int:
    return max(next_power_of_2(num_groups), 32)


@kernel(dynamic=("num_rows",))
def _gemv_walk_kernel(
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
    ROWS: tl.constexpr,  # of a block, at most num_rows
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,  # power of two >= GROUPS
    ASM: tl.constexpr,
    HINT: tl.constexpr,
    VECTOR: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    KIND: tl.constexpr = entry(LAYOUT, 5)
    thread = tl.arange(0, THREADS)
    mask = thread < GROUPS
    matrix_rows = tl.full((), 1, tl.int64) * num_rows
    blocks = (num_rows + ROWS - 1) // ROWS
    programs = tl.num_programs(0)
    rows = load_rows(
        planes_ptr, matrix_rows, first_row(tl.program_id(0), num_rows, ROWS), thread, mask,
        entry(LAYOUT, 0), entry(LAYOUT, 1), entry(LAYOUT, 2), entry(LAYOUT, 3), entry(LAYOUT, 4),
        KIND, ROWS, ASM, HINT,
    )  # fmt: skip
    if CHAINED:
        gdc_wait()
    none = tl.zeros([THREADS], tl.int32)
    integers = group_integers(
        a_ptr, info_ptr, stride_a_token, stride_info_token, thread, mask, M, VECTOR, ASM
    )
    for block in range(tl.program_id(0), blocks, programs):
        later = load_rows(
            planes_ptr, matrix_rows, first_row(block + programs, num_rows, ROWS), thread,
            mask & (block + programs < blocks), entry(LAYOUT, 0), entry(LAYOUT, 1),
            entry(LAYOUT, 2), entry(LAYOUT, 3), entry(LAYOUT, 4), KIND, ROWS, ASM, HINT,
        )  # fmt: skip
        totals = no_totals(THREADS, ROWS, M)
        totals = add_integers(totals, none, rows, integers, thread, KIND, ROWS, M, ASM)
        store_totals(
            y_ptr, totals, stride_y_token, first_row(block, num_rows, ROWS), bias_ptr,
            residual_ptr, stride_residual_token, M, ROWS, SUMS, ASM,
        )  # fmt: skip
        rows = later


def gemv_walk(
    a: Tensor | Int8Activations | Int16Activations,
    planes: Tensor,
    kind: str,
    walk: Walk,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, summed in float32, for m <= 4.

    Args:
        a: [m, K] in float16 or bfloat16, which become integers of 16 bits; or what
            ``quantize_activations`` or ``int16_activations`` made of it. A thread takes 32 of K.
        planes: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        walk: of the launch.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
        out: [m, n] to write to.
    """
    x, info = (a, None) if isinstance(a, Tensor) else (a.codes, a.info)
    num_tokens, num_rows = x.shape[0], planes.shape[0]
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=a.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_weights = a.num_weights if isinstance(a, Int16Activations) else x.shape[1]
    asm, chained = uses_ptx(x), may_chain(x)
    threads = _threads(num_weights // 32)
    _gemv_walk_kernel.launch(
        (min(cdiv(num_rows, walk.rows), processors(x.device) * walk.residents),),
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
        ROWS=walk.rows,
        SUMS=next_power_of_2(walk.rows * num_tokens),
        THREADS=threads,
        ASM=asm,
        HINT=STREAM,
        VECTOR=asm and is_aligned(x),
        CHAINED=chained,
        num_warps=threads // 32,
        **({"launch_pdl": True} if chained else {}),
    )
    return out
