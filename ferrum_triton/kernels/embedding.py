"""Embedding rows: one program per block of one row."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import as_rows, cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import embedding as ops


@kernel
def _embedding_lookup_kernel(
    y_ptr,  # [num_ids, hidden_size]
    table_ptr,  # [vocab_size, hidden_size]
    ids_ptr,  # [num_ids]
    stride_y_token,
    stride_table_row,
    vocab_size,
    hidden_size,
    BLOCK_H: tl.constexpr,
):
    blocks_per_row = tl.cdiv(hidden_size, BLOCK_H)
    token = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    h = tl.program_id(0) % blocks_per_row * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < hidden_size

    row = tl.load(ids_ptr + token).to(tl.int64)
    known = (row >= 0) & (row < vocab_size)

    values = tl.load(table_ptr + row * stride_table_row + h, mask=mask & known, other=0.0)
    tl.store(y_ptr + token * stride_y_token + h, values, mask=mask)


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


lookup_config = Tunable(
    "embedding_lookup_dev", ("num_tokens", "hidden_size"), lookup_heuristic, lookup_candidates
)


@ops.embedding_lookup_dev.impl("triton")
def embedding_lookup_dev(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    vocab_size, hidden_size = table.shape
    shape = (*ids.shape, hidden_size)
    y = table.new_empty(shape) if out is None else out
    if y.numel() == 0:
        return y
    flat_ids = ids if ids.dim() == 1 else ids.reshape(-1)
    y_rows = as_rows("embedding_lookup_dev", "out", y)
    num_ids = y_rows.shape[0]
    config = lookup_config.pick(table.device, num_ids, hidden_size)
    _embedding_lookup_kernel.launch(
        (num_ids * cdiv(hidden_size, config["BLOCK_H"]),),
        y_rows,
        table,
        flat_ids,
        y_rows.stride(0),
        table.stride(0),
        vocab_size,
        hidden_size,
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
