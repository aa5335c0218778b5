"""What experts whose products have biases do between them."""

import torch
from torch import Tensor

from ferrum_triton.ops.pointwise import sigmoid
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


def _bias_of(bias: Tensor, ids: Tensor) -> Tensor:
    """[num_tokens, top_k, n]: of each pair its expert's row, zeros where it has none."""
    known = (ids >= 0) & (ids < bias.shape[0])
    rows = widen(bias)[torch.where(known, ids, 0).long()]
    return torch.where(known[..., None], rows, 0.0)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(u + 1) · g · sigmoid(alpha · g), g being at most limit and u from -limit to limit."""
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (u + 1.0) * g * sigmoid(alpha * g)


@op(
    tensors={
        "gate": "T[num_tokens, top_k, intermediate_size]",
        "up": "T[num_tokens, top_k, intermediate_size]",
        "gate_bias": "float[num_experts, intermediate_size]",
        "up_bias": "float[num_experts, intermediate_size]",
        "ids": "int[num_tokens, top_k]",
    },
    axes={
        "num_tokens": (0, 1, 5),
        "top_k": (1, 3),
        "num_experts": (1, 4),
        "intermediate_size": (1, 33, 200),
    },
    # gpt-oss-20b
    bench=[
        Case(
            f"bf16/e32k4i2880/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "top_k": 4, "num_experts": 32, "intermediate_size": 2880},
        )
        for m in (1, 64, 4096)
    ],
    over=("gate", "up"),
)
def clamped_swiglu_moe_id(
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor,
    up_bias: Tensor,
    ids: Tensor,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """y = (u + 1) · g · sigmoid(alpha · g), where g and u are bounded and have their expert's bias.

    g[t, s] is gate[t, s] + gate_bias[ids[t, s]], and at most limit; u[t, s] is up[t, s] +
    up_bias[ids[t, s]], and from -limit to limit.

    Args:
        gate: [num_tokens, top_k, intermediate_size], a product of each pair with its expert.
        up: of gate's shape.
        gate_bias, up_bias: [num_experts, intermediate_size], any float dtype.
        ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) adds no bias.
        alpha: the slope of the sigmoid.
        limit: the bound of g and u, 0 or more.

    Returns:
        A tensor of gate's shape and dtype; computed in float32, rounded once.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and its reference code.
    """
    g, u = widen(gate) + _bias_of(gate_bias, ids), widen(up) + _bias_of(up_bias, ids)
    return clamped_swiglu(g, u, alpha, limit).to(gate.dtype)


@clamped_swiglu_moe_id.rule
def _(gate, up, gate_bias, up_bias, ids, alpha, limit):
    if gate_bias.shape[0] == 0:
        got = f"of shape {list(gate_bias.shape)}"
        clamped_swiglu_moe_id.reject("gate_bias", got, "at least one expert")


@clamped_swiglu_moe_id.sample
def _(make, num_tokens, top_k, num_experts, intermediate_size):
    shape = num_tokens, top_k, intermediate_size
    return {
        # Wide enough for both bounds to be met.
        "gate": make.randn(*shape, scale=4.0),
        "up": make.randn(*shape, scale=4.0),
        "gate_bias": make.weight(num_experts, intermediate_size),
        "up_bias": make.weight(num_experts, intermediate_size),
        "ids": make.ints(-1, num_experts + 1, num_tokens, top_k),
        "alpha": make.scalar(1.0, 2.0),
        "limit": make.scalar(3.0, 7.0),
    }


@clamped_swiglu_moe_id.traffic
def _(gate, up, gate_bias, up_bias, ids, alpha, limit):
    # Every pair's products and result once, and as many rows of bias as there may be of these.
    rows = min(ids.numel(), gate_bias.shape[0]) * gate.shape[-1]
    biases = rows * (gate_bias.element_size() + up_bias.element_size())
    return 3 * gate.numel() * gate.element_size() + ids.numel() * ids.element_size() + biases
