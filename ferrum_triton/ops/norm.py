"""Normalisation over the last dimension. Norms between dtypes are in :mod:`shadow`."""

import torch
from torch import Tensor

from ferrum_triton.ops.pointwise import silu
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

ROWS = {
    "num_tokens": (0, 1, 2, 5),
    "hidden_size": (1, 2, 17, 64, 100, 576),
    "weight_dtype": (torch.float32, torch.bfloat16),
}


def _cases(*num_tokens: int) -> list[Case]:
    return [
        Case(
            f"bf16/h4096/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "hidden_size": 4096, "weight_dtype": torch.bfloat16},
        )
        for m in num_tokens
    ]


@op(
    tensors={"x": "T[..., hidden_size]", "weight": "float[hidden_size]"},
    axes=ROWS,
    bench=_cases(1, 64, 4096, 32768),
    over=("x",),
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
def _(make, num_tokens, hidden_size, weight_dtype=torch.float32):
    return {
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size, dtype=weight_dtype),
    }


@op(
    tensors={
        "residual": "float[..., hidden_size]",
        "x": "T[..., hidden_size]",
        "weight": "float[hidden_size]",
    },
    axes={**ROWS, "wide_residual": (False, True)},
    bench=_cases(1, 32, 64, 4096, 32768),
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
    check_residual(fused_add_rms_norm, residual, x)


def check_residual(op: Op, residual: Tensor, x: Tensor, name: str = "x") -> None:
    """Refuse a residual that is neither of the dtype of x, an argument ``name``, nor float32."""
    if residual.dtype not in (x.dtype, torch.float32):
        op.reject("residual", str(residual.dtype), f"{name}'s dtype {x.dtype}, or float32")


@fused_add_rms_norm.sample
def _(make, num_tokens, hidden_size, wide_residual=False, weight_dtype=torch.float32):
    residual = make.randn(num_tokens, hidden_size)
    return {
        "residual": residual.float() if wide_residual else residual,
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size, dtype=weight_dtype),
    }


@op(
    tensors={
        "x": "T[..., hidden_size]",
        "weight": "float[hidden_size]",
        "bias": "float[hidden_size]",
    },
    axes={**ROWS, "biased": (False, True)},
    bench=_cases(1, 64, 4096),
    over=("x",),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last dimension.

    Args:
        x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
        weight: [hidden_size], any float dtype.
        bias: [hidden_size], any float dtype, or None.
        eps: added to the variance, which is the biased one (divided by hidden_size).

    Returns:
        A tensor of x's shape and dtype; computed in float32 from the centred row, rounded once.

    Source: Ba et al., "Layer Normalization", 2016.
    """
    wide = widen(x)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * widen(weight)
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@layer_norm.sample
def _(make, num_tokens, hidden_size, biased=True, weight_dtype=torch.float32):
    return {
        "x": make.randn(num_tokens, hidden_size),
        "weight": make.weight(hidden_size, dtype=weight_dtype),
        "bias": make.weight(hidden_size, dtype=weight_dtype) if biased else None,
    }


@op(
    tensors={
        "core": "float[..., head_dim]",
        "z": "T[..., head_dim]",
        "weight": "float[head_dim]",
    },
    axes={
        "num_rows": (0, 1, 2, 5, 40),
        "head_dim": (1, 2, 40, 128),
        "wide_core": (False, True),
    },
    bench=[
        Case(f"bf16/h32d128/t{t}", torch.bfloat16, {"num_rows": 32 * t, "head_dim": 128})
        for t in (1, 4096)
    ],
)
def gated_rms_norm(core: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """y = core / sqrt(mean(core²) + eps) · weight · silu(z), over the last dimension.

    The output norm of gated linear attention: a row is one head of one token.

    Args:
        core: [..., head_dim], usually float32: what the recurrence returns.
        z: the gate, of core's shape, any float dtype.
        weight: [head_dim], any float dtype, shared by the heads.
        eps: added to the mean square.

    Returns:
        A tensor of core's shape and dtype; computed in float32, rounded once.

    Source: Yang et al., "Gated Delta Networks", 2024.
    """
    normed = rms_norm.reference(widen(core), weight, eps)
    return (normed * silu(widen(z))).to(core.dtype)


@gated_rms_norm.rule
def _(core, z, weight, eps):
    if core.shape != z.shape:
        allowed = f"{list(core.shape)}, the shape of core"
        gated_rms_norm.reject("z", f"of shape {list(z.shape)}", allowed)


@gated_rms_norm.sample
def _(make, num_rows, head_dim, wide_core=True):
    core = make.randn(num_rows, head_dim)
    return {
        "core": core.float() if wide_core else core,
        "z": make.randn(num_rows, head_dim, scale=2.0),
        "weight": make.weight(head_dim),
    }


@op(
    tensors={"x": "T[..., num_cols]"},
    axes={"num_rows": (0, 1, 2, 5), "num_cols": (1, 2, 33, 500)},
    bench=[
        Case(f"bf16/n{n}/m{m}", torch.bfloat16, {"num_rows": m, "num_cols": n})
        for m, n in ((1, 4096), (4096, 4096), (64, 152064))
    ],
    over=("x",),
)
def softmax_rows(x: Tensor) -> Tensor:
    """y[i, j] = e^(x[i, j] - max(x[i])) / sum of those over j, over the last dimension.

    A row that holds NaN or +inf, or nothing but -inf, gives NaN throughout.

    Args:
        x: [..., num_cols]; rows may be strided.

    Returns:
        A tensor of x's shape and dtype; computed in float32, rounded once.
    """
    return torch.softmax(widen(x), dim=-1).to(x.dtype)


@softmax_rows.sample
def _(make, num_rows, num_cols):
    return {"x": make.randn(num_rows, num_cols, scale=3.0)}
