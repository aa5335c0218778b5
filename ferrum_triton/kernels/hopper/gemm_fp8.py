"""Many tokens by weights in FP8 blocks on Hopper: tensor cores multiply while threads add.

Sums of 128 columns have a scale of weights and one for each token, by which threads multiply them
as they add them to those before. In plain Triton every program waits for its products, and then for
its additions. Here a program has three partitions of warps: a producer of one warp, which asks for
tiles by TMA, and two consumers (:mod:`ferrum_triton.kernels.hopper.gemm_tiles`). While one adds,
the other's products keep the tensor cores busy.

Programs are persistent, so that a tile's operands are on their way while the one before it is
stored.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ferrum_triton.kernels.gluon import describe, gluon_kernel
from ferrum_triton.kernels.hopper.gemm_tiles import (
    GROUP,
    ROWS,
    TOKENS,
    BlockScales,
    Buffers,
    mappable,
    scaled_sums,
)
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers
from ferrum_triton.kernels.hopper_config import ALIGNED
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv

# The stride from a group's scales to the next is a multiple of this: TMA reads from multiples of
# 16 bytes.
STEPS_APART = 4


class Work(NamedTuple):
    """What there is to do: the product's sizes, and the number of tiles."""

    num_tokens: Any
    num_rows: Any
    groups: Any
    num_tiles: Any
    steps_apart: Any  # scales of activations from one group to the next


@gluon.jit
def _place(tile, work, GROUP_M: gl.constexpr):
    """A tile's first token and first row: programs side by side share rows of weights."""
    tiles_n = gl.cdiv(work.num_rows, 2 * ROWS)
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    beside = gl.minimum(gl.cdiv(work.num_tokens, 2 * TOKENS) - first, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return (first + inside % beside) * 2 * TOKENS, inside // beside * 2 * ROWS


@gluon.jit
def _produce(codes_desc, steps_desc, weight_desc, ring, buffers, work, GROUP_M: gl.constexpr):
    """Ask for the operands of every step of this program's tiles."""
    NUM_BYTES: gl.constexpr = (
        2 * codes_desc.block_type.nbytes
        + 2 * weight_desc.block_type.nbytes
        + steps_desc.block_type.nbytes
    )
    i = 0
    for tile in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        token, row = _place(tile, work, GROUP_M)
        for group in range(work.groups):
            stage = acquire(ring, i, NUM_BYTES)
            full = ring.full.index(stage)
            column = group * GROUP
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    codes_desc,
                    [token + half * TOKENS, column],
                    full,
                    buffers.a.index(stage * 2 + half),
                )
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [row + half * ROWS, column],
                    full,
                    buffers.weights.index(stage * 2 + half),
                )
            # What lies past the last token scales tokens that are none.
            tma.async_copy_global_to_shared(
                steps_desc, [group * work.steps_apart + token], full, buffers.steps.index(stage)
            )
            i += 1


