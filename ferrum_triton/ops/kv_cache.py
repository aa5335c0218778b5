"""Writing keys and values into a contiguous head-major cache."""

import torch
from torch import Tensor

from ferrum_triton.registry import Case, op


def write_rows(k_cache, v_cache, k, v, cache_len, slots):
    """Cache rows ← [num_kv_heads, num_tokens, head_dim], skipping rows outside the cache."""
    capacity, num_tokens = k_cache.shape[1], k.shape[1]
    if slots is None:
        k_cache[:, cache_len : cache_len + num_tokens] = k
        v_cache[:, cache_len : cache_len + num_tokens] = v
        return
    # One extra row takes the tokens to be dropped, so that shapes do not depend on the data.
    row = torch.where((slots >= 0) & (slots < capacity), slots, capacity).long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        padded = torch.cat((cache, cache.new_zeros(cache.shape[0], 1, cache.shape[2])), dim=1)
        cache.copy_(padded.index_copy(1, row, new)[:, :capacity])


def check_room(of_op, cache_len, num_tokens, capacity, slots):
    if slots is None and (cache_len < 0 or cache_len + num_tokens > capacity):
        got = f"{cache_len}, with {num_tokens} new tokens"
        of_op.reject("cache_len", got, f"rows inside the capacity of {capacity}", "Grow the cache.")


@op(
    tensors={
        "k_cache": "T[num_kv_heads, capacity, head_dim]",
        "v_cache": "T[num_kv_heads, capacity, head_dim]",
        "k": "T[num_kv_heads, num_tokens, head_dim]",
        "v": "T[num_kv_heads, num_tokens, head_dim]",
        "slots": "int[num_tokens]",
    },
    axes={
        "num_tokens": (0, 1, 5),
        "num_kv_heads": (1, 3),
        "head_dim": (16, 40),
        "cache_len": (0, 2),
        "per_token_slots": (False, True),
    },
    bench=[
        Case(
            f"bf16/k8d128/t{t}",
            torch.bfloat16,
            {"num_tokens": t, "num_kv_heads": 8, "head_dim": 128},
        )
        for t in (1, 4096)
    ],
    mutates=("k_cache", "v_cache"),
)
def kv_cache_append_head_major(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_len: int = 0,
    slots: Tensor | None = None,
) -> None:
    """Write new keys and values into a contiguous head-major cache; one launch.

    Args:
        k_cache, v_cache: [num_kv_heads, capacity, head_dim], written in place.
        k, v: [num_kv_heads, num_tokens, head_dim].
        cache_len: cache row of token 0 when slots is None.
        slots: [num_tokens] cache rows on the device; rows outside the cache are skipped.

    Raises:
        InputError: cache_len + num_tokens exceeds the capacity; nothing is written then.
    """
    write_rows(k_cache, v_cache, k, v, cache_len, slots)


@kv_cache_append_head_major.call_rule
def _(k_cache, v_cache, k, v, cache_len, slots):
    check_room(kv_cache_append_head_major, cache_len, k.shape[1], k_cache.shape[1], slots)


@kv_cache_append_head_major.sample
def _(make, num_tokens, num_kv_heads, head_dim, cache_len=0, per_token_slots=False):
    capacity = cache_len + num_tokens + 3
    return {
        "k_cache": make.randn(num_kv_heads, capacity, head_dim),
        "v_cache": make.randn(num_kv_heads, capacity, head_dim),
        "k": make.randn(num_kv_heads, num_tokens, head_dim),
        "v": make.randn(num_kv_heads, num_tokens, head_dim),
        "cache_len": cache_len,
        "slots": make.distinct_ints(-1, capacity + 2, num_tokens) if per_token_slots else None,
    }


@kv_cache_append_head_major.traffic
def _(k_cache, v_cache, k, v, cache_len, slots):
    return 4 * k.numel() * k.element_size()
