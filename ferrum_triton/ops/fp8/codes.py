"""Activations as codes of float8_e4m3fn, with a scale for each row and 128 columns."""

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
