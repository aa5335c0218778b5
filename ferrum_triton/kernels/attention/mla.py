"""Latent attention: one program per block of (query, head) rows and split of the keys.

A tile of the cache is loaded once: it holds the keys, and the latents in it are the values. With 16
heads a step is bound by reading the cache, with 128 by the tensor cores. Tiles come through tensor
maps or through pointers, each way with a loop of its own. Sequences are split so that the grid,
which depends on shapes alone, fills the GPU; how long a split is each program works out from the
length in device memory. Splits leave partial results in float32, which
:func:`~ferrum_triton.kernels.attention.merge.merge_parts` merges.

On Hopper there is a kernel in Gluon as well (:mod:`ferrum_triton.kernels.hopper.mla`), for blocks
of 64 heads where a measured row asks for it.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.flash_config import tile
from ferrum_triton.kernels.attention.merge import merge_parts, strides_of
from ferrum_triton.kernels.attention.mla_tiles import Latents, Queries, attend_pointers, attend_tma
from ferrum_triton.kernels.attention.softmax import LOG2_E, finish, first_state, store_rows
from ferrum_triton.kernels.attention.tensor_maps import can_describe, describe
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu, gpu_of
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.jit import capability, kernel, processors
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Dim, Tunable
from ferrum_triton.ops.attention import mla as ops

# Keys a split has at least: with fewer, the merge costs more than the parallelism gains.
MIN_KEYS = 128
MAX_SPLITS = 128
# What a merge costs, in the time that a program takes for TIMED_KEYS keys: MERGING for its launch,
# and 1 for every NUMBERS_OF_TILE numbers of a split. Above EASILY_MERGED splits each costs half as
# much again. Fitted to the times that :func:`pick_splits` quotes.
TIMED_KEYS, MERGING, NUMBERS_OF_TILE, EASILY_MERGED = 64, 4, 480_000, 16

# The configurations of Hopper's kernel: two tiles fill shared memory.
HOPPER: list[Config] = [
    {"path": "hopper", "BLOCK_M": 64, "BLOCK_N": 64, "SCORES_FIRST": scores_first}
    for scores_first in (False, True)
]


@dataclass(frozen=True)
class Variant:
    """What the kernel specialises on.

    Attributes:
        stride_row: stride of the cache's rows; a constant, which saves registers.
        block_size: rows of a block, 0 of a contiguous cache; a constant, which saves divisions.
        lora, rope: columns of the latents and of the rotary part.
        block_m: rows of a program.
        block_n: keys of a tile.
        block_l, block_r: powers of two >= lora and rope.
        one_block: whether every tile lies in one block of the cache.
        min_keys: keys of a split, at least.
        fp8: conversion of an 8-bit cache, ``"native"``, ``"integer"`` or ``""``.
        precision: how tensor cores multiply float32, as ``tl.dot`` takes it.
    """

    stride_row: int
    block_size: int
    lora: int
    rope: int
    block_m: int
    block_n: int
    block_l: int
    block_r: int
    one_block: bool
    min_keys: int
    fp8: str
    precision: str
    num_stages: int


@kernel(dynamic=("q_len", "scale_log2"))
def _mla_attention_kernel(
    out_ptr,  # [batch, q_len, num_heads, LORA], in float32 for each split if there are several
    lse_ptr,  # [batch, q_len, num_heads], for each split if there are several, or None
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
    stride_out_split,
    stride_lse_batch,
    stride_lse_query,
    stride_lse_head,
    stride_lse_split,
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
    VARIANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = softmax(scale · q rowᵀ + mask) row[:LORA] over a split of the cache's rows."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    LORA: tl.constexpr = VARIANT.lora
    ROPE: tl.constexpr = VARIANT.rope
    BLOCK_M: tl.constexpr = VARIANT.block_m
    BLOCK_N: tl.constexpr = VARIANT.block_n
    BLOCK_L: tl.constexpr = VARIANT.block_l
    BLOCK_R: tl.constexpr = VARIANT.block_r
    MIN_KEYS: tl.constexpr = VARIANT.min_keys
    # Neighbours share a split's keys, which then come from L2.
    row_block = tl.program_id(0) % num_row_blocks
    split = tl.program_id(0) // num_row_blocks % num_splits
    batch = (tl.program_id(0) // num_row_blocks // num_splits).to(tl.int64)
    kv_len = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + batch), 0), capacity).to(tl.int32)
    # Keys of a split, and how many splits have any.
    keys = tl.maximum(tl.cdiv(kv_len, num_splits), MIN_KEYS)
    keys = tl.cdiv(keys, BLOCK_N) * BLOCK_N
    active = tl.cdiv(kv_len, keys)

    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = (m // num_heads).to(tl.int64), (m % num_heads).to(tl.int64)
    in_rows = query < q_len
    lse_rows = lse_ptr
    if lse_ptr is not None:
        lse_rows += batch * stride_lse_batch + query * stride_lse_query + head * stride_lse_head
        lse_rows += split.to(tl.int64) * stride_lse_split
    if split >= tl.maximum(active, 1):
        if lse_ptr is not None:
            tl.store(lse_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=in_rows)
        return
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
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        scale_log2 = scale_log2 * scale
    table_ptr = None
    if block_tables_ptr is not None:
        table_ptr = block_tables_ptr + batch * stride_block_tables_batch
    queries = Queries(q_latent, q_rope, bound, scale_log2)
    cache = Latents(
        cache_ptr, latent_desc, rope_desc, stride_cache_block, num_blocks, table_ptr, batch
    )

    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = first_state(tl.zeros([BLOCK_M, BLOCK_L], tl.float32), nothing)
    if latent_desc is not None:
        whole = tl.minimum(kv_len - q_len + row_block * BLOCK_M // num_heads + 1, end)
        state = attend_tma(state, queries, cache, start, whole, end, VARIANT)
    else:
        state = attend_pointers(state, queries, cache, start, end, VARIANT)
    out, lse = finish(state, scale)
    out_rows = out_ptr + batch * stride_out_batch + query * stride_out_query
    out_rows += head * stride_out_head + split.to(tl.int64) * stride_out_split
    store_rows(out_rows, lse_rows, out, lse, in_rows, LORA)


def mla_heuristic(gpu: Gpu, rows: int, block_size: int, dtype: str, has_tma: bool) -> Config:
    """Tiles for ``rows`` (query, head) pairs of one sequence.

    Shared memory holds a program's queries and one tile of the cache, or two that take turns: with
    576 columns of 16 bits, 1152 bytes a row. sm_90 has 227 KB, and tensor cores that take 64 rows
    at a time, whose accumulators of 512 columns are half of all registers. With 4 warps or with
    128 rows they spill, and by pointers with tiles of 64 keys where those lie in several blocks, or
    where a contiguous cache leaves the addresses to registers; an 8-bit cache, which is widened in
    registers, leaves room for 32 rows. Elsewhere tiles are small enough for 64 KB.

    Args:
        rows: query positions times heads.
        block_size: rows of a block of the cache, 0 for a contiguous one.
        dtype: ``"float32"`` of queries, else of the cache ``"16 bits"`` or ``"8 bits"``.
        has_tma: whether tensor maps of the cache can be made.
    """
    if dtype == "float32" or gpu.capability[0] not in (9, 10):
        # Tensor maps only in the interpreter, so that tests see them.
        use_tma = has_tma and gpu.arch == INTERPRETER and block_size % 16 == 0
        return _config(16, 16, 4, 2, use_tma=use_tma)
    if dtype == "8 bits":
        return _config(16 if rows <= 16 else 32, 32, 8, 3)
    is_hopper = gpu.capability[0] == 9
    spread = block_size % 64 != 0
    if has_tma and not spread and is_hopper:
        # Half of 64 rows may be empty: these products are still faster than those of 32 rows.
        return (
            _config(16, 64, 8, 3, use_tma=True)
            if rows <= 16
            else _config(64, 64, 8, 2, use_tma=True)
        )
    if rows <= 16:
        return _config(16, 64, 8, 5 if spread else 3)
    if rows <= 32 or not is_hopper:
        return _config(32, 64, 8, 2)
    if spread:
        return _config(64, 16, 8, 3)
    return _config(64, 64, 8, 2) if block_size else _config(64, 32, 8, 3)


def _config(*sizes: int, use_tma: bool = False) -> Config:
    return {"path": "tma" if use_tma else "pointers", **tile(*sizes)}


def mla_candidates(gpu: Gpu, *shape: Dim) -> list[Config]:
    """Blocks of 16 to 64 rows and tiles of 16 to 64 keys, each way of loading them; Hopper's."""
    configs = [*_plain_candidates(), *HOPPER]
    return [config for config in configs if not mla_fits(gpu, config, *shape)]


