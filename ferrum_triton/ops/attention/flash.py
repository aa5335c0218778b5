"""Attention over a contiguous KV cache."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


def _flash_cases() -> list[Case]:
    def causal(head_dim: int, kv_heads: int, length: int, batch: int = 1, **more: int) -> Case:
        heads = kv_heads * more["group_size"]
        values = f"v{more['value_dim']}" if "value_dim" in more else ""
        window = f"/window{more['sliding_window']}" if "sliding_window" in more else ""
        return Case(
            f"bf16/causal/h{heads}k{kv_heads}d{head_dim}{values}/b{batch}/l{length}{window}",
            torch.bfloat16,
            {
                "batch": batch,
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "q_len": length,
                "kv_len": length,
                **more,
            },
            "tflops",
        )

    decode = {"batch": 1, "num_kv_heads": 8, "group_size": 4, "head_dim": 128, "q_len": 1}
    return [
        causal(128, 8, 2048, batch=4, group_size=4),
        causal(128, 8, 8192, group_size=4),
        causal(128, 8, 32768, group_size=4),
        causal(64, 16, 8192, batch=4, group_size=1),
        causal(256, 4, 8192, group_size=2),
        causal(128, 8, 32768, group_size=4, sliding_window=4096),
        causal(192, 128, 4096, group_size=1, value_dim=128),
        Case("bf16/decode/h32k8d128/b1/ctx8192", torch.bfloat16, {**decode, "kv_len": 8192}),
    ]


@op(
    tensors={
        "q": "T[batch, num_heads, q_len, head_dim]",
        "k": "T[batch, num_kv_heads, capacity, head_dim]",
        "v": "T[batch, num_kv_heads, capacity, value_dim]",
        "kv_lens": "int[batch]",
        "sinks": "float[num_heads]",
        "lse": "float32[batch, num_heads, q_len]",
    },
    axes={
        "batch": (1, 3),
        "num_kv_heads": (1, 3),
        "group_size": (1, 3),
        "head_dim": (16, 40, 64, 80),
        "value_dim": (None, 24, 128),
        "q_len": (0, 1, 5, 18),
        "kv_len": (1, 5, 33),
        "spare": (0, 3),
        "causal": (True, False),
        "sliding_window": (0, 1, 4, 100),
        "softmax_scale": (None, 0.3),
        "device_lens": (False, True),
        "softcap": (0.0, 5.0),
        "with_sinks": (False, True),
        "with_lse": (False, True),
    },
    bench=_flash_cases(),
    mutates=("lse",),
    static=("sliding_window",),
    finite=("v", "sinks"),
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
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
        k, v: [batch, num_kv_heads, capacity, head_dim] and [..., value_dim]; a cache may be longer
            than what is valid, and its strides are free. Values may be of another width than
            keys, as in the prefill of latent attention: 192 and 128.
        kv_len: valid keys; None means capacity.
        kv_lens: [batch] valid keys per sequence on the device, read when the kernel runs (so a
            captured graph sees new lengths); overrides kv_len, is clamped to [0, capacity], and
            then query i of sequence b has the position kv_lens[b] - q_len + i unless pos_offset
            is given.
        pos_offset: position of query 0; None means kv_len - q_len: the queries are the newest.
        causal: whether a query sees only keys up to its own position.
        softmax_scale: None means 1 / sqrt(head_dim).
        sliding_window: keys a causal query sees, itself included; 0 means all.
        softcap: scaled scores s become softcap · tanh(s / softcap) before the mask; 0 means off.
        sinks: [num_heads] a logit of each head that joins the softmax's denominator and has no
            value: as one more key, whose value is zero. Finite, or -inf for a head without one;
            None means none.
        lse: [batch, num_heads, q_len] in float32, written in place: the natural logarithm of the
            sum of exp over what a query's softmax runs over, its sink included; -inf for a query
            that sees no key and has no sink.

    Returns:
        [batch, num_heads, q_len, value_dim] in q's dtype; computed in float32.

    Source: Dao et al., "FlashAttention", 2022; windows as in Mistral 7B, 2023; capped scores as in
    Gemma 2, 2024; sinks as in gpt-oss, 2025.
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
    scores = grouped @ k.transpose(-1, -2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = widen(sinks).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, dim=-1).reshape(lse.shape))
    weights = torch.softmax(scores, dim=-1).masked_fill(scores == -torch.inf, 0.0)
    return (weights[..., :capacity] @ v).flatten(1, 2).to(q.dtype)


@flash_attention.rule
def _(
    q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window, softcap, sinks, lse
):
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        got = f"of {q.shape[1]} heads over {k.shape[1]} KV heads"
        flash_attention.reject("q", got, "a multiple of the KV heads")
    if sliding_window < 0:
        flash_attention.reject("sliding_window", str(sliding_window), "0 (off) or more")
    if q.shape[3] > 256:
        flash_attention.reject("q", f"of head_dim {q.shape[3]}", "head_dim up to 256")
    if not 0 < v.shape[3] <= 256:
        flash_attention.reject("v", f"of value_dim {v.shape[3]}", "value_dim from 1 to 256")


@flash_attention.call_rule
def _(
    q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window, softcap, sinks, lse
):
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
    softcap=0.0,
    with_sinks=False,
    with_lse=False,
    value_dim=None,
):
    value_dim = value_dim or head_dim
    capacity, num_heads = kv_len + spare, num_kv_heads * group_size
    return {
        "q": make.randn(batch, num_heads, q_len, head_dim),
        "k": make.randn(batch, num_kv_heads, capacity, head_dim),
        "v": make.randn(batch, num_kv_heads, capacity, value_dim),
        "kv_len": kv_len,
        "kv_lens": make.ints(0, kv_len + 1, batch) if device_lens else None,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": make.randn(num_heads) if with_sinks else None,
        "lse": make.weight(batch, num_heads, q_len) if with_lse else None,
    }


@flash_attention.flops
def _(
    q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window, softcap, sinks, lse
):
    """2 · (head_dim + value_dim) operations for each visible pair, at the host's lengths."""
    batch, num_heads, q_len, head_dim = q.shape
    total = k.shape[2] if kv_len is None else kv_len
    first = total - q_len if pos_offset is None else pos_offset
    pairs = q_len * total
    if causal:
        pairs = _keys_before(first + 1, q_len, total)
        if sliding_window:
            pairs -= _keys_before(first + 1 - sliding_window, q_len, total)
    return 2 * batch * num_heads * (head_dim + v.shape[3]) * pairs


def _keys_before(bound: int, q_len: int, total: int) -> int:
    """The sum over i < q_len of bound + i, each cut to [0, total]."""

    def up_to(n: int) -> int:  # of the integers to n, each cut
        inside = min(max(n, 0), total)
        return inside * (inside + 1) // 2 + max(n - total, 0) * total

    return up_to(bound + q_len - 1) - up_to(bound - 1)


@flash_attention.traffic
def _(
    q, k, v, kv_len, kv_lens, pos_offset, causal, softmax_scale, sliding_window, softcap, sinks, lse
):
    total = k.shape[2] if kv_len is None else kv_len
    keys = min(total, sliding_window + q.shape[2] - 1) if causal and sliding_window else total
    widths = k.shape[3] + v.shape[3]
    own, cached = q.numel() // q.shape[3] * widths, k.shape[0] * k.shape[1] * keys * widths
    return (own + cached) * q.element_size()
