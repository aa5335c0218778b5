"""Products of tokens with their experts' weights in GGUF's packed blocks.

``blocks`` [num_experts, n, row_bytes] stacks a matrix an expert, W[e] of shape [n, K], as the file
has it or in planes (:mod:`ferrum_triton.ops.quant`). Activations are a row a token,
[num_tokens, K], which all of its slots read, or a row a pair, [num_tokens, top_k, K]. What a pair
without an expert gets is zeros.

Activations of planes are finite, and below 2^41 in size: of others products are not finite, or NaN
where the sum is infinite.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import gated
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS, compute_ids_tpe
from ferrum_triton.ops.precision import widen
from ferrum_triton.ops.quant import check_kind
from ferrum_triton.quant import dequantize_rows, quantize_rows
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.registry import Case, Op, op

SIZES = {
    "num_tokens": (0, 1, 2, 5),
    "num_experts": (1, 3, 9),
    "top_k": (1, 2, 3),
    "n": (1, 2, 9),
    "num_blocks": (1, 3),
    "per_slot": (False, True),
}

# Gate and up, or down, of a Qwen3-30B-A3B layer.
LAYER = {"num_experts": 128, "top_k": 8}
# What files of experts hold most.
BENCH_KINDS = ("Q4_K", "Q6_K", "MXFP4", "Q4_K:planes", "Q6_K:planes")
# Tokens of the bench cases over planes.
PLANE_TOKENS = (64, 256, 512, 1024, 2048, 4096)


def _cases(
    kinds: tuple[str, ...], *num_tokens: int, n: int = 768, k: int = 2048, per_slot: bool = False
) -> list[Case]:
    return [
        Case(
            f"{kind.lower()}/e128k8n{n}k{k}/m{m}",
            torch.bfloat16,
            LAYER
            | {
                "kind": kind,
                "num_tokens": m,
                "n": n,
                "num_blocks": k // format_of(kind).block_size,
                "per_slot": per_slot,
            },
        )
        for kind in kinds
        for m in num_tokens
    ]


def check_stack(of_op: Op, a: Tensor, blocks: Tensor, kind: str, prefix: str = "") -> None:
    check_kind(of_op, blocks, kind, f"{prefix}blocks", f"{prefix}kind")
    k = format_of(kind).row_weights(blocks.shape[-1])
    if a.shape[-1] != k:
        allowed = f"[..., {k}], the weights in a row of {prefix}blocks"
        of_op.reject("a", f"of shape {list(a.shape)}", allowed)
    if blocks.shape[0] == 0:
        of_op.reject(f"{prefix}blocks", f"of shape {list(blocks.shape)}", "at least one expert")


def check_rows(of_op: Op, a: Tensor, num_tokens: int, top_k: int) -> None:
    """Reject activations that are neither a row a token nor a row a pair."""
    if a.shape[:-1] not in ((num_tokens,), (num_tokens, top_k)):
        allowed = f"[{num_tokens}, k] or [{num_tokens}, {top_k}, k]"
        of_op.reject("a", f"of shape {list(a.shape)}", allowed)


def _stack_sample(make, kind: str, num_experts: int, n: int, num_blocks: int) -> Tensor:
    k = num_blocks * format_of(kind).block_size
    return quantize_rows(make.randn(num_experts, n, k, scale=k**-0.5), kind)


def wide_stack(make, kind: str, num_experts: int, n: int, k: int) -> Tensor:
    return _stack_sample(make, kind, num_experts, n, k // format_of(kind).block_size)


def _activations(make, num_tokens: int, top_k: int, k: int, per_slot: bool) -> Tensor:
    return make.randn(num_tokens, top_k, k) if per_slot else make.randn(num_tokens, k)


def ids_sample(make, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    return make.ints(-1, num_experts + 1, num_tokens, top_k)


def _pair_products(a: Tensor, blocks: Tensor, ids: Tensor, kind: str) -> Tensor:
    """[num_tokens, top_k, n], in float32 or wider."""
    known = (ids >= 0) & (ids < blocks.shape[0])
    chosen = blocks[torch.where(known, ids, 0).long()]
    wide = widen(a if a.dim() == 3 else a[:, None])
    weights = dequantize_rows(chosen, kind).to(wide.dtype)
    return torch.where(known[..., None], (weights @ wide[..., None])[..., 0], 0.0)


@op(
    tensors={
        "a": "T[..., k]",
        "blocks": "uint8[num_experts, n, row_bytes]",
        "ids": "int[num_tokens, top_k]",
    },
    axes={"kind": KINDS, **SIZES},
    bench=_cases(BENCH_KINDS, 1) + _cases(("Q4_K", "Q4_K:planes"), 4),
    after_norm="a",
)
def gemv_quant_moe_id(a: Tensor, blocks: Tensor, ids: Tensor, kind: str) -> Tensor:
    """y[t, s, n] = Σₖ a[t, s, k] · W[ids[t, s]][n, k], for few tokens.

    W is decoded exactly and the products are summed in float32, whatever a's dtype. Only the
    experts that ids names are read. Over planes, where an expert has more than about one pair of
    16-bit activations, pairs are sorted by expert and taken as in :func:`gemm_quant_moe_id`.

    Args:
        a: [num_tokens, K], a token's row for all its slots, as for gate and up; or
            [num_tokens, top_k, K], a row a slot, as for down. A slice is an offset, and a single
            token a batch of one.
        blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.
        kind: the format of blocks.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    return _pair_products(a, blocks, ids, kind).to(a.dtype)


