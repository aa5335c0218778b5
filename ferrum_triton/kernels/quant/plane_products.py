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
from torch import Tensor

from ferrum_triton.kernels.jit import capability
from ferrum_triton.kernels.quant.gemv_planes import gemv_planes
from ferrum_triton.kernels.quant.gemv_quads import gemv_quads, takes_quads
from ferrum_triton.kernels.quant.gemv_walk import gemv_walk, walk_of
from ferrum_triton.kernels.quant.int16 import int16_activations
from ferrum_triton.kernels.quant.mma import Config, mma_quant
from ferrum_triton.kernels.quant.plane_rows import product_by_torch
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops.quant import MAX_GEMV_ROWS
from ferrum_triton.quant.kinds import file_kind

FEW, MANY = 4, 512
# Weights from which on two activations become integers in a launch of their own.
MANY_WEIGHTS = 1 << 25
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
    # Of powers of two a step has a sum of its own.
    "MXFP4": {64: Config(64, 64, words=16, stages=3, described=True), 256: _TILES[128]},
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


def are_few(a: Tensor, num_rows: int) -> bool:
    """Whether a product of ``a`` with so many rows in planes is :func:`product_of_few`'s."""
    if a.shape[0] <= FEW or a.dtype == torch.float32:
        return a.shape[0] <= MAX_GEMV_ROWS
    return takes_quads(a, num_rows)


def product_of_few(
    a: Tensor,
    planes: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual for W's rows in planes."""
    num_tokens, num_weights = a.shape
    if takes_quads(a, planes.shape[0]):
        return gemv_quads(a, planes, kind, bias=bias, residual=residual, out=out)
    if a.dtype != torch.float32:
        walk = walk_of(file_kind(kind), planes.shape[0], num_weights // 32, num_tokens, a.device)
        if walk is not None:
            return gemv_walk(a, planes, kind, walk, bias=bias, residual=residual, out=out)
    apart = num_tokens > 2 or (num_tokens == 2 and planes.shape[0] * num_weights >= MANY_WEIGHTS)
    x = int16_activations(a) if apart and a.dtype != torch.float32 else a
    return gemv_planes(x, planes, kind, bias=bias, residual=residual, out=out)


def product_of_planes(a: Tensor, planes: Tensor, kind: str, out: Tensor | None) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] for W's rows in planes."""
    if are_few(a, planes.shape[0]):
        return product_of_few(a, planes, kind, out=out)
    num_tokens, num_weights = a.shape
    if a.dtype == torch.float32 or num_tokens >= MANY:
        return product_by_torch(a, planes, kind, out=out)
    config = choose_config(file_kind(kind), num_tokens, planes.shape[0], num_weights, a.device)
    return mma_quant(a, planes, kind, config, out=out)
