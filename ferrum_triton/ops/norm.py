"""Normalisation over the last dimension."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

ROWS = {"num_tokens": (0, 1, 2, 5), "hidden_size": (1, 2, 17, 64, 100, 576)}


def _cases(*num_tokens: int) -> list[Case]:
    return [
        Case(f"bf16/h4096/m{m}", torch.bfloat16, {"num_tokens": m, "hidden_size": 4096})
        for m in num_tokens
    ]


@op(
    tensors={"x": "T[..., hidden_size]", "weight": "float[hidden_size]"},
    axes=ROWS,
    bench=_cases(1, 64, 4096, 32768),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    Args:
        x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
        weight: [hidden_size], any float dtype. Gemma's ``1 + weight`` is folded in by the caller.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype; computed in float32, rounded once.

    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    wide = widen(x)
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * rstd * widen(weight)).to(x.dtype)


@rms_norm.sample
def _(make, num_tokens, hidden_size):
    return {"x": make.randn(num_tokens, hidden_size), "weight": make.weight(hidden_size)}


@op(
    tensors={
        "residual": "float[..., hidden_size]",
        "x": "T[..., hidden_size]",
        "weight": "float[hidden_size]",
    },
    axes={**ROWS, "wide_residual": (False, True)},
    bench=_cases(1, 64, 4096, 32768),
    mutates=("residual",),
)
def fused_add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """residual ← residual + x, then y = rms_norm(residual) · weight.

    The sum is rounded to the residual's dtype once, and the variance is taken from what was stored,
    so that the result equals ``rms_norm`` of the residual that the next layer will read.

    Args:
        residual: [..., hidden_size], updated in place; of x's dtype, or float32: a residual stream
            kept in float32 loses nothing to 16-bit rounding from layer to layer.
        x: same shape as residual.
        weight: [hidden_size], any float dtype.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype.
    """
    residual.copy_(widen(residual) + widen(x))
    return rms_norm.reference(residual, weight, eps).to(x.dtype)


@fused_add_rms_norm.rule
def _(residual, x, weight, eps):
    if residual.shape != x.shape:
        allowed = f"{list(residual.shape)}, the shape of residual"
        fused_add_rms_norm.reject("x", f"of shape {list(x.shape)}", allowed)
    if residual.dtype not in (x.dtype, torch.float32):
        allowed = f"x's dtype {x.dtype}, or float32"
        fused_add_rms_norm.reject("residual", str(residual.dtype), allowed)


@fused_add_rms_norm.sample
def _(make, num_tokens, hidden_size, wide_residual=False):
    residual = make.randn(num_tokens, hidden_size)
    return {
        "residual": residual.float() if wide_residual else residual,
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size),
    }
