"""Launch choices of products on tensor cores: tiles, the rule that picks one, and what fits a GPU.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import shared_refusal
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS


class MmaConfig(NamedTuple):
    """How a product is launched.

    Attributes:
        rows: rows of W in a tile.
        tokens: tokens in a tile.
        words: words of eight weights in a step of the loop: 16, or 32, which are 256 weights. 8
            tokens take 32: with 16 a thread need not hold both words of a pair. Layouts that are
            shipped are among those that ``tests/test_quant_mma.py`` checks.
        parts: products a step is summed in: 1, or 2 for fewer registers.
        scale_after: d scales the product in float32, not the weights in float16.
        splits: programs that share a tile's K.
        warps: warps of a program.
        stages: stages of the loop's pipeline.
        maxnreg: registers a thread may have, so that more programs fit an SM; 0 for any number.
        prefetch_lines: lines of 128 bytes of each row of W that are asked for into L2 before the
            PDL wait.
        use_tma: tiles come through tensor descriptors.
        prefetch_distance: steps from one to that whose first plane is asked for into L2 meanwhile;
            0 for none.
    """

    rows: int
    tokens: int
    words: int = 32
    parts: int = 1
    scale_after: bool = True
    splits: int = 1
    warps: int = 4
    stages: int = 4
    maxnreg: int = 0
    prefetch_lines: int = 0
    use_tma: bool = False
    prefetch_distance: int = 0


# Tokens of a tile up to which an SM holds three programs, among which K is then split, and weights
# of a row that each has at least. By kind and tokens an SM may hold fewer: of Q5_K a program takes
# 77,872 bytes of shared memory (``pytest tests/test_quant_mma_config.py -k holds`` compiles it).
FEW_TOKENS, PROGRAMS_OF_SM, LEAST_WEIGHTS = 32, 3, 512
FEWER_PROGRAMS = {("Q5_K", 32): 2}
# By larger tiles: programs enough for 132 SMs, of at least so many steps of the loop each.
PROGRAMS, STEPS = 200, 4
# Tokens in a tile of more than 256 tokens.
MAX_TOKENS = 128

# The fastest of those timed at n 28672 and k 4096, or nearly, by the most tokens they are for. More
# lines asked for ahead cost more than they hide: 4096x14336 by 16 tokens of Q4_K takes 17.6 us with
# one line of each row, 17.8 with two, 18.5 with four and 21.4 with sixteen (``device_us`` of
# ``gemm_quant`` under ``products.forced``, H200, fb24a43).
_WIDE = MmaConfig(
    128,
    64,
    scale_after=False,
    warps=8,
    stages=2,
    maxnreg=128,
    prefetch_lines=2,
    use_tma=True,
    prefetch_distance=1,
)
HOPPER_TILES = {
    8: MmaConfig(64, 8, prefetch_lines=4),
    16: MmaConfig(64, 16, parts=2, stages=3, maxnreg=128, prefetch_lines=1),
    32: MmaConfig(64, 32, stages=3, prefetch_lines=1, use_tma=True),
    64: _WIDE,
    128: MmaConfig(64, 128, words=16, scale_after=False, stages=3, use_tma=True),
    256: MmaConfig(128, 256, words=16, scale_after=False, warps=8, stages=3, use_tma=True),
}
HOPPER_TILES_OF = {
    # 28672x4096 takes 24.8 us so, and 25.5 as the others (timed as those above).
    "Q4_0": {16: MmaConfig(64, 16, stages=3, maxnreg=128, prefetch_lines=1, use_tma=True)},
    "Q6_K": {8: MmaConfig(64, 8, stages=3, prefetch_lines=4, use_tma=True)},
    # Those above would spill.
    "Q3_K": {64: _WIDE._replace(words=16, stages=3, prefetch_distance=0)},
    "Q5_K": {64: _WIDE._replace(prefetch_distance=0)},
    # Of powers of two a step has a sum of its own.
    "MXFP4": {64: MmaConfig(64, 64, words=16, stages=3, use_tma=True), 256: HOPPER_TILES[128]},
}
# Tiles of GPUs before Hopper, of GeForce Blackwell and of AMD's, where those spill, do not compile
# or want more shared memory than there is.
OTHER_TILES = {
    16: MmaConfig(64, 16, stages=2),
    32: MmaConfig(64, 32, words=16, scale_after=False, stages=2),
    64: MmaConfig(128, 64, words=16, scale_after=False, warps=8, stages=2),
}


def has_hopper_tiles(gpu: Gpu) -> bool:
    """Whether a GPU has TMA and Hopper's shared memory, as GeForce Blackwell (12.0) has not."""
    return (9, 0) <= gpu.capability < (12, 0)


