"""Launch choices of packed products on Hopper in Gluon, and what fits a GPU.

The functions are pure, and import nothing of Gluon: they are asked on every GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.quant.activations import TICKETS, Order
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind

# Weights of a row that are a stage, those of them that are a step, and a warpgroup's rows of W.
BLOCK, STEP, ROWS = 256, 64, 64
# What activations are arranged in: of each block the steps, of 16 weights of each of four threads.
ORDER = Order(words=BLOCK // 8, halves=BLOCK // STEP)

# A step is unpacked, multiplied and waited for, while other warpgroups do so too. Or it is unpacked
# while the one before it is multiplied: as the assembler orders that, or held there.
TURNS, OVERLAPPED, HELD = "turns", "overlapped", "held"
ORDERS = (TURNS, OVERLAPPED, HELD)


class PackedConfig(NamedTuple):
    """How a product is launched.

    Attributes:
        tokens: tokens in a tile.
        warpgroups: warpgroups that multiply, of 64 rows of W each.
        order: of ORDERS, when a step is unpacked.
        streamed: programs share tiles' K, so that all have as much to do.
        ctas_per_sm: programs for each SM.
        stages: blocks of 256 weights in the ring of weights.
        x_stages: stages in the ring of activations.
        x_steps: steps of 64 of K in one of them.
    """

    tokens: int
    warpgroups: int = 2
    order: str = TURNS
    streamed: bool = True
    ctas_per_sm: int = 1
    stages: int = 4
    x_stages: int = 4
    x_steps: int = 1


# Registers of a thread that multiplies, and of all of a program's on average, which is what the
# compiler is told: of so many warpgroups that multiply, and programs for an SM.
REGISTERS = {(2, 1): (240, 168), (2, 2): (104, 80), (1, 1): (240, 128), (1, 2): (240, 128)}

# Of a stage of activations and of the ring of them, in steps, by a tile's tokens.
_RINGS = {8: (4, 16), 16: (4, 12), 32: (4, 8), 64: (2, 8), 128: (1, 6), 256: (1, 4)}
MOST_STAGES = 8


def is_served(fmt: BlockFormat) -> bool:
    """Whether the kernel unpacks a format: of four bits and more, with scales of whole words."""
    return fmt.low_bits >= 4 and fmt.scale_code in ("", "pair", "byte")


def block_bytes(fmt: BlockFormat) -> int:
    """Bytes of a block of a warpgroup's rows in shared memory."""
    words = 8 * (fmt.low_bits + fmt.high_bits) + (4 if fmt.scale_code else 0)
    d = 32 if fmt.has_minimum and not fmt.scale_code else 16
    return ROWS * (4 * words + d)


def shared_bytes(config: PackedConfig, fmt: BlockFormat) -> int:
    """Shared memory of a program: its rings, and what turns a tile round to be stored."""
    weights = config.stages * config.warpgroups * block_bytes(fmt)
    tokens = config.x_stages * config.x_steps * config.tokens * STEP * 2
    turned = config.warpgroups * min(ROWS * config.tokens * 4, 1 << 14)
    barriers = 16 * (config.stages + config.x_stages) + 128
    return weights + tokens + turned + barriers


def most_shared(gpu: Gpu, ctas_per_sm: int) -> int:
    """Shared memory that each of so many programs of an SM may have."""
    reserved = 1024  # of every program, beside its own
    return (gpu.shared_limit + reserved) // ctas_per_sm - reserved


def with_rings(gpu: Gpu, config: PackedConfig, fmt: BlockFormat) -> PackedConfig:
    """``config`` with as many stages of weights as there is room for beside the tokens'."""
    x_steps, steps = _RINGS[config.tokens]
    config = config._replace(x_steps=x_steps, x_stages=max(steps // x_steps, 2), stages=0)
    room = most_shared(gpu, config.ctas_per_sm) - shared_bytes(config, fmt)
    stages = room // (config.warpgroups * block_bytes(fmt) + 16)
    return config._replace(stages=min(stages, MOST_STAGES))


def packed_candidates(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> list[PackedConfig]:
    """Configurations worth timing."""
    fmt = FORMATS[file_kind(kind)]
    if not is_served(fmt):
        return []
    fewest = min(max(next_power_of_2(num_tokens), 8), 256)
    tiles = [128, 256] if num_tokens > 128 else [fewest]
    found = []
    for tokens in tiles:
        for ctas in (1, 2) if tokens == 64 else (2,) if tokens < 64 else (1,):
            for order in ORDERS:
                for streamed in (True, False):
                    config = PackedConfig(tokens, 2, order, streamed, ctas)
                    found.append(with_rings(gpu, config, fmt))
    shape = kind, num_tokens, num_rows, num_weights
    return [config for config in found if not packed_fits(gpu, config, *shape)]


def packed_fits(
    gpu: Gpu, config: PackedConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> str:
    """The reason why a configuration cannot be launched, "" if it can."""
    if gpu.capability != (9, 0) or not _serves(gpu):
        return "kernels in Gluon are for Hopper and tested versions of Triton"
    fmt = FORMATS[file_kind(kind)]
    if not is_served(fmt):
        return f"{kind} is not unpacked for Hopper's products"
    tiles = cdiv(num_rows, ROWS * config.warpgroups) * cdiv(num_tokens, config.tokens)
    if config.streamed and tiles > TICKETS.value:
        return f"{tiles} tiles are more than there are tickets for, {TICKETS.value}"
    if config.stages < 2:
        return "a ring has two stages at least"
    limit, taken = most_shared(gpu, config.ctas_per_sm), shared_bytes(config, fmt)
    if taken > limit:
        return f"{taken} bytes of shared memory are more than {limit}"
    return ""


def _serves(gpu: Gpu) -> bool:
    # Gluon moves between versions of Triton: it is imported where it may be used.
    from ferrum_triton.kernels.gluon import serves

    return serves(gpu)
