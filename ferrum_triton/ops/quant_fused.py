"""Products with several packed matrices at once: a layer's gate and up, and its Q, K and V.

For a token or two what a layer's products take is the time to read its weights and to launch them.
For many tokens one kernel saves memory traffic: gate and up of two products would be written, and
read again for the activation. The norm before them is an op with them, for kernels that leave its
result in no memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, check_gate, gated
from ferrum_triton.ops.norm import check_residual, fused_add_rms_norm
from ferrum_triton.ops.quant import (
    case_name,
    check_product,
    pack_sample,
    wide_product,
)
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.registry import Case, Op, op

SIZES = {"m": (0, 1, 2, 3, 8), "num_blocks": (1, 3)}
GATE_UP_TENSORS = {
    "gate_blocks": "uint8[n, gate_row_bytes]",
    "up_blocks": "uint8[n, up_row_bytes]",
}
QKV_TENSORS = {
    "q_blocks": "uint8[nq, q_row_bytes]",
    "k_blocks": "uint8[nk, k_row_bytes]",
    "v_blocks": "uint8[nv, v_row_bytes]",
}


def check_products(
    op: Op, a: Tensor, parts: Sequence[tuple[str, Tensor | None, str]], a_name: str = "a"
) -> None:
    """Reject matrices that are none of their kind, and activations of another K.

    Args:
        op: the op.
        a: activations.
        parts: prefix of the argument, matrix and kind; None for a matrix that there is not.
        a_name: the argument of the activations.
    """
    for prefix, blocks, kind in parts:
        if blocks is not None:
            check_product(op, a, blocks, kind, prefix, a_name)


def packed_units(make, kind: str | None, num_rows: int, num_units: int) -> Tensor | None:
    """Random rows of ``num_units`` times 256 weights, packed; None where there is no kind."""
    if kind is None:
        return None
    return pack_sample(make, kind, num_rows, 256 * num_units // format_of(kind).block_size)


def fused_case(kinds: tuple[str, ...], shape: str, m: int, axes: dict[str, Any]) -> Case:
    names = "_".join(case_name(kind) for kind in kinds)
    return Case(f"{names}/{shape}/m{m}", torch.bfloat16, axes | {"m": m})


def _gate_up_case(gate: str, up: str, m: int) -> Case:
    axes = {"gate_kind": gate, "up_kind": up, "n": 14336, "num_blocks": 4096 // 256}
    return fused_case((gate, up), "n14336k4096", m, axes | {"activation": "silu"})


@op(
    tensors={
        "a": "T[m, k]",
        **GATE_UP_TENSORS,
    },
    # Units of 256 weights are whole blocks of any kind.
    axes={
        "gate_kind": KINDS,
        "up_kind": KINDS,
        **SIZES,
        "n": (1, 2, 9),
        "activation": GATES,
    },
    bench=[
        *(_gate_up_case("Q4_K:planes", "Q4_K:planes", m) for m in (1, 2, 4, 8, 32)),
        *(_gate_up_case("Q6_K:planes", "Q6_K:planes", m) for m in (1, 2)),
        _gate_up_case("Q4_K:planes", "Q6_K:planes", 1),
        _gate_up_case("Q3_K:planes", "Q5_K:planes", 2),
        _gate_up_case("Q8_0:planes", "Q8_0:planes", 1),
    ],
    after_norm="a",
)
def gemv_quant_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
) -> Tensor:
    """y = silu(a · Gᵀ) · (a · Uᵀ) for any number of rows of a.

    Both products are those of :func:`gemm_quant`, in float32 until the one rounding at the end. By
    weights in planes they are one launch, if more than 8 rows meet one format. Where two products
    take more than 64 rows, gate and up are rounded to a's dtype in between.

    Args:
        a: [m, K], finite.
        gate_blocks: uint8 [n, row_bytes], G's packed rows.
        up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
        gate_kind, up_kind: the formats.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [m, n] in a's dtype.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = wide_product(a, gate_blocks, gate_kind), wide_product(a, up_blocks, up_kind)
    return gated(gate, up, activation).to(a.dtype)


@gemv_quant_gate_up_silu.rule
def _(a, gate_blocks, up_blocks, gate_kind, up_kind, activation):
    parts = (("gate_", gate_blocks, gate_kind), ("up_", up_blocks, up_kind))
    check_products(gemv_quant_gate_up_silu, a, parts)
    check_gate(gemv_quant_gate_up_silu, activation)


@gemv_quant_gate_up_silu.sample
def _(make, gate_kind, up_kind, m, n, num_blocks, activation):
    gate, up = (packed_units(make, kind, n, num_blocks) for kind in (gate_kind, up_kind))
    return {
        "a": make.randn(m, 256 * num_blocks),
        "gate_blocks": gate,
        "up_blocks": up,
        "gate_kind": gate_kind,
        "up_kind": up_kind,
        "activation": activation,
    }


