"""Choosing experts from a router's logits."""

import torch
from torch import Tensor

from ferrum_triton.ops.linear import gemm
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS, count_experts
from ferrum_triton.ops.pointwise import sigmoid
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

MAX_TOP_K = 32

ROUTES = {
    "num_tokens": (0, 1, 5, 70),
    "num_experts": (1, 8, 60, 128),
    "top_k": (1, 2, 8),
    "norm_topk_prob": (False, True),
    "counted": (True, False),
}


def _route_cases(name: str, dtype: torch.dtype, **axes: int) -> list[Case]:
    return [Case(f"{name}/m{m}", dtype, {"num_tokens": m, **axes}) for m in (1, 64, 4096)]


def _check_route(of_op: Op, logits: Tensor, top_k: int, name: str = "logits") -> None:
    num_experts = logits.shape[1]
    if not 1 <= num_experts <= MAX_EXPERTS:
        of_op.reject(name, f"of {num_experts} experts", f"1 to {MAX_EXPERTS} experts")
    if not 1 <= top_k <= min(MAX_TOP_K, num_experts):
        of_op.reject("top_k", str(top_k), f"1 to {min(MAX_TOP_K, num_experts)}")


def _nan_last(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), -torch.inf, x)


def _descending(x: Tensor) -> Tensor:
    """Columns of x by descending value, equal values by ascending column."""
    return x.sort(dim=-1, descending=True, stable=True).indices


def _counts(ids: Tensor, logits: Tensor, counted: bool) -> Tensor:
    """How often each expert was chosen, or nothing."""
    if not counted:
        return logits.new_empty(0, dtype=torch.int32)
    return count_experts(ids.reshape(-1), logits.shape[1])


def _normalised(chosen: Tensor, top_k: int) -> Tensor:
    total = chosen.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, chosen / total, 1.0 / top_k)


