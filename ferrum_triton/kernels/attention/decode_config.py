"""How paged decode is cut and tiled."""

import torch

from ferrum_triton.kernels.attention.strips import strip_of
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import integer, shared_refusal
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Config, Dim, Tunable

# Keys of a unit where results may not depend on the batch.
INVARIANT_KEYS = 1024

# The least pairs of sequence and head, and keys of all, that need no cuts to fill the GPU.
MANY_PAIRS, MANY_KEYS = 128, 250_000

# Pairs up to which a step reads blocks ahead of keys.
FEW_PAIRS = 16

# Shared memory that the queues below take; other GPUs have tiles that fit 64 KB.
DEEP_QUEUES = 200_000


def decode_heuristic(
    gpu: Gpu,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    key_bytes: int,
    rows: int,
    is_varlen: bool,
    beside_prefill: bool,
    is_plain: bool,
) -> Config:
    """Tile, warps, loads in flight, programs to aim at, least keys of a unit, what is read early.

    Few warps and deep queues win, since a program waits for memory. Little work is a matter of
    latency: large tiles on more warps, and the first of them asked for before the PDL wait. That
    takes 0.4 % off a step in bf16 and 0.6 % in Q4_K
    (``python -m bench.tune_step qwen3-8b --formats bf16 q4_K --batches 1``); where memory is busy
    anyway it takes nothing off.

    From 256 pairs of sequence and head on, cuts only make up for sequences of different lengths;
    they aim at fewer programs than 512 pairs have, so that those of equal length are not cut for a
    remainder's sake. The same holds from MANY_PAIRS on where they have MANY_KEYS. By 4,096 keys, 31
    sequences of 8 KV heads take 132 us for 153, and 16 take 68 us for 78. In e4m3, 31 take 78 us
    for 106 (``bench.timing.Replay`` of ``paged_decode_attention`` under ``decode_config.forced`` of
    each, H200, cdd887f).

    Tiles of 128 keys serve sequences that differ in their queries, and more than 16 rows. Eight
    sequences of four queries on 4,096 keys take 55 us for 59, and 64 of them 259 us for 330. Eight
    of five queries take 73 us for 92 (the same of ``paged_varlen_attention``).

    With blocks read ahead by hand, up to three tiles are in flight where the compiler's pipeline
    has one, by fewer registers. By 4,096 keys, 63 single queries take 254 us for 283, and 64 times
    four take 257 for 287; 16 times two by 512 take 18.8 for 20.0 (``bench.timing.Replay`` of
    ``paged_varlen_attention`` under ``decode_config.forced`` of each, H200, 6128820). Beside a
    prompt of 2,048, all take 437 for 382 (copies of 97d9a7c).

    Args:
        key_bytes: bytes of a key and its value.
        rows: queries times heads of a sequence and KV head.
        is_varlen: whether sequences differ in their queries.
        beside_prefill: whether a prefill has some of the SMs meanwhile.
        is_plain: whether vectors are contiguous, of a power of two of 16-bit floats or codes, or of
            two strips of such floats.
    """
    is_shallow = gpu.capability < (9, 0) or gpu.shared_limit < DEEP_QUEUES
    in_block = is_plain and not has_strips(key_bytes)
    if is_shallow or (not in_block and (is_varlen or rows > 16)):
        # What fits the registers of sm_80 and the 64 KB of shared memory of gfx942, and what
        # strips, addresses of pieces and masks of columns leave room for.
        return _shallow_queue()
    if not in_block:
        queue = _strip_queue if is_plain else _masked_queue
        return queue(batch * num_kv_heads, capacity, key_bytes)
    pairs = batch * num_kv_heads
    config = _deep_queue(pairs, capacity, key_bytes)
    few_rows = rows <= 16
    if key_bytes > 512:
        many = {**_free(config), "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
        return config if few_rows else many
    if few_rows and not is_varlen:
        return config
    if few_rows and key_bytes < 512 and pairs >= 256:
        # What tells sequences apart takes registers that deeper queues on 2 warps do not leave.
        return {**_free(config), "num_warps": 4, "num_stages": 3}
    if key_bytes == 512 and few_rows and not beside_prefill:
        block_n, stages = (64, 4) if capacity >= 2048 else (128, 2)
        return _config(block_n, 256, 128, 4, stages, ahead=1)
    return _config(128, 256, 128, 4, 2)


def _shallow_queue() -> Config:
    return _config(32, 256, 128, 4, 2)


def _deep_queue(pairs: int, capacity: int, key_bytes: int) -> Config:
    if key_bytes > 512:
        return _config(32, 256, 128, 2, 5)
    if pairs * capacity <= 16384:
        return _config(128, 256, 128, 4, 3, prefetch=2)
    in_plenty = pairs >= MANY_PAIRS and pairs * capacity >= MANY_KEYS
    if key_bytes < 512 and in_plenty and pairs < 256:
        return _config(64, 396, 256, 2, 5)
    if key_bytes < 512:
        return _config(64, 512, 128, 2, 5)
    if pairs >= 256 or in_plenty:
        # Shared memory holds five of these programs on an SM; with 200 registers so do registers,
        # of which the assembler takes 255 unasked, to no end: nothing spills.
        return {**_config(64, 480, 1024, 2, 3), "maxnreg": 200}
    return _config(64, 256, 128, 2, 5)


def _strip_queue(pairs: int, capacity: int, key_bytes: int) -> Config:
    """Tiles of heads in two strips of columns.

    By 16 sequences of 4,000 keys, heads of 80 take 54.3 us, of 96 61.4 and of 192 116; in one
    block under masks, heads of 96 take 63.0 and of 192 128. Heads of 96 by 64 sequences take 201 in
    tiles of 64 keys, and 209 in tiles of 32 (``device_us`` of paged_decode_attention under
    ``decode_config.forced`` of each, H200, b7bcfc3).
    """
    if pairs * capacity <= 16384:
        return _config(64 if key_bytes <= 512 else 32, 512, 128, 4, 3, prefetch=2)
    if key_bytes > 512:
        return _config(32, 512, 128, 2, 5)
    if key_bytes == 384 and pairs < 256:
        return _config(32, 768, 128, 2, 3)
    return _config(64, 512, 128, 2, 3)


def _masked_queue(pairs: int, capacity: int, key_bytes: int) -> Config:
    """Tiles of heads whose loads have masks, or addresses of pieces.

    In one block under masks, heads of 96 took 62.0 us by 16 sequences of 4,000 keys and 202 by 64,
    where tiles of 32 keys on 4 warps with 2 stages took 117 and 272 (``device_us`` of
    paged_decode_attention under ``decode_config.forced`` of each, H200, 1a5796b). Those tiles stay
    for little work, one sequence's 10.8 us for 10.3, and for wider vectors, of which others spill.
    """
    if key_bytes > 512 or pairs * capacity <= 65536:
        return _shallow_queue()
    if pairs >= 256:
        return _config(64, 512, 128, 4, 3)
    return _config(32, 768, 128, 2, 3)


def _free(config: Config) -> Config:
    """The configuration without its bound on registers."""
    return {name: value for name, value in config.items() if name != "maxnreg"}


def _config(
    block_n: int,
    programs: int,
    least_keys: int,
    warps: int,
    stages: int,
    prefetch: int = 0,
    ahead: int = 0,
) -> Config:
    return {
        "BLOCK_N": block_n,
        "PROGRAMS": programs,
        "LEAST_KEYS": least_keys,
        "PREFETCH": prefetch,
        "AHEAD": ahead,
        "num_warps": warps,
        "num_stages": stages,
    }


def decode_candidates(gpu: Gpu, *shape: Dim) -> list[Config]:
    """Tiles of 16 to 128 keys, on one warp for every 16 to 32 of them."""
    # Keys, warps, loads in flight, tiles asked for before the wait, whether blocks are read ahead.
    tiles = (
        (16, 1, 6, 0, 0),
        (32, 1, 4, 0, 0),
        (32, 1, 4, 1, 0),
        (32, 2, 3, 0, 0),
        (32, 2, 5, 0, 0),
        (32, 4, 2, 0, 0),
        (64, 2, 3, 0, 0),
        (64, 2, 5, 0, 0),
        (64, 4, 3, 0, 0),
        (64, 4, 5, 0, 0),
        (128, 4, 2, 0, 0),
        (128, 4, 2, 2, 0),
        (128, 4, 3, 0, 0),
        (32, 2, 4, 0, 1),
        (64, 2, 3, 0, 1),
        (64, 4, 3, 0, 1),
        (64, 4, 4, 0, 1),
        (128, 4, 2, 0, 1),
    )
    configs = [
        _config(block_n, programs, least_keys, warps, stages, prefetch, ahead)
        for block_n, warps, stages, prefetch, ahead in tiles
        for programs in (128, 256, 512)
        for least_keys in (64, 128)
        if least_keys >= block_n
    ]
    return [config for config in configs if not decode_fits(gpu, config, *shape)]


def decode_fits(
    gpu: Gpu, config: Config, batch: int, num_kv_heads: int, capacity: int, key_bytes: int, *_: Dim
) -> str:
    """Why a configuration's queue of tiles is too large for a GPU, or ""."""
    return shared_refusal(gpu, config["BLOCK_N"] * key_bytes * config["num_stages"])


# How far a row's shape serves: programs that fill the GPU once do not fill it at twice the work.
WITHIN = {"batch": 1.5, "num_kv_heads": 1.5, "capacity": 1.5, "key_bytes": 1.0}

decode_config = Tunable(
    "paged_decode_attention",
    (
        "batch",
        "num_kv_heads",
        "capacity",
        "key_bytes",
        "rows",
        "is_varlen",
        "beside_prefill",
        "is_plain",
    ),
    decode_heuristic,
    decode_candidates,
    fits=decode_fits,
    within=WITHIN,
    parameters={"PREFETCH": integer(0, 16), "AHEAD": integer(0, 1)},
)


def step_heuristic(
    gpu: Gpu,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    key_bytes: int,
    rows: int,
    is_plain: bool,
) -> Config:
    """As :func:`decode_heuristic`, for one query a sequence that comes from a QKV product.

    Its programs prepare heads first, which four warps do sooner than two. ``MERGES`` is 1 where the
    program that stores a last part merges all. That takes 4.7 % off a step of 8 sequences in Q4_K
    and 1.6 % off one of 32; little work is merged sooner by the many programs of another launch, by
    0.9 % of a step (``python -m bench.tune_step qwen3-8b --batches 1 8 32``). On AMD's GPUs
    another launch merges, see :attr:`Gpu.waits_for_stores`.

    Up to FEW_PAIRS blocks are read ahead. With 8 KV heads of 128, a sequence of 1,024 keys takes
    7.7 us for 7.9, one of 8,192 17.8 for 18.7, and one of 32,768 40.7 for 43.0; four of 2,048 take
    16.5 for 16.0, and from eight sequences on the two are within 3 % (``bench.timing.Replay`` of
    ``qkv_paged_decode_attention`` under ``step_config.forced`` of each, H200, copies of 97d9a7c).
    """
    config = decode_heuristic(
        gpu,
        batch,
        num_kv_heads,
        capacity,
        key_bytes,
        rows,
        is_varlen=False,
        beside_prefill=False,
        is_plain=is_plain,
    )
    merges = int(gpu.waits_for_stores)
    can_read_ahead = is_plain and key_bytes == 512
    if config["PREFETCH"] > 0:
        # Most programs have one tile, for which there is nothing to be loaded ahead.
        return {**config, "num_stages": 2, "AHEAD": int(can_read_ahead), "MERGES": 0}
    if not is_plain:
        config = _shallow_queue()
    elif config["num_warps"] == 2:
        pairs = batch * num_kv_heads
        if key_bytes > 512:
            config = _config(32, 256, 128, 4, 3)
        elif pairs >= 256 and not has_strips(key_bytes):
            config = _config(128, 256, 128, 4, 3)
        elif can_read_ahead and pairs <= FEW_PAIRS:
            config = _config(128, 256, 128, 4, 2, ahead=1)
        else:
            config = _config(32, 512, 128, 4, 2)
    return {**config, "MERGES": merges}


def step_candidates(gpu: Gpu, *shape: Dim) -> list[Config]:
    """Those of :func:`decode_candidates`, merged in either way, or on AMD's GPUs in the one."""
    either = (0, 1) if gpu.waits_for_stores else (0,)
    configs = decode_candidates(gpu, *shape)
    return [{**config, "MERGES": merges} for config in configs for merges in either]


step_config = Tunable(
    "qkv_paged_decode_attention",
    ("batch", "num_kv_heads", "capacity", "key_bytes", "rows", "is_plain"),
    step_heuristic,
    step_candidates,
    fits=decode_fits,
    within=WITHIN,
    parameters={"PREFETCH": integer(0, 16), "AHEAD": integer(0, 1), "MERGES": integer(0, 1)},
)


def has_strips(key_bytes: int) -> bool:
    """Whether plain vectors are two strips: those of no power of two."""
    return key_bytes & (key_bytes - 1) != 0


def is_plain(head_dim: int, cache: torch.dtype, layout: str) -> bool:
    """Whether loads of a cache's vectors need neither masks nor addresses of pieces."""
    odd = head_dim & (head_dim - 1)
    odd = (odd or head_dim > 128) if cache.itemsize == 1 else odd and not strip_of(head_dim)
    return not (odd or cache == torch.float32 or layout == "vllm_x")


def unit_sizes(config: Config, at_work: int, batch_invariant: bool) -> tuple[int, int]:
    """The least tiles of a unit, and the units a head that tiles are shared among.

    Args:
        at_work: programs a unit has.
    """
    if batch_invariant:
        return cdiv(INVARIANT_KEYS, config["BLOCK_N"]), 0
    return cdiv(config["LEAST_KEYS"], config["BLOCK_N"]), max(config["PROGRAMS"] // at_work, 1)
