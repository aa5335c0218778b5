"""Few tokens by experts, summed over these: y[t] = Σ_s w[t, s] · (W[ids[t, s]] · a[t, s]).

Of stacks in planes one program takes a token and a block of rows, of all of the token's experts. A
warp or several are a slot: each thread has the matrix and the activations of its own slot, so that
the weights of all slots are in flight at once. What threads hold is multiplied by their slots'
weights, and one reduction adds up K and slots. There is nothing to store between.

All else is two launches: products in float32, and their sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.moe.combine import launch_sum
from ferrum_triton.kernels.moe.expert_gemv import gemv_quant_moe_id
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.gemv_plan import plan_of
from ferrum_triton.kernels.quant.gemv_repacked import first_row, sums_by_lane
from ferrum_triton.kernels.quant.planes import Layout, Matrix, layout_of, load_rows
from ferrum_triton.kernels.quant.thread_products import Activations
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.moe import expert_sum as ops
from ferrum_triton.quant.planes import PLANE_FORMATS, ROW_ALIGN

# Slots of a token up to which a program has them all, and its threads.
MOST_SLOTS, MOST_THREADS = 16, 512


@kernel(dynamic=("num_tokens",))
def _plane_sum_kernel(
    y_ptr,  # [num_tokens, n]
    a_ptr,  # [num_tokens, k], or [num_tokens, top_k, k]
    planes_ptr,  # [num_experts, n, row_bytes]
    weights_ptr,  # [num_tokens, top_k]
    ids_ptr,  # [num_tokens, top_k]
    stride_y_token,
    stride_a_token,
    stride_a_slot,  # 0 where a token's slots share a row
    stride_expert,  # in units of 16 bytes
    stride_weights_token,
    stride_ids_token,
    num_experts,
    num_rows,
    num_tokens,
    LAYOUT: tl.constexpr,
    TOP_K: tl.constexpr,
    PLAN: tl.constexpr,  # whose threads are those of a slot
    GUESS: tl.constexpr,  # ids are read, and their weights loaded, before the PDL wait
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = PLAN.rows
    LANES: tl.constexpr = PLAN.threads
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    if not GUESS:
        pdl_wait(PDL)
        pdl_trigger(PDL)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    first = first_row(tl.program_id(0) // num_tokens, num_rows, ROWS)
    thread = tl.arange(0, SLOTS * LANES)
    slot, lane = thread // LANES, thread % LANES
    has_slot = slot < TOP_K
    a_row = a_ptr + token * stride_a_token + slot.to(tl.int64) * stride_a_slot
    a = Activations(a_row, 0, None, 0)
    ids_ptr += token * stride_ids_token + slot
    weights_ptr += token * stride_weights_token + slot

    # Past L1: a line that was read before the wait is not read again from there.
    expert = tl.load(ids_ptr, mask=has_slot, other=-1, cache_modifier=".cg").to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    matrix = Matrix(planes_ptr + expert * stride_expert * 16, num_rows)
    rows = load_rows(matrix, first, lane, _has_part(known, lane, LAYOUT), LAYOUT, PLAN)
    if GUESS:
        pdl_wait(PDL)
        pdl_trigger(PDL)
        found = tl.load(ids_ptr, mask=has_slot, other=-1, volatile=True).to(tl.int64)
    weight = tl.load(weights_ptr, mask=has_slot, other=0.0).to(tl.float32)
    y = _sum_of_slots(a, matrix, first, rows, lane, known, weight, LAYOUT, PLAN)
    if GUESS:
        # The launch before has ended: where it changed an id, the sum is made once more.
        if tl.max((found != expert).to(tl.int32), axis=0) != 0:
            known = (found >= 0) & (found < num_experts)
            matrix = Matrix(planes_ptr + found * stride_expert * 16, num_rows)
            rows = load_rows(matrix, first, lane, _has_part(known, lane, LAYOUT), LAYOUT, PLAN)
            y = _sum_of_slots(a, matrix, first, rows, lane, known, weight, LAYOUT, PLAN)
    at = y_ptr + token * stride_y_token + first + tl.arange(0, ROWS)
    tl.store(at, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _has_part(known, lane, LAYOUT: tl.constexpr):
    """Threads that have an expert, and a part of its rows at the first step."""
    return known & (lane < LAYOUT.groups // LAYOUT.span)


@triton.jit
def _sum_of_slots(
    a, matrix, first, rows, lane, known, weight, LAYOUT: tl.constexpr, PLAN: tl.constexpr
):
    """The products of a block of rows, summed over slots: float32 [PLAN.rows].

    Args:
        a, matrix: of each thread's slot.
        first: first row, int64.
        rows: what is loaded of the block for the first step.
        lane: a thread's place in its slot, [threads].
        known: threads whose slot has an expert, [threads].
        weight: the weight of each thread's slot, float32 [threads].
    """
    ROWS: tl.constexpr = PLAN.rows
    totals = sums_by_lane(a, matrix, first, rows, lane, known, LAYOUT, PLAN)
    weighed = ()
    for r in tl.static_range(ROWS):
        weighed += (tl.where(known, totals[r][0] * weight, 0.0),)
    return summed(weighed, ROWS, PLAN.ptx)


def _config_of(layout: Layout, top_k: int, is_wide: bool) -> Config:
    """Rows a program takes, and the warps of a slot.

    A layer of Qwen3-30B-A3B's experts in Q4_K takes 11.0 us by one token and 32.3 by four with
    eight rows, 11.5 and 35.2 with four and with 16, and 14.3 and 41.5 with two warps a slot
    (``bench.timing.Replay`` of ``bench.moe_layer``'s calls with each, H100, e5ee8f9).
    """
    parts = layout.groups // layout.span
    most = min(MOST_THREADS // 32 // next_power_of_2(top_k), 4)
    warps = min(next_power_of_2(max(cdiv(parts, 32), 1)), most)
    # What is made of 16-bit activations is shared by all rows of a program. Where K takes several
    # steps, eight rows of MXFP4 spill on sm_90.
    return {"rows": 4 if is_wide or parts > 32 * warps else 8, "warps": warps}


def _sum_by_planes(
    y: Tensor, a: Tensor, planes: Tensor, ids: Tensor, weights: Tensor, kind: str
) -> None:
    """The sum in one launch, of ids [num_tokens, top_k] with top_k <= MOST_SLOTS."""
    (num_tokens, top_k), (num_experts, num_rows) = ids.shape, planes.shape[:2]
    layout, pdl = layout_of(planes, kind, a.shape[-1]), can_overlap(a.device)
    plan = plan_of(_config_of(layout, top_k, a.dtype == torch.float32), a, 1, num_rows)
    _plane_sum_kernel.launch(
        (num_tokens * cdiv(num_rows, plan.rows),),
        y_ptr=y,
        a_ptr=a,
        planes_ptr=planes,
        weights_ptr=weights,
        ids_ptr=ids,
        stride_y_token=y.stride(0),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_expert=planes.stride(0) // ROW_ALIGN,
        stride_weights_token=weights.stride(0),
        stride_ids_token=ids.stride(0),
        num_experts=num_experts,
        num_rows=num_rows,
        num_tokens=num_tokens,
        LAYOUT=layout,
        TOP_K=top_k,
        PLAN=plan,
        # A row a slot was made by a product with the same ids.
        GUESS=a.dim() == 3 and pdl,
        PDL=pdl,
        num_warps=next_power_of_2(top_k) * plan.threads // 32,
    )


def _sum_by_products(
    y: Tensor, a: Tensor, blocks: Tensor, ids: Tensor, weights: Tensor, kind: str
) -> None:
    """The sum of products that another launch leaves in float32."""
    (num_tokens, top_k), (num_experts, num_rows) = ids.shape, blocks.shape[:2]
    products = a.new_empty(num_tokens, top_k, num_rows, dtype=torch.float32)
    gemv_quant_moe_id(a, blocks, ids, kind, out=products)
    launch_sum(y, products, weights, ids, num_experts=num_experts)


# Of other kinds nothing is saved: they are two launches, as they are without this op.
@ops.gemv_quant_moe_id_sum.impl("triton", kinds=PLANE_FORMATS)
def gemv_quant_moe_id_sum(
    a: Tensor,
    blocks: Tensor,
    ids: Tensor,
    weights: Tensor,
    kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, top_k = ids.shape
    y = a.new_empty(num_tokens, blocks.shape[1]) if out is None else out
    if y.numel() == 0:
        return y
    if top_k == 0 or a.shape[-1] == 0:
        return y.zero_()
    is_few = num_tokens <= ops.FEW_TOKENS and top_k <= MOST_SLOTS
    by = _sum_by_planes if is_few and kind in PLANE_FORMATS else _sum_by_products
    by(y, a, blocks, ids, weights, kind)
    return y
