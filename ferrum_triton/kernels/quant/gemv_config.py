"""Launch choices of matrix-vector products with weights in the repacked layout.

The functions are pure: they take a product's sizes, and ask no device.
"""

from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.quant.gemv_plan import persistent_threads
from ferrum_triton.kernels.quant.planes import span_of
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.quant.formats import FORMATS

# Tokens in 16 bits up to which these are the way.
FEW = 2
# Weights from which on two tokens become integers in a launch of their own, but of tall matrices:
# 5120x25600 by two tokens of Q4_K takes 26.6 us so and 28.7 otherwise, 25600x5120 24.9 and 23.9
# (`bench.run gemv_quant --case q4_K`, on an H200).
MANY_WEIGHTS = 1 << 25
# Rows of W from which on they are many, and groups of 32 in one from more than which on it is long.
MANY_ROWS, LONG_GROUPS = 16384, 256
# The least share of a persistent program's threads that has weights of a row, by tokens. Where
# three of four have, 4096x12288 of Q6_K takes 10.6 us for 11.8 by one token, but 14.1 for 12.5 by
# two.
LEAST_FULL = {1: 0.7, 2: 0.85}
# Threads of a persistent program at most: of 1024 each would have 64 registers.
MOST_THREADS = 512


def gemv(
    rows: int,
    warps: int,
    *,
    prefetch: bool = False,
    late_trigger: bool = False,
    prepared: bool = False,
) -> Config:
    """A launch in which a program takes one block of rows."""
    return {
        "path": "gemv",
        "rows": rows,
        "warps": warps,
        "prefetch": prefetch,
        "late_trigger": late_trigger,
        "prepared": prepared,
    }


def persistent(
    rows: int,
    ctas_per_sm: int,
    deferred: bool = False,
    ordered: bool = False,
    maxnreg: int = 0,
    late_trigger: bool = False,
) -> Config:
    """A launch of persistent programs."""
    return {
        "path": "persistent",
        "rows": rows,
        "ctas_per_sm": ctas_per_sm,
        "deferred": deferred,
        "ordered": ordered,
        "maxnreg": maxnreg,
        "late_trigger": late_trigger,
    }


def gemv_heuristic(
    kind: str, num_tokens: int, num_rows: int, num_groups: int, is_wide: bool = False
) -> Config:
    """A plain launch: rows of a program by what its registers hold, warps by the length of a row.

    Args:
        kind: format of the file, such as ``"Q4_K"``.
        num_tokens: rows of activations, up to 8.
        num_rows, num_groups: rows of W, and groups of 32 weights in one.
        is_wide: activations are float32.
    """
    if is_wide and num_tokens > 2:
        # Four rows of Q3_K would spill.
        rows, warps = (2 if num_tokens > 4 or kind == "Q3_K" else 4), 1
    elif is_wide:
        rows, warps = (8, 2) if num_tokens == 2 else (4, 4)
    elif num_rows < 2048:
        rows, warps = 4, 8
    elif num_tokens == 1 and kind in ("Q2_K", "Q3_K"):
        rows, warps = 16, 4
    elif num_tokens > 4 and kind in ("NVFP4", "Q4_Z"):
        rows, warps = 4, 4  # eight would spill, of NVFP4 256 bytes a thread on sm_80
    else:
        rows, warps = 8, 4
    parts = num_groups // span_of(FORMATS[kind], num_groups)
    # Tall matrices wait for memory, short ones for the last of their few programs' steps.
    idle = 1 / 8 if num_rows >= MANY_ROWS else 1 / 2 if num_tokens == 1 else 1 / 4
    is_large = num_rows < MANY_ROWS and num_rows * num_groups * 32 >= MANY_WEIGHTS
    prepared = num_tokens > 2 or (num_tokens == 2 and is_large)
    return gemv(
        min(rows, previous_power_of_2(num_rows)),
        warps_for(parts, warps, idle),
        late_trigger=num_rows < MANY_ROWS and num_tokens == 1,
        prepared=prepared and not is_wide,
    )


def persistent_heuristic(kind: str, num_tokens: int, num_rows: int) -> Config | None:
    """Where persistent programs gain on Hopper by rows of about 4096 weights; None elsewhere."""
    if num_tokens == 1:
        # 14336x4096 of Q4_0 takes 8.2 us for 9.2, of Q6_K 12.0 for 14.1.
        gains = 10240 <= num_rows < MANY_ROWS and kind not in ("Q3_K", "Q8_0")
        return persistent(8, 10) if gains else None
    # Two tokens' integers are costly to make: persistent programs keep them.
    if kind in ("Q2_K", "Q3_K"):
        return persistent(4, 2, deferred=True) if num_rows >= 4096 else None
    ctas = 3 if kind in ("Q5_K", "Q6_K", "Q8_0") else 4
    return persistent(8, ctas) if num_rows >= 6144 else None


def warps_for(parts: int, most: int, idle: float) -> int:
    """``most`` warps, or fewer where a share ``idle`` of their threads would have nothing to do."""
    warps = min(most, next_power_of_2(max(cdiv(parts, 32), 1)))
    while warps > 1 and parts < (1 - idle) * cdiv(parts, 32 * warps) * 32 * warps:
        warps //= 2
    return warps


def gemv_candidates(num_tokens: int, num_rows: int, num_groups: int) -> list[Config]:
    """Launches worth timing by one token or two."""
    late, is_long = num_rows < MANY_ROWS, num_groups > LONG_GROUPS
    if num_tokens == 1 and is_long:
        found = [
            gemv(4, 2, prefetch=True, late_trigger=late),
            gemv(8, 2, prefetch=True, late_trigger=late),
            gemv(8, 4, late_trigger=late),
            persistent(4, 1),
            persistent(4, 1, deferred=True, ordered=True),
            persistent(8, 1, deferred=True, ordered=True),
            persistent(4, 2, deferred=True, ordered=True, maxnreg=128, late_trigger=True),
        ]
    elif num_tokens == 1:
        found = [
            gemv(8, 2, late_trigger=late),
            gemv(8, 4, late_trigger=late),
            gemv(16, 4, late_trigger=late),
            persistent(4, 2, deferred=True, maxnreg=128, late_trigger=True),
            persistent(4, 4, deferred=True, maxnreg=64),
            persistent(8, 4),
            persistent(8, 10),
        ]
    elif is_long:
        found = [
            gemv(4, 2, prefetch=True),
            gemv(4, 4),
            gemv(8, 2),
            gemv(8, 4),
            gemv(8, 2, prepared=True),
            gemv(8, 4, prepared=True),
            persistent(4, 2),
            persistent(4, 1, deferred=True, ordered=True, late_trigger=True),
            persistent(8, 1, deferred=True, ordered=True, late_trigger=True),
            persistent(4, 2, deferred=True, ordered=True, maxnreg=128),
        ]
    else:
        found = [
            gemv(8, 2),
            gemv(8, 4),
            gemv(16, 4),
            gemv(8, 1, prepared=True),
            gemv(8, 4, prepared=True),
            persistent(4, 2, deferred=True),
            persistent(8, 4),
        ]
    return found


def persistent_refusal(kind: str, num_tokens: int, num_groups: int) -> str:
    """Why persistent programs refuse rows of ``num_groups`` groups; "" if they take them."""
    parts = num_groups // span_of(FORMATS[kind], num_groups)
    threads = persistent_threads(parts)
    if threads > MOST_THREADS or parts < LEAST_FULL[num_tokens] * threads:
        return f"{parts} parts of a row do not fill {threads} threads"
    return ""
