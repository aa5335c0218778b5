"""What a packed product on Hopper takes, by count: its tiles and programs where no row serves.

A product is ``tiles`` of W's rows by tokens, of ``blocks`` of 256 weights of K each. It takes as
long as its longest program. That one's time is the number of its blocks times the time of a block,
and a constant for its beginning and its end. Programs take whole tiles, or share each tile's K
evenly, or share all tiles' wherever a cut falls.

The numbers below were fitted to 16 shapes by 32 to 2,048 tokens of Q4_K, Q4_0 and Q6_K
(``bench.timing.Replay`` of ``gemm_quant`` as chosen, and under ``products.forced`` of up to six
configurations, H200, a copy of d35f2e3 whose programs each add a slice). By 33 tokens and more,
what they choose takes 0.8 % longer on average than the fastest of those configurations and of what
was chosen before; the longest is 1.27 times as long.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.quant.activations import TICKETS
from ferrum_triton.kernels.quant.packed_config import (
    BLOCK,
    LARGE,
    MOST_BY_LARGE,
    TILE_ROWS,
    WARPGROUPS,
    PackedConfig,
    fewest_tokens,
    has_offsets,
    is_served,
    packed_fits,
    with_rings,
)
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.quant.formats import FORMATS, BlockFormat

# Slices of a tile's tokens that its programs add up, at most: a ticket has a bit for each.
MOST_SLICES = 8
# Tokens of the smallest tile that is chosen by count.
FEWEST = 64
# Microseconds of a block of a tile of 128 rows, by its tokens: of four bits, and of more or of a
# table of values.
BLOCK_US = {64: (0.96, 1.17), 128: (1.62, 1.75), 256: (2.9, 2.96)}
# Microseconds that a product takes beside its blocks: in whole tiles, in tiles whose programs each
# add a slice of the sums, and cut anywhere, where a block takes CUT times as long.
ENDS_US = {64: (3.0, 8.0, 10.0), 128: (4.0, 9.5, 11.0), 256: (7.0, 13.0, 20.0)}
CUT = 1.12
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


def microseconds(
    gpu: Gpu,
    config: PackedConfig,
    fmt: BlockFormat,
    num_tokens: int,
    num_rows: int,
    num_weights: int,
) -> float:
    """What a product takes by count, in tiles of at least FEWEST tokens."""
    tiles = cdiv(num_tokens, config.tokens) * cdiv(num_rows, TILE_ROWS)
    programs = programs_of(config, tiles, cdiv(num_weights, BLOCK), gpu.num_sms)
    whole, even, cut = ENDS_US[config.tokens]
    block = BLOCK_US[config.tokens][fmt.bits > 4 or bool(fmt.values)]
    if programs.cut:
        return programs.blocks * block * CUT + cut
    return programs.blocks * block + (even if programs.slices > 1 else whole)


def _tile(gpu: Gpu, fmt: BlockFormat, tokens: int, streamed: bool) -> PackedConfig:
    """The configuration of a tile of ``tokens`` that a format takes.

    By 64, 128 and 256 tokens of 5120x5120, 28672x4096 and 8192x8192 it took 6 % longer at most than
    the fastest candidate of its tile (``bench.timing.Replay`` of ``gemm_quant`` of Q4_1, Q4_Z,
    Q5_0, Q5_K, Q8_0 and IQ4_NL under ``products.forced``, H200, what became 31a4fc3).
    """
    if tokens > LARGE:
        overlapped = fmt.bits == 4 or not streamed
        return with_rings(gpu, PackedConfig(tokens, 1, overlapped, streamed), fmt)
    alone = not (fmt.has_minimum or fmt.scale_code or fmt.values)
    if tokens == LARGE and fmt.bits == 4 and alone:
        return with_rings(gpu, PackedConfig(tokens, 2, True, streamed), fmt)
    apart = tokens < LARGE and has_offsets(fmt) and fmt.has_minimum
    config = PackedConfig(tokens, 4 if apart else 2, False, streamed, sums_offsets=apart)
    joined = with_rings(gpu, config, fmt, joined=True)
    return joined if joined.stages >= 2 else with_rings(gpu, config, fmt)


@lru_cache(maxsize=4096)
def best_by_count(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> tuple[PackedConfig, float] | None:
    """The configuration that takes least by count, and its microseconds; None where none fits."""
    fmt, shape = FORMATS[kind], (num_tokens, num_rows, num_weights)
    if not is_served(fmt) or num_tokens <= FEWEST // 2:
        return None
    sizes = {fewest_tokens(num_tokens)}
    if LARGE < num_tokens <= MOST_BY_LARGE:
        sizes.add(LARGE)
    configs = [_tile(gpu, fmt, size, flag) for size in sorted(sizes) for flag in (False, True)]
    timed = [
        (microseconds(gpu, config, fmt, *shape), number, config)
        for number, config in enumerate(configs)
        if not packed_fits(gpu, config, kind, *shape)
    ]
    if not timed:
        return None
    took, _, config = min(timed)
    return config, took


def packed_heuristic(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_weights: int, many: int
) -> PackedConfig | None:
    """The configuration to launch where nothing was measured; None where another path is faster.

    Args:
        many: tokens from which on another path decodes W for cuBLAS.
    """
    best = best_by_count(gpu, kind, num_tokens, num_rows, num_weights)
    if best is None:
        return None
    config, took = best
    launch, weight, product = DECODE_US
    weights = num_rows * num_weights
    if num_tokens >= many and took * GAIN > launch + weights * (weight + product * num_tokens):
        return None
    return config


def count_refusal(
    gpu: Gpu, config: PackedConfig, kind: str, num_tokens: int, num_rows: int, num_weights: int
) -> str:
    """Why tiles that were measured elsewhere are not for a shape; "" if they are.

    A row serves shapes beside its own, whose tiles may not fill whole waves as its own do.
    """
    if config.tokens < FEWEST or config.ctas_per_sm > 1:
        return ""
    best = best_by_count(gpu, kind, num_tokens, num_rows, num_weights)
    if best is None:
        return ""
    shape = num_tokens, num_rows, num_weights
    took = microseconds(gpu, config, FORMATS[kind], *shape)
    if took <= GAIN * best[1]:
        return ""
    return f"takes {took:.0f} us by count, and {best[1]:.0f} in tiles of {best[0].tokens}"
