"""Activations by weights in planes, on tensor cores: one program per tile of the product.

Chosen for more tokens than :mod:`ferrum_triton.kernels.quant.small_m` takes, up to where a
decoded matrix and cuBLAS win. Rows of W [n, k] are in planes (:mod:`ferrum_triton.quant.planes`),
and K is taken in the steps of :mod:`ferrum_triton.kernels.quant.mma_steps`.

Weights are the tensor cores' first operand, from registers, and tokens the second: a tile takes 64
or 128 rows of W and 8 to 256 tokens.

Of formats with integer scales a product sums scale · code exactly over 256 weights and is scaled by
d in float32 (``scale_after``); the mins are products of their own, with the activations' sums over
words. Or weights are scaled in registers, rounded to float16 like dequantised ones are, which takes
more instructions a weight and fewer a token; one beyond float16's range is infinite then.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import can_overlap, capability, kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.descriptors import (
    activation_descriptors,
    no_plane_descriptors,
    plane_descriptors,
)
from ferrum_triton.kernels.quant.fragments import CODES
from ferrum_triton.kernels.quant.mma_config import MmaConfig
from ferrum_triton.kernels.quant.mma_operands import (
    MatrixTma,
    Operands,
    Place,
    PlaneRows,
    TokensTma,
    block_scales,
    halves_of,
    pointers,
    q_columns,
    tile_of,
)
from ferrum_triton.kernels.quant.mma_steps import add_step
from ferrum_triton.kernels.quant.planes import row_sizes
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import ROW_ALIGN


@triton.jit
def _prefetch(ptr):
    """Ask for the lines at ``ptr``, int32 pointers, to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel(dynamic=("num_tokens",))
