"""Few activations by weights in planes: one program some rows, its threads all along K.

Every byte of a plane is read once, for all activations; each thread keeps float32 partial sums,
which meet once, at the end. K and the strides of rows are constants, so that the rows of a program
differ by an immediate of their loads' addresses.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.quant.int8 import Int8Activations
from ferrum_triton.kernels.quant.plane_groups import LARGE, add_group, add_group_int8
from ferrum_triton.kernels.quant.planes import load_rows, place, summed, tied_zero
from ferrum_triton.ops import quant_int8 as ops
from ferrum_triton.quant.kinds import file_kind, format_of

# Weights are read once: they leave the first-level cache to the activations.
STREAM = ".L1::no_allocate.L2::256B"


@triton.constexpr_function
def entry(layout, i):
    """Of a layout (stride of rows, offsets of h, s, t and d in a row, in bytes, and the kind)."""
    return layout[i]


@triton.jit
def _rows_of(
    first_ptr, second_ptr, group, mask, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROWS: tl.constexpr, ASM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """What a thread needs of ROWS rows of each matrix for its group, one after the other."""
    rows = load_rows(
        first_ptr, group, mask, entry(FIRST, 0), entry(FIRST, 1), entry(FIRST, 2), entry(FIRST, 3),
        entry(FIRST, 4), entry(FIRST, 5), ROWS, ASM, HINT,
    )  # fmt: skip
    if SECOND is not None:
        rows += load_rows(
            second_ptr, group, mask, entry(SECOND, 0), entry(SECOND, 1), entry(SECOND, 2),
            entry(SECOND, 3), entry(SECOND, 4), entry(SECOND, 5), ROWS, ASM, HINT,
        )  # fmt: skip
    return rows


@triton.jit
def _part(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    part = ()
    for i in tl.static_range(COUNT):
        part += (values[FIRST + i],)
    return part


@triton.jit
def row_sums(
    a_ptr, info_ptr, first_ptr, second_ptr, stride_a_token, stride_info_token, zero,
    FIRST: tl.constexpr, SECOND: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr, TIED: tl.constexpr,
    ASM: tl.constexpr, HINT: tl.constexpr, VECTOR: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Activations by ROWS rows of one or two matrices: [matrix, row][token], [threads] each.

    What threads hold of one product is to be summed, and multiplied by LARGE where the activations
    are not int8.

    Args:
        a_ptr: [m, k]; int8 codes where there is info.
        info_ptr: int32 [m, groups, 2], else None; then matrices are of one kind.
        first_ptr, second_ptr: the first of each matrix's rows.
        zero: 0, as no compiler can know.
        FIRST, SECOND: the matrices' layouts, see :func:`entry`; of one matrix SECOND is None.
        GROUPS: of 32 in a row.
        CHAINED: weights are loaded while the launch before may still run.
    """
    thread = tl.arange(0, THREADS)
    EVEN: tl.constexpr = GROUPS % THREADS == 0
    STEPS: tl.constexpr = (GROUPS + THREADS - 1) // THREADS
    KIND: tl.constexpr = entry(FIRST, 5)
    COUNT: tl.constexpr = ROWS if SECOND is None else 2 * ROWS

    start = tl.zeros([THREADS], tl.float32)
    totals = ()
    for _r in tl.static_range(COUNT):
        each = ()
        for _m in tl.static_range(M):
            each += (start,)
        totals += (each,)

    if PREFETCH:
        rows = _rows_of(
            first_ptr, second_ptr, thread, thread < GROUPS, FIRST, SECOND, ROWS, ASM, HINT
        )
    for step in range(STEPS):
        group = step * THREADS + thread
        mask = group < GROUPS
        if EVEN:
            mask = None
        if PREFETCH:
            ahead = group + THREADS
            later = _rows_of(
                first_ptr, second_ptr, ahead, ahead < GROUPS, FIRST, SECOND, ROWS, ASM, HINT
            )
        else:
            rows = _rows_of(first_ptr, second_ptr, group, mask, FIRST, SECOND, ROWS, ASM, HINT)
        if CHAINED:
            if step == 0:
                gdc_wait()
        if TIED:
            none = tied_zero(rows, zero)
        else:
            none = tl.zeros([THREADS], tl.int32)
        if info_ptr is not None:
            totals = add_group_int8(
                totals, none, rows, a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask,
                KIND, COUNT, M, ASM,
            )  # fmt: skip
        elif SECOND is None or entry(SECOND, 5) == KIND:
            # Rows of one kind share what is made of the activations.
            totals = add_group(
                totals, none, rows, a_ptr, stride_a_token, group, mask, KIND, COUNT, M, VECTOR
            )
        else:
            totals = add_group(
                _part(totals, 0, ROWS), none, _part(rows, 0, ROWS), a_ptr, stride_a_token, group,
                mask, KIND, ROWS, M, VECTOR,
            ) + add_group(
                _part(totals, ROWS, ROWS), none, _part(rows, ROWS, ROWS), a_ptr, stride_a_token,
                group, mask, entry(SECOND, 5), ROWS, M, VECTOR,
            )  # fmt: skip
        if PREFETCH:
            rows = later
    return totals


