"""A decode step's attention from the QKV product on, new keys and values included."""

import torch
from torch import Tensor

from ferrum_triton.ops.attention.paged_decode import (
    decode_case,
    keys_read,
    paged_decode_attention,
)
from ferrum_triton.ops.attention.pool import (
    ATTENTION_AXES,
    PAGED_TENSORS,
    check_queries,
    paged_sample,
)
from ferrum_triton.ops.kv_pool import check_pool, token_view
from ferrum_triton.ops.paged_cache import split_qkv_norm_rope_into_paged_cache
from ferrum_triton.ops.rope import MODES, NORM_ROPE, ROPE_INTERLEAVED, check_rope
from ferrum_triton.registry import op

_OTHERS = ("cache_dtype", "scales", "with_lse")
_AXES = {name: values for name, values in ATTENTION_AXES.items() if name not in _OTHERS}


@op(
    tensors={
        "qkv": "T[batch, qkv_size]",
        "q_weight": "float[head_dim]",
        "k_weight": "float[head_dim]",
        "cos": "float[max_positions, half_rotary_dim]",
        "sin": "float[max_positions, half_rotary_dim]",
        **{name: PAGED_TENSORS[name] for name in ("k_cache", "v_cache", "sinks")},
        "block_tables": "int[batch, max_blocks]",
        "kv_lens": "int[batch]",
        "tickets": "int32[num_tickets]",
    },
    axes={
        "batch": (0, 1, 3),
        "max_len": (40, 100),
        **_AXES,
        "with_tickets": (False, True),
        "rotary_dim": (None, 8),
        "qk_mode": MODES,
    },
    bench=[
        *(decode_case("h32k8d128", 1, ctx) for ctx in (1024, 8192)),
        *(decode_case("h32k8d128", batch, 1024) for batch in (8, 32)),
        decode_case("h32k8d128", 1, 1024, "bf16/tickets", with_tickets=True),
        decode_case("h16k8d256", 1, 1024),
        decode_case("h32k8d128", 8, 1024, "bf16/interleaved", qk_mode=ROPE_INTERLEAVED),
    ],
    mutates=("k_cache", "v_cache", "tickets"),
    static=("sliding_window", "qk_mode"),
    finite=("qkv", "v_cache", "sinks"),
)
def qkv_paged_decode_attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None = None,
    eps: float = 1e-6,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    qk_mode: int = NORM_ROPE,
    layout: str = "hnd",
    tickets: Tensor | None = None,
) -> Tensor:
    """:func:`split_qkv_norm_rope_into_paged_cache` and :func:`paged_decode_attention` of a token.

    The token of sequence b has the position kv_lens[b] - 1, by which it is rotated, written and
    attended. A quantised pool takes those two.

    Args:
        qkv: [batch, (num_heads + 2 · num_kv_heads) · head_dim], one token of each sequence.
        q_weight, k_weight: [head_dim], read in mode 1 only.
        cos, sin: [max_positions, rotary_dim / 2].
        k_cache, v_cache: the pool, of qkv's dtype, written in place. No other sequence may see the
            slot that a sequence's token is written to.
        block_tables: [batch, max_blocks].
        kv_lens: [batch], keys with the new one; 0 for padding, which is not written and sees none.
        sinks: [num_heads], or None.
        eps: added to the mean square of the norms.
        softmax_scale: None means 1 / sqrt(head_dim).
        sliding_window: keys a query sees, itself included; 0 means all.
        softcap: 0 means none.
        qk_mode: as in :func:`qk_norm_rope`; V is always copied.
        layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
        tickets: int32 [batch · num_kv_heads or more] zeros, which the call leaves so; no other call
            may have them while it runs. With them a sequence that is cut is merged in the same
            launch; None takes a launch more.

    Returns:
        [batch, num_heads, head_dim] in qkv's dtype.
    """
    num_kv_heads, head_dim = token_view(v_cache, layout).shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    pool = k_cache, v_cache
    q = split_qkv_norm_rope_into_paged_cache.reference(
        qkv, q_weight, k_weight, cos, sin, *pool, num_heads, block_tables=block_tables,
        pos_offsets=kv_lens.long() - 1, eps=eps, qk_mode=qk_mode, layout=layout,
    )  # fmt: skip
    return paged_decode_attention.reference(
        q[:, None], *pool, block_tables, kv_lens, None, None, sinks, None, softmax_scale,
        sliding_window, softcap, layout,
    )[:, 0]  # fmt: skip


