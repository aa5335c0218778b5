"""QKV preparation: one program per group of heads and block of tokens, all of it in registers.

A group is several heads of one kind (queries, keys or values), so that the heads of a token share
one read of its table row: in float32 that row is twice the bytes of a 16-bit head.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import rope as ops


@triton.jit
def head_group(num_heads, num_kv_heads, HEADS: tl.constexpr):
    """What this program prepares. HEADS divides both counts, so a group is all of one kind.

    Neighbouring programs hold the same tokens, whose table rows they find in the caches.

    Returns:
        The block of tokens, the group's first head in qkv, whether it holds queries, or values.
    """
    groups = (num_heads + 2 * num_kv_heads) // HEADS
    head = tl.program_id(0) % groups * HEADS
    return tl.program_id(0) // groups, head, head < num_heads, head >= num_heads + num_kv_heads


@triton.jit
def load_heads(
    start,
    mask,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Both members of every rotary pair, and the dimensions past them, in float32.

    ``start`` and ``mask`` are [tokens, heads, 1]; the results [tokens, heads, BLOCK_HALF] twice and
    [tokens, heads, BLOCK_REST].
    """
    if INTERLEAVED:
        # As one vector, taken apart in registers: every second element is no 16-byte load.
        d = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        x = tl.load(start + d, mask=mask & (d < 2 * HALF), other=0.0).to(tl.float32)
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_HALF, 2)))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, None, :]
        in_half = mask & (pair < HALF)
        x0 = tl.load(start + pair, mask=in_half, other=0.0).to(tl.float32)
        x1 = tl.load(start + HALF + pair, mask=in_half, other=0.0).to(tl.float32)
    tail = x0
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, None, :]
        tail = tl.load(start + 2 * HALF + r, mask=mask & (r < REST), other=0.0).to(tl.float32)
    return x0, x1, tail


