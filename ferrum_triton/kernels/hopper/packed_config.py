"""Launch choices of packed products on Hopper in Gluon, and what fits a GPU.

The functions are pure, and import nothing of Gluon: they are asked on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import shared_refusal
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS, BlockFormat

# Weights of a row in a stage, and those that a step multiplies.
BLOCK, STEP = 256, 64
# Rows of W that a warpgroup takes.
ROWS = 64


class PackedConfig(NamedTuple):
    """How a product is launched.

    Attributes:
        tokens: tokens in a tile.
        warpgroups: warpgroups that multiply, of 64 rows of W each.
        overlapped: a step is unpacked while the one before it is multiplied.
        streamed: programs share tiles' K, so that all have as much to do.
        ctas_per_sm: programs for each SM.
        stages: blocks of 256 weights in the ring of weights.
        x_stages: stages in the ring of activations.
        x_steps: steps of 64 of K in one of them.
    """

    tokens: int
    warpgroups: int = 2
    overlapped: bool = True
    streamed: bool = True
    ctas_per_sm: int = 1
    stages: int = 4
    x_stages: int = 4
    x_steps: int = 1
