"""How flash attention is cut into programs: packing of heads, splits of the keys, their order.

There are two kernels. The plain one takes every call; Hopper's (``path: "hopper"``, see
:mod:`ferrum_triton.kernels.hopper.attention`) those of many queries whose tensors have tensor maps.
It packs no heads and splits no keys: with few queries, a call waits for memory, and with few blocks
of many keys, for most of the GPU. Tiles are chosen in :mod:`.flash_config`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.kernels.attention.flash_config import (
    MANY_QUERIES,
    OTHERS,
    SQUARE,
    TRIANGLE,
    flash_config,
    plain_heuristic,
)
from ferrum_triton.kernels.attention.tensor_maps import can_describe
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu, gpu_of
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Config, cached_picks

# Keys and values of the heads that run side by side should stay in the L2 cache (50 to 60 MB on
# Hopper) beside the queries and outputs that pass through it.
CACHED_BYTES = 32 << 20

# As few heads as possible run side by side, if sequences have up to so many queries. More would
# most likely ask device memory for all keys in the first turns of the programs, and then for none.
# 512 queries of sixteen sequences of sixteen heads of 64 take 38.5 us for 41.2, 255 of 64 of 32
# heads over 8 of 128 132.2 for 136.9, and 1,024 of eight with 32 heads over 32 151.7 for 155.8.
# Longer ones gain nothing: 2,048 of four with 32 heads over 8 of 96 take 219.5 us for 213.0. Where
# they see all their keys, so that blocks are alike, the same holds for every length: 256 of sixteen
# sequences of sixteen heads of 64 take 17.6 us for 18.9, and 4,096 of two 325.8 for 332.5
# (``bench.timing.Replay`` of ``flash_attention`` with each, H200, copies of cccdbea).
SHORT = 1024

# More programs than this would cost more to merge than they gain.
MAX_SPLITS = 64

# Keys for which a split is worth its share of the merging.
MIN_KEYS = 128

# Rows up to which loads through pointers are as fast as through tensor maps, except on Hopper.
FEW_ROWS = 32

# The least keys, and the least keys for each block, for which the plain kernel gains by splitting a
# call of few blocks among idle SMs. With 128 queries of 8 heads of 128, it takes 9.2 us on 512 keys
# and Hopper's kernel 11.2; 11.1 and 18.1 on 1,024. With 32 heads, it takes 15.6 and 11.4 on 512;
# 17.7 and 18.4 on 1,024. With 256 queries of 32 heads, it takes 19.9 and 16.6 on 1,024; 27.9 and
# 28.0 on 2,048 (``bench.timing.Replay`` of ``flash_attention`` with each, H200, c6cf87f). With 129
# queries of 32 heads of 128, each in blocks of its own, it takes 14.6 us on 512 keys and Hopper's
# kernel 11.2; 18.5 and 16.8 on 1,024; 26.9 and 28.1 on 2,048; 43.3 and 50.3 on 4,096 (the same
# under ``flash_config.forced`` of each, cdd887f).
SPLIT_KEYS, SPLIT_KEYS_OF_BLOCK = 512, 32

# Splits of a block up to which heads are packed that fill fewer blocks together. With 129 queries
# of 32 heads over 8 of 128, a block has two splits. Packed, they take 22.5 us for 26.9 on 2,048
# keys, and 55.6 for 75.8 on 8,192. With 8 heads over 4 of 256 a block has eight, and packed heads
# take 23.0 us for 20.3 on 2,048 keys (``bench.timing.Replay`` of ``flash_attention`` with each,
# H200, c6cf87f).
FEW_SPLITS = 3


class FlashPlan(NamedTuple):
    """One launch.

    Attributes:
        tile: BLOCK_M, BLOCK_N, num_warps and num_stages; with a path, that of Hopper's kernel.
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
    causal: bool,
) -> FlashPlan:
    """The plan for a call; of the sequences' lengths it knows only the bound ``most_keys``."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    group = num_heads // num_kv_heads
    gpu = gpu_of(q.device)
    seen = OTHERS
    if not window and most_keys < 2 * q_len:
        seen = TRIANGLE if causal else SQUARE

    def plan(packed: bool) -> FlashPlan:
        rows = q_len * group if packed else q_len
        gains = rows > FEW_ROWS or gpu.capability == (9, 0)
        # In the interpreter always, so that tests see them.
        worth = q.device.type == "cpu" or (gains and q.dtype != torch.float32)
        use_tma = worth and most_keys > 0 and all(can_describe(x) for x in (q, k, v, out))
        return _plan(
            q.device,
            gpu,
            q.dtype,
            batch * num_kv_heads,
            1 if packed else group,
            rows,
            head_dim,
            value_dim,
            min(capacity, window + q_len - 1) if window else capacity,
            min(most_keys, window + q_len - 1) if window else most_keys,
            window > 0,
            OTHERS if packed else seen,
            packed,
            use_tma,
            use_tma and kv_lens is None,
        )

    saves = packing_saves(group, q_len)
    if saves and q_len < MANY_QUERIES:
        return plan(packed=True)
    apart = plan(packed=False)
    if group == 1 or "path" in apart.tile:
        return apart
    packs = q_len < MANY_QUERIES or (saves and 1 < apart.splits <= FEW_SPLITS)
    return plan(packed=True) if packs else apart


def packing_saves(group: int, q_len: int) -> bool:
    """Whether a group's heads fill fewer blocks of MANY_QUERIES rows together than apart.

    Where they do, the plain kernel has less to do. With 32 heads over 8 of 128, sixteen sequences
    of 80 queries on 1,024 keys take 64.3 us for it and 67.5 for Hopper's kernel.

    Where they do not, Hopper's kernel takes less, from 65 queries on. The same sequences take 68.2
    us for 82.7 by 112 queries, and 19.2 for 24.6 on no more keys than queries. With 8 heads over 4
    of 256, eight sequences of 65 queries on 1,024 keys take 26.4 us for 33.9
    (``bench.timing.Replay`` of ``flash_attention`` with each, H200, c6cf87f).
    """
    return cdiv(group * q_len, MANY_QUERIES) < group * cdiv(q_len, MANY_QUERIES)


@cached_picks
def _plan(
    device: torch.device,
    gpu: Gpu,
    dtype: torch.dtype,
    kv_heads: int,  # of all sequences
    blocks_per_head: int,  # query heads that a KV head's programs take one by one
    rows: int,
    head_dim: int,
    value_dim: int,
    capacity: int,  # of the cache, or what a window leaves of it
    most_keys: int,
    has_window: bool,
    seen: str,
    packed: bool,
    use_tma: bool,
    one_loop: bool,
) -> FlashPlan:
    pairs, is_float32 = kv_heads * blocks_per_head, dtype == torch.float32
    shape = (rows, head_dim, value_dim, is_float32, one_loop, has_window, pairs, seen)
    picked = flash_config.pick(device, *shape)
    programs = pairs * cdiv(rows, picked["BLOCK_M"])
    enough = capacity >= max(SPLIT_KEYS, SPLIT_KEYS_OF_BLOCK * programs)
    splits_pay = 2 * programs < gpu.num_sms and enough
    if "path" in picked and (packed or not use_tma or splits_pay):
        picked = plain_heuristic(gpu, rows, head_dim, is_float32, one_loop, has_window)
    block_m, block_n = picked["BLOCK_M"], picked["BLOCK_N"]
    programs = pairs * cdiv(rows, block_m)

    # Four programs on each SM where rows are few and memory is what counts; where a block fills
    # the tensor cores, one. Then as few as give each the same share of the keys. Their number
    # follows the cache's capacity: with its length, a generation would meet new kernels.
    wanted = 0 if "path" in picked else gpu.num_sms * (4 if block_m <= 32 else 1)
    # Of so few keys, merging takes longer: 500 queries of eight heads of 64 take 9.7 us in two
    # splits and 7.1 in one (``device_us`` of ``flash_attention``, H200, copies of 17fb2ae).
    if seen != OTHERS and capacity < SPLIT_KEYS and gpu.arch != INTERPRETER:
        wanted = 0
    tiles = cdiv(capacity, block_n)
    min_tiles = max(cdiv(32 if gpu.arch == INTERPRETER else MIN_KEYS, block_n), 1)
    share = max(cdiv(tiles, max(min(wanted // programs, MAX_SPLITS), 1)), min_tiles)

    # Blocks alike need no others to make up for them, and the GPU shares out plain ones.
    shared_out = "path" in picked and seen == TRIANGLE
    room = CACHED_BYTES // max(2 * most_keys * head_dim * dtype.itemsize, 1)
    if seen == SQUARE or (shared_out and rows <= SHORT):
        room = 1
    blocks = blocks_per_head * cdiv(rows, block_m)
    together = heads_together(kv_heads, room, gpu.num_sms if shared_out else 0, blocks)
    return FlashPlan(
        picked,
        packed=packed,
        use_tma=use_tma,
        one_loop=one_loop,
        splits=max(cdiv(tiles, share), 1),
        min_tiles=min_tiles,
        heads_at_once=together * blocks_per_head,
    )


def heads_together(kv_heads: int, room: int, num_sms: int, blocks: int) -> int:
    """KV heads that run side by side, a divisor of all: as many as there is room for.

    Hopper's programs share out blocks of different lengths, and want 1.3 turns of all programs in a
    section. In smaller ones a program may have the longest block of every section, or the shortest:
    of 16 sections of 128 blocks, one of 132 programs has 1.52 of an even share. From 1.3 turns on
    none has more than 1.15. ``tests/test_flash_config.py`` counts both, the first by
    ``largest_share(shares(128, 1, 3000, 8, consumers=3))``.

    Args:
        room: KV heads that the cache has room for, or 1 where more would gain nothing.
        num_sms: SMs that programs run on; 0 where programs share out nothing.
        blocks: blocks of queries of a KV head.
    """
    found = next(n for n in range(max(min(room, kv_heads), 1), 0, -1) if kv_heads % n == 0)
    least = min(cdiv(13 * num_sms, 10 * blocks), kv_heads)
    return next(n for n in range(max(found, least), kv_heads + 1) if kv_heads % n == 0)