@op(
    tensors={"logits": "T[num_tokens, num_experts]"},
    axes=ROUTES,
    bench=[
        *_route_cases("e128k8", torch.bfloat16, num_experts=128, top_k=8),
        *_route_cases("fp32/e1024k32", torch.float32, num_experts=1024, top_k=32),
    ],
    static=("top_k",),
)
def route_topk_softmax(
    logits: Tensor, top_k: int, norm_topk_prob: bool = True, counted: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """p = softmax(logits) over all experts; the top_k of p, and how many tokens chose each expert.

    Experts are ranked by their logits, that is by p before any rounding, equal logits by the lower
    id. A NaN logit counts as -inf: probability 0, chosen after every number. Logits of +inf share
    the probability equally; a row without any logit above -inf has probabilities 0.

    Args:
        logits: [num_tokens, num_experts], up to 1024 experts; rows may be strided.
        top_k: experts a token, up to 32.
        norm_topk_prob: divide by the sum over the chosen experts (Mixtral, Qwen3-MoE), which is
            also the softmax over the chosen logits; where the sum is 0 each weight is 1 / top_k.
        counted: whether the counts are asked for, which several programs add up in memory that a
            launch of its own has to clear.

    Returns:
        ids [num_tokens, top_k] int32, by descending probability; weights [num_tokens, top_k]
        float32; counts [num_experts] int32, the tokens of each expert, or [0] if not ``counted``.
    """
    clean = _nan_last(widen(logits))
    ids = _descending(clean)[:, :top_k]
    top = clean.amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    likelihood = torch.where(clean == top, 1.0, (clean - top).exp())
    chosen = likelihood.gather(1, ids)
    if norm_topk_prob:
        weights = _normalised(chosen, top_k)
    else:
        total = likelihood.sum(dim=-1, keepdim=True)
        weights = torch.where(total > 0, chosen / total, 0.0)
    return ids.to(torch.int32), weights.to(torch.float32), _counts(ids, logits, counted)


@route_topk_softmax.rule
def _(logits, top_k, norm_topk_prob, counted):
    _check_route(route_topk_softmax, logits, top_k)


@route_topk_softmax.sample
def _(make, num_tokens, num_experts, top_k, norm_topk_prob=True, counted=True):
    return {
        "logits": make.randn(num_tokens, num_experts, scale=2.0),
        "top_k": min(top_k, num_experts),
        "norm_topk_prob": norm_topk_prob,
        "counted": counted,
    }


@op(
    tensors={"a": "T[num_tokens, k]", "router": "T[num_experts, k]"},
    axes={
        "num_tokens": (0, 1, 5, 20, 70),
        "num_experts": (1, 8, 60, 128),
        "k": (1, 33, 128),
        "top_k": (1, 2, 8),
        "norm_topk_prob": (False, True),
    },
    bench=[
        Case(
            f"bf16/e128k8h2048/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "num_experts": 128, "k": 2048, "top_k": 8},
        )
        for m in (1, 16, 32)
    ],
    static=("top_k",),
    after_norm="a",
)
def gemm_route_topk_softmax(
    a: Tensor, router: Tensor, top_k: int, norm_topk_prob: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`route_topk_softmax` of a · routerᵀ, in float32 all the way; nothing is counted.

    The logits are nowhere in memory where the launch that routes adds up the product's parts.

    Args:
        a: [num_tokens, k].
        router: [num_experts, k] of a's dtype, up to 1024 experts.
        top_k: experts a token, up to 32.
        norm_topk_prob: divide by the sum over the chosen experts.

    Returns:
        ids [num_tokens, top_k] int32, by descending probability; weights [num_tokens, top_k]
        float32.
    """
    logits = gemm.reference(a, router, wide=True)
    ids, weights, _ = route_topk_softmax.reference(logits, top_k, norm_topk_prob, counted=False)
    return ids, weights


@gemm_route_topk_softmax.rule
def _(a, router, top_k, norm_topk_prob):
    _check_route(gemm_route_topk_softmax, router.T, top_k, "router")


@gemm_route_topk_softmax.sample
def _(make, num_tokens, num_experts, k, top_k, norm_topk_prob=True):
    # Multiples of a power of two, whose sums are exact in any order: no rounding swaps two experts.
    return {
        "a": make.ints(-2, 3, num_tokens, k).to(make.dtype),
        "router": make.ints(-2, 3, num_experts, k).to(make.dtype) / 16,
        "top_k": min(top_k, num_experts),
        "norm_topk_prob": norm_topk_prob,
    }


@gemm_route_topk_softmax.flops
def _(a, router, top_k, norm_topk_prob):
    return 2 * a.shape[0] * a.shape[1] * router.shape[0]


@op(
    tensors={"logits": "T[num_tokens, num_experts]", "bias": "float[num_experts]"},
    axes={**ROUTES, "num_groups": (1, 2, 4), "topk_groups": (1, 2), "biased": (False, True)},
    bench=_route_cases(
        "fp32/e256k8g8", torch.float32, num_experts=256, top_k=8, num_groups=8, topk_groups=4
    ),
    static=("top_k", "num_groups", "topk_groups"),
)
def route_topk_sigmoid_grouped(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    counted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """s = sigmoid(logits); the top_k of s + bias inside the best groups; weights from s alone.

    Experts stand in num_groups groups of consecutive ids. A group counts for the sum of its two
    largest s + bias (of the only one, in groups of one); experts outside the topk_groups best
    groups cannot be chosen. Equal values go to the lower id. A NaN logit counts as -inf; where
    s + bias, or a group's sum, is NaN, it counts as -inf.

    Args:
        logits: [num_tokens, num_experts], up to 1024 experts; rows may be strided.
        bias: [num_experts], any float dtype, used for the choice only; None for zeros.
        top_k: experts a token, up to 32 and to the experts of topk_groups groups.
        num_groups: divides num_experts; 1 for no limit by groups.
        topk_groups: groups a token may use.
        norm_topk_prob: divide by the sum over the chosen experts; 1 / top_k where that is 0.
        routed_scaling_factor: multiplies the weights, last.
        counted: whether the counts are asked for, as of :func:`route_topk_softmax`.

    Returns:
        ids [num_tokens, top_k] int32, by descending s + bias; weights [num_tokens, top_k] float32;
        counts [num_experts] int32, the tokens of each expert, or [0] if not ``counted``.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, sections 2.1.2 and 4.2.
    """
    num_tokens, num_experts = logits.shape
    score = sigmoid(_nan_last(widen(logits)))
    choice = score if bias is None else _nan_last(score + widen(bias))
    members = choice.reshape(num_tokens, num_groups, num_experts // num_groups)
    best = members.sort(dim=-1, descending=True).values[..., :2]
    groups = _descending(_nan_last(best.sum(dim=-1)))[:, :topk_groups]
    kept = torch.zeros_like(members[..., 0], dtype=torch.int8).scatter(1, groups, 1)
    kept = kept.repeat_interleave(num_experts // num_groups, dim=1)
    by_choice = _descending(choice)
    # Stable, so that the order by choice survives among the kept: even -inf there comes first.
    ids = by_choice.gather(1, _descending(kept.gather(1, by_choice)))[:, :top_k]
    weights = score.gather(1, ids)
    if norm_topk_prob:
        weights = _normalised(weights, top_k)
    weights = weights * routed_scaling_factor
    return ids.to(torch.int32), weights.to(torch.float32), _counts(ids, logits, counted)


@route_topk_sigmoid_grouped.rule
def _(logits, bias, top_k, num_groups, topk_groups, norm_topk_prob, routed_scaling_factor, counted):
    this, num_experts = route_topk_sigmoid_grouped, logits.shape[1]
    _check_route(this, logits, top_k)
    if num_groups < 1 or num_experts % num_groups:
        this.reject("num_groups", str(num_groups), f"a divisor of the {num_experts} experts")
    if not 1 <= topk_groups <= num_groups:
        this.reject("topk_groups", str(topk_groups), f"1 to {num_groups}")
    if top_k > topk_groups * (num_experts // num_groups):
        allowed = f"at most the {topk_groups * (num_experts // num_groups)} experts of the groups"
        this.reject("top_k", str(top_k), allowed)


@route_topk_sigmoid_grouped.sample
def _(
    make, num_tokens, num_experts, top_k, norm_topk_prob=True, num_groups=1, topk_groups=1,
    biased=True, counted=True,
):  # fmt: skip
    num_groups = num_groups if num_experts % num_groups == 0 else 1
    topk_groups = min(topk_groups, num_groups)
    # Far enough apart that no rounding of the sigmoid, nor of its sum with the bias, swaps two; and
    # not symmetric about 0, where sigmoid(x) + sigmoid(-x) would make groups equal but for
    # rounding.
    place = make.randn(num_tokens, num_experts).float().argsort(dim=-1)
    logits = (place * (8.0 / num_experts) - 2.77).to(make.dtype)
    bias = make.ints(-1, 2, num_experts) * 1.25 + make.weight(num_experts) * 1e-4
    return {
        "logits": logits,
        "bias": bias if biased else None,
        "top_k": min(top_k, topk_groups * (num_experts // num_groups)),
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": make.scalar(0.5, 2.5),
        "counted": counted,
    }
