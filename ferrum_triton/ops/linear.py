"""Dense products."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


@op(
    tensors={"a": "T[m, k]", "b": "T[n, k]"},
    axes={"m": (0, 1, 5), "n": (1, 7, 64), "k": (1, 33, 128)},
    bench=[
        Case(f"bf16/n4096k4096/m{m}", torch.bfloat16, {"m": m, "n": 4096, "k": 4096})
        for m in (1, 4096)
    ],
)
def gemm(a: Tensor, b: Tensor) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · b[n, k]: activations by a weight stored [out_features, in_features].

    Args:
        a: [m, k].
        b: [n, k], same dtype.

    Returns:
        [m, n] in the input's dtype.
    """
    return (widen(a) @ widen(b).T).to(a.dtype)


@gemm.sample
def _(make, m, n, k):
    return {"a": make.randn(m, k), "b": make.randn(n, k, scale=k**-0.5)}


@gemm.flops
def _(a, b):
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]


@gemm.impl("blas")
def _gemm_blas(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """cuBLAS or the CPU's BLAS: no hand-written kernel beats them on dense products."""
    if out is None:
        return torch.nn.functional.linear(a, b)
    return torch.mm(a, b.T, out=out)
