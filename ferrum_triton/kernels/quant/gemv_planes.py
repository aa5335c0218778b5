"""Few activations by weights in planes: one program some rows, its threads all along K.

Every byte of a plane is read once, for all activations; each thread keeps float32 partial sums,
which meet once, at the end. K and the strides of rows are constants, so that the rows of a program
differ by an immediate of their loads' addresses.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.quant.plane_groups import LARGE, add_group, add_group_int8
from ferrum_triton.kernels.quant.planes import load_rows, row_sizes, summed, tied_zero
from ferrum_triton.quant.kinds import file_kind, format_of

# Weights are read once: they leave the first-level cache to the activations.
STREAM = ".L1::no_allocate.L2::256B"


@kernel(dynamic=("num_rows",))
def _gemv_planes_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k], or int32 [m, k / 4] of four int8 each
    info_ptr,  # int32 [m, groups, 2] of int8 activations
    planes_ptr,  # [n, row_bytes]
    stride_y_token,
    stride_a_token,
    stride_info_token,
    num_rows,
    Q: tl.constexpr,  # bytes of a row of each plane
    H: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,  # of 32 in a row
    KIND: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,  # at most num_rows
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,
    PREFETCH: tl.constexpr,
    TIED: tl.constexpr,
    ASM: tl.constexpr,
    HINT: tl.constexpr,
    VECTOR: tl.constexpr,
    CHAINED: tl.constexpr,  # weights are loaded while the launch before may still run
):
    if CHAINED:
        gdc_launch_dependents()
    # The last program starts early enough to have all its rows: some are computed twice, alike.
    first = tl.minimum(tl.program_id(0) * ROWS, num_rows - ROWS).to(tl.int64)
    thread = tl.arange(0, THREADS)
    EVEN: tl.constexpr = GROUPS % THREADS == 0
    STEPS: tl.constexpr = (GROUPS + THREADS - 1) // THREADS
    all_rows = num_rows.to(tl.int64)

    start = tl.zeros([THREADS], tl.float32)
    totals = ()
    for _r in tl.static_range(ROWS):
        each = ()
        for _m in tl.static_range(M):
            each += (start,)
        totals += (each,)

    if PREFETCH:
        rows = load_rows(
            planes_ptr, all_rows, first, thread, thread < GROUPS, Q, H, S, T, D, KIND, ROWS, ASM,
            HINT,
        )  # fmt: skip
    for step in range(STEPS):
        group = step * THREADS + thread
        mask = group < GROUPS
        if EVEN:
            mask = None
        if PREFETCH:
            ahead = group + THREADS
            later = load_rows(
                planes_ptr, all_rows, first, ahead, ahead < GROUPS, Q, H, S, T, D, KIND, ROWS, ASM,
                HINT,
            )  # fmt: skip
        else:
            rows = load_rows(
                planes_ptr, all_rows, first, group, mask, Q, H, S, T, D, KIND, ROWS, ASM, HINT
            )
        if CHAINED:
            if step == 0:
                gdc_wait()
        if TIED:
            none = tied_zero(rows, num_rows >> 31)
        else:
            none = tl.zeros([THREADS], tl.int32)
        if info_ptr is not None:
            totals = add_group_int8(
                totals, none, rows, a_ptr, info_ptr, stride_a_token, stride_info_token, group, mask,
                KIND, ROWS, M, ASM,
            )  # fmt: skip
        else:
            totals = add_group(
                totals, none, rows, a_ptr, stride_a_token, group, mask, KIND, ROWS, M, VECTOR
            )
        if PREFETCH:
            rows = later

    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, ROWS * M, SUMS)
    if info_ptr is None:
        y *= LARGE
    i = tl.arange(0, SUMS)
    tl.store(
        y_ptr + (i % M).to(tl.int64) * stride_y_token + first + i // M,
        y.to(y_ptr.dtype.element_ty),
        mask=i < ROWS * M,
    )


@kernel
def _quantize_activations_kernel(
    q_ptr,  # int8 [m, k]
    info_ptr,  # int32 [m, groups, 2]
    a_ptr,  # [m, k]
    stride_a_token,
    num_groups,  # of 32 in a row
    BLOCK_G: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (group < num_groups)[:, None]
    x = tl.load(a_ptr + token * stride_a_token + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    # What is not finite is seen in the step: its integers may be anything.
    step = largest / 127.0 + tl.sum(x * 0.0, axis=1)
    inverse = tl.where(largest > 0.0, 127.0 / largest, 0.0)
    # Adding 1.5 2^23 leaves the nearest integer in the low bits, of two as near the even one.
    q = (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) << 24 >> 24
    q = tl.where(mask, q, 0)
    tl.store(q_ptr + token * num_groups * 32 + column, q.to(tl.int8), mask=mask)
    # The two halves' sums in one word: they are less than 2^15 in size.
    sums = tl.sum(tl.reshape(q, (BLOCK_G, 2, 16)), axis=2) & 0xFFFF
    halves = tl.sum(sums << (16 * tl.arange(0, 2))[None, :], axis=1)
    info = info_ptr + (token * num_groups + group) * 2
    tl.store(info, step.to(tl.int32, bitcast=True), mask=group < num_groups)
    tl.store(info + 1, halves, mask=group < num_groups)


@dataclass(frozen=True, eq=False)
class Int8Activations:
    """Activations of eight bits, with a step for each 32.

    Attributes:
        words: int32 [m, K / 4], the bytes of ``q``.
        info: int32 [m, K / 32, 2]: the step's bits as float32, and the sums of q over the first and
            the last 16 in its lower and upper half.
        dtype: what they were, and what products are.
    """

    words: Tensor
    info: Tensor
    dtype: torch.dtype

    @property
    def q(self) -> Tensor:
        """int8 [m, K]: an activation is its step times q."""
        return self.words.view(torch.int8)


def quantize_activations(a: Tensor, *, chained: bool = False) -> Int8Activations:
    """Round activations [m, K] to int8: steps are the largest magnitude of each 32, over 127.

    Args:
        a: [m, K] in float32, float16 or bfloat16.
        chained: let the launch begin while the one before ends, and the next one likewise.
    """
    m, k = a.shape
    info = torch.empty(m, k // 32, 2, dtype=torch.int32, device=a.device)
    words = torch.empty(m, k // 4, dtype=torch.int32, device=a.device)
    quantised = Int8Activations(words, info, a.dtype)
    if words.numel():
        block = min(triton.next_power_of_2(k // 32), 8)
        grid = (triton.cdiv(k // 32, block), m)
        chained = chained and (a.is_meta or capability(a.device) >= (9, 0))
        _quantize_activations_kernel.launch(
            grid,
            quantised.q,
            info,
            a,
            a.stride(0),
            k // 32,
            BLOCK_G=block,
            CHAINED=chained,
            num_warps=1,
            **({"launch_pdl": True} if chained else {}),
        )
    return quantised


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
    x, info = (a.words, a.info) if is_int8 else (a, None)
    num_tokens, num_rows = x.shape[0], planes.shape[0]
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=a.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_weights = format_of(kind).row_weights(planes.shape[1])
    sizes = row_sizes(planes, kind, num_weights)
    best_rows, best_warps = _tile_of(num_weights // 32, num_tokens)
    rows = min(rows or best_rows, 1 << (num_rows.bit_length() - 1))
    warps = num_warps or best_warps
    if asm is None:
        asm = x.is_meta or (x.is_cuda and torch.version.hip is None)
    chained = chained and x.shape[1] > 0 and (x.is_meta or capability(x.device) >= (9, 0))
    aligned = x.stride(0) * x.element_size() % 16 == 0 and (x.is_meta or x.data_ptr() % 16 == 0)
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
        **sizes,
        GROUPS=num_weights // 32,
        KIND=file_kind(kind),
        M=num_tokens,
        ROWS=rows,
        SUMS=triton.next_power_of_2(rows * num_tokens),
        THREADS=32 * warps,
        PREFETCH=prefetch,
        TIED=tied and asm,
        ASM=asm,
        HINT=hint,
        VECTOR=asm and aligned,
        CHAINED=chained,
        num_warps=warps,
        maxnreg=max_registers,
        **({"launch_pdl": True} if chained else {}),
    )
    return out


def _tile_of(num_groups: int, num_tokens: int) -> tuple[int, int]:
    """Rows a program and its warps."""
    return 4 if num_tokens <= 4 else 2, max(1, min(4, num_groups // 32))
