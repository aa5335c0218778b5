"""Activations as codes of float8_e4m3fn: the launch that makes them, and what products share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.fp8.config import QUANTISING
from ferrum_triton.kernels.jit import capability, kernel
from ferrum_triton.kernels.kv_pool import e4m3_bits, magnitude_bits
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops.fp8 import codes as ops
from ferrum_triton.quant import fp8

BLOCK = tl.constexpr(fp8.BLOCK)
LARGEST = tl.constexpr(fp8.LARGEST)
LEAST = tl.constexpr(ops.LEAST)
# The bits of infinity, above which are those of NaN.
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _quotients(x, by):
    """x [groups, BLOCK] / by [groups], rounded once, of quotients that are normal numbers.

    A group's reciprocal is found once. Each product with it is corrected by its remainder, which a
    multiply-add gives exactly: once may leave the last bit wrong, twice does not. Divisions, and
    codes rounded in integers, took 624 instructions for a thread's 16 numbers instead of 432
    (``compile_launch`` of quantize_fp8_groups/bf16/k4096/m4096 for sm_90), and 20.1 us instead of
    15.5 (``bench.run quantize_fp8_groups``, before and at 1452acc, which had no line for the sign).
    """
    inverse = tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)
    by = tl.broadcast_to(by[:, None], x.shape)
    inverse = tl.broadcast_to(inverse[:, None], x.shape)
    y = x * inverse
    y = tl.fma(tl.fma(-y, by, x), inverse, y)
    y = tl.fma(tl.fma(-y, by, x), inverse, y)
    # The sign is x's: a remainder of 0 would make -0 0.
    sign = x.to(tl.int32, bitcast=True) & -(1 << 31)
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def scaled_groups(x):
    """float32 [groups, BLOCK] by their scales, what codes are rounded from; and the scales."""
    bits = tl.max(magnitude_bits(x), axis=1)
    is_finite = bits < INFINITY
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(largest >= LEAST, scale, 1.0)
    y = tl.where(is_finite[:, None], _quotients(x, scale), 0.0)
    return y, tl.where(is_finite, scale, float("nan"))


@kernel(dynamic=("stride_scales_row", "stride_scales_group"))
def _quantise_kernel(
    codes_ptr,  # uint8 [m, k]
    scales_ptr,  # float32 [m, groups], of any strides
    x_ptr,  # [m, k], or [m / SLOTS, SLOTS, k]
    stride_codes_row,
    stride_x_token,
    stride_x_slot,
    num_cols,
    stride_scales_row,
    stride_scales_group,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the GPU rounds to codes
    PDL: tl.constexpr,
):
    """Codes and scales of some groups of a row."""
    pdl_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row // SLOTS * stride_x_token + row % SLOTS * stride_x_slot
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = col < num_cols
    pdl_wait(PDL)
    x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
    y, scale = scaled_groups(x)
    if NATIVE:
        codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = e4m3_bits(y)
    tl.store(codes_ptr + row * stride_codes_row + col, codes, mask=mask)
    scale_at = scales_ptr + row * stride_scales_row + group.to(tl.int64) * stride_scales_group
    tl.store(scale_at, scale, mask=group * BLOCK < num_cols)


def _quantise(x: Tensor, codes: Tensor, scales: Tensor, stride_row: int, stride_group: int) -> None:
    """codes, uint8 [rows, k], and scales ← the groups of x, which is not empty."""
    num_rows, num_cols = codes.shape
    config = QUANTISING.pick(x.device, num_rows, num_cols)
    _quantise_kernel.launch(
        (num_rows, cdiv(fp8.num_blocks(num_cols), config["GROUPS"])),
        codes_ptr=codes,
        scales_ptr=scales,
        x_ptr=x,
        stride_codes_row=codes.stride(0),
        stride_x_token=x.stride(0),
        stride_x_slot=x.stride(1) if x.dim() == 3 else 0,
        num_cols=num_cols,
        stride_scales_row=stride_row,
        stride_scales_group=stride_group,
        SLOTS=x.shape[1] if x.dim() == 3 else 1,
        NATIVE=capability(x.device) >= (8, 9),
        **config,
    )


def quantised(x: Tensor, multiple: int = 1, tile: int = 1) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [rows, k], and scales, float32 [groups, rows], of x, which is not empty.

    Args:
        x: [rows, k], or [num_tokens, top_k, k] of as many rows.
        multiple: the scales' stride from group to group is rounded up to a multiple of it.
        tile: the codes' rows are rounded up to a multiple of it, by rows that are not written.
    """
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    codes = x.new_empty((cdiv(num_rows, tile) * tile, num_cols), dtype=torch.uint8)
    apart = cdiv(num_rows, multiple) * multiple
    steps = x.new_empty((fp8.num_blocks(num_cols), apart), dtype=torch.float32)
    _quantise(x, codes[:num_rows], steps, 1, apart)
    return codes, steps[:, :num_rows]


def multiplies_codes(a: Tensor) -> bool:
    """Whether tensor cores multiply codes as they are, for activations of a's dtype."""
    return capability(a.device) >= (8, 9) and a.dtype != torch.float32


def operands_of(is_native: bool, *codes: Tensor) -> list[Tensor]:
    """Codes as kernels take them: as such where tensor cores multiply them, and bytes elsewhere.

    Bytes that a kernel only calls codes would go through registers: Triton loads them from shared
    memory, and stores the second operand there again. 28672 x 4096 by 4,096 tokens took an H200
    1,841 us so, and 1,058 as codes: ``python -m bench.run gemm_fp8_128x128``, 1e70577 and ed65b21.
    """
    dtype = torch.float8_e4m3fn if is_native else torch.uint8
    return [each.view(dtype) for each in codes]


@ops.quantize_fp8_groups.impl("triton")
def quantize_fp8_groups(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scales = x.new_empty((x.shape[0], fp8.num_blocks(x.shape[1])), dtype=torch.float32)
    else:
        codes, scales = out
    if x.numel():
        _quantise(x, codes.view(torch.uint8), scales, *scales.stride())
    return codes, scales
