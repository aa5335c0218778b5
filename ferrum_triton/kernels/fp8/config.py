"""Launch choices of products with weights in FP8, and of the launch that makes activations codes.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from ferrum_triton.kernels import hopper_config as hopper
from ferrum_triton.kernels.gpu import INTERPRETER, Gpu
from ferrum_triton.kernels.parameters import (
    Config,
    integer,
    one_of,
    power_of_two,
    shared_refusal,
    tile_refusal,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.quant.fp8 import BLOCK, num_blocks

# Tokens of a tile at least, and where there are many.
LEAST_TOKENS, MOST_TOKENS = 16, 64
# Tokens up to which a product takes as long as its weights are read.
FEW_TOKENS = 64
# Tokens up to which they are the narrow operand: of more a thread would have a scale for each of
# many columns of its sums, and spill.
MOST_NARROW = 32
# Rows of weights from which a program of threads takes sixteen: fewer would leave SMs idle.
MANY_ROWS = 8192
# Tokens that threads along K take: of more, each would read the weights.
MOST_IN_GEMV = 1
# Columns that a split of K is worth a program for.
LEAST_OF_SPLIT = 1024
# Stages of a pipeline at most: steps of a loop in flight; with TALL_STAGES two programs fit an SM.
MOST_STAGES, TALL_STAGES = 5, 4
# Tiles of tokens that programs side by side take with the same rows of weights: what they read of
# activations should stay in L2.
TOKENS_TOGETHER = 16
# Groups that a program of the quantising launch takes at most.
MOST_GROUPS = 32


def groups_of(groups: int) -> Config:
    """A quantising launch: a program's groups, with eight values or four for a thread."""
    return {"GROUPS": groups, "num_warps": min(max(groups // 2, 1), 8)}


def quantising_heuristic(gpu: Gpu, num_tokens: int, num_cols: int) -> Config:
    """As many groups a program as leave every SM some programs."""
    groups = next_power_of_2(max(num_blocks(num_cols), 1))
    if gpu.arch != INTERPRETER:
        share = num_tokens * groups // (4 * gpu.num_sms)
        groups = min(groups, previous_power_of_2(max(share, 1)))
    return groups_of(min(groups, MOST_GROUPS))


def quantising_candidates(gpu: Gpu, num_tokens: int, num_cols: int) -> list[Config]:
    """Launches worth timing."""
    most = next_power_of_2(max(num_blocks(num_cols), 1))
    return [groups_of(groups) for groups in (1, 2, 4, 8, 16, 32) if groups <= most]


def tiles(tokens: int, rows: int, splits: int, lines: int, warps: int, stages: int) -> Config:
    """A product: a tile's tokens and rows of weights, splits of K, lines asked for ahead."""
    return {
        "path": "tiles",
        "BLOCK_M": tokens,
        "BLOCK_N": rows,
        "SPLITS": splits,
        "GROUP_M": TOKENS_TOGETHER,
        "TOKENS_TALL": tokens > MOST_NARROW,
        "LINES": lines,
        "num_warps": warps,
        "num_stages": stages,
    }


def gemv(rows: int, columns: int, warps: int, lines: int = 0) -> Config:
    """A launch of threads along K: a program's rows of weights, columns that it takes at a time."""
    return {
        "path": "gemv",
        "BLOCK_N": rows,
        "BLOCK_K": columns,
        "LINES": lines,
        "num_warps": warps,
    }


def gemv_refusal(gpu: Gpu, config: Config, num_matrices: int) -> str:
    """Why a launch of threads cannot hold its sums and the codes it has asked for; "" if it can."""
    words = config["BLOCK_N"] * config["BLOCK_K"] // 4
    return tile_refusal(gpu, config, 3 * num_matrices * words)  # a sum each, and those of two steps


def shared_bytes(config: Config, native: bool) -> int:
    """What a program keeps in shared memory: codes in flight, and an operand as float16."""
    sides = config["BLOCK_N"], config["BLOCK_M"]
    return BLOCK * (sum(sides) * config["num_stages"] + (0 if native else 2 * min(sides)))


def tile_tokens(num_tokens: int) -> int:
    """Tokens of the smallest tile that holds all of a call's, at most MOST_TOKENS."""
    return min(max(next_power_of_2(num_tokens), LEAST_TOKENS), MOST_TOKENS)


def heuristic(gpu: Gpu, native: bool, num_tokens: int, num_rows: int, num_cols: int) -> Config:
    """One token by threads; more in tiles, K in parts that fill the GPU; many by Hopper's kernel.

    Tiles of 64 tokens by 128 rows leave an SM two programs, of which one adds up sums while the
    other multiplies. By 4,096 tokens they take 1,047 us for 28672 x 4096, and tiles of 128 by 128
    take 1,088: ``python -m bench.tune gemm_fp8_128x128`` on an H200.

    The same tiles serve few tokens, since a load reads no token that is not there. By 16 tokens
    4096 x 14336 takes 23.4 us, and 23.8 in tiles of 16 by 64. By 24 tokens 28672 x 4096 takes 33.4
    us, and 44.5 in tiles of 32 by 64. Tables had rows of 16 and 64 tokens by 28672 x 4096, 34.6 and
    36.3 us, for which these tiles take 33.6 and 35.0; and of 64 by 4096 x 4096 tiles of 64 by 64,
    11.7 us here, for which they take 12.2.

    Hopper's kernel takes less where its larger tiles occupy half of the SMs. By 128 tokens 28672 x
    4096 takes 40.7 us for 49.9, and by 384 tokens 6144 x 4096 takes 33.6 us for 39.8, but 4096 x
    14336 takes 100 us for 71 (``bench.timing.Replay`` of ``gemm_fp8_128x128`` under
    ``TILES.forced`` of each, H200, what became 6c5ad5e).
    """
    if gpu.arch == INTERPRETER:
        if num_tokens == 1:
            return gemv(8, 256, 4)
        return tiles(LEAST_TOKENS, 32, 2 if num_cols > BLOCK else 1, 0, 4, 2)
    if num_tokens == 1:
        return gemv(16, 512, 4, 4) if num_rows >= MANY_ROWS else gemv(8, 1024, 4, 4)
    shape = (native, num_tokens, num_rows, num_cols)
    hopper_tiles = cdiv(num_tokens, 2 * hopper.TOKENS) * cdiv(num_rows, 2 * hopper.ROWS)
    config = hopper.dense(TOKENS_TOGETHER, 4, 1)
    fills = num_tokens > MOST_TOKENS and 2 * hopper_tiles > gpu.num_sms
    if fills and not fits(gpu, config, *shape):
        return config
    # Codes that become float16 take registers: larger tiles spill on sm_80.
    tokens, rows = (MOST_TOKENS, 128) if native else (tile_tokens(num_tokens), 64)
    lines = 4 if not native and num_tokens <= FEW_TOKENS else 0
    num_tiles = cdiv(num_rows, rows) * cdiv(num_tokens, tokens)
    most = min(max(num_cols // LEAST_OF_SPLIT, 1), 16)
    at_once = 2 * gpu.num_sms if native else gpu.num_sms
    splits = min(max(at_once // num_tiles, 1), most)
    for stages in range(TALL_STAGES if native else MOST_STAGES, 1, -1):
        config = tiles(tokens, rows, splits, lines, 4, stages)
        if not fits(gpu, config, *shape):
            return config
    return tiles(min(tokens, 32), 64, splits, lines, 4, 2)


def whole_waves(gpu: Gpu, num_tokens: int, num_rows: int, num_cols: int) -> int:
    """Tokens of the first of two calls, where they take less than one of Hopper's kernel; else 0.

    A wave is as many tiles as there are SMs. The last one takes as long as the others, however few
    tiles it has. Two calls, one of the tokens that fill the waves before it and one of the rest,
    take less where the rest is short. 4096 x 14336 takes 141 us for 213 by 1,025 tokens, 195 us for
    222 by 1,536, and 254 us for 322 by 2,049. By 1,025 tokens 4096 x 4096 takes 44 us for 64, and
    by 513 tokens 7168 x 2048 takes 27 us for 35. They take more where a wave takes little: 28672 x
    4096 246 us for 238 by 1,025 tokens, and 7168 x 2048 59 us for 52 by 1,537
    (``bench.timing.Replay`` of ``gemm_fp8_128x128`` in two calls and in one, H200, c6cf87f).

    Microseconds are those of an H200. A wave takes 8 for every 1,000 columns. A short product takes
    five, its weights at 4 TB/s, and its multiplications at 1 PFLOP/s.
    """
    tiles_n = cdiv(num_rows, 2 * hopper.ROWS)
    waves = cdiv(tiles_n * cdiv(num_tokens, 2 * hopper.TOKENS), gpu.num_sms)
    tiles_m = (waves - 1) * gpu.num_sms // tiles_n
    tokens = 2 * hopper.TOKENS * tiles_m
    saved = 0.008 * num_cols * (waves - cdiv(tiles_m * tiles_n, gpu.num_sms))
    weights = num_rows * num_cols
    rest = 5 + weights / 4e6 + 2 * (num_tokens - tokens) * weights / 1e9
    return tokens if tokens and saved > 1.1 * rest else 0


def candidates(
    gpu: Gpu, native: bool, num_tokens: int, num_rows: int, num_cols: int
) -> list[Config]:
    """Launches worth timing: tiles of these tokens, or of many, with more or fewer rows."""
    tokens = max(next_power_of_2(num_tokens), LEAST_TOKENS)
    found = []
    if num_tokens <= MOST_IN_GEMV:
        found += [
            gemv(rows, columns, 4, lines)
            for rows, columns in ((4, 2048), (8, 1024), (8, 2048), (16, 512), (16, 1024), (32, 512))
            for lines in (0, 4)
        ]
    if num_tokens <= 2 * FEW_TOKENS:
        found += [
            tiles(each, rows, splits, lines, 4, stages)
            for each in sorted({tokens, MOST_TOKENS})
            for rows in (64, 128)
            for splits in (1, 2, 4, 8)
            for lines, stages in ((0, 4), (4, 4), (4, 6), (16, 4))
        ]
    if num_tokens > FEW_TOKENS:
        found += [
            tiles(*sides, 1, 0, warps, stages)
            for sides, warps in (
                ((64, 64), 4),
                ((64, 128), 4),
                ((128, 64), 4),
                ((128, 64), 8),
                ((128, 128), 8),
                ((256, 64), 8),
            )
            for stages in (3, 4, 5)
        ]
        found += hopper.dense_candidates()
    shape = (native, num_tokens, num_rows, num_cols)
    return [config for config in found if not fits(gpu, config, *shape)]


def fits(
    gpu: Gpu, config: Config, native: bool, num_tokens: int, num_rows: int, num_cols: int
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    if config.get("path") == "gemv":
        if num_tokens > MOST_IN_GEMV:
            return f"by threads {num_tokens} tokens would each read the weights"
        return gemv_refusal(gpu, config, 1)
    if config.get("path") == "hopper":
        if not native:
            return "products of codes are another GPU's, or for activations of 16 bits"
        return hopper.dense_refusal(gpu, config, num_rows, num_cols)
    if native and config["BLOCK_M"] < tile_tokens(num_tokens):
        return f"{num_tokens} tokens read all weights twice in tiles of {config['BLOCK_M']}"
    if config["SPLITS"] > (steps := num_blocks(num_cols)):
        return f"SPLITS is {config['SPLITS']}, of {steps} steps"
    shared = shared_bytes(config, native) + 1024  # barriers take a few bytes
    # Sums of a group stand beside those of all.
    sums = 2 * config["BLOCK_N"] * config["BLOCK_M"]
    return shared_refusal(gpu, shared) or tile_refusal(gpu, config, sums)


QUANTISING = Tunable(
    "quantize_fp8_groups",
    ("num_tokens", "num_cols"),
    quantising_heuristic,
    quantising_candidates,
    parameters={"GROUPS": power_of_two(1, MOST_GROUPS)},
)

TILES = Tunable(
    "gemm_fp8_128x128",
    ("native", "num_tokens", "num_rows", "num_cols"),
    heuristic,
    candidates,
    fits,
    parameters=hopper.PARAMETERS
    | {
        "path": one_of("gemv", "tiles", "hopper"),
        "BLOCK_K": power_of_two(BLOCK, 1 << 12),
        "BLOCK_M": power_of_two(LEAST_TOKENS, 256),
        "BLOCK_N": power_of_two(1, BLOCK),  # the rows of a tile share a block's scale
        "SPLITS": integer(1, 16),
        "GROUP_M": power_of_two(1, 64),
        "TOKENS_TALL": one_of(False, True),
        "LINES": one_of(0, 4, 16),
    },
)
