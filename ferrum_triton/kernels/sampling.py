"""Row argmax in two steps: programs scan chunks of a row, one program a row merges them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel, processors
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops import sampling as ops

BLOCK = 2048
MAX_CHUNKS = 64


@triton.jit
def first_of_largest(values, indices):
    """The largest value and the lowest index that has it; the index is 0 if all are -inf."""
    top = tl.max(values, axis=0)
    index = tl.min(tl.where(values == top, indices, 2147483647), axis=0)
    return top, tl.where(top == float("-inf"), 0, index)


@kernel
def _argmax_chunk_kernel(
    index_ptr,  # [num_rows, num_chunks] int32
    value_ptr,  # [num_rows, num_chunks] float32
    logits_ptr,  # [num_rows, vocab_size]
    stride_logits_row,
    vocab_size,
    chunk_size,  # a multiple of BLOCK_V
    num_chunks,
    BLOCK_V: tl.constexpr,
):
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    start = chunk * chunk_size
    end = tl.minimum(start + chunk_size, vocab_size)

    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_index = tl.full([BLOCK_V], 2147483647, tl.int32)
    for first in range(start, end, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        logits = tl.load(
            logits_ptr + row * stride_logits_row + v, mask=v < end, other=float("-inf")
        ).to(tl.float32)
        better = logits > best  # false for NaN, and for a later equal value
        best = tl.where(better, logits, best)
        best_index = tl.where(better, v, best_index)

    value, index = first_of_largest(best, best_index)
    tl.store(value_ptr + tl.program_id(0), value)
    tl.store(index_ptr + tl.program_id(0), index)


@kernel
def _argmax_merge_kernel(
    y_ptr,  # [num_rows] int32
    index_ptr,  # [num_rows, num_chunks] int32
    value_ptr,  # [num_rows, num_chunks] float32
    num_chunks,
    BLOCK_C: tl.constexpr,  # power of two >= num_chunks
):
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    mask = chunk < num_chunks

    values = tl.load(value_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    indices = tl.load(index_ptr + row * num_chunks + chunk, mask=mask, other=2147483647)

    _, index = first_of_largest(values, indices)
    tl.store(y_ptr + row, index)


@ops.argmax_rows.impl("triton")
def argmax_rows(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    num_rows, vocab_size = logits.shape
    device = logits.device
    y = torch.empty(num_rows, dtype=torch.int32, device=device) if out is None else out
    if num_rows == 0:
        return y
    # Two programs a processor hide each other's latency; more chunks only lengthen the merge.
    wanted = min(max(2 * processors(device) // num_rows, 1), MAX_CHUNKS)
    chunk_size = cdiv(cdiv(vocab_size, wanted), BLOCK) * BLOCK
    num_chunks = cdiv(vocab_size, chunk_size)
    values = torch.empty(num_rows * num_chunks, dtype=torch.float32, device=device)
    indices = y
    if num_chunks > 1:
        indices = torch.empty(num_rows * num_chunks, dtype=torch.int32, device=device)
    _argmax_chunk_kernel.launch(
        (num_rows * num_chunks,),
        indices,
        values,
        logits,
        logits.stride(0),
        vocab_size,
        chunk_size,
        num_chunks,
        BLOCK_V=BLOCK,
        num_warps=4,
    )
    if num_chunks > 1:
        block = next_power_of_2(num_chunks)
        _argmax_merge_kernel.launch(
            (num_rows,), y, indices, values, num_chunks, BLOCK_C=block, num_warps=1
        )
    return y
