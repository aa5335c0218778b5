"""The ``"torch"`` provider: torch's own fused code, where that is faster than the reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ferrum_triton.ops import elementwise, norm, rope
from ferrum_triton.ops.attention import flash


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


@rope.split_qkv_norm_rope_into_cache.impl("torch")
def split_qkv_norm_rope_into_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    cache_len: int = 0,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = rope.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Whole heads in float32 at consecutive positions and rows; the reference for the rest."""
    num_tokens, (num_kv_heads, _, head_dim) = qkv.shape[0], k_cache.shape
    weights = (q_weight, k_weight) if qk_mode == rope.NORM_ROPE else ()
    wide = all(t.dtype == torch.float32 for t in (qkv, cos, sin, *weights))
    given = positions is not None or slots is not None
    partial = 2 * cos.shape[1] != head_dim
    if not wide or given or partial or num_tokens == 0 or qk_mode == rope.COPY:
        q = rope.split_qkv_norm_rope_into_cache.reference(
            qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, cache_len, positions,
            slots, pos_offset, eps, qk_mode,
        )  # fmt: skip
        return q.contiguous() if out is None else out.copy_(q)
    heads = qkv.unflatten(1, (-1, head_dim)).transpose(0, 1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
    if qk_mode == rope.NORM_ROPE:
        q = F.rms_norm(q, (head_dim,), q_weight, eps)
        k = F.rms_norm(k, (head_dim,), k_weight, eps)
    table = slice(pos_offset, pos_offset + num_tokens)
    rows = slice(cache_len, cache_len + num_tokens)
    rotate = rotate_pairs if qk_mode == rope.ROPE_INTERLEAVED else rotate_halves
    k_cache[:, rows] = rotate(k, cos[table], sin[table])
    v_cache[:, rows] = v
    q = rotate(q, cos[table], sin[table])
    return q if out is None else out.copy_(q)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[heads, num_tokens, head_dim], the pairs (2i, 2i + 1) turned as complex numbers."""
    if x.storage_offset() % 2 or any(step % 2 for step in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)  # a complex view wants even addresses
    y = torch.empty(x.shape)
    pairs = [torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in (x, y)]
    torch.mul(pairs[0], torch.complex(cos, sin), out=pairs[1])
    return y


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[heads, num_tokens, head_dim], the pairs (i, i + head_dim / 2) turned."""
    y = torch.empty(x.shape)
    (x0, x1), (y0, y1) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(x0, cos, out=y0).addcmul_(x1, sin, value=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x0, sin)
    return y


@flash.flash_attention.impl("torch")
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch's fused attention for the calls a model makes; the reference for the rest."""
    q_len, total = q.shape[2], k.shape[2] if kv_len is None else kv_len
    first = total - q_len if pos_offset is None else pos_offset
    newest = first == total - q_len >= 0  # the queries are the last positions of the cache
    windowed = causal and 0 < sliding_window < total
    plain = softcap == 0 and sinks is None and lse is None
    if kv_lens is not None or not (plain and newest) or windowed or q.numel() == 0 or total == 0:
        y = flash.flash_attention.reference(
            q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window, softcap,
            sinks, lse,
        )  # fmt: skip
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
