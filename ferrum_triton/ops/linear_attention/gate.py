"""Gates of Qwen3.5's full attention and of its shared expert."""

import torch
from torch import Tensor

from ferrum_triton.ops.pointwise import sigmoid
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


@op(
    tensors={
        "values": "T[..., hidden_size]",
        "gate": "float[..., gate_size]",
        "residual": "float[..., hidden_size]",
    },
    axes={
        "num_tokens": (0, 1, 2, 5),
        "hidden_size": (1, 2, 33, 300),
        "per_token": (False, True),
        "residual": (None, "wide", "own"),
        "gate_dtype": (None, torch.bfloat16, torch.float32),
    },
    bench=[
        Case(
            f"bf16/{name}h2048/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "hidden_size": 2048, **axes},
        )
        for name, axes in (("", {}), ("token/add/", {"per_token": True, "residual": "own"}))
        for m in (1, 64, 4096)
    ],
    over=("values", "residual"),
)
def sigmoid_gate(values: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    """y = residual + values · sigmoid(gate), with a gate for each value or for each row.

    In place with ``out=values``, or with ``out=residual``.

    Args:
        values: [..., hidden_size]; rows may be strided.
        gate: [..., hidden_size], as beside the queries of gated attention, or [..., 1], as of a
            shared expert; any float dtype.
        residual: [..., hidden_size], of values' dtype or float32; None adds nothing.

    Returns:
        A tensor of values' shape, in residual's dtype where there is one, else in values'; computed
        in float32, rounded once.

    Source: Qiu et al., "Gated Attention for Large Language Models", 2025.
    """
    y = widen(values) * sigmoid(widen(gate))
    if residual is None:
        return y.to(values.dtype)
    return (widen(residual) + y).to(residual.dtype)


@sigmoid_gate.rule
def _(values, gate, residual):
    this, shape = sigmoid_gate, list(values.shape)
    if list(gate.shape) not in (shape, [*shape[:-1], 1]):
        this.reject("gate", f"of shape {list(gate.shape)}", f"{shape} or {[*shape[:-1], 1]}")
    if residual is None:
        return
    if list(residual.shape) != shape:
        this.reject("residual", f"of shape {list(residual.shape)}", f"{shape}, as values")
    if residual.dtype not in (values.dtype, torch.float32):
        allowed = f"values' dtype {values.dtype}, or float32"
        this.reject("residual", str(residual.dtype), allowed)


@sigmoid_gate.sample
def _(make, num_tokens, hidden_size, per_token=False, residual=None, gate_dtype=None):
    added = make.randn(num_tokens, hidden_size) if residual else None
    gate = make.randn(num_tokens, 1 if per_token else hidden_size, scale=3.0)
    return {
        "values": make.randn(num_tokens, hidden_size),
        "gate": gate.to(gate_dtype or make.dtype),
        "residual": added.float() if residual == "wide" else added,
    }
