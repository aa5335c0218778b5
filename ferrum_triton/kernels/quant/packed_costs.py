"""What a packed product on Hopper takes, by count: its tiles and programs where no row serves.

A product is ``tiles`` of W's rows by tokens, of ``blocks`` of 256 weights of K each. It takes as
long as its longest program. That one's time is the number of its blocks times the time of a block,
and a constant for its beginning and its end. Programs take whole tiles, or share each tile's K
evenly, or share all tiles' wherever a cut falls.

From 33 tokens on the numbers below were fitted to 16 shapes by 32 to 2,048 tokens of Q4_K, Q4_0 and
Q6_K (``bench.timing.Replay`` of ``gemm_quant`` as chosen, and under ``products.forced`` of up to
six configurations, H200, a copy of d35f2e3 whose programs each add a slice). What they choose takes
0.8 % longer on average than the fastest of those configurations and of what was chosen before; the
longest is 1.27 times as long.

By fewer tokens they were fitted to 19 shapes by 16 and 32 tokens of the same formats (the same, up
to 14 configurations, copies of 71162e4). There the plain kernel's tiles are counted as well, and
what takes less is chosen. With the measured rows, it takes 0.7 % longer on average than the fastest
of all that was timed, and 1.11 times as long at most. By 32 tokens, Q5_K was timed at four shapes
and Q8_0 at four, chosen as Q6_K is, and Q4_1 at five, chosen as Q4_0 is (449e373 and 97d9a7c;
docs/packed-products.md has the times). Q4_Z, Q5_0 and Q5_1 were not.

Tiles of 32 that are shared evenly take 1.4 us less where warpgroups take turns. Counted so, three
of 25 shapes by 24 and 32 tokens of Q4_K and Q4_0 leave the plain kernel: 4096x14336 of Q4_0 takes
17.2 us for 18.3, 7168x8192 17.1 for 18.1, and 8192x8192 18.0 for 18.5. For each of the 25 the
choice is the faster one of those timed, or takes 1.3 % longer (``Replay`` of ``gemm_quant`` as
chosen and under ``products.forced``, in turns, dfe9d82).

Where the last tokens have a smaller tile, the numbers of full ones told up to 11 % less than 16
cases took (``Replay`` of ``gemm_quant``, copies of 449e373). RAGGED_TURN_US is an estimate of that,
less what was gained in stores since (:func:`~ferrum_triton.kernels.hopper.packed.multiply_tile`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.quant.activations import TICKETS
from ferrum_triton.kernels.quant.mma_config import MmaConfig
from ferrum_triton.kernels.quant.packed_config import (
    BLOCK,
    LARGE,
    MOST_BY_LARGE,
    PINGPONG,
    STEP,
    TILE_ROWS,
    WARPGROUPS,
    PackedConfig,
    fewest_tokens,
    has_offsets,
    is_served,
    last_tile,
    packed_fits,
    with_rings,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat

# Slices of a tile's tokens that its programs add up, at most: a ticket has a bit for each.
MOST_SLICES = 8
# Tokens of a tile from which on an SM has one program.
LEAST_ALONE = 64
# Microseconds of a block of a tile of 128 rows, by its tokens and the programs for an SM: of four
# bits whose scales are no integers, of four bits with such, and of more bits or of a table of
# values; None of what was not timed.
BLOCK_US = {
    (16, 1): (0.62, 0.67, None),
    (16, 2): (1.22, 1.29, None),
    (32, 1): (0.69, 0.77, 0.93),
    (32, 2): (1.37, 1.44, None),
    (64, 1): (0.96, 0.96, 1.17),
    (128, 1): (1.62, 1.62, 1.75),
    (256, 1): (2.9, 2.9, 2.96),
}


class Ends(NamedTuple):
    """Microseconds that a product takes beside its blocks.

    Attributes:
        whole: in whole tiles.
        turn: in whole tiles, by each that a program takes after its first.
        even: in tiles whose programs each add a slice of the sums.
        cut: cut anywhere, where a block may take longer (:func:`cut_factor`).
        pingpong: taken off ``even`` where warpgroups take turns.
    """

    whole: float
    turn: float
    even: float
    cut: float
    pingpong: float = 0.0


ENDS_US = {
    (16, 1): Ends(3.0, 3.0, 8.8, 8.3),
    (16, 2): Ends(5.0, 5.0, 8.3, 7.8),
    (32, 1): Ends(3.4, 3.4, 8.8, 8.8, pingpong=1.4),
    (32, 2): Ends(5.0, 5.0, 8.8, 8.8),
    (64, 1): Ends(3.0, 0.0, 8.0, 10.0),
    (128, 1): Ends(4.0, 0.0, 9.5, 11.0),
    (256, 1): Ends(7.0, 0.0, 13.0, 20.0),
}
# How many times as long a block takes that is cut anywhere, and the blocks of a row up to which it
# takes no longer in the largest tiles.
CUT, FEW_BLOCKS = 1.12, 32
# What each tile after a program's first takes beside its blocks where the last tiles are parts.
RAGGED_TURN_US = 1.5
# The plain kernel by its tiles of 64 rows: what a product takes beside its blocks, and each of them
# that an SM takes one after the other, by a tile's tokens and of the same three sorts.
MMA_END_US = 5.0
MMA_ROWS, MMA_BLOCK_US = 64, {16: (0.335, 0.40, 0.5), 32: (0.42, 0.50, 0.53)}
# Weights of the smallest matrix that both were timed with.
LEAST_WEIGHTS = 1 << 22
# Decoding W and cuBLAS: microseconds of a launch, of a weight, and of a token's product with one.
DECODE_US = (4.0, 1.04e-6, 2.4e-9)
# How many times as fast a choice has to be, by count, as the one whose place it takes.
GAIN = 1.1


class Programs(NamedTuple):
    """How programs share a product's tiles.

    Attributes:
        count: how many there are.
        blocks: blocks that the longest one takes.
        slices: parts of a tile's tokens that its programs add up, each its own; 1 where one program
            adds all, or a tile is not shared.
        cut: whether a program may take parts of several tiles.
    """

    count: int
    blocks: int
    slices: int
    cut: bool


def programs_of(config: PackedConfig, tiles: int, blocks: int, num_sms: int) -> Programs:
    """How ``tiles`` of ``blocks`` each are shared out to programs.

    Streamed, every tile has as many programs as another if none of them then has more to do than it
    would have among all SMs, by a block or the time that a cut costs: no program adds to two tiles,
    fewer sums are written and read back, and all programs of a tile add them. Q4_K 4096x14336 by
    128 tokens takes 35.5 us on 128 programs and 38.4 on 132 (``bench.timing.Replay`` of
    ``gemm_quant`` under ``products.forced`` of overlapped spans of two, H200, what became 186cdb5).
    """
    units, most = tiles * blocks, num_sms * config.ctas_per_sm
    if not config.streamed:
        count = min(most, tiles)
        return Programs(count, cdiv(tiles, count) * blocks, 1, False)
    count = min(most, units)
    for_a_tile, cut = count // tiles, cdiv(units, count)
    slices = min(next_power_of_2(max(for_a_tile, 1)), MOST_SLICES, config.tokens // 8)
    if tiles * WARPGROUPS > TICKETS.value:
        slices = 1
    if for_a_tile and cdiv(blocks, for_a_tile) <= (CUT * cut + 1 if slices > 1 else cut):
        return Programs(tiles * for_a_tile, cdiv(blocks, for_a_tile), slices, False)
    return Programs(count, cut, 1, True)


def cut_factor(tokens: int, blocks: int) -> float:
    """How many times as long a block takes where tiles are cut anywhere.

    In tiles of 256 tokens, by rows of up to 8,192 weights, it takes as long as in whole tiles. So
    counted, 12 cases of Q4_K would change their tiles, and were timed in both. The ten of such rows
    took 0.6 to 11 % less: 51200x5120 by 192 tokens 193 us for 215, 57344x8192 by 256 337 for 367.
    The two of longer rows took more: 3584x18944 by 256 75.9 us for 72.2, 8192x28672 by 768 593 for
    545. They are counted as before (``bench.timing.Replay`` of ``gemm_quant`` under
    ``products.forced`` of both in turns, H200, 8827b54).
    """
    return 1.0 if tokens > LARGE and blocks <= FEW_BLOCKS else CUT


def _sort(fmt: BlockFormat) -> int:
    """Which of the three sorts of formats one is of, in the tables above."""
    return 2 if fmt.bits > 4 or fmt.values else int(bool(fmt.scale_code))


def microseconds(
    gpu: Gpu,
    config: PackedConfig,
    fmt: BlockFormat,
    num_tokens: int,
    num_rows: int,
    num_weights: int,
) -> float | None:
    """What a product takes by count; None where no such tile was timed."""
    tokens, sort = config.tokens, _sort(fmt)
    timed = BLOCK_US.get((tokens, config.ctas_per_sm))
    if timed is None or timed[sort] is None or (fmt.values and tokens < LEAST_ALONE):
        return None
    block, ends = timed[sort], ENDS_US[tokens, config.ctas_per_sm]
    row_tiles, blocks = cdiv(num_rows, TILE_ROWS), cdiv(num_weights, BLOCK)
    tiles = cdiv(num_tokens, tokens) * row_tiles
    programs = programs_of(config, tiles, blocks, gpu.num_sms)
    if programs.cut:
        return programs.blocks * block * cut_factor(tokens, blocks) + ends.cut
    if config.streamed:
        even = ends.even - ends.pingpong if config.pingpong else ends.even
        return programs.blocks * block + (even if programs.slices > 1 else ends.whole)
    turns = cdiv(tiles, programs.count)
    if (part := last_tile(config, num_tokens)) < tokens:
        # The first program has as many full tiles as any other, and as many of all.
        full = cdiv(num_tokens // tokens * row_tiles, programs.count)
        taken = full * block + (turns - full) * BLOCK_US[part, 1][sort]
        return blocks * taken + ends.whole + (turns - 1) * RAGGED_TURN_US
    alone = cdiv(tiles - (turns - 1) * programs.count, gpu.num_sms) == 1
    last = BLOCK_US[tokens, 1][sort] if alone else block
    return blocks * ((turns - 1) * block + last) + ends.whole + (turns - 1) * ends.turn


def mma_microseconds(
    gpu: Gpu, config: MmaConfig, fmt: BlockFormat, num_rows: int, num_weights: int
) -> float | None:
    """What the plain kernel takes by count; None where no such tile was timed."""
    if config.rows != MMA_ROWS or config.tokens not in MMA_BLOCK_US:
        return None
    programs = cdiv(num_rows, config.rows) * config.splits
    turns = cdiv(programs, gpu.num_sms) * cdiv(cdiv(num_weights, BLOCK), config.splits)
    return MMA_END_US + turns * MMA_BLOCK_US[config.tokens][_sort(fmt)]


def _tiles(gpu: Gpu, fmt: BlockFormat, tokens: int) -> list[PackedConfig]:
    """Configurations of a tile of ``tokens`` that are worth counting."""
    found = [_tile(gpu, fmt, tokens, streamed) for streamed in (False, True)]
    if tokens < LEAST_ALONE:
        pairs = [config._replace(ctas_per_sm=2) for config in found]
        found += [with_rings(gpu, config, fmt, joined=True) for config in pairs]
    return found


def _tile(gpu: Gpu, fmt: BlockFormat, tokens: int, streamed: bool) -> PackedConfig:
    """The configuration of a tile of ``tokens`` that a format takes.

    By 64, 128 and 256 tokens of 5120x5120, 28672x4096 and 8192x8192 it took 6 % longer at most than
    the fastest candidate of its tile (``bench.timing.Replay`` of ``gemm_quant`` of Q4_1, Q4_Z,
    Q5_0, Q5_K, Q8_0 and IQ4_NL under ``products.forced``, H200, what became 31a4fc3).
    """
    if tokens > LARGE:
        overlapped = fmt.bits == 4 or not streamed
        return with_rings(gpu, PackedConfig(tokens, 1, overlapped, streamed), fmt)
    if tokens == LARGE and _sort(fmt) == 0 and not fmt.has_minimum:
        return with_rings(gpu, PackedConfig(tokens, 2, True, streamed), fmt)
    apart = tokens < LARGE and has_offsets(fmt) and (fmt.has_minimum or tokens < LEAST_ALONE)
    span = 4 if apart and tokens >= LEAST_ALONE else 2
    config = PackedConfig(tokens, span, False, streamed, sums_offsets=apart)
    joined = with_rings(gpu, config, fmt, joined=True)
    return joined if joined.stages >= 2 else with_rings(gpu, config, fmt)


def in_turns(
    gpu: Gpu, config: PackedConfig, num_tokens: int, num_rows: int, num_weights: int
) -> PackedConfig:
    """A tile's configuration with ping-pong, where it gains: a program has one tile or a part.

    Where minimums and zeros are a product of their own, whole blocks with ping-pong took less then
    at 27 of 29 shapes by 24 to 64 tokens of Q4_K, Q4_0, Q4_Z, Q5_K and Q5_0: up to 5 %. One took as
    long, and Q4_K's 8192x8192 by 32 tokens 18.5 us for 18.3. 5120x17408 of Q4_K by 64 takes 32.0
    for 33.2, and 14336x4096 of Q4_Z 18.7 for 19.6. Where a program has several tiles, or parts of
    two, it mostly took more: 51200x5120 of Q4_K by 64 78.1 us for 73.9, 25600x5120 by 32 32.9 for
    31.1 (``bench.timing.Replay`` of ``gemm_quant`` as chosen and under ``products.forced``, in
    turns, H200, dfe9d82).
    """
    if config.tokens not in PINGPONG or config.ctas_per_sm > 1 or not config.sums_offsets:
        return config
    tiles = cdiv(num_tokens, config.tokens) * cdiv(num_rows, TILE_ROWS)
    programs = programs_of(config, tiles, cdiv(num_weights, BLOCK), gpu.num_sms)
    if programs.cut or tiles > programs.count:
        return config
    return config._replace(span=BLOCK // STEP, pingpong=True)


@lru_cache(maxsize=4096)
def best_by_count(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> tuple[PackedConfig, float] | None:
    """The configuration that takes least by count, and its microseconds; None where none fits."""
    fmt, shape = FORMATS[kind], (num_tokens, num_rows, num_weights)
    if not serves(gpu) or not is_served(fmt):
        return None
    sizes = {fewest_tokens(num_tokens)}
    if LARGE < num_tokens <= MOST_BY_LARGE:
        sizes.add(LARGE)
    configs = [
        in_turns(gpu, config, *shape) for size in sorted(sizes) for config in _tiles(gpu, fmt, size)
    ]
    timed = [
        (took, number, config)
        for number, config in enumerate(configs)
        if (took := microseconds(gpu, config, fmt, *shape)) is not None
        and not packed_fits(gpu, config, kind, *shape)
    ]
    if not timed:
        return None
    took, _, config = min(timed)
    return config, took


def packed_heuristic(
    gpu: Gpu,
    kind: str,
    num_tokens: int,
    num_rows: int,
    num_weights: int,
    other: MmaConfig | None,
) -> PackedConfig | None:
    """The configuration to launch where nothing was measured; None where another path is faster.

    Args:
        other: the plain kernel's tile; None where W would be decoded for cuBLAS.
    """
    best = best_by_count(gpu, kind, num_tokens, num_rows, num_weights)
    if best is None:
        return None
    config, took = best
    weights = num_rows * num_weights
    if other is None:
        launch, weight, product = DECODE_US
        is_slower = took * GAIN > launch + weights * (weight + product * num_tokens)
        return None if is_slower else config
    plain = mma_microseconds(gpu, other, FORMATS[kind], num_rows, num_weights)
    if plain is not None and (took > plain or weights < LEAST_WEIGHTS):
        return None
    return config


def count_refusal(
    gpu: Gpu, config: PackedConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> str:
    """Why tiles that were measured elsewhere are not for a shape; "" if they are.

    A row serves shapes beside its own, whose tiles may not fill whole waves as its own do. None was
    measured where the last tokens have a smaller tile: 6144x4096 by 288 tokens takes 45.3 us so and
    39.0 cut anywhere, of 43.7 by count both (``bench.timing.Replay`` of ``gemm_quant``, H200, trees
    of 71162e4 and of what became 449e373).
    """
    shape = num_tokens, num_rows, num_weights
    took, best = microseconds(gpu, config, FORMATS[kind], *shape), best_by_count(gpu, kind, *shape)
    return _refusal(took, best, GAIN if last_tile(config, num_tokens) == config.tokens else 1)


def mma_refusal(
    gpu: Gpu, tile: MmaConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> str:
    """Why the plain kernel's tile, measured at another shape, is not for one; "" if it is."""
    best = best_by_count(gpu, kind, num_tokens, num_rows, num_weights)
    took = mma_microseconds(gpu, tile, FORMATS[kind], num_rows, num_weights)
    return _refusal(took, best, GAIN)


def _refusal(took: float | None, best: tuple[PackedConfig, float] | None, gain: float) -> str:
    """Why a choice is none where the best takes less by ``gain``; "" where either is not known."""
    if took is None or best is None or took <= gain * best[1]:
        return ""
    return f"takes {took:.0f} us by count, and {best[1]:.0f} in tiles of {best[0].tokens}"
