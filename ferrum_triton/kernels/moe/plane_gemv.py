"""Few tokens by their experts' rows in planes: one program per pair and some rows of its expert.

As :mod:`ferrum_triton.kernels.quant.gemv_planes` with one activation: the threads lie along K, and
each keeps float32 partial sums that meet once. Which expert a pair has is read on the device; one
without an expert writes zeros and reads nothing. Pairs of one expert read its rows side by side,
the later ones from L2.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.gemv_planes import STREAM, first_row, row_sums
from ferrum_triton.kernels.quant.matrix_parts import layout_of
from ferrum_triton.kernels.quant.planes import is_aligned, may_chain, span_of, uses_ptx
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, previous_power_of_2
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN

# What a launch that starts while the one before ends does before it waits for that one's end:
# nothing, or it reads ids and begins to load their experts' weights. They are read again then, and
# where they differ the product is made once more.
NOTHING, GUESS = tl.constexpr(1), tl.constexpr(2)
# From so many pairs on there are programs enough.
MANY_PAIRS = 32


@kernel(dynamic=("num_pairs",))
def _plane_pairs_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    planes_ptr,  # [num_experts, n, row_bytes]
    up_ptr,  # [num_experts, n, up_row_bytes]: y = silu(planes · a) · (up · a); or None
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_expert,  # of planes, in units of 16 bytes
    stride_up_expert,
    stride_ids_token,
    num_experts,
    num_rows,
    num_pairs,
    LAYOUT: tl.constexpr,  # see entry
    UP_LAYOUT: tl.constexpr,  # likewise, None without up
    GROUPS: tl.constexpr,  # of 32 in a row
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,  # at most num_rows
    THREADS: tl.constexpr,
    TIED: tl.constexpr,
    ASM: tl.constexpr,
    HINT: tl.constexpr,
    VECTOR: tl.constexpr,
    NARROW: tl.constexpr,
    CHAINED: tl.constexpr,  # 0, NOTHING or GUESS
):
    if CHAINED == NOTHING:
        gdc_wait()
        gdc_launch_dependents()
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    first = first_row(tl.program_id(0) // num_pairs, num_rows, ROWS)
    y_ptr += token * stride_y_token + slot * stride_y_slot + first
    a_ptr += token * stride_a_token + slot * stride_a_slot
    ids_ptr += token * stride_ids_token + slot
    expert = tl.load(ids_ptr).to(tl.int64)
    _store_rows_of(
        y_ptr, a_ptr, planes_ptr, up_ptr, expert, stride_expert, stride_up_expert, num_experts,
        num_rows, first, LAYOUT, UP_LAYOUT, GROUPS, ROWS, THREADS, TIED, ASM, HINT, VECTOR, NARROW,
        2 if CHAINED == GUESS else 0,
    )  # fmt: skip
    if CHAINED == GUESS:
        known = tl.load(ids_ptr, volatile=True).to(tl.int64)
        if known != expert:
            _store_rows_of(
                y_ptr, a_ptr, planes_ptr, up_ptr, known, stride_expert, stride_up_expert,
                num_experts, num_rows, first, LAYOUT, UP_LAYOUT, GROUPS, ROWS, THREADS, TIED, ASM,
                HINT, VECTOR, NARROW, 0,
            )  # fmt: skip


@triton.jit
def _store_rows_of(
    y_ptr, a_ptr, planes_ptr, up_ptr, expert, stride_expert, stride_up_expert, num_experts,
    num_rows, first, LAYOUT: tl.constexpr, UP_LAYOUT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, THREADS: tl.constexpr, TIED: tl.constexpr, ASM: tl.constexpr,
    HINT: tl.constexpr, VECTOR: tl.constexpr, NARROW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS products with one expert's rows to y_ptr; zeros where there is no such expert."""
    r = tl.arange(0, ROWS)
    if (expert >= 0) & (expert < num_experts):
        planes_ptr += expert * stride_expert * 16
        if up_ptr is not None:
            up_ptr += expert * stride_up_expert * 16
        totals = row_sums(
            a_ptr, None, planes_ptr, up_ptr, 0, 0, num_rows, first, LAYOUT, UP_LAYOUT, GROUPS, 1,
            ROWS, THREADS, False, TIED, ASM, HINT, VECTOR, NARROW, CHAINED,
        )  # fmt: skip
        BOTH: tl.constexpr = ROWS if up_ptr is None else 2 * ROWS
        flat = ()
        for i in tl.static_range(BOTH):
            flat += totals[i]
        y = summed(flat, BOTH, ASM)
        if up_ptr is not None:
            gate, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
            y = activated(gate, "silu") * up
        tl.store(y_ptr + r, y.to(y_ptr.dtype.element_ty))
    else:
        if CHAINED:
            gdc_wait()
        tl.store(y_ptr + r, tl.zeros([ROWS], y_ptr.dtype.element_ty))


