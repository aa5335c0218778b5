"""Sums over the experts of a token, where their products themselves are not asked for."""

import torch
from torch import Tensor

from ferrum_triton.ops.moe.dense import summed
from ferrum_triton.ops.moe.experts import LAYER, SIZES, check_rows, check_stack, gemv_quant_moe_id
from ferrum_triton.ops.precision import widen
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.registry import Case, op

# Tokens up to which products and sum are one launch. A layer of Qwen3-30B-A3B's experts takes, by
# one token and by four, in Q4_K 11.0 and 32.3 us, for 13.1 and 33.4 in two launches; in int4 10.8
# and 31.0 for 13.4 and 30.8; in bfloat16 30.7 and 101 for 32.2 and 103; in FP8 17.7 and 53.4 for
# 19.2 and 59.2 (``python -m bench.moe_layer --tokens 1 4`` at 80e0cc6 and 5d89071, one H100).
FEW_TOKENS = 4


def _case(kind: str) -> Case:
    """Down of a Qwen3-30B-A3B layer."""
    axes = {"kind": kind, "num_tokens": 1, "n": 2048, "per_slot": True}
    axes |= {"num_blocks": 768 // format_of(kind).block_size}
    return Case(f"{kind.lower()}/e128k8n2048k768/m1", torch.bfloat16, LAYER | axes)


@op(
    tensors={
        "a": "T[..., k]",
        "blocks": "uint8[num_experts, n, row_bytes]",
        "ids": "int[num_tokens, top_k]",
        "weights": "float[num_tokens, top_k]",
    },
    axes={"kind": KINDS, **SIZES},
    bench=[_case(kind) for kind in ("Q4_K", "Q4_K:planes", "Q6_K:planes", "Q4_0:planes")],
    after_norm="a",
)
def gemv_quant_moe_id_sum(
    a: Tensor, blocks: Tensor, ids: Tensor, weights: Tensor, kind: str
) -> Tensor:
    """y[t] = Σ_s weights[t, s] · (W[ids[t, s]] · a[t, s]), for few tokens.

    The sum over slots of :func:`gemv_quant_moe_id`, whose products stay in float32 until y is
    rounded once. Sums are of a fixed order. Of up to 4 tokens, whose slots are 16 at most, stacks
    in planes take one launch; all else is two.

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) adds nothing,
            whatever its weight.
        weights: [num_tokens, top_k], any float dtype.
        kind: the format of blocks.

    Returns:
        [num_tokens, n] in a's dtype.
    """
    products = gemv_quant_moe_id.reference(widen(a), blocks, ids, kind)
    return summed(products, ids, weights, len(blocks)).to(a.dtype)


@gemv_quant_moe_id_sum.rule
def _(a, blocks, ids, weights, kind):
    check_stack(gemv_quant_moe_id_sum, a, blocks, kind)
    check_rows(gemv_quant_moe_id_sum, a, *ids.shape)


@gemv_quant_moe_id_sum.sample
def _(make, **axes):
    call = gemv_quant_moe_id.make_sample(make, **axes)
    return call | {"weights": make.weight(*call["ids"].shape)}


@gemv_quant_moe_id_sum.traffic
def _(a, blocks, ids, weights, kind):
    """Every activation, id, weight and result once, and as many experts as there may be."""
    num_experts, n, row_bytes = blocks.shape
    read = min(ids.numel(), num_experts) * n * row_bytes
    given = sum(x.numel() * x.element_size() for x in (a, ids, weights))
    return given + ids.shape[0] * n * a.element_size() + read
