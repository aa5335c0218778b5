"""Choosing tokens from logits."""

import torch
from torch import Tensor

from ferrum_triton.registry import Case, op


@op(
    tensors={"logits": "T[num_rows, vocab_size]"},
    axes={"num_rows": (0, 1, 3), "vocab_size": (1, 2, 100, 5000)},
    bench=[
        Case(f"fp16/v152064/m{m}", torch.float16, {"num_rows": m, "vocab_size": 152064})
        for m in (1, 32, 256)
    ],
)
def argmax_rows(logits: Tensor) -> Tensor:
    """y[i] = the lowest j with logits[i, j] = max over the row, NaN never chosen.

    A row of nothing but NaN and -inf gives 0.

    Args:
        logits: [num_rows, vocab_size], rows may be strided.

    Returns:
        [num_rows] int32.
    """
    clean = torch.where(logits.isnan(), -torch.inf, logits)
    top = clean.amax(dim=-1, keepdim=True)
    return (clean == top).to(torch.int8).argmax(dim=-1).to(torch.int32)


@argmax_rows.rule
def _(logits):
    if logits.shape[1] == 0:
        argmax_rows.reject("logits", "of no columns", "at least one column")


@argmax_rows.sample
def _(make, num_rows, vocab_size):
    return {"logits": make.randn(num_rows, vocab_size)}
