"""Combining what a token's experts return, and what follows the sum in a decoder."""

import torch
from torch import Tensor

from ferrum_triton.ops.norm import rms_norm
from ferrum_triton.ops.precision import widen
from ferrum_triton.ops.quant_fused import (
    NORM_AXES,
    QKV_TENSORS,
    add_rms_norm_quant_qkv,
    check_products,
    fused_case,
    packed_units,
)
from ferrum_triton.quant.kinds import KINDS
from ferrum_triton.registry import Case, Op, op

SLOTS = {"num_tokens": (0, 1, 5), "top_k": (1, 2, 3, 8), "hidden_size": (1, 17, 64, 576)}


def _slot_cases() -> list[Case]:
    return [
        Case(
            f"bf16/k8h2048/m{m}", torch.bfloat16, {"num_tokens": m, "top_k": 8, "hidden_size": 2048}
        )
        for m in (1, 64, 4096)
    ]


def _weighted_sum(slots: Tensor, weights: Tensor) -> Tensor:
    return (widen(slots) * widen(weights)[..., None]).sum(dim=1)


@op(
    tensors={
        "packed": "T[num_rows, hidden_size]",
        "pairs": "int[num_tokens, top_k]",
        "weights": "float[num_tokens, top_k]",
    },
    axes=SLOTS,
    bench=_slot_cases(),
)
def moe_combine(packed: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """y[t] = Σ_k weights[t, k] · packed[pairs[t, k]], in the order of k.

    Args:
        packed: [num_rows, hidden_size], what the experts returned, in packed rows.
        pairs: [num_tokens, top_k] packed row of each pair; a pair outside [0, num_rows) adds
            nothing, whatever its weight.
        weights: [num_tokens, top_k], any float dtype.

    Returns:
        [num_tokens, hidden_size] in packed's dtype; summed in float32, rounded once.
    """
    if packed.shape[0] == 0:
        return packed.new_zeros(pairs.shape[0], packed.shape[1])
    known = (pairs >= 0) & (pairs < packed.shape[0])
    slots = widen(packed[torch.where(known, pairs, 0).long()])
    terms = torch.where(known[..., None], slots * widen(weights)[..., None], 0.0)
    return terms.sum(dim=1).to(packed.dtype)


@moe_combine.sample
def _(make, num_tokens, top_k, hidden_size):
    num_rows = num_tokens * top_k
    return {
        "packed": make.randn(num_rows, hidden_size),
        "pairs": make.distinct_ints(-1, num_rows + 1, num_rows).view(num_tokens, top_k),
        "weights": make.weight(num_tokens, top_k),
    }


SLOT_TENSORS = {
    "slots": "T[num_tokens, top_k, hidden_size]",
    "weights": "float[num_tokens, top_k]",
}


@op(tensors=SLOT_TENSORS, axes=SLOTS, bench=_slot_cases())
def weighted_sum(slots: Tensor, weights: Tensor) -> Tensor:
    """y[t] = Σ_k weights[t, k] · slots[t, k], in the order of k.

    Args:
        slots: [num_tokens, top_k, hidden_size], strided as they come; ``slots[None]`` for one
            token, a slice for an offset.
        weights: [num_tokens, top_k], any float dtype.

    Returns:
        [num_tokens, hidden_size] in slots' dtype; summed in float32, rounded once.
    """
    return _weighted_sum(slots, weights).to(slots.dtype)


@weighted_sum.sample
def _slot_sample(make, num_tokens, top_k, hidden_size):
    return {
        "slots": make.randn(num_tokens, top_k, hidden_size),
        "weights": make.weight(num_tokens, top_k),
    }


RESIDUAL_TENSORS = {**SLOT_TENSORS, "residual": "float[num_tokens, hidden_size]"}
RESIDUAL_AXES = {**SLOTS, "wide_residual": (False, True)}


def _check_residual(of_op: Op, slots: Tensor, residual: Tensor) -> None:
    if residual.dtype not in (slots.dtype, torch.float32):
        allowed = f"slots' dtype {slots.dtype}, or float32"
        of_op.reject("residual", str(residual.dtype), allowed)


def _residual_sample(make, wide_residual=False, **axes):
    residual = make.randn(axes["num_tokens"], axes["hidden_size"])
    return {
        **_slot_sample(make, **axes),
        "residual": residual.float() if wide_residual else residual,
    }


@op(tensors=RESIDUAL_TENSORS, axes=RESIDUAL_AXES, bench=_slot_cases(), mutates=("residual",))
def weighted_sum_residual(slots: Tensor, weights: Tensor, residual: Tensor) -> None:
    """residual[t] ← residual[t] + Σ_k weights[t, k] · slots[t, k], rounded once.

    Args:
        slots: [num_tokens, top_k, hidden_size].
        weights: [num_tokens, top_k], any float dtype.
        residual: [num_tokens, hidden_size], updated in place; of slots' dtype, or float32.
    """
    residual.copy_(widen(residual) + _weighted_sum(slots, weights))


@weighted_sum_residual.rule
def _(slots, weights, residual):
    _check_residual(weighted_sum_residual, slots, residual)


weighted_sum_residual.sample(_residual_sample)


@op(
    tensors={**RESIDUAL_TENSORS, "norm_weight": "float[hidden_size]"},
    axes=RESIDUAL_AXES,
    bench=_slot_cases(),
    mutates=("residual",),
)
def weighted_sum_residual_norm(
    slots: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6
) -> Tensor:
    """:func:`weighted_sum_residual`, then y = rms_norm(residual) · norm_weight; one launch.

    The variance is taken from the residual as stored, so that the result equals ``rms_norm`` of
    what the next layer reads.

    Args:
        slots: [num_tokens, top_k, hidden_size].
        weights: [num_tokens, top_k], any float dtype.
        residual: [num_tokens, hidden_size], updated in place; of slots' dtype, or float32.
        norm_weight: [hidden_size], the next layer's norm, any float dtype.
        eps: added to the mean square.

    Returns:
        [num_tokens, hidden_size] in slots' dtype.
    """
    residual.copy_(widen(residual) + _weighted_sum(slots, weights))
    return rms_norm.reference(residual, norm_weight, eps).to(slots.dtype)


@weighted_sum_residual_norm.rule
def _(slots, weights, residual, norm_weight, eps):
    _check_residual(weighted_sum_residual_norm, slots, residual)


@weighted_sum_residual_norm.sample
def _(make, **axes):
    sample = _residual_sample(make, **axes)
    return {**sample, "norm_weight": make.weight(axes["hidden_size"])}


SLOTS_QKV_TENSORS = {
    "residual": "float[m, k]",
    "slots": "T[m, top_k, k]",
    "weights": "float[m, top_k]",
    "norm_weight": "float[k]",
    **QKV_TENSORS,
}


def _slots_qkv_case(m: int) -> Case:
    """Of Qwen3-30B-A3B, whose Q, K and V are of two formats."""
    q_kind, v_kind = "Q4_K:planes", "Q6_K:planes"
    axes = {"q_kind": q_kind, "k_kind": None, "v_kind": v_kind, "nq": 4608, "nkv": 512}
    axes |= {"num_blocks": 2048 // 256, "top_k": 8, "wide_residual": True}
    return fused_case((q_kind, v_kind), "k8n5120k2048", m, axes)


@op(
    tensors=SLOTS_QKV_TENSORS,
    axes={
        "q_kind": KINDS,
        "k_kind": (None, *KINDS),
        "v_kind": (None, *KINDS),
        **NORM_AXES,
        "m": (0, 1, 3, 9, 17),
        "top_k": (1, 2, 8),
        "nq": (1, 2, 17),
        "nkv": (1, 0, 16),
    },
    bench=[_slots_qkv_case(m) for m in (8, 16, 32)],
    mutates=("residual",),
    rounded={"residual": "slots"},
)
def weighted_sum_norm_quant_qkv(
    residual: Tensor,
    slots: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    eps: float,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor | None,
    q_kind: str,
    k_kind: str,
    v_kind: str,
) -> Tensor:
    """:func:`add_rms_norm_quant_qkv` of x = Σ_k weights[:, k] · slots[:, k], in slots' dtype.

    It is what lies between two layers, if the first ends in a mixture of experts. By weights in
    planes of one format it is two launches, if there are more than 16 rows.

    Args:
        residual: [m, K], updated in place; of slots' dtype, or float32.
        slots: [m, top_k, K], what a token's experts return.
        weights: [m, top_k], any float dtype.
        norm_weight: [K], any float dtype.
        eps: added to the mean square.
        q_blocks: uint8 [nq, row_bytes], packed rows.
        k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
        v_blocks: uint8 [nv, row_bytes], or None.
        q_kind, k_kind, v_kind: the formats; that of None is not read.

    Returns:
        [m, nq + nk + nv] in slots' dtype.
    """
    x = weighted_sum.reference(slots, weights)
    matrices = q_blocks, k_blocks, v_blocks, q_kind, k_kind, v_kind
    return add_rms_norm_quant_qkv.reference(residual, x, norm_weight, eps, *matrices)


@weighted_sum_norm_quant_qkv.rule
def _(
    residual, slots, weights, norm_weight, eps, q_blocks, k_blocks, v_blocks, q_kind, k_kind, v_kind
):
    parts = (("q_", q_blocks, q_kind), ("k_", k_blocks, k_kind), ("v_", v_blocks, v_kind))
    check_products(weighted_sum_norm_quant_qkv, slots, parts, "slots")
    _check_residual(weighted_sum_norm_quant_qkv, slots, residual)


@weighted_sum_norm_quant_qkv.sample
def _(make, q_kind, k_kind, v_kind, m, top_k, nq, nkv, num_blocks, wide_residual):
    sizes = ((q_kind, nq), (k_kind, nkv), (v_kind, nkv))
    q, key, v = (packed_units(make, kind, n, num_blocks) for kind, n in sizes)
    axes = {"num_tokens": m, "top_k": top_k, "hidden_size": 256 * num_blocks}
    return _residual_sample(make, wide_residual, **axes) | {
        "norm_weight": make.weight(256 * num_blocks),
        "eps": 1e-6,
        "q_blocks": q,
        "k_blocks": key,
        "v_blocks": v,
        "q_kind": q_kind,
        "k_kind": k_kind or "",
        "v_kind": v_kind or "",
    }
