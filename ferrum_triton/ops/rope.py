"""QKV preparation: split, per-head norm, rotary embedding, and the write into a cache.

Rotary tables are ``cos, sin: [max_positions, rotary_dim / 2]``; ``rotary_dim`` may be smaller than
``head_dim``, whose remaining dimensions then pass through unrotated. A pair (x₀, x₁) turns into
(x₀ cos - x₁ sin, x₁ cos + x₀ sin). A token whose position lies outside the table is not rotated.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.kv_cache import check_room, write_rows
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

# What ``qk_mode`` selects, for Q and K alike; V is always copied.
COPY = 0  # neither norm nor rotation
NORM_ROPE = 1  # RMSNorm over the head, then rotation of the pairs (i, i + rotary_dim/2)
ROPE = 2  # rotation of the pairs (i, i + rotary_dim/2)
ROPE_INTERLEAVED = 3  # rotation of the pairs (2i, 2i + 1)

MODES = (COPY, NORM_ROPE, ROPE, ROPE_INTERLEAVED)


def _positions(positions: Tensor | None, offset: int, count: int, device: torch.device) -> Tensor:
    """[count] int64: given per token, or counted up from ``offset``."""
    if positions is not None:
        return positions.long()
    return torch.arange(count, device=device) + offset


def norm_rope(x, weight, cos, sin, positions, eps, qk_mode):
    """The head vectors of [num_tokens, heads, head_dim], prepared in x's dtype."""
    if qk_mode == COPY:
        return x
    wide = widen(x)
    if qk_mode == NORM_ROPE:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * widen(weight)
    half = cos.shape[1]
    known = ((positions >= 0) & (positions < cos.shape[0]))[:, None]
    row = torch.where(known[:, 0], positions, 0)
    c = torch.where(known, widen(cos)[row], 1.0)[:, None, :].to(wide.dtype)
    s = torch.where(known, widen(sin)[row], 0.0)[:, None, :].to(wide.dtype)
    if qk_mode == ROPE_INTERLEAVED:
        x0, x1 = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        turned = torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2)
    else:
        x0, x1 = wide[..., :half], wide[..., half : 2 * half]
        turned = torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)
    return torch.cat((turned, wide[..., 2 * half :]), dim=-1).to(x.dtype)


def check_rope(of_op, head_dim, cos, sin, qk_mode, weights):
    """The rules every rotary op shares."""
    if qk_mode not in MODES:
        of_op.reject(
            "qk_mode", str(qk_mode), "0 (copy), 1 (norm + rope), 2 (rope), 3 (interleaved rope)"
        )
    if cos.shape != sin.shape:
        of_op.reject("sin", f"of shape {list(sin.shape)}", f"{list(cos.shape)}, the shape of cos")
    if 2 * cos.shape[1] > head_dim:
        got = f"{cos.shape[1]} wide, so rotary_dim is {2 * cos.shape[1]}"
        of_op.reject("cos", got, f"at most head_dim / 2 = {head_dim // 2}")
    for name, weight in weights.items():
        if qk_mode == NORM_ROPE and weight is None:
            of_op.reject(name, "None", "a tensor, since mode 1 normalises")


def _check_positions(of_op, offset, count, cos, positions):
    if positions is None and (offset < 0 or offset + count > cos.shape[0]):
        got = f"{offset}, with {count} tokens"
        of_op.reject("pos_offset", got, f"positions inside the table's {cos.shape[0]} rows")


