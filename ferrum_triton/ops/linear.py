"""Dense products."""

import torch
from torch import Tensor

from ferrum_triton.ops.elementwise import GATES, check_gate, gated
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

MOST_TOKENS = 8
"""The most tokens of a kernel without tiles, and of :func:`gemm_gate_up_silu` in one launch."""


@op(
    tensors={"a": "T[m, k]", "b": "T[n, k]"},
    axes={"m": (0, 1, 5, 20), "n": (1, 7, 64), "k": (1, 33, 128), "wide": (False, True)},
    bench=[
        *(
            Case(f"bf16/n{n}k{k}/m{m}", torch.bfloat16, {"m": m, "n": n, "k": k})
            for n, k, tokens in (
                (4096, 4096, (1, 4, 8, 32, 64, 4096)),
                (6144, 4096, (1, 4, 8, 32, 64)),
                (4096, 12288, (1, 4, 8, 32, 64)),
                (24576, 4096, (1, 4, 8, 32, 64)),
                (5120, 25600, (32,)),
            )
            for m in tokens
        ),
        *(
            Case(
                f"bf16/wide/n151936k4096/m{m}",
                torch.bfloat16,
                {"m": m, "n": 151936, "k": 4096, "wide": True},
            )
            for m in (1, 8, 32)
        ),
        Case("f16/n4096k4096/m1", torch.float16, {"m": 1, "n": 4096, "k": 4096}),
    ],
    after_norm="a",
)
def gemm(a: Tensor, b: Tensor, wide: bool = False) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · b[n, k]: activations by a weight stored [out_features, in_features].

    Args:
        a: [m, k].
        b: [n, k], same dtype.
        wide: return the float32 sums unrounded, as logits want to be.

    Returns:
        [m, n] in the input's dtype, or float32 if wide.
    """
    y = widen(a) @ widen(b).T
    return y if wide else y.to(a.dtype)


@gemm.sample
def _(make, m, n, k, wide=False):
    return {"a": make.randn(m, k), "b": make.randn(n, k, scale=k**-0.5), "wide": wide}


@gemm.flops
def _(a, b, wide):
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]


@gemm.impl("blas")
def _gemm_blas(a: Tensor, b: Tensor, wide: bool = False, *, out: Tensor | None = None) -> Tensor:
    """cuBLAS or the CPU's BLAS: no hand-written kernel beats them by many tokens."""
    if wide and a.dtype != torch.float32:
        if not a.is_cuda:
            y = gemm.reference(a, b, wide)
            return y if out is None else out.copy_(y)
        # torch's mm takes out_dtype or out, not both.
        y = torch.mm(a, b.T, out_dtype=torch.float32)
        return y if out is None else out.copy_(y)
    if out is None:
        return torch.nn.functional.linear(a, b)
    return torch.mm(a, b.T, out=out)


@op(
    tensors={"a": "T[m, k]", "b": "T[n2, k]"},
    axes={"m": (0, 1, 5, 20), "n": (1, 7, 64), "k": (1, 33, 128), "activation": GATES},
    bench=[
        Case(f"bf16/n12288k4096/m{m}", torch.bfloat16, {"m": m, "n": 12288, "k": 4096})
        for m in (1, 4, 8)
    ],
    after_norm="a",
)
def gemm_gate_up_silu(a: Tensor, b: Tensor, activation: str = "silu") -> Tensor:
    """y = silu(a · Gᵀ) · (a · Uᵀ), b = [G; U]: both halves of an MLP's first product.

    In float32 until the one rounding at the end. Of up to MOST_TOKENS tokens it is one launch where
    a kernel is faster than cuBLAS, else a product and a launch that gates it.

    Args:
        a: [m, k].
        b: [2 n, k], G's rows and then U's; same dtype.
        activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

    Returns:
        [m, n] in a's dtype.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = (widen(a) @ widen(b).T).chunk(2, dim=-1)
    return gated(gate, up, activation).to(a.dtype)


@gemm_gate_up_silu.rule
def _(a, b, activation):
    check_gate(gemm_gate_up_silu, activation)
    if b.shape[0] % 2:
        gemm_gate_up_silu.reject("b", f"{b.shape[0]} rows", "as many of G as of U")


@gemm_gate_up_silu.sample
def _(make, m, n, k, activation="silu"):
    a, b = make.randn(m, k), make.randn(2 * n, k, scale=k**-0.5)
    return {"a": a, "b": b, "activation": activation}


@gemm_gate_up_silu.flops
def _(a, b, activation):
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]
