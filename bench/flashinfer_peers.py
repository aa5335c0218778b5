"""FlashInfer as a peer of paged and latent attention.

Its wrappers plan on the host from lengths and pages; that is done once a case and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 256 << 20


def flashinfer_call(op: str, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What FlashInfer makes of a call of the op, or None where it has no such call."""
    planned = PLANS.get(op)
    if planned is None or not _is_plain(arguments):
        return None
    return planned(**arguments)


def _decode(
    q: Tensor,
    k_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    **_: Any,
) -> Callable[..., Any] | None:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    if q.shape[1] != 1:
        return None
    num_kv_heads, page_size = k_cache.shape[1:3]
    # Its own advice: tensor cores from four queries a KV head on.
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "HND", use_tensor_cores=q.shape[2] // num_kv_heads >= 4
    )
    wrapper.plan(
        *pages(block_tables, kv_lens, page_size),
        q.shape[2],
        num_kv_heads,
        q.shape[3],
        page_size,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    factors = _factors(k_scales, v_scales)

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, **_: Any) -> Tensor:
        return wrapper.run(q[:, 0], (k_cache, v_cache), **factors)[:, None]

    return call


def _varlen(
    q: Tensor,
    k_cache: Tensor,
    cu_seqlens_q: Tensor,
    pos_offsets: Tensor,
    block_tables: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    **_: Any,
) -> Callable[..., Any]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    num_kv_heads, page_size = k_cache.shape[1:3]
    kv_lens = pos_offsets + cu_seqlens_q.diff()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND")
    wrapper.plan(
        cu_seqlens_q,
        *pages(block_tables, kv_lens, page_size),
        q.shape[1],
        num_kv_heads,
        q.shape[2],
        page_size,
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    factors = _factors(k_scales, v_scales)

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, **_: Any) -> Tensor:
        return wrapper.run(q, (k_cache, v_cache), **factors)

    return call


def _mla(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor | None,
    kv_lens: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    **_: Any,
) -> Callable[..., Any] | None:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    if block_tables is None or cache.dtype != q.dtype:
        return None
    batch, q_len, num_heads, width = q.shape
    page_size = cache.shape[1]
    indptr, indices, _last = pages(block_tables, kv_lens, page_size)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace())
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * q_len,
        indptr,
        indices,
        kv_lens.int().cpu(),
        num_heads,
        kv_lora_rank,
        width - kv_lora_rank,
        page_size,
        True,
        softmax_scale,
        q.dtype,
        cache.dtype,
    )

    def call(q: Tensor, cache: Tensor, **_: Any) -> Tensor:
        q = q.flatten(0, 1)
        parts = (
            x[..., s] for x in (q, cache) for s in (slice(kv_lora_rank), slice(kv_lora_rank, None))
        )
        return wrapper.run(*parts).unflatten(0, (batch, q_len))

    return call


PLANS: dict[str, Callable[..., Callable[..., Any] | None]] = {
    "paged_decode_attention": _decode,
    "paged_varlen_attention": _varlen,
    "mla_attention": _mla,
}


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether a call asks for nothing but attention, over a pool that FlashInfer reads."""
    if arguments.get("softcap") or arguments.get("sliding_window"):
        return False
    if arguments.get("sinks") is not None or arguments.get("layout", "hnd") != "hnd":
        return False
    cache, scales = arguments.get("k_cache"), arguments.get("k_scales")
    one_scale = scales is None or scales.numel() == 1
    return cache is None or (cache.dtype != torch.int8 and one_scale)


def _factors(k_scales: Tensor | None, v_scales: Tensor | None) -> dict[str, float]:
    if k_scales is None or v_scales is None:
        return {}
    return {"k_scale": k_scales.item(), "v_scale": v_scales.item()}


def pages(block_tables: Tensor, kv_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, last_page_len) of sequences, int32; all but the indices on the host."""
    lens = kv_lens.cpu().int()
    counts = (lens + page_size - 1) // page_size
    used = torch.arange(block_tables.shape[1]) < counts[:, None]
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    last = torch.where(counts > 0, lens - (counts - 1) * page_size, 0).int()
    return indptr, block_tables[used.to(block_tables.device)].int(), last


def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
