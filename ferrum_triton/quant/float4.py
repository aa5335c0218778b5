"""Weights in codes of E2M1, of four bits, as checkpoints store them: NVFP4 and MXFP4.

A code is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and two neighbours share a byte,
the first in its lower half. What scales them becomes, bit by bit, that of the format of the same
name in :data:`~ferrum_triton.quant.FORMATS`.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS, dequantize_blocks
from ferrum_triton.quant.layout import Ratio
from ferrum_triton.quant.tensor import QuantizedTensor

# Weights that share a scale in E4M3, or a power of two in E8M0.
NVFP4_GROUP, MXFP4_GROUP = 16, 32
# The bytes that are no number, but for a sign in E4M3.
_E4M3_NAN, _E8M0_NAN = 0x7F, 0xFF


def load_nvfp4(
    codes: Tensor, scales: Tensor, *, factor: float = 1.0, divisor: float = 1.0
) -> QuantizedTensor | Tensor:
    """A matrix [n, k] of weights code · scale · factor / divisor, each rounded once to float32.

    Args:
        codes: uint8 [n, k / 2].
        scales: float8_e4m3fn [n, k / 16].
        factor: what modelopt multiplies the whole matrix by.
        divisor: what compressed-tensors divides the whole matrix by.

    Returns:
        In the format NVFP4, or decoded to float32 where k is no multiple of its 64 weights.

    Raises:
        InputError: shapes or dtypes do not fit, scales are NaN, or the factor or the divisor is not
            finite and above zero.
    """
    _check("load_nvfp4", codes, scales, torch.float8_e4m3fn, NVFP4_GROUP)
    for name, value in (("factor", factor), ("divisor", divisor)):
        if not 0.0 < value < float("inf"):
            _reject("load_nvfp4", name, str(value), "finite and above zero")
    stored = scales.contiguous().view(torch.uint8)
    _refuse_nan("load_nvfp4", (stored & 0x7F) == _E4M3_NAN)
    fmt, (n, half) = FORMATS["NVFP4"], codes.shape
    assert isinstance(fmt.d, Ratio) and fmt.scales
    k = 2 * half
    num_blocks = -(-k // fmt.block_size)
    blocks = codes.new_zeros(n, num_blocks, fmt.block_bytes)
    each = torch.tensor([factor, divisor], dtype=torch.float32, device=codes.device)
    blocks[..., fmt.d.at : fmt.d.at + 8] = each.view(torch.uint8)
    # Both lie in a block as they do in a row.
    for part, run in ((stored, fmt.scales.low[0]), (codes, fmt.q.low[0])):
        size = run.lanes * run.chunks
        whole = torch.nn.functional.pad(part, (0, num_blocks * size - part.shape[1]))
        blocks[..., run.at : run.at + size] = whole.unflatten(1, (num_blocks, size))
    if k == num_blocks * fmt.block_size:
        return QuantizedTensor(blocks.flatten(1), fmt.name)
    return dequantize_blocks(blocks.flatten(1), fmt)[:, :k].contiguous()


def load_mxfp4(codes: Tensor, scales: Tensor) -> QuantizedTensor:
    """A matrix [n, k] of weights code · 2^(scale - 127), in the format MXFP4.

    Args:
        codes: uint8 [n, k / 2].
        scales: uint8 [n, k / 32], powers of two in E8M0.

    Raises:
        InputError: shapes or dtypes do not fit, or scales are NaN.
    """
    _check("load_mxfp4", codes, scales, torch.uint8, MXFP4_GROUP)
    _refuse_nan("load_mxfp4", scales == _E8M0_NAN)
    each = codes.unflatten(1, (scales.shape[1], MXFP4_GROUP // 2))
    return QuantizedTensor(mxfp4_of_gguf(each[None], scales[None])[0], "MXFP4")


def mxfp4_of_gguf(codes: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as GGUF files lay it out, weight by weight what it was.

    Args:
        codes: uint8 [num_experts, n, blocks, 16], weights 2i and 2i + 1 of a block in a byte, the
            first of them in its lower half.
        scales: uint8 [num_experts, n, blocks], their exponents.

    Returns:
        uint8 [num_experts, n, 17 · blocks]. In a block the exponent comes first, and weights i and
        i + 16 share a byte.
    """
    fmt = FORMATS["MXFP4"]
    blocks = torch.zeros(*scales.shape, fmt.block_bytes, dtype=torch.uint8, device=codes.device)
    blocks[..., fmt.d.at] = scales
    for block, code in zip(blocks, codes, strict=True):  # one expert at a time takes little memory
        fmt.q.write_codes(block, torch.stack([code & 15, code >> 4], dim=-1).flatten(-2))
    return blocks.flatten(-2)


def _check(op: str, codes: Tensor, scales: Tensor, dtype: torch.dtype, group: int) -> None:
    """Raise unless codes are a matrix, in whole groups, that has one scale of ``dtype`` each."""
    if codes.dtype != torch.uint8 or codes.dim() != 2 or 2 * codes.shape[1] % group:
        _reject(op, "codes", _told(codes), f"uint8 [n, k / 2], k a multiple of {group}")
    want = [codes.shape[0], 2 * codes.shape[1] // group]
    if scales.dtype != dtype or list(scales.shape) != want:
        allowed = f"{str(dtype).removeprefix('torch.')} {want}, one for each {group} codes"
        _reject(op, "scales", _told(scales), allowed)


def _refuse_nan(op: str, is_nan: Tensor) -> None:
    if count := int(is_nan.sum()):
        _reject(op, "scales", f"{count} times NaN", "numbers")


def _told(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _reject(op: str, argument: str, got: str, allowed: str) -> NoReturn:
    raise InputError(op, argument, got, allowed, "Pass them as the checkpoint has them.")
