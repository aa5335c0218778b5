"""Products of tokens with their experts' weights in 16 or 32 bits.

``weights`` [num_experts, n, k] stacks a matrix an expert, stored [out_features, in_features].
Activations are a row a token, [num_tokens, k], which all of its slots read, or a row a pair,
[num_tokens, top_k, k]. What a pair without an expert gets is zeros.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, gated
from ferrum_triton.ops.moe.activation import clamped_swiglu
from ferrum_triton.ops.moe.experts import check_rows
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

EXPERT_GATES = (*GATES, "clamped_swiglu")
"""What gate and up of an expert may go through."""

SIZES = {
    "num_tokens": (0, 1, 2, 30),
    "num_experts": (1, 3, 9),
    "top_k": (1, 2, 3),
    "n": (1, 9, 70),
    "k": (1, 33, 128),
    "per_slot": (False, True),
    "with_bias": (False, True),
}

# Pairs whose experts the definition gathers at a time.
PAIRS_AT_A_TIME = 64

# Tokens of the bench cases.
EVERY_SIZE = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)


def _cases(n: int, k: int, per_slot: bool, tokens: tuple[int, ...] = EVERY_SIZE) -> list[Case]:
    """Cases of a Qwen3-30B-A3B layer."""
    layer = {"num_experts": 128, "top_k": 8, "n": n, "k": k, "per_slot": per_slot}
    return [
        Case(
            f"bf16/e128k8n{n}k{k}/m{m}",
            torch.bfloat16,
            layer | {"num_tokens": m, "with_bias": False},
        )
        for m in tokens
    ]


def _check_call(of_op: Op, a: Tensor, weights: Tensor, ids: Tensor) -> None:
    if weights.shape[0] == 0:
        of_op.reject("weights", f"of shape {list(weights.shape)}", "at least one expert")
    check_rows(of_op, a, *ids.shape)


def rows_of_pairs(a: Tensor, ids: Tensor) -> Tensor:
    """Activations [num_tokens, top_k, k] of each pair: a view of what a holds."""
    return a if a.dim() == 3 else a[:, None].expand(*ids.shape, a.shape[-1])


def _pair_products(a: Tensor, weights: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
    """[num_tokens, top_k, n], in float32 or wider."""
    pairs, expert = rows_of_pairs(a, ids).flatten(0, 1), ids.flatten()
    known = (expert >= 0) & (expert < weights.shape[0])
    expert = torch.where(known, expert, 0).long()
    chunks = zip(expert.split(PAIRS_AT_A_TIME), pairs.split(PAIRS_AT_A_TIME), strict=True)
    y = torch.cat([(widen(weights[e]) @ widen(x)[..., None])[..., 0] for e, x in chunks])
    if bias is not None:
        y = y + widen(bias)[expert]
    return torch.where(known[:, None], y, 0.0).unflatten(0, ids.shape)


def summed(products: Tensor, ids: Tensor, slot_weights: Tensor, num_experts: int) -> Tensor:
    """Σₛ slot_weights[t, s] · products[t, s], of slots that have one of the experts."""
    known = (ids >= 0) & (ids < num_experts)
    terms = products * widen(slot_weights)[..., None]
    return torch.where(known[..., None], terms, 0.0).sum(dim=1)


def activated(y: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Gate and up, the halves of y's rows, through one of :data:`EXPERT_GATES`."""
    gate, up = y.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        return clamped_swiglu(gate, up, alpha, limit)
    return gated(gate, up, activation)


def _traffic(a: Tensor, weights: Tensor, ids: Tensor, bias: Tensor | None, n: int) -> int:
    """Every activation and result once, and as many experts as there may be of these pairs."""
    read = min(ids.numel(), weights.shape[0])
    moved = read * weights.shape[1] * weights.shape[2] * weights.element_size()
    if bias is not None:
        moved += read * bias.shape[1] * bias.element_size()
    moved += (a.numel() + ids.numel() * n) * a.element_size()
    return moved + ids.numel() * ids.element_size()


def sum_traffic(a: Tensor, slot_weights: Tensor, n: int) -> int:
    """A row of n results a token, and the weights of its slots."""
    results = slot_weights.shape[0] * n * a.element_size()
    return results + slot_weights.numel() * slot_weights.element_size()


def _sample(make, num_tokens, num_experts, top_k, n, k, per_slot, with_bias):
    rows = (num_tokens, top_k) if per_slot else (num_tokens,)
    return {
        "a": make.randn(*rows, k),
        "weights": make.randn(num_experts, n, k, scale=k**-0.5),
        "ids": make.ints(-1, num_experts + 1, num_tokens, top_k),
        "bias": make.weight(num_experts, n) if with_bias else None,
    }