@triton.jit
def first_row(program, num_rows, ROWS: tl.constexpr):
    """A program's first row: the last one starts early enough to have all; some are done twice."""
    return tl.minimum(program * ROWS, num_rows - ROWS).to(tl.int64)


@triton.jit
def store_rows(y_ptr, y, stride_y_token, first, M: tl.constexpr, ROWS: tl.constexpr):
    """y[i % m, first + i // m] of [m, n] ← y[i] for the rows of a program."""
    i = tl.arange(0, y.shape[0])
    tl.store(
        y_ptr + (i % M).to(tl.int64) * stride_y_token + first + i // M,
        y.to(y_ptr.dtype.element_ty),
        mask=i < ROWS * M,
    )


@kernel(dynamic=("num_rows",))
def _gemv_planes_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]; int8 codes where there is info
    info_ptr,  # int32 [m, groups, 2]
    planes_ptr,  # [n, row_bytes]
    stride_y_token,
    stride_a_token,
    stride_info_token,
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
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    first = first_row(tl.program_id(0), num_rows, ROWS)
    totals = row_sums(
        a_ptr, info_ptr, planes_ptr + first * entry(LAYOUT, 0), None, stride_a_token,
        stride_info_token, num_rows >> 31, LAYOUT, None, GROUPS, M, ROWS, THREADS, PREFETCH, TIED,
        ASM, HINT, VECTOR, CHAINED,
    )  # fmt: skip
    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, ROWS * M, SUMS)
    if info_ptr is None:
        y *= LARGE
    store_rows(y_ptr, y, stride_y_token, first, M, ROWS)


def gemv_planes(
    a: Tensor | Int8Activations,
    planes: Tensor,
    kind: str,
    *,
    out: Tensor | None = None,
    rows: int | None = None,
    num_warps: int | None = None,
    prefetch: bool = False,
    tied: bool = True,
    max_registers: int | None = None,
    hint: str = STREAM,
    chained: bool = False,
    asm: bool | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k], summed in float32, for m <= 8.

    Args:
        a: [m, K] in float32, float16 or bfloat16, magnitudes below 2^41; or what
            ``quantize_activations`` made of it.
        planes: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        out: [m, n] to write to.
        rows: of W a program, a power of two; measured choice if None.
        num_warps: of a program, likewise.
        prefetch: load a step's weights before the step before is computed.
        tied: keep the loads of scales beside those of weights.
        max_registers: of a thread.
        hint: to the caches, of the weights' loads.
        chained: let the launch begin, and load weights, while the one before ends; that one may
            write the activations but not the weights. For NVIDIA GPUs of capability 9.0 on.
        asm: use PTX; if None, where it can be.
    """
    is_int8 = isinstance(a, Int8Activations)
    x, info = (a.codes, a.info) if is_int8 else (a, None)
    num_tokens, num_rows = x.shape[0], planes.shape[0]
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=a.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_weights = format_of(kind).row_weights(planes.shape[1])
    best_rows, best_warps = tile_of(num_weights // 32, num_tokens)
    rows = min(rows or best_rows, 1 << (num_rows.bit_length() - 1))
    warps = num_warps or best_warps
    if asm is None:
        asm = uses_ptx(x)
    chained = chained and x.shape[1] > 0 and (x.is_meta or capability(x.device) >= (9, 0))
    _gemv_planes_kernel.launch(
        (triton.cdiv(num_rows, rows),),
        out,
        x,
        info,
        planes,
        out.stride(0),
        x.stride(0),
        0 if info is None else info.stride(0),
        num_rows,
        LAYOUT=layout_of(planes, kind, num_weights),
        GROUPS=num_weights // 32,
        M=num_tokens,
        ROWS=rows,
        SUMS=triton.next_power_of_2(rows * num_tokens),
        THREADS=32 * warps,
        PREFETCH=prefetch,
        TIED=tied and asm,
        ASM=asm,
        HINT=hint,
        VECTOR=asm and is_aligned(x),
        CHAINED=chained,
        num_warps=warps,
        maxnreg=max_registers,
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


def layout_of(planes: Tensor, kind: str, num_weights: int) -> tuple[int | str, ...]:
    """What :func:`entry` reads, of rows in planes at multiples of 16 bytes."""
    offsets = place(planes, kind, num_weights)
    return planes.stride(0), *(offsets[plane] for plane in "HSTD"), file_kind(kind)


def uses_ptx(x: Tensor) -> bool:
    return capability(x.device) >= (8, 0)


def is_aligned(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    return x.stride(0) * x.element_size() % 16 == 0 and (x.is_meta or x.data_ptr() % 16 == 0)


def tile_of(num_groups: int, num_tokens: int) -> tuple[int, int]:
    """Rows a program and its warps."""
    return 4 if num_tokens <= 4 else 2, max(1, min(4, num_groups // 32))
