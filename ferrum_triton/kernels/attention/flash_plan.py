"""How flash attention is cut into programs: tiles, packing of heads, splits of the keys.

There are two kernels. The plain one takes every call; Hopper's (``path: "hopper"``, see
:mod:`ferrum_triton.kernels.hopper.attention`) those of many queries whose tensors have tensor maps.
It packs no heads and splits no keys: with few queries, a call waits for memory, and with few blocks
of many keys, for most of the GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.kernels.attention.tensor_maps import LARGE, can_describe
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu, gpu_of
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.parameters import one_of, shared_refusal
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Dim, Tunable, cached_picks

# Keys and values of the heads that run side by side should stay in the L2 cache (50 to 60 MB on
# Hopper) beside the queries and outputs that pass through it.
CACHED_BYTES = 32 << 20

# More programs than this would cost more to merge than they gain.
MAX_SPLITS = 64

# Keys for which a split is worth its share of the merging.
MIN_KEYS = 128

# Queries of a block where there are many: from as many on it holds those of one head, not of a KV
# head's whole group.
MANY_QUERIES = 128

# Queries up to which half of a block of Hopper's kernel would be empty.
FEW_QUERIES = 64

# Registers of a thread of Hopper's kernel by its consumers, and bytes of its barriers and of what
# roles are told by.
HOPPER_REGISTERS = {2: 240, 3: 160}
HOPPER_BARRIERS = 1024

# Registers of a consumer's thread where the producer widens 8-bit pages, which takes 72.
WIDE_REGISTERS = 216

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
) -> FlashPlan:
    """The plan for a call; of the sequences' lengths it knows only the bound ``most_keys``."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    group = num_heads // num_kv_heads
    gpu = gpu_of(q.device)

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
    packed: bool,
    use_tma: bool,
    one_loop: bool,
) -> FlashPlan:
    shape = (rows, head_dim, value_dim, dtype == torch.float32, one_loop, has_window)
    picked = flash_config.pick(device, *shape)
    programs = kv_heads * blocks_per_head * cdiv(rows, picked["BLOCK_M"])
    enough = capacity >= max(SPLIT_KEYS, SPLIT_KEYS_OF_BLOCK * programs)
    splits_pay = 2 * programs < gpu.num_sms and enough
    if "path" in picked and (packed or not use_tma or splits_pay):
        picked = plain_heuristic(gpu, *shape)
    block_m, block_n = picked["BLOCK_M"], picked["BLOCK_N"]
    programs = kv_heads * blocks_per_head * cdiv(rows, block_m)

    # Four programs on each SM where rows are few and memory is what counts; where a block fills
    # the tensor cores, one. Then as few as give each the same share of the keys. Their number
    # follows the cache's capacity: with its length, a generation would meet new kernels.
    wanted = 0 if "path" in picked else gpu.num_sms * (4 if block_m <= 32 else 1)
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


def flash_heuristic(gpu: Gpu, rows: int, head_dim: int, value_dim: int, *others: bool) -> Config:
    """Hopper's kernel for many queries, where it serves; else the plain one."""
    shape = (rows, head_dim, value_dim, *others)
    config = _hopper_choice(rows, head_dim, value_dim)
    if config and not flash_refusal(gpu, config, *shape):
        return config
    return plain_heuristic(gpu, *shape)


def _hopper_choice(rows: int, head_dim: int, value_dim: int) -> Config | None:
    """Hopper's tiles where they take less time than the plain kernel's; else None.

    Up to 512 queries take tiles of 64 keys. With 255 queries and keys and 32 heads over 8, sixteen
    sequences with heads of 128 take 41.8 us for the plain kernel's 64.0, and four with heads of 96
    take 12.4 us for 17.1. One sequence with 8 heads over 4 of 256 takes 10.6 us for 14.4.

    More queries take tiles of 128 keys, and of 64 with heads above 128. By eight sequences of
    2,048, heads of 80 take 403 us for 528, and heads of 160 take 728 us for 1,057. Heads of 128
    take 293 us for 427 in windows of 512, and 245 us for 302 with lengths on the device.

    Heads of 64 leave the plain kernel's tensor cores little to wait for. One sequence of 255 takes
    6.9 us for 11.0, but eight of 700 take 59.3 us for 54.3.

    ``bench.timing.Replay`` of ``flash_attention`` under ``flash_config.forced`` of each timed all
    of these on an H200, at cdd887f.
    """
    if head_dim <= 64:
        return hopper_tile(128, 64, 3) if MANY_QUERIES <= rows <= 512 else None
    if head_dim > 128:
        wide = value_dim <= 128 and rows > 1024
        return hopper_tile(192 if wide else 128, 64, 2)
    return hopper_tile(128, 64, 3) if rows <= 512 else hopper_tile(128, 128, 2)


