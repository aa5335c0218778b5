"""Attention of mixed batches over a paged pool."""

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
from ferrum_triton.ops.kv_pool import POOL_TENSORS, token_view
from ferrum_triton.registry import Case, op


@op(
    tensors={
        "q": "T[num_tokens, num_heads, head_dim]",
        **PAGED_TENSORS,
        "cu_seqlens_q": POOL_TENSORS["cu_seqlens_q"],
        "pos_offsets": "int[num_seqs]",
        "lse": "float32[num_tokens, num_heads]",
    },
    axes={
        "q_lens": ((), (1,), (0, 20, 1), (9, 3)),
        "max_offset": (0, 40),
        "padding": (0, 2),
        **ATTENTION_AXES,
    },
    bench=[
        Case(
            f"bf16/h32k8d128/block16/{name}",
            torch.bfloat16,
            {
                "num_kv_heads": 8,
                "group_size": 4,
                "head_dim": 128,
                "q_lens": q_lens,
                "offsets": offsets,
                "cache_dtype": cache_dtype,
            },
            metric,
        )
        for name, q_lens, offsets, cache_dtype, metric in (
            ("prefill(8x2048 on ctx 8192)", (2048,) * 8, (8192 - 2048,) * 8, None, "tflops"),
            (
                "mixed(1x2048 + 63 decodes at ctx 4096)",
                (2048, *(1,) * 63),
                (4096 - 2048, *(4095,) * 63),
                None,
                "us",
            ),
            (
                "mixed(1x256 + 63 decodes at ctx 4096)",
                (256, *(1,) * 63),
                (0, *(4095,) * 63),
                None,
                "us",
            ),
            (
                "mixed(4x1024 + 124 decodes at ctx 2048)",
                (1024,) * 4 + (1,) * 124,
                (0,) * 4 + (2047,) * 124,
                None,
                "us",
            ),
            ("chunk(1x128 on ctx 8192)", (128,), (8192 - 128,), None, "us"),
            ("draft(1x8 on ctx 8192)", (8,), (8192 - 8,), None, "us"),
            (
                "fp8/prefill(8x2048 on ctx 8192)",
                (2048,) * 8,
                (8192 - 2048,) * 8,
                torch.float8_e4m3fn,
                "tflops",
            ),
            (
                "int8/prefill(8x2048 on ctx 8192)",
                (2048,) * 8,
                (8192 - 2048,) * 8,
                torch.int8,
                "tflops",
            ),
        )
    ],
    mutates=("lse",),
    static=("sliding_window",),
    finite=("v_cache", "sinks"),
)
def paged_varlen_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    pos_offsets: Tensor,
    block_tables: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    layout: str = "hnd",
) -> Tensor:
    """One step of any mix of prompts, chunks of prompts and single tokens.

    The tokens of sequence s are [cu_seqlens_q[s], cu_seqlens_q[s + 1]), the first of them at
    position pos_offsets[s]; their own keys are in the pool already. What a query sees is told in
    :mod:`ferrum_triton.ops.attention.pool`. Tokens before the first and past the last sequence
    are padding: their results are undefined.

    Args:
        q: [num_tokens, num_heads, head_dim]; head_dim up to 256.
        k_cache, v_cache: the pool, of q's dtype, int8 or float8_e4m3fn; block_size a power of two.
        cu_seqlens_q: [num_seqs + 1], not descending; tokens outside of q are left out.
        pos_offsets: [num_seqs].
        block_tables: [num_seqs, max_blocks].
        k_scales, v_scales: of a quantised pool.
        sinks: [num_heads], or None.
        lse: [num_tokens, num_heads] float32, written if given, as in
            :func:`paged_decode_attention`.
        max_q_len: a bound on the tokens of any sequence, if known: 8 or less may spare a launch,
            and one near the mean says that no sequence is a decode's. Where ``cu_seqlens_q`` lies
            on the host it is checked; on a GPU a sequence of more tokens than a bound of 8 or less
            may be left out, its rows of the result unwritten.
        softmax_scale: None means 1 / sqrt(head_dim).
        sliding_window: keys a query sees, itself included; 0 means all.
        softcap: 0 means none.
        layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype; computed in float32.
    """
    out, sums = torch.zeros_like(q), []
    cu_seqlens_q = cu_seqlens_q.clamp(0, q.shape[0])
    for token in range(q.shape[0]):
        # Of a token past the last sequence, the last one's table is read, and nothing seen.
        seq = (cu_seqlens_q[1:] <= token).sum(dim=0, keepdim=True)
        seq = seq.clamp(max=block_tables.shape[0] - 1)
        start, end = cu_seqlens_q[seq].long(), cu_seqlens_q[seq + 1].long()
        first, table = pos_offsets[seq].long(), block_tables[seq][0]
        k = gather(k_cache, k_scales, table, layout)
        v = gather(v_cache, v_scales, table, layout)
        # A sequence's keys end where its table does, and its queries are the last of them.
        beyond = (first + end - start - k.shape[0]).clamp(min=0)
        known = (start <= token) & (token < end)
        position = torch.where(known, first + token - start - beyond, -1)
        visible = visible_keys(position, k.shape[0], sliding_window)
        row, lse_row = attend(q[token][None], k, v, visible, sinks, softmax_scale, softcap)
        out[token] = row[0]
        sums.append(lse_row[0])
    if lse is not None and sums:
        lse.copy_(torch.stack(sums))
    return out


