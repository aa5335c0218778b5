"""One or two activations by weights in planes: programs that walk over the rows.

A thread keeps its activations, as integers, and multiplies them by one block of rows while the next
one is loaded. :mod:`ferrum_triton.kernels.quant.gemv_planes` has a program for each block instead,
which loads and makes them anew. Threads' sums meet after every block, or all at the end where a
program has few blocks: warps then never wait for each other.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import capability, kernel, processors
from ferrum_triton.kernels.quant.gemv_planes import (
    STREAM,
    first_row,
    no_totals,
    store_each,
    store_totals,
)
from ferrum_triton.kernels.quant.int8 import Int8Activations
from ferrum_triton.kernels.quant.int16 import Int16Activations
from ferrum_triton.kernels.quant.integer_activations import integers_of, load_activations
from ferrum_triton.kernels.quant.integer_groups import add_integers
from ferrum_triton.kernels.quant.matrix_parts import entry, layout_of
from ferrum_triton.kernels.quant.planes import is_aligned, load_rows, may_chain, span_of, uses_ptx
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.kinds import file_kind


class Walk(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: of W in a block, a power of two, at most n.
        residents: programs for each processor.
        kept: let threads' sums meet after a program's last block where they are MOST_SUMS at most.
        tied: if kept, let a block's loads wait for the sums of the block two before it, or the
            compiler may move those of scales so far up that weights' find no registers.
        registers: of a thread at most; 0 for as many as the compiler takes.
        late: as of :class:`~ferrum_triton.kernels.quant.gemv_planes.Tile`.
    """

    rows: int
    residents: int
    kept: bool = False
    tied: bool = False
    registers: int = 0
    late: bool = False


# Threads are a power of two, of which so many have to have groups of a row.
LEAST_FULL = 0.85
MOST_SUMS = 32
# The fastest of bench.quant_tiles by tokens, by the fewest rows of W they are for, and by kind.
# Where K is about 14336,
_LONG = {
    1: {
        4096: {
            "Q2_K": Walk(4, 2, kept=True, registers=128, late=True),
            "Q3_K": Walk(4, 2, kept=True, tied=True, registers=128, late=True),
            "Q8_0": Walk(4, 1),
        }
        | dict.fromkeys(("Q4_0", "Q4_1", "Q6_K"), Walk(4, 1, kept=True, tied=True))
        | dict.fromkeys(("Q4_K", "Q5_0", "Q5_1", "Q5_K"), Walk(8, 1, kept=True, tied=True)),
    },
    2: {
        4096: {
            "Q2_K": Walk(4, 2),
            "Q3_K": Walk(4, 1),
            "Q4_K": Walk(4, 2, kept=True, tied=True, registers=128),
        }
        | dict.fromkeys(("Q4_0", "Q4_1", "Q5_0"), Walk(8, 1, kept=True, tied=True, late=True))
        | dict.fromkeys(
            ("Q5_1", "Q5_K", "Q6_K", "Q8_0"), Walk(4, 1, kept=True, tied=True, late=True)
        ),
    },
}
# and where K is about 4096.
_SHORT = {
    1: {
        4096: {"Q2_K": Walk(4, 4, kept=True, registers=64), "Q8_0": Walk(4, 4)},
        8192: {"Q2_K": Walk(4, 4, kept=True, registers=64)}
        | dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K"), Walk(8, 4)),
        10240: dict.fromkeys(
            ("Q2_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"), Walk(8, 10)
        ),
        16384: {"Q3_K": Walk(2, 8, kept=True, tied=True)}
        | dict.fromkeys(("Q2_K", "Q4_0", "Q4_1", "Q5_0"), Walk(8, 10)),
    },
    2: {
        4096: dict.fromkeys(("Q2_K", "Q3_K"), Walk(4, 2, kept=True)),
        6144: dict.fromkeys(("Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_1"), Walk(8, 4))
        | dict.fromkeys(("Q5_K", "Q6_K", "Q8_0"), Walk(8, 3)),
    },
}


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
    if capability(device)[0] != 9:
        return None
    return _timed_walk(kind, num_rows, num_groups, num_tokens)


@lru_cache(maxsize=4096)
def _timed_walk(kind: str, num_rows: int, num_groups: int, num_tokens: int) -> Walk | None:
    span, threads = span_of(kind, num_groups), _threads(kind, num_groups)
    if not LEAST_FULL * threads <= num_groups // span <= threads:
        return None
    walks = {512: _LONG, 128: _SHORT}.get(threads * span, {}).get(num_tokens, {})
    fewest = max((rows for rows in walks if rows <= num_rows), default=None)
    return None if fewest is None else walks[fewest].get(kind)


