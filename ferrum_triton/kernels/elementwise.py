"""Elementwise, activation and layout ops: one program per block of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import as_flat, as_rows, cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import elementwise as ops

# 1024 elements on 4 warps: one 16-byte access of 16-bit values a thread.
BLOCK, WARPS = 1024, 4


@triton.jit
def row_and_columns(num_cols, BLOCK_C: tl.constexpr):
    """The row of this program and its columns, both int64, with the columns' mask."""
    blocks_per_row = tl.cdiv(num_cols, BLOCK_C)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    block = (tl.program_id(0) % blocks_per_row).to(tl.int64)
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    return row, cols, cols < num_cols


@triton.jit
def normal_tail(s):
    """The normal distribution's share above s >= 0, erfc(s/√2) / 2.

    It is e^(-s²/2) · t · P(t) with t = 1 / (1 + 0.35 s), which maps every s into (0, 1]; P, of
    degree 8, was fitted for the least relative error. 1 - erf would leave few bits of a small
    tail, and of one from s = 5.5 on none.
    """
    s = tl.minimum(s, 16.0)  # from 14.2 on the tail is no float32 number but 0
    t = 1.0 / (1.0 + 0.35 * s)
    p = -0.029164928942918777
    p = p * t + 0.1440657675266266
    p = p * t - 0.25591233372688293
    p = p * t + 0.1594051569700241
    p = p * t - 0.023272467777132988
    p = p * t + 0.10557854920625687
    p = p * t + 0.11981452256441116
    p = p * t + 0.1398644745349884
    p = p * t + 0.13962124288082123
    square = s * s
    rounded_off = tl.fma(s, s, -square)  # of the square: up to 2⁻²⁵ s² of the result
    return tl.exp(-0.5 * square) * (1.0 - 0.5 * rounded_off) * (t * p)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """silu(x), or gelu(x) in its exact or its tanh form."""
    if ACTIVATION == "gelu":
        tail = normal_tail(tl.abs(x))
        y = x * tl.where(x < 0, tail, 1.0 - tail)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(z) = 2 sigmoid(2z) - 1, which does not overflow on either side.
        y = x * tl.sigmoid(2.0 * inner)
    else:
        y = x * tl.sigmoid(x)
    return y


