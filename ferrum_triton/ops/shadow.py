"""A residual stream kept in float32 beside 16-bit activations, as Gemma's sandwich norms want.

Gemma normalises a block's output before it joins the residual as well as the residual before the
next block, and its residual outgrows 16 bits. Most of what that takes are arguments of other ops:

| wanted | call |
|---|---|
| activation_to_f32_shadow | ``copy_slice(x, shadow)``, which converts |
| f32_to_activation | ``copy_slice(shadow, x)`` |
| activation_add_to_f32_shadow | ``add_inplace(shadow, x)`` |
| rms_norm_activation_to_f32 | ``rms_norm_to(x, weight, torch.float32, eps)`` |
| rms_norm_f32_to_activation | ``rms_norm_to(shadow, weight, x.dtype, eps)`` |
| rms_norm_activation_add_to_f32 | ``rms_norm_add_inplace(shadow, x, weight, eps)`` |
| the add and the norm before a block in one | ``fused_add_rms_norm(shadow, x, weight, eps)`` |
"""

import torch
from torch import Tensor

from ferrum_triton.contract import ACTIVATIONS
from ferrum_triton.ops.norm import ROWS, rms_norm
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

CASES = [
    Case(
        f"bf16/h4096/m{m}",
        torch.bfloat16,
        {"num_tokens": m, "hidden_size": 4096, "weight_dtype": torch.bfloat16},
    )
    for m in (1, 64, 4096)
]


@op(
    tensors={"x": "T[..., hidden_size]", "weight": "float[hidden_size]"},
    axes={**ROWS, "result": (torch.bfloat16, torch.float32, torch.float16)},
    bench=CASES,
)
def rms_norm_to(x: Tensor, weight: Tensor, dtype: torch.dtype, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, rounded to ``dtype`` instead of x's own.

    Args:
        x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
        weight: [hidden_size], any float dtype.
        dtype: of the result: float32, float16 or bfloat16.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape; computed in float32, rounded once.
    """
    return rms_norm.reference(widen(x), weight, eps).to(dtype)


@rms_norm_to.rule
def _(x, weight, dtype, eps):
    if dtype not in ACTIVATIONS:
        rms_norm_to.reject("dtype", str(dtype), "torch.float32, torch.float16, torch.bfloat16")


@rms_norm_to.sample
def _(make, num_tokens, hidden_size, result=torch.float32, weight_dtype=torch.float32):
    return {
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size, dtype=weight_dtype),
        "dtype": result,
    }


@op(
    tensors={
        "residual": "float[..., hidden_size]",
        "x": "T[..., hidden_size]",
        "weight": "float[hidden_size]",
    },
    axes={**ROWS, "wide_residual": (False, True)},
    bench=CASES,
    mutates=("residual",),
    finite=("weight",),  # an overflow that the sum takes back depends on fused multiply-adds
)
def rms_norm_add_inplace(residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """residual ← residual + x / sqrt(mean(x²) + eps) · weight, in place.

    The norm is not rounded before it is added, and the sum is rounded once.

    Args:
        residual: [..., hidden_size], updated in place; of x's dtype, or float32.
        x: same shape as residual.
        weight: [hidden_size], any float dtype.
        eps: added to the mean square.
    """
    residual.copy_(widen(residual) + rms_norm.reference(widen(x), weight, eps))


@rms_norm_add_inplace.rule
def _(residual, x, weight, eps):
    if residual.shape != x.shape:
        allowed = f"{list(residual.shape)}, the shape of residual"
        rms_norm_add_inplace.reject("x", f"of shape {list(x.shape)}", allowed)
    if residual.dtype not in (x.dtype, torch.float32):
        allowed = f"x's dtype {x.dtype}, or float32"
        rms_norm_add_inplace.reject("residual", str(residual.dtype), allowed)


@rms_norm_add_inplace.sample
def _(make, num_tokens, hidden_size, wide_residual=True, weight_dtype=torch.float32):
    residual = make.randn(num_tokens, hidden_size)
    return {
        "residual": residual.float() if wide_residual else residual,
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size, dtype=weight_dtype),
    }