@op(
    tensors={"qkv": "T[num_tokens, qkv_size]"},
    axes={"num_tokens": (0, 1, 5), "q_dim": (1, 96, 128), "kv_dim": (1, 32)},
    bench=[
        Case(
            "bf16/q4096kv1024/t4096",
            torch.bfloat16,
            {"num_tokens": 4096, "q_dim": 4096, "kv_dim": 1024},
        )
    ],
    static=("q_dim", "kv_dim"),
)
def split_qkv(qkv: Tensor, q_dim: int, kv_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split each row [q | k | v] into three contiguous tensors.

    Args:
        qkv: [num_tokens, q_dim + 2 · kv_dim].
        q_dim: num_heads · head_dim.
        kv_dim: num_kv_heads · head_dim.

    Returns:
        q [num_tokens, q_dim], k and v [num_tokens, kv_dim].
    """
    q, k, v = qkv.split([q_dim, kv_dim, kv_dim], dim=-1)
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))


@split_qkv.rule
def _(qkv, q_dim, kv_dim):
    for name, width in (("q_dim", q_dim), ("kv_dim", kv_dim)):
        if width < 0:
            split_qkv.reject(name, str(width), "0 or more")
    if q_dim + 2 * kv_dim != qkv.shape[1]:
        got = f"{qkv.shape[1]} wide"
        split_qkv.reject("qkv", got, f"q_dim + 2 * kv_dim = {q_dim + 2 * kv_dim}")


@split_qkv.sample
def _(make, num_tokens, q_dim, kv_dim):
    return {"qkv": make.randn(num_tokens, q_dim + 2 * kv_dim), "q_dim": q_dim, "kv_dim": kv_dim}


ROPE_AXES = {
    "num_tokens": (0, 1, 5),
    "head_dim": (16, 40, 64),
    "rotary_dim": (None, 8),
    "pos_offset": (0, 3),
    "qk_mode": MODES,
    "per_token_positions": (False, True),
}


def _rope_sample(make, num_tokens, rotary_dim, pos_offset, qk_mode, per_token_positions):
    rotary = make.rope(pos_offset + num_tokens + 4, rotary_dim)
    positions = make.ints(-1, rotary["cos"].shape[0] + 1, num_tokens)
    shared = {"pos_offset": pos_offset, "qk_mode": qk_mode}
    return {**rotary, **shared, **({"positions": positions} if per_token_positions else {})}


@op(
    tensors={
        "x": "T[num_tokens, num_heads, head_dim]",
        "weight": "float[head_dim]",
        "cos": "float[max_positions, half_rotary_dim]",
        "sin": "float[max_positions, half_rotary_dim]",
        "positions": "int[num_tokens]",
    },
    axes={**ROPE_AXES, "num_heads": (1, 3)},
    bench=[
        Case(
            f"bf16/h32d128/t{t}",
            torch.bfloat16,
            {"num_tokens": t, "num_heads": 32, "head_dim": 128, "qk_mode": NORM_ROPE},
        )
        for t in (1, 4096)
    ],
    static=("qk_mode",),
)
def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    pos_offset: int = 0,
    eps: float = 1e-6,
    qk_mode: int = NORM_ROPE,
) -> Tensor:
    """Per-head RMSNorm and rotary embedding of Q or K, turned from token-major to head-major.

    Args:
        x: [num_tokens, num_heads, head_dim]; token and head strides are free.
        weight: [head_dim], the head norm's weight, shared by all heads; read in mode 1 only.
        cos, sin: [max_positions, rotary_dim / 2], any float dtype.
        positions: [num_tokens] on x's device; None means pos_offset, pos_offset + 1, ...
        pos_offset: position of token 0 when positions is None.
        eps: added to the mean square of the norm.
        qk_mode: 0 copies, 1 normalises and rotates, 2 rotates, 3 rotates interleaved pairs.

    Returns:
        [num_heads, num_tokens, head_dim]. For token-major output pass
        ``out=buffer.transpose(0, 1)`` of a [num_tokens, num_heads, head_dim] buffer.

    Source: Su et al., "RoFormer", 2021.
    """
    where = _positions(positions, pos_offset, x.shape[0], x.device)
    prepared = norm_rope(x, weight, cos, sin, where, eps, qk_mode)
    return prepared.transpose(0, 1).clone(memory_format=torch.contiguous_format)


@qk_norm_rope.rule
def _(x, weight, cos, sin, positions, pos_offset, eps, qk_mode):
    check_rope(qk_norm_rope, x.shape[2], cos, sin, qk_mode, {"weight": weight})


@qk_norm_rope.call_rule
def _(x, weight, cos, sin, positions, pos_offset, eps, qk_mode):
    _check_positions(qk_norm_rope, pos_offset, x.shape[0], cos, positions)


@qk_norm_rope.sample
def _(
    make,
    num_tokens,
    num_heads,
    head_dim,
    rotary_dim=None,
    pos_offset=0,
    qk_mode=NORM_ROPE,
    per_token_positions=False,
):
    return {
        "x": make.randn(num_tokens, num_heads, head_dim),
        "weight": make.weight(head_dim) if qk_mode == NORM_ROPE else None,
        **_rope_sample(
            make, num_tokens, rotary_dim or head_dim, pos_offset, qk_mode, per_token_positions
        ),
    }


QKV_TENSORS = {
    "qkv": "T[num_tokens, qkv_size]",
    "q_weight": "float[head_dim]",
    "k_weight": "float[head_dim]",
    "cos": "float[max_positions, half_rotary_dim]",
    "sin": "float[max_positions, half_rotary_dim]",
    "positions": "int[num_tokens]",
}
QKV_AXES = {**ROPE_AXES, "num_kv_heads": (1, 3), "group_size": (1, 3)}


def _qkv_cases(*num_tokens: int) -> list[Case]:
    shape = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "qk_mode": NORM_ROPE}
    return [
        Case(f"bf16/h32k8d128/t{t}", torch.bfloat16, {"num_tokens": t, **shape}) for t in num_tokens
    ]


def _qkv_sample(
    make,
    num_tokens,
    num_kv_heads,
    group_size,
    head_dim,
    rotary_dim=None,
    pos_offset=0,
    qk_mode=NORM_ROPE,
    per_token_positions=False,
):
    num_heads = num_kv_heads * group_size
    return {
        "qkv": make.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim),
        "q_weight": make.weight(head_dim) if qk_mode == NORM_ROPE else None,
        "k_weight": make.weight(head_dim) if qk_mode == NORM_ROPE else None,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        **_rope_sample(
            make, num_tokens, rotary_dim or head_dim, pos_offset, qk_mode, per_token_positions
        ),
    }


def check_heads(of_op, qkv, num_heads, num_kv_heads):
    heads = num_heads + 2 * num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        got = f"{num_heads} over {num_kv_heads} KV heads"
        of_op.reject("num_heads", got, "a positive multiple of num_kv_heads")
    if qkv.shape[1] % heads:
        got = f"{qkv.shape[1]} wide"
        of_op.reject("qkv", got, f"(num_heads + 2 * num_kv_heads) * head_dim = {heads} * head_dim")
    return qkv.shape[1] // heads


@op(
    tensors=QKV_TENSORS,
    axes=QKV_AXES,
    bench=_qkv_cases(1, 4096),
    static=("num_heads", "num_kv_heads", "qk_mode"),
)
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
    qk_mode: int = NORM_ROPE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [q | k | v] rows, prepare Q and K as :func:`qk_norm_rope` does, copy V; one launch.

    Args:
        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
        q_weight, k_weight: [head_dim], read in mode 1 only.
        cos, sin: [max_positions, rotary_dim / 2].
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        positions: [num_tokens] on the device; None means pos_offset, pos_offset + 1, ...
        pos_offset: position of token 0 when positions is None.
        eps: added to the mean square of the norms.
        qk_mode: as in :func:`qk_norm_rope`; V is always copied.

    Returns:
        q [num_heads, num_tokens, head_dim], k and v [num_kv_heads, num_tokens, head_dim].
    """
    num_tokens = qkv.shape[0]
    heads = (
        qkv.view(num_tokens, num_heads + 2 * num_kv_heads, -1)
        if num_tokens
        else qkv.reshape(
            0, num_heads + 2 * num_kv_heads, qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        )
    )
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    where = _positions(positions, pos_offset, num_tokens, qkv.device)
    q = norm_rope(q, q_weight, cos, sin, where, eps, qk_mode)
    k = norm_rope(k, k_weight, cos, sin, where, eps, qk_mode)
    return tuple(t.transpose(0, 1).clone(memory_format=torch.contiguous_format) for t in (q, k, v))


@split_qkv_norm_rope.rule
def _(
    qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, positions, pos_offset, eps, qk_mode
):
    head_dim = check_heads(split_qkv_norm_rope, qkv, num_heads, num_kv_heads)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    check_rope(split_qkv_norm_rope, head_dim, cos, sin, qk_mode, weights)


@split_qkv_norm_rope.call_rule
def _(
    qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, positions, pos_offset, eps, qk_mode
):
    _check_positions(split_qkv_norm_rope, pos_offset, qkv.shape[0], cos, positions)


split_qkv_norm_rope.sample(_qkv_sample)


@op(
    tensors={
        **QKV_TENSORS,
        "k_cache": "T[num_kv_heads, capacity, head_dim]",
        "v_cache": "T[num_kv_heads, capacity, head_dim]",
        "slots": "int[num_tokens]",
    },
    axes={**QKV_AXES, "cache_len": (0, 2), "per_token_slots": (False, True)},
    bench=_qkv_cases(1, 4096),
    mutates=("k_cache", "v_cache"),
    static=("num_heads", "qk_mode"),
)
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
    qk_mode: int = NORM_ROPE,
) -> Tensor:
    """:func:`split_qkv_norm_rope` with K and V written straight into a contiguous cache.

    Args:
        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
        q_weight, k_weight: [head_dim], read in mode 1 only.
        cos, sin: [max_positions, rotary_dim / 2].
        k_cache, v_cache: [num_kv_heads, capacity, head_dim], written in place.
        num_heads: query heads.
        cache_len: cache row of token 0 when slots is None; rows cache_len, cache_len + 1, ...
        positions: [num_tokens] rotary positions on the device; None counts up from pos_offset.
        slots: [num_tokens] cache rows on the device; tokens whose row is negative or not below
            capacity are not written. Rows must differ.
        pos_offset: rotary position of token 0 when positions is None.
        eps: added to the mean square of the norms.
        qk_mode: as in :func:`qk_norm_rope`.

    Returns:
        q [num_heads, num_tokens, head_dim].

    Raises:
        InputError: cache_len + num_tokens exceeds the capacity; nothing is written then.
    """
    q, k, v = split_qkv_norm_rope.reference(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        num_heads,
        k_cache.shape[0],
        positions,
        pos_offset,
        eps,
        qk_mode,
    )
    write_rows(k_cache, v_cache, k, v, cache_len, slots)
    return q