@paged_varlen_attention.rule
def _(
    q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales, sinks, lse,
    max_q_len, softmax_scale, sliding_window, softcap, layout,
):  # fmt: skip
    this = paged_varlen_attention
    check_paged(this, q, k_cache, v_cache, k_scales, v_scales, layout, sliding_window)
    num_seqs = block_tables.shape[0]
    if cu_seqlens_q.shape[0] != num_seqs + 1:
        got = f"of {cu_seqlens_q.shape[0]} elements"
        this.reject("cu_seqlens_q", got, f"num_seqs + 1 = {num_seqs + 1}")


@paged_varlen_attention.call_rule
def _(
    q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales, sinks, lse,
    max_q_len, softmax_scale, sliding_window, softcap, layout,
):  # fmt: skip
    if max_q_len is None:
        return
    least = min(q.shape[0], 1)
    if cu_seqlens_q.device.type == "cpu" and cu_seqlens_q.shape[0] > 1:
        least = max(least, int(cu_seqlens_q.diff().max()))
    if max_q_len < least:
        allowed = f"{least} or more: cu_seqlens_q has a sequence of so many tokens"
        paged_varlen_attention.reject("max_q_len", str(max_q_len), allowed)


@paged_varlen_attention.sample
def _(
    make,
    num_kv_heads,
    group_size,
    head_dim,
    q_lens,
    max_offset=0,
    offsets=None,
    padding=0,
    block_size=16,
    layout="hnd",
    cache_dtype=None,
    scales="slot",
    sliding_window=0,
    softcap=0.0,
    with_sinks=False,
    with_lse=False,
):
    num_tokens = sum(q_lens)
    if offsets is None:
        offsets = make.int_list(0, max_offset + 1, len(q_lens))
    else:
        max_offset = max(offsets)
    ends = [sum(q_lens[: i + 1]) for i in range(len(q_lens))]
    ends += [num_tokens] * padding
    # As many blocks whatever the offsets, so that one sample's buffers take another's values.
    counts = [-(-(q + max_offset) // block_size) for q in q_lens]
    max_blocks = max([1, *counts])
    num_heads = num_kv_heads * group_size
    ints = {"dtype": torch.int32, "device": make.device}
    return {
        "q": make.randn(num_tokens, num_heads, head_dim),
        **paged_sample(
            make,
            counts + [0] * padding,
            max_blocks,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            layout,
            cache_dtype,
            scales,
            torch.float32,
            with_sinks,
        ),
        "cu_seqlens_q": torch.tensor([0, *ends], **ints),
        "pos_offsets": torch.tensor([*offsets, *[0] * padding], **ints),
        "lse": make.weight(num_tokens, num_heads) if with_lse else None,
        "sliding_window": sliding_window,
        "softcap": softcap,
    }


def _pairs(cu_seqlens_q, pos_offsets, sliding_window) -> tuple[int, int]:
    """Pairs of query and key that count, and the keys that some query sees."""
    ends, pairs, keys = cu_seqlens_q.tolist(), 0, 0
    for start, end, offset in zip(ends, ends[1:], pos_offsets.tolist(), strict=False):
        reach = sliding_window or offset + end - start
        pairs += sum(min(offset + i + 1, reach) for i in range(end - start))
        keys += min(offset + end - start, reach + end - start - 1) if end > start else 0
    return pairs, keys


@paged_varlen_attention.flops
def _(
    q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales, sinks, lse,
    max_q_len, softmax_scale, sliding_window, softcap, layout,
):  # fmt: skip
    pairs, _ = _pairs(cu_seqlens_q, pos_offsets, sliding_window)
    return 4 * q.shape[1] * q.shape[2] * pairs


@paged_varlen_attention.traffic
def _(
    q, k_cache, v_cache, cu_seqlens_q, pos_offsets, block_tables, k_scales, v_scales, sinks, lse,
    max_q_len, softmax_scale, sliding_window, softcap, layout,
):  # fmt: skip
    num_kv_heads, head_dim = token_view(v_cache, layout).shape[2:]
    per_key = 2 * num_kv_heads * head_dim * k_cache.element_size()
    _, keys = _pairs(cu_seqlens_q, pos_offsets, sliding_window)
    return 2 * q.numel() * q.element_size() + keys * per_key
