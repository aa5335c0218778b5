"""Attention of a decode step over a paged pool."""

import torch
from torch import Tensor

from ferrum_triton.ops.attention.pool import (
    ATTENTION_AXES,
    PAGED_TENSORS,
    attend,
    check_paged,
    gather,
    paged_sample,
    visible_keys,
)
from ferrum_triton.ops.kv_pool import token_view
from ferrum_triton.registry import Case, op


def decode_case(heads: str, batch: int, ctx: int, dtype: str = "bf16", **axes) -> Case:
    """A bench case of sequences that are all as long; ``dtype`` begins its id."""
    num_heads, rest = heads[1:].split("k")
    num_kv_heads, head_dim = map(int, rest.split("d"))
    sizes = {
        "batch": batch,
        "num_kv_heads": num_kv_heads,
        "group_size": int(num_heads) // num_kv_heads,
        "head_dim": head_dim,
        "max_len": ctx,
    }
    name = f"{heads}/block16/b{batch}/ctx{ctx}"
    return Case(f"{dtype}/{name}", torch.bfloat16, {**sizes, "full": True, **axes})


@op(
    tensors={
        "q": "T[batch, q_len, num_heads, head_dim]",
        **PAGED_TENSORS,
        "block_tables": "int[batch, max_blocks]",
        "kv_lens": "int[batch]",
        "lse": "float32[batch, q_len, num_heads]",
    },
    axes={
        "batch": (0, 1, 3),
        "q_len": (1, 3),
        "max_len": (40, 100),
        **ATTENTION_AXES,
        "batch_invariant": (False, True),
    },
    bench=[
        *(decode_case("h32k8d128", 1, ctx) for ctx in (1024, 8192, 32768)),
        *(decode_case("h32k8d128", 8, ctx) for ctx in (1024, 8192)),
        decode_case("h32k8d128", 32, 1024),
        decode_case("h32k8d128", 64, 1024),
        decode_case("h32k8d128", 64, 8192),
        decode_case("h32k8d128", 256, 2048),
        decode_case("h64k8d128", 32, 4096),
        decode_case("h28k4d128", 32, 4096),
        decode_case("h32k32d128", 32, 4096),
        decode_case("h8k1d256", 32, 4096),
        decode_case("h32k8d96", 16, 4000),
        Case(
            "bf16/h32k8d128/block16/b64/skew(1x65536+63x1024)",
            torch.bfloat16,
            {
                "batch": 64,
                "num_kv_heads": 8,
                "group_size": 4,
                "head_dim": 128,
                "max_len": 65536,
                "short_len": 1024,
            },
        ),
        *(
            decode_case(
                "h32k8d128", 8, ctx, "fp8", cache_dtype=torch.float8_e4m3fn, scales="tensor"
            )
            for ctx in (16384, 32768)
        ),
        *(
            Case(
                f"h32k8d128/block16/b{batch}/ctx{ctx}",
                torch.bfloat16,
                {
                    "batch": batch,
                    "num_kv_heads": 8,
                    "group_size": 4,
                    "head_dim": 128,
                    "max_len": ctx,
                    "full": True,
                    "cache_dtype": torch.int8,
                    "scales": "slot",
                    "scales_dtype": torch.float16,
                },
                op="int8_paged_decode_attention",
            )
            for batch, ctx in ((8, 16384), (8, 32768), (64, 8192))
        ),
        decode_case("h32k8d128", 8, 16384, "verify4", q_len=4),
    ],
    mutates=("lse",),
    static=("sliding_window",),
    finite=("v_cache", "sinks"),
)
def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    layout: str = "hnd",
    batch_invariant: bool = False,
) -> Tensor:
    """One decode step of every sequence, or a few newest tokens of each (speculative verify).

    Query i of sequence b has the position kv_lens[b] - q_len + i: lengths are final, the queries'
    own keys included. What the queries see is told in :mod:`ferrum_triton.ops.attention.pool`.

    Args:
        q: [batch, q_len, num_heads, head_dim]; head_dim up to 256. 1 to 8 queries a sequence are
            what this is for; more are right, but not fast.
        k_cache, v_cache: the pool, of q's dtype, int8 or float8_e4m3fn; block_size a power of two.
        block_tables: [batch, max_blocks].
        kv_lens: [batch], at most max_blocks · block_size.
        k_scales, v_scales: of a quantised pool.
        sinks: [num_heads], or None.
        lse: [batch, q_len, num_heads] float32, written if given: the natural logarithm of the
            softmax's denominator, for :func:`merge_attention_states`.
        softmax_scale: None means 1 / sqrt(head_dim).
        sliding_window: keys a query sees, itself included; 0 means all.
        softcap: 0 means none.
        layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
        batch_invariant: a sequence's result does not depend on the batch, not by a bit; slower
            where few long sequences would be cut finer.

    Returns:
        [batch, q_len, num_heads, head_dim] in q's dtype; computed in float32.

    Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023.
    """
    results = []
    for b in range(q.shape[0]):
        k = gather(k_cache, k_scales, block_tables[b], layout)
        v = gather(v_cache, v_scales, block_tables[b], layout)
        length = kv_lens[b].long().clamp(0, k.shape[0])
        position = length - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        visible = visible_keys(position, k.shape[0], sliding_window)
        results.append(attend(q[b], k, v, visible, sinks, softmax_scale, softcap))
    if lse is not None and results:
        lse.copy_(torch.stack([sums for _, sums in results]))
    return torch.stack([out for out, _ in results]) if results else torch.empty_like(q)


