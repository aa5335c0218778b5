"""Products with rows in planes: which kernel takes how many activations.

One and two activations take about as long as W is read: :func:`gemv_planes`, or at some sizes
:func:`gemv_walk`. Three to eight go to tensor cores that are fed as weights are read,
:func:`gemv_quads`; more fill them, W as their tall operand, by :func:`mma_quant`, whose tile grows
with them. From MANY on decoding W costs less than what cuBLAS gains over it. The kernels beside it
take what quads cannot, a K of part of a block or hardly any rows. float32 activations are never
rounded: up to eight of them take the first way, and more a product by torch.
"""

from functools import lru_cache

import torch

from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.quant.mma import Config
from ferrum_triton.kernels.rows import cdiv

# Programs enough for 132 processors, of at least so many steps of the loop each.
PROGRAMS, STEPS = 200, 4

# The fastest of bench.quant_tiles at n 28672 and k 4096, or nearly, by the most tokens they are
# for.
_WIDE = Config(
    128, 64, late=False, warps=8, stages=2, registers=128, ahead=2, look=1, described=True
)
_TILES = {
    8: Config(64, 8, ahead=4),
    16: Config(64, 16, parts=2, stages=3, registers=128, ahead=4),
    32: Config(64, 32, stages=3, ahead=4, described=True),
    64: _WIDE,
    128: Config(64, 128, words=16, late=False, stages=3, described=True),
    256: Config(128, 256, words=16, late=False, warps=8, stages=3, described=True),
}
_TILES_OF = {
    "Q6_K": {8: Config(64, 8, stages=3, ahead=4, described=True)},
    # Those above would spill.
    "Q3_K": {64: _WIDE._replace(words=16, stages=3, look=0)},
    "Q5_K": {64: _WIDE._replace(look=0)},
}
MOST = 128  # in a tile of more than 256
# Of GPUs before Hopper and of AMD's, where those spill or do not compile.
OTHER_TILES = {
    16: Config(64, 16, stages=2),
    32: Config(64, 32, words=16, late=False, stages=2),
    64: Config(128, 64, words=16, late=False, warps=8, stages=2),
}


@lru_cache(maxsize=4096)
def choose_config(
    kind: str, num_tokens: int, num_rows: int, num_weights: int, device: torch.device
) -> Config:
    """How ``mma_quant`` takes so many tokens by W [num_rows, num_weights]."""
    is_new = capability(device) >= (9, 0)
    tiles = _TILES | _TILES_OF.get(kind, {}) if is_new else OTHER_TILES
    least = max(num_tokens, least_tokens(kind))
    fitting = (tokens for tokens in tiles if least <= tokens)
    config = tiles[next(fitting, min(MOST, max(tiles)))]
    if capability(device) >= (10, 0):  # with as few registers it spills there
        config = config._replace(registers=0)
    config = fitted(kind, config)
    spread = spread_over(config, num_tokens, num_rows, num_weights)
    if config.tokens > MOST and spread.splits > 1:  # too few, and of splits they spill
        spread = spread_over(tiles[MOST], num_tokens, num_rows, num_weights)
    return spread


def least_tokens(kind: str) -> int:
    """Of a tile."""
    # Q3_K's pairs do not stay in registers for the instruction of 8 tokens.
    return 16 if kind == "Q3_K" else 8


def fitted(kind: str, config: Config) -> Config:
    """``config`` with the stages that fit: one of Q8_0 takes twice the bytes."""
    return config._replace(stages=max(config.stages - 1, 2)) if kind == "Q8_0" else config


def spread_over(config: Config, num_tokens: int, num_rows: int, num_weights: int) -> Config:
    """``config``, K split until there are enough programs."""
    tiles = cdiv(num_rows, config.rows) * cdiv(num_tokens, config.tokens)
    steps, splits = cdiv(num_weights, 8 * config.words), 1
    while tiles * splits < PROGRAMS and steps // (2 * splits) >= STEPS:
        splits *= 2
    return config._replace(splits=splits)
