"""Launch choices of packed products on Hopper in Gluon, and what fits a GPU.

The functions are pure, and import nothing of Gluon: they are asked on every GPU.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.quant.activations import GROUP, TICKETS, Order
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind

# Weights of a row that are a stage, those of them that are a step, and a warpgroup's rows of W.
BLOCK, STEP, ROWS = 256, 64, 64
# Warpgroups that multiply, and rows of W in a tile.
WARPGROUPS = 2
TILE_ROWS = WARPGROUPS * ROWS
# What activations are arranged in: of each block the steps, of 16 weights of each of four threads.
ORDER = Order(words=BLOCK // 8, halves=BLOCK // STEP, sums=0, early=True)
# Bytes of a token's sums over a block's groups: eight, in two float16 each.
SUMS_BYTES = 32


class PackedConfig(NamedTuple):
    """How a product is launched.

    Attributes:
        tokens: tokens in a tile.
        span: steps of 64 of K that are multiplied in a row: 1, 2 or 4.
        overlapped: the steps of a block are unpacked while those before them are multiplied, or
            else in turns with other warpgroups, which takes fewer registers.
        streamed: programs share tiles' K, so that all have as much to do.
        ctas_per_sm: programs for each SM.
        stages: blocks of 256 weights in the ring of weights.
        x_stages: stages in the ring of activations, a span each; or 0, *joined*: a stage of weights
            comes with its block's activations, and is waited for and let go of with them.
        sums_offsets: minimums and zeros are a product of their own, with sums of activations, and
            weights are rounded where they are unpacked.
        pingpong: a program's warpgroups begin their products in turn, so that one unpacks while the
            other's products run.
    """

    tokens: int
    span: int = 1
    overlapped: bool = False
    streamed: bool = True
    ctas_per_sm: int = 1
    stages: int = 4
    x_stages: int = 4
    sums_offsets: bool = False
    pingpong: bool = False


def packed(config: PackedConfig) -> Config:
    """A launch choice of path ``"packed"``, as a table holds it."""
    return {"path": "packed", **config._asdict()}


def packed_tile(config: Config) -> PackedConfig:
    """The configuration of a launch choice of path ``"packed"``."""
    return PackedConfig(**{name: config[name] for name in PackedConfig._fields})


def order_of(config: PackedConfig) -> Order:
    """What a product takes activations in."""
    return ORDER._replace(sums=GROUP) if config.sums_offsets else ORDER


class Registers(NamedTuple):
    """Registers of a program's threads.

    Attributes:
        multiplying: registers of each thread that multiplies.
        average: registers of a thread on average over the program; the compiler is told this number
            (maxnreg).
    """

    multiplying: int
    average: int


# By programs for an SM.
_REGISTERS = {1: Registers(240, 168), 2: Registers(104, 80)}
# Fewer than there are, which gain where :func:`registers_of` says.
_FEW, _FEWER, _FEWEST = Registers(224, 160), Registers(192, 136), Registers(168, 120)


def usual_registers(config: PackedConfig) -> Registers:
    """As many as an SM's programs have room for."""
    return _REGISTERS[config.ctas_per_sm]


def registers_of(config: PackedConfig, fmt: BlockFormat) -> Registers:
    """The registers of a product by weights in a format, of one matrix or several.

    Weights of four bits gain by fewer, though an SM has no room for a second program then: most
    likely the compiler orders instructions otherwise. The figures are microseconds on an H200 by
    ``bench.timing.Replay`` of ``gemm_quant`` or of the op that is named, 3e0d60b or 7dc63c4 with
    either number.

    Tiles of 64 tokens, Q4_K: 6144x4096 takes 14.4 by the fewest for 15.2, 12288x4096 19.1 for 19.7,
    5120x17408 34.0 for 34.6, 4096x14336 21.3 for 21.5, 28672x4096 39.6 for 40.7 and gate and up of
    12288x4096 36.6 for 37.5; but those of 17408x5120 57.0 for 55.4. Q4_0 and Q4_Z gain by the
    fewest where programs share tiles' K: 6144x4096 takes 13.4 for 14.2 of Q4_0 and 14.3 for 14.9 of
    Q4_Z, 4096x14336 21.2 for 21.7 and 22.6 for 23.4. Elsewhere 28672x4096 of Q4_0 takes 37.9 for
    38.5 by a number between, and 39.3 by the fewest (35.6 for 34.7 at 3e0d60b). Q4_1 is taken for
    Q4_Z, and was not timed in turns: its 4096x4096 takes 10.4 for 10.8, and 28672x4096 34.3 as
    before (``bench.run gemm_quant``, 6516bfa and 0ba00fb).

    Tiles of 128 tokens, Q4_K whose steps overlap: 28672x4096 takes 59.9 for 61.9, 24576x4096 55.6
    for 57.1, 4096x12288 29.4 for 29.9, and gate and up of 12288x4096 54.6 for 55.4.

    Elsewhere fewer lose. Q5_K's 4096x14336 by 64 tokens takes 25.1 for 24.4, though its 6144x4096
    takes 15.5 for 16.5. Experts of 2048x768 of Q4_K take 111 for 108 by 1,024 tokens. In tiles of
    128 tokens 28672x4096 takes 67.0 for 64.8 of Q5_K, 69.4 for 68.3 of Q6_K and 56.5 for 56.0 of
    Q4_0, and by the fewest 4096x4096 of Q4_K 15.1 for 14.1. In tiles of 32 4096x14336 of Q4_K takes
    17.9 for 17.7, and in tiles of 256 57.0 for 54.6, though 28672x4096 takes 90.5 for 92.5.
    """
    if config.ctas_per_sm > 1 or fmt.bits != 4 or fmt.values:
        return usual_registers(config)
    is_scaled = bool(fmt.scale_code)
    if config.tokens == 64:
        return _FEWEST if is_scaled or config.streamed else _FEWER
    if config.tokens == LARGE and is_scaled and config.overlapped:
        return _FEW
    return usual_registers(config)