def tiles_of(gpu: Gpu, kind: str) -> dict[int, MmaConfig]:
    """Tiles by the most tokens they are for.

    Args:
        kind: a file's, such as ``"Q4_K"``.
    """
    if not has_hopper_tiles(gpu):
        tiles = OTHER_TILES
    else:
        tiles = HOPPER_TILES | HOPPER_TILES_OF.get(kind, {})
    if gpu.capability >= (10, 0):  # with as few registers they spill there
        tiles = {tokens: config._replace(maxnreg=0) for tokens, config in tiles.items()}
    return tiles


def least_tile(gpu: Gpu, kind: str, num_tokens: int) -> int:
    """Tokens of the smallest tile that holds all of a call's, at most MAX_TOKENS."""
    return min(_tile_tokens(tiles_of(gpu, file_kind(kind)), kind, num_tokens), MAX_TOKENS)


def _tile_tokens(tiles: Iterable[int], kind: str, num_tokens: int) -> int:
    """Tokens of the smallest tile that holds all of a call's, or where none does of a large one."""
    least = max(num_tokens, least_tokens(file_kind(kind)))
    return next((tokens for tokens in tiles if least <= tokens), min(MAX_TOKENS, max(tiles)))


@lru_cache(maxsize=4096)
def mma_heuristic(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> MmaConfig:
    """How ``mma`` takes so many tokens by W [num_rows, num_weights].

    Args:
        kind: W's kind, such as ``"Q4_K:planes"``.
    """
    kind = file_kind(kind)
    tiles = tiles_of(gpu, kind)
    config = fitted(kind, tiles[_tile_tokens(tiles, kind, num_tokens)])
    split = with_splits(gpu, config, kind, num_tokens, num_rows, num_weights)
    if config.tokens > MAX_TOKENS and split.splits > 1:  # too few tiles, and with splits they spill
        split = with_splits(gpu, tiles[MAX_TOKENS], kind, num_tokens, num_rows, num_weights)
    return split


def mma_candidates(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> list[MmaConfig]:
    """Configurations worth timing: tiles that hold the tokens, K in as many parts, half, double."""
    kind = file_kind(kind)
    found, least = [], least_tile(gpu, kind, num_tokens)
    for config in tiles_of(gpu, kind).values():
        if least <= config.tokens <= 4 * max(num_tokens, 8):
            split = with_splits(gpu, fitted(kind, config), kind, num_tokens, num_rows, num_weights)
            for splits in {split.splits, max(split.splits // 2, 1), 2 * split.splits}:
                found.append(split._replace(splits=splits))
    return [config for config in found if not mma_fits(gpu, config, kind)]


def mma_fits(gpu: Gpu, config: MmaConfig, kind: str) -> str:
    """The reason why a configuration cannot be launched, "" if it can."""
    if config.use_tma and gpu.capability < (9, 0):
        return "tensor descriptors are of capability 9.0 and up"
    if config.tokens < least_tokens(file_kind(kind)):
        return f"tiles of {kind} have {least_tokens(file_kind(kind))} tokens at least"
    if config.splits > 1 and not gpu.waits_for_stores:
        return "programs that share a tile's K are for NVIDIA's GPUs"
    return shared_refusal(gpu, shared_bytes(gpu, config, kind))


def shared_bytes(gpu: Gpu, config: MmaConfig, kind: str) -> int:
    """Shared memory of a tile's pipeline, in bytes: the steps that are in it.

    The compiler keeps one step less than there are stages; one more of the tokens where tensor
    cores read them from shared memory, as Hopper's do, and on AMD one more of all.
    """
    form = PLANE_FORMATS[f"{file_kind(kind)}:planes"]
    weights, sums = 8 * config.words, config.words if config.scale_after else 0
    row = sum(form.plane_bytes.get(plane, 0) for plane in "qhs") * weights / form.block_size
    weight_steps = config.stages - (gpu.capability >= (8, 0))
    token_steps = config.stages if has_hopper_tiles(gpu) else weight_steps
    return int(
        weight_steps * config.rows * row + token_steps * 2 * config.tokens * (weights + sums)
    )


def least_tokens(kind: str) -> int:
    """The fewest tokens that a tile of a kind has."""
    # Q3_K's pairs do not stay in registers for the instruction of 8 tokens.
    return 16 if kind == "Q3_K" else 8


def fitted(kind: str, config: MmaConfig) -> MmaConfig:
    """``config`` with the stages that fit: one of Q8_0 takes twice the bytes."""
    return config._replace(stages=max(config.stages - 1, 2)) if kind == "Q8_0" else config


def at_once(gpu: Gpu, config: MmaConfig, kind: str) -> int:
    """Programs of a tile of few tokens that run at once."""
    return gpu.num_sms * FEWER_PROGRAMS.get((file_kind(kind), config.tokens), PROGRAMS_OF_SM)


def wave_refusal(gpu: Gpu, config: MmaConfig, kind: str, num_tokens: int, num_rows: int) -> str:
    """Why a choice that was measured with other rows of W is none for these, or ""."""
    if config.tokens > FEW_TOKENS or config.warps != 4:
        return ""
    programs = cdiv(num_rows, config.rows) * cdiv(num_tokens, config.tokens) * config.splits
    if config.splits > 1 and programs > at_once(gpu, config, kind):
        return f"{programs} programs that share K do not run at once"
    if config.maxnreg and programs <= at_once(gpu, config, kind):
        return f"{programs} programs run at once without a bound on registers"
    return ""


def with_splits(
    gpu: Gpu, config: MmaConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> MmaConfig:
    """``config``, K split among as many programs as run at once.

    One more would wait for all others. By 16 tokens of Q4_K, 4096x14336 takes 18.4 us in six parts,
    which are 384 programs of 396 that an H200 holds, 22.0 in four and 22.4 in eight; 8192x8192
    takes 19.3 in three and 24.5 in four (``device_us`` of ``gemm_quant`` under ``products.forced``,
    b80b7d9).
    """
    if not gpu.waits_for_stores:
        return config
    tiles = cdiv(num_rows, config.rows) * cdiv(num_tokens, config.tokens)
    steps, splits = max(cdiv(num_weights, 8 * config.words), 1), 1
    if config.tokens <= FEW_TOKENS:
        most = min(at_once(gpu, config, kind) // tiles, num_weights // LEAST_WEIGHTS)
        splits = cdiv(steps, cdiv(steps, max(most, 1)))  # every one has steps
    else:
        while tiles * splits < PROGRAMS and steps // (2 * splits) >= STEPS:
            splits *= 2
    # Registers are bounded so that an SM holds one program more. Where there are not as many, some
    # SMs would have that one and others none: 14336x4096 took 22.4 us so, and 18.2 without, timed
    # as the others.
    is_one_wave = config.warps == 4 and tiles * splits <= at_once(gpu, config, kind)
    maxnreg = 0 if is_one_wave else config.maxnreg
    return config._replace(splits=splits, maxnreg=maxnreg)
