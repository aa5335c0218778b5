"""Paged pools as attention kernels read them: tiles of keys and values, folded into a softmax.

Paged decode and, for quantised pools, paged prefill go through :func:`attend_pages`; prefill over a
pool of floats has a loop of its own (:mod:`ferrum_triton.kernels.attention.float_tiles`).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.attention.codes import add_values, dot_keys, in_quarters
from ferrum_triton.kernels.attention.softmax import LOG2_E, Softmax, soft_cap, weigh
from ferrum_triton.kernels.attention.strips import add_strips, dot_strips, load_strips
from ferrum_triton.kernels.heads import in_pieces
from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.kv_pool import FORMATS
from ferrum_triton.kernels.pdl import prefetch_l2
from ferrum_triton.ops.kv_pool import pool_strides, scale_strides, token_view

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Steps:
    """Strides of a cache or its scales, by block, head, slot and piece of a vector."""

    block: int
    head: int
    slot: int
    piece: int = 0


@dataclass(frozen=True)
class PoolLayout:
    """What kernels specialise on of a pool.

    Attributes:
        k, v, k_scales, v_scales: strides. They are constants, which saves kernels registers.
        scales: ``"slot"``, ``"head"`` or, without any, ``""``.
        format: ``"e4m3"`` if fp8 comes as bits, else ``""``.
        pairs: PTX that unpacks words of codes, ``"int8"``, ``"e4m3"`` or ``""``.
        quantised: whether the pool holds codes.
        wide: whether a page extends over 2^31 elements.
        block_size: tokens of a page.
        k_piece, v_piece: elements of a piece of a vector; 0 where vectors are contiguous.
    """

    k: Steps
    v: Steps
    k_scales: Steps
    v_scales: Steps
    scales: str
    format: str
    pairs: str
    quantised: bool
    wide: bool
    block_size: int
    k_piece: int
    v_piece: int

    @property
    def alike(self) -> bool:
        """Whether keys and values have the same strides."""
        return self.k == self.v


@dataclass(frozen=True)
class Attention:
    """What paged kernels specialise on of the attention and its tiles.

    Attributes:
        group: query heads per KV head.
        block_m: rows of a block, which are (query, head of the group).
        block_n: keys of a tile.
        block_d: power of two >= head_dim.
        precision: how tensor cores multiply float32, as ``tl.dot`` takes it.
        strip: columns of a head's second strip; 0 where a block has the whole head.
        ahead: whether decode takes tiles by :func:`.float_tiles.attend_floats`.
    """

    group: int
    head_dim: int
    has_window: bool
    has_softcap: bool
    block_m: int
    block_n: int
    block_d: int
    precision: str
    strip: int = 0
    ahead: bool = False


class Pool(NamedTuple):
    """The tensors of a pool, or of one KV head of it."""

    k_ptr: Any
    v_ptr: Any
    k_scales_ptr: Any
    v_scales_ptr: Any
    num_blocks: Any


class Queries(NamedTuple):
    """A block of queries.

    Attributes:
        q: rows, [BLOCK_M, BLOCK_D]; their quarters where the pool's codes come in words; or their
            strips.
        position: position of each row's query, [BLOCK_M].
        score_factor: factor of their products with keys as those lie in the pool.
        value_factor: factor of sums over values as those lie in the pool.
        softcap: cap of scores, where there is one.
        sliding_window: keys a query sees, with a window.
    """

    q: Any
    position: Any
    score_factor: Any
    value_factor: Any
    softcap: Any
    sliding_window: Any


class Tiles(NamedTuple):
    """Tiles [first, end) of one sequence, of which every query sees all of [whole, whole_end).

    Attributes:
        keys: keys of the sequence.
        table_ptr: its block table.
    """

    first: Any
    whole: Any
    whole_end: Any
    end: Any
    keys: Any
    table_ptr: Any


@triton.jit
def head_of(pool, kv_head, POOL: tl.constexpr):
    """One KV head of a pool."""
    k_ptr = pool.k_ptr + kv_head * POOL.k.head
    v_ptr = pool.v_ptr + kv_head * POOL.v.head
    # Device functions return no None: the caches stand where scales would, and are not read.
    k_scales_ptr = k_ptr
    v_scales_ptr = v_ptr
    if POOL.scales != "":
        k_scales_ptr = pool.k_scales_ptr + kv_head * POOL.k_scales.head
        v_scales_ptr = pool.v_scales_ptr + kv_head * POOL.v_scales.head
    return Pool(k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, pool.num_blocks)


@triton.jit
def scaled_queries(q, position, scale, softcap, sliding_window, head, POOL: tl.constexpr):
    """Queries as the products take them, with the factors of their scores and results.

    Args:
        scale: factor of scores, times log2(e) unless they are capped.
        head: a KV head of the pool.
    """
    k_factor, v_factor = 1.0, 1.0
    if POOL.scales == "head":
        k_factor = tl.load(head.k_scales_ptr).to(tl.float32)
        v_factor = tl.load(head.v_scales_ptr).to(tl.float32)
    if POOL.format == "e4m3":
        k_factor, v_factor = k_factor * 256.0, v_factor * 256.0
    score_factor = scale * k_factor
    if POOL.quantised and q.dtype == tl.bfloat16:
        # Codes are exact in float16, whose conversions are the cheapest. So is q, divided by 16 for
        # range: what is lost lies below 2^-20.
        q = (q.to(tl.float32) * 0.0625).to(tl.float16)
        score_factor *= 16.0
    if head.k_ptr.dtype.element_ty == tl.int32:
        q = in_quarters(q)
    return Queries(q, position, score_factor, v_factor, softcap, sliding_window)


@triton.jit
def capped(scores, softcap, EXACT: tl.constexpr):
    """softcap · tanh(score / softcap), in base 2."""
    return soft_cap(scores * (2.0 * LOG2_E / softcap), softcap * LOG2_E, EXACT)


@triton.jit
def sink_logits(sinks_ptr, head, in_rows):
    """Logits of the rows' sinks in base 2, -inf where there are none."""
    sink_log2 = tl.full(in_rows.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink_log2 = tl.load(sinks_ptr + head, mask=in_rows, other=0.0).to(tl.float32) * LOG2_E
    return sink_log2


@triton.jit
def place_keys(
    key,
    table_ptr,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Block and slot of keys >= 0.

    Unsigned: then a power of two divides in one shift, and one comparison holds an entry to the
    pool's blocks, negative ones too. Slots take 64 bits only where their strides need it.

    Args:
        CACHE: the cache modifier of the table's loads.
    """
    key = key.to(tl.uint32)
    entry = tl.load(table_ptr + key // BLOCK_SIZE, cache_modifier=CACHE).to(tl.uint32)
    block = tl.minimum(entry, (num_blocks - 1).to(tl.uint32)).to(tl.int64)
    slot = (key % BLOCK_SIZE).to(tl.int64 if WIDE else tl.int32)
    return block, slot


@triton.jit
def load_scales(n, tiles, head, POOL: tl.constexpr):
    """Scales of the slots of keys n, past the sequence's end of its last one."""
    BLOCK_SIZE: tl.constexpr = POOL.block_size
    WIDE: tl.constexpr = POOL.wide
    key = tl.maximum(tl.minimum(n, tiles.keys - 1), 0)
    block, slot = place_keys(key, tiles.table_ptr, head.num_blocks, BLOCK_SIZE, WIDE, "")
    k_slots = block * POOL.k_scales.block + slot * POOL.k_scales.slot
    v_slots = block * POOL.v_scales.block + slot * POOL.v_scales.slot
    k_scale = tl.load(head.k_scales_ptr + k_slots).to(tl.float32)
    v_scale = tl.load(head.v_scales_ptr + v_slots).to(tl.float32)
    return k_scale, v_scale


@triton.jit
def prefetch_pages(head, tiles, POOL: tl.constexpr, ATTENTION: tl.constexpr):
    """Ask for the keys and values of tiles to be brought to L2, while others may still write them.

    Lengths and tables may be about to change too. So what they lead to is kept inside the pool and
    used for nothing else, and they are read past L1, which would keep what they were.

    Args:
        head: a KV head of the pool, whose vectors are contiguous.
    """
    DTYPE: tl.constexpr = head.k_ptr.dtype.element_ty
    # Elements of a vector, of which codes come four to a word, and of a line of 128 bytes.
    LENGTH: tl.constexpr = ATTENTION.head_dim // (4 if DTYPE == tl.int32 else 1)
    PER_LINE: tl.constexpr = 1024 // DTYPE.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((LENGTH + PER_LINE - 1) // PER_LINE)
    line = tl.minimum(tl.arange(0, LINES) * PER_LINE, LENGTH - 1)[None, :]
    for tile in range(tiles.first, tiles.end):
        n = tile * ATTENTION.block_n + tl.arange(0, ATTENTION.block_n)
        key = tl.maximum(tl.minimum(n, tiles.keys - 1), 0)
        block, slot = place_keys(
            key, tiles.table_ptr, head.num_blocks, POOL.block_size, POOL.wide, ".cg"
        )
        prefetch_l2(head.k_ptr + (block * POOL.k.block + slot * POOL.k.slot)[:, None] + line)
        prefetch_l2(head.v_ptr + (block * POOL.v.block + slot * POOL.v.slot)[:, None] + line)


@triton.jit
def attend_pages(
    state,
    queries,
    head,  # a KV head of the pool
    tiles,
    first_tile,
    end_tile,
    MASKED: tl.constexpr,  # tiles may hold keys that some query does not see
    POOL: tl.constexpr,
    ATTENTION: tl.constexpr,
):
    """Fold the tiles [first_tile, end_tile) into the softmax."""
    BLOCK_N: tl.constexpr = ATTENTION.block_n
    BLOCK_D: tl.constexpr = ATTENTION.block_d
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    PRECISION: tl.constexpr = ATTENTION.precision
    BLOCK_SIZE: tl.constexpr = POOL.block_size
    WIDE: tl.constexpr = POOL.wide
    K_PIECE: tl.constexpr = POOL.k_piece
    V_PIECE: tl.constexpr = POOL.v_piece
    FORMAT: tl.constexpr = POOL.format
    PAIRS: tl.constexpr = POOL.pairs
    SLOT_SCALES: tl.constexpr = POOL.scales == "slot"
    # Of the cache's type: codes are integers, four to a word or alone, or floats of 8 bits.
    zero: tl.constexpr = 0.0 if head.k_ptr.dtype.element_ty.is_floating() else 0
    CODES: tl.constexpr = 4 if head.k_ptr.dtype.element_ty == tl.int32 else 1
    STRIP: tl.constexpr = ATTENTION.strip
    DTYPE: tl.constexpr = queries.q[0].dtype if CODES == 4 or STRIP > 0 else queries.q.dtype
    EXACT: tl.constexpr = DTYPE == tl.float32
    d = tl.arange(0, BLOCK_D // CODES)[None, :]
    in_head = d < HEAD_DIM // CODES
    K_STEP: tl.constexpr = POOL.k.piece
    V_STEP: tl.constexpr = POOL.v.piece
    k_d, v_d = in_pieces(d, K_STEP, K_PIECE), in_pieces(d, V_STEP, V_PIECE)
    if SLOT_SCALES:
        n = first_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_scale, v_scale = load_scales(n, tiles, head, POOL)
    for tile in range(first_tile, end_tile):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Past the sequence's end its last key is read again, which no mask costs anything: the
        # weight is 0, and it is a key that somebody sees.
        key = tl.minimum(n, tiles.keys - 1) if MASKED else n
        block, slot = place_keys(key, tiles.table_ptr, head.num_blocks, BLOCK_SIZE, WIDE, "")
        k_rows = head.k_ptr + (block * POOL.k.block + slot * POOL.k.slot)[:, None]
        v_rows = head.v_ptr + (block * POOL.v.block + slot * POOL.v.slot)[:, None]
        if STRIP > 0:
            k, v = load_strips(k_rows, STRIP, HEAD_DIM), load_strips(v_rows, STRIP, HEAD_DIM)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_rows + k_d, mask=in_head, other=zero)  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_rows + v_d, mask=in_head, other=zero)
        else:
            k = tl.load(k_rows + k_d)
            v = tl.load(v_rows + v_d)
        if SLOT_SCALES:
            # Too narrow to be loaded ahead by the compiler's pipeline, so a tile ahead by hand.
            next_k_scale, next_v_scale = load_scales(n + BLOCK_N, tiles, head, POOL)

        if STRIP > 0:
            scores = dot_strips(queries.q, k, PRECISION)
        else:
            scores = dot_keys(queries.q, k, FORMAT, PAIRS, PRECISION)
        if SLOT_SCALES:
            scores *= k_scale[None, :]
        scores *= queries.score_factor
        if ATTENTION.has_softcap:
            scores = capped(scores, queries.softcap, EXACT)
        if MASKED:
            # A query's position lies inside the sequence; rows without one are not stored.
            visible = n[None, :] <= queries.position[:, None]
            if ATTENTION.has_window:
                oldest = queries.position[:, None] - queries.sliding_window
                visible = visible & (n[None, :] > oldest)
            scores = tl.where(visible, scores, float("-inf"))
        # The factor may be negative, so it is in the scores already.
        weights, rescale, row_max = weigh(scores, 1.0, state.row_max)
        row_sum = state.row_sum * rescale + tl.sum(weights, axis=1)
        if SLOT_SCALES:
            weights *= v_scale[None, :]
        if STRIP > 0:
            acc = add_strips(state.acc, rescale, weights, v, PRECISION)
        else:
            acc = add_values(state.acc, rescale, weights, v, DTYPE, FORMAT, PAIRS, PRECISION)
        state = Softmax(acc, row_max, row_sum)
        if SLOT_SCALES:
            k_scale, v_scale = next_k_scale, next_v_scale
    return state


class PoolTensors(NamedTuple):
    """A pool as launches take it.

    Attributes:
        k, v: caches; codes in words of four where a kernel can take them, fp8 as bytes where the
            GPU cannot convert it.
        k_scales, v_scales: None of a float pool.
        layout: what kernels specialise on.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    num_blocks: int
    num_kv_heads: int
    layout: PoolLayout

    @property
    def codes(self) -> str:
        """The format of codes that are not in words, ``"e4m3"`` or ``"int8"``; else ""."""
        if not self.layout.quantised:
            return ""
        is_fp8 = self.k.dtype == torch.float8_e4m3fn or self.layout.format == "e4m3"
        return "e4m3" if is_fp8 else "int8"

    def pointers(self) -> dict[str, Tensor | None]:
        """The tensors under their names in kernels."""
        return {
            "k_cache_ptr": self.k,
            "v_cache_ptr": self.v,
            "k_scales_ptr": self.k_scales,
            "v_scales_ptr": self.v_scales,
        }


def is_narrow(pool: PoolTensors) -> bool:
    """Whether 32 bits hold the offset of every slot of a head."""
    return all(
        pool.num_blocks * steps.block + pool.layout.block_size * steps.slot <= 2**32
        for steps in (pool.layout.k, pool.layout.v)
    )


def as_pool(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    layout: str,
    in_words: bool = False,
) -> PoolTensors:
    """A pool as the kernels take it.

    Args:
        in_words: whether the kernel can read codes in words of four, if the caches allow it.
    """
    num_blocks, block_size, num_kv_heads = token_view(v_cache, layout).shape[:3]
    quantised = k_cache.dtype in FORMATS
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    gpu = capability(k_cache.device)
    as_bits = is_fp8 and gpu < (8, 9)
    pairs = ""
    pieces = (k_cache.shape[-1], 1) if layout == "vllm_x" else (0, 0)
    if in_words and quantised and are_words(k_cache, layout) and are_words(v_cache, layout):
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
        pairs = "" if as_bits or gpu < (8, 0) else "e4m3" if is_fp8 else "int8"
    elif as_bits:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    kind, k_steps, v_steps = "", (0, 0, 0), (0, 0, 0)
    if not quantised or k_scales is None or v_scales is None:
        k_scales = v_scales = None
    elif k_scales.dim() == 3:
        kind = "slot"
        k_steps, v_steps = scale_strides(k_scales, layout), scale_strides(v_scales, layout)
    else:
        kind = "head"
        # One scale for all heads is one that never advances.
        k_steps, v_steps = (
            (0, 0 if s.shape[0] == 1 else s.stride(0), 0) for s in (k_scales, v_scales)
        )
    strides = pool_strides(k_cache, layout), pool_strides(v_cache, layout), k_steps, v_steps
    form = _layout(strides, kind, "e4m3" if as_bits else "", pairs, quantised, block_size, pieces)
    return PoolTensors(k_cache, v_cache, k_scales, v_scales, num_blocks, num_kv_heads, form)


@functools.lru_cache(maxsize=4096)
def _layout(
    strides: tuple[tuple[int, ...], ...],
    scales: str,
    code_format: str,
    pairs: str,
    quantised: bool,
    block_size: int,
    pieces: tuple[int, int],
) -> PoolLayout:
    steps = [Steps(*of_tensor) for of_tensor in strides]
    return PoolLayout(
        *steps,
        scales=scales,
        format=code_format,
        pairs=pairs,
        quantised=quantised,
        wide=max(of_tensor.slot for of_tensor in steps) * block_size > INT32_MAX,
        block_size=block_size,
        k_piece=pieces[0],
        v_piece=pieces[1],
    )


def are_words(cache: Tensor, layout: str) -> bool:
    """Whether the vectors of a cache of bytes are whole words, and enough for tensor cores."""
    return (
        layout != "vllm_x"
        and cache.shape[-1] > 32
        and cache.data_ptr() % 4 == 0
        and all(n % 4 == 0 for n in (cache.shape[-1], cache.storage_offset(), *cache.stride()[:3]))
    )
