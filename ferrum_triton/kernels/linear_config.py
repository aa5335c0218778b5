"""Launch choices of dense products: who takes a shape, and with which tiles."""

from ferrum_triton.kernels.gpu import INTERPRETER, Gpu
from ferrum_triton.kernels.parameters import (
    Config,
    integer,
    one_of,
    power_of_two,
    shared_refusal,
    tile_refusal,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops.linear import MOST_TOKENS

# Tokens of a tile, some of them padding; "mma" and "matvec" take MOST_TOKENS at most.
LEAST_IN_TILES, MOST_IN_TILES = 16, 64
# Columns that a split of K is worth a program for.
LEAST_OF_SPLIT = 1024
# Float32 sums that a thread of "matvec" may have: of 255 registers, as many hold what is loaded.
MOST_SUMS = 64

BLAS: Config = {"path": "blas"}


def matvec(rows: int, columns: int, warps: int, lines: int) -> Config:
    """A launch of threads along K."""
    return {
        "path": "matvec",
        "BLOCK_N": rows,
        "BLOCK_K": columns,
        "LINES": lines,
        "num_warps": warps,
    }


def mma(rows: int, warps: int, depth: int, lines: int) -> Config:
    """A launch of tensor cores."""
    return {"path": "mma", "BLOCK_N": rows, "DEPTH": depth, "LINES": lines, "num_warps": warps}


def tiles(rows: int, columns: int, splits: int, warps: int, stages: int) -> Config:
    """A launch of tiles."""
    return {
        "path": "tiles",
        "BLOCK_N": rows,
        "BLOCK_K": columns,
        "SPLITS": splits,
        "num_warps": warps,
        "num_stages": stages,
    }


def tokens_of_tile(num_tokens: int) -> int:
    """Tokens of a tile: a power of two."""
    return max(LEAST_IN_TILES, next_power_of_2(num_tokens))


def shared_bytes(config: Config, num_tokens: int) -> int:
    """What a program of 16-bit operands keeps in shared memory."""
    rows = config["BLOCK_N"] + tokens_of_tile(num_tokens)
    return 2 * rows * config["BLOCK_K"] * config["num_stages"]


def heuristic(gpu: Gpu, aligned: bool, num_tokens: int, num_rows: int, num_cols: int) -> Config:
    """Tensor cores on Hopper where every SM has a program; in the interpreter every product."""
    few = num_tokens <= MOST_TOKENS
    if num_tokens > MOST_IN_TILES:
        return BLAS
    if gpu.arch == INTERPRETER:
        if not few:
            return tiles(16, 64, 2, 4, 2) if aligned else BLAS
        return mma(16, 2, 2, 0) if num_tokens > 2 and aligned else matvec(8, 256, 8, 0)
    if gpu.capability[0] != 9 or not aligned:
        return BLAS
    if few:
        return mma(16, 4, 8, 16) if num_rows >= 16 * gpu.num_sms else BLAS
    return _tiles_of(gpu, num_tokens, num_rows, num_cols)


def _tiles_of(gpu: Gpu, num_tokens: int, num_rows: int, num_cols: int) -> Config:
    """Tiles where they are few, and nearly as many as SMs once K is split."""
    num_tiles = cdiv(num_rows, 64)
    most = max(num_cols // LEAST_OF_SPLIT, 1)
    splits = min(gpu.num_sms // num_tiles, most)
    if splits == 0 or (splits < most and num_tiles * splits < 0.7 * gpu.num_sms):
        return BLAS
    # Of 64 tokens 6144x4096 takes 18.7 us unsplit, and cuBLAS 16.3: python -m bench.tune
    # gemm --case k4096/m64.
    if splits == 1 and num_tokens > 32:
        return BLAS
    return tiles(64, 128, splits, 4, 5)


def candidates(
    gpu: Gpu, aligned: bool, num_tokens: int, num_rows: int, num_cols: int
) -> list[Config]:
    """Launches worth timing."""
    found = [
        *(tiles(64, 128, splits, 4, stages) for splits in (1, 2) for stages in (4, 5, 6)),
        *(tiles(64, 128, splits, 4, 4) for splits in (3, 4)),
        tiles(64, 64, 2, 4, 8),
    ]
    if num_tokens <= MOST_TOKENS:
        found += [
            mma(8, 4, 4, 16),
            mma(8, 4, 8, 16),
            mma(8, 8, 4, 16),
            mma(16, 4, 8, 4),
            mma(16, 4, 4, 16),
            mma(16, 8, 2, 16),
            mma(16, 8, 4, 16),
        ]
    if num_tokens <= 2:
        found += [matvec(4, 1024, 4, 16), matvec(4, 2048, 8, 64)]
    shape = (aligned, num_tokens, num_rows, num_cols)
    return [*(config for config in found if not fits(gpu, config, *shape)), BLAS]


def fits(
    gpu: Gpu, config: Config, aligned: bool, num_tokens: int, num_rows: int, num_cols: int
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    path = config.get("path")
    if path == "blas":
        return ""
    most = MOST_IN_TILES if path == "tiles" else MOST_TOKENS
    if num_tokens > most:
        return f"{path} takes {most} tokens at most"
    if path == "mma":
        ptx = gpu.capability >= (8, 0) or gpu.arch == INTERPRETER
        return "" if aligned and ptx else "mma takes 16 bytes at a time, on an NVIDIA GPU"
    if path == "tiles":
        return _tiles_refusal(gpu, config, aligned, num_tokens, num_cols)
    sums = config["BLOCK_N"] * config["BLOCK_K"] * num_tokens
    threads = gpu.warp_size * config["num_warps"]
    return f"{sums} sums are too many for {threads} threads" if sums > MOST_SUMS * threads else ""


def _tiles_refusal(gpu: Gpu, config: Config, aligned: bool, num_tokens: int, num_cols: int) -> str:
    """Why tiles cannot take a shape; "" if they can."""
    if not aligned:
        return "tiles takes 16 bytes at a time"
    if config["SPLITS"] > (steps := cdiv(num_cols, config["BLOCK_K"])):
        return f"SPLITS is {config['SPLITS']}, of {steps} steps"
    shared = shared_bytes(config, num_tokens) + 1024  # barriers take a few bytes
    sums = config["BLOCK_N"] * tokens_of_tile(num_tokens)
    return shared_refusal(gpu, shared) or tile_refusal(gpu, config, sums)


gemm_config = Tunable(
    "gemm",
    ("aligned", "num_tokens", "num_rows", "num_cols"),
    heuristic,
    candidates,
    fits=fits,
    # How tiles fill the SMs decides. 4096 rows are 64 tiles, which by two splits are 128 programs
    # on an H200's 132 SMs. 5120 rows would be 160 programs: a second wave for the last 28.
    within={"num_rows": 1.18},
    parameters={
        "path": one_of("mma", "matvec", "tiles", "blas"),
        "BLOCK_N": power_of_two(1, 64),
        "BLOCK_K": power_of_two(8, 1 << 14),
        "SPLITS": integer(1, 16),
        "DEPTH": power_of_two(1, 8),
        "LINES": one_of(0, 4, 8, 16, 32, 64, 128),
    },
)
