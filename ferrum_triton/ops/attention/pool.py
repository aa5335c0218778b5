"""Attention over a paged pool, for decode steps and for mixed batches.

The pools are those of :mod:`ferrum_triton.ops.kv_pool`, in any of its layouts, in float or
quantised. A quantised pool's scales are either one for each slot and head, ordered as the cache, or
[num_kv_heads], one a head, or [1], one for all; a key counts as code · scale.

What a query sees: the keys [lo, p] of its sequence, with p its own position and lo = 0, or
max(0, p + 1 - sliding_window) with a window. Scores are softmax_scale · q · k, then
softcap · tanh(score / softcap) if softcap > 0. ``sinks`` [num_heads] are logits that join the
softmax's denominator and have no value. A query that sees nothing gives zeros and an lse of -inf,
or the sink. Query head h reads KV head h // (num_heads / num_kv_heads).

Lengths, positions and block tables are read from device memory when the kernel runs, so a captured
graph sees new ones. Padding rows (length 0, table entries of -1) are harmless. What lies past a
sequence's length, NaN included, does not count. A table entry inside the length that is no block of
the pool, -1 among them, is taken for the last one: nothing foreign is read, but the result means
nothing.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.kv_pool import LIMITS, POOL_TENSORS, cache_shapes, check_pool, token_view
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Op

MAX_HEAD_DIM = 256


def gather(cache: Tensor, scales: Tensor | None, table: Tensor, layout: str) -> Tensor:
    """Keys or values of one table: [capacity, num_kv_heads, head_dim], dequantised."""
    pool = token_view(cache, layout)
    unsigned = table.long() & 0xFFFFFFFF  # as kernels compare
    blocks = unsigned.clamp(max=pool.shape[0] - 1)
    if cache.dtype == torch.float8_e4m3fn:  # which torch cannot index
        pages = pool.view(torch.uint8)[blocks].view(cache.dtype)
    else:
        pages = pool[blocks]
    quantised = cache.dtype in LIMITS
    values = pages.float() if quantised else widen(pages)
    values = values.flatten(3)  # [max_blocks, block_size, num_kv_heads, head_dim]
    if quantised and scales is not None:
        factors = token_view(scales, layout)[blocks] if scales.dim() == 3 else scales
        values = values * widen(factors)[..., None]
    return values.flatten(0, 1)


def attend(q, k, v, visible, sinks, softmax_scale, softcap):
    """Attention of q [q_len, num_heads, head_dim] over k and v [keys, num_kv_heads, head_dim] where
    ``visible`` [q_len, keys]; returns out as q and lse [q_len, num_heads].
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # What no query sees can hold anything, NaN included, so it is cleared, not just masked.
    seen = visible.any(dim=0)[:, None, None]
    k, v = (torch.where(seen, t, 0.0) for t in (k, v))
    grouped = widen(q).to(k.dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->qhgk", grouped, k).flatten(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        logits = widen(sinks).to(k.dtype).expand(*scores.shape[:2])[..., None]
        scores = torch.cat((scores, logits), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    weights = weights[..., : k.shape[0]].unflatten(1, (k.shape[1], -1))
    out = torch.einsum("qhgk,khd->qhgd", weights, v).flatten(1, 2)
    return out.to(q.dtype), lse.float()


def visible_keys(position: Tensor, keys: int, sliding_window: int) -> Tensor:
    """[..., keys]: which keys a query at ``position`` [...] sees; none from a negative one."""
    key = torch.arange(keys, device=position.device)
    visible = key <= position[..., None]
    return visible & (key > position[..., None] - sliding_window) if sliding_window else visible


def check_paged(of_op: Op, q, k_cache, v_cache, k_scales, v_scales, layout, sliding_window):
    """The rules of attention over a pool."""
    num_kv_heads, head_dim = check_pool(
        of_op, k_cache, v_cache, k_scales, v_scales, layout, is_read=True
    )
    if k_cache.dtype in LIMITS and k_scales.dim() != v_scales.dim():
        of_op.reject("v_scales", f"of {v_scales.dim()} dimensions", "as many as k_scales")
    if q.shape[-1] != head_dim:
        of_op.reject("q", f"of head_dim {q.shape[-1]}", f"{head_dim}, as in k_cache")
    check_queries(of_op, "q", q.shape[-2], num_kv_heads, head_dim)
    if sliding_window < 0:
        of_op.reject("sliding_window", str(sliding_window), "0 (off) or more")
    if k_cache.dtype not in LIMITS and k_cache.dtype != q.dtype:
        of_op.reject(
            "k_cache", str(k_cache.dtype), f"{q.dtype}, the dtype of q, or a quantised one"
        )


def check_queries(of_op: Op, name, num_heads, num_kv_heads, head_dim):
    """What queries have to be for a pool's heads, whichever argument ``name`` they come in."""
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        allowed = f"a multiple of the {num_kv_heads} KV heads"
        of_op.reject(name, f"of {num_heads} heads", allowed)
    if head_dim > MAX_HEAD_DIM:
        of_op.reject(name, f"of head_dim {head_dim}", f"up to {MAX_HEAD_DIM}")


def paged_sample(
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
):
    """A pool, sinks, and tables of ``counts`` blocks a sequence.

    Blocks are in random order, and two of the pool are nobody's. ``scales``: one a "slot", a "head"
    or a "tensor".
    """
    num_blocks = sum(counts) + 2
    order = make.distinct_ints(0, num_blocks, sum(counts))
    tables = torch.full((len(counts), max_blocks), -1, dtype=torch.int32, device=make.device)
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count

    dtype = cache_dtype or make.dtype
    *shapes, of_slots = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_dim, dtype)
    k_scales = v_scales = None
    if dtype in LIMITS:
        shape = {"slot": of_slots, "head": [num_kv_heads], "tensor": [1]}[scales]
        factor = 1.5 / LIMITS[dtype]
        k_scales, v_scales = ((make.weight(*shape) * factor).to(scales_dtype) for _ in "kv")
    if dtype == torch.int8:
        k_cache, v_cache = (make.ints(-127, 128, *shape, dtype=dtype) for shape in shapes)
    elif dtype in LIMITS:  # beyond them a float becomes NaN
        most = LIMITS[dtype]
        drawn = (make.randn(*shape, scale=most / 4).clamp(-most, most) for shape in shapes)
        k_cache, v_cache = (x.to(dtype) for x in drawn)
    else:
        k_cache, v_cache = (make.randn(*shape) for shape in shapes)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "sinks": make.weight(num_heads) if with_sinks else None,
        "layout": layout,
    }


PAGED_TENSORS = {
    "k_cache": POOL_TENSORS["k_cache"],
    "v_cache": POOL_TENSORS["v_cache"],
    "block_tables": "int[num_seqs, max_blocks]",
    "k_scales": "float[...]",
    "v_scales": "float[...]",
    "sinks": "float[num_heads]",
}
ATTENTION_AXES = {
    "num_kv_heads": (1, 2),
    "group_size": (1, 3, 4),
    "head_dim": (16, 80),
    "block_size": (8, 16),
    "layout": ("nhd", "vllm_x", "hnd"),
    "cache_dtype": (torch.int8, torch.float8_e4m3fn, None),
    "scales": ("head", "tensor", "slot"),
    "sliding_window": (0, 1, 20),
    "softcap": (0.0, 5.0),
    "with_sinks": (False, True),
    "with_lse": (False, True),
}
