"""The greatest logit as a shader: a threadgroup a row."""

import torch
from torch import Tensor

from ferrum_triton.backends.metal.shader import Shader, delivered, power_of_2_threads, result
from ferrum_triton.ops import sampling as ops

ARGMAX = Shader("sampling", "argmax_rows", "y logits mask", "vocab_size mask_size")


@ops.argmax_rows.impl("metal")
def argmax_rows(logits: Tensor, mask: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    rows, columns = logits.shape
    y = result(logits, (rows,), out, torch.int32)
    if rows:
        threads = power_of_2_threads(columns)
        logits = logits.contiguous()
        # Without a mask, or with an empty one, none is read.
        allowed = logits if mask is None or not mask.numel() else mask.contiguous()
        params = (columns, -1 if mask is None else mask.numel())
        buffers = (y, logits, allowed)
        ARGMAX.launch({"SCALAR": logits.dtype}, buffers, params, groups=rows, threads=threads)
    return delivered(y, out)
