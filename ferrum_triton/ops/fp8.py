"""Products with weights in FP8 that have a scale for every block of 128 x 128.

The format is that of DeepSeek-V3's and Qwen3's own files. A weight is w[n, k] = code · scale, the
code a float8_e4m3fn and the scale that of its block. Activations become codes too, with a scale for
each token and 128 columns, so that tensor cores multiply codes by codes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ferrum_triton.contract import DTYPES
from ferrum_triton.quant.fp8 import BLOCK, LARGEST, num_blocks
from ferrum_triton.registry import Case, op

LEAST = 2.0**-100
"""The least maximum that a scale is made of: it and its quotients are normal numbers."""

DTYPES["fp8"] = (torch.float8_e4m3fn,)


def _row_cases() -> list[Case]:
    return [
        Case(f"bf16/k4096/m{m}", torch.bfloat16, {"m": m, "k": 4096}) for m in (1, 16, 64, 4096)
    ]


@op(
    tensors={"x": "T[m, k]"},
    axes={"m": (0, 1, 5, 20), "k": (1, 160, 33, 128, 700)},
    bench=_row_cases(),
)
def quantize_fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """code = x / scale rounded to the nearest even, scale = max |x| / 448, by groups of 128.

    Both divisions are those of float32, rounded once. A group whose max |x| is below 2^-100 has a
    scale of 1, by which its codes are zeros. One that holds NaN or an infinity has a scale of NaN
    and codes of zeros, so that every product with it is NaN.

    Args:
        x: [m, k]. The last group of a row may have fewer columns than 128.

    Returns:
        codes: float8_e4m3fn [m, k].
        scales: float32 [m, ceil(k / 128)].
    """
    m, k = x.shape
    groups = pad(x.float(), (0, -k % BLOCK)).view(m, num_blocks(k), BLOCK)
    largest = groups.abs().amax(dim=-1)
    # A tensor: torch divides by a number through its reciprocal, which rounds twice.
    limit = largest.new_full((), LARGEST)
    scales = torch.where(largest >= LEAST, largest / limit, 1.0)
    is_finite = largest.isfinite()
    codes = torch.where(is_finite[..., None], groups / scales[..., None], 0.0)
    codes = codes.flatten(1)[:, :k].to(torch.float8_e4m3fn)
    return codes, torch.where(is_finite, scales, torch.nan)


def _groups_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    codes = x.new_empty((m, k), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((m, num_blocks(k)), dtype=torch.float32)


quantize_fp8_groups.fake = _groups_fake


@quantize_fp8_groups.sample
def _(make, m, k):
    return {"x": make.randn(m, k)}


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
