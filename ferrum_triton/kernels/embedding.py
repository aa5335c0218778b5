"""Embedding: rows of a table in an activation dtype, gathered by token id.

A program copies a block of one row. Tables of packed weights are in the package ``quant``.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import power_of_two, tile_refusal
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
from ferrum_triton.ops import embedding as ops


@kernel
def _embedding_lookup_kernel(
    y_ptr,  # [num_ids, hidden_size]
    table_ptr,  # [vocab_size, hidden_size]
    ids_ptr,  # [num_ids]
    stride_y_row,
    stride_ids_row,
    stride_y_group,
    stride_ids_group,
    stride_table_row,
    group_size,
    vocab_size,
    hidden_size,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[i] = table[ids[i]], or zeros where the table has no such row"""
    pdl_trigger(PDL)
    blocks_per_row = tl.cdiv(hidden_size, BLOCK_H)
    i = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    h = tl.program_id(0) % blocks_per_row * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < hidden_size
    pdl_wait(PDL)

    id_offset = row_offset(i, stride_ids_row, stride_ids_group, group_size)
    row = tl.load(ids_ptr + id_offset).to(tl.int64)
    known = (row >= 0) & (row < vocab_size)

    values = tl.load(table_ptr + row * stride_table_row + h, mask=mask & known, other=0.0)
    y_row = y_ptr + row_offset(i, stride_y_row, stride_y_group, group_size)
    tl.store(y_row + h, values, mask=mask)


def lookup_heuristic(gpu: Gpu, num_ids: int, hidden_size: int) -> Config:
    """Block and warps of a row gather.

    Few ids: blocks of 1024, so that several processors share a row, 8 values a thread. Many: a
    program waits for its id before it can ask for the row, so it had better ask for much at once:
    blocks of 4096, 32 values a thread.
    """
    many = num_ids >= 4 * gpu.num_sms
    block = min(next_power_of_2(hidden_size), 4096 if many else 1024)
    per_thread = 32 if many else 8
    return {"BLOCK_H": block, "num_warps": min(max(block // (32 * per_thread), 1), 4)}


def lookup_candidates(gpu: Gpu, num_ids: int, hidden_size: int) -> list[Config]:
    """Blocks up to a row, 8 to 32 values a thread."""
    return [
        {"BLOCK_H": block, "num_warps": warps}
        for block in (256, 512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8)
        if block <= next_power_of_2(hidden_size) and 8 <= block // (32 * warps) <= 32
    ]


def lookup_fits(gpu: Gpu, config: Config, num_ids: int, hidden_size: int) -> str:
    return tile_refusal(gpu, config, config["BLOCK_H"])


lookup_config = Tunable(
    "embedding_lookup_dev",
    ("num_tokens", "hidden_size"),
    lookup_heuristic,
    lookup_candidates,
    fits=lookup_fits,
    parameters={"BLOCK_H": power_of_two(1, 1 << 14)},
)


@ops.embedding_lookup_dev.impl("triton")
def embedding_lookup_dev(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    vocab_size, hidden_size = table.shape
    shape = (*ids.shape, hidden_size)
    y = table.new_empty(shape) if out is None else out
    if y.numel() == 0:
        return y
    for y_rows, id_rows in row_views(y, ids.unsqueeze(-1)):
        num_ids = y_rows.shape[:-1].numel()
        config = lookup_config.pick(table.device, num_ids, hidden_size)
        _embedding_lookup_kernel.launch(
            (num_ids * cdiv(hidden_size, config["BLOCK_H"]),),
            y_ptr=y_rows,
            table_ptr=table,
            ids_ptr=id_rows,
            stride_y_row=y_rows.stride(-2),
            stride_ids_row=id_rows.stride(-2),
            stride_y_group=group_stride(y_rows),
            stride_ids_group=group_stride(id_rows),
            stride_table_row=table.stride(0),
            group_size=group_size(y_rows),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            **config,
        )
    return y


@ops.embedding_lookup.impl("triton")
def embedding_lookup(table: Tensor, ids: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise FerrumError(
            "embedding_lookup takes ids from the host, which a replayed graph would not see; "
            "capture embedding_lookup_dev instead."
        )
    device_ids = torch.tensor(ids, dtype=torch.int32, device=table.device)
    return embedding_lookup_dev(table, device_ids, out=out)
