"""Launch choices of experts' products in FP8: by pair, or sorted and in tiles.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from functools import partial

from ferrum_triton.kernels import hopper_config as hopper
from ferrum_triton.kernels.fp8.config import MOST_NARROW, gemv, gemv_refusal, shared_bytes
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu
from ferrum_triton.kernels.moe.dense_config import FEW_PAIRS, LEAST_PAIRS
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
from ferrum_triton.quant.fp8 import BLOCK

# Pairs of a tile at most. With 128 an SM has one program, and no other multiplies while it adds:
# down by 4,096 tokens takes an H200 456 us, and 397 with 64. ``python -m bench.tune
# gemm_moe_id_fp8_128x128 --case m4096`` timed both; the table that ships has them.
MOST_PAIRS = 64


def tiles(pairs: int, rows: int, warps: int, stages: int) -> Config:
    """A launch of sorted pairs: a tile's pairs, and its rows of an expert's matrix."""
    return {
        "path": "sorted",
        "BLOCK_M": pairs,
        "BLOCK_N": rows,
        "TOKENS_TALL": pairs > MOST_NARROW,
        "num_warps": warps,
        "num_stages": stages,
    }


def heuristic(
    gpu: Gpu,
    native: bool,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    *,
    is_gated: bool,
) -> Config:
    """Few pairs by themselves; then tiles of what an expert has, by ``bench.tune`` on an H200."""
    if gpu.arch == INTERPRETER:
        return gemv(8, 256, 4) if num_pairs <= num_experts else tiles(LEAST_PAIRS, 32, 4, 2)
    if num_pairs <= FEW_PAIRS or num_experts > MAX_EXPERTS:
        return gemv(8, 512, 4) if is_gated else gemv(16, 256, 4)
    # Codes that become float16 take registers: larger tiles spill on sm_80.
    most = MOST_PAIRS // 2 if is_gated and not native else MOST_PAIRS
    pairs = min(max(next_power_of_2(cdiv(num_pairs, num_experts)), LEAST_PAIRS), most)
    wide = [(128, 8, 3)] if native else []
    for rows, warps, stages in (*wide, (64, 4, 4), (64, 4, 3), (64, 4, 2)):
        config = tiles(pairs, rows, warps, stages)
        if not _refusal(gpu, config, native, is_gated):
            return config
    return tiles(min(pairs, 32), 32, 4, 2)


def candidates(
    gpu: Gpu,
    native: bool,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    *,
    is_gated: bool,
) -> list[Config]:
    """Launches worth timing: tiles of about what an expert has, of more rows or fewer."""
    average = next_power_of_2(cdiv(num_pairs, num_experts))
    found = [
        gemv(rows, columns, warps)
        for columns in (256, 512, 1024)
        for rows, warps in ((4, 4), (8, 2), (8, 4), (16, 4), (16, 8), (32, 4))
        if num_pairs <= 4 * FEW_PAIRS
    ]
    found += [
        tiles(pairs, rows, warps, stages)
        for pairs in sorted({min(max(p, LEAST_PAIRS), MOST_PAIRS) for p in (average, 2 * average)})
        for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8))
        for stages in (3, 4)
        if num_experts <= MAX_EXPERTS
    ]
    found += hopper.experts_candidates(num_pairs, num_experts)
    shape = (native, num_pairs, num_experts, num_rows, num_cols)
    return [config for config in found if not fits(gpu, config, *shape, is_gated=is_gated)]


def fits(
    gpu: Gpu,
    config: Config,
    native: bool,
    num_pairs: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    *,
    is_gated: bool,
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    if config.get("path") == "hopper":
        if not native:
            return "products of codes are another GPU's, or for activations of 16 bits"
        return hopper.experts_refusal(gpu, config, num_experts, num_cols, 8)
    if config.get("path") == "sorted" and num_experts > MAX_EXPERTS:
        return f"pairs of {MAX_EXPERTS} experts at most are sorted"
    return _refusal(gpu, config, native, is_gated)


def _refusal(gpu: Gpu, config: Config, native: bool, is_gated: bool) -> str:
    if config.get("path") == "gemv":
        return gemv_refusal(gpu, config, 2 if is_gated else 1)
    more = config["BLOCK_N"] * BLOCK * config["num_stages"] if is_gated else 0
    shared = shared_bytes(config, native) + more + 1024  # barriers take a few bytes
    # Sums of a group stand beside those of all.
    sums = config["BLOCK_N"] * config["BLOCK_M"] * (4 if is_gated else 2)
    return shared_refusal(gpu, shared) or tile_refusal(gpu, config, sums)


def _tunable(op: str, is_gated: bool) -> Tunable:
    return Tunable(
        op,
        ("native", "num_pairs", "num_experts", "num_rows", "num_cols"),
        partial(heuristic, is_gated=is_gated),
        partial(candidates, is_gated=is_gated),
        partial(fits, is_gated=is_gated),
        parameters=hopper.PARAMETERS
        | {
            "path": one_of("gemv", "sorted", "hopper"),
            "BLOCK_K": power_of_two(BLOCK, 1 << 12),
            "LINES": one_of(0),
            "BLOCK_M": power_of_two(LEAST_PAIRS, 128),
            "BLOCK_N": power_of_two(1, BLOCK),  # the rows of a tile share a block's scale
            "TOKENS_TALL": one_of(False, True),
        },
    )


TILES = _tunable("gemm_moe_id_fp8_128x128", False)
GATE_UP_TILES = _tunable("gemm_moe_id_gate_up_fp8_128x128", True)
