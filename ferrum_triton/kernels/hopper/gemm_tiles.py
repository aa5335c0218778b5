"""Sums of a tile on Hopper, by two consumers beside a producer: what dense and experts' share.

A tile is 128 tokens by two blocks of 128 rows of weights. Each consumer, four warps, has 64 of the
tokens by both blocks: 128 registers of a thread, ``left`` and ``right``. A step of K is 128 bytes
wide, which is what a row of the widest swizzle of shared memory holds.

One tile of 128 by 256 reads less of L2 than two of 128 by 128, for each of which tensor cores of
plain Triton's kernel in FP8 read 32 KB for 4.2 MFLOP: at 909 TFLOP/s that is 7 TB/s
(``python -m bench.run gemm_fp8_128x128 --case m4096`` on an H200, at ed65b21).
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ferrum_triton.kernels import hopper_config
from ferrum_triton.kernels.attention.tensor_maps import steps_fit
from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.hopper.rings import release, wait_full

# Tokens of a consumer, rows of weights of a half, and columns in FP8 that have one scale: a step.
TOKENS = gl.constexpr(hopper_config.TOKENS)
ROWS = gl.constexpr(hopper_config.ROWS)
GROUP = gl.constexpr(hopper_config.STEP_BYTES)


class Buffers(NamedTuple):
    """Operands in shared memory; those in halves have stage s at 2 s and 2 s + 1.

    Attributes:
        a: [2 STAGES, TOKENS, step], the consumers' activations.
        steps: float32 [STAGES, 2 TOKENS], scales of activations in FP8; else None.
        weights: [2 STAGES, ROWS, step], the blocks of rows.
    """

    a: Any
    steps: Any
    weights: Any


class BlockScales(NamedTuple):
    """Pointers to the scales of a tile's blocks of weights, group after group."""

    left: Any
    right: Any


@gluon.jit
def scaled_sums(ring, buffers, i, num_steps, scales, PART: gl.constexpr, GATHERED: gl.constexpr):
    """Sums over groups, each by its scales: float32 left and right [TOKENS, ROWS].

    A consumer waits for its products, and adds them while the other consumer's go on. A turn of the
    loop is one block of one group, and the block's half a branch: were both written one after the
    other, the assembler would begin the second product before the first is added, and spill what
    more registers that takes: 192 bytes of a thread of ``gemm_fp8_128x128``, as
    :func:`~ferrum_triton.kernels.resources.compile_launch` counts them.

    Args:
        i: steps that were done before.
        num_steps: groups of this tile, one at least.
        scales: :class:`BlockScales`.
        GATHERED: whether activations came by cp.async, whose writes tensor cores see by a fence.
    """
    LAYOUT: gl.constexpr = sums_layout(ROWS, 8)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    left = gl.zeros([TOKENS, ROWS], gl.float32, LAYOUT)
    right = gl.zeros([TOKENS, ROWS], gl.float32, LAYOUT)
    scale = gl.load(scales.left)
    for turn in range(2 * num_steps):
        half = turn % 2
        # Asked for a turn ahead, so that no sum waits for its scale.
        later = gl.minimum((turn + 1) // 2, num_steps - 1)
        scale_later = gl.load((scales.right if half == 0 else scales.left) + later)
        stage = wait_full(ring, i + turn // 2, half == 0)
        if GATHERED:
            if half == 0:
                fence_async_shared()
        step = buffers.steps.index(stage).slice(PART * TOKENS, TOKENS).load(OF_TOKENS)
        sums = warpgroup_mma(
            buffers.a.index(stage * 2 + PART),
            buffers.weights.index(stage * 2 + half).permute((1, 0)),
            gl.zeros([TOKENS, ROWS], gl.float32, LAYOUT),
            use_acc=False,
            is_async=True,
        )
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if half == 0:
            left += sums * (step * scale)[:, None]
        else:
            release(ring, i + turn // 2)
            right += sums * (step * scale)[:, None]
        scale = scale_later
    return left, right


@gluon.jit
def plain_sums(ring, buffers, i, num_steps, PART: gl.constexpr, GATHERED: gl.constexpr):
    """Sums of products in 16 bits, by tensor cores alone; arguments as of :func:`scaled_sums`.

    Products of a step are begun while those of the step before run, whose stage is given back when
    they are done.
    """
    LAYOUT: gl.constexpr = sums_layout(2 * ROWS)
    sums = gl.zeros([TOKENS, 2 * ROWS], gl.float32, LAYOUT)
    STAGES: gl.constexpr = ring.full.shape[0]
    STEP: gl.constexpr = buffers.weights.shape[2]
    # Both blocks of a stage lie one behind the other: one product reads activations once for both.
    both = buffers.weights._reinterpret(
        buffers.weights.dtype, [STAGES, 2 * ROWS, STEP], buffers.weights.layout
    )
    for step in range(num_steps):
        stage = wait_full(ring, i + step)
        if GATHERED:
            fence_async_shared()
        a = buffers.a.index(stage * 2 + PART)
        weights = both.index(stage).permute((1, 0))
        sums = warpgroup_mma(a, weights, sums, use_acc=step > 0, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        release(ring, i + step + STAGES - 1, step > 0)  # the step before, STAGES later
    sums = warpgroup_mma_wait(0, deps=(sums,))
    release(ring, i + num_steps - 1)
    # In a thread's registers the left half comes first.
    left, right = gl.split(sums.reshape([TOKENS, 2, ROWS]).permute([0, 2, 1]))
    HALF: gl.constexpr = sums_layout(ROWS)
    left = gl.convert_layout(left, HALF, assert_trivial=True)
    return left, gl.convert_layout(right, HALF, assert_trivial=True)


def mappable(x: Tensor) -> bool:
    """Whether rows of x can be described to TMA, which wants them at multiples of 16 bytes."""
    *apart, last = x.stride()
    return last == 1 and x.data_ptr() % 16 == 0 and steps_fit(apart, x.element_size())