def plain_heuristic(
    gpu: Gpu,
    rows: int,
    head_dim: int,
    value_dim: int,
    is_float32: bool,
    one_loop: bool,
    has_window: bool,
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
        return _few_rows(is_hopper, rows, head_dim, one_loop)
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


def _few_rows(is_hopper: bool, rows: int, head_dim: int, one_loop: bool) -> Config:
    """A block that has all of a KV head's few rows.

    Blocks of 64 rows gain on Hopper, whose tensor cores multiply them asynchronously while TMA
    loads. One query of 32 heads over 8 of 128 takes 14.4 us on 8,192 keys, and 19.6 in blocks of 16
    rows without TMA. On 4,096 keys 32 sequences take 124 us for 132, and 126 us for 145 with eight
    queries each. Heads of 64 take less in blocks of 16 rows: one query on 32,768 keys takes 23.8 us
    for 26.5 (``bench.timing.Replay`` of ``flash_attention`` under ``flash_config.forced`` of each,
    H200, cdd887f).

    Blocks of 16 rows by 32 keys gain with lengths on the device. Eight sequences of up to 4,096
    keys take 25.2 us, and 28.3 in blocks of 64 by 64; 32 of them take 83.2 us for 88.0 (the same,
    e50bc87). By 64 sequences of up to 1,024 keys they take 40.8 us for 46.4 (cdd887f).
    """
    block_n = 32 if head_dim > 128 else 64
    if is_hopper and rows <= 16 and not one_loop and head_dim > 64:
        return tile(16, 32, 4, 3)
    if is_hopper and (rows > 16 or head_dim > 64):
        return tile(64, block_n, 4, 3)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return tile(block_m, block_n, 4, 4 if rows <= 32 and head_dim <= 128 else 3)


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    """The configuration of a block of block_m rows and tiles of block_n keys."""
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def hopper_tile(block_m: int, block_n: int, num_stages: int) -> Config:
    """The configuration of Hopper's kernel with a consumer for every 64 rows of a block."""
    return {"path": "hopper", "BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": num_stages}


def flash_candidates(
    gpu: Gpu, rows: int, head_dim: int, value_dim: int, is_float32: bool, *_: Dim
) -> list[Config]:
    """Blocks of up to 128 rows, on one warp for every 16 or 32 of them, and Hopper's."""
    blocks = (16,) if rows <= 16 else (32, 64) if rows <= 64 else (64, 128)
    plain = [
        tile(block_m, block_n, num_warps, num_stages)
        for block_m in blocks
        for block_n in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4)
        if block_m < 128 or num_warps == 8 or block_n < 128
    ]
    hopper = [
        hopper_tile(block_m, block_n, num_stages)
        for block_m in (128, 192)
        for block_n in (64, 128)
        for num_stages in (2, 3, 4)
    ]
    shape = (rows, head_dim, value_dim, is_float32)
    return plain + [config for config in hopper if not flash_refusal(gpu, config, *shape)]


def flash_refusal(
    gpu: Gpu,
    config: Config,
    rows: int,
    head_dim: int,
    value_dim: int,
    is_float32: bool,
    *_: Dim,
) -> str:
    """Why a GPU cannot launch Hopper's kernel with a configuration, or ""."""
    if "path" not in config:
        return ""
    if not serves(gpu):
        return f"Hopper's kernel is not for {gpu.arch}, or not with this version of Triton"
    if is_float32 or rows <= FEW_QUERIES:
        return f"Hopper's kernel takes 16 bits and more than {FEW_QUERIES} queries"
    # What a thread holds of results, scores and weights, beside which it needs some forty more.
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    registers = padded(value_dim) // 2 + block_n * 3 // 4
    most = HOPPER_REGISTERS[block_m // 64] - 40
    if registers > most:
        return f"{registers} registers of a thread for products are more than {most}"
    # Where there is room for no others, results leave through buffers of queries, of their width.
    own_out = split_columns(head_dim)[0] != padded(value_dim)
    return shared_refusal(gpu, hopper_shared(config, head_dim, value_dim, own_out=own_out))


def hopper_shared(config: Config, head_dim: int, value_dim: int, *, own_out: bool) -> int:
    """Bytes of shared memory of Hopper's kernel, with or without buffers for its results."""
    block_m, block_n, stages = config["BLOCK_M"], config["BLOCK_N"], config["num_stages"]
    columns, values = sum(split_columns(head_dim)), padded(value_dim)
    queries = block_m * (columns + values * own_out)
    return 2 * (queries + stages * block_n * (columns + values)) + HOPPER_BARRIERS


def codes_refusal(gpu: Gpu, config: Config, head_dim: int) -> str:
    """Why Hopper's kernel, which takes a configuration, cannot take 8-bit pages with it, or ""."""
    block_n, values = config["BLOCK_N"], padded(head_dim)
    registers, most = values // 2 + block_n * 3 // 4, WIDE_REGISTERS - 40
    if registers > most:
        return f"{registers} registers of a thread for products are more than {most}"
    codes = block_n * (sum(split_columns(head_dim)) + values)
    scales = 2 * config["num_stages"] * block_n * 4
    shared = hopper_shared(config, head_dim, head_dim, own_out=False) + codes + scales
    return shared_refusal(gpu, shared)


def padded(columns: int) -> int:
    """Columns of a product that has at least some."""
    return max(next_power_of_2(columns), 16)


def split_columns(head_dim: int) -> tuple[int, int]:
    """Columns of the two products that make scores: 192 are 128 and 64, where 256 would be padded.

    The second is 0 where it would save nothing.
    """
    whole = padded(head_dim)
    first = whole // 2
    second = padded(head_dim - first) if head_dim > first else 0
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


flash_config = Tunable(
    "flash_attention",
    ("rows", "head_dim", "value_dim", "is_float32", "one_loop", "has_window"),
    flash_heuristic,
    flash_candidates,
    flash_refusal,
    # Heads of another size take other registers. The number of rows matters less: at a quarter of a
    # measured row's the choice was still 47 % ahead (8 x 512 queries by ``do_bench``, as chosen and
    # under ``flash_config.forced(flash_heuristic(...))``, fcb9219).
    within={"rows": 8, "head_dim": 1, "value_dim": 1},
    parameters={"path": one_of("hopper")},
)