@op(
    tensors={
        "a": "T[..., k]",
        "weights": "T[num_experts, n, k]",
        "ids": "int[num_tokens, top_k]",
        "bias": "float[num_experts, n]",
    },
    axes=SIZES,
    bench=_cases(2048, 768, per_slot=True),
    after_norm="a",
)
def gemm_moe_id(a: Tensor, weights: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[t, s, n] = Σₖ a[t, s, k] · W[e][n, k] + bias[e][n], with e = ids[t, s].

    Of few pairs each reads its expert by itself. More are sorted by expert first, and an expert's
    weights are read once for a tile of them. Nothing is asked of the host; no expert is read that
    ids does not name.

    Args:
        a: [num_tokens, k], a token's row for all its slots; or [num_tokens, top_k, k], a row a
            slot, as for down.
        weights: [num_experts, n, k], in a's dtype.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros, so that each of several ranks may have some of the experts.
        bias: [num_experts, n], any float dtype, or None.

    Returns:
        [num_tokens, top_k, n] in a's dtype; sums in float32, rounded once.
    """
    return _pair_products(a, weights, ids, bias).to(a.dtype)


@gemm_moe_id.rule
def _(a, weights, ids, bias):
    _check_call(gemm_moe_id, a, weights, ids)


gemm_moe_id.sample(_sample)


@gemm_moe_id.traffic
def _(a, weights, ids, bias):
    return _traffic(a, weights, ids, bias, weights.shape[1])


@gemm_moe_id.flops
def _(a, weights, ids, bias):
    return 2 * ids.numel() * weights.shape[1] * weights.shape[2]


@op(
    tensors={
        "a": "T[..., k]",
        "weights": "T[num_experts, n, k]",
        "ids": "int[num_tokens, top_k]",
        "slot_weights": "float[num_tokens, top_k]",
        "bias": "float[num_experts, n]",
    },
    axes=SIZES,
    bench=_cases(2048, 768, per_slot=True, tokens=(1, 4)),
    after_norm="a",
)
def gemm_moe_id_sum(
    a: Tensor, weights: Tensor, ids: Tensor, slot_weights: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y[t] = Σₛ slot_weights[t, s] · (W[e] · a[t, s] + bias[e]), with e = ids[t, s].

    Of few tokens it is one launch, which rounds nothing before the sum. Of more it is
    :func:`gemm_moe_id`, whose products are rounded to a's dtype, and a sum.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        weights: [num_experts, n, k], in a's dtype.
        ids: [num_tokens, top_k] int32 or int64. A slot whose id is outside [0, num_experts) adds
            nothing, whatever its weight.
        slot_weights: [num_tokens, top_k], any float dtype.
        bias: [num_experts, n], any float dtype, or None.

    Returns:
        [num_tokens, n] in a's dtype; summed in float32, in a fixed order.
    """
    products = _pair_products(a, weights, ids, bias)
    return summed(products, ids, slot_weights, weights.shape[0]).to(a.dtype)


@gemm_moe_id_sum.rule
def _(a, weights, ids, slot_weights, bias):
    _check_call(gemm_moe_id_sum, a, weights, ids)


@gemm_moe_id_sum.sample
def _(make, num_tokens, top_k, **axes):
    found = _sample(make, num_tokens=num_tokens, top_k=top_k, **axes)
    return found | {"slot_weights": make.weight(num_tokens, top_k)}


@gemm_moe_id_sum.traffic
def _(a, weights, ids, slot_weights, bias):
    return _traffic(a, weights, ids, bias, 0) + sum_traffic(a, slot_weights, weights.shape[1])


@gemm_moe_id_sum.flops
def _(a, weights, ids, slot_weights, bias):
    return 2 * ids.numel() * weights.shape[1] * (weights.shape[2] + 1)


@op(
    tensors={
        "a": "T[..., k]",
        "weights": "T[num_experts, n2, k]",
        "ids": "int[num_tokens, top_k]",
        "bias": "float[num_experts, n2]",
    },
    axes=SIZES | {"activation": EXPERT_GATES},
    bench=_cases(768, 2048, per_slot=False),
    after_norm="a",
)
def gemm_moe_id_gate_up(
    a: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """y[t, s] = act(a[t, s] · Gᵀ + bias_G) · (a[t, s] · Uᵀ + bias_U), [G; U] = W[ids[t, s]].

    Products are those of :func:`gemm_moe_id`, in float32 until the one rounding at the end.

    Args:
        a: [num_tokens, k] or [num_tokens, top_k, k].
        weights: [num_experts, 2 n, k], of each expert G's rows and then U's; in a's dtype.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
            zeros.
        bias: [num_experts, 2 n], any float dtype, or None.
        activation: ``"silu"``; ``"gelu_tanh"``; or ``"clamped_swiglu"``, gpt-oss's
            (u + 1) · g · sigmoid(alpha · g) with g at most limit and u from -limit to limit.
        alpha: the slope of that sigmoid.
        limit: the bound of g and u there, 0 or more.

    Returns:
        [num_tokens, top_k, n] in a's dtype.
    """
    y = activated(_pair_products(a, weights, ids, bias), activation, alpha, limit)
    known = (ids >= 0) & (ids < weights.shape[0])
    return torch.where(known[..., None], y, 0.0).to(a.dtype)


@gemm_moe_id_gate_up.rule
def _(a, weights, ids, bias, activation, alpha, limit):
    this = gemm_moe_id_gate_up
    if activation not in EXPERT_GATES:
        this.reject("activation", repr(activation), " or ".join(map(repr, EXPERT_GATES)))
    if weights.shape[1] % 2:
        this.reject("weights", f"{weights.shape[1]} rows an expert", "as many of G as of U")
    _check_call(this, a, weights, ids)


@gemm_moe_id_gate_up.sample
def _(make, n, activation="silu", **axes):
    found = _sample(make, n=2 * n, **axes)
    scalars = {"alpha": make.scalar(1.0, 2.0), "limit": make.scalar(0.5, 2.0)}
    return found | {"activation": activation, **scalars}


@gemm_moe_id_gate_up.traffic
def _(a, weights, ids, bias, activation, alpha, limit):
    return _traffic(a, weights, ids, bias, weights.shape[1] // 2)


@gemm_moe_id_gate_up.flops
def _(a, weights, ids, bias, activation, alpha, limit):
    return 2 * ids.numel() * weights.shape[1] * weights.shape[2]