def _plain_candidates() -> list[Config]:
    return [
        _config(block_m, block_n, num_warps, num_stages, use_tma=use_tma)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64)
        for num_warps in (4, 8)
        for num_stages in (2, 3)
        for use_tma in (False, True)
    ]


def mla_fits(
    gpu: Gpu, config: Config, rows: int, block_size: int, dtype: str, has_tma: bool
) -> str:
    """Why a configuration cannot be launched, or ""."""
    if config["path"] == "pointers":
        return ""
    if config["path"] == "hopper":
        if not serves(gpu):
            return f"Hopper's kernel is not for {gpu.arch}, or not with this version of Triton"
        if dtype != "16 bits" or rows % config["BLOCK_M"]:
            return "Hopper's kernel takes 16 bits and blocks of 64 heads"
    if not has_tma:
        return "no tensor map of the cache can be made"
    return "a tile lies in several blocks" if block_size % config["BLOCK_N"] else ""


mla_config = Tunable(
    "mla_attention",
    ("rows", "block_size", "dtype", "has_tma"),
    mla_heuristic,
    mla_candidates,
    fits=mla_fits,
)


@functools.cache
def pick_splits(programs: int, places: int, tiles: int, most: int, numbers: int) -> int:
    """The number of splits of a sequence that takes least time.

    Splits run in waves over ``places``, and their parts are merged. Times of 128 heads on 4,096
    keys: 24 sequences take 68 us in two splits, and 79 in the five that fill waves best; 48 take
    112 us in one and 133 in four; 3 take 23 us in sixteen and 36 in twenty-two
    (``bench.timing.Replay`` of ``mla_attention`` by each number, H200, cdd887f).

    Args:
        programs: blocks of rows of all sequences.
        places: programs that run at once.
        tiles: tiles of TIMED_KEYS keys that the longest sequence may have.
        most: the most splits there may be.
        numbers: how many numbers the result of all sequences has.
    """

    def time(splits: int) -> float:
        attending = cdiv(programs * splits, places) * cdiv(tiles, splits)
        if splits == 1:
            return attending
        each = numbers / NUMBERS_OF_TILE
        return attending + MERGING + splits * (each if splits <= EASILY_MERGED else 1.5 * each)

    return min(range(1, most + 1), key=time)