@paged_decode_attention.rule
def _(
    q, k_cache, v_cache, block_tables, kv_lens, k_scales, v_scales, sinks, lse, softmax_scale,
    sliding_window, softcap, layout, batch_invariant,
):  # fmt: skip
    this = paged_decode_attention
    check_paged(this, q, k_cache, v_cache, k_scales, v_scales, layout, sliding_window)


@paged_decode_attention.sample
def _(
    make,
    batch,
    num_kv_heads,
    group_size,
    head_dim,
    max_len,
    q_len=1,
    block_size=16,
    layout="hnd",
    cache_dtype=None,
    scales="slot",
    scales_dtype=torch.float32,
    sliding_window=0,
    softcap=0.0,
    with_sinks=False,
    with_lse=False,
    batch_invariant=False,
    full=False,
    short_len=None,
):
    max_blocks = -(-max_len // block_size)
    lens = make.ints(0, max_len + 1, batch)
    if full:
        lens = lens * 0 + max_len
    counts = [max_blocks] * batch
    if short_len is not None:
        lens = torch.cat((lens[:1] * 0 + max_len, lens[1:] * 0 + short_len))
        counts = [max_blocks] + [-(-short_len // block_size)] * (batch - 1)
    num_heads = num_kv_heads * group_size
    return {
        "q": make.randn(batch, q_len, num_heads, head_dim),
        **paged_sample(
            make,
            counts,
            max_blocks,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            layout,
            cache_dtype,
            scales,
            scales_dtype,
            with_sinks,
        ),
        "kv_lens": lens,
        "lse": make.weight(batch, q_len, num_heads) if with_lse else None,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "batch_invariant": batch_invariant,
    }


def keys_read(kv_lens: Tensor, q_len: int, sliding_window: int) -> int:
    """Keys that the sequences' newest ``q_len`` queries see; lengths of meta tensors count 0."""
    if kv_lens.device.type == "meta":
        return 0
    reach = sliding_window + q_len - 1 if sliding_window else None
    return int(kv_lens.clamp(min=0, max=reach).sum())


@paged_decode_attention.traffic
def _(
    q, k_cache, v_cache, block_tables, kv_lens, k_scales, v_scales, sinks, lse, softmax_scale,
    sliding_window, softcap, layout, batch_invariant,
):  # fmt: skip
    num_kv_heads, head_dim = token_view(v_cache, layout).shape[2:]
    per_key = 2 * head_dim * k_cache.element_size()
    if k_scales is not None and k_scales.dim() == 3:
        per_key += 2 * k_scales.element_size()
    keys = keys_read(kv_lens, q.shape[1], sliding_window)
    return 2 * q.numel() * q.element_size() + keys * num_kv_heads * per_key
