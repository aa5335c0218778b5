"""Products of activations' codes with weights in FP8."""

import torch
from torch import Tensor

from ferrum_triton.ops.fp8.codes import quantize_fp8_groups
from ferrum_triton.quant.fp8 import BLOCK, num_blocks
from ferrum_triton.registry import Case, op


def _product_cases(n: int, k: int, *tokens: int) -> list[Case]:
    return [Case(f"n{n}k{k}/m{m}", torch.bfloat16, {"m": m, "n": n, "k": k}) for m in tokens]


@op(
    tensors={
        "a": "T[m, k]",
        "weight": "fp8[n, k]",
        "scales": "float32[row_blocks, column_blocks]",
    },
    axes={"m": (0, 1, 5, 20), "n": (1, 130, 7, 64), "k": (1, 160, 33, 128, 300)},
    bench=[
        *_product_cases(28672, 4096, 1, 16, 64, 4096),
        *_product_cases(4096, 4096, 1, 64),
        # Tiles that tokens do not fill: a token more than whole ones.
        *_product_cases(28672, 4096, 2, 17, 65, 129),
        *_product_cases(4096, 14336, 17, 65, 129),
    ],
    dtypes=(torch.float16, torch.bfloat16),
    after_norm="a",
)
def gemm_fp8_128x128(a: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """y[m, n] = Σ_g s[m, g] · scales[n / 128, g] · Σ_{k in g} q[m, k] · weight[n, k].

    q and s are what :func:`quantize_fp8_groups` makes of a, and g runs over groups of 128 columns:
    sums of codes by codes within a group, and then over groups, in float32. Tensor cores of Hopper
    keep 14 bits of the former, for activations of 16 bits. One definition at any number of tokens.

    Args:
        a: [m, k].
        weight: float8_e4m3fn [n, k], stored [out_features, in_features].
        scales: float32 [ceil(n / 128), ceil(k / 128)], by which codes of a block are multiplied:
            ``weight_scale_inv`` of files.

    Returns:
        [m, n] in a's dtype, rounded once.
    """
    (m, k), n = a.shape, weight.shape[0]
    dtype = torch.promote_types(a.dtype, torch.float32)
    codes, steps = quantize_fp8_groups.reference(a)
    of_rows = scales.to(dtype).repeat_interleave(BLOCK, 0)[:n]
    y = torch.zeros(m, n, dtype=dtype, device=a.device)
    for group in range(num_blocks(k)):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        sums = codes[:, columns].to(dtype) @ weight[:, columns].to(dtype).T
        y += sums * (steps[:, group, None] * of_rows[:, group])
    return y.to(a.dtype)


gemm_fp8_128x128.fake = lambda a, weight, scales: a.new_empty(a.shape[0], weight.shape[0])


@gemm_fp8_128x128.rule
def _(a, weight, scales):
    want = [num_blocks(size) for size in weight.shape]
    if list(scales.shape) != want:
        got, allowed = f"of shape {list(scales.shape)}", f"{want}, one for each block of weight"
        gemm_fp8_128x128.reject("scales", got, allowed, "A block is 128 rows by 128 columns.")


@gemm_fp8_128x128.sample
def _(make, m, n, k):
    weight = make.randn(n, k).to(torch.float8_e4m3fn)
    scales = make.weight(num_blocks(n), num_blocks(k)) * k**-0.5
    return {"a": make.randn(m, k), "weight": weight, "scales": scales}


@gemm_fp8_128x128.flops
def _(a, weight, scales):
    return 2 * a.shape[0] * a.shape[1] * weight.shape[0]
