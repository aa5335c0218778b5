"""Normalisation over the last dimension: RMS norm, layer norm and gated RMS norm.

A program holds one row, or a tile of short ones, in registers, and so reads it once. Rows of
tensors that no cache holds are read twice instead: the second read comes from the caches, while
the registers it frees let more rows be on their way. Where the tensor fits, it only takes longer.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import integer, power_of_two, tile_refusal
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import (
    cdiv,
    group_size,
    group_stride,
    next_power_of_2,
    row_offset,
    row_views,
)
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import norm as ops

# Elements from which a tensor's rows are read twice, and the columns of one step.
LARGE, TWICE_BLOCK = 1 << 26, 2048


@triton.jit
def tile_of_rows(num_rows, num_cols, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """This program's rows [BLOCK_T, 1], the columns [1, BLOCK_H], and the mask of both.

    A single row is a number and a vector, which compiles to less than a tile of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_H)
    mask = col < num_cols
    if BLOCK_T > 1:
        row = (row * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        col = col[None, :]
        mask = (row < num_rows) & (col < num_cols)
    return row, col, mask


@triton.jit
def sum_of_rows(x):
    """Sums over the columns of a vector, or of a tile: [BLOCK_T, 1]."""
    if len(x.shape) == 1:
        total = tl.sum(x, axis=0)
    else:
        total = tl.sum(x, axis=1)[:, None]
    return total


@triton.jit
def load_weight(weight_ptr, col, num_cols):
    """Weights of columns. Every row needs them: rows streaming by must not push them out."""
    return tl.load(weight_ptr + col, mask=col < num_cols, other=0.0, eviction_policy="evict_last")


@triton.jit
def inverse_rms(squares, num_cols, eps):
    """1 / sqrt(mean(x²) + eps), of the squares of rows that are 0 past their end."""
    return tl.rsqrt(sum_of_rows(squares) / num_cols + eps)


@kernel(dynamic=("num_rows", "eps"))
def _rms_norm_kernel(
    y_ptr,  # [num_rows, hidden_size]
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_row,
    stride_x_row,
    stride_y_group,
    stride_x_group,
    group_size,
    hidden_size,
    num_rows,
    eps,
    READS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # 1 if rows are read twice
    BLOCK_H: tl.constexpr,  # power of two, >= hidden_size if rows are read once
    PDL: tl.constexpr,
):
    """y = x / sqrt(mean(x²) + eps) · weight"""
    pdl_trigger(PDL)
    pdl_wait(PDL)
    if READS == 1:
        row, h, mask = tile_of_rows(num_rows, hidden_size, BLOCK_T, BLOCK_H)
        x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
        x = tl.load(x_row + h, mask=mask, other=0.0).to(tl.float32)
        weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)
        y = x * inverse_rms(x * x, hidden_size, eps) * weight
        y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
        tl.store(y_row + h, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
        y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
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


@kernel(dynamic=("num_rows", "eps"))
def _fused_add_rms_norm_kernel(
    y_ptr,  # [num_rows, hidden_size]
    residual_ptr,  # [num_rows, hidden_size], updated
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size]
    stride_y_row,
    stride_residual_row,
    stride_x_row,
    stride_y_group,
    stride_residual_group,
    stride_x_group,
    group_size,
    hidden_size,
    num_rows,
    eps,
    READS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # 1 if rows are read twice
    BLOCK_H: tl.constexpr,  # power of two, >= hidden_size if rows are read once
    PDL: tl.constexpr,
):
    """residual ← residual + x, rounded; y = residual / sqrt(mean(residual²) + eps) · weight"""
    pdl_trigger(PDL)
    pdl_wait(PDL)
    if READS == 1:
        row, h, mask = tile_of_rows(num_rows, hidden_size, BLOCK_T, BLOCK_H)
        residual_offset = row_offset(row, stride_residual_row, stride_residual_group, group_size)
        residual_row = residual_ptr + residual_offset
        x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
        stored = residual_sum(residual_row, x_row, h, mask, "")
        total = stored.to(tl.float32)
        weight = load_weight(weight_ptr, h, hidden_size).to(tl.float32)
        y = total * inverse_rms(total * total, hidden_size, eps) * weight
        tl.store(residual_row + h, stored, mask=mask)
        y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
        tl.store(y_row + h, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
        y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
        residual_offset = row_offset(row, stride_residual_row, stride_residual_group, group_size)
        residual_row = residual_ptr + residual_offset
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


@kernel(dynamic=("num_rows", "eps"))
def _layer_norm_kernel(
    y_ptr,  # [num_rows, hidden_size]
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size]
    bias_ptr,  # [hidden_size] or None
    stride_y_row,
    stride_x_row,
    stride_y_group,
    stride_x_group,
    group_size,
    hidden_size,
    num_rows,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= hidden_size
    PDL: tl.constexpr,
):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias"""
    pdl_trigger(PDL)
    row, h, mask = tile_of_rows(num_rows, hidden_size, BLOCK_T, BLOCK_H)
    x_row = x_ptr + row_offset(row, stride_x_row, stride_x_group, group_size)
    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    pdl_wait(PDL)

    x = tl.load(x_row + h, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, h, hidden_size)
    if bias_ptr is not None:
        bias = load_weight(bias_ptr, h, hidden_size)

    # The row is in registers, so centring it first costs nothing and cannot cancel, as the
    # difference of the mean square and the squared mean does.
    centred = tl.where(h < hidden_size, x - sum_of_rows(x) / hidden_size, 0.0)
    y = centred * inverse_rms(centred * centred, hidden_size, eps) * weight.to(tl.float32)
    if bias_ptr is not None:
        y += bias.to(tl.float32)

    tl.store(y_row + h, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("num_rows", "eps"))
def _gated_rms_norm_kernel(
    y_ptr,  # [num_rows, head_dim]
    core_ptr,  # [num_rows, head_dim]
    z_ptr,  # [num_rows, head_dim]
    weight_ptr,  # [head_dim]
    stride_y_row,
    stride_core_row,
    stride_z_row,
    stride_y_group,
    stride_core_group,
    stride_z_group,
    group_size,
    head_dim,
    num_rows,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= head_dim
    PDL: tl.constexpr,
):
    """y = core / sqrt(mean(core²) + eps) · weight · silu(z)"""
    pdl_trigger(PDL)
    row, d, mask = tile_of_rows(num_rows, head_dim, BLOCK_T, BLOCK_H)
    core_row = core_ptr + row_offset(row, stride_core_row, stride_core_group, group_size)
    pdl_wait(PDL)

    core = tl.load(core_row + d, mask=mask, other=0.0).to(tl.float32)
    z_row = z_ptr + row_offset(row, stride_z_row, stride_z_group, group_size)
    z = tl.load(z_row + d, mask=mask, other=0.0).to(tl.float32)
    weight = load_weight(weight_ptr, d, head_dim).to(tl.float32)

    y = core * inverse_rms(core * core, head_dim, eps) * weight * (z * tl.sigmoid(z))

    y_row = y_ptr + row_offset(row, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + d, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    warps = min(max(rows * block // (32 * per_thread), 1), gpu.max_warps if block > 16384 else 16)
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


def row_fits(gpu: Gpu, config: Config, num_rows: int, num_cols: int) -> str:
    """A tile holds whole rows, or a part of one row that is read twice; registers hold it."""
    if config.get("READS", 1) == 2 and config["BLOCK_T"] > 1:
        return "rows are read twice one at a time"
    if config.get("READS", 1) == 1 and config["BLOCK_H"] < num_cols:
        return f"a row of {num_cols} is longer than a block of {config['BLOCK_H']}"
    return tile_refusal(gpu, config, config["BLOCK_T"] * config["BLOCK_H"])


ROW_PARAMETERS = {
    "READS": integer(1, 2),
    "BLOCK_T": power_of_two(1, 64),
    "BLOCK_H": power_of_two(1, 1 << 17),
}


def tunable_rms(op: str, operands: int = 1) -> Tunable:
    heuristic = functools.partial(rms_heuristic, operands=operands)
    return Tunable(op, HIDDEN, heuristic, rms_candidates, fits=row_fits, parameters=ROW_PARAMETERS)


def tunable_rows(op: str, dims: tuple[str, str], operands: int = 1) -> Tunable:
    heuristic = functools.partial(row_heuristic, operands=operands)
    return Tunable(op, dims, heuristic, row_candidates, fits=row_fits, parameters=ROW_PARAMETERS)


HIDDEN = ("num_tokens", "hidden_size")
rms_norm_config = tunable_rms("rms_norm")
fused_add_rms_norm_config = tunable_rms("fused_add_rms_norm", operands=2)
layer_norm_config = tunable_rows("layer_norm", HIDDEN)
gated_rms_norm_config = tunable_rows("gated_rms_norm", ("num_rows", "head_dim"), operands=2)
softmax_config = tunable_rows("softmax_rows", ("num_rows", "num_cols"))


def launch_rms_norm(tunable: Tunable, x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """y ← rms_norm(x), in y's dtype, with the launch that ``tunable`` picks."""
    if x.numel() == 0:
        return
    for y_rows, x_rows in row_views(y, x):
        num_rows, hidden_size = x_rows.shape[:-1].numel(), x_rows.shape[-1]
        config = tunable.pick(x.device, num_rows, hidden_size)
        _rms_norm_kernel.launch(
            (cdiv(num_rows, config["BLOCK_T"]),),
            y_ptr=y_rows,
            x_ptr=x_rows,
            weight_ptr=weight,
            stride_y_row=y_rows.stride(-2),
            stride_x_row=x_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_x_group=group_stride(x_rows),
            group_size=group_size(x_rows),
            hidden_size=hidden_size,
            num_rows=num_rows,
            eps=float(eps),
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
    for y_rows, residual_rows, x_rows in row_views(y, residual, x):
        num_rows, hidden_size = x_rows.shape[:-1].numel(), x_rows.shape[-1]
        config = fused_add_rms_norm_config.pick(x.device, num_rows, hidden_size)
        _fused_add_rms_norm_kernel.launch(
            (cdiv(num_rows, config["BLOCK_T"]),),
            y_ptr=y_rows,
            residual_ptr=residual_rows,
            x_ptr=x_rows,
            weight_ptr=weight,
            stride_y_row=y_rows.stride(-2),
            stride_residual_row=residual_rows.stride(-2),
            stride_x_row=x_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_residual_group=group_stride(residual_rows),
            stride_x_group=group_stride(x_rows),
            group_size=group_size(x_rows),
            hidden_size=hidden_size,
            num_rows=num_rows,
            eps=float(eps),
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
    for y_rows, x_rows in row_views(y, x):
        num_rows, hidden_size = x_rows.shape[:-1].numel(), x_rows.shape[-1]
        config = layer_norm_config.pick(x.device, num_rows, hidden_size)
        _layer_norm_kernel.launch(
            (cdiv(num_rows, config["BLOCK_T"]),),
            y_ptr=y_rows,
            x_ptr=x_rows,
            weight_ptr=weight,
            bias_ptr=bias,
            stride_y_row=y_rows.stride(-2),
            stride_x_row=x_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_x_group=group_stride(x_rows),
            group_size=group_size(x_rows),
            hidden_size=hidden_size,
            num_rows=num_rows,
            eps=float(eps),
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
    for y_rows, core_rows, z_rows in row_views(y, core, z):
        num_rows, head_dim = core_rows.shape[:-1].numel(), core_rows.shape[-1]
        config = gated_rms_norm_config.pick(core.device, num_rows, head_dim)
        _gated_rms_norm_kernel.launch(
            (cdiv(num_rows, config["BLOCK_T"]),),
            y_ptr=y_rows,
            core_ptr=core_rows,
            z_ptr=z_rows,
            weight_ptr=weight,
            stride_y_row=y_rows.stride(-2),
            stride_core_row=core_rows.stride(-2),
            stride_z_row=z_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_core_group=group_stride(core_rows),
            stride_z_group=group_stride(z_rows),
            group_size=group_size(core_rows),
            head_dim=head_dim,
            num_rows=num_rows,
            eps=float(eps),
            **config,
        )
    return y
