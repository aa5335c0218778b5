"""Products with weights in FP8: a launch that makes activations codes, and one of tiles.

Of few tokens, rows of weights are the tall operand of the tensor cores and tokens the narrow one,
which needs little padding. Of many, tokens are the tall one: a thread then has sums of few tokens,
and so few scales. A step of the loop is a block of weights wide: its sums have one scale of weights
and one for each token, by which they are multiplied as they are added to those before.

From sm_89 on tensor cores multiply codes as they are. Elsewhere, and for activations in float32,
both become float16, which holds every code. K is split among programs where there are fewer tiles
than SMs: the parts, in float32, are added by the launch behind.
"""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.mla_tiles import widen_e4m3
from ferrum_triton.kernels.fp8.codes import BLOCK, multiplies_codes, operands_of, quantised
from ferrum_triton.kernels.fp8.config import TILES, whole_waves
from ferrum_triton.kernels.fp8.gemv import LINE, gemv
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import can_overlap, kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops.fp8 import product as ops
from ferrum_triton.quant import fp8


@triton.jit
def _operand(codes, NATIVE: tl.constexpr):
    """Codes as tensor cores take them."""
    if NATIVE:
        x = codes
    else:
        x = widen_e4m3(codes).to(tl.float16)
    return x


@triton.jit
def load_group(at, column, num_cols, known, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Codes of a group, whose columns lie along AXIS; 0 past the last, and where not ``known``."""
    if MASKED:
        inside = tl.expand_dims(column + tl.arange(0, BLOCK) < num_cols, 1 - AXIS)
        if known is not None:
            inside &= tl.expand_dims(known, AXIS)
        codes = tl.load(at + column, mask=inside, other=0.0)
    elif known is not None:
        codes = tl.load(at + column, mask=tl.expand_dims(known, AXIS), other=0.0)
    else:
        codes = tl.load(at + column)
    return codes


@triton.jit
def group_sums(w, a, TOKENS_TALL: tl.constexpr, NATIVE: tl.constexpr):
    """Products of a group's codes.

    Args:
        w: codes [rows, BLOCK], of weights.
        a: codes [BLOCK, tokens].

    Returns:
        float32 [rows, tokens]; with TOKENS_TALL [tokens, rows].
    """
    w, a = _operand(w, NATIVE), _operand(a, NATIVE)
    if TOKENS_TALL:
        sums = tl.dot(tl.trans(a), tl.trans(w), out_dtype=tl.float32)
    else:
        sums = tl.dot(w, a, out_dtype=tl.float32)
    return sums


@triton.jit
def of_tokens(factor, TOKENS_TALL: tl.constexpr):
    """A number of each token, as the sums of a tile lie."""
    if TOKENS_TALL:
        placed = factor[:, None]
    else:
        placed = factor[None, :]
    return placed


@triton.jit
def of_rows(factor, TOKENS_TALL: tl.constexpr):
    """A number of each row, as the sums of a tile lie."""
    if TOKENS_TALL:
        placed = factor[None, :]
    else:
        placed = factor[:, None]
    return placed


@kernel(dynamic=("num_tokens",))
def _fp8_tiles_kernel(
    y_ptr,  # [m, n], or float32 [splits, m, n]
    codes_ptr,  # [m, k], as operands_of has them
    steps_ptr,  # float32 [groups, m], scales of codes
    weight_ptr,  # [n, k], alike
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
    # Past the end the last row is read again, and no token.
    row = tl.minimum(n, num_rows - 1)
    known = token < num_tokens
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
    a_at = codes_ptr + token[None, :] * stride_codes_token + k[:, None]
    scale_at = scales_ptr + first_row // BLOCK * stride_scales_row
    step_at = steps_ptr + tl.minimum(token, num_tokens - 1)
    if TOKENS_TALL:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    factor = tl.load(scale_at + begin) * tl.load(step_at + begin.to(tl.int64) * num_tokens)
    for group in range(begin, end):
        column = group * BLOCK
        w = load_group(w_at, column, num_cols, None, MASKED, 1)
        a = load_group(a_at, column, num_cols, known, MASKED, 0)
        # Asked for a step ahead, so that no product waits for its scales.
        later = tl.minimum(group + 1, groups - 1)
        factor_later = tl.load(scale_at + later)
        factor_later *= tl.load(step_at + later.to(tl.int64) * num_tokens)
        acc += group_sums(w, a, TOKENS_TALL, NATIVE) * of_tokens(factor, TOKENS_TALL)
        factor = factor_later
    y_at = y_ptr + split.to(tl.int64) * stride_y_split
    token, n = of_tokens(token, TOKENS_TALL), of_rows(n, TOKENS_TALL)
    mask = (token < num_tokens) & (n < num_rows)
    tl.store(y_at + token * stride_y_token + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


def _by_hopper(y: Tensor, a: Tensor, weight: Tensor, scales: Tensor, config: Config) -> bool:
    """y ← the product by the kernel in Gluon, where TMA can take its tensors; whether it can."""
    from ferrum_triton.kernels.hopper import gemm_fp8

    if not gemm_fp8.takes(y, weight):
        return False
    codes, steps = quantised(a, gemm_fp8.STEPS_APART, 2 * gemm_fp8.TOKENS.value)
    codes, of_weight = operands_of(True, codes, weight)
    gemm_fp8.gemm_fp8(y, codes, steps, of_weight, scales, config)
    return True


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
    shape = (native, num_tokens, num_rows, num_cols)
    config = TILES.pick(a.device, *shape)
    if config["path"] == "hopper":
        gpu = gpu_of(a.device)
        first = whole_waves(gpu, num_tokens, num_rows, num_cols)
        if first:
            gemm_fp8_128x128(a[:first], weight, scales, out=y[:first])
            gemm_fp8_128x128(a[first:], weight, scales, out=y[first:])
            return y
        if _by_hopper(y, a, weight, scales, config):
            return y
        config = TILES.heuristic(gpu, *shape)
    if config["path"] == "gemv":
        gemv(y, a, (weight, scales), config)
        return y
    codes, steps = quantised(a)
    codes, of_weight = operands_of(native, codes, weight)
    part = cdiv(groups, config["SPLITS"])
    splits, to = cdiv(groups, part), y
    if splits > 1:
        to = steps.new_empty((splits, num_tokens, num_rows))
    _fp8_tiles_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_M"]) * cdiv(num_rows, config["BLOCK_N"]), splits),
        y_ptr=to,
        codes_ptr=codes,
        steps_ptr=steps,
        weight_ptr=of_weight,
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
