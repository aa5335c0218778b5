"""Few tokens by their experts' rows in planes: y[t, s] = W[ids[t, s]] · a[t, s], or gated by U.

Chosen where experts have few tokens each: one program takes a pair of token and expert and a block
of the expert's rows, as :mod:`ferrum_triton.kernels.quant.gemv_repacked` takes one token. Which
expert a pair has is read on the device; one without an expert writes zeros and reads nothing. Pairs
of one expert read its rows side by side, the later ones from L2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.gemv_plan import plan_of
from ferrum_triton.kernels.quant.gemv_repacked import first_row, row_sums
from ferrum_triton.kernels.quant.planes import Layout, Matrix, layout_of
from ferrum_triton.kernels.quant.thread_products import Activations
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, previous_power_of_2
from ferrum_triton.quant.planes import ROW_ALIGN

# Pairs from which on there are programs enough.
MANY_PAIRS = 32


class Stacks(NamedTuple):
    """Experts' matrices W and U, [num_experts, num_rows, ..]; strides in units of 16 bytes."""

    ptr: Any
    up_ptr: Any
    stride: Any
    up_stride: Any
    num_experts: Any
    num_rows: Any


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
    LAYOUT: tl.constexpr,
    UP_LAYOUT: tl.constexpr,  # None without up
    TOP_K: tl.constexpr,
    PLAN: tl.constexpr,
    GUESS: tl.constexpr,  # ids are read, and their weights loaded, before the PDL wait
    PDL: tl.constexpr,
):
    if not GUESS:
        pdl_wait(PDL)
        pdl_trigger(PDL)
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    token, slot = pair // TOP_K, pair % TOP_K
    first = first_row(tl.program_id(0) // num_pairs, num_rows, PLAN.rows)
    y_ptr += token * stride_y_token + slot * stride_y_slot + first
    a = Activations(a_ptr + token * stride_a_token + slot * stride_a_slot, 0, None, 0)
    ids_ptr += token * stride_ids_token + slot
    expert = tl.load(ids_ptr).to(tl.int64)
    stacks = Stacks(planes_ptr, up_ptr, stride_expert, stride_up_expert, num_experts, num_rows)
    _store_rows_of(y_ptr, a, stacks, expert, first, LAYOUT, UP_LAYOUT, PLAN, GUESS)
    if GUESS:
        # The launch before has ended: where it changed the ids, the product is made once more.
        known = tl.load(ids_ptr, volatile=True).to(tl.int64)
        if known != expert:
            _store_rows_of(y_ptr, a, stacks, known, first, LAYOUT, UP_LAYOUT, PLAN, False)


@triton.jit
def _store_rows_of(
    y_ptr,
    a,
    stacks,
    expert,
    first,
    LAYOUT: tl.constexpr,
    UP_LAYOUT: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of products with one expert's rows to y_ptr; zeros where there is no such expert.

    Args:
        a: Activations of one token.
        first: first row, int64.
    """
    ROWS: tl.constexpr = PLAN.rows
    r = tl.arange(0, ROWS)
    if (expert >= 0) & (expert < stacks.num_experts):
        matrix = Matrix(stacks.ptr + expert * stacks.stride * 16, stacks.num_rows)
        up = Matrix(stacks.up_ptr, stacks.num_rows)
        if UP_LAYOUT is not None:
            up = Matrix(stacks.up_ptr + expert * stacks.up_stride * 16, stacks.num_rows)
        totals = row_sums(a, matrix, up, first, LAYOUT, UP_LAYOUT, PLAN, PDL)
        COUNT: tl.constexpr = ROWS if UP_LAYOUT is None else 2 * ROWS
        flat = ()
        for i in tl.static_range(COUNT):
            flat += totals[i]
        y = summed(flat, COUNT, PLAN.ptx)
        if UP_LAYOUT is not None:
            gate, of_up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
            y = activated(gate, "silu") * of_up
        tl.store(y_ptr + r, y.to(y_ptr.dtype.element_ty))
    else:
        pdl_wait(PDL)
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
    chained: bool = False,
    guess: bool = False,
) -> Tensor:
    """y[t, s] = W[ids[t, s]] · a[t, s], or silu of that times U[ids[t, s]] · a[t, s].

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K]; in float32 of magnitudes below 2^41.
        planes: uint8 [num_experts, n, row_bytes], W's rows in planes.
        ids: [num_tokens, top_k] int32 or int64.
        kind: of planes, such as ``"Q4_K:planes"``.
        up, up_kind: U likewise.
        out: [num_tokens, top_k, n] to write to.
        chained: let the launch begin while the one before ends. For NVIDIA GPUs of capability 9.0
            on.
        guess: of a chained launch: that the ids are there while the launch before still ends, as
            they are where a product before this one took them; wrong, it costs time alone.
    """
    num_experts, num_rows = planes.shape[:2]
    y = a.new_empty(*ids.shape, num_rows) if out is None else out
    if y.numel() == 0:
        return y
    k = a.shape[-1]
    is_wide, matrices = a.dtype == torch.float32, 1 if up is None else 2
    layout = layout_of(planes, kind, k)
    config = _config_of(layout, ids.numel(), matrices, is_wide)
    plan, pdl = plan_of(config, a, 1, num_rows), chained and can_overlap(a.device)
    _plane_pairs_kernel.launch(
        (ids.numel() * cdiv(num_rows, plan.rows),),
        y_ptr=y,
        a_ptr=a,
        planes_ptr=planes,
        up_ptr=up,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_expert=planes.stride(0) // ROW_ALIGN,
        stride_up_expert=0 if up is None else up.stride(0) // ROW_ALIGN,
        stride_ids_token=ids.stride(0),
        num_experts=num_experts,
        num_rows=num_rows,
        num_pairs=ids.numel(),
        LAYOUT=layout,
        UP_LAYOUT=None if up is None else layout_of(up, up_kind, k),
        TOP_K=ids.shape[1],
        PLAN=plan,
        GUESS=guess and pdl,
        PDL=pdl,
        num_warps=plan.threads // 32,
    )
    return y


def slot_stride(a: Tensor) -> int:
    return a.stride(1) if a.dim() == 3 else 0


def _config_of(layout: Layout, num_pairs: int, matrices: int, is_wide: bool) -> Config:
    """Rows a program takes of each matrix, and its warps."""
    # What is made of 16-bit activations is shared by all rows of a program.
    rows = 4 if is_wide else 8 if num_pairs < MANY_PAIRS else 16
    num_spans = layout.groups // layout.span
    warps = min(4, previous_power_of_2(max(num_spans // 32, 1)))
    return {"rows": rows // matrices, "warps": warps, "late_trigger": True}
