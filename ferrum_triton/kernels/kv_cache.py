"""Appending to a contiguous cache: keys and values copied to their rows, in one launch.

A program takes one KV head and a block of tokens, keys and values both.
"""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, tokens_per_program
from ferrum_triton.ops import kv_cache as ops


@kernel(dynamic=("num_tokens", "capacity", "cache_len"))
def _kv_cache_append_kernel(
    k_cache_ptr,  # [num_kv_heads, capacity, head_dim], updated
    v_cache_ptr,  # [num_kv_heads, capacity, head_dim], updated
    k_ptr,  # [num_kv_heads, num_tokens, head_dim]
    v_ptr,  # [num_kv_heads, num_tokens, head_dim]
    slots_ptr,  # [num_tokens] or None
    stride_k_cache_head,
    stride_k_cache_row,
    stride_v_cache_head,
    stride_v_cache_row,
    stride_k_head,
    stride_k_token,
    stride_v_head,
    stride_v_token,
    num_kv_heads,
    head_dim,
    num_tokens,
    capacity,
    cache_len,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= head_dim
    PDL: tl.constexpr,
):
    """k_cache[h, row(t)] = k[h, t] and v likewise; row(t) is t's slot, or cache_len + t"""
    pdl_trigger(PDL)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    token = (tl.program_id(0) // num_kv_heads).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = token < num_tokens
    pdl_wait(PDL)

    row = token + cache_len
    if slots_ptr is not None:
        row = tl.load(slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
    row = row[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = in_batch[:, None] & (row >= 0) & (row < capacity) & (d < head_dim)

    k = tl.load(k_ptr + head * stride_k_head + token[:, None] * stride_k_token + d, mask=mask)
    v = tl.load(v_ptr + head * stride_v_head + token[:, None] * stride_v_token + d, mask=mask)

    tl.store(k_cache_ptr + head * stride_k_cache_head + row * stride_k_cache_row + d, k, mask=mask)
    tl.store(v_cache_ptr + head * stride_v_cache_head + row * stride_v_cache_row + d, v, mask=mask)


@ops.kv_cache_append_head_major.impl("triton")
def kv_cache_append_head_major(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_len: int = 0,
    slots: Tensor | None = None,
) -> None:
    num_kv_heads, num_tokens, head_dim = k.shape
    if k.numel() == 0:
        return
    block_d = next_power_of_2(head_dim)
    block_t = tokens_per_program(num_tokens, num_kv_heads, block_d, k.device)
    _kv_cache_append_kernel.launch(
        (cdiv(num_tokens, block_t) * num_kv_heads,),
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        k_ptr=k,
        v_ptr=v,
        slots_ptr=slots,
        stride_k_cache_head=k_cache.stride(0),
        stride_k_cache_row=k_cache.stride(1),
        stride_v_cache_head=v_cache.stride(0),
        stride_v_cache_row=v_cache.stride(1),
        stride_k_head=k.stride(0),
        stride_k_token=k.stride(1),
        stride_v_head=v.stride(0),
        stride_v_token=v.stride(1),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_tokens=num_tokens,
        capacity=k_cache.shape[1],
        cache_len=cache_len,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=1 if block_t * block_d <= 256 else 4,
    )