def gemv_plane_pairs(
    a: Tensor,
    planes: Tensor,
    ids: Tensor,
    kind: str,
    up: Tensor | None = None,
    up_kind: str = "",
    *,
    out: Tensor | None = None,
    rows: int | None = None,
    num_warps: int | None = None,
    chained: bool = False,
    guess: bool = False,
    asm: bool | None = None,
) -> Tensor:
    """y[t, s] = W[ids[t, s]] · a[t, s], or silu of that times U[ids[t, s]] · a[t, s].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K]; in float32 of magnitudes below 2^41.
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        ids: [num_tokens, top_k] int32 or int64.
        kind: of planes, such as ``"Q4_K:planes"``.
        up, up_kind: U likewise.
        out: [num_tokens, top_k, n] to write to.
        rows: of W, and as many of U, a program; a power of two; a plain choice if None.
        num_warps: of a program, likewise.
        chained: let the launch begin while the one before ends. For NVIDIA GPUs of capability 9.0
            on.
        guess: of a chained launch: that the ids are there while the launch before still ends, as
            they are where a product before this one took them; wrong, it costs time alone.
        asm: use PTX; if None, where it can be.
    """
    num_experts, num_rows = planes.shape[:2]
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    k = a.shape[-1]
    is_wide, matrices = a.dtype == torch.float32, 1 if up is None else 2
    best_rows, best_warps = _tile_of(file_kind(kind), k // 32, ids.numel(), matrices, is_wide)
    rows = min(rows or best_rows, previous_power_of_2(num_rows))
    warps = num_warps or best_warps
    if asm is None:
        asm = uses_ptx(a)
    chained = chained and may_chain(a)
    _plane_pairs_kernel.launch(
        (ids.numel() * cdiv(num_rows, rows),),
        y,
        a,
        planes,
        up,
        ids,
        y.stride(0),
        y.stride(1),
        a.stride(0),
        slot_stride(a),
        planes.stride(0) // ROW_ALIGN,
        0 if up is None else up.stride(0) // ROW_ALIGN,
        ids.stride(0),
        num_experts,
        num_rows,
        ids.numel(),
        LAYOUT=layout_of(planes, kind, k),
        UP_LAYOUT=None if up is None else layout_of(up, up_kind, k),
        GROUPS=k // 32,
        TOP_K=ids.shape[1],
        ROWS=rows,
        THREADS=32 * warps,
        TIED=asm,
        ASM=asm,
        HINT=STREAM,
        VECTOR=asm and is_aligned(a),
        NARROW=not is_wide,
        CHAINED=(GUESS if guess else NOTHING).value if chained else 0,
        num_warps=warps,
        **({"launch_pdl": True} if chained else {}),
    )
    return y


def slot_stride(a: Tensor) -> int:
    return a.stride(1) if a.dim() == 3 else 0


@lru_cache(maxsize=4096)
def _tile_of(
    kind: str, num_groups: int, num_pairs: int, matrices: int, is_wide: bool
) -> tuple[int, int]:
    """Rows a program takes of each matrix, and its warps."""
    # What is made of 16-bit activations is shared by all rows of a program.
    rows = 4 if is_wide else 8 if num_pairs < MANY_PAIRS else 16
    num_spans = num_groups // span_of(kind, num_groups)
    return rows // matrices, min(4, previous_power_of_2(max(num_spans // 32, 1)))
