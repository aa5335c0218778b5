"""Latent attention: one program per block of (query, head) rows and split of the keys.

A tile of the cache is loaded once: it holds the keys, and the latents in it are the values. With 16
heads a step is bound by reading the cache, with 128 by the tensor cores. Tiles come through tensor
descriptors or through pointers, each way with a loop of its own. Sequences are split so that the
grid, which depends on shapes alone, fills the device; how long a split is each program works out
from the length in device memory. Splits leave normalised partial results in float32 that a second
kernel merges; a sequence short enough for one split is written directly.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels.attention.flash_plan import can_describe
from ferrum_triton.kernels.attention.merge import weigh
from ferrum_triton.kernels.attention.mla_tiles import attend_described, attend_tile
from ferrum_triton.kernels.attention.softmax import LN_2, LOG2_E
from ferrum_triton.kernels.jit import capability, kernel, processors
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.ops.attention import mla as ops

# Keys a split has at least: with fewer, the merge costs more than the parallelism gains.
MIN_KEYS = 128
MAX_SPLITS = 128


@triton.jit
def split_of(kv_len, num_splits, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys in a split of a sequence, and how many splits have any."""
    keys = tl.maximum(tl.cdiv(kv_len, num_splits), MIN_KEYS)
    keys = tl.cdiv(keys, BLOCK_N) * BLOCK_N
    return keys, tl.cdiv(kv_len, keys)


@triton.jit
def store_rows(out_row, lse_row, result, lse, col, in_latent, in_rows):
    """Store what a program worked out; ``lse_row`` may be None."""
    out = out_row[:, None] + col
    tl.store(out, result.to(out.dtype.element_ty), mask=in_latent)
    if lse_row is not None:
        tl.store(lse_row, lse, mask=in_rows)


