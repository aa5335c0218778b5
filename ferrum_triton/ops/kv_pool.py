"""Paged pools of keys and values: layouts, quantisation, and where a token goes.

A pool holds ``num_blocks`` pages of ``block_size`` tokens; the slot of a token is
block · block_size + offset. Its layout is one of

========== ============================================= ========================================
layout     k_cache                                       v_cache
========== ============================================= ========================================
``hnd``    [num_blocks, num_kv_heads, block_size, D]     as k_cache
``nhd``    [num_blocks, block_size, num_kv_heads, D]     as k_cache
``vllm_x`` [num_blocks, num_kv_heads, D/x, block_size,x] [num_blocks, num_kv_heads, D, block_size]
========== ============================================= ========================================

where D is head_dim and x usually 16 bytes' worth of elements. A contiguous cache [num_kv_heads,
capacity, D] is an ``hnd`` pool of one page, ``cache[None]``; m of them stacked are a pool of m.

An int8 or float8_e4m3fn pool is quantised on write, symmetrically and with a scale for each token
and head: scale = max(max |x|, 1e-8) / limit and code = x / scale, rounded to the nearest even, with
a limit of 127 or 448. Its scales are [num_blocks, num_kv_heads, block_size], or for ``nhd``
[num_blocks, block_size, num_kv_heads]. A head that holds a value that is not finite gets a scale
that is not finite either.

Where a token goes is given in one of two ways, both in device memory:

* ``slots`` [num_tokens], one for each token;
* ``block_tables`` [num_seqs, max_blocks] with ``pos_offsets`` [num_seqs], the position of each
  sequence's first token, and ``cu_seqlens_q`` [num_seqs + 1], where each sequence's tokens start.
  Without cu_seqlens_q there is one sequence, or each token is a sequence of its own.

A token is skipped, its bytes in the pool left as they are, if its slot is negative or past the
pool, its position negative or past its block table, the table's entry not a block of the pool, or
if it lies past the last sequence, as the padding rows of a captured graph do.
"""

import torch
from torch import Tensor

from ferrum_triton.contract import ACTIVATIONS, DTYPES
from ferrum_triton.ops.precision import widen

LAYOUTS = ("hnd", "nhd", "vllm_x")

# The largest code of each quantised dtype.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# The least maximum a scale is made of, so that a head of zeros has one.
LEAST_MAXIMUM = 1e-8

DTYPES["cache"] = (*ACTIVATIONS, *LIMITS)


