"""QKV preparation: one program per head and block of tokens, both rotary halves in registers."""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, tokens_per_program
from ferrum_triton.ops import rope as ops


@triton.jit
def rotated_dims(half, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Element offsets of the two members of every rotary pair, and the pairs' mask."""
    pair = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    return first[None, :], second[None, :], (pair < half)[None, :]


@kernel(dynamic=("num_tokens", "max_positions", "capacity", "pos_offset", "cache_len", "eps"))
def _qkv_norm_rope_kernel(
    q_ptr,  # [num_heads, num_tokens, head_dim]
    k_ptr,  # [num_kv_heads, capacity, head_dim]
    v_ptr,  # [num_kv_heads, capacity, head_dim]
    x_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    cos_ptr,  # [max_positions, half]
    sin_ptr,  # [max_positions, half]
    positions_ptr,  # [num_tokens] or None
    slots_ptr,  # [num_tokens] or None
    stride_q_head,
    stride_q_token,
    stride_k_head,
    stride_k_row,
    stride_v_head,
    stride_v_row,
    stride_x_token,
    stride_x_head,
    stride_cos_position,
    stride_sin_position,
    num_heads,
    num_kv_heads,
    half,  # pairs rotated
    rest,  # head_dim - 2 * half, passed through
    num_tokens,
    max_positions,
    capacity,
    pos_offset,
    cache_len,
    eps,
    MODE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # power of two >= half
    BLOCK_REST: tl.constexpr,  # power of two >= rest, or 0
):
    num_heads_in = num_heads + 2 * num_kv_heads
    head = (tl.program_id(0) % num_heads_in).to(tl.int64)
    token = (tl.program_id(0) // num_heads_in).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = token < num_tokens
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads

    # Where the head goes: queries to their token's row, keys and values to a row of the cache.
    row = token + cache_len
    if slots_ptr is not None:
        row = tl.load(slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
    in_cache = in_batch & (row >= 0) & (row < capacity)
    if is_query:
        out = q_ptr + head * stride_q_head + token * stride_q_token
        writable = in_batch
    elif is_value:
        out = v_ptr + (head - num_heads - num_kv_heads) * stride_v_head + row * stride_v_row
        writable = in_cache
    else:
        out = k_ptr + (head - num_heads) * stride_k_head + row * stride_k_row
        writable = in_cache
    out = out[:, None]
    writable = writable[:, None]

    d0, d1, in_half = rotated_dims(half, BLOCK_HALF, INTERLEAVED=MODE == 3)
    source = (x_ptr + token * stride_x_token + head * stride_x_head)[:, None]
    load_mask = in_batch[:, None] & in_half
    # [BLOCK_T, BLOCK_HALF]
    x0 = tl.load(source + d0, mask=load_mask, other=0.0).to(tl.float32)
    x1 = tl.load(source + d1, mask=load_mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, :]
        in_rest = r < rest
        rest_mask = in_batch[:, None] & in_rest
        # [BLOCK_T, BLOCK_REST]
        tail = tl.load(source + 2 * half + r, mask=rest_mask, other=0.0).to(tl.float32)

    if MODE == 1:
        if not is_value:
            squares = tl.sum(x0 * x0 + x1 * x1, axis=1)
            if BLOCK_REST > 0:
                squares += tl.sum(tail * tail, axis=1)
            rstd = tl.rsqrt(squares / (2 * half + rest) + eps)[:, None]
            weight_ptr = q_weight_ptr if is_query else k_weight_ptr
            x0 *= rstd * tl.load(weight_ptr + d0, mask=in_half, other=0.0).to(tl.float32)
            x1 *= rstd * tl.load(weight_ptr + d1, mask=in_half, other=0.0).to(tl.float32)
            if BLOCK_REST > 0:
                weight = tl.load(weight_ptr + 2 * half + r, mask=in_rest, other=0.0)
                tail *= rstd * weight.to(tl.float32)

    if MODE != 0:
        if not is_value:
            position = token + pos_offset
            if positions_ptr is not None:
                position = tl.load(positions_ptr + token, mask=in_batch, other=-1).to(tl.int64)
            known = (position >= 0) & (position < max_positions)
            pair = tl.arange(0, BLOCK_HALF)[None, :]
            table_mask = (known & in_batch)[:, None] & in_half
            cos_block = cos_ptr + (position * stride_cos_position)[:, None] + pair
            sin_block = sin_ptr + (position * stride_sin_position)[:, None] + pair
            cos = tl.load(cos_block, mask=table_mask, other=1.0).to(tl.float32)
            sin = tl.load(sin_block, mask=table_mask, other=0.0).to(tl.float32)
            y0 = x0 * cos - x1 * sin
            y1 = x1 * cos + x0 * sin
            x0, x1 = y0, y1

    dtype = q_ptr.dtype.element_ty
    tl.store(out + d0, x0.to(dtype), mask=writable & in_half)
    tl.store(out + d1, x1.to(dtype), mask=writable & in_half)
    if BLOCK_REST > 0:
        tl.store(out + 2 * half + r, tail.to(dtype), mask=writable & in_rest)


@kernel
def _split_qkv_kernel(
    q_ptr,  # [num_tokens, q_dim]
    k_ptr,  # [num_tokens, kv_dim]
    v_ptr,  # [num_tokens, kv_dim]
    qkv_ptr,  # [num_tokens, q_dim + 2 * kv_dim]
    stride_q_token,
    stride_k_token,
    stride_v_token,
    stride_qkv_token,
    q_dim,
    kv_dim,
    BLOCK_C: tl.constexpr,
):
    width = q_dim + 2 * kv_dim
    blocks_per_row = tl.cdiv(width, BLOCK_C)
    token = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    c = tl.program_id(0) % blocks_per_row * BLOCK_C + tl.arange(0, BLOCK_C)
    k_first, v_first = q_dim, q_dim + kv_dim

    x = tl.load(qkv_ptr + token * stride_qkv_token + c, mask=c < width)

    tl.store(q_ptr + token * stride_q_token + c, x, mask=c < k_first)
    in_k = (c >= k_first) & (c < v_first)
    tl.store(k_ptr + token * stride_k_token + c - k_first, x, mask=in_k)
    in_v = (c >= v_first) & (c < width)
    tl.store(v_ptr + token * stride_v_token + c - v_first, x, mask=in_v)


def _launch_qkv(
    q, k, v, x, weights, cos, sin, positions, slots, pos_offset, cache_len, eps, qk_mode
):
    """``x`` is [num_tokens, heads, head_dim]; k and v are None where there are only queries."""
    num_tokens, heads_in, head_dim = x.shape
    num_heads = q.shape[0]
    num_kv_heads = 0 if k is None else k.shape[0]
    # Mode 0 rotates nothing; any split into halves copies, and this one is the widest.
    half = cos.shape[1] if qk_mode != ops.COPY else head_dim // 2
    rest = head_dim - 2 * half
    block_half = next_power_of_2(max(half, 1))
    k, v = (q, q) if k is None else (k, v)
    block_t = tokens_per_program(num_tokens, heads_in, 2 * block_half, x.device)
    _qkv_norm_rope_kernel.launch(
        (cdiv(num_tokens, block_t) * heads_in,),
        q,
        k,
        v,
        x,
        *(weights if qk_mode == ops.NORM_ROPE else (None, None)),
        cos,
        sin,
        positions,
        slots,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        num_heads,
        num_kv_heads,
        half,
        rest,
        num_tokens,
        cos.shape[0],
        k.shape[1],
        pos_offset,
        cache_len,
        float(eps),
        MODE=qk_mode,
        BLOCK_T=block_t,
        BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
        num_warps=1 if block_t * block_half <= 128 else 4,
    )


@ops.qk_norm_rope.impl("triton")
def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    shape = (num_heads, num_tokens, head_dim)
    y = x.new_empty(shape) if out is None else out
    if x.numel():
        weights = (weight, weight)
        _launch_qkv(
            y, None, None, x, weights, cos, sin, positions, None, pos_offset, 0, eps, qk_mode
        )
    return y


def _as_heads(qkv: Tensor, heads: int) -> Tensor:
    """[num_tokens, heads · head_dim] as [num_tokens, heads, head_dim]."""
    num_tokens, width = qkv.shape
    head_dim = width // heads
    return qkv.as_strided((num_tokens, heads, head_dim), (qkv.stride(0), head_dim, 1))


@ops.split_qkv_norm_rope.impl("triton")
def split_qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _as_heads(qkv, num_heads + 2 * num_kv_heads)
    num_tokens, _, head_dim = x.shape
    if out is None:
        heads = (num_heads, num_kv_heads, num_kv_heads)
        out = tuple(qkv.new_empty((count, num_tokens, head_dim)) for count in heads)
    if num_tokens:
        weights = (q_weight, k_weight)
        _launch_qkv(*out, x, weights, cos, sin, positions, None, pos_offset, 0, eps, qk_mode)
    return out


@ops.split_qkv_norm_rope_into_cache.impl("triton")
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
    qk_mode: int = ops.NORM_ROPE,
    *,
    out: Tensor | None = None,
) -> Tensor:
    x = _as_heads(qkv, num_heads + 2 * k_cache.shape[0])
    num_tokens, _, head_dim = x.shape
    q = qkv.new_empty((num_heads, num_tokens, head_dim)) if out is None else out
    if num_tokens:
        weights = (q_weight, k_weight)
        _launch_qkv(
            q,
            k_cache,
            v_cache,
            x,
            weights,
            cos,
            sin,
            positions,
            slots,
            pos_offset,
            cache_len,
            eps,
            qk_mode,
        )
    return q


@ops.split_qkv.impl("triton")
def split_qkv(
    qkv: Tensor,
    q_dim: int,
    kv_dim: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, width = qkv.shape
    if out is None:
        out = tuple(qkv.new_empty((num_tokens, dim)) for dim in (q_dim, kv_dim, kv_dim))
    if qkv.numel():
        block = min(next_power_of_2(width), 1024)
        _split_qkv_kernel.launch(
            (num_tokens * cdiv(width, block),),
            *out,
            qkv,
            *(part.stride(0) for part in out),
            qkv.stride(0),
            q_dim,
            kv_dim,
            BLOCK_C=block,
            num_warps=4,
        )
    return out
