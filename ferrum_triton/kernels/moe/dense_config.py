"""Launch choices of experts' products in 16 and 32 bits: per pair or sorted, and tiles.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from functools import partial

from ferrum_triton.kernels import hopper_config as hopper
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu
from ferrum_triton.kernels.parameters import (
    Config,
    one_of,
    power_of_two,
    shared_refusal,
    tile_refusal,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS

# Pairs of a tile that tensor cores take at least, most of them padding where a tile is one pair's,
# and at most.
LEAST_PAIRS, MOST_PAIRS = 16, 128
# Pairs up to which each reads its expert by itself, whatever the number of experts.
FEW_PAIRS = 16
# Stages of a pipeline at most: steps of a loop in flight.
MOST_STAGES = 4


def tiles(path: str, pairs: int, rows: int, columns: int, warps: int, stages: int) -> Config:
    """A launch choice: a tile's pairs, its rows of an expert's matrix, and columns of a step."""
    return {
        "path": path,
        "BLOCK_M": pairs,
        "BLOCK_N": rows,
        "BLOCK_K": columns,
        "num_warps": warps,
        "num_stages": stages,
    }


def shared_bytes(config: Config, element_size: int, is_gated: bool) -> int:
    """What a program keeps in shared memory: the steps of its pipeline."""
    rows = config["BLOCK_N"] * (2 if is_gated else 1) + config["BLOCK_M"]
    return element_size * rows * config["BLOCK_K"] * config["num_stages"]


def heuristic(
    gpu: Gpu,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    element_size: int,
    *,
    is_gated: bool,
) -> Config:
    """Pairs by themselves while an expert is read about once; then tiles of what one has."""
    if gpu.arch == INTERPRETER:
        path = "per_pair" if num_pairs <= num_experts else "sorted"
        return tiles(path, LEAST_PAIRS, 32, 64, 4, 2)
    few = num_pairs <= max(num_experts // 2, FEW_PAIRS) or num_experts > MAX_EXPERTS
    average = 1 if few else cdiv(num_pairs, num_experts)
    if element_size == 4:  # multiply-adds of threads, whose operands are in registers
        return tiles("per_pair" if few else "sorted", LEAST_PAIRS, 32, 32, 4, 2)
    pairs = min(max(next_power_of_2(average), LEAST_PAIRS), MOST_PAIRS)
    path = "per_pair" if few else "sorted"
    for rows, columns in _sizes(gpu, few, pairs, is_gated):
        for stages in range(MOST_STAGES, 1, -1):
            config = tiles(path, pairs, rows, columns, 8 if rows > 64 else 4, stages)
            if not _refusal(gpu, config, element_size, is_gated):
                return config
    return tiles(path, min(pairs, 64), 32, 32, 4, 2)


def _sizes(gpu: Gpu, few: bool, pairs: int, is_gated: bool) -> list[tuple[int, int]]:
    """Rows and columns of a step, the best first, by ``bench.tune`` on an H200.

    Tiles of 256 rows by 128 pairs spill more than 64 bytes on sm_80, whose tensor cores take
    operands from registers: ``pytest tests/test_kernels_compile.py -k gemm_moe_id/bf16``.
    """
    if is_gated:
        wide = (128, 128 if pairs <= 32 else 64)
        return [(64, 128), (64, 64)] if few else [wide, (64, 64)]
    tall = 256 if pairs > 16 and gpu.capability >= (9, 0) else 128
    return [(128, 128), (64, 64)] if few else [(tall, 64), (64, 64)]


def candidates(
    gpu: Gpu,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    element_size: int,
    *,
    is_gated: bool,
) -> list[Config]:
    """Launches worth timing: tiles of about what an expert has, with longer and shorter steps."""
    average = next_power_of_2(cdiv(num_pairs, num_experts))
    sizes = average, 2 * average, min(average, MOST_PAIRS // 2)
    found = [
        tiles("per_pair", LEAST_PAIRS, rows, columns, warps, stages)
        for rows, warps in ((64, 4), (128, 8))
        for columns, stages in ((64, 4), (128, 3), (128, 4), (256, 3))
        if num_pairs <= 4 * num_experts
    ]
    found += [
        tiles("sorted", pairs, rows, columns, warps, stages)
        for pairs in sorted({min(max(p, LEAST_PAIRS), MOST_PAIRS) for p in sizes})
        for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        for columns, stages in ((64, 3), (64, 4), (128, 3))
        if num_experts <= MAX_EXPERTS
    ]
    found += hopper.experts_candidates(num_pairs, num_experts)
    shape = (num_pairs, num_experts, num_rows, num_cols, element_size)
    return [config for config in found if not fits(gpu, config, *shape, is_gated=is_gated)]


def fits(
    gpu: Gpu,
    config: Config,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    element_size: int,
    *,
    is_gated: bool,
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    if config.get("path") == "hopper":
        return hopper.experts_refusal(gpu, config, num_experts, num_cols, 8 * element_size)
    if config.get("path") == "sorted" and num_experts > MAX_EXPERTS:
        return f"pairs of {MAX_EXPERTS} experts at most are sorted"
    if config.get("path") == "per_pair" and config["BLOCK_M"] != LEAST_PAIRS:
        return f"a pair by itself has a tile of {LEAST_PAIRS}"
    return _refusal(gpu, config, element_size, is_gated)


def _refusal(gpu: Gpu, config: Config, element_size: int, is_gated: bool) -> str:
    sums = config["BLOCK_N"] * config["BLOCK_M"] * (2 if is_gated else 1)
    shared = shared_bytes(config, element_size, is_gated) + 1024  # barriers take a few bytes
    return shared_refusal(gpu, shared) or tile_refusal(gpu, config, sums)


def _tunable(op: str, is_gated: bool) -> Tunable:
    return Tunable(
        op,
        ("num_pairs", "num_experts", "num_rows", "num_cols", "element_size"),
        partial(heuristic, is_gated=is_gated),
        partial(candidates, is_gated=is_gated),
        partial(fits, is_gated=is_gated),
        within={"element_size": 1},
        parameters=hopper.PARAMETERS
        | {
            "path": one_of("per_pair", "sorted", "hopper"),
            "BLOCK_M": power_of_two(LEAST_PAIRS, MOST_PAIRS),
            "BLOCK_N": power_of_two(16, 256),
            "BLOCK_K": power_of_two(16, 256),
        },
    )


TILES = _tunable("gemm_moe_id", False)
GATE_UP_TILES = _tunable("gemm_moe_id_gate_up", True)
