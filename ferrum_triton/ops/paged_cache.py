"""Writing keys and values into a paged pool: what :mod:`ferrum_triton.ops.kv_pool` describes."""

import torch
from torch import Tensor

from ferrum_triton.ops.kv_pool import (
    POOL_AXES,
    POOL_TENSORS,
    append,
    check_placement,
    check_pool,
    placement,
    pool_sample,
    scale_bytes,
    token_view,
)
from ferrum_triton.ops.precision import widen
from ferrum_triton.ops.rope import COPY, NORM_ROPE, check_heads, check_rope, norm_rope
from ferrum_triton.registry import Case, op


@op(
    tensors={
        **POOL_TENSORS,
        "k": "T[num_tokens, num_kv_heads, head_dim]",
        "v": "T[num_tokens, num_kv_heads, head_dim]",
    },
    axes=POOL_AXES,
    bench=[
        Case(
            f"bf16/k8d128/{name}block16/t{t}",
            torch.bfloat16,
            {"num_tokens": t, "num_kv_heads": 8, "head_dim": 128, **axes},
        )
        for name, axes, sizes in (
            ("", {}, (1, 4096)),
            ("int8/", {"cache_dtype": torch.int8, "scales_dtype": torch.float16}, (1, 4096)),
            ("fp8/", {"cache_dtype": torch.float8_e4m3fn}, (4096,)),
        )
        for t in sizes
    ],
    mutates=("k_cache", "v_cache", "k_scales", "v_scales"),
)
def kv_cache_append_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None = None,
    block_tables: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    layout: str = "hnd",
) -> None:
    """Write new keys and values into a paged pool, quantised where the pool is; one launch.

    Layouts, quantisation and placement are those of :mod:`ferrum_triton.ops.kv_pool`.

    Args:
        k_cache, v_cache: the pool, written in place; float, int8 or float8_e4m3fn.
        k, v: [num_tokens, num_kv_heads, head_dim]; pass head-major ones transposed.
        slots: [num_tokens], or None. Slots must differ.
        block_tables: [num_seqs, max_blocks], or None.
        pos_offsets: [num_seqs], with block_tables.
        cu_seqlens_q: [num_seqs + 1], not descending, with block_tables.
        k_scales, v_scales: float16 or float32, written in place; a float pool leaves them alone.
            A float16 scale is subnormal, and coarse, where a head's maximum is below 0.03.
        layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
    """
    pool = token_view(k_cache, layout)
    slot, _ = placement(k.shape[0], pool, slots, block_tables, pos_offsets, cu_seqlens_q)
    append(k_cache, v_cache, widen(k), widen(v), slot, k_scales, v_scales, layout)


@kv_cache_append_paged.rule
def _(
    k_cache, v_cache, k, v, slots, block_tables, pos_offsets, cu_seqlens_q, k_scales, v_scales,
    layout,
):  # fmt: skip
    this = kv_cache_append_paged
    heads = check_pool(this, k_cache, v_cache, k_scales, v_scales, layout)
    if heads != tuple(k.shape[1:]):
        this.reject("k", f"of shape {list(k.shape)}", f"[num_tokens, {heads[0]}, {heads[1]}]")
    check_placement(this, k.shape[0], slots, block_tables, pos_offsets, cu_seqlens_q)


@kv_cache_append_paged.sample
def _(make, num_tokens, num_kv_heads, head_dim, **axes):
    return {
        **pool_sample(make, num_tokens, num_kv_heads, head_dim, **axes),
        "k": make.randn(num_tokens, num_kv_heads, head_dim),
        "v": make.randn(num_tokens, num_kv_heads, head_dim),
    }


@kv_cache_append_paged.traffic
def _(
    k_cache, v_cache, k, v, slots, block_tables, pos_offsets, cu_seqlens_q, k_scales, v_scales,
    layout,
):  # fmt: skip
    elements = k.numel() * (k.element_size() + k_cache.element_size())
    return 2 * elements + scale_bytes(k.shape[0], k_cache, k_scales, k.shape[1])


def _paged_case(t: int, name: str = "", dtype: torch.dtype = torch.bfloat16, **axes) -> Case:
    heads = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128}
    # Few tokens are a decode step, many the prompt of one sequence.
    axes = {"placement": "decode" if t <= 64 else "single", **heads, **axes}
    return Case(f"bf16/h32k8d128/{name}block16/t{t}", dtype, {"num_tokens": t, **axes})