@gemv_quant_moe_id.rule
def _(a, blocks, ids, kind):
    check_stack(gemv_quant_moe_id, a, blocks, kind)
    check_rows(gemv_quant_moe_id, a, *ids.shape)


@gemv_quant_moe_id.sample
def _(make, kind, num_tokens, num_experts, top_k, n, num_blocks, per_slot):
    k = num_blocks * format_of(kind).block_size
    return {
        "a": _activations(make, num_tokens, top_k, k, per_slot),
        "blocks": _stack_sample(make, kind, num_experts, n, num_blocks),
        "ids": ids_sample(make, num_tokens, num_experts, top_k),
        "kind": kind,
    }


def _traffic(a: Tensor, stacks: tuple[Tensor, ...], num_pairs: int) -> int:
    """Every activation and result once, and as many experts as there may be of these pairs."""
    num_experts, n = stacks[0].shape[:2]
    read = min(num_pairs, num_experts) * n * sum(stack.shape[2] for stack in stacks)
    return (a.numel() + num_pairs * n) * a.element_size() + read


@gemv_quant_moe_id.traffic
def _(a, blocks, ids, kind):
    return ids.numel() * ids.element_size() + _traffic(a, (blocks,), ids.numel())


@op(
    tensors={
        "a": "T[..., k]",
        "gate_blocks": "uint8[num_experts, n, gate_row_bytes]",
        "up_blocks": "uint8[num_experts, n, up_row_bytes]",
        "ids": "int[num_tokens, top_k]",
    },
    # Units of 256 weights are whole blocks of any kind.
    axes={"gate_kind": KINDS, "up_kind": KINDS, **SIZES},
    bench=[
        Case(
            f"{gate.lower()}_{up.lower()}/e128k8n768k2048/m{m}",
            torch.bfloat16,
            LAYER
            | {"gate_kind": gate, "up_kind": up, "num_tokens": m, "n": 768}
            | {"num_blocks": 2048 // 256, "per_slot": False},
        )
        for gate, up, m in (
            ("Q4_K", "Q4_K", 1),
            ("Q4_K", "Q4_K", 4),
            ("Q4_K", "Q6_K", 1),
            ("Q4_K:planes", "Q4_K:planes", 1),
            ("Q4_K:planes", "Q6_K:planes", 1),
        )
    ],
    after_norm="a",
)
def gemv_quant_moe_id_gate_up_silu(
    a: Tensor, gate_blocks: Tensor, up_blocks: Tensor, ids: Tensor, gate_kind: str, up_kind: str
) -> Tensor:
    """y[t, s] = silu(a[t, s] · Gᵀ) · (a[t, s] · Uᵀ), G and U the gate and up of expert ids[t, s].

    Both products are those of :func:`gemv_quant_moe_id`, in float32 until the one rounding at the
    end.

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        gate_blocks: uint8 [num_experts, n, row_bytes].
        up_blocks: uint8 [num_experts, n, row_bytes], of a format that may be another.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.
        gate_kind, up_kind: the formats.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    gate = _pair_products(a, gate_blocks, ids, gate_kind)
    up = _pair_products(a, up_blocks, ids, up_kind)
    return gated(gate, up, "silu").to(a.dtype)


@gemv_quant_moe_id_gate_up_silu.rule
def _(a, gate_blocks, up_blocks, ids, gate_kind, up_kind):
    check_stack(gemv_quant_moe_id_gate_up_silu, a, gate_blocks, gate_kind, "gate_")
    check_stack(gemv_quant_moe_id_gate_up_silu, a, up_blocks, up_kind, "up_")
    check_rows(gemv_quant_moe_id_gate_up_silu, a, *ids.shape)


@gemv_quant_moe_id_gate_up_silu.sample
def _(make, gate_kind, up_kind, num_tokens, num_experts, top_k, n, num_blocks, per_slot):
    k = 256 * num_blocks
    gate, up = (wide_stack(make, kind, num_experts, n, k) for kind in (gate_kind, up_kind))
    return {
        "a": _activations(make, num_tokens, top_k, k, per_slot),
        "gate_blocks": gate,
        "up_blocks": up,
        "ids": ids_sample(make, num_tokens, num_experts, top_k),
        "gate_kind": gate_kind,
        "up_kind": up_kind,
    }


@gemv_quant_moe_id_gate_up_silu.traffic
def _(a, gate_blocks, up_blocks, ids, gate_kind, up_kind):
    stacks = (gate_blocks, up_blocks)
    return ids.numel() * ids.element_size() + _traffic(a, stacks, ids.numel())


@op(
    tensors={
        "a": "T[..., k]",
        "blocks": "uint8[num_experts, n, row_bytes]",
        "bucket_ids": "int[num_experts, capacity]",
        "tpe": "int[num_experts]",
    },
    axes={"kind": KINDS, **SIZES, "num_tokens": (0, 2, 1, 30), "n": (1, 5, 70)},
    bench=_cases(BENCH_KINDS, 64)
    + _cases(("Q4_K", "Q4_K:planes"), 4096)
    + _cases(("Q4_K:planes", "Q4_0:planes"), *PLANE_TOKENS, n=2048, k=768, per_slot=True),
    static=("top_k",),
    after_norm="a",
)
def gemm_quant_moe_id(
    a: Tensor, blocks: Tensor, bucket_ids: Tensor, tpe: Tensor, kind: str, top_k: int
) -> Tensor:
    """y[p // top_k, p mod top_k] = a[p] · W[e]ᵀ for p in the first tpe[e] of bucket_ids[e].

    :func:`compute_ids_tpe` makes the buckets. A tile of an expert's weights is decoded once for up
    to 64 of its pairs. As in ``gemm_quant``, weights are rounded to a's dtype for the tensor cores
    and sums are in float32. Of planes and a in float32 nothing is rounded, and each pair reads its
    expert's rows.

    Args:
        a: [num_tokens, K], a token's row for all its pairs, as for gate and up; or
            [num_tokens, top_k, K], a row a pair, as for down.
        blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows; up to 1024 experts.
        bucket_ids: [num_experts, capacity] int32 or int64, the pairs of each expert. A pair is in
            one bucket, once, or in none: then its row is zeros. Entries that are no pair, outside
            [0, num_tokens · top_k), are passed over.
        tpe: [num_experts] int32 or int64, entries of each bucket; more than capacity counts as
            capacity, less than 0 as 0.
        kind: the format of blocks.
        top_k: slots of a token.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    return _bucket_products(a, blocks, bucket_ids, tpe, kind, top_k).to(a.dtype)


def _bucket_products(
    a: Tensor, blocks: Tensor, bucket_ids: Tensor, tpe: Tensor, kind: str, top_k: int
) -> Tensor:
    """[num_tokens, top_k, n], in float32 or wider."""
    num_pairs = a.shape[0] * top_k
    wide = widen(a if a.dim() == 3 else a[:, None].expand(-1, top_k, -1)).flatten(0, 1)
    y = wide.new_zeros(num_pairs, blocks.shape[1])
    for expert, count in enumerate(tpe.tolist()):
        pairs = bucket_ids[expert, : max(count, 0)].long()
        pairs = pairs[(pairs >= 0) & (pairs < num_pairs)]
        if len(pairs):
            weights = dequantize_rows(blocks[expert], kind).to(wide.dtype)
            y[pairs] = wide[pairs] @ weights.T
    return y.unflatten(0, (a.shape[0], top_k))


# The definition walks the buckets, of which a trace knows no lengths.
def _gemm_fake(a, blocks, bucket_ids, tpe, kind, top_k):
    return a.new_empty(a.shape[0], top_k, blocks.shape[1])


gemm_quant_moe_id.fake = _gemm_fake


def check_buckets(of_op: Op, a: Tensor, blocks: Tensor, top_k: int, name: str = "blocks") -> None:
    if blocks.shape[0] > MAX_EXPERTS:
        allowed = f"at most {MAX_EXPERTS} experts"
        of_op.reject(name, f"of shape {list(blocks.shape)}", allowed)
    if top_k < 1:
        of_op.reject("top_k", str(top_k), "at least 1")
    check_rows(of_op, a, a.shape[0], top_k)


@gemm_quant_moe_id.rule
def _(a, blocks, bucket_ids, tpe, kind, top_k):
    check_stack(gemm_quant_moe_id, a, blocks, kind)
    check_buckets(gemm_quant_moe_id, a, blocks, top_k)


@gemm_quant_moe_id.sample
def _(make, kind, num_tokens, num_experts, top_k, n, num_blocks, per_slot):
    k = num_blocks * format_of(kind).block_size
    ids = ids_sample(make, num_tokens, num_experts, top_k)
    bucket_ids, tpe, _ = compute_ids_tpe.reference(ids, num_experts, n, n)
    return {
        "a": _activations(make, num_tokens, top_k, k, per_slot),
        "blocks": _stack_sample(make, kind, num_experts, n, num_blocks),
        "bucket_ids": bucket_ids,
        "tpe": tpe,
        "kind": kind,
        "top_k": top_k,
    }


@gemm_quant_moe_id.flops
def _(a, blocks, bucket_ids, tpe, kind, top_k):
    return 2 * a.shape[0] * top_k * a.shape[-1] * blocks.shape[1]


@gemm_quant_moe_id.traffic
def _(a, blocks, bucket_ids, tpe, kind, top_k):
    # Entries past each bucket's count are not read.
    num_pairs = a.shape[0] * top_k
    indices = (num_pairs + tpe.numel()) * tpe.element_size()
    return indices + _traffic(a, (blocks,), num_pairs)


@op(
    tensors={
        "a": "T[..., k]",
        "gate_blocks": "uint8[num_experts, n, gate_row_bytes]",
        "up_blocks": "uint8[num_experts, n, up_row_bytes]",
        "bucket_ids": "int[num_experts, capacity]",
        "tpe": "int[num_experts]",
    },
    axes={
        "gate_kind": KINDS,
        "up_kind": KINDS,
        **SIZES,
        "num_tokens": (0, 2, 1, 30),
        "n": (1, 5, 70),
    },
    bench=[
        Case(
            f"{kind.lower()}/e128k8n768k2048/m{m}",
            torch.bfloat16,
            LAYER
            | {"gate_kind": kind, "up_kind": kind, "num_tokens": m, "n": 768}
            | {"num_blocks": 2048 // 256, "per_slot": False},
        )
        for kind in ("Q4_K:planes", "Q4_0:planes")
        for m in PLANE_TOKENS
    ],
    static=("top_k",),
    after_norm="a",
)
def gemm_quant_moe_id_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    bucket_ids: Tensor,
    tpe: Tensor,
    gate_kind: str,
    up_kind: str,
    top_k: int,
) -> Tensor:
    """y[p] = silu(a[p] · G[e]ᵀ) · (a[p] · U[e]ᵀ) for p in the first tpe[e] of bucket_ids[e].

    :func:`gemm_quant_moe_id` of gate and up in one launch where both are one kind of planes, with
    its arguments and its rounding of weights. What the two give is not rounded in between.

    Args:
        a: [num_tokens, K] or [num_tokens, top_k, K].
        gate_blocks: uint8 [num_experts, n, row_bytes]; up to 1024 experts.
        up_blocks: uint8 [num_experts, n, row_bytes], of a format that may be another.
        bucket_ids: [num_experts, capacity] int32 or int64, the pairs of each expert.
        tpe: [num_experts] int32 or int64, entries of each bucket.
        gate_kind, up_kind: the formats.
        top_k: slots of a token.

    Returns:
        [num_tokens, top_k, n] in a's dtype; zeros for pairs in no bucket.
    """
    gate = _bucket_products(a, gate_blocks, bucket_ids, tpe, gate_kind, top_k)
    up = _bucket_products(a, up_blocks, bucket_ids, tpe, up_kind, top_k)
    return gated(gate, up, "silu").to(a.dtype)


def _gemm_gate_up_fake(a, gate_blocks, up_blocks, bucket_ids, tpe, gate_kind, up_kind, top_k):
    return a.new_empty(a.shape[0], top_k, gate_blocks.shape[1])


gemm_quant_moe_id_gate_up_silu.fake = _gemm_gate_up_fake


@gemm_quant_moe_id_gate_up_silu.rule
def _(a, gate_blocks, up_blocks, bucket_ids, tpe, gate_kind, up_kind, top_k):
    check_stack(gemm_quant_moe_id_gate_up_silu, a, gate_blocks, gate_kind, "gate_")
    check_stack(gemm_quant_moe_id_gate_up_silu, a, up_blocks, up_kind, "up_")
    check_buckets(gemm_quant_moe_id_gate_up_silu, a, gate_blocks, top_k, "gate_blocks")


@gemm_quant_moe_id_gate_up_silu.sample
def _(make, gate_kind, up_kind, num_tokens, num_experts, top_k, n, num_blocks, per_slot):
    k = 256 * num_blocks
    ids = ids_sample(make, num_tokens, num_experts, top_k)
    bucket_ids, tpe, _ = compute_ids_tpe.reference(ids, num_experts, n, n)
    gate, up = (wide_stack(make, kind, num_experts, n, k) for kind in (gate_kind, up_kind))
    return {
        "a": _activations(make, num_tokens, top_k, k, per_slot),
        "gate_blocks": gate,
        "up_blocks": up,
        "bucket_ids": bucket_ids,
        "tpe": tpe,
        "gate_kind": gate_kind,
        "up_kind": up_kind,
        "top_k": top_k,
    }


@gemm_quant_moe_id_gate_up_silu.flops
def _(a, gate_blocks, up_blocks, bucket_ids, tpe, gate_kind, up_kind, top_k):
    return 4 * a.shape[0] * top_k * a.shape[-1] * gate_blocks.shape[1]


@gemm_quant_moe_id_gate_up_silu.traffic
def _(a, gate_blocks, up_blocks, bucket_ids, tpe, gate_kind, up_kind, top_k):
    num_pairs = a.shape[0] * top_k
    indices = (num_pairs + tpe.numel()) * tpe.element_size()
    return indices + _traffic(a, (gate_blocks, up_blocks), num_pairs)
