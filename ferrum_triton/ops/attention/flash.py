"""Attention over a contiguous KV cache."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


def _flash_cases() -> list[Case]:
    prefill = {"batch": 1, "num_kv_heads": 8, "group_size": 4, "head_dim": 128}
    return [
        Case(
            "bf16/causal/h32k8d128/b4/l2048",
            torch.bfloat16,
            {**prefill, "batch": 4, "q_len": 2048, "kv_len": 2048},
            "tflops",
        ),
        Case(
            "bf16/causal/h32k8d128/b1/l8192",
            torch.bfloat16,
            {**prefill, "q_len": 8192, "kv_len": 8192},
            "tflops",
        ),
        Case(
            "bf16/decode/h32k8d128/b1/ctx8192",
            torch.bfloat16,
            {**prefill, "q_len": 1, "kv_len": 8192},
        ),
    ]


@op(
    tensors={
        "q": "T[batch, num_heads, q_len, head_dim]",
        "k": "T[batch, num_kv_heads, capacity, head_dim]",
        "v": "T[batch, num_kv_heads, capacity, head_dim]",
        "kv_lens": "int[batch]",
    },
    axes={
        "batch": (1, 3),
        "num_kv_heads": (1, 3),
        "group_size": (1, 3),
        "head_dim": (16, 40, 64, 80),
        "q_len": (0, 1, 5, 18),
        "kv_len": (1, 5, 33),
        "spare": (0, 3),
        "causal": (True, False),
        "sliding_window": (0, 1, 4, 100),
        "softmax_scale": (None, 0.3),
        "device_lens": (False, True),
    },
    bench=_flash_cases(),
    static=("sliding_window",),
    finite=("v",),
)
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
) -> Tensor:
    """y = softmax(scale · q kᵀ + mask) v, for prefill and decode over a contiguous cache.

    Query i has the absolute position p = pos_offset + i and sees the keys [lo, hi), where
    hi = min(p + 1, kv_len) if causal, else kv_len, and lo = max(0, p + 1 - sliding_window) if
    causal with a window, else 0. A query that sees no key, or only scores of -inf, gives zeros.
    Query head h reads KV head h // (num_heads / num_kv_heads). Rows of the cache past kv_len may
    hold anything; an infinite or NaN value inside it may turn queries that do not see it into NaN
    (a weight of 0 times it).

    Args:
        q: [batch, num_heads, q_len, head_dim].
        k, v: [batch, num_kv_heads, capacity, head_dim]; a cache may be longer than what is valid,
            and its strides are free.
        kv_len: valid keys; None means capacity.
        kv_lens: [batch] valid keys per sequence on the device, read when the kernel runs (so a
            captured graph sees new lengths); overrides kv_len, is clamped to [0, capacity], and
            then query i of sequence b has the position kv_lens[b] - q_len + i unless pos_offset
            is given.
        pos_offset: position of query 0; None means kv_len - q_len: the queries are the newest.
        causal: whether a query sees only keys up to its own position.
        softmax_scale: None means 1 / sqrt(head_dim).
        sliding_window: keys a causal query sees, itself included; 0 means all.

    Returns:
        [batch, num_heads, q_len, head_dim] in q's dtype; computed in float32.

    Source: Dao et al., "FlashAttention", 2022; windows as in Mistral 7B, 2023.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if kv_lens is not None:
        lens = kv_lens.clamp(0, capacity).long()
    else:
        lens = torch.full((batch,), capacity if kv_len is None else kv_len, device=q.device)
    first = lens - q_len if pos_offset is None else torch.full_like(lens, pos_offset)

    position = (first[:, None] + torch.arange(q_len, device=q.device))[..., None]  # [b, q, 1]
    key = torch.arange(capacity, device=q.device)  # [capacity]
    visible = (key < lens[:, None, None]).expand(batch, q_len, capacity)
    if causal:
        visible = visible & (key <= position)
        if sliding_window > 0:
            visible = visible & (key > position - sliding_window)
    visible = visible[:, None, None]  # [b, 1, 1, q, capacity]

    # Rows no query may read can hold anything, NaN included, so they are cleared, not just masked.
    valid = (key < lens[:, None])[:, None, :, None]
    k, v = (torch.where(valid, widen(t), 0.0)[:, :, None] for t in (k, v))
    grouped = widen(q).view(batch, num_kv_heads, num_heads // num_kv_heads, q_len, head_dim)
    scores = (grouped @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(scores == -torch.inf, 0.0)
    return (weights @ v).reshape(q.shape).to(q.dtype)


@flash_attention.rule
def _(q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window):
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        got = f"of {q.shape[1]} heads over {k.shape[1]} KV heads"
        flash_attention.reject("q", got, "a multiple of the KV heads")
    if sliding_window < 0:
        flash_attention.reject("sliding_window", str(sliding_window), "0 (off) or more")
    if q.shape[3] > 256:
        flash_attention.reject("q", f"of head_dim {q.shape[3]}", "head_dim up to 256")


@flash_attention.call_rule
def _(q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window):
    if kv_len is not None and not 0 <= kv_len <= k.shape[2]:
        flash_attention.reject("kv_len", str(kv_len), f"0 to the capacity of {k.shape[2]}")


@flash_attention.sample
def _(
    make,
    batch,
    num_kv_heads,
    group_size,
    head_dim,
    q_len,
    kv_len,
    spare=0,
    causal=True,
    sliding_window=0,
    softmax_scale=None,
    device_lens=False,
):
    capacity = kv_len + spare
    return {
        "q": make.randn(batch, num_kv_heads * group_size, q_len, head_dim),
        "k": make.randn(batch, num_kv_heads, capacity, head_dim),
        "v": make.randn(batch, num_kv_heads, capacity, head_dim),
        "kv_len": kv_len,
        "kv_lens": make.ints(0, kv_len + 1, batch) if device_lens else None,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
    }


@flash_attention.flops
def _(q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window):
    """4 · head_dim operations for each visible pair of query and key, at the host's lengths."""
    batch, num_heads, q_len, head_dim = q.shape
    total = k.shape[2] if kv_len is None else kv_len
    first = total - q_len if pos_offset is None else pos_offset
    pairs = q_len * total
    if causal:
        hi = [min(max(first + i + 1, 0), total) for i in range(q_len)]
        window = sliding_window or total
        pairs = sum(h - max(0, first + i + 1 - window) for i, h in enumerate(hi) if h > 0)
    return 4 * batch * num_heads * head_dim * pairs


@flash_attention.traffic
def _(q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window):
    total = k.shape[2] if kv_len is None else kv_len
    keys = min(total, sliding_window + q.shape[2] - 1) if causal and sliding_window else total
    kv = 2 * k.shape[0] * k.shape[1] * keys * k.shape[3]
    return (2 * q.numel() + kv) * q.element_size()
