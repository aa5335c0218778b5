"""Launch choices of products in Gluon on Hopper, beside the plain kernels' own.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

import torch
import triton

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import Config, Parameter, integer, one_of, shared_refusal
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS

# Whether this is a version of Triton on which Gluon was tested. Others never import it.
TESTED = triton.__version__.startswith("3.6.") and torch.version.hip is None

# What launch choices call kernels in Gluon.
PATHS = ("hopper", "packed")

# A tile: two consumers' tokens by two blocks of rows; and the bytes of a step of K.
TOKENS, ROWS, STEP_BYTES = 64, 128, 128
# What a stage keeps: operands, and in FP8 a scale of each token.
STAGE = 2 * (TOKENS + ROWS) * STEP_BYTES
STAGE_SCALES = 2 * TOKENS * 4
# Barriers, and room to write results of experts 16 bytes a thread.
BARRIERS, EPILOGUE = 1024, 2 * TOKENS * ROWS
# Numbers of a row, at least, that rows begin apart by: 16 codes are as many as TMA and cp.async
# take.
ALIGNED = 16

PARAMETERS: dict[str, Parameter] = {
    "STAGES": integer(2, 8),
    "OUTPUTS": one_of(1, 2),
    "SHORT_LAST": one_of(False, True),
}


def serves(gpu: Gpu) -> bool:
    """Whether kernels in Gluon may be launched on a GPU."""
    return TESTED and gpu.capability == (9, 0)


def is_gluon(config: Config) -> bool:
    """Whether a launch choice is a kernel's in Gluon."""
    return config.get("path") in PATHS


def dense(together: int, stages: int, outputs: int) -> Config:
    """A dense product: tiles of tokens side by side, stages, and a consumer's result buffers."""
    return {"path": "hopper", "GROUP_M": together, "STAGES": stages, "OUTPUTS": outputs}


def experts(stages: int, short_last: bool) -> Config:
    """Experts' products; blocks of few pairs come last, or beside others of their expert."""
    return {"path": "hopper", "STAGES": stages, "SHORT_LAST": short_last}


def dense_candidates() -> list[Config]:
    """Dense launches worth timing: as much shared memory for stages, or for results."""
    return [dense(together, *room) for together in (8, 16, 32) for room in ((3, 2), (4, 1))]


def experts_candidates(num_pairs: int, num_experts: int) -> list[Config]:
    """Launches worth timing where an expert has several pairs: as many stages as there is room."""
    return [experts(4, last) for last in (True, False) if num_pairs >= 2 * num_experts]


def dense_refusal(gpu: Gpu, config: Config, num_rows: int, num_cols: int) -> str:
    """Why a dense product in FP8 cannot be launched; "" if it can."""
    outputs = 2 * config["OUTPUTS"] * TOKENS * ROWS * 2
    shared = config["STAGES"] * (STAGE + STAGE_SCALES) + outputs + BARRIERS
    return _refusal(gpu, shared, num_cols) or (
        "" if num_rows % (ALIGNED // 2) == 0 else f"rows of {num_rows} results are no 16 bytes'"
    )


def experts_refusal(gpu: Gpu, config: Config, num_experts: int, num_cols: int, bits: int) -> str:
    """Why experts' products cannot be launched; "" if they can."""
    if num_experts > MAX_EXPERTS:
        return f"pairs of {MAX_EXPERTS} experts at most are sorted"
    if bits > 16:
        return f"products of {bits} bits are no tensor cores'"
    stage = STAGE + (STAGE_SCALES if bits == 8 else 0)
    return _refusal(gpu, config["STAGES"] * stage + EPILOGUE + BARRIERS, num_cols)


def _refusal(gpu: Gpu, shared: int, num_cols: int) -> str:
    if not serves(gpu):
        return f"kernels in Gluon are not for {gpu.arch}"
    if num_cols % ALIGNED:
        return f"rows of {num_cols} columns are no multiples of {ALIGNED}"
    return shared_refusal(gpu, shared)