@triton.jit
def normalize_heads(
    x0,
    x1,
    tail,
    weight_ptr,  # [2 * HALF + REST]
    eps,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """RMSNorm over each head, whose pairs are the two halves."""
    squares = tl.sum(x0 * x0 + x1 * x1, axis=2)
    if BLOCK_REST > 0:
        squares += tl.sum(tail * tail, axis=2)
    rstd = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, :, None]
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    w0 = tl.load(weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    w1 = tl.load(weight_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, None, :]
        w = tl.load(weight_ptr + 2 * HALF + r, mask=r < REST, other=0.0).to(tl.float32)
        tail = tail * rstd * w
    return x0 * rstd * w0, x1 * rstd * w1, tail


@triton.jit
def rotate_heads(
    x0,
    x1,
    position,  # [tokens], int64; outside the table, tokens are not rotated
    cos_ptr,  # [max_positions, HALF]
    sin_ptr,  # [max_positions, HALF]
    stride_cos_position,
    stride_sin_position,
    max_positions,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Every pair (x0, x1), turned by its token's angles."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    known = ((position >= 0) & (position < max_positions))[:, None] & (pair < HALF)
    cos_row = cos_ptr + (position * stride_cos_position)[:, None]
    sin_row = sin_ptr + (position * stride_sin_position)[:, None]
    cos = tl.load(cos_row + pair, mask=known, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(sin_row + pair, mask=known, other=0.0).to(tl.float32)[:, None, :]
    return x0 * cos - x1 * sin, x1 * cos + x0 * sin


@triton.jit
def in_pieces(d, stride_piece, PIECE: tl.constexpr):
    """Element offset of dimension ``d`` in a vector of pieces, PIECE elements each; 0: of one."""
    if PIECE > 0:
        d = (d // PIECE).to(tl.int64) * stride_piece + d % PIECE
    return d


@triton.jit
def store_heads(
    start,
    mask,
    x0,
    x1,
    tail,
    stride_piece,
    PIECE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The inverse of :func:`load_heads`, rounding to what ``start`` points at."""
    dtype = start.dtype.element_ty
    if INTERLEAVED:
        d = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        x = tl.interleave(x0, x1).to(dtype)
        tl.store(start + in_pieces(d, stride_piece, PIECE), x, mask=mask & (d < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, None, :]
        in_half = mask & (pair < HALF)
        tl.store(start + in_pieces(pair, stride_piece, PIECE), x0.to(dtype), mask=in_half)
        tl.store(start + in_pieces(HALF + pair, stride_piece, PIECE), x1.to(dtype), mask=in_half)
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, None, :]
        in_rest = mask & (r < REST)
        tl.store(start + in_pieces(2 * HALF + r, stride_piece, PIECE), tail.to(dtype), mask=in_rest)


@kernel(dynamic=("num_tokens", "max_positions", "capacity", "pos_offset", "cache_len", "eps"))
def _qkv_norm_rope_kernel(
    q_ptr,  # [num_heads, num_tokens, head_dim]
    k_ptr,  # [num_kv_heads, capacity, head_dim]
    v_ptr,  # [num_kv_heads, capacity, head_dim]
    x_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    q_weight_ptr,  # [head_dim] or None
    k_weight_ptr,  # [head_dim] or None
    cos_ptr,  # [max_positions, HALF]
    sin_ptr,  # [max_positions, HALF]
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
    num_tokens,
    max_positions,
    capacity,
    pos_offset,
    cache_len,
    eps,
    MODE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,  # a program; divides num_heads and num_kv_heads
    HALF: tl.constexpr,  # pairs rotated
    REST: tl.constexpr,  # head_dim - 2 * HALF, passed through
    BLOCK_HALF: tl.constexpr,  # power of two >= HALF
    BLOCK_REST: tl.constexpr,  # power of two >= REST, or 0
):
    block, first_head, is_query, is_value = head_group(num_heads, num_kv_heads, HEADS)
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    in_batch = token < num_tokens

    source = x_ptr + (token * stride_x_token)[:, None] + (head * stride_x_head)[None, :]
    x0, x1, tail = load_heads(
        source[:, :, None], in_batch[:, None, None], HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3
    )

    if MODE == 1:
        if is_query:
            x0, x1, tail = normalize_heads(
                x0, x1, tail, q_weight_ptr, eps, HALF, REST, BLOCK_HALF, BLOCK_REST
            )
        elif not is_value:
            x0, x1, tail = normalize_heads(
                x0, x1, tail, k_weight_ptr, eps, HALF, REST, BLOCK_HALF, BLOCK_REST
            )
    if MODE != 0:
        if not is_value:
            position = token + pos_offset
            if positions_ptr is not None:
                position = tl.load(positions_ptr + token, mask=in_batch, other=-1).to(tl.int64)
            x0, x1 = rotate_heads(
                x0,
                x1,
                position,
                cos_ptr,
                sin_ptr,
                stride_cos_position,
                stride_sin_position,
                max_positions,
                HALF,
                BLOCK_HALF,
            )

    # Queries go to their token's row, keys and values to a row of the cache. Each branch has its
    # own store: of a pointer that comes out of a branch, the compiler does not know the alignment.
    row = token + cache_len
    if slots_ptr is not None:
        row = tl.load(slots_ptr + token, mask=in_batch, other=-1).to(tl.int64)
    in_cache = (in_batch & (row >= 0) & (row < capacity))[:, None, None]
    if is_query:
        out = q_ptr + (token * stride_q_token)[:, None] + (head * stride_q_head)[None, :]
        store_heads(
            out[:, :, None], in_batch[:, None, None], x0, x1, tail, 0, 0,
            HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip
    elif is_value:
        head -= num_heads + num_kv_heads
        out = v_ptr + (row * stride_v_row)[:, None] + (head * stride_v_head)[None, :]
        store_heads(
            out[:, :, None], in_cache, x0, x1, tail, 0, 0,
            HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip
    else:
        head -= num_heads
        out = k_ptr + (row * stride_k_row)[:, None] + (head * stride_k_head)[None, :]
        store_heads(
            out[:, :, None], in_cache, x0, x1, tail, 0, 0,
            HALF, REST, BLOCK_HALF, BLOCK_REST, MODE == 3,
        )  # fmt: skip


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


def qkv_tile(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, num_processors: int
) -> tuple[int, int, int]:
    """(BLOCK_T, HEADS, num_warps) of a program.

    HEADS is the largest power of two up to 8 that divides both counts: no lane idles, no group is
    mixed, and eight heads bring the traffic of the tables below a quarter of the heads' own.

    BLOCK_T grows once every processor has eight programs, until a thread of four warps holds 16
    elements, two 16-byte loads. Few tokens keep four warps too, of shorter loads: with more threads
    than a table row has elements, the compiler reads the row in the layout of the heads, and
    exchanges nothing through shared memory.
    """
    common = math.gcd(num_heads, num_kv_heads)
    heads = min(common & -common, 8)
    group = heads * next_power_of_2(head_dim)
    fill = num_tokens * (num_heads + 2 * num_kv_heads) // (heads * 8 * num_processors)
    most = min(max(2048 // group, 1), next_power_of_2(num_tokens))
    block_t = min(next_power_of_2(max(fill, 1)), most)
    return block_t, heads, min(max(block_t * group // 256, 1), 4)


def head_blocks(head_dim: int, half: int) -> dict[str, int]:
    """The constexprs that describe a head of which ``half`` pairs are rotated."""
    rest = head_dim - 2 * half
    return {
        "HALF": half,
        "REST": rest,
        "BLOCK_HALF": next_power_of_2(max(half, 1)),
        "BLOCK_REST": next_power_of_2(rest) if rest else 0,
    }


def _launch_qkv(
    q, k, v, x, weights, cos, sin, positions, slots, pos_offset, cache_len, eps, qk_mode
):
    """``x`` is [num_tokens, heads, head_dim]; k and v are None where there are only queries."""
    num_tokens, _, head_dim = x.shape
    num_heads = q.shape[0]
    num_kv_heads = 0 if k is None else k.shape[0]
    # Mode 0 rotates nothing; any split into halves copies, and this one is the widest.
    blocks = head_blocks(head_dim, cos.shape[1] if qk_mode != ops.COPY else head_dim // 2)
    k, v = (q, q) if k is None else (k, v)
    block_t, heads, num_warps = qkv_tile(
        num_tokens, num_heads, num_kv_heads, head_dim, processors(x.device)
    )
    _qkv_norm_rope_kernel.launch(
        (cdiv(num_tokens, block_t) * ((num_heads + 2 * num_kv_heads) // heads),),
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
        num_tokens,
        cos.shape[0],
        k.shape[1],
        pos_offset,
        cache_len,
        float(eps),
        MODE=qk_mode,
        BLOCK_T=block_t,
        HEADS=heads,
        **blocks,
        num_warps=num_warps,
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


def as_heads(qkv: Tensor, heads: int) -> Tensor:
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
    x = as_heads(qkv, num_heads + 2 * num_kv_heads)
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
    x = as_heads(qkv, num_heads + 2 * k_cache.shape[0])
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