# Steps in the ring of activations, by a tile's tokens.
_STEPS = {8: 16, 16: 12, 32: 8, 64: 8, 128: 6, 256: 4}
MOST_STAGES = 8
# Tokens of a tile from which on several tiles of tokens are worth unpacking the weights for each.
LARGE = 128
# Tokens up to which tiles of LARGE were timed. 6144 x 4096 of Q4_K by 1,024 tokens takes 85.1 us in
# them and 96.5 in tiles of 256; by 2,048 these take 150 us, and decoding and cuBLAS 163
# (``bench.timing.Replay`` of ``gemm_quant`` under ``products.forced``, H200, 5373db1).
MOST_BY_LARGE = 1024
# Configurations to time, by the tokens of a tile: span, overlapped, joined, programs for an SM. All
# others spill, have no room for two stages, or took longer, as two rings did by up to 64 tokens
# (docs/packed-lessons.md).
_TRIED = {
    8: [(2, False, True, 2), (2, False, True, 1)],
    16: [(1, False, True, 2), (2, False, True, 2), (4, False, True, 2), (2, False, True, 1)],
    32: [(1, False, True, 2), (2, False, True, 2), (2, False, True, 1), (4, False, True, 1)],
    64: [(2, False, True, 1), (4, False, True, 1), (2, True, True, 1)],
    128: [(2, False, True, 1), (2, False, False, 1), (1, True, False, 1), (2, True, False, 1)],
    256: [(1, False, False, 1), (1, True, False, 1)],
}
# Tiles whose whole blocks are tried with ping-pong too. By 16 tokens it gained 1 %, by 128 nothing
# (docs/packed-lessons.md).
PINGPONG = (32, 64)


def is_served(fmt: BlockFormat) -> bool:
    """Whether the kernel unpacks a format: of four bits and more, with scales of whole words."""
    return fmt.low_bits >= 4 and fmt.scale_code in ("", "pair", "byte")


def has_offsets(fmt: BlockFormat) -> bool:
    """Whether weights are a scale times a code, less what a group of 32 has in common."""
    if not is_served(fmt) or fmt.bits not in (4, 5) or fmt.values:
        return False
    return (fmt.has_minimum and fmt.offset == 0) or (not fmt.scale_code and not fmt.has_minimum)


def block_bytes(fmt: BlockFormat) -> int:
    """Bytes of a block of a warpgroup's rows in shared memory."""
    words = 8 * (fmt.low_bits + fmt.high_bits) + (4 if fmt.scale_code else 0)
    d = 32 if fmt.has_minimum and not fmt.scale_code else 16
    return ROWS * (4 * words + d)


def steps_held(config: PackedConfig) -> int:
    """Steps of K whose activations there is room for."""
    return config.x_stages * config.span or config.stages * BLOCK // STEP


def shared_bytes(config: PackedConfig, fmt: BlockFormat) -> int:
    """Shared memory of a program: its rings, and what turns a tile round to be stored."""
    weights = config.stages * WARPGROUPS * block_bytes(fmt)
    tokens = steps_held(config) * config.tokens * STEP * 2
    if config.sums_offsets:
        tokens += config.stages * config.tokens * SUMS_BYTES
    turned = WARPGROUPS * min(ROWS * config.tokens * 4, 1 << 14)
    barriers = 16 * (config.stages + config.x_stages) + 128
    return weights + tokens + turned + barriers


def most_shared(gpu: Gpu, ctas_per_sm: int) -> int:
    """Shared memory that each of so many programs of an SM may have."""
    reserved = 1024  # of every program, beside its own
    return (gpu.shared_limit + reserved) // ctas_per_sm - reserved


