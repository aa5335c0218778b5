"""Decoding rows of packed weights: one program per tile of some rows and some groups."""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.decode import (
    block_layout,
    decode,
    first_weight,
    groups_of,
    rows_and_groups,
)
from ferrum_triton.kernels.quant.plane_rows import decode_planes
from ferrum_triton.kernels.rows import cdiv, row_views
from ferrum_triton.ops import quant as ops
from ferrum_triton.quant.kinds import format_of
from ferrum_triton.quant.planes import PLANE_FORMATS

# Lanes one program decodes, 16 a thread.
TILE_LANES, NUM_WARPS = 2048, 4


@kernel(dynamic=("num_rows",))
def _decode_rows_kernel(
    y_ptr,  # [num_rows, num_weights]
    blocks_ptr,  # [table_rows, row_bytes]
    ids_ptr,  # [num_rows], the rows of blocks to decode; None for all in order
    stride_y_row,
    stride_blocks_row,  # in units of LAYOUT.align bytes
    table_rows,
    num_groups,
    num_rows,
    LAYOUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    PLANES: tl.constexpr = LAYOUT.planes
    LANES: tl.constexpr = LAYOUT.lanes
    tiles_per_row = tl.cdiv(num_groups, BLOCK_G)
    y_row = (tl.program_id(0) // tiles_per_row).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    y_row = y_row[:, None, None]
    g = tl.program_id(0) % tiles_per_row * BLOCK_G + tl.arange(0, BLOCK_G)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    mask = (y_row < num_rows) & (g < num_groups)

    row, known = y_row, mask
    if ids_ptr is not None:
        row = tl.load(ids_ptr + y_row, mask=y_row < num_rows, other=-1).to(tl.int64)
        known = mask & (row >= 0) & (row < table_rows)

    rows = blocks_ptr + row * stride_blocks_row * LAYOUT.align
    y_block = y_ptr + y_row * stride_y_row + g // LAYOUT.groups * LAYOUT.format.block_size
    for PLANE in tl.static_range(PLANES):
        # [BLOCK_R, BLOCK_G, LANES]
        weights = decode(rows, g, lane, known, PLANE, LAYOUT)
        weights = tl.where(known, weights, 0.0)
        at = y_block + first_weight(g % LAYOUT.groups, PLANE, LAYOUT) + lane
        tl.store(at, weights.to(y_ptr.dtype.element_ty), mask=mask)


def _decode_rows(y: Tensor, blocks: Tensor, ids: Tensor | None, kind: str) -> None:
    if kind in PLANE_FORMATS:
        decode_planes(y, blocks, ids, kind)
        return
    layout = block_layout(kind, blocks)
    num_rows, num_weights = y.shape
    num_groups = groups_of(num_weights, layout)
    block_r, block_g = rows_and_groups(num_rows, num_groups, layout, TILE_LANES)
    _decode_rows_kernel.launch(
        (cdiv(num_rows, block_r) * cdiv(num_groups, block_g),),
        y_ptr=y,
        blocks_ptr=blocks,
        ids_ptr=ids,
        stride_y_row=y.stride(0),
        stride_blocks_row=blocks.stride(0) // layout.align,
        table_rows=blocks.shape[0],
        num_groups=num_groups,
        num_rows=num_rows,
        LAYOUT=layout,
        BLOCK_R=block_r,
        BLOCK_G=block_g,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # a fused d · q + m has other bits than the format's definition
    )


@ops.dequantize.impl("triton")
def dequantize(
    blocks: Tensor, kind: str, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    num_weights = format_of(kind).row_weights(blocks.shape[-1])
    shape = (*blocks.shape[:-1], num_weights)
    y = torch.empty(shape, dtype=dtype, device=blocks.device) if out is None else out
    if y.numel() == 0:
        return y
    if blocks.dim() > 2 and kind in PLANE_FORMATS:
        for matrix, weights in zip(blocks, y, strict=True):
            dequantize(matrix, kind, dtype, out=weights)
        return y
    for weights, rows in _stretches(y, blocks):
        _decode_rows(weights, rows, None, kind)
    return y


@ops.embedding_lookup_quant.impl("triton")
def embedding_lookup_quant(
    blocks: Tensor, ids: Tensor, kind: str, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    num_weights = format_of(kind).row_weights(blocks.shape[-1])
    shape = (*ids.shape, num_weights)
    y = torch.empty(shape, dtype=dtype, device=blocks.device) if out is None else out
    if y.numel() == 0:
        return y
    if ids.dim() == 1 and ids.is_contiguous():
        _decode_rows(y, blocks, ids, kind)
        return y
    flat_ids = ids.reshape(-1)
    if y.is_contiguous():
        _decode_rows(y.view(-1, num_weights), blocks, flat_ids, kind)
        return y
    # Ids are few and y is the caller's: a copy of the ids goes with each stretch of y.
    for weights, rows in _stretches(y, flat_ids.view(*ids.shape, 1)):
        _decode_rows(weights, blocks, rows.reshape(-1), kind)
    return y


def _stretches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of several tensors as [num_rows, n], of one row stride each."""
    for views in row_views(*tensors):
        if views[0].dim() == 2:
            yield views
        else:
            yield from zip(*views, strict=True)
