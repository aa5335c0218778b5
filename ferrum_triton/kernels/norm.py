"""Normalisation: a program holds one row, or a tile of short ones, in registers, or reads it twice.

Reading twice is for tensors that no cache holds. The second read comes from the caches, while the
registers it frees let more rows be on their way; where the tensor fits, it only takes longer.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import as_rows, cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import norm as ops

# Columns beyond which a row of softmax is read twice rather than kept: 32 values a thread.
MAX_SOFTMAX_TILE = 16384
LONG_BLOCK, LONG_WARPS = 4096, 8
# Elements from which a tensor's rows are read twice, and the columns of one step.
LARGE, TWICE_BLOCK = 1 << 26, 2048


@triton.jit
def tile_of_rows(num_tokens, hidden_size, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """This program's rows [BLOCK_T, 1], the columns [1, BLOCK_H], and the mask of both.

    A single row is a number and a vector, which compiles to less than a tile of one row.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    if BLOCK_T > 1:
        token = (token * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        h = h[None, :]
        mask = (token < num_tokens) & (h < hidden_size)
    return token, h, mask


@triton.jit
def sum_of_rows(x):
    """Sums over the columns of a vector, or of a tile: [BLOCK_T, 1]."""
    if len(x.shape) == 1:
        total = tl.sum(x, axis=0)
    else:
        total = tl.sum(x, axis=1)[:, None]
    return total


@triton.jit
def max_of_rows(x):
    """Maxima over the columns, as :func:`sum_of_rows`."""
    if len(x.shape) == 1:
        largest = tl.max(x, axis=0)
    else:
        largest = tl.max(x, axis=1)[:, None]
    return largest


@triton.jit
def load_weight(weight_ptr, h, hidden_size):
    """Weights of the columns h. Every row needs them: rows streaming by must not push them out."""
    return tl.load(weight_ptr + h, mask=h < hidden_size, other=0.0, eviction_policy="evict_last")


@triton.jit
def inverse_rms(squares, hidden_size, eps):
    """1 / sqrt(mean(x²) + eps), of the squares of rows that are 0 past their end."""
    return tl.rsqrt(sum_of_rows(squares) / hidden_size + eps)


@kernel(dynamic=("num_tokens", "eps"))
def _rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_token,
    stride_x_token,
    hidden_size,
    num_tokens,
    eps,
    READS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # 1 if rows are read twice
    BLOCK_H: tl.constexpr,  # power of two, >= hidden_size if rows are read once
):
    if READS == 1:
        token, h, mask = tile_of_rows(num_tokens, hidden_size, BLOCK_T, BLOCK_H)
        x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
        weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)
        y = x * inverse_rms(x * x, hidden_size, eps) * weight
        tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        token = tl.program_id(0).to(tl.int64)
        x_row, y_row = x_ptr + token * stride_x_token, y_ptr + token * stride_y_token
        squares = tl.zeros([BLOCK_H], tl.float32)
        for first in range(0, hidden_size, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            x = tl.load(x_row + h, mask=h < hidden_size, other=0.0, eviction_policy="evict_last")
            squares += x.to(tl.float32) * x.to(tl.float32)
        rstd = inverse_rms(squares, hidden_size, eps)
        for first in range(0, hidden_size, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            mask = h < hidden_size
            x = tl.load(x_row + h, mask=mask, eviction_policy="evict_first").to(tl.float32)
            y = x * rstd * load_weight(weight_ptr, h, hidden_size).to(tl.float32)
            tl.store(y_row + h, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def residual_sum(residual_row, x_row, h, mask, EVICT: tl.constexpr):
    """residual + x as it is stored, in the residual's dtype."""
    residual = tl.load(residual_row + h, mask=mask, other=0.0, eviction_policy=EVICT)
    x = tl.load(x_row + h, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return (residual.to(tl.float32) + x).to(residual_row.dtype.element_ty)


@kernel(dynamic=("num_tokens", "eps"))
def _fused_add_rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    residual_ptr,  # [num_tokens, hidden_size], updated
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_token,
    stride_residual_token,
    stride_x_token,
    hidden_size,
    num_tokens,
    eps,
    READS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # 1 if rows are read twice
    BLOCK_H: tl.constexpr,  # power of two, >= hidden_size if rows are read once
):
    if READS == 1:
        token, h, mask = tile_of_rows(num_tokens, hidden_size, BLOCK_T, BLOCK_H)
        residual_rows = residual_ptr + token * stride_residual_token
        stored = residual_sum(residual_rows, x_ptr + token * stride_x_token, h, mask, "")
        total = stored.to(tl.float32)
        weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)
        y = total * inverse_rms(total * total, hidden_size, eps) * weight
        tl.store(residual_rows + h, stored, mask=mask)
        tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        token = tl.program_id(0).to(tl.int64)
        x_row, y_row = x_ptr + token * stride_x_token, y_ptr + token * stride_y_token
        residual_row = residual_ptr + token * stride_residual_token
        squares = tl.zeros([BLOCK_H], tl.float32)
        for first in range(0, hidden_size, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            total = residual_sum(residual_row, x_row, h, h < hidden_size, "evict_last")
            squares += total.to(tl.float32) * total.to(tl.float32)
        rstd = inverse_rms(squares, hidden_size, eps)
        for first in range(0, hidden_size, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            mask = h < hidden_size
            stored = residual_sum(residual_row, x_row, h, mask, "evict_first")
            weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)
            y = stored.to(tl.float32) * rstd * weight
            tl.store(y_row + h, y.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(residual_row + h, stored, mask=mask)


@kernel(dynamic=("num_tokens", "eps"))
def _layer_norm_kernel(
    y_ptr,  # [num_tokens, hidden_size]
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [hidden_size]
    bias_ptr,  # [hidden_size] or None
    stride_y_token,
    stride_x_token,
    hidden_size,
    num_tokens,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
):
    token, h, mask = tile_of_rows(num_tokens, hidden_size, BLOCK_T, BLOCK_H)

    x = tl.load(x_ptr + token * stride_x_token + h, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, h, hidden_size)
    if bias_ptr is not None:
        bias = load_weight(bias_ptr, h, hidden_size)

    # The row is in registers, so centring it first costs nothing and cannot cancel, as the
    # difference of the mean square and the squared mean does.
    centred = tl.where(h < hidden_size, x - sum_of_rows(x) / hidden_size, 0.0)
    y = centred * inverse_rms(centred * centred, hidden_size, eps) * weight.to(tl.float32)
    if bias_ptr is not None:
        y += bias.to(tl.float32)

    tl.store(y_ptr + token * stride_y_token + h, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("num_rows", "eps"))
def _gated_rms_norm_kernel(
    y_ptr,  # [num_rows, head_dim]
    core_ptr,  # [num_rows, head_dim]
    z_ptr,  # [num_rows, head_dim]
    weight_ptr,  # [head_dim]
    stride_y_row,
    stride_core_row,
    stride_z_row,
    head_dim,
    num_rows,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= head_dim
):
    row, d, mask = tile_of_rows(num_rows, head_dim, BLOCK_T, BLOCK_H)

    core = tl.load(core_ptr + row * stride_core_row + d, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * stride_z_row + d, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, d, head_dim).to(tl.float32)

    y = core * inverse_rms(core * core, head_dim, eps) * weight * (z * tl.sigmoid(z))

    tl.store(y_ptr + row * stride_y_row + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("num_rows",))
def _softmax_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    num_cols,
    num_rows,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= num_cols
):
    row, col, mask = tile_of_rows(num_rows, num_cols, BLOCK_T, BLOCK_H)

    x = tl.load(x_ptr + row * stride_x_row + col, mask=mask, other=float("-inf")).to(tl.float32)

    weights = tl.exp(x - max_of_rows(x))
    y = weights / sum_of_rows(weights)

    tl.store(y_ptr + row * stride_y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finite_shift(top):
    """What to subtract before exponentiating: 0 where nothing but -inf was seen yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@kernel
def _softmax_long_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    num_cols,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_x_row, y_ptr + row * stride_y_row

    # Each lane keeps its own maximum and sum, so that the loop needs no exchange between lanes.
    tops = tl.full([BLOCK_C], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, num_cols, BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        x = tl.load(x_row + col, mask=col < num_cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tops, x)
        shift = finite_shift(higher)
        sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
        tops = higher
    shift = finite_shift(tl.max(tops, axis=0))
    total = tl.sum(sums * tl.exp(tops - shift), axis=0)

    for first in range(0, num_cols, BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        x = tl.load(x_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        y = tl.exp(x - shift) / total
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=col < num_cols)


def row_heuristic(gpu: Gpu, num_rows: int, num_cols: int, operands: int = 1) -> Config:
    """Tile and warps for kernels that hold rows of ``operands`` inputs in registers.

    A decode step has fewer rows than processors: 16 values a thread, since more warps fetch a row
    sooner. A prefill wants bytes in flight: 32 values a thread over the inputs, four 16-byte loads
    of 16-bit values, which is also fewer warps to reduce across. Past 16 warps a barrier costs more
    than it saves, until registers run out. Short rows share a program once every processor has
    four programs without that; rows of 2048 and more do not, because Triton then takes the weights
    through shared memory.
    """
    block = next_power_of_2(num_cols)
    plenty = num_rows // (4 * gpu.num_sms)
    rows = min(max(2048 // block, 1), next_power_of_2(max(plenty, 1)))
    per_thread = 32 // operands if plenty else 16
    warps = min(max(rows * block // (32 * per_thread), 1), 32 if block > 16384 else 16)
    return {"BLOCK_T": rows, "BLOCK_H": block, "num_warps": warps}


def row_candidates(gpu: Gpu, num_rows: int, num_cols: int) -> list[Config]:
    """Up to 4 rows a program and 8 to 64 values of each input a thread."""
    block = next_power_of_2(num_cols)
    return [
        {"BLOCK_T": rows, "BLOCK_H": block, "num_warps": warps}
        for rows in (1, 2, 4)
        for warps in (1, 2, 4, 8, 16, 32)
        if rows <= max(num_rows, 1) and 8 <= rows * block // (32 * warps) <= 64
    ]


def rms_heuristic(gpu: Gpu, num_rows: int, num_cols: int, operands: int = 1) -> Config:
    """:func:`row_heuristic`, and rows read twice where the tensor is larger than the caches."""
    if num_rows * num_cols < LARGE or num_cols < TWICE_BLOCK:
        return {"READS": 1, **row_heuristic(gpu, num_rows, num_cols, operands)}
    # 8 elements of one operand a thread, 4 each of two.
    warps = TWICE_BLOCK * operands // 256
    return {"READS": 2, "BLOCK_T": 1, "BLOCK_H": TWICE_BLOCK, "num_warps": warps}


def rms_candidates(gpu: Gpu, num_rows: int, num_cols: int) -> list[Config]:
    """Rows read once, and read twice in blocks of 4 to 16 elements a thread."""
    once = [{"READS": 1, **config} for config in row_candidates(gpu, num_rows, num_cols)]
    twice = [
        {"READS": 2, "BLOCK_T": 1, "BLOCK_H": block, "num_warps": warps}
        for block in (1024, 2048, 4096)
        for warps in (4, 8, 16)
        if 4 <= block // (32 * warps) <= 16 and block < 2 * num_cols
    ]
    return once + twice


def tunable_rms(op: str, operands: int = 1) -> Tunable:
    heuristic = functools.partial(rms_heuristic, operands=operands)
    return Tunable(op, HIDDEN, heuristic, rms_candidates)


def tunable_rows(op: str, dims: tuple[str, str], operands: int = 1) -> Tunable:
    heuristic = functools.partial(row_heuristic, operands=operands)
    return Tunable(op, dims, heuristic, row_candidates)


HIDDEN = ("num_tokens", "hidden_size")
rms_norm_config = tunable_rms("rms_norm")
fused_add_rms_norm_config = tunable_rms("fused_add_rms_norm", operands=2)
layer_norm_config = tunable_rows("layer_norm", HIDDEN)
gated_rms_norm_config = tunable_rows("gated_rms_norm", ("num_rows", "head_dim"), operands=2)
softmax_config = tunable_rows("softmax_rows", ("num_rows", "num_cols"))


def launch_rms_norm(tunable: Tunable, x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """y ← rms_norm(x), whatever y's dtype, for the op that ``tunable`` is of."""
    if x.numel() == 0:
        return
    rows, y_rows = as_rows(tunable.op, "x", x), as_rows(tunable.op, "out", y)
    num_tokens, hidden_size = rows.shape
    config = tunable.pick(x.device, num_tokens, hidden_size)
    _rms_norm_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_T"]),),
        y_rows,
        rows,
        weight,
        y_rows.stride(0),
        rows.stride(0),
        hidden_size,
        num_tokens,
        float(eps),
        **config,
    )


@ops.rms_norm.impl("triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    launch_rms_norm(rms_norm_config, x, weight, eps, y)
    return y


@ops.fused_add_rms_norm.impl("triton")
def fused_add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    rows, y_rows = as_rows("fused_add_rms_norm", "x", x), as_rows("fused_add_rms_norm", "out", y)
    residual_rows = as_rows("fused_add_rms_norm", "residual", residual)
    num_tokens, hidden_size = rows.shape
    config = fused_add_rms_norm_config.pick(x.device, num_tokens, hidden_size)
    _fused_add_rms_norm_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_T"]),),
        y_rows,
        residual_rows,
        rows,
        weight,
        y_rows.stride(0),
        residual_rows.stride(0),
        rows.stride(0),
        hidden_size,
        num_tokens,
        float(eps),
        **config,
    )
    return y


@ops.layer_norm.impl("triton")
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    rows, y_rows = as_rows("layer_norm", "x", x), as_rows("layer_norm", "out", y)
    num_tokens, hidden_size = rows.shape
    config = layer_norm_config.pick(x.device, num_tokens, hidden_size)
    _layer_norm_kernel.launch(
        (cdiv(num_tokens, config["BLOCK_T"]),),
        y_rows,
        rows,
        weight,
        bias,
        y_rows.stride(0),
        rows.stride(0),
        hidden_size,
        num_tokens,
        float(eps),
        **config,
    )
    return y


@ops.gated_rms_norm.impl("triton")
def gated_rms_norm(
    core: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    y = torch.empty_like(core, memory_format=torch.contiguous_format) if out is None else out
    if core.numel() == 0:
        return y
    rows, y_rows = as_rows("gated_rms_norm", "core", core), as_rows("gated_rms_norm", "out", y)
    z_rows = as_rows("gated_rms_norm", "z", z)
    num_rows, head_dim = rows.shape
    config = gated_rms_norm_config.pick(core.device, num_rows, head_dim)
    _gated_rms_norm_kernel.launch(
        (cdiv(num_rows, config["BLOCK_T"]),),
        y_rows,
        rows,
        z_rows,
        weight,
        y_rows.stride(0),
        rows.stride(0),
        z_rows.stride(0),
        head_dim,
        num_rows,
        float(eps),
        **config,
    )
    return y


@ops.softmax_rows.impl("triton")
def softmax_rows(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return y
    rows, y_rows = as_rows("softmax_rows", "x", x), as_rows("softmax_rows", "out", y)
    num_rows, num_cols = rows.shape
    strides = y_rows.stride(0), rows.stride(0)
    if num_cols <= MAX_SOFTMAX_TILE:
        config = softmax_config.pick(x.device, num_rows, num_cols)
        grid = (cdiv(num_rows, config["BLOCK_T"]),)
        _softmax_kernel.launch(grid, y_rows, rows, *strides, num_cols, num_rows, **config)
    else:
        _softmax_long_kernel.launch(
            (num_rows,), y_rows, rows, *strides, num_cols, BLOCK_C=LONG_BLOCK, num_warps=LONG_WARPS
        )
    return y