@gluon.jit
def _consume(
    y_desc,
    scales_ptr,
    stride_scales_row,
    ring,
    buffers,
    y_buffers,
    work,
    GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):
    """Multiply, add and store the PART-th tokens of this program's tiles."""
    OUTPUTS: gl.constexpr = y_buffers.shape[0] // 2
    last_block = gl.cdiv(work.num_rows, ROWS) - 1
    i = 0
    for tile in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        token, row = _place(tile, work, GROUP_M)
        # A half past the last row reads the last block's scales, and is not stored.
        left_block = (row // ROWS).to(gl.int64)
        right_block = gl.minimum(row // ROWS + 1, last_block).to(gl.int64)
        scales = BlockScales(
            scales_ptr + left_block * stride_scales_row,
            scales_ptr + right_block * stride_scales_row,
        )
        left, right = scaled_sums(ring, buffers, i, work.groups, scales, PART, False)
        i += work.groups
        for half in gl.static_range(2):
            y = y_buffers.index(PART * OUTPUTS + half % OUTPUTS)
            tma.store_wait(OUTPUTS - 1)  # until what this buffer held has been read
            gl.thread_barrier()
            y.store((left if half == 0 else right).to(y_desc.dtype))
            fence_async_shared()
            gl.thread_barrier()
            at = [token + PART * TOKENS, row + half * ROWS]
            tma.async_copy_shared_to_global(y_desc, at, y)
    tma.store_wait(0)


@gluon_kernel(dynamic=("num_tokens", "steps_apart"))
def _fp8_gemm_kernel(
    scales_ptr,  # float32 [row_blocks, groups], scales of weights
    y_desc,  # [m, n] in blocks of TOKENS x ROWS
    codes_desc,  # float8_e4m3fn [m, k] in blocks of TOKENS x GROUP
    steps_desc,  # float32 [groups * steps_apart], scales of codes, of 2 TOKENS at a time
    weight_desc,  # float8_e4m3fn [n, k] in blocks of ROWS x GROUP
    stride_scales_row,
    num_rows,
    groups,
    num_tokens,
    steps_apart,
    GROUP_M: gl.constexpr,  # tiles of tokens side by side
    STAGES: gl.constexpr,
    OUTPUTS: gl.constexpr,  # buffers of results that a consumer has
    PDL: gl.constexpr,
):
    """y = Σ_g step[g] · scale[g] · (codes · weightᵀ)[g]"""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    codes: gl.constexpr = codes_desc.dtype
    weights: gl.constexpr = weight_desc.dtype
    buffers = Buffers(
        gl.allocate_shared_memory(codes, [2 * STAGES, TOKENS, GROUP], codes_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * TOKENS], steps_desc.layout),
        gl.allocate_shared_memory(weights, [2 * STAGES, ROWS, GROUP], weight_desc.layout),
    )
    outputs = gl.allocate_shared_memory(y_desc.dtype, [2 * OUTPUTS, TOKENS, ROWS], y_desc.layout)
    ring = Ring(None, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    fence_async_shared()  # tensor maps see barriers
    tiles = gl.cdiv(num_tokens, 2 * TOKENS) * gl.cdiv(num_rows, 2 * ROWS)
    work = Work(num_tokens, num_rows, groups, tiles, steps_apart)
    stride = stride_scales_row
    gl.warp_specialize(
        [
            (_consume, (y_desc, scales_ptr, stride, ring, buffers, outputs, work, GROUP_M, 0)),
            (_consume, (y_desc, scales_ptr, stride, ring, buffers, outputs, work, GROUP_M, 1)),
            (_produce, (codes_desc, steps_desc, weight_desc, ring, buffers, work, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(y: Tensor, weight: Tensor) -> bool:
    """Whether TMA can write y, and read weights and the codes beside them."""
    return mappable(y) and mappable(weight) and weight.shape[1] % ALIGNED == 0


def gemm_fp8(
    y: Tensor, codes: Tensor, steps: Tensor, weight: Tensor, scales: Tensor, config: Config
) -> None:
    """y ← the products of codes by weights.

    Args:
        y: [m, n] in 16 bits, not empty.
        codes: float8_e4m3fn [m, k].
        steps: float32 [groups, m], groups a multiple of STEPS_APART apart.
        weight: float8_e4m3fn [n, k].
        scales: float32 [row_blocks, groups].
        config: a launch choice of the path ``"hopper"``.
    """
    num_tokens, num_rows = y.shape
    tokens, rows, group = TOKENS.value, ROWS.value, GROUP.value
    groups, apart = len(steps), steps.stride(0)
    last_step = apart * (groups - 1) + num_tokens
    num_tiles = cdiv(num_tokens, 2 * tokens) * cdiv(num_rows, 2 * rows)
    _fp8_gemm_kernel.launch(
        (min(num_tiles, processors(y.device)),),
        scales_ptr=scales,
        y_desc=describe(y, (tokens, rows)),
        codes_desc=describe(codes, (tokens, group)),
        steps_desc=describe(steps, (2 * tokens,), (last_step,), (1,), swizzled=False),
        weight_desc=describe(weight, (rows, group)),
        stride_scales_row=scales.stride(0),
        num_rows=num_rows,
        groups=groups,
        num_tokens=num_tokens,
        steps_apart=apart,
        GROUP_M=config["GROUP_M"],
        STAGES=config["STAGES"],
        OUTPUTS=config["OUTPUTS"],
        num_warps=4,
        maxnreg=168,  # three partitions of four warps each, for the assembler
    )
