"""Norms shared by packed products, opened and closed as :mod:`ferrum_triton.ops.open_norm` says."""

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, check_gate, gated
from ferrum_triton.ops.norm import check_residual
from ferrum_triton.ops.open_norm import (
    OPEN_TENSORS,
    check_squares,
    closed,
    open_sample,
    opened,
)
from ferrum_triton.ops.quant import check_product, pack_sample, product_case, wide_product
from ferrum_triton.ops.quant_fused import (
    GATE_UP_TENSORS,
    QKV_TENSORS,
    SIZES,
    check_products,
    fused_case,
    packed_units,
    products_side_by_side,
)
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.registry import Case, op


def _opening_case(kind: str, m: int, n: int, k: int) -> Case:
    case = product_case(kind, m, n, k)
    return Case(case.id, case.dtype, {**case.axes, "wide_residual": True})


@op(
    tensors={
        "a": "T[m, k]",
        "blocks": "uint8[n, row_bytes]",
        "residual": "float[m, n]",
        "norm_weight": "float[n]",
    },
    axes={
        "kind": KINDS,
        "m": (1, 0, 2, 3, 9),
        "n": (64, 1, 9, 32),
        "num_blocks": (1, 3),
        "wide_residual": (True, False),
    },
    bench=[
        _opening_case(kind, m, 4096, k)
        for kind, k in (("Q4_K:planes", 4096), ("Q4_K:planes", 12288), ("Q6_K:planes", 12288))
        for m in (1, 2)
    ]
    + [_opening_case("Q4_0:planes", 1, 4096, k) for k in (4096, 12288)],
    after_norm="a",
)
def linear_quant_open_norm(
    a: Tensor, blocks: Tensor, kind: str, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """r = residual + a · Wᵀ, h = r · norm_weight, and sums of r² by eight columns.

    The product is that of :func:`gemm_quant`; r is float32 until each result is rounded. With the
    squares, h is the norm that ``open_norm_quant_qkv`` and ``open_norm_quant_gate_up_silu`` close.
    For one or two rows of a over planes it is one launch where W's rows fill whole programs.

    Args:
        a: [m, K].
        blocks: uint8 [n, row_bytes], W's packed rows.
        kind: W's format.
        residual: [m, n], of a's dtype or float32.
        norm_weight: [n], any float dtype.

    Returns:
        r, [m, n] in residual's dtype; h, [m, n] in a's dtype, infinite beyond float16's 65504; the
        sums of squares, float32 [m, ceil(n / 8)].
    """
    return opened(wide_product(a, blocks, kind), residual, norm_weight, a.dtype)


@linear_quant_open_norm.rule
def _(a, blocks, kind, residual, norm_weight):
    this = linear_quant_open_norm
    check_product(this, a, blocks, kind)
    check_residual(this, residual, a)


@linear_quant_open_norm.sample
def _(make, kind, m, n, num_blocks, wide_residual):
    residual = make.randn(m, n)
    return {
        "a": make.randn(m, num_blocks * format_of(kind).block_size),
        "blocks": pack_sample(make, kind, n, num_blocks),
        "kind": kind,
        "residual": residual.float() if wide_residual else residual,
        "norm_weight": make.weight(n, dtype=torch.float32),
    }


def _qkv_case(v_kind: str | None, m: int, k: int, q_kind: str = "Q4_K:planes") -> Case:
    axes = {
        "q_kind": q_kind,
        "k_kind": None,
        "v_kind": v_kind,
        "nq": 5120 if v_kind else 6144,
        "nkv": 1024,
        "num_blocks": k // 256,
    }
    return fused_case((q_kind, v_kind) if v_kind else (q_kind,), f"n6144k{k}", m, axes)


@op(
    tensors={**OPEN_TENSORS, **QKV_TENSORS},
    axes={
        "q_kind": KINDS,
        "k_kind": (None, *KINDS),
        "v_kind": (None, *KINDS),
        **SIZES,
        "nq": (1, 2, 17),
        "nkv": (1, 0, 16),
    },
    bench=[_qkv_case(v_kind, m, 4096) for v_kind in ("Q6_K:planes", None) for m in (1, 2)]
    + [_qkv_case(None, 16, 4096), _qkv_case(None, 1, 4096, "Q4_0:planes")],
    finite=("h",),  # and after the division, which may be rounded to h's dtype
)
def open_norm_quant_qkv(
    h: Tensor,
    squares: Tensor,
    eps: float,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor | None,
    q_kind: str,
    k_kind: str,
    v_kind: str,
) -> Tensor:
    """y = (h / sqrt(Σ squares / K + eps)) · [Q; K; V]ᵀ: products with a norm that another opened.

    The products are those of :func:`gemv_quant`. By weights in planes one or two rows are one
    launch; for more h is divided and rounded to its dtype first.

    Args:
        h: [m, K], of ``linear_quant_open_norm``; finite.
        squares: float32 [m, ceil(K / 8)], of the same.
        eps: added to the mean square.
        q_blocks: uint8 [nq, row_bytes], packed rows.
        k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
        v_blocks: uint8 [nv, row_bytes], or None.
        q_kind, k_kind, v_kind: the formats; that of None is not read.

    Returns:
        [m, nq + nk + nv] in h's dtype.
    """
    parts = [(q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)]
    return products_side_by_side(closed(h, squares, eps), parts).to(h.dtype)


@open_norm_quant_qkv.rule
def _(h, squares, eps, q_blocks, k_blocks, v_blocks, q_kind, k_kind, v_kind):
    parts = (("q_", q_blocks, q_kind), ("k_", k_blocks, k_kind), ("v_", v_blocks, v_kind))
    check_products(open_norm_quant_qkv, h, parts, "h")
    check_squares(open_norm_quant_qkv, h, squares)


@open_norm_quant_qkv.sample
def _(make, q_kind, k_kind, v_kind, m, nq, nkv, num_blocks):
    sizes = ((q_kind, nq), (k_kind, nkv), (v_kind, nkv))
    q, key, v = (packed_units(make, kind, n, num_blocks) for kind, n in sizes)
    return open_sample(make, m, 256 * num_blocks) | {
        "q_blocks": q,
        "k_blocks": key,
        "v_blocks": v,
        "q_kind": q_kind,
        "k_kind": k_kind or "",
        "v_kind": v_kind or "",
    }


def _gate_up_case(kind: str, m: int, n: int, k: int) -> Case:
    axes = {"gate_kind": kind, "up_kind": kind, "n": n, "num_blocks": k // 256}
    return fused_case((kind, kind), f"n{n}k{k}", m, axes | {"activation": "silu"})


@op(
    tensors={**OPEN_TENSORS, **GATE_UP_TENSORS},
    axes={
        "gate_kind": KINDS,
        "up_kind": KINDS,
        **SIZES,
        "n": (1, 2, 9),
        "activation": GATES,
    },
    bench=[
        _gate_up_case(kind, m, 12288, 4096)
        for kind, m in (("Q4_K:planes", 1), ("Q4_K:planes", 2), ("Q4_0:planes", 1))
    ],
    finite=("h",),
)
def open_norm_quant_gate_up_silu(
    h: Tensor,
    squares: Tensor,
    eps: float,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
) -> Tensor:
    """y = silu(n · Gᵀ) · (n · Uᵀ), n = h / sqrt(Σ squares / K + eps).

    As :func:`gemv_quant_gate_up_silu` behind a norm that another product opened. By weights in
    planes one or two rows are one launch; for more h is divided and rounded to its dtype first.

    Args:
        h: [m, K], of ``linear_quant_open_norm``; finite.
        squares: float32 [m, ceil(K / 8)], of the same.
        eps: added to the mean square.
        gate_blocks: uint8 [n, row_bytes], G's packed rows.
        up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
        gate_kind, up_kind: the formats.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [m, n] in h's dtype.
    """
    n = closed(h, squares, eps)
    gate, up = wide_product(n, gate_blocks, gate_kind), wide_product(n, up_blocks, up_kind)
    return gated(gate, up, activation).to(h.dtype)


@open_norm_quant_gate_up_silu.rule
def _(h, squares, eps, gate_blocks, up_blocks, gate_kind, up_kind, activation):
    this = open_norm_quant_gate_up_silu
    parts = (("gate_", gate_blocks, gate_kind), ("up_", up_blocks, up_kind))
    check_products(this, h, parts, "h")
    check_squares(this, h, squares)
    check_gate(this, activation)


@open_norm_quant_gate_up_silu.sample
def _(make, gate_kind, up_kind, m, n, num_blocks, activation):
    gate, up = (packed_units(make, kind, n, num_blocks) for kind in (gate_kind, up_kind))
    return open_sample(make, m, 256 * num_blocks) | {
        "gate_blocks": gate,
        "up_blocks": up,
        "gate_kind": gate_kind,
        "up_kind": up_kind,
        "activation": activation,
    }
