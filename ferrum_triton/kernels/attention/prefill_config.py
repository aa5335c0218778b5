"""Tiles of prefill over pages: what the plain kernel and Hopper's are launched with, and why."""

from ferrum_triton.kernels.attention.flash_config import (
    MANY_QUERIES,
    codes_refusal,
    flash_refusal,
    hopper_tile,
    tile,
)
from ferrum_triton.kernels.attention.tensor_maps import LARGE
from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import one_of
from ferrum_triton.kernels.tuning import Config, Dim, Tunable


def prefill_heuristic(
    gpu: Gpu, head_dim: int, is_float32: bool, is_simple: bool, codes: str
) -> Config:
    """Hopper's kernel where it serves.

    It leaves SMs to decodes as the plain one does. A prompt of 2,048 and 63 decodes, all on 4,096
    keys, took 410 us for the plain kernel's 451, four of 1,024 and 124 decodes on 2,048 keys 328
    for 366, and one of 8,192 and 72 on 8,192 1,319 for 1,503 (``bench.timing.Replay`` of
    ``paged_varlen_attention`` under ``prefill_config.forced``, one run of an H200, copies of
    97d9a7c). The first takes 373 since :func:`.plan.blocks_of_rows` (``python -m bench.run
    paged_varlen_attention --case mixed``, 6128820).

    Args:
        is_simple: no window, over a pool of floats whose vectors are contiguous.
        codes: format of an 8-bit pool's, ``"e4m3"`` or ``"int8"``; else "". A row of one kind of
            pool says nothing of the others: Hopper's kernel widens codes beside the products. Over
            a pool in e4m3 a prompt of 2,048 and 63 decodes take 485 us for the plain kernel's 936.
            Eight sequences of 9 to 64 queries on 4,096 keys take 91 to 98 us for 186 to 193.

    Four sequences of 600 queries and 2,048 keys take 107 us for the plain kernel's 150 with heads
    of 64, 134 us for 196 with heads of 96, and 252 us for 418 with heads of 256. In windows of 512,
    heads of 128 take 74 us by tiles of 64 keys, 85 by tiles of 128, and 94 by the plain kernel
    (``bench.timing.Replay`` of ``paged_varlen_attention`` under ``prefill_config.forced`` of each,
    H200, e50bc87; those in e4m3 at cdd887f).
    """
    block_n = 128 if head_dim <= 128 and (is_simple or codes) else 64
    config = hopper_tile(128, block_n, 2)
    shape = (head_dim, is_float32, is_simple, codes)
    if not prefill_refusal(gpu, config, *shape):
        return config
    return plain_heuristic(gpu, *shape)


def plain_heuristic(
    gpu: Gpu, head_dim: int, is_float32: bool, is_simple: bool, codes: str
) -> Config:
    """Rows, keys, warps and stages of a program of the plain kernel.

    Windows, whose edges cost larger tiles more, codes and vectors in pieces leave no registers for
    tiles of 128 keys, nor does Blackwell; those and three stages of loads are what keeps Hopper's
    tensor cores busy.
    """
    if is_float32:
        return tile(32, 32, 4, 1)
    if head_dim > 128 or gpu.capability[0] not in LARGE:
        return tile(64, 32, 4, 2)
    is_hopper = gpu.capability[0] == 9
    block_n = 128 if is_simple and is_hopper else 64
    # By three stages of codes a thread spills 80 bytes and more on Blackwell, by two none
    # (``pytest --every-gpu tests/test_kernels_compile.py -k paged_varlen``).
    return tile(128, block_n, 8, 2 if codes and not is_hopper else 3)


def prefill_candidates(gpu: Gpu, head_dim: int, *others: Dim) -> list[Config]:
    """Blocks of 64 and 128 rows, on one warp for every 16 of them, and Hopper's."""
    plain = [
        tile(block_m, block_n, block_m // 16, num_stages)
        for block_m in (64, 128)
        for block_n in (32, 64, 128)
        for num_stages in (2, 3)
    ]
    hopper = [hopper_tile(128, block_n, stages) for block_n in (64, 128) for stages in (2, 3, 4)]
    shape = (head_dim, *others)
    return plain + [config for config in hopper if not prefill_refusal(gpu, config, *shape)]


def prefill_refusal(
    gpu: Gpu,
    config: Config,
    head_dim: int,
    is_float32: bool,
    is_simple: bool,
    codes: str,
) -> str:
    """Why a GPU cannot launch Hopper's kernel with a configuration, or ""."""
    if "path" not in config:
        return ""
    if config["BLOCK_M"] != 128:
        return "Hopper's kernel over pages has blocks of 128 rows"
    reason = flash_refusal(gpu, config, MANY_QUERIES, head_dim, head_dim, is_float32)
    return reason or (codes_refusal(gpu, config, head_dim) if codes else "")


prefill_config = Tunable(
    "paged_varlen_attention",
    ("head_dim", "is_float32", "is_simple", "codes"),
    prefill_heuristic,
    prefill_candidates,
    prefill_refusal,
    within={"head_dim": 1},
    parameters={"path": one_of("hopper")},
)
