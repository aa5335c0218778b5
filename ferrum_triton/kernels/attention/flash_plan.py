"""How flash attention is cut into programs: tiles, packing of heads, splits of the keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.kernels.attention.tensor_maps import LARGE, can_describe
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu, gpu_of
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Config, Dim, Tunable, cached_picks

# Keys and values of the heads that run side by side should stay in the L2 cache (50 to 60 MB on
# Hopper) beside the queries and outputs that pass through it.
CACHED_BYTES = 32 << 20

# More programs than this would cost more to merge than they gain.
MAX_SPLITS = 64

# Keys for which a split is worth its share of the merging.
MIN_KEYS = 128

# Queries from which on a block holds those of one head instead of a KV head's whole group.
MANY_QUERIES = 128

# Rows up to which loads through pointers are as fast as through tensor maps.
FEW_ROWS = 32


class FlashPlan(NamedTuple):
    """One launch.

    Attributes:
        tile: BLOCK_M, BLOCK_N, num_warps and num_stages.
        packed: rows of a block are (query, head of the group); else queries of one head.
        use_tma: keys and values come through tensor maps, and unless packed or split so do queries
            and outputs.
        one_loop: tiles that are not whole are masked in a branch: no pipeline drains between
            loops. Not where the rows past the device's lengths must be cleared, since that takes
            a tile out of shared memory.
        splits: programs that share one block's keys.
        min_tiles: tiles of keys a split takes at least.
        heads_at_once: heads whose blocks run side by side.
    """

    tile: Config
    packed: bool
    use_tma: bool
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
    packed = is_packed(group, q_len)
    rows = q_len * group if packed else q_len
    # In the interpreter always, so that tests see them.
    worth = q.device.type == "cpu" or (rows > FEW_ROWS and q.dtype != torch.float32)
    use_tma = worth and most_keys > 0 and all(can_describe(x) for x in (q, k, v, out))
    return _plan(
        q.device,
        gpu_of(q.device),
        q.dtype,
        batch * num_kv_heads,
        1 if packed else group,
        rows,
        head_dim,
        min(capacity, window + q_len - 1) if window else capacity,
        min(most_keys, window + q_len - 1) if window else most_keys,
        window > 0,
        packed,
        use_tma,
        use_tma and kv_lens is None,
    )


def is_packed(group: int, q_len: int) -> bool:
    """Whether the heads of a group are rows of one block."""
    return group > 1 and q_len < MANY_QUERIES


@cached_picks
def _plan(
    device: torch.device,
    gpu: Gpu,
    dtype: torch.dtype,
    kv_heads: int,  # of all sequences
    blocks_per_head: int,  # query heads that a KV head's programs take one by one
    rows: int,
    head_dim: int,
    capacity: int,  # of the cache, or what a window leaves of it
    most_keys: int,
    has_window: bool,
    packed: bool,
    use_tma: bool,
    one_loop: bool,
) -> FlashPlan:
    picked = flash_config.pick(device, rows, head_dim, dtype == torch.float32, one_loop, has_window)
    block_m, block_n = picked["BLOCK_M"], picked["BLOCK_N"]
    programs = kv_heads * blocks_per_head * cdiv(rows, block_m)

    # Four programs on each SM where rows are few and memory is what counts; where a block fills
    # the tensor cores, one. Then as few as give each the same share of the keys. Their number
    # follows the cache's capacity: with its length, a generation would meet new kernels.
    wanted = gpu.num_sms * (4 if block_m <= 32 else 1)
    tiles = cdiv(capacity, block_n)
    min_tiles = max(cdiv(32 if gpu.arch == INTERPRETER else MIN_KEYS, block_n), 1)
    share = max(cdiv(tiles, max(min(wanted // programs, MAX_SPLITS), 1)), min_tiles)

    room = max(CACHED_BYTES // max(2 * most_keys * head_dim * dtype.itemsize, 1), 1)
    together = next(n for n in range(min(room, kv_heads), 0, -1) if kv_heads % n == 0)
    return FlashPlan(
        picked,
        packed=packed,
        use_tma=use_tma,
        one_loop=one_loop,
        splits=max(cdiv(tiles, share), 1),
        min_tiles=min_tiles,
        heads_at_once=together * blocks_per_head,
    )


def flash_heuristic(
    gpu: Gpu, rows: int, head_dim: int, is_float32: bool, one_loop: bool, has_window: bool
) -> Config:
    """Tiles that spill nowhere: large ones where tensor maps and 227 KB of shared memory are."""
    if gpu.arch == INTERPRETER:
        # Tiles small enough that small samples have whole and crossed ones.
        return tile(16, 16, 1, 1)
    if is_float32:
        return tile(16, 32, 8, 1) if head_dim > 64 else tile(16, 32, 4, 2)
    if gpu.capability[0] in LARGE:
        return _large_tile(gpu.capability[0] == 9, rows, head_dim, one_loop, has_window)
    # What fits 99 KB of shared memory (sm_86, sm_89, sm_120) and the 64 KB of gfx942.
    if rows <= 16:
        return tile(16, 64, 4, 2 if head_dim > 128 else 3)
    if head_dim > 128:
        return tile(64, 32, 8, 1)
    return tile(64, 64, 4, 2) if rows <= 64 else tile(128, 64, 8, 2)


def _large_tile(
    is_hopper: bool, rows: int, head_dim: int, one_loop: bool, has_window: bool
) -> Config:
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        stages = 4 if rows <= 32 else 3
        return tile(block_m, 32, 4, 3) if head_dim > 128 else tile(block_m, 64, 4, stages)
    if head_dim > 128:
        # With two products for the scores the larger tile spills on Blackwell.
        return tile(128, 64, 8, 2) if is_hopper or head_dim > 192 else tile(64, 64, 4, 2)
    if rows < 2048 or not one_loop or head_dim <= 64:
        return tile(128, 64, 8, 3)
    if has_window and not is_hopper:
        return tile(64, 64, 4, 3)  # what does not spill there
    if rows >= 4096 or has_window:
        return tile(128, 128, 8, 3)
    # Two blocks to an SM hide each other's latencies.
    return tile(128, 64, 4, 2)


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    """The configuration of a block of block_m rows and tiles of block_n keys."""
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def flash_candidates(gpu: Gpu, rows: int, *_: Dim) -> list[Config]:
    """Blocks of up to 128 rows, on one warp for every 16 or 32 of them."""
    blocks = (16,) if rows <= 16 else (32, 64) if rows <= 64 else (64, 128)
    return [
        tile(block_m, block_n, num_warps, num_stages)
        for block_m in blocks
        for block_n in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4)
        if block_m < 128 or num_warps == 8 or block_n < 128
    ]


flash_config = Tunable(
    "flash_attention",
    ("rows", "head_dim", "is_float32", "one_loop", "has_window"),
    flash_heuristic,
    flash_candidates,
)