@kernel
def _gated_split_kernel(
    y_ptr,  # [num_tokens, intermediate_size]
    gate_up_ptr,  # [num_tokens, 2 * intermediate_size]
    stride_y_token,
    stride_gate_up_token,
    intermediate_size,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token, i, mask = row_and_columns(intermediate_size, BLOCK_C)
    gate_ptr = gate_up_ptr + token * stride_gate_up_token + i

    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + intermediate_size, mask=mask, other=0.0)

    y = activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _gated_kernel(
    y_ptr,  # [num_tokens, intermediate_size]
    gate_ptr,  # [num_tokens, intermediate_size]
    up_ptr,  # [num_tokens, intermediate_size]
    stride_y_token,
    stride_gate_token,
    stride_up_token,
    intermediate_size,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token, i, mask = row_and_columns(intermediate_size, BLOCK_C)

    gate = tl.load(gate_ptr + token * stride_gate_token + i, mask=mask)
    up = tl.load(up_ptr + token * stride_up_token + i, mask=mask)

    y = activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    tl.store(y_ptr + token * stride_y_token + i, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _activation_kernel(
    y_ptr,  # [num_rows, num_cols]
    x_ptr,  # [num_rows, num_cols]
    stride_y_row,
    stride_x_row,
    num_cols,
    ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    x = tl.load(x_ptr + row * stride_x_row + col, mask=mask)
    y = activated(x.to(tl.float32), ACTIVATION)
    tl.store(y_ptr + row * stride_y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("scale",))
def _scale_kernel(
    x_ptr,  # [num_rows, num_cols], updated
    stride_x_row,
    num_cols,
    scale,
    BLOCK_C: tl.constexpr,
):
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    block = x_ptr + row * stride_x_row + col
    x = tl.load(block, mask=mask).to(tl.float32)
    tl.store(block, (x * scale).to(x_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("scale",))
def _add_kernel(
    dst_ptr,  # [num_rows, num_cols], updated
    src_ptr,  # [num_rows, num_cols]
    stride_dst_row,
    stride_src_row,
    num_cols,
    scale,
    HAS_SCALE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, col, mask = row_and_columns(num_cols, BLOCK_C)
    dst_block = dst_ptr + row * stride_dst_row + col

    src = tl.load(src_ptr + row * stride_src_row + col, mask=mask).to(tl.float32)
    dst = tl.load(dst_block, mask=mask).to(tl.float32)
    if HAS_SCALE:
        src *= scale

    tl.store(dst_block, (dst + src).to(dst_ptr.dtype.element_ty), mask=mask)


@kernel(dynamic=("length",))
def _copy_kernel(
    dst_ptr,  # [length]
    src_ptr,  # [length]
    length,
    BLOCK_C: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    values = tl.load(src_ptr + i, mask=i < length)
    tl.store(dst_ptr + i, values.to(dst_ptr.dtype.element_ty), mask=i < length)


@kernel
def _transpose_kernel(
    y_ptr,  # [num_inner, num_outer, size]
    x_ptr,  # [num_outer, num_inner, size]
    stride_y_inner,
    stride_y_outer,
    stride_x_outer,
    stride_x_inner,
    num_outer,
    num_rows,  # num_outer * num_inner
    size,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks_per_row = tl.cdiv(size, BLOCK_C)
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * BLOCK_R
    row = (first + tl.arange(0, BLOCK_R))[:, None]
    col = (tl.program_id(0) % blocks_per_row * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (row < num_rows) & (col < size)
    inner, outer = row // num_outer, row % num_outer

    x = tl.load(x_ptr + outer * stride_x_outer + inner * stride_x_inner + col, mask=mask)
    tl.store(y_ptr + inner * stride_y_inner + outer * stride_y_outer + col, x, mask=mask)


def block_heuristic(gpu: Gpu, num_rows: int, num_cols: int) -> Config:
    """Block and warps for kernels that touch every element once.

    Few blocks: 1024 on 4 warps, one 16-byte access of 16-bit values a thread, spread over as many
    processors as possible. Where every processor has sixteen of those anyway, twice as many values
    a thread keep as many bytes in flight with half the programs to start.
    """
    many = num_rows * cdiv(num_cols, BLOCK) >= 16 * gpu.num_sms
    return {"BLOCK_C": 2 * BLOCK if many and num_cols > BLOCK else BLOCK, "num_warps": WARPS}


def block_candidates(gpu: Gpu, num_rows: int, num_cols: int) -> list[Config]:
    """8 to 32 values a thread."""
    return [
        {"BLOCK_C": block, "num_warps": warps}
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8)
        if 8 <= block // (32 * warps) <= 32
    ]


SPLITS = {
    name: Tunable(name, ("num_tokens", "intermediate_size"), block_heuristic, block_candidates)
    for name in ("fused_silu_mul_split", "fused_gelu_mul_split", "fused_gelu_tanh_mul_split")
}
# Tensors as rows, or as a single one where they are contiguous.
FLAT = {
    name: Tunable(name, ("num_rows", "num_cols"), block_heuristic, block_candidates)
    for name in (
        "silu_mul",
        "gelu",
        "scale_inplace",
        "add_inplace",
        "scaled_add_inplace",
        "add_bias",
    )
}


def _blocks(num_rows: int, num_cols: int, config: Config) -> tuple[int]:
    return (num_rows * cdiv(num_cols, config["BLOCK_C"]),)


def _gated_split(name: str, gate_up: Tensor, out: Tensor | None, activation: str) -> Tensor:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    y = gate_up.new_empty(shape) if out is None else out
    if y.numel() == 0:
        return y
    rows, y_rows = as_rows(name, "gate_up", gate_up), as_rows(name, "out", y)
    num_tokens, intermediate_size = y_rows.shape
    config = SPLITS[name].pick(y.device, num_tokens, intermediate_size)
    _gated_split_kernel.launch(
        _blocks(num_tokens, intermediate_size, config),
        y_rows,
        rows,
        y_rows.stride(0),
        rows.stride(0),
        intermediate_size,
        ACTIVATION=activation,
        **config,
    )
    return y


@ops.fused_silu_mul_split.impl("triton")
def fused_silu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _gated_split("fused_silu_mul_split", gate_up, out, "silu")


@ops.fused_gelu_mul_split.impl("triton")
def fused_gelu_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _gated_split("fused_gelu_mul_split", gate_up, out, "gelu")


@ops.fused_gelu_tanh_mul_split.impl("triton")
def fused_gelu_tanh_mul_split(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _gated_split("fused_gelu_tanh_mul_split", gate_up, out, "gelu_tanh")


@ops.silu_mul.impl("triton")
def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    named = (("out", y), ("gate", gate), ("up", up))
    rows = as_flat(*(as_rows("silu_mul", name, tensor) for name, tensor in named))
    num_rows, num_cols = rows[0].shape
    config = FLAT["silu_mul"].pick(y.device, num_rows, num_cols)
    _gated_kernel.launch(
        _blocks(num_rows, num_cols, config),
        *rows,
        *(tensor.stride(0) for tensor in rows),
        num_cols,
        ACTIVATION="silu",
        **config,
    )
    return y


@ops.gelu.impl("triton")
def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if y.numel() == 0:
        return y
    rows = as_flat(as_rows("gelu", "out", y), as_rows("gelu", "x", x))
    num_rows, num_cols = rows[0].shape
    config = FLAT["gelu"].pick(y.device, num_rows, num_cols)
    _activation_kernel.launch(
        _blocks(num_rows, num_cols, config),
        *rows,
        *(tensor.stride(0) for tensor in rows),
        num_cols,
        ACTIVATION="gelu",
        **config,
    )
    return y


@ops.scale_inplace.impl("triton")
def scale_inplace(x: Tensor, scale: float) -> None:
    if x.numel() == 0:
        return
    (rows,) = as_flat(as_rows("scale_inplace", "x", x))
    num_rows, num_cols = rows.shape
    config = FLAT["scale_inplace"].pick(x.device, num_rows, num_cols)
    _scale_kernel.launch(
        _blocks(num_rows, num_cols, config),
        rows,
        rows.stride(0),
        num_cols,
        float(scale),
        **config,
    )


def _launch_add(name: str, dst: Tensor, src: Tensor, scale: float | None = None) -> None:
    """dst += scale * src for [num_rows, num_cols]; a row stride of 0 repeats one row of src."""
    num_rows, num_cols = dst.shape
    config = FLAT[name].pick(dst.device, num_rows, num_cols)
    _add_kernel.launch(
        _blocks(num_rows, num_cols, config),
        dst,
        src,
        dst.stride(0),
        src.stride(0),
        num_cols,
        0.0 if scale is None else float(scale),
        HAS_SCALE=scale is not None,
        **config,
    )


@ops.add_inplace.impl("triton")
def add_inplace(residual: Tensor, x: Tensor) -> None:
    if x.numel():
        dst, src = as_rows("add_inplace", "residual", residual), as_rows("add_inplace", "x", x)
        _launch_add("add_inplace", *as_flat(dst, src))


@ops.scaled_add_inplace.impl("triton")
def scaled_add_inplace(dst: Tensor, src: Tensor, scale: float) -> None:
    if src.numel():
        rows = as_rows("scaled_add_inplace", "dst", dst), as_rows("scaled_add_inplace", "src", src)
        _launch_add("scaled_add_inplace", *as_flat(*rows), scale)


@ops.add_bias.impl("triton")
def add_bias(x: Tensor, bias: Tensor) -> None:
    if x.numel():
        rows = as_rows("add_bias", "x", x)
        _launch_add("add_bias", rows, bias.expand(rows.shape))


@ops.copy_slice.impl("triton")
def copy_slice(
    src: Tensor,
    dst: Tensor,
    src_offset: int = 0,
    dst_offset: int = 0,
    length: int | None = None,
) -> None:
    source, target = src.view(-1)[src_offset:], dst.view(-1)[dst_offset:]
    length = min(source.numel(), target.numel()) if length is None else length
    if length:
        grid = (cdiv(length, BLOCK),)
        _copy_kernel.launch(grid, target, source, length, BLOCK_C=BLOCK, num_warps=WARPS)


def _transpose(x: Tensor, out: Tensor | None) -> Tensor:
    num_outer, num_inner, size = x.shape
    shape = (num_inner, num_outer, size)
    y = x.new_empty(shape) if out is None else out
    if x.numel() == 0:
        return y
    block_c = min(next_power_of_2(size), 256)
    block_r = max(2048 // block_c, 1)
    _transpose_kernel.launch(
        (cdiv(num_outer * num_inner, block_r) * cdiv(size, block_c),),
        y,
        x,
        y.stride(0),
        y.stride(1),
        x.stride(0),
        x.stride(1),
        num_outer,
        num_outer * num_inner,
        size,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=WARPS,
    )
    return y


@ops.transpose_head_to_token.impl("triton")
def transpose_head_to_token(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _transpose(x, out)


@ops.transpose_token_to_head.impl("triton")
def transpose_token_to_head(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _transpose(x, out)