@split_qkv_norm_rope_into_cache.rule
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, cache_len, positions, slots,
    pos_offset, eps, qk_mode,
):  # fmt: skip
    this = split_qkv_norm_rope_into_cache
    head_dim = check_heads(this, qkv, num_heads, k_cache.shape[0])
    if head_dim != k_cache.shape[2]:
        this.reject("k_cache", f"of head_dim {k_cache.shape[2]}", f"{head_dim}, as in qkv")
    check_rope(this, head_dim, cos, sin, qk_mode, {"q_weight": q_weight, "k_weight": k_weight})


@split_qkv_norm_rope_into_cache.call_rule
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, cache_len, positions, slots,
    pos_offset, eps, qk_mode,
):  # fmt: skip
    this = split_qkv_norm_rope_into_cache
    _check_positions(this, pos_offset, qkv.shape[0], cos, positions)
    check_room(this, cache_len, qkv.shape[0], k_cache.shape[1], slots)


@split_qkv_norm_rope_into_cache.sample
def _(make, num_tokens, num_kv_heads, head_dim, cache_len=0, per_token_slots=False, **axes):
    base = _qkv_sample(make, num_tokens, num_kv_heads, head_dim=head_dim, **axes)
    del base["num_kv_heads"]
    capacity = cache_len + num_tokens + 3
    slots = make.distinct_ints(-1, capacity + 2, num_tokens) if per_token_slots else None
    return {
        **base,
        "k_cache": make.randn(num_kv_heads, capacity, head_dim),
        "v_cache": make.randn(num_kv_heads, capacity, head_dim),
        "cache_len": cache_len,
        "slots": slots,
    }


@split_qkv_norm_rope_into_cache.traffic
def _(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, num_heads, cache_len, positions, slots,
    pos_offset, eps, qk_mode,
):  # fmt: skip
    # Every element of qkv is read once and written once, to q or to a cache; a table row a token.
    tables = 2 * qkv.shape[0] * cos.shape[1] * cos.element_size()
    return 2 * qkv.numel() * qkv.element_size() + tables
