"""Dense products."""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op


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
                (24576, 4096, (1, 8, 32, 64)),
            )
            for m in tokens
        ),
        *(
            Case(
                f"bf16/wide/n151936k4096/m{m}",
                torch.bfloat16,
                {"m": m, "n": 151936, "k": 4096, "wide": True},
            )
            for m in (1, 8)
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
