"""Choosing tokens: argmax, repetition penalties and uniform numbers. Draws: :mod:`sample_rows`.

An argmax program scans a chunk of a row, and a second kernel merges the chunks. Penalties are
gathered by one kernel and scattered by another, in which a program takes a chunk of a row's list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import integer, power_of_two, shared_refusal, tile_refusal
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops import sampling as ops

LIST_BLOCK, MAX_LIST_CHUNKS = 256, 64
UNIFORM_BLOCK = 128

NOTHING = tl.constexpr(-(2**63))  # the key of what must not be chosen
NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_key(value, index, usable):
    """An int64 that orders by float32 value, then by lower index; NOTHING where not usable."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # one zero, not two
    # Negative floats order backwards as integers: flip all but the sign.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(usable, (order << 32) | (0x7FFFFFFF - index), NOTHING)


@triton.jit
def index_of_key(key, MASKED: tl.constexpr):
    none = -1 if MASKED else 0
    return tl.where(key == NOTHING, none, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def keep_larger(largest, at, logits_row, mask_ptr, v, vocab_size, mask_size):
    """Lanes keep the first of their largest logits and its column; NaN is larger than nothing."""
    logits = tl.load(logits_row + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    larger = logits > largest
    if mask_ptr is not None:
        allowed = tl.load(mask_ptr + v, mask=v < mask_size, other=0)
        larger = larger & (allowed != 0) & (logits < float("inf"))
    return tl.where(larger, logits, largest), tl.where(larger, v, at)


@kernel(dynamic=("num_blocks",))
def _argmax_chunk_kernel(
    result_ptr,  # [num_rows, num_chunks] int64 keys, or [num_rows] int32 if there is one chunk
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,  # [mask_size] or None
    stride_logits_row,
    vocab_size,
    mask_size,
    num_chunks,
    num_blocks,  # of a chunk
    BLOCK_V: tl.constexpr,
    LOOPED: tl.constexpr,  # a chunk is longer than a block
    ONE_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The key of the largest logit of a chunk, or its column where a chunk is the row."""
    pdl_trigger(PDL)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    # In blocks, so that the compiler sees that addresses are aligned.
    start = tl.program_id(0) % num_chunks * num_blocks * BLOCK_V
    logits_row = logits_ptr + row * stride_logits_row
    v = tl.arange(0, BLOCK_V)

    largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    at = tl.full([BLOCK_V], NO_COLUMN, tl.int32)
    pdl_wait(PDL)
    if LOOPED:
        end = tl.minimum(start + num_blocks * BLOCK_V, vocab_size)
        for first in tl.range(start, end, BLOCK_V, num_stages=3):
            largest, at = keep_larger(
                largest, at, logits_row, mask_ptr, first + v, vocab_size, mask_size
            )
    else:
        largest, at = keep_larger(
            largest, at, logits_row, mask_ptr, start + v, vocab_size, mask_size
        )

    top = tl.max(largest, axis=0)
    first = tl.min(tl.where(largest == top, at, NO_COLUMN), axis=0)
    key = ordered_key(top, first, first != NO_COLUMN)
    if ONE_CHUNK:
        tl.store(result_ptr + row, index_of_key(key, mask_ptr is not None))
    else:
        tl.store(result_ptr + tl.program_id(0), key)


@kernel
def _argmax_merge_kernel(
    y_ptr,  # [num_rows] int32
    key_ptr,  # [num_rows, num_chunks] int64
    num_chunks,
    MASKED: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two >= num_chunks
    PDL: tl.constexpr,
):
    """y = the column of the largest key of a row"""
    pdl_trigger(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    pdl_wait(PDL)
    keys = tl.load(key_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=NOTHING)
    tl.store(y_ptr + row, index_of_key(tl.max(keys, axis=0), MASKED))


def argmax_heuristic(gpu: Gpu, num_rows: int, vocab_size: int) -> Config:
    """Columns a program scans: blocks of 2048 on 4 warps, two 16-byte loads of fp16 a thread.

    Few rows: a block a program, a small one if even that leaves processors without any. More than
    four programs a processor: loops over equal chunks, which load ahead and reduce once.
    """
    blocks_a_row = cdiv(vocab_size, 2048)
    if num_rows * blocks_a_row < gpu.num_sms:
        return {"BLOCK_V": 1024, "BLOCKS": 1, "num_warps": 4}
    blocks = max(num_rows * blocks_a_row // (4 * gpu.num_sms), 1)
    chunks = cdiv(blocks_a_row, min(blocks, 20))
    return {"BLOCK_V": 2048, "BLOCKS": cdiv(blocks_a_row, chunks), "num_warps": 4}


def argmax_candidates(gpu: Gpu, num_rows: int, vocab_size: int) -> list[Config]:
    """8 to 32 logits of a block a thread; chunks of 1 to 32 blocks."""
    return [
        {"BLOCK_V": block, "BLOCKS": blocks, "num_warps": warps}
        for block in (512, 1024, 2048, 4096)
        for blocks in (1, 4, 8, 16, 32)
        for warps in (2, 4, 8)
        if 8 <= block // (32 * warps) <= 32 and blocks <= cdiv(vocab_size, block)
    ]


def argmax_fits(gpu: Gpu, config: Config, num_rows: int, vocab_size: int) -> str:
    """A loop of three stages keeps two blocks, of up to 4 bytes a logit, in shared memory."""
    shared = 2 * 4 * config["BLOCK_V"] if config["BLOCKS"] > 1 else 0
    return shared_refusal(gpu, shared) or tile_refusal(gpu, config, 3 * config["BLOCK_V"])


argmax_config = Tunable(
    "argmax_rows",
    ("num_rows", "vocab_size"),
    argmax_heuristic,
    argmax_candidates,
    fits=argmax_fits,
    parameters={"BLOCK_V": power_of_two(128, 1 << 14), "BLOCKS": integer(1, 1 << 20)},
)


@ops.argmax_rows.impl("triton")
def argmax_rows(logits: Tensor, mask: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    num_rows, vocab_size = logits.shape
    device = logits.device
    y = torch.empty(num_rows, dtype=torch.int32, device=device) if out is None else out
    if num_rows == 0:
        return y
    config = argmax_config.pick(device, num_rows, vocab_size)
    block, num_blocks = config["BLOCK_V"], config["BLOCKS"]
    num_chunks = cdiv(vocab_size, block * num_blocks)
    result = y
    if num_chunks > 1:
        result = torch.empty(num_rows * num_chunks, dtype=torch.int64, device=device)
    _argmax_chunk_kernel.launch(
        (num_rows * num_chunks,),
        result_ptr=result,
        logits_ptr=logits,
        mask_ptr=mask,
        stride_logits_row=logits.stride(0),
        vocab_size=vocab_size,
        mask_size=0 if mask is None else mask.shape[0],
        num_chunks=num_chunks,
        num_blocks=num_blocks,
        BLOCK_V=block,
        LOOPED=num_blocks > 1,
        ONE_CHUNK=num_chunks == 1,
        num_warps=config["num_warps"],
    )
    if num_chunks > 1:
        merged = next_power_of_2(num_chunks)
        _argmax_merge_kernel.launch(
            (num_rows,),
            y_ptr=y,
            key_ptr=result,
            num_chunks=num_chunks,
            MASKED=mask is not None,
            BLOCK_C=merged,
            num_warps=min(max(merged // 128, 1), 4),
        )
    return y


@triton.jit
def listed_range(row_offsets_ptr, row, num_listed):
    """Where the row's list starts and ends, inside the list whatever the offsets say."""
    start = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    return tl.maximum(start, 0).to(tl.int32), tl.minimum(end, num_listed).to(tl.int32)


@kernel(dynamic=("num_listed",))
def _penalise_kernel(
    values_ptr,  # [num_listed], written by the gather, read by the scatter
    logits_ptr,  # [num_rows, vocab_size], updated by the scatter
    penalties_ptr,  # [num_rows]
    row_offsets_ptr,  # [num_rows + 1]
    token_ids_ptr,  # [num_listed]
    stride_logits_row,
    vocab_size,
    num_chunks,
    num_listed,
    SCATTER: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """values[i] = penalised logits[row, token_ids[i]]; then, scattering, the other way round.

    A logit x is penalised as x / penalty if it is positive, else as x · penalty.
    """
    pdl_trigger(PDL)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    pdl_wait(PDL)
    start, end = listed_range(row_offsets_ptr, row, num_listed)
    penalty = tl.load(penalties_ptr + row).to(tl.float32)
    end = tl.where(penalty == 1.0, start, end)

    for first in range(start + chunk * BLOCK_L, end, num_chunks * BLOCK_L):
        i = first + tl.arange(0, BLOCK_L)
        token = tl.load(token_ids_ptr + i, mask=i < end, other=-1).to(tl.int64)
        known = (token >= 0) & (token < vocab_size)
        logit_ptr = logits_ptr + row * stride_logits_row + token
        if SCATTER:
            tl.store(logit_ptr, tl.load(values_ptr + i, mask=known), mask=known)
        else:
            logit = tl.load(logit_ptr, mask=known, other=0.0).to(tl.float32)
            penalised = tl.where(logit > 0, logit / penalty, logit * penalty)
            tl.store(values_ptr + i, penalised.to(values_ptr.dtype.element_ty), mask=known)


@ops.repetition_penalty_inplace.impl("triton")
def repetition_penalty_inplace(
    logits: Tensor, row_offsets: Tensor, token_ids: Tensor, penalties: Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    num_listed = token_ids.shape[0]
    if num_rows == 0 or num_listed == 0:
        return
    # Every listed logit is read before any is written, so that a token listed twice is penalised
    # once, and the same bits are stored twice.
    values = logits.new_empty(num_listed)
    num_chunks = min(cdiv(cdiv(num_listed, num_rows), LIST_BLOCK), MAX_LIST_CHUNKS)
    for scatter in (False, True):
        _penalise_kernel.launch(
            (num_rows * num_chunks,),
            values_ptr=values,
            logits_ptr=logits,
            penalties_ptr=penalties,
            row_offsets_ptr=row_offsets,
            token_ids_ptr=token_ids,
            stride_logits_row=logits.stride(0),
            vocab_size=vocab_size,
            num_chunks=num_chunks,
            num_listed=num_listed,
            SCATTER=scatter,
            BLOCK_L=LIST_BLOCK,
            num_warps=4,
        )


@kernel(dynamic=("num_rows",))
def _uniform_kernel(
    y_ptr,  # [num_rows] float32
    seeds_ptr,  # [num_rows]
    offsets_ptr,  # [num_rows]
    num_rows,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = the top 24 bits of Philox(seed, offset), as a fraction of 2²⁴"""
    pdl_trigger(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    pdl_wait(PDL)
    seed = tl.load(seeds_ptr + row, mask=mask, other=0).to(tl.int64)
    offset = tl.load(offsets_ptr + row, mask=mask, other=0).to(tl.int64)
    word = tl.randint(seed, offset).to(tl.uint32, bitcast=True)
    tl.store(y_ptr + row, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=mask)


@ops.uniform_rows.impl("triton")
def uniform_rows(seeds: Tensor, offsets: Tensor, *, out: Tensor | None = None) -> Tensor:
    num_rows = seeds.shape[0]
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=seeds.device)
    if num_rows:
        _uniform_kernel.launch(
            (cdiv(num_rows, UNIFORM_BLOCK),),
            y_ptr=out,
            seeds_ptr=seeds,
            offsets_ptr=offsets,
            num_rows=num_rows,
            BLOCK_R=UNIFORM_BLOCK,
            num_warps=4,
        )
    return out