def _mma_quant_kernel(
    y_ptr,  # [m, n]; of splits float32 [splits, m, n]
    x_ptr,  # [m, padded k]
    sums_ptr,  # [m, padded k / 8]
    factor_ptr,  # [m]
    planes_ptr,  # [n, row_bytes]
    q_desc,  # of planes, see plane_descriptors; or None
    h_desc,
    s_desc,
    d_desc,
    x_desc,  # of activation_descriptors, or None
    sums_desc,
    stride_y_split,
    stride_y_token,
    stride_x_token,
    q_row,  # units of 16 bytes of a row in each plane
    h_row,
    s_row,
    t_row,
    d_row,
    num_rows,
    num_words,  # of eight weights in a row
    num_tokens,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PREFETCH_DISTANCE: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_M: tl.constexpr = TILE.tokens
    pdl_trigger(PDL)
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    first_token = tl.program_id(0) % tiles_m * BLOCK_M
    tile_n = tl.program_id(0) // tiles_m
    m = first_token.to(tl.int64) + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row and token are read again.
    row, token = tl.minimum(n, num_rows - 1), tl.minimum(m, num_tokens - 1)
    rows = PlaneRows(q_row, h_row, s_row, t_row, d_row)
    operands = Operands(
        pointers(planes_ptr, x_ptr, sums_ptr, rows, stride_x_token, row, token, num_rows, TILE),
        rows,
        MatrixTma(q_desc, h_desc, s_desc, d_desc, 0),
        MatrixTma(None, None, None, None, 0),
        TokensTma(x_desc, sums_desc, first_token),
        tile_n * BLOCK_N,
    )
    steps = tl.cdiv(num_words, TILE.words)
    per_split = tl.cdiv(steps, SPLITS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, steps)
    Q_COLUMNS: tl.constexpr = q_columns(TILE)
    lines = planes_ptr.to(tl.pointer_type(tl.int32)) + row * q_row * 4
    if PREFETCH_LINES > 0:
        # Weights were there before the kernel that arranges the activations was launched.
        line = begin * Q_COLUMNS + tl.arange(0, PREFETCH_LINES) * 32
        _prefetch(lines[:, None] + tl.minimum(line, steps * Q_COLUMNS - 32)[None, :])
    pdl_wait(PDL)

    none = tl.full((), 0, tl.int64)
    scales = block_scales(operands, Place(none, tl.minimum(begin, steps - 1)), TILE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        after = tl.minimum(step + 1, steps - 1)
        if PREFETCH_DISTANCE > 0:
            _prefetch(lines + tl.minimum(step + PREFETCH_DISTANCE, steps - 1) * Q_COLUMNS)
        acc, scales = add_step(
            acc, scales, operands, Place(none, step), Place(none, after), num_words, TILE
        )
    acc *= tl.load(factor_ptr + token)[None, :]
    y_split = y_ptr + tl.program_id(1).to(tl.int64) * stride_y_split
    tl.store(
        y_split + m[None, :] * stride_y_token + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=(m < num_tokens)[None, :] & (n < num_rows)[:, None],
    )


@kernel
def _add_splits_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # [splits, m, n]
    stride_y_token,
    num_rows,
    stride_split,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_rows
    pdl_wait(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + split * stride_split + token * num_rows + n, mask=mask)
    tl.store(y_ptr + token * stride_y_token + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


def codes_meta(kind: str, device: torch.device) -> dict[str, Any]:
    """What is constant in a kernel that unpacks a kind into fragments."""
    codes = CODES[file_kind(kind)]
    # PTX where there is some to be had; the interpreter and AMD unpack in Triton.
    ptx = capability(device) >= (8, 0)
    return {
        "BITS": codes.bits,
        "OFFSET": codes.offset,
        "SCALES": codes.scales,
        "MINS": codes.mins,
        "ASM": codes.asm if ptx else "",
        "CONSTRAINTS": codes.constraints if ptx else "",
    }


def options_of(config: MmaConfig) -> dict[str, int]:
    """The compiler options of a configuration."""
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return options | ({"maxnreg": config.maxnreg} if config.maxnreg else {})


def row_units(sizes: dict[str, int]) -> dict[str, int]:
    """A kernel's units of 16 bytes of a row in each plane, of what ``row_sizes`` gives."""
    return {f"{plane.lower()}_row": size // ROW_ALIGN for plane, size in sizes.items()}


def mma_quant(
    a: Tensor,
    planes: Tensor,
    kind: str,
    config: MmaConfig,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k], W in planes.

    Args:
        a: [m, k], float16 or bfloat16.
        planes: uint8 [n, row_bytes], W's rows in planes.
        kind: their kind, such as ``"Q4_K:planes"``.
        config: the launch's configuration.
    """
    (num_tokens, k), num_rows = a.shape, planes.shape[0]
    y = a.new_empty((num_tokens, num_rows)) if out is None else out
    if y.numel() == 0:
        return y
    sizes = row_sizes(planes, kind, k)
    arranged = arrange(a, config.words, halves_of(kind))
    tile = tile_of(kind, config, k, a.device)
    partial = y
    if config.splits > 1:
        partial = torch.empty((config.splits, *y.shape), dtype=torch.float32, device=a.device)
    descriptors = no_plane_descriptors() | {"x_desc": None, "sums_desc": None}
    if config.use_tma:
        descriptors = plane_descriptors(planes[None], sizes, k, tile, tile.rows)
        descriptors |= activation_descriptors(arranged, tile)
    _mma_quant_kernel.launch(
        (cdiv(num_tokens, tile.tokens) * cdiv(num_rows, tile.rows), config.splits),
        y_ptr=partial,
        x_ptr=arranged.x,
        sums_ptr=arranged.sums,
        factor_ptr=arranged.factor,
        planes_ptr=planes,
        **descriptors,
        stride_y_split=partial.stride(0) if config.splits > 1 else 0,
        stride_y_token=partial.stride(-2),
        stride_x_token=arranged.x.stride(0),
        **row_units(sizes),
        num_rows=num_rows,
        num_words=k // 8,
        num_tokens=num_tokens,
        TILE=tile,
        SPLITS=config.splits,
        PREFETCH_LINES=config.prefetch_lines if can_overlap(a.device) else 0,
        PREFETCH_DISTANCE=config.prefetch_distance if capability(a.device) >= (8, 0) else 0,
        **options_of(config),
    )
    if config.splits > 1:
        block = 1024
        _add_splits_kernel.launch(
            (num_tokens, cdiv(num_rows, block)),
            y_ptr=y,
            partial_ptr=partial,
            stride_y_token=y.stride(0),
            num_rows=num_rows,
            stride_split=partial.stride(0),
            SPLITS=config.splits,
            BLOCK=block,
        )
    return y
