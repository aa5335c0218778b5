"""Activations of eight bits, of a tensor or straight from its norm."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.planes import may_chain
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import quant_int8 as ops

NAN_BITS, LEAST = tl.constexpr(ops.NAN_BITS), tl.constexpr(ops.LEAST)
ALIGN = 16  # bytes of a load of codes


@triton.jit
def store_codes(
    codes_row, info_row, stride_info_group, x, group, mask, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Round x [BLOCK_G, 32], 0 where masked off, and store what :func:`quantize_q8` returns.

    Not to be compiled with fused multiply-adds, which would round a product less.
    """
    largest = tl.max(tl.abs(x), axis=1)
    finite = tl.sum(x * 0.0, axis=1) == 0.0
    counts = finite & (largest >= LEAST)
    known = tl.where(counts, largest, 127.0)
    inverse = tl.where(counts, tl.div_rn(127.0, known), 0.0)
    step = tl.where(counts, tl.div_rn(known, 127.0), 0.0).to(tl.int32, bitcast=True)
    step = tl.where(finite, step, NAN_BITS)
    # Adding 1.5 2^23 leaves the nearest integer in the low bits, of two as near the even one.
    q = (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) << 24 >> 24
    q = tl.where(counts[:, None], q, 0)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes_row + column, q.to(tl.int8), mask=mask[:, None])
    # The two halves' sums in one word: they are less than 2^15 in size.
    sums = tl.sum(tl.reshape(q, (BLOCK_G, 2, 16)), axis=2) & 0xFFFF
    halves = tl.sum(sums << (16 * tl.arange(0, 2))[None, :], axis=1)
    info = info_row + group.to(tl.int64) * stride_info_group
    tl.store(info, step, mask=mask)
    tl.store(info + 1, halves, mask=mask)


@kernel
def _quantize_q8_kernel(
    codes_ptr,  # int8 [m, k]
    info_ptr,  # int32 [m, groups, 2]
    a_ptr,  # [m, k]
    stride_codes_token,
    stride_info_token,
    stride_info_group,
    stride_a_token,
    num_groups,  # of 32 in a row
    BLOCK_G: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    mask = group < num_groups
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    a = tl.load(a_ptr + token * stride_a_token + column, mask=mask[:, None], other=0.0)
    store_codes(
        codes_ptr + token * stride_codes_token,
        info_ptr + token * stride_info_token,
        stride_info_group,
        a.to(tl.float32),
        group,
        mask,
        BLOCK_G,
    )


@kernel(dynamic=("eps",))
def _rms_norm_q8_kernel(
    codes_ptr,  # int8 [num_tokens, hidden_size]
    info_ptr,  # int32 [num_tokens, groups, 2]
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_codes_token,
    stride_info_token,
    stride_info_group,
    stride_x_token,
    hidden_size,
    eps,
    BLOCK_G: tl.constexpr,  # power of two >= hidden_size / 32
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    h = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = h < hidden_size
    x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
    y = x * tl.rsqrt(squares / hidden_size + eps) * weight
    store_codes(
        codes_ptr + token * stride_codes_token,
        info_ptr + token * stride_info_token,
        stride_info_group,
        y,
        group,
        group * 32 < hidden_size,
        BLOCK_G,
    )


@dataclass(frozen=True, eq=False)
class Int8Activations:
    """Activations of eight bits, with a step for each 32.

    Attributes:
        codes: int8 [m, K], rows at multiples of 16 bytes: an activation is its step times its code.
        info: int32 [m, K / 32, 2], as :func:`~ferrum_triton.ops.quant_int8.quantize_q8` has it.
        dtype: what they were, and what products are.
    """

    codes: Tensor
    info: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, codes: Tensor, info: Tensor, dtype: torch.dtype) -> "Int8Activations":
        """Those of ``quantize_q8``, copied where kernels' wide loads could not start."""
        if codes.stride(0) % ALIGN or codes.data_ptr() % ALIGN:
            codes = codes.clone(memory_format=torch.contiguous_format)
        if info.stride()[1:] != (2, 1) or info.stride(0) % 2 or info.data_ptr() % ALIGN:
            info = info.clone(memory_format=torch.contiguous_format)
        return cls(codes, info, dtype)


def quantize_activations(a: Tensor, *, chained: bool = False) -> Int8Activations:
    """Round activations [m, K] to int8: steps are the largest magnitude of each 32, over 127.

    Args:
        a: [m, K] in float32, float16 or bfloat16.
        chained: let the launch begin while the one before ends, and the next one likewise.
    """
    codes, info = _outputs(a, None)
    _launch_quantize(codes, info, a, chained)
    return Int8Activations(codes, info, a.dtype)


def _launch_quantize(codes: Tensor, info: Tensor, a: Tensor, chained: bool = False) -> None:
    if a.numel() == 0:
        return
    num_groups = a.shape[1] // 32
    block = min(next_power_of_2(num_groups), 8)
    chained = chained and may_chain(a)
    _quantize_q8_kernel.launch(
        (cdiv(num_groups, block), a.shape[0]),
        codes,
        info,
        a,
        codes.stride(0),
        info.stride(0),
        info.stride(1),
        a.stride(0),
        num_groups,
        BLOCK_G=block,
        CHAINED=chained,
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if chained else {}),
    )


def _outputs(a: Tensor, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if out is not None:
        return out
    codes = torch.empty(a.shape, dtype=torch.int8, device=a.device)
    info = torch.empty(a.shape[0], a.shape[1] // 32, 2, dtype=torch.int32, device=a.device)
    return codes, info


@ops.quantize_q8.impl("triton")
def quantize_q8(a: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    codes, info = _outputs(a, out)
    _launch_quantize(codes, info, a)
    return codes, info


@ops.rms_norm_q8.impl("triton")
def rms_norm_q8(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    codes, info = _outputs(x, out)
    if x.numel() == 0:
        return codes, info
    num_tokens, hidden_size = x.shape
    block = next_power_of_2(hidden_size // 32)
    _rms_norm_q8_kernel.launch(
        (num_tokens,),
        codes,
        info,
        x,
        weight,
        codes.stride(0),
        info.stride(0),
        info.stride(1),
        x.stride(0),
        hidden_size,
        float(eps),
        BLOCK_G=block,
        num_warps=min(max(block // 16, 1), 16),
        enable_fp_fusion=False,
    )
    return codes, info