@lru_cache(maxsize=4096)
def _threads(kind: str, num_groups: int) -> int:
    return max(next_power_of_2(num_groups // span_of(kind, num_groups)), 32)


@triton.jit
def _block_rows(
    planes_ptr, block, num_rows, at, mask, LAYOUT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, ASM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """What threads need of a block of ROWS rows: see :func:`load_rows`."""
    SPAN: tl.constexpr = span_of(entry(LAYOUT, 5), GROUPS)
    matrix_rows = tl.full((), 1, tl.int64) * num_rows
    return load_rows(
        planes_ptr, matrix_rows, first_row(block, num_rows, ROWS), at, mask, entry(LAYOUT, 0),
        entry(LAYOUT, 1), entry(LAYOUT, 2), entry(LAYOUT, 3), entry(LAYOUT, 4), entry(LAYOUT, 5),
        SPAN, ROWS, ASM, HINT,
    )  # fmt: skip


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
    THREADS: tl.constexpr,  # power of two >= GROUPS / span_of
    KEPT: tl.constexpr,  # blocks of a program, whose sums meet at its end; 0: at each block's
    TIED: tl.constexpr,
    ASM: tl.constexpr,
    HINT: tl.constexpr,
    VECTOR: tl.constexpr,
    CHAINED: tl.constexpr,  # 1, or 2: late
):
    if CHAINED == 1:
        gdc_launch_dependents()
    KIND: tl.constexpr = entry(LAYOUT, 5)
    SPAN: tl.constexpr = span_of(KIND, GROUPS)
    thread = tl.arange(0, THREADS)
    mask = thread < GROUPS // SPAN
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (num_rows + ROWS - 1) // ROWS
    if KEPT > 0:
        # Threads beyond the last group take that one again: what they sum up is left out.
        inside = tl.minimum(thread, GROUPS // SPAN - 1)
        queue = (
            _block_rows(
                planes_ptr, program, num_rows, inside, None, LAYOUT, GROUPS, ROWS, ASM, HINT
            ),
        )
        if CHAINED:
            gdc_wait()
        if CHAINED == 2:
            gdc_launch_dependents()
        loaded = load_activations(
            a_ptr, info_ptr, stride_a_token, stride_info_token, inside, None, M, SPAN, VECTOR, ASM
        )
        integers, flat, at = (), (), inside
        zero = num_rows >> 31  # 0, as no compiler can know
        none = tl.zeros([THREADS], tl.int32)
        for step in tl.static_range(KEPT):
            if step + 1 < KEPT:
                block = program + (step + 1) * programs
                known = None
                if step + 2 == KEPT:  # only the last one may be missing
                    known = tl.full([THREADS], 1, tl.int1) & (block < blocks)
                queue += (
                    _block_rows(
                        planes_ptr, block, num_rows, at, known, LAYOUT, GROUPS, ROWS, ASM, HINT
                    ),
                )
            if step == 0:
                integers = integers_of(loaded, a_ptr, info_ptr, M, SPAN, VECTOR, ASM)
            totals = add_integers(
                no_totals(THREADS, ROWS, M), none, queue[step], integers, KIND, ROWS, M,
                info_ptr is None, ASM,
            )  # fmt: skip
            if TIED:
                at = inside + (totals[ROWS - 1][0].to(tl.int32, bitcast=True) & zero)
            for r in tl.static_range(ROWS):
                flat += totals[r]
        if GROUPS // SPAN == THREADS:
            mask = None
        y = summed(flat, SUMS, ASM, mask, GROUPS // SPAN % 32 == 0)
        i = tl.arange(0, SUMS)
        block = program + i // (M * ROWS) * programs
        store_each(
            y_ptr, y, stride_y_token, i % M, first_row(block, num_rows, ROWS) + i // M % ROWS,
            (i < KEPT * M * ROWS) & (block < blocks), bias_ptr, residual_ptr, stride_residual_token,
        )  # fmt: skip
    else:
        rows = _block_rows(
            planes_ptr, program, num_rows, thread, mask, LAYOUT, GROUPS, ROWS, ASM, HINT
        )
        if CHAINED:
            gdc_wait()
        if CHAINED == 2:
            gdc_launch_dependents()
        none = tl.zeros([THREADS], tl.int32)
        loaded = load_activations(
            a_ptr, info_ptr, stride_a_token, stride_info_token, thread, mask, M, SPAN, VECTOR, ASM
        )
        integers = integers_of(loaded, a_ptr, info_ptr, M, SPAN, VECTOR, ASM)
        for block in range(program, blocks, programs):
            later = _block_rows(
                planes_ptr, block + programs, num_rows, thread, mask & (block + programs < blocks),
                LAYOUT, GROUPS, ROWS, ASM, HINT,
            )  # fmt: skip
            totals = add_integers(
                no_totals(THREADS, ROWS, M), none, rows, integers, KIND, ROWS, M, info_ptr is None,
                ASM,
            )  # fmt: skip
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
            ``quantize_activations`` or ``int16_activations`` made of it. A thread takes 32 of K, or
            64 (``span_of``).
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
    num_groups = num_weights // 32
    asm, chained = uses_ptx(x), may_chain(x)
    threads = _threads(file_kind(kind), num_groups)
    blocks = cdiv(num_rows, walk.rows)
    programs = min(blocks, processors(x.device) * walk.residents)
    steps = cdiv(blocks, programs)
    kept = steps if walk.kept and steps * walk.rows * num_tokens <= MOST_SUMS else 0
    _gemv_walk_kernel.launch(
        (programs,),
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
        GROUPS=num_groups,
        M=num_tokens,
        ROWS=walk.rows,
        SUMS=next_power_of_2(walk.rows * num_tokens * max(kept, 1)),
        THREADS=threads,
        KEPT=kept,
        TIED=walk.tied,
        ASM=asm,
        HINT=STREAM,
        VECTOR=asm and is_aligned(x),
        CHAINED=(2 if walk.late else 1) if chained else 0,
        num_warps=threads // 32,
        **({"launch_pdl": True} if chained else {}),
        **({"maxnreg": walk.registers} if walk.registers else {}),
    )
    return out
