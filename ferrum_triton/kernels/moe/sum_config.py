"""Launch choices of experts' products that are summed over a token's slots: in one launch or two.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from ferrum_triton.kernels.gpu import INTERPRETER, Gpu
from ferrum_triton.kernels.parameters import Config, one_of, power_of_two, tile_refusal
from ferrum_triton.kernels.rows import next_power_of_2
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.moe.expert_sum import FEW_TOKENS
from ferrum_triton.quant.fp8 import BLOCK

# Products as slots and then their sum.
IN_SLOTS: Config = {"path": "slots"}
# Tokens that one launch is for at most, whatever was measured.
MOST_SUMMED = 16
# Lines of a row that L2 is asked for ahead, where that is tried: none, a step's, or most.
LINES_TRIED = (0, 2, 8)
# Threads of a warp, and bytes that one loads at a time.
WARP, LOADED = 32, 16
# Rows of a program, of all of its slots together: of eight slots two of each, or of FP8 sixteen.
ROWS, FP8_ROWS = 16, 128


def one_launch(rows: int, columns: int, warps: int, lines: int = 0) -> Config:
    """One launch: a program's rows of each expert, columns of a step, lines asked for ahead."""
    return {
        "path": "summed",
        "BLOCK_N": rows,
        "BLOCK_K": columns,
        "LINES": lines,
        "num_warps": warps,
    }


def _columns(least: int, times: int, num_cols: int) -> int:
    """Columns of a step: of few slots more, so that as much is in flight, if there are as many."""
    return max(least, min(least * times, next_power_of_2(num_cols)))


def heuristic(
    gpu: Gpu, num_tokens: int, top_k: int, num_rows: int, num_cols: int, element_size: int
) -> Config:
    """One launch of few tokens, whose programs are all on SMs at the same time.

    Of eight slots in bfloat16 a step asks for 4 KiB, two loads a thread. A layer of two rows takes
    30.7, 55.0 and 101.8 us by one, two and four tokens, and one of four rows 30.9, 55.7 and 103.2
    (``bench.timing.Replay`` of ``bench.moe_layer``'s calls under ``SUMS.forced``, H100, e5ee8f9).
    """
    least = WARP * LOADED // element_size // 2
    slots = next_power_of_2(top_k)
    rows = max(min(2, ROWS // slots), 1)
    columns = _columns(least, ROWS // (rows * slots), num_cols)
    config = one_launch(8, 64, 4) if gpu.arch == INTERPRETER else one_launch(rows, columns, 4)
    refusal = fits(gpu, config, num_tokens, top_k, num_rows, num_cols, element_size)
    return IN_SLOTS if num_tokens > FEW_TOKENS or refusal else config


def candidates(
    gpu: Gpu, num_tokens: int, top_k: int, num_rows: int, num_cols: int, element_size: int
) -> list[Config]:
    """Launches worth timing."""
    load = WARP * LOADED // element_size
    found = [
        one_launch(rows, columns, warps, lines)
        for columns in (load // 2, load, 2 * load)
        for rows, warps in ((2, 4), (4, 4), (4, 8), (8, 4), (8, 8))
        for lines in LINES_TRIED
    ]
    shape = (num_tokens, top_k, num_rows, num_cols, element_size)
    return [*(config for config in found if not fits(gpu, config, *shape)), IN_SLOTS]


def fits(
    gpu: Gpu,
    config: Config,
    num_tokens: int,
    top_k: int,
    num_rows: int,
    num_cols: int,
    element_size: int,
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    if config.get("path") == "slots":
        return ""
    if num_tokens > MOST_SUMMED:
        return f"{num_tokens} tokens would each read their experts by themselves"
    values = next_power_of_2(top_k) * config["BLOCK_N"] * config["BLOCK_K"]
    # A sum each, and the weights of two steps.
    return tile_refusal(gpu, config, values + 2 * values * element_size // 4)


def fp8_heuristic(
    gpu: Gpu, native: bool, num_tokens: int, top_k: int, num_rows: int, num_cols: int
) -> Config:
    """One launch of few tokens, whose programs have more rows: each makes all codes by itself.

    Of eight slots a step asks for 16 KiB. A layer of eight rows takes 17.8 us by one token, and one
    of 16 rows 30.1 and 53.6 by two and four. Without lines that are asked for ahead they take 18.1,
    31.9 and 55.6 (as in :func:`heuristic`, under ``FP8_SUMS.forced``).
    """
    slots = next_power_of_2(top_k)
    rows = max(min(8 if num_tokens == 1 else 16, FP8_ROWS // slots), 1)
    columns = _columns(BLOCK, FP8_ROWS // (rows * slots), num_cols)
    config = one_launch(8, BLOCK, 4) if gpu.arch == INTERPRETER else one_launch(rows, columns, 8, 2)
    refusal = fp8_fits(gpu, config, native, num_tokens, top_k, num_rows, num_cols)
    return IN_SLOTS if num_tokens > FEW_TOKENS or refusal else config


def fp8_candidates(
    gpu: Gpu, native: bool, num_tokens: int, top_k: int, num_rows: int, num_cols: int
) -> list[Config]:
    """Launches worth timing."""
    found = [
        one_launch(rows, columns, warps, lines)
        for columns in (BLOCK, 2 * BLOCK, 4 * BLOCK)
        for rows, warps in ((4, 4), (8, 4), (8, 8), (16, 4), (16, 8))
        for lines in LINES_TRIED
    ]
    shape = (native, num_tokens, top_k, num_rows, num_cols)
    return [*(config for config in found if not fp8_fits(gpu, config, *shape)), IN_SLOTS]


def fp8_fits(
    gpu: Gpu,
    config: Config,
    native: bool,
    num_tokens: int,
    top_k: int,
    num_rows: int,
    num_cols: int,
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    if config.get("path") == "slots":
        return ""
    if num_tokens > MOST_SUMMED:
        return f"{num_tokens} tokens would each read their experts by themselves"
    codes = next_power_of_2(top_k) * config["BLOCK_K"]
    # A sum for each word of four codes, and the words of two steps.
    words = 3 * config["BLOCK_N"] * codes // 4
    # Activations are as many values as codes of a row, rounded and not yet.
    return tile_refusal(gpu, config, words + 2 * codes)


SUMS = Tunable(
    "gemm_moe_id_sum",
    ("num_tokens", "top_k", "num_rows", "num_cols", "element_size"),
    heuristic,
    candidates,
    fits,
    within={"element_size": 1},
    parameters={
        "path": one_of("summed", "slots"),
        "BLOCK_N": power_of_two(1, 64),
        "BLOCK_K": power_of_two(16, 1 << 12),
        "LINES": one_of(*LINES_TRIED),
    },
)

FP8_SUMS = Tunable(
    "gemm_moe_id_sum_fp8_128x128",
    ("native", "num_tokens", "top_k", "num_rows", "num_cols"),
    fp8_heuristic,
    fp8_candidates,
    fp8_fits,
    parameters={
        "path": one_of("summed", "slots"),
        "BLOCK_N": power_of_two(1, BLOCK),  # the rows of a program share a block's scale
        "BLOCK_K": power_of_two(BLOCK, 1 << 12),
        "LINES": one_of(*LINES_TRIED),
    },
)