def _qkv_case(q: str, k: str | None, v: str, m: int) -> Case:
    kinds = (q, v) if k is None else (q, k, v)
    axes: dict[str, Any] = {
        "q_kind": q,
        "k_kind": k,
        "v_kind": v,
        "nq": 4096 if k else 5120,
        "nkv": 1024,
    }
    return fused_case(kinds, "n6144k4096", m, axes | {"num_blocks": 4096 // 256})


@op(
    tensors={
        "a": "T[m, k]",
        **QKV_TENSORS,
    },
    axes={
        "q_kind": KINDS,
        "k_kind": (None, *KINDS),
        "v_kind": KINDS,
        **SIZES,
        "nq": (1, 2, 9),
        "nkv": (1, 0, 3),
    },
    bench=[
        *(_qkv_case("Q4_K:planes", None, "Q6_K:planes", m) for m in (1, 2, 4, 8, 32)),
        _qkv_case("Q4_K:planes", "Q5_K:planes", "Q6_K:planes", 1),
        _qkv_case("Q3_K:planes", "Q2_K:planes", "Q5_K:planes", 2),
    ],
    after_norm="a",
)
def gemv_quant_qkv(
    a: Tensor,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor,
    q_kind: str,
    k_kind: str,
    v_kind: str,
) -> Tensor:
    """y = a · [Q; K; V]ᵀ for any number of rows of a, three matrices over one K, of any formats.

    The products are those of :func:`gemm_quant`. By weights in planes they are one launch, if
    more than 8 rows meet one format, or two: both of 3 or 5 bits, or both of others.

    Args:
        a: [m, K], finite.
        q_blocks: uint8 [nq, row_bytes], packed rows.
        k_blocks: uint8 [nk, row_bytes], or None for two matrices: rows of one format lie in one.
        v_blocks: uint8 [nv, row_bytes].
        q_kind, k_kind, v_kind: the formats; k_kind is not read where k_blocks is None.

    Returns:
        [m, nq + nk + nv] in a's dtype.
    """
    return products_side_by_side(a, [(q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)])


def products_side_by_side(a: Tensor, parts: Sequence[tuple[Tensor | None, str]]) -> Tensor:
    """a · [W₁; W₂; W₃]ᵀ of the matrices there are."""
    products = [wide_product(a, blocks, kind) for blocks, kind in parts if blocks is not None]
    return torch.cat(products, dim=1).to(a.dtype)


@gemv_quant_qkv.rule
def _(a, q_blocks, k_blocks, v_blocks, q_kind, k_kind, v_kind):
    parts = (("q_", q_blocks, q_kind), ("k_", k_blocks, k_kind), ("v_", v_blocks, v_kind))
    check_products(gemv_quant_qkv, a, parts)


@gemv_quant_qkv.sample
def _(make, q_kind, k_kind, v_kind, m, nq, nkv, num_blocks):
    sizes = ((q_kind, nq), (k_kind, nkv), (v_kind, nkv))
    q, key, v = (packed_units(make, kind, n, num_blocks) for kind, n in sizes)
    return {
        "a": make.randn(m, 256 * num_blocks),
        "q_blocks": q,
        "k_blocks": key,
        "v_blocks": v,
        "q_kind": q_kind,
        "k_kind": k_kind or "",
        "v_kind": v_kind,
    }


NORM_TENSORS = {"residual": "float[m, k]", "x": "T[m, k]", "norm_weight": "float[k]"}
NORM_AXES = {**SIZES, "wide_residual": (False, True)}


def _norm_sample(make, m: int, k: int, wide_residual: bool) -> dict[str, Any]:
    residual = make.randn(m, k)
    return {
        "residual": residual.float() if wide_residual else residual,
        "x": make.randn(m, k),
        "norm_weight": make.weight(k, dtype=torch.float32),
        "eps": 1e-6,
    }


def _norm_gate_up_case(kind: str, m: int, n: int, k: int) -> Case:
    axes = {"gate_kind": kind, "up_kind": kind, "n": n, "num_blocks": k // 256}
    axes |= {"activation": "silu", "wide_residual": True}
    return fused_case((kind, kind), f"n{n}k{k}", m, axes)


@op(
    tensors={
        **NORM_TENSORS,
        **GATE_UP_TENSORS,
    },
    axes={
        "gate_kind": KINDS,
        "up_kind": KINDS,
        **NORM_AXES,
        "n": (1, 2, 9),
        "activation": GATES,
    },
    bench=[
        *(
            _norm_gate_up_case("Q4_K:planes", m, 12288, 4096)
            for m in (8, 32, 1, 64, 128, 256, 384, 512, 1024, 2048, 4096)
        ),
        *(_norm_gate_up_case("Q4_K:planes", m, 25600, 5120) for m in (8, 32)),
    ],
    mutates=("residual",),
)
def add_rms_norm_quant_gate_up_silu(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
) -> Tensor:
    """residual ← residual + x and h = rms_norm(residual) · norm_weight, then silu(h Gᵀ) · (h Uᵀ).

    h is that of :func:`fused_add_rms_norm`, rounded to x's dtype, and y that of
    :func:`gemv_quant_gate_up_silu`. By weights in planes they are two launches, if more than 8
    rows meet one format.

    Args:
        residual: [m, K], updated in place; of x's dtype, or float32.
        x: [m, K].
        norm_weight: [K], any float dtype.
        eps: added to the mean square.
        gate_blocks: uint8 [n, row_bytes], G's packed rows.
        up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
        gate_kind, up_kind: the formats.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [m, n] in x's dtype.
    """
    h = fused_add_rms_norm.reference(residual, x, norm_weight, eps)
    return gemv_quant_gate_up_silu.reference(
        h, gate_blocks, up_blocks, gate_kind, up_kind, activation
    )


@add_rms_norm_quant_gate_up_silu.rule
def _(residual, x, norm_weight, eps, gate_blocks, up_blocks, gate_kind, up_kind, activation):
    this = add_rms_norm_quant_gate_up_silu
    parts = (("gate_", gate_blocks, gate_kind), ("up_", up_blocks, up_kind))
    check_products(this, x, parts, "x")
    check_residual(this, residual, x)
    check_gate(this, activation)


@add_rms_norm_quant_gate_up_silu.sample
def _(make, gate_kind, up_kind, m, n, num_blocks, activation, wide_residual):
    gate, up = (packed_units(make, kind, n, num_blocks) for kind in (gate_kind, up_kind))
    return _norm_sample(make, m, 256 * num_blocks, wide_residual) | {
        "gate_blocks": gate,
        "up_blocks": up,
        "gate_kind": gate_kind,
        "up_kind": up_kind,
        "activation": activation,
    }


def _norm_qkv_case(v_kind: str | None, m: int, k: int) -> Case:
    q_kind = "Q4_K:planes"
    axes: dict[str, Any] = {
        "q_kind": q_kind,
        "k_kind": None,
        "v_kind": v_kind,
        "nq": 5120 if v_kind else 6144,
        "nkv": 1024,
        "num_blocks": k // 256,
        "wide_residual": True,
    }
    return fused_case((q_kind, v_kind) if v_kind else (q_kind,), f"n6144k{k}", m, axes)


@op(
    tensors={
        **NORM_TENSORS,
        **QKV_TENSORS,
    },
    axes={
        "q_kind": KINDS,
        "k_kind": (None, *KINDS),
        "v_kind": (None, *KINDS),
        **NORM_AXES,
        "nq": (1, 2, 17),
        "nkv": (1, 0, 16),
    },
    bench=[
        *(_norm_qkv_case("Q6_K:planes", m, 4096) for m in (8, 32, 1, 64, 128, 256)),
        *(_norm_qkv_case(None, m, k) for m in (8, 32) for k in (4096, 5120)),
    ],
    mutates=("residual",),
)
def add_rms_norm_quant_qkv(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor | None,
    q_kind: str,
    k_kind: str,
    v_kind: str,
) -> Tensor:
    """residual ← residual + x and h = rms_norm(residual) · norm_weight, then h · [Q; K; V]ᵀ.

    h is that of :func:`fused_add_rms_norm`, rounded to x's dtype, and y that of
    :func:`gemv_quant_qkv`. By weights in planes they are two launches, where that has one.

    Args:
        residual: [m, K], updated in place; of x's dtype, or float32.
        x: [m, K].
        norm_weight: [K], any float dtype.
        eps: added to the mean square.
        q_blocks: uint8 [nq, row_bytes], packed rows.
        k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
        v_blocks: uint8 [nv, row_bytes], or None.
        q_kind, k_kind, v_kind: the formats; that of None is not read.

    Returns:
        [m, nq + nk + nv] in x's dtype.
    """
    h = fused_add_rms_norm.reference(residual, x, norm_weight, eps)
    return products_side_by_side(h, [(q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind)])


@add_rms_norm_quant_qkv.rule
def _(residual, x, norm_weight, eps, q_blocks, k_blocks, v_blocks, q_kind, k_kind, v_kind):
    parts = (("q_", q_blocks, q_kind), ("k_", k_blocks, k_kind), ("v_", v_blocks, v_kind))
    check_products(add_rms_norm_quant_qkv, x, parts, "x")
    check_residual(add_rms_norm_quant_qkv, residual, x)


@add_rms_norm_quant_qkv.sample
def _(make, q_kind, k_kind, v_kind, m, nq, nkv, num_blocks, wide_residual):
    sizes = ((q_kind, nq), (k_kind, nkv), (v_kind, nkv))
    q, key, v = (packed_units(make, kind, n, num_blocks) for kind, n in sizes)
    return _norm_sample(make, m, 256 * num_blocks, wide_residual) | {
        "q_blocks": q,
        "k_blocks": key,
        "v_blocks": v,
        "q_kind": q_kind,
        "k_kind": k_kind or "",
        "v_kind": v_kind or "",
    }