def cache_shapes(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of a pool's k_cache, v_cache and scales (either of them)."""
    if layout == "nhd":
        vectors = (num_blocks, block_size, num_kv_heads)
        return (*vectors, head_dim), (*vectors, head_dim), vectors
    vectors = (num_blocks, num_kv_heads, block_size)
    if layout == "hnd":
        return (*vectors, head_dim), (*vectors, head_dim), vectors
    x = 16 // dtype.itemsize
    pages = (num_blocks, num_kv_heads)
    return (*pages, head_dim // x, block_size, x), (*pages, head_dim, block_size), vectors


def token_view(cache: Tensor, layout: str) -> Tensor:
    """A cache or its scales as [num_blocks, block_size, num_kv_heads, ...]; shares memory."""
    if layout == "nhd":
        return cache
    return cache.movedim(3 if layout == "vllm_x" and cache.dim() > 3 else 2, 1)


def pool_strides(cache: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Strides of a cache by block, head, slot and piece: x elements of ``vllm_x``'s keys, one of
    its values; a vector of the other layouts is one piece.
    """
    strides = cache.stride()
    if layout == "nhd":
        return strides[0], strides[2], strides[1], 0
    if layout == "hnd":
        return strides[0], strides[1], strides[2], 0
    block, head, piece, slot = strides[:4]
    return block, head, slot, piece


def scale_strides(scales: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of the scales of slots by block, head and slot."""
    block, first, second = scales.stride()
    return (block, second, first) if layout == "nhd" else (block, first, second)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in ``dtype`` and the scales of the vectors along the last dimension of ``x``."""
    maximum = widen(x).abs().amax(dim=-1, keepdim=True).clamp_min(LEAST_MAXIMUM)
    # A tensor: torch divides a number by a tensor through its reciprocal, which rounds twice.
    limit = maximum.new_full((), LIMITS[dtype])
    codes = widen(x) * (limit / maximum)
    codes = torch.where(codes.isnan(), 0.0, codes).clamp(-limit, limit)
    if dtype == torch.int8:
        codes = codes.round()
    return codes.to(dtype), (maximum / limit).squeeze(-1)


def placement(num_tokens, pool, slots, block_tables, pos_offsets, cu_seqlens_q):
    """Slot of every token, -1 for none, and its position, -1 for unknown: int64 [num_tokens]."""
    num_blocks, block_size = pool.shape[:2]
    token = torch.arange(num_tokens, device=pool.device)
    nowhere = torch.full_like(token, -1)
    if slots is not None:
        return torch.where((slots >= 0) & (slots < num_blocks * block_size), slots, -1), nowhere
    num_seqs, max_blocks = block_tables.shape
    if num_seqs == 0 or max_blocks == 0:
        return nowhere, nowhere
    if cu_seqlens_q is not None:
        seq = (cu_seqlens_q[1:, None] <= token).sum(dim=0)
        local = token - cu_seqlens_q[seq]
    else:
        seq, local = (0 * token, token) if num_seqs == 1 else (token, 0 * token)
    known = (seq < num_seqs) & (local >= 0)
    seq = torch.where(known, seq, 0)
    position = torch.where(known, pos_offsets[seq] + local, -1)
    index = position // block_size
    known = (position >= 0) & (index < max_blocks)
    block = block_tables[seq, torch.where(known, index, 0)]
    known = known & (block >= 0) & (block < num_blocks)
    return torch.where(known, block.long() * block_size + position % block_size, -1), position


def _write(pool, slot, new):
    """pool[slot] = new for a pool seen by token, [num_blocks, block_size, ...]."""
    if pool.dtype == torch.float8_e4m3fn:  # which torch can neither concatenate nor index
        pool, new = pool.view(torch.uint8), new.view(torch.uint8)
    rows = pool.flatten(0, 1)
    # One extra row takes the tokens to be skipped, so that shapes do not depend on the data.
    padded = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    row = torch.where(slot < 0, len(rows), slot).long()
    pool.copy_(padded.index_copy(0, row, new)[:-1].unflatten(0, pool.shape[:2]))


def append(k_cache, v_cache, k, v, slot, k_scales, v_scales, layout):
    """Write [num_tokens, num_kv_heads, head_dim] of keys and values, in the caches' dtypes."""
    for cache, scales, new in ((k_cache, k_scales, k), (v_cache, v_scales, v)):
        pool = token_view(cache, layout)
        if cache.dtype in LIMITS:
            new, scale = quantise(new, cache.dtype)
            _write(token_view(scales, layout), slot, scale.to(scales.dtype))
        else:
            new = new.to(cache.dtype)
        _write(pool, slot, new.reshape(len(slot), *pool.shape[2:]))


def check_pool(of_op, k_cache, v_cache, k_scales, v_scales, layout, is_read=False):
    """Hold the caches and scales against the layout; returns num_kv_heads and head_dim.

    ``is_read``: attention reads the pool. Scales may then be [num_kv_heads] or [1] as well.
    """
    if layout not in LAYOUTS:
        of_op.reject("layout", repr(layout), ", ".join(map(repr, LAYOUTS)))
    dims = 5 if layout == "vllm_x" else 4
    if k_cache.dim() != dims:
        of_op.reject("k_cache", f"of {k_cache.dim()} dimensions", f"{dims}, as {layout} has")
    pool = token_view(k_cache, layout)
    num_blocks, block_size, num_kv_heads = pool.shape[:3]
    head_dim = pool.shape[3:].numel()
    if layout == "vllm_x":
        want = (num_blocks, num_kv_heads, head_dim, block_size)
    else:
        want = tuple(k_cache.shape)
    if tuple(v_cache.shape) != want:
        of_op.reject("v_cache", f"of shape {list(v_cache.shape)}", f"{list(want)}, after k_cache")
    if block_size == 0:
        of_op.reject("k_cache", "of empty blocks", "block_size of at least 1")
    # A pool of one block is a contiguous cache, which attention reads as such.
    if block_size & (block_size - 1) and (num_blocks > 1 or is_read):
        allowed = "a power of two" if is_read else "a power of two, or a pool of one block"
        of_op.reject("k_cache", f"of block_size {block_size}", allowed)
    if v_cache.dtype != k_cache.dtype:
        of_op.reject("v_cache", str(v_cache.dtype), f"{k_cache.dtype}, the dtype of k_cache")
    per_token = token_view(v_cache, layout).shape[:3]
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if k_cache.dtype not in LIMITS:
            continue
        if scales is None:
            of_op.reject(name, "None", f"a tensor, since the cache is {k_cache.dtype}")
        if scales.dtype == torch.bfloat16:
            of_op.reject(name, "bfloat16", "float16 or float32")
        if is_read and scales.dim() == 1:
            if scales.shape[0] not in (1, num_kv_heads):
                got = f"of {scales.shape[0]} elements"
                of_op.reject(name, got, f"1, or {num_kv_heads}, one for each KV head")
            continue
        if scales.dim() != 3 or token_view(scales, layout).shape != per_token:
            got = f"of shape {list(scales.shape)}"
            of_op.reject(name, got, "a scale for each slot and head, ordered as the cache")
    return num_kv_heads, head_dim


def check_placement(of_op, num_tokens, slots, block_tables, pos_offsets, cu_seqlens_q):
    if (slots is None) == (block_tables is None):
        got = "missing as well as block_tables" if slots is None else "given beside block_tables"
        of_op.reject("slots", got, "either slots or block_tables")
    if slots is not None:
        for name, value in (("pos_offsets", pos_offsets), ("cu_seqlens_q", cu_seqlens_q)):
            if value is not None:
                of_op.reject(name, "given beside slots", "None: it goes with block_tables")
        return
    if pos_offsets is None:
        of_op.reject("pos_offsets", "None", "a tensor, since block_tables is given")
    num_seqs = block_tables.shape[0]
    if cu_seqlens_q is None:
        if num_seqs not in (1, num_tokens):
            got = f"of {num_seqs} sequences for {num_tokens} tokens"
            of_op.reject("block_tables", got, "one sequence, one a token, or cu_seqlens_q as well")
    elif cu_seqlens_q.shape[0] != num_seqs + 1:
        got = f"of {cu_seqlens_q.shape[0]} elements"
        of_op.reject("cu_seqlens_q", got, f"num_seqs + 1 = {num_seqs + 1}")


POOL_TENSORS = {
    "k_cache": "cache[...]",
    "v_cache": "cache[...]",
    "slots": "int[num_tokens]",
    "block_tables": "int[num_seqs, max_blocks]",
    "pos_offsets": "int[num_seqs]",
    "cu_seqlens_q": "int[num_seqs_plus_one]",
    "k_scales": "float[...]",
    "v_scales": "float[...]",
}
POOL_AXES = {
    "num_tokens": (0, 1, 5),
    "num_kv_heads": (1, 2),
    "head_dim": (16, 40, 64),
    "block_size": (8, 16),
    "layout": ("nhd", "vllm_x", "hnd"),
    "placement": ("slots", "single", "decode", "varlen"),
    "hostile": (True, False),
}


def pool_sample(
    make,
    num_tokens,
    num_kv_heads,
    head_dim,
    block_size=16,
    layout="hnd",
    placement="single",
    hostile=False,
    cache_dtype=None,
    scales_dtype=torch.float32,
):
    """A pool and a placement; hostile ones hold slots, blocks and positions that do not exist."""
    num_seqs = {"slots": 0, "single": 1, "decode": num_tokens, "varlen": 3}[placement]
    # Positions start at 0 to 7.
    max_blocks = ((1 if placement == "decode" else num_tokens) + 8 + block_size - 1) // block_size
    num_blocks = max(num_seqs, 1) * max_blocks + 2
    num_slots = num_blocks * block_size
    dtype = cache_dtype or make.dtype
    *shapes, per_token = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_dim, dtype)
    k_cache, v_cache = (make.randn(*shape).to(dtype) for shape in shapes)
    arguments = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scales": make.weight(*per_token).to(scales_dtype),
        "v_scales": make.weight(*per_token).to(scales_dtype),
        "layout": layout,
    }
    if placement == "slots":
        low, high = (-2, num_slots + 2) if hostile else (0, num_slots)
        return {**arguments, "slots": make.distinct_ints(low, high, num_tokens)}
    low, high = (-1, num_blocks + 1) if hostile else (0, num_blocks)
    blocks = make.distinct_ints(low, high, num_seqs * max_blocks)
    arguments["block_tables"] = blocks.view(num_seqs, max_blocks)
    low, high = (-2, 8 + 2 * block_size) if hostile else (0, 8)
    arguments["pos_offsets"] = make.ints(low, high, num_seqs)
    if placement == "varlen":
        ends = make.ints(0, num_tokens + 1, num_seqs).sort().values
        if not hostile:
            ends[-1] = num_tokens
        arguments["cu_seqlens_q"] = torch.cat((0 * ends[:1], ends))
    return arguments


def scale_bytes(num_tokens, k_cache, k_scales, num_kv_heads):
    if k_cache.dtype not in LIMITS:
        return 0
    return 2 * num_tokens * num_kv_heads * k_scales.element_size()
