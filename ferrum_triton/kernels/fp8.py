"""Products with weights in FP8: a launch that makes activations codes, and one of tiles.

Of few tokens, rows of weights are the tall operand of the tensor cores and tokens the narrow one,
which needs little padding. Of many, tokens are the tall one: a thread then has sums of few tokens,
and so few scales. A step of the loop is a block of weights wide: its sums have one scale of weights
and one for each token, by which they are multiplied as they are added to those before.

From sm_89 on tensor cores multiply codes as they are. Elsewhere, and for activations in float32,
both become float16, which holds every code. K is split among programs where there are fewer tiles
than SMs: the parts, in float32, are added by the launch behind.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.mla_tiles import widen_e4m3
from ferrum_triton.kernels.fp8_config import QUANTISING, TILES
from ferrum_triton.kernels.jit import can_overlap, capability, kernel
from ferrum_triton.kernels.kv_pool import e4m3_bits, magnitude_bits
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import fp8 as ops
from ferrum_triton.quant import fp8

BLOCK = tl.constexpr(fp8.BLOCK)
LARGEST = tl.constexpr(fp8.LARGEST)
LEAST = tl.constexpr(ops.LEAST)
# The bits of infinity, above which are those of NaN.
INFINITY = tl.constexpr(0x7F800000)
# Codes of what L2 is asked for at a time.
LINE = tl.constexpr(128)


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
    bits = tl.max(magnitude_bits(x), axis=1)
    is_finite = bits < INFINITY
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full([GROUPS], LARGEST, tl.float32))
    scale = tl.where(largest >= LEAST, scale, 1.0)
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], [GROUPS, BLOCK]))
    codes = e4m3_bits(tl.where(is_finite[:, None], y, 0.0))
    tl.store(codes_ptr + row * stride_codes_row + col, codes, mask=mask)
    scale = tl.where(is_finite, scale, float("nan"))
    scale_at = scales_ptr + row * stride_scales_row + group.to(tl.int64) * stride_scales_group
    tl.store(scale_at, scale, mask=group * BLOCK < num_cols)


@triton.jit
def _operand(codes, NATIVE: tl.constexpr):
    """Codes as tensor cores take them."""
    if NATIVE:
        x = codes.to(tl.float8e4nv, bitcast=True)
    else:
        x = widen_e4m3(codes).to(tl.float16)
    return x


@triton.jit
def scaled_sums(w, a, factor, TOKENS_TALL: tl.constexpr, NATIVE: tl.constexpr):
    """Products of a group's codes by their scales.

    Args:
        w: bytes [rows, BLOCK], of weights.
        a: bytes [BLOCK, tokens].
        factor: float32 [tokens], what the sums of each are multiplied by.

    Returns:
        float32 [rows, tokens]; with TOKENS_TALL [tokens, rows].
    """
    w, a = _operand(w, NATIVE), _operand(a, NATIVE)
    if TOKENS_TALL:
        sums = tl.dot(tl.trans(a), tl.trans(w), out_dtype=tl.float32) * factor[:, None]
    else:
        sums = tl.dot(w, a, out_dtype=tl.float32) * factor[None, :]
    return sums


@triton.jit
def placed(token, row, TOKENS_TALL: tl.constexpr):
    """What there is of each token, and of each row, as the sums of a tile lie."""
    if TOKENS_TALL:
        both = token[:, None], row[None, :]
    else:
        both = token[None, :], row[:, None]
    return both


@kernel(dynamic=("num_rows", "num_tokens"))
def _fp8_tiles_kernel(
    y_ptr,  # [m, n], or float32 [splits, m, n]
    codes_ptr,  # uint8 [m, k]
    steps_ptr,  # float32 [groups, m], scales of codes
    weight_ptr,  # uint8 [n, k]
    scales_ptr,  # float32 [row_blocks, groups], scales of weights
    stride_y_split,
    stride_y_token,
    stride_codes_token,
    stride_weight_row,
    stride_scales_row,
    num_cols,
    part_groups,  # groups of a split
    num_rows,
    num_tokens,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at most a block of weights
    GROUP_M: tl.constexpr,  # tiles of tokens side by side
    TOKENS_TALL: tl.constexpr,  # whether tokens are the tall operand
    LINES: tl.constexpr,
    MASKED: tl.constexpr,  # whether the last group has columns past the end
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[s] = Σ_g step[g] · scale[g] · (codes · weightᵀ)[g] over the groups g of split s."""
    tiles_n = tl.cdiv(num_rows, BLOCK_N)
    first = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    tile = tl.program_id(0) % (GROUP_M * tiles_n)
    beside = tl.minimum(tl.cdiv(num_tokens, BLOCK_M) - first, GROUP_M)
    split = tl.program_id(1)
    token = (first + tile % beside).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = (tile // beside).to(tl.int64) * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    # Rows and tokens past the last are its again: neither is stored.
    row = tl.minimum(n, num_rows - 1)
    known = tl.minimum(token, num_tokens - 1)
    groups = tl.cdiv(num_cols, BLOCK)
    begin = split * part_groups
    end = tl.minimum(begin + part_groups, groups)
    if LINES > 0:
        ahead = tl.minimum(begin * BLOCK + tl.arange(0, LINES) * LINE, num_cols - 1)
        prefetch_l2(weight_ptr + row[:, None] * stride_weight_row + ahead[None, :])
    pdl_wait(PDL)
    pdl_trigger(PDL)

    k = tl.arange(0, BLOCK)
    w_at = weight_ptr + row[:, None] * stride_weight_row + k[None, :]
    a_at = codes_ptr + known[None, :] * stride_codes_token + k[:, None]
    scale_at = scales_ptr + first_row // BLOCK * stride_scales_row
    step_at = steps_ptr + known
    if TOKENS_TALL:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    factor = tl.load(scale_at + begin) * tl.load(step_at + begin.to(tl.int64) * num_tokens)
    for group in range(begin, end):
        column = group * BLOCK
        if MASKED:
            inside = column + k < num_cols
            w = tl.load(w_at + column, mask=inside[None, :], other=0)
            a = tl.load(a_at + column, mask=inside[:, None], other=0)
        else:
            w = tl.load(w_at + column)
            a = tl.load(a_at + column)
        # Asked for a step ahead, so that no product waits for its scales.
        later = tl.minimum(group + 1, groups - 1)
        factor_later = tl.load(scale_at + later)
        factor_later *= tl.load(step_at + later.to(tl.int64) * num_tokens)
        acc += scaled_sums(w, a, factor, TOKENS_TALL, NATIVE)
        factor = factor_later
    y_at = y_ptr + split.to(tl.int64) * stride_y_split
    token, n = placed(token, n, TOKENS_TALL)
    mask = (token < num_tokens) & (n < num_rows)
    tl.store(y_at + token * stride_y_token + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


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
        **config,
    )


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [rows, k], and scales, float32 [groups, rows], of x, which is not empty.

    Args:
        x: [rows, k], or [num_tokens, top_k, k] of as many rows.
    """
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    codes = x.new_empty((num_rows, num_cols), dtype=torch.uint8)
    steps = x.new_empty((fp8.num_blocks(num_cols), num_rows), dtype=torch.float32)
    _quantise(x, codes, steps, 1, num_rows)
    return codes, steps


def multiplies_codes(a: Tensor) -> bool:
    """Whether tensor cores multiply codes as they are, for activations of a's dtype."""
    return capability(a.device) >= (8, 9) and a.dtype != torch.float32


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


@ops.gemm_fp8_128x128.impl("triton")
def gemm_fp8_128x128(
    a: Tensor, weight: Tensor, scales: Tensor, *, out: Tensor | None = None
) -> Tensor:
    (num_tokens, num_cols), num_rows = a.shape, weight.shape[0]
    y = a.new_empty((num_tokens, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    if num_cols == 0:
        return y.zero_()
    groups = fp8.num_blocks(num_cols)
    native = multiplies_codes(a)
    config = TILES.pick(a.device, native, num_tokens, num_rows, num_cols)
    codes, steps = quantised(a)
    part = cdiv(groups, config["SPLITS"])
    splits, to = cdiv(groups, part), y
    if splits > 1:
        to = a.new_empty((splits, num_tokens, num_rows), dtype=torch.float32)
    _fp8_tiles_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_M"]) * cdiv(num_rows, config["BLOCK_N"]), splits),
        y_ptr=to,
        codes_ptr=codes,
        steps_ptr=steps,
        weight_ptr=weight.view(torch.uint8),
        scales_ptr=scales,
        stride_y_split=to.stride(0) if splits > 1 else 0,
        stride_y_token=to.stride(-2),
        stride_codes_token=codes.stride(0),
        stride_weight_row=weight.stride(0),
        stride_scales_row=scales.stride(0),
        num_cols=num_cols,
        part_groups=part,
        num_rows=num_rows,
        num_tokens=num_tokens,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
        GROUP_M=config["GROUP_M"],
        TOKENS_TALL=config["TOKENS_TALL"],
        LINES=config["LINES"] if can_overlap(a.device) else 0,
        MASKED=num_cols % fp8.BLOCK != 0,
        NATIVE=native,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    if splits > 1:
        add_partials(y, to)
    return y
