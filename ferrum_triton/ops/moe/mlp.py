"""A layer's experts from gate and up to down, over pairs that are sorted by expert."""

import torch
from torch import Tensor

from ferrum_triton.ops.moe.experts import (
    LAYER,
    check_buckets,
    check_stack,
    gemm_quant_moe_id,
    gemm_quant_moe_id_gate_up_silu,
    ids_sample,
    wide_stack,
)
from ferrum_triton.ops.moe.pairs import compute_ids_tpe
from ferrum_triton.ops.quant import check_kind
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.registry import Case, op


@op(
    tensors={
        "a": "T[num_tokens, k]",
        "gate_blocks": "uint8[num_experts, inner, gate_row_bytes]",
        "up_blocks": "uint8[num_experts, inner, up_row_bytes]",
        "down_blocks": "uint8[num_experts, n, down_row_bytes]",
        "ids": "int[num_tokens, top_k]",
    },
    axes={
        "kind": KINDS,
        "up_kind": (None, *KINDS),
        "down_kind": KINDS,
        "num_tokens": (0, 2, 1, 9),
        "num_experts": (1, 3),
        "top_k": (1, 2, 3),
        "num_blocks": (1,),
        "n": (1, 5),
    },
    bench=[
        Case(
            f"{kind.lower()}_{down.lower()}/e128k8h2048i768/m{m}",
            torch.bfloat16,
            LAYER
            | {"kind": kind, "up_kind": None, "down_kind": down, "num_tokens": m}
            | {"num_blocks": 2048 // 256, "inner_blocks": 768 // 256, "n": 2048},
        )
        for kind, down, m in (
            ("Q4_K:planes", "Q6_K:planes", 32),
            ("Q4_K:planes", "Q4_K:planes", 32),
            ("Q4_K:planes", "Q4_K:planes", 64),
        )
    ],
    after_norm="a",
)
def mlp_quant_moe_id(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    down_blocks: Tensor,
    ids: Tensor,
    gate_kind: str,
    up_kind: str,
    down_kind: str,
) -> Tensor:
    """y[t, s] = (silu(a[t] · Gᵀ) · (a[t] · Uᵀ)) · Dᵀ of expert ids[t, s], for pairs by expert.

    It is :func:`gemm_quant_moe_id_gate_up_silu`, in a's dtype, and :func:`gemm_quant_moe_id` of
    that, with the buckets of ``compute_ids_tpe``. By experts in planes it is three launches while
    an expert has few pairs.

    Args:
        a: [num_tokens, K].
        gate_blocks: uint8 [num_experts, inner, row_bytes]; up to 1024 experts.
        up_blocks: uint8 [num_experts, inner, row_bytes], of a format that may be another.
        down_blocks: uint8 [num_experts, n, row_bytes] over ``inner``, likewise.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.
        gate_kind, up_kind, down_kind: the formats.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    top_k = ids.shape[1]
    bucket_ids, tpe, _ = compute_ids_tpe.reference(ids, len(gate_blocks), 1, 1)
    middle = gemm_quant_moe_id_gate_up_silu.reference(
        a, gate_blocks, up_blocks, bucket_ids, tpe, gate_kind, up_kind, top_k
    )
    return gemm_quant_moe_id.reference(middle, down_blocks, bucket_ids, tpe, down_kind, top_k)


def _mlp_fake(a, gate_blocks, up_blocks, down_blocks, ids, gate_kind, up_kind, down_kind):
    return a.new_empty(*ids.shape, down_blocks.shape[1])


mlp_quant_moe_id.fake = _mlp_fake


@mlp_quant_moe_id.rule
def _(a, gate_blocks, up_blocks, down_blocks, ids, gate_kind, up_kind, down_kind):
    this = mlp_quant_moe_id
    check_stack(this, a, gate_blocks, gate_kind, "gate_")
    check_stack(this, a, up_blocks, up_kind, "up_")
    check_buckets(this, a, gate_blocks, max(ids.shape[1], 1), "gate_blocks")
    check_kind(this, down_blocks, down_kind, "down_blocks", "down_kind")
    if format_of(down_kind).row_weights(down_blocks.shape[-1]) != gate_blocks.shape[1]:
        allowed = f"rows of {gate_blocks.shape[1]} weights, as many as gate_blocks has rows"
        this.reject("down_blocks", f"of shape {list(down_blocks.shape)}", allowed)


@mlp_quant_moe_id.sample
def _(
    make, kind, up_kind, down_kind, num_tokens, num_experts, top_k, num_blocks, n, inner_blocks=1
):
    # Units of 256 weights are whole blocks of any kind.
    k, inner = 256 * num_blocks, format_of(down_kind).block_size * inner_blocks
    return {
        "a": make.randn(num_tokens, k),
        "gate_blocks": wide_stack(make, kind, num_experts, inner, k),
        "up_blocks": wide_stack(make, up_kind or kind, num_experts, inner, k),
        "down_blocks": wide_stack(make, down_kind, num_experts, n, inner),
        "ids": ids_sample(make, num_tokens, num_experts, top_k),
        "gate_kind": kind,
        "up_kind": up_kind or kind,
        "down_kind": down_kind,
    }


@mlp_quant_moe_id.flops
def _(a, gate_blocks, up_blocks, down_blocks, ids, gate_kind, up_kind, down_kind):
    inner, n = gate_blocks.shape[1], down_blocks.shape[1]
    return 2 * ids.numel() * inner * (2 * a.shape[1] + n)


@mlp_quant_moe_id.traffic
def _(a, gate_blocks, up_blocks, down_blocks, ids, gate_kind, up_kind, down_kind):
    read = min(ids.numel(), len(gate_blocks))
    stacks = (gate_blocks, up_blocks, down_blocks)
    results = ids.numel() * down_blocks.shape[1]
    moved = (a.numel() + results) * a.element_size() + ids.numel() * ids.element_size()
    return moved + read * sum(stack[0].numel() for stack in stacks)
