"""Tiles of keys and values, read from the pages of a pool and folded into a running softmax."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.codes import add_values, dot_keys
from ferrum_triton.kernels.attention.softmax import LOG2_E, soft_cap
from ferrum_triton.kernels.heads import in_pieces
from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.kv_pool import FORMATS
from ferrum_triton.ops.kv_pool import pool_strides, scale_strides, token_view


@triton.jit
def scaled_queries(
    q,
    scale,
    k_scales_ptr,
    v_scales_ptr,
    k_scale_offset,  # of the KV head
    v_scale_offset,
    SCALES: tl.constexpr,  # "slot", "head" or ""
    FORMAT: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Queries as the products take them, the factor of their scores, and that of the result."""
    k_factor, v_factor = 1.0, 1.0
    if SCALES == "head":
        k_factor = tl.load(k_scales_ptr + k_scale_offset).to(tl.float32)
        v_factor = tl.load(v_scales_ptr + v_scale_offset).to(tl.float32)
    if FORMAT == "e4m3":
        k_factor, v_factor = k_factor * 256.0, v_factor * 256.0
    score_factor = scale * k_factor
    if QUANTISED and q.dtype == tl.bfloat16:
        # Codes are exact in float16, whose conversions are the cheapest. So is q, divided by 16 for
        # range: what is lost lies below 2^-20.
        q = (q.to(tl.float32) * 0.0625).to(tl.float16)
        score_factor *= 16.0
    return q, score_factor, v_factor


@triton.jit
def capped(scores, softcap, HAS_CAP: tl.constexpr, EXACT: tl.constexpr):
    """Scores in base 2: softcap · tanh(s / softcap); where there is no cap, they are already."""
    if HAS_CAP:
        scores = soft_cap(scores * (2.0 * LOG2_E / softcap), softcap * LOG2_E, EXACT)
    return scores