@qkv_paged_decode_attention.rule
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, block_tables, kv_lens, sinks, eps,
    softmax_scale, sliding_window, softcap, qk_mode, layout, tickets,
):  # fmt: skip
    this = qkv_paged_decode_attention
    if k_cache.dtype != qkv.dtype:
        advice = "A quantised pool takes a call to write and one to attend."
        this.reject("k_cache", str(k_cache.dtype), f"{qkv.dtype}, the dtype of qkv", advice)
    num_kv_heads, head_dim = check_pool(this, k_cache, v_cache, None, None, layout, is_read=True)
    heads, rest = divmod(qkv.shape[1], max(head_dim, 1))
    num_heads = heads - 2 * num_kv_heads
    if rest or num_heads < 1:
        allowed = f"more than 2 * {num_kv_heads} heads of {head_dim}, as in k_cache"
        this.reject("qkv", f"{qkv.shape[1]} wide", allowed)
    check_queries(this, "qkv", num_heads, num_kv_heads, head_dim)
    check_rope(this, head_dim, cos, sin, qk_mode, {"q_weight": q_weight, "k_weight": k_weight})
    if sinks is not None and sinks.shape[0] != num_heads:
        got = f"of {sinks.shape[0]} elements"
        this.reject("sinks", got, f"{num_heads}, one for each query head")
    if tickets is not None and tickets.shape[0] < qkv.shape[0] * num_kv_heads:
        got, allowed = f"of {tickets.shape[0]} elements", "batch * num_kv_heads"
        this.reject("tickets", got, f"{allowed} = {qkv.shape[0] * num_kv_heads} or more")
    if sliding_window < 0:
        this.reject("sliding_window", str(sliding_window), "0 (off) or more")


@qkv_paged_decode_attention.sample
def _(
    make,
    batch,
    num_kv_heads,
    group_size,
    head_dim,
    max_len,
    block_size=16,
    layout="hnd",
    sliding_window=0,
    softcap=0.0,
    with_sinks=False,
    with_tickets=False,
    rotary_dim=None,
    qk_mode=NORM_ROPE,
    full=False,
):
    max_blocks = -(-max_len // block_size)
    lens = make.ints(0, max_len + 1, batch)
    num_heads = num_kv_heads * group_size
    pool = paged_sample(
        make, [max_blocks] * batch, max_blocks, num_heads, num_kv_heads, head_dim, block_size,
        layout, None, "slot", torch.float32, with_sinks,
    )  # fmt: skip
    del pool["k_scales"], pool["v_scales"]
    has_norm = qk_mode == NORM_ROPE
    return {
        "qkv": make.randn(batch, (num_heads + 2 * num_kv_heads) * head_dim),
        "q_weight": make.weight(head_dim) if has_norm else None,
        "k_weight": make.weight(head_dim) if has_norm else None,
        # Of the longest sequences the last positions are past the tables.
        **make.rope(max_len if full else max(max_len - 4, 1), rotary_dim or head_dim),
        **pool,
        "kv_lens": lens * 0 + max_len if full else lens,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "qk_mode": qk_mode,
        "tickets": make.ints(0, 1, batch * num_kv_heads) if with_tickets else None,
    }


@qkv_paged_decode_attention.traffic
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, block_tables, kv_lens, sinks, eps,
    softmax_scale, sliding_window, softcap, qk_mode, layout, tickets,
):  # fmt: skip
    batch, (num_kv_heads, head_dim) = qkv.shape[0], token_view(v_cache, layout).shape[2:]
    new = 2 * batch * num_kv_heads * head_dim
    attended = (qkv.numel() - new) * qkv.element_size()
    tables = 2 * batch * cos.shape[1] * cos.element_size()
    per_key = 2 * head_dim * k_cache.element_size()
    # The newest is written, the others are read.
    keys = keys_read(kv_lens, 1, sliding_window) * num_kv_heads * per_key
    return qkv.numel() * qkv.element_size() + attended + tables + keys
