"""The ``"torch"`` provider: torch's own fused CPU code, where it is faster than the reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ferrum_triton.ops import attention, elementwise, norm


@norm.rms_norm.impl("torch")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        y = norm.rms_norm.reference(x, weight, eps)
    else:
        y = F.rms_norm(x, weight.shape, weight, eps)
    return y.contiguous() if out is None else out.copy_(y)


@norm.fused_add_rms_norm.impl("torch")
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    residual.add_(x)  # torch adds 16-bit floats in float32 and rounds once
    y = rms_norm(residual, weight, eps)
    return y.to(x.dtype) if out is None else out.copy_(y)


@elementwise.add_inplace.impl("torch")
def add_inplace(residual: Tensor, x: Tensor) -> None:
    residual.add_(x)


@elementwise.fused_silu_mul_split.impl("torch")
def fused_silu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    if gate_up.dtype != torch.float32:
        y = elementwise.fused_silu_mul_split.reference(gate_up)
        return y.contiguous() if out is None else out.copy_(y)
    gate, up = gate_up.chunk(2, dim=-1)
    y = F.silu(gate)
    return torch.mul(y, up, out=y.contiguous() if out is None else out)


@attention.flash_attention.impl("torch")
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: int | None = None,
    kv_lens: Tensor | None = None,
    pos_offset: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch's fused attention for the calls a model makes; the reference for the rest."""
    q_len, total = q.shape[2], k.shape[2] if kv_len is None else kv_len
    first = total - q_len if pos_offset is None else pos_offset
    newest = first == total - q_len >= 0  # the queries are the last positions of the cache
    windowed = causal and 0 < sliding_window < total
    if kv_lens is not None or not newest or windowed or q.numel() == 0 or total == 0:
        y = attention.flash_attention.reference(
            q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window
        )
        return y.contiguous() if out is None else out.copy_(y)
    mask = None
    if causal and 1 < q_len < total:
        mask = torch.ones(q_len, total, dtype=torch.bool).tril(first)
    y = F.scaled_dot_product_attention(
        q,
        k[:, :, :total],
        v[:, :, :total],
        attn_mask=mask,
        is_causal=causal and q_len == total > 1,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y.contiguous() if out is None else out.copy_(y)
