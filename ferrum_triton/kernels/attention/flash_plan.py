"""How flash attention is cut into programs: tiles, packing of heads, splits of the keys."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.kernels.jit import capability, processors
from ferrum_triton.kernels.rows import cdiv

# Keys and values of the heads that run side by side should stay in the L2 cache (50 to 60 MB on
# Hopper) beside the queries and outputs that pass through it.
CACHED_BYTES = 32 << 20

# More programs than this would cost more to merge than they gain.
MAX_SPLITS = 64

# Keys for which a split is worth its share of the merging.
MIN_KEYS = 128

# Architectures with tensor maps and 227 KB of shared memory: Hopper, and Blackwell's large GPUs.
LARGE = (9, 10)

# Byte strides a tensor map can hold.
MAX_MAP_STRIDE = 1 << 40


class Tile(NamedTuple):
    """Rows of queries and keys a program works on at a time, and how."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class FlashPlan(NamedTuple):
    """One launch.

    Attributes:
        packed: rows of a block are (query, head of the group); else queries of one head.
        described: keys and values come through tensor descriptors, and unless packed or split so
            do queries and outputs.
        one_loop: tiles that are not whole are masked in a branch: no pipeline drains between
            loops. Not where the rows past the device's lengths must be cleared, since that takes
            a tile out of shared memory.
        splits: programs that share one block's keys.
        min_tiles: tiles of keys a split takes at least.
        heads_at_once: heads whose blocks run side by side.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    packed: bool
    described: bool
    one_loop: bool
    splits: int
    min_tiles: int
    heads_at_once: int


def choose_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    most_keys: int,
    kv_lens: Tensor | None,
    window: int,
) -> FlashPlan:
    """The plan for a call; of the sequences' lengths it knows only the bound ``most_keys``."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    packed = group > 1 and q_len < 128
    rows = q_len * group if packed else q_len
    # In the interpreter always, so that tests see them.
    worth = q.device.type == "cpu" or (rows > 32 and q.dtype != torch.float32)
    described = worth and most_keys > 0 and all(can_describe(x) for x in (q, k, v, out))
    return _plan(
        q.device,
        capability(q.device),
        q.dtype,
        batch * num_kv_heads,
        1 if packed else group,
        rows,
        head_dim,
        min(capacity, window + q_len - 1) if window else capacity,
        min(most_keys, window + q_len - 1) if window else most_keys,
        window > 0,
        packed,
        described,
        described and kv_lens is None,
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    compute: tuple[int, int],
    dtype: torch.dtype,
    kv_heads: int,  # of all sequences
    blocks_per_head: int,  # query heads that a KV head's programs take one by one
    rows: int,
    head_dim: int,
    capacity: int,  # of the cache, or what a window leaves of it
    most_keys: int,
    has_window: bool,
    packed: bool,
    described: bool,
    one_loop: bool,
) -> FlashPlan:
    tile = _tile(device, compute, dtype, rows, head_dim, one_loop, has_window)
    programs = kv_heads * blocks_per_head * cdiv(rows, tile.block_m)

    # Four programs on each processor where rows are few and memory is what counts; where a block
    # fills the tensor cores, one. Then as few as give each the same share of the keys. Their
    # number follows the cache's capacity: with its length, a generation would meet new kernels.
    wanted = processors(device) * (4 if tile.block_m <= 32 else 1)
    tiles = cdiv(capacity, tile.block_n)
    min_tiles = max(cdiv(32 if device.type == "cpu" else MIN_KEYS, tile.block_n), 1)
    share = max(cdiv(tiles, max(min(wanted // programs, MAX_SPLITS), 1)), min_tiles)

    room = max(CACHED_BYTES // max(2 * most_keys * head_dim * dtype.itemsize, 1), 1)
    together = next(n for n in range(min(room, kv_heads), 0, -1) if kv_heads % n == 0)
    return FlashPlan(
        *tile,
        packed=packed,
        described=described,
        one_loop=one_loop,
        splits=max(cdiv(tiles, share), 1),
        min_tiles=min_tiles,
        heads_at_once=together * blocks_per_head,
    )


def _tile(
    device: torch.device,
    compute: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    head_dim: int,
    one_loop: bool,
    has_window: bool,
) -> Tile:
    if device.type == "cpu":
        # The interpreter: tiles small enough that small samples have whole and crossed ones.
        return Tile(16, 16, 1, 1)
    if dtype == torch.float32:
        return Tile(16, 32, 8, 1) if head_dim > 64 else Tile(16, 32, 4, 2)
    if compute[0] in LARGE:
        return _tile_large(compute, rows, head_dim, one_loop, has_window)
    # Tiles that fit 99 KB of shared memory (sm_86 and up) and the 64 KB of gfx942, and spill
    # nowhere.
    if rows <= 16:
        return Tile(16, 64, 4, 2 if head_dim > 128 else 3)
    if head_dim > 128:
        return Tile(64, 32, 8, 1)
    return Tile(64, 64, 4, 2) if rows <= 64 else Tile(128, 64, 8, 2)


def _tile_large(
    compute: tuple[int, int], rows: int, head_dim: int, one_loop: bool, has_window: bool
) -> Tile:
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return Tile(block_m, 32, 4, 3) if head_dim > 128 else Tile(block_m, 64, 4, 4)
    if rows <= 64:
        return Tile(64, 32, 4, 3) if head_dim > 128 else Tile(64, 64, 4, 3)
    if head_dim > 128:
        # With two products for the scores the larger tile spills on Blackwell.
        return Tile(128, 64, 8, 2) if compute[0] == 9 or head_dim > 192 else Tile(64, 64, 4, 2)
    if rows < 2048 or not one_loop or head_dim <= 64:
        return Tile(128, 64, 8, 3)
    if has_window and compute[0] != 9:
        return Tile(64, 64, 4, 3)  # what does not spill there
    if rows >= 4096 or has_window:
        return Tile(128, 128, 8, 3)
    # Two blocks to a processor hide each other's latencies.
    return Tile(128, 64, 4, 2)


def can_describe(x: Tensor) -> bool:
    """Whether a tensor map can be made of x [batch, heads, rows, head_dim] on its device.

    It wants an address and strides in multiples of 16 bytes, and repeats nothing.
    """
    size = x.element_size()
    if x.device.type == "cpu":
        supported = x.dtype != torch.bfloat16  # numpy lacks it, and descriptors are not widened
    else:
        supported = capability(x.device)[0] in LARGE
    return (
        supported
        and x.data_ptr() % 16 == 0
        and x.shape[3] * size % 16 == 0
        and all(
            n == 1 or (step > 0 and step * size % 16 == 0 and step * size < MAX_MAP_STRIDE)
            for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
    )