def fp8_conversion(cache: Tensor) -> str:
    """How bytes of the cache become numbers: as the GPU does, or where it cannot, in integers."""
    if cache.dtype != torch.float8_e4m3fn:
        return ""
    return "native" if capability(cache.device) >= (8, 9) else "integer"


class Cut(NamedTuple):
    """How a call is cut into programs.

    Attributes:
        row_blocks: blocks of (query, head) rows of a sequence.
        splits: parts that a sequence's keys are split into.
        min_keys: keys of a split, at least.
        capacity: keys a sequence may have.
        steps: strides of the result and of the logarithms, of which each split has its own.
    """

    row_blocks: int
    splits: int
    min_keys: int
    capacity: int
    steps: dict[str, int]


def attend_plain(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    block_tables: Tensor | None,
    kv_lens: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    cut: Cut,
    config: Config,
) -> None:
    """The result, or its parts if there are several splits, by the plain kernel."""
    batch, q_len, num_heads, width = q.shape
    num_blocks, block_size = cache.shape[:2]
    paged = block_tables is not None
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    block_l = max(next_power_of_2(kv_lora_rank), 16)
    block_r = max(next_power_of_2(width - kv_lora_rank), 16)
    latent_desc = rope_desc = None
    if config["path"] == "tma":
        latent_desc = describe(cache[..., :kv_lora_rank], block_size, block_n, block_l)
        rope_desc = describe(cache[..., kv_lora_rank:], block_size, block_n, block_r)
    variant = Variant(
        stride_row=cache.stride(1),
        block_size=block_size if paged else 0,
        lora=kv_lora_rank,
        rope=width - kv_lora_rank,
        block_m=block_m,
        block_n=block_n,
        block_l=block_l,
        block_r=block_r,
        one_block=block_size % block_n == 0,
        min_keys=cut.min_keys,
        fp8=fp8_conversion(cache),
        # A float32 query multiplies in float32 whatever the cache.
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        num_stages=config["num_stages"],
    )
    _mla_attention_kernel.launch(
        (cut.row_blocks * cut.splits * batch,),
        out_ptr=out,
        lse_ptr=lse,
        q_ptr=q,
        cache_ptr=cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache,
        scale_ptr=scale,
        block_tables_ptr=block_tables,
        kv_lens_ptr=kv_lens,
        latent_desc=latent_desc,
        rope_desc=rope_desc,
        **cut.steps,
        **strides_of("q", q, "batch", "query", "head"),
        stride_cache_block=cache.stride(0),
        stride_block_tables_batch=block_tables.stride(0) if paged else 0,
        num_heads=num_heads,
        num_row_blocks=cut.row_blocks,
        num_splits=cut.splits,
        num_blocks=num_blocks,
        capacity=cut.capacity,
        q_len=q_len,
        scale_log2=softmax_scale * LOG2_E.value,
        VARIANT=variant,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


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
    batch, q_len, num_heads, _ = q.shape
    y = q.new_empty(batch, q_len, num_heads, kv_lora_rank) if out is None else out
    if y.numel() == 0:
        return y
    block_size, paged = cache.shape[1], block_tables is not None
    capacity = block_size * (block_tables.shape[1] if paged else 1)
    rows = q_len * num_heads
    dtype = "float32" if q.dtype == torch.float32 else f"{8 * cache.itemsize} bits"
    has_tma = (
        cache.dtype == q.dtype
        and kv_lora_rank * cache.element_size() % 16 == 0
        and can_describe(cache[:, None])
    )
    shape = (rows, block_size if paged else 0, dtype, has_tma)
    config = mla_config.pick(q.device, *shape)
    attend = attend_plain
    if config["path"] == "hopper":
        from ferrum_triton.kernels.hopper import mla as hopper

        attend = hopper.attend_latents
        if not (has_tma and hopper.can_attend(q, shape[1], kv_lora_rank)):
            attend, config = attend_plain, mla_heuristic(gpu_of(q.device), *shape)
    row_blocks = cdiv(rows, config["BLOCK_M"])
    most_splits = min(cdiv(capacity, MIN_KEYS), MAX_SPLITS)
    splits = pick_splits(
        batch * row_blocks,
        processors(q.device),
        cdiv(capacity, TIMED_KEYS),
        most_splits,
        batch * rows * kv_lora_rank,
    )
    axes = ("batch", "query", "head")
    target, sums = y, lse
    steps = strides_of("out", y, *axes) | strides_of("lse", lse, *axes)
    steps |= {"stride_out_split": 0, "stride_lse_split": 0}
    if splits > 1:
        sizes = (splits, batch, q_len, num_heads)
        target = q.new_empty((*sizes, kv_lora_rank), dtype=torch.float32)
        sums = q.new_empty(sizes, dtype=torch.float32)
        steps = strides_of("out", target, "split", *axes)
        steps |= strides_of("lse", sums, "split", *axes)
    cut = Cut(row_blocks, splits, MIN_KEYS, capacity, steps)
    tensors = (target, sums, q, cache, scale, block_tables, kv_lens)
    attend(*tensors, kv_lora_rank, softmax_scale, cut, config)
    if splits > 1:
        merge_parts(y, lse, target, sums)
    return y
