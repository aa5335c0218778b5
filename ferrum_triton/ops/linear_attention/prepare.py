"""What comes before the gated delta rule: convolution, norms and gates of projected tokens."""

import torch
from torch import Tensor

from ferrum_triton.ops.linear_attention.conv import (
    CONV_TENSORS,
    check_conv,
    conv_bytes,
    conv_sample,
    convolve,
)
from ferrum_triton.ops.linear_attention.delta import MAX_HEAD_DIM
from ferrum_triton.ops.linear_attention.sequences import (
    SEQUENCE_AXES,
    check_kept,
    check_sequences,
    lengths,
    refuse_shared_slots,
)
from ferrum_triton.ops.pointwise import sigmoid, silu, softplus
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


def _prepare_case(name: str, batch: int, q_len: int) -> Case:
    heads = {"num_k_heads": 16, "group_size": 2, "head_k_dim": 128, "head_v_dim": 128}
    axes = {"batch": batch, "q_len": q_len, **heads, "width": 4}
    return Case(f"bf16/k16v32d128/{name}", torch.bfloat16, axes)


@op(
    tensors={
        "qkv": "T[num_tokens, num_channels]",
        "b": "T[num_tokens, num_v_heads]",
        "a": "T[num_tokens, num_v_heads]",
        "weight": "float[num_channels, width]",
        "a_log": "float[num_v_heads]",
        "dt_bias": "float[num_v_heads]",
        **CONV_TENSORS,
    },
    axes={
        "num_k_heads": (1, 2),
        "group_size": (1, 3),
        "head_k_dim": (1, 16, 40),
        "head_v_dim": (1, 16, 24),
        "width": (1, 4),
        "seq_lens": ((), (1,), (1, 1, 1), (2, 0, 7, 1), (5, 3)),
        "l2_norm": (False, True),
        "with_kept": (False, True),
        "state_dtype": (None, torch.float32),
        **SEQUENCE_AXES,
    },
    bench=[
        _prepare_case("b1", 1, 1),
        _prepare_case("b32", 32, 1),
        _prepare_case("b256", 256, 1),
        _prepare_case("1x4096", 1, 4096),
        _prepare_case("8x4096", 8, 4096),
    ],
    mutates=("states",),
    static=("num_k_heads", "head_k_dim"),
)
def gdn_prepare(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    kept_slots: Tensor | None = None,
    l2_norm: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x = silu(conv(qkv)); q, k = x / sqrt(Σ x² + eps); β = σ(b); g = -e^a_log · softplus(a + dt).

    The convolution is :func:`causal_conv1d`'s, and nothing is rounded after it before it is
    returned. One launch for any mix of prompts and single tokens.

    Args:
        qkv: [num_tokens, num_channels], each row packed as [q | k | v]; rows may be strided, as
            columns of one projection are. Qwen3-Next's projection, whose rows are interleaved by
            key head, is put into this order when it is loaded.
        b, a: [num_tokens, num_v_heads].
        weight: [num_channels, width], the convolution's, any float dtype.
        a_log, dt_bias: [num_v_heads], any float dtype.
        num_k_heads: heads of q and of k.
        head_k_dim: their width; values have the other channels.
        states: [num_slots, width - 1, num_channels], the convolution's, written in place; None
            means zeros, and that none is kept.
        slots, cu_seqlens, pos_offsets, kept_slots: as in
            :mod:`ferrum_triton.ops.linear_attention.sequences`.
        l2_norm: whether q and k are divided by their norms.
        eps: added to the sum of squares.

    Returns:
        q, k [num_tokens, num_k_heads, head_k_dim] and v [num_tokens, num_v_heads, head_v_dim] in
        qkv's dtype; g and beta [num_tokens, num_v_heads] in float32.

    Source: Yang et al., "Gated Delta Networks", 2024; Qwen3-Next, 2025.
    """
    x = convolve(qkv, weight, None, states, slots, cu_seqlens, pos_offsets, kept_slots)
    x = silu(x)
    num_tokens, num_v_heads = b.shape
    size = num_k_heads * head_k_dim
    q, k, v = x.split([size, size, qkv.shape[1] - 2 * size], dim=1)
    q, k = (t.reshape(num_tokens, num_k_heads, head_k_dim) for t in (q, k))
    if l2_norm:
        q, k = (t * torch.rsqrt(t.square().sum(dim=-1, keepdim=True) + eps) for t in (q, k))
    v = v.reshape(num_tokens, num_v_heads, v.shape[1] // num_v_heads)
    g = -widen(a_log).exp() * softplus(widen(a) + widen(dt_bias))
    return *(t.to(qkv.dtype) for t in (q, k, v)), g, sigmoid(widen(b))


def _fake(qkv, b, a, weight, a_log, dt_bias, num_k_heads, head_k_dim, *_, **__):
    num_tokens, num_v_heads = b.shape
    head_v_dim = (qkv.shape[1] - 2 * num_k_heads * head_k_dim) // num_v_heads
    q, k = (qkv.new_empty(num_tokens, num_k_heads, head_k_dim) for _ in range(2))
    g, beta = (b.new_empty(num_tokens, num_v_heads, dtype=torch.float32) for _ in range(2))
    return q, k, qkv.new_empty(num_tokens, num_v_heads, head_v_dim), g, beta


gdn_prepare.fake = _fake


@gdn_prepare.rule
def _(
    qkv, b, a, weight, a_log, dt_bias, num_k_heads, head_k_dim, states, slots, cu_seqlens,
    pos_offsets, kept_slots, l2_norm, eps,
):  # fmt: skip
    this, (num_tokens, num_channels) = gdn_prepare, qkv.shape
    num_v_heads = a_log.shape[0]
    if num_k_heads < 1 or num_v_heads % num_k_heads or num_v_heads == 0:
        allowed = f"a divisor of the {num_v_heads} value heads"
        this.reject("num_k_heads", str(num_k_heads), allowed)
    if not 1 <= head_k_dim <= MAX_HEAD_DIM:
        this.reject("head_k_dim", str(head_k_dim), f"1 to {MAX_HEAD_DIM}")
    values = num_channels - 2 * num_k_heads * head_k_dim
    if values <= 0 or values % num_v_heads or values > MAX_HEAD_DIM * num_v_heads:
        widths = f"{num_v_heads} value heads of 1 to {MAX_HEAD_DIM}"
        allowed = f"2 · {num_k_heads} · {head_k_dim}, and {widths}"
        this.reject("qkv", f"of {num_channels} channels", allowed)
    check_conv(this, num_channels, weight, states)
    check_sequences(this, num_tokens, states, slots, cu_seqlens, pos_offsets)
    check_kept(this, num_tokens, states, kept_slots)


@gdn_prepare.data_rule
def _(
    qkv, b, a, weight, a_log, dt_bias, num_k_heads, head_k_dim, states, slots, cu_seqlens,
    pos_offsets, kept_slots, l2_norm, eps,
):  # fmt: skip
    refuse_shared_slots(gdn_prepare, states, slots, kept_slots)


@gdn_prepare.sample
def _(
    make, num_k_heads, group_size, head_k_dim, head_v_dim, width, seq_lens=None, batch=1, q_len=1,
    l2_norm=True, **axes,
):  # fmt: skip
    seq_lens = lengths(seq_lens, batch, q_len)
    num_tokens, num_v_heads = sum(seq_lens), num_k_heads * group_size
    num_channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    return {
        "qkv": make.randn(num_tokens, num_channels),
        "b": make.randn(num_tokens, num_v_heads),
        "a": make.randn(num_tokens, num_v_heads, scale=3.0),
        "a_log": make.weight(num_v_heads),
        "dt_bias": make.weight(num_v_heads),
        "num_k_heads": num_k_heads,
        "head_k_dim": head_k_dim,
        "l2_norm": l2_norm,
        # Divided by a norm of no more than the square root of eps, a value that cancelled in the
        # convolution would have its rounding multiplied by a thousand.
        "eps": 0.01,
        **conv_sample(make, num_channels, width, seq_lens, **axes),
    }


@gdn_prepare.traffic
def _(
    qkv, b, a, weight, a_log, dt_bias, num_k_heads, head_k_dim, states, slots, cu_seqlens,
    pos_offsets, kept_slots, l2_norm, eps,
):  # fmt: skip
    gates = 2 * b.numel() * (b.element_size() + 4)
    tokens = 2 * qkv.numel() * qkv.element_size()
    return tokens + gates + conv_bytes(weight, states, slots, kept_slots)