@triton.jit
def place_keys(key, table_ptr, num_blocks, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Block and slot of keys >= 0.

    Unsigned: then a power of two divides in one shift, and one comparison holds an entry to the
    pool's blocks, negative ones too. Slots take 64 bits only where their strides need it.
    """
    key = key.to(tl.uint32)
    entry = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.uint32)
    block = tl.minimum(entry, (num_blocks - 1).to(tl.uint32)).to(tl.int64)
    slot = (key % BLOCK_SIZE).to(tl.int64 if WIDE else tl.int32)
    return block, slot


@triton.jit
def load_scales(
    n,  # keys
    keys,
    table_ptr,
    k_scales_ptr,
    v_scales_ptr,
    stride_k_scales_block,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_slot,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scales of the slots of keys, past the sequence's end of its last one."""
    key = tl.maximum(tl.minimum(n, keys - 1), 0)
    block, slot = place_keys(key, table_ptr, num_blocks, BLOCK_SIZE, WIDE)
    k_slots = block * stride_k_scales_block + slot * stride_k_scales_slot
    v_slots = block * stride_v_scales_block + slot * stride_v_scales_slot
    k_scale = tl.load(k_scales_ptr + k_slots).to(tl.float32)
    v_scale = tl.load(v_scales_ptr + v_slots).to(tl.float32)
    return k_scale, v_scale


@triton.jit
def attend_pages(
    acc,  # [BLOCK_M, BLOCK_D], or its quarters
    m_i,  # [BLOCK_M], the largest score so far, in base 2
    l_i,  # [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D], or its quarters
    position,  # [BLOCK_M], of each row's query
    first_tile,
    end_tile,
    keys,  # of the sequence
    table_ptr,
    k_head_ptr,
    v_head_ptr,
    k_scales_ptr,
    v_scales_ptr,
    stride_k_block,
    stride_k_slot,
    stride_k_piece,
    stride_v_block,
    stride_v_slot,
    stride_v_piece,
    stride_k_scales_block,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_slot,
    num_blocks,
    sliding_window,
    score_factor,
    softcap,
    WIDE: tl.constexpr,  # a page extends over 2^31 elements
    MASKED: tl.constexpr,  # tiles may hold keys that some query does not see
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SLOT_SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Of the cache's type: codes are integers, four to a word or alone, or floats of 8 bits.
    zero: tl.constexpr = 0.0 if k_head_ptr.dtype.element_ty.is_floating() else 0
    CODES: tl.constexpr = 4 if k_head_ptr.dtype.element_ty == tl.int32 else 1
    DTYPE: tl.constexpr = q[0].dtype if CODES == 4 else q.dtype
    d = tl.arange(0, BLOCK_D // CODES)[None, :]
    in_head = d < HEAD_DIM // CODES
    k_d, v_d = in_pieces(d, stride_k_piece, K_PIECE), in_pieces(d, stride_v_piece, V_PIECE)
    if SLOT_SCALES:
        k_scale, v_scale = load_scales(
            first_tile * BLOCK_N + tl.arange(0, BLOCK_N), keys, table_ptr, k_scales_ptr,
            v_scales_ptr, stride_k_scales_block, stride_k_scales_slot, stride_v_scales_block,
            stride_v_scales_slot, num_blocks, BLOCK_SIZE, WIDE,
        )  # fmt: skip
    for tile in range(first_tile, end_tile):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Past the sequence's end its last key is read again, which no mask costs anything: the
        # weight is 0, and it is a key that somebody sees.
        key = tl.minimum(n, keys - 1) if MASKED else n
        block, slot = place_keys(key, table_ptr, num_blocks, BLOCK_SIZE, WIDE)
        k_rows = k_head_ptr + (block * stride_k_block + slot * stride_k_slot)[:, None]
        v_rows = v_head_ptr + (block * stride_v_block + slot * stride_v_slot)[:, None]
        if HEAD_DIM < BLOCK_D:
            k = tl.load(k_rows + k_d, mask=in_head, other=zero)  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_rows + v_d, mask=in_head, other=zero)
        else:
            k = tl.load(k_rows + k_d)
            v = tl.load(v_rows + v_d)
        if SLOT_SCALES:
            # Too narrow to be loaded ahead by the compiler's pipeline, so a tile ahead by hand.
            next_k_scale, next_v_scale = load_scales(
                n + BLOCK_N, keys, table_ptr, k_scales_ptr, v_scales_ptr, stride_k_scales_block,
                stride_k_scales_slot, stride_v_scales_block, stride_v_scales_slot, num_blocks,
                BLOCK_SIZE, WIDE,
            )  # fmt: skip

        scores = dot_keys(q, k, FORMAT, PAIRS, PRECISION)
        if SLOT_SCALES:
            scores *= k_scale[None, :]
        scores = capped(scores * score_factor, softcap, HAS_CAP, DTYPE == tl.float32)
        if MASKED:
            # A query's position lies inside the sequence; rows without one are not stored.
            visible = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                visible = visible & (n[None, :] > position[:, None] - sliding_window)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        if SLOT_SCALES:
            p *= v_scale[None, :]
        acc = add_values(acc, alpha, p, v, DTYPE, FORMAT, PAIRS, PRECISION)
        m_i = m_new
        if SLOT_SCALES:
            k_scale, v_scale = next_k_scale, next_v_scale
    return acc, m_i, l_i


@triton.jit
def attend_range(
    acc,
    m_i,
    l_i,
    q,
    position,
    first_tile,
    whole_start,  # tiles [whole_start, whole_end) are seen by every query
    whole_end,
    end_tile,
    keys,
    seq,
    kv_head,
    block_tables_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    stride_table,
    stride_k_block,
    stride_k_head,
    stride_k_slot,
    stride_k_piece,
    stride_v_block,
    stride_v_head,
    stride_v_slot,
    stride_v_piece,
    stride_k_scales_block,
    stride_k_scales_head,
    stride_k_scales_slot,
    stride_v_scales_block,
    stride_v_scales_head,
    stride_v_scales_slot,
    num_blocks,
    sliding_window,
    score_factor,
    softcap,
    EDGE_FIRST: tl.constexpr,  # there are tiles before whole_start
    HAS_WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_PIECE: tl.constexpr,
    V_PIECE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the tiles [first_tile, end_tile) of one sequence and KV head, masking only edges."""
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    k_head_ptr = k_cache_ptr + kv_head * stride_k_head
    v_head_ptr = v_cache_ptr + kv_head * stride_v_head
    slot_scales: tl.constexpr = SCALES == "slot"
    k_scales_head, v_scales_head = k_scales_ptr, v_scales_ptr
    if slot_scales:
        k_scales_head = k_scales_ptr + kv_head * stride_k_scales_head
        v_scales_head = v_scales_ptr + kv_head * stride_v_scales_head
    for part in tl.static_range(3):
        if (part == 0 and EDGE_FIRST) or (part == 1 and HAS_WHOLE) or part == 2:
            start = first_tile if part == 0 else whole_start if part == 1 else whole_end
            end = whole_start if part == 0 else whole_end if part == 1 else end_tile
            acc, m_i, l_i = attend_pages(
                acc, m_i, l_i, q, position, start, end, keys, table_ptr, k_head_ptr, v_head_ptr,
                k_scales_head, v_scales_head, stride_k_block, stride_k_slot, stride_k_piece,
                stride_v_block, stride_v_slot, stride_v_piece, stride_k_scales_block,
                stride_k_scales_slot, stride_v_scales_block, stride_v_scales_slot, num_blocks,
                sliding_window, score_factor, softcap, WIDE, part != 1, HAS_WINDOW, HAS_CAP,
                slot_scales, FORMAT, PAIRS, BLOCK_SIZE, K_PIECE, V_PIECE, HEAD_DIM, BLOCK_N,
                BLOCK_D, PRECISION,
            )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def sink_state(sinks_ptr, head, in_rows):
    """(m, l) of rows whose head's sink is all they have seen, in base 2."""
    sink = tl.load(sinks_ptr + head, mask=in_rows, other=0.0).to(tl.float32)
    m_i = sink * LOG2_E
    return m_i, tl.where(m_i > float("-inf"), 1.0, 0.0)


@triton.jit
def finish_rows(acc, m_i, l_i, v_factor):
    """(result, log of the sum of exp in base 2): 0 and -inf of rows that saw nothing."""
    acc = acc * (v_factor / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    return acc, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(l_i))


INT32_MAX = 2**31 - 1


class Pool(NamedTuple):
    """A pool as the kernels take it.

    Attributes:
        k, v: the caches; codes in words of four where a kernel can take them, fp8 as bytes where
            the GPU cannot convert it.
        k_scales, v_scales: None of a float pool.
        strides: by block, head, slot and piece of k and of v; then those of the scales.
        constexprs: what kernels specialise on.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    num_blocks: int
    block_size: int
    num_kv_heads: int
    strides: tuple[int, ...]
    constexprs: dict[str, Any]


def as_pool(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    layout: str,
    in_words: bool = False,
) -> Pool:
    """What the kernels take of a pool.

    Args:
        in_words: the kernel can read codes in words of four, if the caches allow it.
    """
    num_blocks, block_size, num_kv_heads = token_view(v_cache, layout).shape[:3]
    quantised = k_cache.dtype in FORMATS
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    gpu = capability(k_cache.device)
    as_bits = is_fp8 and gpu < (8, 9)
    pairs = ""
    k_piece, v_piece = (k_cache.shape[-1], 1) if layout == "vllm_x" else (0, 0)
    if in_words and quantised and are_words(k_cache, layout) and are_words(v_cache, layout):
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
        pairs = "" if as_bits or gpu < (8, 0) else "e4m3" if is_fp8 else "int8"
    elif as_bits:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    kind, strides = "", (0,) * 6
    if not quantised or k_scales is None or v_scales is None:
        k_scales = v_scales = None
    elif k_scales.dim() == 3:
        kind = "slot"
        strides = (*scale_strides(k_scales, layout), *scale_strides(v_scales, layout))
    else:
        kind = "head"
        # One scale for all heads is one that never advances.
        of_head = (0 if s.shape[0] == 1 else s.stride(0) for s in (k_scales, v_scales))
        strides = tuple(n for stride in of_head for n in (0, stride, 0))
    k_strides, v_strides = pool_strides(k_cache, layout), pool_strides(v_cache, layout)
    return Pool(
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        num_blocks,
        block_size,
        num_kv_heads,
        (*k_strides, *v_strides, *strides),
        {
            "SCALES": kind,
            "FORMAT": "e4m3" if as_bits else "",
            "PAIRS": pairs,
            "QUANTISED": quantised,
            "WIDE": max(k_strides[2], v_strides[2], strides[2], strides[5]) * block_size
            > INT32_MAX,
            "BLOCK_SIZE": block_size,
            "K_PIECE": k_piece,
            "V_PIECE": v_piece,
        },
    )


def are_words(cache: Tensor, layout: str) -> bool:
    """Whether the vectors of a cache of bytes are whole words, and enough for tensor cores."""
    return (
        layout != "vllm_x"
        and cache.shape[-1] > 32
        and cache.data_ptr() % 4 == 0
        and all(n % 4 == 0 for n in (cache.shape[-1], cache.storage_offset(), *cache.stride()[:3]))
    )


def token_strides(x: Tensor, is_varlen: bool) -> tuple[int, int, int]:
    """Strides by sequence, token and head; tokens of all sequences are in one row if varlen."""
    return (0 if is_varlen else x.stride(0), x.stride(1), x.stride(2))