def with_rings(
    gpu: Gpu, config: PackedConfig, fmt: BlockFormat, *, joined: bool = False
) -> PackedConfig:
    """``config`` with as many stages as there is room for."""
    x_stages = 0 if joined else max(_STEPS[config.tokens] // config.span, 2)
    config = config._replace(x_stages=x_stages, stages=0)
    room = most_shared(gpu, config.ctas_per_sm) - shared_bytes(config, fmt)
    one = shared_bytes(config._replace(stages=1), fmt) - shared_bytes(config, fmt)
    return config._replace(stages=min(room // one, MOST_STAGES))


def fewest_tokens(num_tokens: int) -> int:
    """Tokens of the smallest tile that holds all of a call's, or of the largest."""
    return min(max(next_power_of_2(num_tokens), 8), 256)


def early_programs(config: PackedConfig, num_tokens: int, num_sms: int) -> int:
    """Programs that begin while activations are arranged, the first ones of a product.

    The launch that arranges them has a program for a token, and each of these fills an SM until it
    ends.
    """
    return config.ctas_per_sm * max(num_sms - num_tokens, 0)


def last_tile(config: PackedConfig, num_tokens: int) -> int:
    """Tokens of the last tokens' tiles: where several are whole, perhaps a half or a quarter."""
    left = num_tokens % config.tokens or config.tokens
    if config.streamed or config.tokens < LARGE or num_tokens < config.tokens:
        return config.tokens
    return next(size for n in (4, 2, 1) if left <= (size := config.tokens // n))


def packed_candidates(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> list[PackedConfig]:
    """Configurations worth timing."""
    fmt = FORMATS[file_kind(kind)]
    if not is_served(fmt):
        return []
    tiles = (128, 256) if num_tokens > 128 else (fewest_tokens(num_tokens),)
    found = []
    ways = (False, True) if has_offsets(fmt) else (False,)
    for tokens, sums, streamed in product(tiles, ways, (True, False)):
        for span, overlapped, joined, ctas_per_sm in _TRIED[tokens]:
            config = PackedConfig(tokens, span, overlapped, streamed, ctas_per_sm)
            config = config._replace(sums_offsets=sums)
            found.append(with_rings(gpu, config, fmt, joined=joined))
            if tokens in PINGPONG and span == BLOCK // STEP:
                found.append(found[-1]._replace(pingpong=True))
    shape = kind, num_tokens, num_rows, num_weights
    return [config for config in found if not packed_fits(gpu, config, *shape)]


def experts_candidates(gpu: Gpu, kind: str, num_pairs: int) -> list[PackedConfig]:
    """Configurations worth timing where an expert has ``num_pairs`` pairs on average."""
    fmt = FORMATS[file_kind(kind)]
    if not is_served(fmt):
        return []
    # An expert of few pairs has one tile, of which it may take a part.
    average = next_power_of_2(num_pairs)
    sizes = {min(max(tokens, 16), 256) for tokens in (average // 2, average, 2 * average)}
    found = [
        with_rings(gpu, PackedConfig(tokens, span, overlapped, False, ctas), fmt, joined=joined)
        for tokens in sorted(sizes)
        for span, overlapped, joined, ctas in _TRIED[tokens]
    ]
    return [config for config in found if not experts_refusal(gpu, config, kind)]


def experts_refusal(gpu: Gpu, config: PackedConfig, kind: str) -> str:
    """The reason why a configuration cannot be launched for experts, "" if it can."""
    if config.streamed:
        return "programs take whole tiles of pairs"
    if config.sums_offsets:
        return "activations of pairs come without sums"
    return packed_fits(gpu, config, kind, config.tokens, TILE_ROWS, BLOCK)


def packed_fits(
    gpu: Gpu, config: PackedConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> str:
    """The reason why a configuration cannot be launched, "" if it can."""
    if not serves(gpu):
        return "kernels in Gluon are for Hopper and tested versions of Triton"
    fmt = FORMATS[file_kind(kind)]
    if not is_served(fmt):
        return f"{kind} is not unpacked for Hopper's products"
    if config.sums_offsets and not has_offsets(fmt):
        return f"groups of 32 of {kind} have nothing in common but a scale"
    if fmt.bits > 4 and (config.ctas_per_sm > 1 or (config.tokens == 256 and config.streamed)):
        return (
            f"{kind} would spill: two programs for an SM, and tiles of 256 tokens that are shared"
        )
    if config.tokens < min(num_tokens, LARGE):
        # 28672 x 4096 by 40 tokens took 59.0 us in tiles of 32, and 56.0 by the plain kernel
        # (``do_bench`` of gemm_quant under ``products.forced`` of each, 1137d98).
        return f"{num_tokens} tokens unpack all weights twice in tiles of {config.tokens}"
    if config.tokens == LARGE and num_tokens > MOST_BY_LARGE:
        return f"tiles of {LARGE} are for {MOST_BY_LARGE} tokens at most"
    if config.tokens > fewest_tokens(num_tokens) and num_tokens <= LARGE:
        return f"tiles of {config.tokens} are for more than {num_tokens} tokens"
    tiles = cdiv(num_rows, TILE_ROWS) * cdiv(num_tokens, config.tokens)
    if config.streamed and tiles > TICKETS.value:
        return f"{tiles} tiles are more than there are tickets for, {TICKETS.value}"
    if config.pingpong and config.overlapped:
        return "ping-pong is not for overlapped tiles, which unpack beside their own products"
    if config.stages < 2 or config.x_stages == 1:
        return "a ring has two stages at least"
    limit, taken = most_shared(gpu, config.ctas_per_sm), shared_bytes(config, fmt)
    if taken > limit:
        return f"{taken} bytes of shared memory are more than {limit}"
    return ""