@op(
    tensors={
        "qkv": "T[num_tokens, qkv_size]",
        "q_weight": "float[head_dim]",
        "k_weight": "float[head_dim]",
        "cos": "float[max_positions, half_rotary_dim]",
        "sin": "float[max_positions, half_rotary_dim]",
        "positions": "int[num_tokens]",
        **POOL_TENSORS,
    },
    axes={
        **POOL_AXES,
        "group_size": (1, 3),
        "rotary_dim": (None, 8),
        "qk_mode": (0, 1, 2, 3),
        "per_token_positions": (False, True),
    },
    bench=[
        *(_paged_case(t) for t in (1, 64, 4096)),
        _paged_case(4096, "nhd/", layout="nhd"),
        _paged_case(4096, "vllm_x/", layout="vllm_x"),
        _paged_case(4096, "varlen/", placement="varlen"),
        _paged_case(4096, "interleaved/", qk_mode=3),
        _paged_case(1, "int8/", cache_dtype=torch.int8, scales_dtype=torch.float16),
        _paged_case(4096, "int8/", cache_dtype=torch.int8, scales_dtype=torch.float16),
        _paged_case(4096, "fp8/", cache_dtype=torch.float8_e4m3fn),
    ],
    mutates=("k_cache", "v_cache", "k_scales", "v_scales"),
    static=("num_heads", "qk_mode"),
)
def split_qkv_norm_rope_into_paged_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    slots: Tensor | None = None,
    block_tables: Tensor | None = None,
    pos_offsets: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    positions: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    eps: float = 1e-6,
    qk_mode: int = NORM_ROPE,
    layout: str = "hnd",
) -> Tensor:
    """:func:`split_qkv_norm_rope` with K and V written straight into a paged pool; one launch.

    One step may hold any mix of prompts and single tokens. Layouts, quantisation and placement are
    those of :mod:`ferrum_triton.ops.kv_pool`; keys are quantised unrounded, from float32.

    Args:
        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
        q_weight, k_weight: [head_dim], read in mode 1 only.
        cos, sin: [max_positions, rotary_dim / 2].
        k_cache, v_cache: the pool, written in place; float, int8 or float8_e4m3fn.
        num_heads: query heads.
        slots: [num_tokens], or None. Slots must differ.
        block_tables: [num_seqs, max_blocks], or None.
        pos_offsets: [num_seqs], with block_tables.
        cu_seqlens_q: [num_seqs + 1], not descending, with block_tables.
        positions: [num_tokens] rotary positions, which slots require; None means the positions
            that place the tokens.
        k_scales, v_scales: float16 or float32, written in place; a float pool leaves them alone.
        eps: added to the mean square of the norms.
        qk_mode: as in :func:`qk_norm_rope`; V is always copied.
        layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.

    Returns:
        q [num_tokens, num_heads, head_dim]. For head-major output pass
        ``out=buffer.transpose(0, 1)`` of a [num_heads, num_tokens, head_dim] buffer.
    """
    num_tokens = qkv.shape[0]
    pool = token_view(k_cache, layout)
    num_kv_heads, head_dim = pool.shape[2], pool.shape[3:].numel()
    slot, place = placement(num_tokens, pool, slots, block_tables, pos_offsets, cu_seqlens_q)
    where = place if positions is None else positions.long()
    heads = qkv.reshape(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = norm_rope(q, q_weight, cos, sin, where, eps, qk_mode)
    k = norm_rope(widen(k), k_weight, cos, sin, where, eps, qk_mode)
    append(k_cache, v_cache, k, widen(v), slot, k_scales, v_scales, layout)
    return q.clone(memory_format=torch.contiguous_format)


@split_qkv_norm_rope_into_paged_cache.rule
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, slots, block_tables,
    pos_offsets, cu_seqlens_q, positions, k_scales, v_scales, eps, qk_mode, layout,
):  # fmt: skip
    this = split_qkv_norm_rope_into_paged_cache
    num_kv_heads, head_dim = check_pool(this, k_cache, v_cache, k_scales, v_scales, layout)
    if check_heads(this, qkv, num_heads, num_kv_heads) != head_dim:
        got = f"{qkv.shape[1]} wide"
        this.reject("qkv", got, f"heads of {head_dim}, as in k_cache")
    check_rope(this, head_dim, cos, sin, qk_mode, {"q_weight": q_weight, "k_weight": k_weight})
    check_placement(this, qkv.shape[0], slots, block_tables, pos_offsets, cu_seqlens_q)
    if slots is not None and positions is None and qk_mode != COPY:
        this.reject("positions", "None", "a tensor, since slots do not tell positions")


@split_qkv_norm_rope_into_paged_cache.sample
def _(
    make,
    num_tokens,
    num_kv_heads,
    group_size,
    head_dim,
    rotary_dim=None,
    qk_mode=NORM_ROPE,
    per_token_positions=False,
    **axes,
):
    pool = pool_sample(make, num_tokens, num_kv_heads, head_dim, **axes)
    num_heads = num_kv_heads * group_size
    num_positions = num_tokens + (5 if axes.get("hostile") else 8)
    if per_token_positions or "slots" in pool:
        low, high = (-1, num_positions + 1) if axes.get("hostile") else (0, num_positions)
        pool["positions"] = make.ints(low, high, num_tokens)
    return {
        "qkv": make.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim),
        "q_weight": make.weight(head_dim) if qk_mode == NORM_ROPE else None,
        "k_weight": make.weight(head_dim) if qk_mode == NORM_ROPE else None,
        **make.rope(num_positions, rotary_dim or head_dim),
        "num_heads": num_heads,
        "qk_mode": qk_mode,
        **pool,
    }


@split_qkv_norm_rope_into_paged_cache.traffic
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, slots, block_tables,
    pos_offsets, cu_seqlens_q, positions, k_scales, v_scales, eps, qk_mode, layout,
):  # fmt: skip
    num_kv_heads, head_dim = token_view(v_cache, layout).shape[2:]
    num_tokens, size = qkv.shape[0], qkv.element_size()
    queries = num_tokens * num_heads * head_dim * size
    cached = 2 * num_tokens * num_kv_heads * head_dim * k_cache.element_size()
    tables = 2 * num_tokens * cos.shape[1] * cos.element_size()
    scales = scale_bytes(num_tokens, k_cache, k_scales, num_kv_heads)
    return qkv.numel() * size + queries + cached + tables + scales