@kernel(dynamic=("q_len", "scale_log2"))
def _mla_attention_kernel(
    out_ptr,  # [batch, q_len, num_heads, LORA]
    lse_ptr,  # [batch, q_len, num_heads] or None
    partial_ptr,  # [batch, q_len, num_heads, num_splits, LORA], None for one split
    partial_lse_ptr,  # [batch, q_len, num_heads, num_splits], None for one split
    q_ptr,  # [batch, q_len, num_heads, LORA + ROPE]
    cache_ptr,  # [num_blocks, block_size, LORA + ROPE]
    scale_ptr,  # [1] or None
    block_tables_ptr,  # [batch, max_blocks] or None
    kv_lens_ptr,  # [batch]
    latent_desc,  # the cache's first LORA columns in blocks of [1, BLOCK_N, BLOCK_L], or None
    rope_desc,  # its others in blocks of [1, BLOCK_N, BLOCK_R], or None
    stride_out_batch,
    stride_out_query,
    stride_out_head,
    stride_lse_batch,
    stride_lse_query,
    stride_q_batch,
    stride_q_query,
    stride_q_head,
    stride_cache_block,
    stride_block_tables_batch,
    num_heads,
    num_row_blocks,
    num_splits,
    num_blocks,
    capacity,  # keys a sequence may have
    q_len,
    scale_log2,  # softmax scale times log2(e)
    STRIDE_ROW: tl.constexpr,  # of the cache; a constant, which saves registers
    BLOCK_SIZE: tl.constexpr,  # of a paged cache; a constant, which saves divisions
    LORA: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,  # powers of two >= LORA and ROPE
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # every tile lies in one block of the cache
    MIN_KEYS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 products
    NUM_STAGES: tl.constexpr,
):
    # Neighbours share a split's keys, which then come from L2.
    row_block = tl.program_id(0) % num_row_blocks
    split = tl.program_id(0) // num_row_blocks % num_splits
    batch = (tl.program_id(0) // num_row_blocks // num_splits).to(tl.int64)

    kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch), 0), capacity).to(tl.int32)
    keys, active = split_of(kv_len, num_splits, MIN_KEYS, BLOCK_N)
    # The first split of an empty sequence writes that it is empty.
    if (split > 0) & (split >= active):
        return

    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = (m // num_heads).to(tl.int64), (m % num_heads).to(tl.int64)
    in_rows = query < q_len
    last_query = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // num_heads, q_len - 1)
    start = split * keys
    end = tl.minimum(start + keys, kv_len - q_len + last_query + 1)
    bound = tl.minimum(kv_len - q_len + m // num_heads + 1, end)

    q_row = q_ptr + batch * stride_q_batch + query * stride_q_query + head * stride_q_head
    col = tl.arange(0, BLOCK_L)[None, :]
    rope_col = tl.arange(0, BLOCK_R)[None, :]
    in_latent = in_rows[:, None] & (col < LORA)
    in_rope = in_rows[:, None] & (rope_col < ROPE)
    q_latent = tl.load(q_row[:, None] + col, mask=in_latent, other=0.0)
    q_rope = tl.load(q_row[:, None] + LORA + rope_col, mask=in_rope, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        scale_log2 = scale_log2 * scale
    table_ptr = None
    if block_tables_ptr is not None:
        table_ptr = block_tables_ptr + batch * stride_block_tables_batch

    if latent_desc is not None:
        whole = tl.minimum(kv_len - q_len + row_block * BLOCK_M // num_heads + 1, end)
        acc, m_i, l_i = attend_described(
            q_latent, q_rope, start, whole, bound, end, scale_log2, latent_desc, rope_desc,
            table_ptr, batch, num_blocks, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
            PRECISION, NUM_STAGES,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        # Every tile is masked: a second loop, for tiles that need no mask, takes registers that 64
        # rows do not leave, and the mask is little beside products 576 columns deep.
        for first in range(start, end, BLOCK_N):
            acc, m_i, l_i = attend_tile(
                acc, m_i, l_i, q_latent, q_rope, first, bound, end, scale_log2,
                cache_ptr, table_ptr, batch, stride_cache_block,
                num_blocks, STRIDE_ROW, BLOCK_SIZE, LORA, ROPE, BLOCK_N, BLOCK_L, BLOCK_R,
                ONE_BLOCK, FP8, PRECISION,
            )  # fmt: skip

    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if scale_ptr is not None:
        result = result * scale
    lse = (tl.where(m_i == float("-inf"), 0.0, m_i) + tl.log2(l_i)) * LN_2
    out_row = out_ptr + batch * stride_out_batch + query * stride_out_query + head * stride_out_head
    lse_row = lse_ptr
    if lse_ptr is not None:
        lse_row += batch * stride_lse_batch + query * stride_lse_query + head
    if partial_ptr is None:
        store_rows(out_row, lse_row, result, lse, col, in_latent, in_rows)
    elif active <= 1:
        store_rows(out_row, lse_row, result, lse, col, in_latent, in_rows)
    else:
        row = ((batch * q_len + query) * num_heads + head) * num_splits + split
        partial = partial_ptr + row * LORA
        store_rows(partial, partial_lse_ptr + row, result, lse, col, in_latent, in_rows)


@kernel(dynamic=("q_len",))
def _mla_merge_kernel(
    out_ptr,  # [batch, q_len, num_heads, LORA]
    lse_ptr,  # [batch, q_len, num_heads] or None
    partial_ptr,  # [batch, q_len, num_heads, num_splits, LORA]
    partial_lse_ptr,  # [batch, q_len, num_heads, num_splits]
    kv_lens_ptr,  # [batch]
    stride_out_batch,
    stride_out_query,
    stride_out_head,
    stride_lse_batch,
    stride_lse_query,
    num_heads,
    num_splits,
    capacity,
    q_len,
    LORA: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two >= num_splits
    BLOCK_D: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row % num_heads
    query = row // num_heads % q_len
    batch = row // num_heads // q_len
    kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch), 0), capacity).to(tl.int32)
    active = split_of(kv_len, num_splits, MIN_KEYS, BLOCK_N)[1]
    if active <= 1:  # written already
        return
    split = tl.arange(0, BLOCK_S)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = row * num_splits
    lses = tl.load(partial_lse_ptr + first + split, mask=split < active, other=float("-inf"))
    partial = tl.load(
        partial_ptr + (first + split)[:, None] * LORA + col[None, :],
        mask=(split < active)[:, None] & (col < LORA)[None, :],
        other=0.0,
    )  # [BLOCK_S, BLOCK_D]
    largest = tl.max(lses, axis=0)
    weights = weigh(lses, largest)
    total = tl.sum(weights, axis=0)
    out = tl.sum(weights[:, None] * partial, axis=0) / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + batch * stride_out_batch + query * stride_out_query + head * stride_out_head
    tl.store(out_row + col, out.to(out_ptr.dtype.element_ty), mask=col < LORA)
    if lse_ptr is not None:
        lse = tl.where(largest == float("-inf"), 0.0, largest) + tl.log2(total) * LN_2
        lse_row = lse_ptr + batch * stride_lse_batch + query * stride_lse_query + head
        # Every program of a row has the same.
        tl.store(lse_row, lse)


class MlaConfig(NamedTuple):
    """How one launch cuts up its work.

    Attributes:
        residents: programs a processor holds at a time.
        described: tiles come through tensor descriptors; each must lie in one block.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    residents: int
    described: bool = False


def pick_config(
    rows: int, block_size: int, dtype: torch.dtype, gpu: tuple[int, int], describable: bool
) -> MlaConfig:
    """Tiles for ``rows`` (query, head) pairs of one sequence on a GPU of that capability.

    Shared memory holds a program's queries and one tile of the cache, or two that take turns: with
    576 columns of 16 bits, 1152 bytes a row. sm_90 has 227 KB, and tensor cores that take 64 rows
    at a time, whose accumulators of 512 columns are half of all registers. With 4 warps or with
    128 rows they spill, and by pointers with tiles of 64 keys where those lie in several blocks, or
    where a contiguous cache leaves the addresses to registers; an 8-bit cache, which is widened in
    registers, leaves room for 32 rows. Elsewhere tiles are small enough for 64 KB.

    Args:
        rows: query positions times heads.
        block_size: rows of a block of the cache, 0 for a contiguous one.
        dtype: of the cache.
        gpu: compute capability, (0, 0) where it is not NVIDIA's.
        describable: tensor descriptors of the cache can be made.
    """
    if dtype == torch.float32 or gpu[0] not in (9, 10):
        # Descriptors only in the interpreter, so that tests see them.
        described = describable and gpu == (0, 0) and block_size % 16 == 0
        return MlaConfig(16, 16, 4, 2, 1, described)
    if dtype == torch.float8_e4m3fn:
        return MlaConfig(16 if rows <= 16 else 32, 32, 8, 3, 1)
    spread = block_size % 64 != 0
    if describable and not spread and gpu[0] == 9:
        # Half of 64 rows may be empty: these products are still faster than those of 32 rows.
        return MlaConfig(16, 64, 8, 3, 1, True) if rows <= 16 else MlaConfig(64, 64, 8, 2, 1, True)
    if rows <= 16:
        return MlaConfig(16, 64, 8, 5 if spread else 3, 1)
    if rows <= 32 or gpu[0] != 9:
        return MlaConfig(32, 64, 8, 2, 1)
    if spread:
        return MlaConfig(64, 16, 8, 3, 1)
    return MlaConfig(64, 64 if block_size else 32, 8, 2 if block_size else 3, 1)


@functools.cache
def pick_splits(programs: int, places: int, most: int) -> int:
    """Splits of a sequence: the fewest whose waves over ``places`` are nearly as full as any's."""

    def fullness(splits: int) -> float:
        waves = programs * splits / places
        return waves / math.ceil(waves)

    filled = [fullness(splits) for splits in range(1, most + 1)]
    return 1 + next(i for i, full in enumerate(filled) if full >= 0.85 * max(filled))


def describe(rows: Tensor, block_n: int) -> TensorDescriptor:
    """Rows [blocks, block_size, width] in pieces of ``block_n`` rows of one block.

    What a piece has beyond the block, its columns or the last block reads as zero.
    """
    columns = rows.shape[2]
    # The stride of a single index is never used, but must look like one.
    used = [s if n > 1 else columns for n, s in zip(rows.shape[:2], rows.stride()[:2], strict=True)]
    block = [1, block_n, max(next_power_of_2(columns), 16)]
    return TensorDescriptor(rows, list(rows.shape), [*used, 1], block)


def fp8_conversion(cache: Tensor) -> str:
    """How bytes of the cache become numbers: as the GPU does, or where it cannot, in integers."""
    if cache.dtype != torch.float8_e4m3fn:
        return ""
    return "native" if capability(cache.device) >= (8, 9) else "integer"


@ops.mla_attention.impl("triton")
def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor | None,
    kv_lens: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    scale: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    batch, q_len, num_heads, width = q.shape
    y = q.new_empty(batch, q_len, num_heads, kv_lora_rank) if out is None else out
    if y.numel() == 0:
        return y
    num_blocks, block_size = cache.shape[:2]
    paged = block_tables is not None
    capacity = block_size * (block_tables.shape[1] if paged else 1)
    rows = q_len * num_heads
    # A float32 query multiplies in float32 whatever the cache.
    dtype = q.dtype if q.dtype == torch.float32 else cache.dtype
    describable = (
        cache.dtype == q.dtype
        and kv_lora_rank * cache.element_size() % 16 == 0
        and can_describe(cache[:, None])
    )
    config = pick_config(rows, block_size if paged else 0, dtype, capability(q.device), describable)
    latent_desc = rope_desc = None
    if config.described:
        latent_desc = describe(cache[..., :kv_lora_rank], config.block_n)
        rope_desc = describe(cache[..., kv_lora_rank:], config.block_n)
    row_blocks = cdiv(rows, config.block_m)
    splits = pick_splits(
        batch * row_blocks,
        processors(q.device) * config.residents,
        min(cdiv(capacity, MIN_KEYS), MAX_SPLITS),
    )
    partial = partial_lse = None
    if splits > 1:
        sizes = (batch, q_len, num_heads, splits)
        partial = q.new_empty(*sizes, kv_lora_rank, dtype=torch.float32)
        partial_lse = q.new_empty(sizes, dtype=torch.float32)
    lse_strides = (0, 0) if lse is None else lse.stride()[:2]
    _mla_attention_kernel.launch(
        (row_blocks * splits * batch,),
        y,
        lse,
        partial,
        partial_lse,
        q,
        cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache,
        scale,
        block_tables,
        kv_lens,
        latent_desc,
        rope_desc,
        *y.stride()[:3],
        *lse_strides,
        *q.stride()[:3],
        cache.stride(0),
        block_tables.stride(0) if paged else 0,
        num_heads,
        row_blocks,
        splits,
        num_blocks,
        capacity,
        q_len,
        softmax_scale * LOG2_E.value,
        STRIDE_ROW=cache.stride(1),
        BLOCK_SIZE=block_size if paged else 0,
        LORA=kv_lora_rank,
        ROPE=width - kv_lora_rank,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_L=max(next_power_of_2(kv_lora_rank), 16),
        BLOCK_R=max(next_power_of_2(width - kv_lora_rank), 16),
        ONE_BLOCK=block_size % config.block_n == 0,
        MIN_KEYS=MIN_KEYS,
        FP8=fp8_conversion(cache),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        block_d = min(next_power_of_2(kv_lora_rank), 128)
        _mla_merge_kernel.launch(
            (batch * rows, cdiv(kv_lora_rank, block_d)),
            y,
            lse,
            partial,
            partial_lse,
            kv_lens,
            *y.stride()[:3],
            *lse_strides,
            num_heads,
            splits,
            capacity,
            q_len,
            LORA=kv_lora_rank,
            BLOCK_S=next_power_of_2(splits),
            BLOCK_D=block_d,
            MIN_KEYS=MIN_KEYS,
            BLOCK_N=config.block_n,
            num_warps=max(min(next_power_of_2(splits) // 8, 8), 1),
        )
    return y
