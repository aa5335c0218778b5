"""Launch choices of elementwise ops: how many elements a program takes, on how many warps.

Chosen for every op whose elements are read once and written once; ``elementwise`` has the kernels.
"""

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import power_of_two, tile_refusal
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Config, Tunable

# 1024 elements on 4 warps: one 16-byte access of 16-bit values a thread.
BLOCK, WARPS = 1024, 4


def block_heuristic(gpu: Gpu, num_rows: int, num_cols: int) -> Config:
    """Block and warps for kernels that touch every element once.

    Few blocks: 1024 on 4 warps, one 16-byte access of 16-bit values a thread, spread over as many
    processors as possible. Where every processor has sixteen of those anyway, twice as many values
    a thread keep as many bytes in flight with half the programs to start.
    """
    many = num_rows * cdiv(num_cols, BLOCK) >= 16 * gpu.num_sms
    return {"BLOCK_C": 2 * BLOCK if many and num_cols > BLOCK else BLOCK, "num_warps": WARPS}


def block_candidates(gpu: Gpu, num_rows: int, num_cols: int) -> list[Config]:
    """8 to 32 values a thread."""
    return [
        {"BLOCK_C": block, "num_warps": warps}
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8)
        if 8 <= block // (32 * warps) <= 32
    ]


def block_fits(gpu: Gpu, config: Config, num_rows: int, num_cols: int) -> str:
    return tile_refusal(gpu, config, config["BLOCK_C"])


def tunable_blocks(op: str, dims: tuple[str, str]) -> Tunable:
    """The choice of an op that touches every element once."""
    return Tunable(
        op,
        dims,
        block_heuristic,
        block_candidates,
        fits=block_fits,
        parameters={"BLOCK_C": power_of_two(32, 1 << 14)},
    )


SPLITS = {
    name: tunable_blocks(name, ("num_tokens", "intermediate_size"))
    for name in ("fused_silu_mul_split", "fused_gelu_mul_split", "fused_gelu_tanh_mul_split")
}
# Tensors as rows, or as a single one where they are contiguous.
FLAT = {
    name: tunable_blocks(name, ("num_rows", "num_cols"))
    for name in (
        "silu_mul",
        "gelu",
        "scale_inplace",
        "add_inplace",
        "scaled_add_inplace",
        "add_bias",
    )
}
