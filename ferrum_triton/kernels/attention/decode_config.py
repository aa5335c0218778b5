"""How paged decode is cut and tiled."""

import torch

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.tuning import Config, Tunable

# Keys of a unit where results may not depend on the batch.
INVARIANT_KEYS = 1024


def decode_heuristic(
    gpu: Gpu, batch: int, num_kv_heads: int, capacity: int, key_bytes: int
) -> Config:
    """Tile, warps, loads in flight, programs to aim at and the least keys of a unit.

    Few warps and deep queues win, since a program waits for memory. Little work is a matter of
    latency: large tiles on more warps. From 256 pairs of sequence and head on, cuts only make up
    for sequences of different lengths; they aim at fewer programs than 512 pairs have, so that
    those of equal length are not cut for a remainder's sake.

    Args:
        key_bytes: what a key and its value take.
    """
    pairs = batch * num_kv_heads
    if key_bytes > 512:
        return _config(32, 256, 128, 2, 5)
    if pairs * capacity <= 16384:
        return _config(128, 256, 128, 4, 3)
    if key_bytes < 512:
        return _config(64, 512, 128, 2, 5)
    if pairs >= 256:
        return _config(64, 480, 1024, 2, 3)
    return _config(64, 256, 128, 2, 5)


def _config(block_n: int, programs: int, least_keys: int, warps: int, stages: int) -> Config:
    return {
        "BLOCK_N": block_n,
        "PROGRAMS": programs,
        "LEAST_KEYS": least_keys,
        "num_warps": warps,
        "num_stages": stages,
    }


def decode_candidates(
    gpu: Gpu, batch: int, num_kv_heads: int, capacity: int, key_bytes: int
) -> list[Config]:
    """Tiles of 16 to 128 keys, on one warp for every 16 to 32 of them."""
    tiles = ((16, 1, 6), (32, 2, 5), (64, 2, 5), (64, 4, 3), (64, 4, 5), (128, 4, 3))
    return [
        _config(block_n, programs, least_keys, warps, stages)
        for block_n, warps, stages in tiles
        for programs in (256, 512, 1024)
        for least_keys in (64, 128)
    ]


decode_config = Tunable(
    "paged_decode_attention",
    ("batch", "num_kv_heads", "capacity", "key_bytes"),
    decode_heuristic,
    decode_candidates,
)


def decode_launch(
    device: torch.device,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    cache: torch.dtype,
    rows: int,
    in_pieces: bool,
    batch_invariant: bool,
    is_varlen: bool = False,
) -> Config:
    """The configuration of a launch of ``rows`` queries times heads a sequence and KV head.

    ``in_pieces``: vectors of the cache are not contiguous.
    """
    odd = head_dim & (head_dim - 1) or (head_dim > 128 and cache.itemsize == 1)
    if capability(device) < (9, 0) or cache == torch.float32 or in_pieces or odd:
        # What fits the registers of sm_80 and the 64 KB of shared memory of gfx942, and what
        # addresses of pieces and masks of columns leave room for.
        return _config(32, 256, 128, 4, 2)
    if batch_invariant:
        # What must not depend on the batch may not depend on what suits the batch either.
        batch, capacity = 1, INVARIANT_KEYS
    key_bytes = 2 * head_dim * cache.itemsize
    config = decode_config.pick(device, batch, num_kv_heads, capacity, key_bytes)
    if rows > 16:
        config = {**config, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    elif is_varlen and key_bytes <= 512:
        # What tells sequences apart takes registers that deeper queues on 2 warps do not leave.
        config = {**config, "num_warps": 4, "num_stages": 3}
    return config
