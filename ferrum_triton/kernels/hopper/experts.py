"""Many tokens by their experts' weights on Hopper, in 16 bits or in FP8 blocks.

Pairs are sorted by expert, every expert padded to whole tiles of 128 pairs, as for the plain
kernels (:mod:`ferrum_triton.kernels.moe.dense`). A program has three partitions of four warps: a
producer and two consumers of 64 pairs each (:mod:`ferrum_triton.kernels.hopper.gemm_tiles`). The
two blocks of 128 rows that they multiply by are gate's and up's of the same columns of y, so that a
thread has both of what it multiplies, or two of one matrix.

The producer's threads gather rows of activations by cp.async, since TMA gathers on Blackwell alone,
and one of them asks for weights by TMA. All of them arrive at a stage's barrier, cp.async's own
arrivals when its copies have landed.

Programs are persistent, and how many tiles there are they read from the device. A consumer whose 64
pairs are padding multiplies nothing: experts of few pairs cost half a tile.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    tma,
)

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.gluon import gluon_kernel
from ferrum_triton.kernels.hopper.experts_maps import rows_apart, rows_of
from ferrum_triton.kernels.hopper.experts_pairs import (
    FILLERS,
    ONE_EACH,
    PAIRS,
    STORED,
    Ids,
    Sorted,
    begins,
    clear_lost,
    expert_of,
    pairs_of,
    store,
)
from ferrum_triton.kernels.hopper.gemm_tiles import (
    ROWS,
    TOKENS,
    BlockScales,
    Buffers,
    plain_sums,
    scaled_sums,
)
from ferrum_triton.kernels.hopper.layouts import sums_layout
from ferrum_triton.kernels.hopper.rings import Ring, acquire, make_barriers, release, wait_full
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.moe.activation import clamped_swiglu
from ferrum_triton.kernels.moe.pairs import aligned_pairs
from ferrum_triton.kernels.moe.plane_gemv import slot_stride
from ferrum_triton.kernels.moe.prepare import Result
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv


class Activations(NamedTuple):
    """Rows of activations, a token's or a pair's, and their scales in FP8."""

    a: Any
    steps: Any
    stride_token: Any
    stride_slot: Any
    num_cols: Any


class Stacks(NamedTuple):
    """What tiles need of weights beside their tensor maps.

    Attributes:
        scales, up_scales: pointers to scales of FP8; None in 16 bits.
        bias: a pointer, or None.
        rows_apart, up_rows_apart: rows of a map from one expert's matrix to the next's.
        right: rows of a map from a tile's left block to its right one.
        stride_*: of scales and of bias.
    """

    scales: Any
    up_scales: Any
    bias: Any
    rows_apart: Any
    up_rows_apart: Any
    right: Any
    stride_scales_expert: Any
    stride_scales_row: Any
    stride_up_scales_expert: Any
    stride_up_scales_row: Any
    stride_bias_expert: Any


class Gate(NamedTuple):
    """Parameters of the function that gate and up go through."""

    alpha: Any
    limit: Any


@gluon.jit
def _gathered(x, of, block, PART: gl.constexpr, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to activations of a consumer's pairs, and which there are."""
    pairs = pairs_of(of, block, PART * TOKENS, TOKENS, gl.SliceLayout(1, LAYOUT))
    row, known = begins(of, pairs, x.stride_token, x.stride_slot, TOP_K)
    return x.a + row, known


@gluon.jit
def _produce(
    left_desc,
    right_desc,
    ring,
    buffers,
    x,
    of,
    stacks,
    result,
    ids,
    BLOCK_N: gl.constexpr,
    TOP_K: gl.constexpr,
    PER_SLOT: gl.constexpr,
):
    """Ask for the operands of every step of this program's tiles, and clear rows of lost pairs.

    L2 is not asked for weights beforehand: gate and up by 4,096 tokens take 421 us so, and 471 to
    549 where it is asked 4 to 16 steps ahead (``device_us`` of ``gemm_moe_id_gate_up``, bfloat16,
    H200, 8b1a4f1).
    """
    STEP: gl.constexpr = buffers.a.shape[2]
    # 16 bytes a thread, eight threads a row.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    SCALED: gl.constexpr = buffers.steps is not None
    NUM_BYTES: gl.constexpr = left_desc.block_type.nbytes + right_desc.block_type.nbytes
    tiles_n = gl.cdiv(result.num_rows, BLOCK_N)
    column = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))[None, :]
    i = 0
    for tile in range(gl.program_id(0), of.num_tiles, gl.num_programs(0)):
        block, first_row = tile // tiles_n, tile % tiles_n * BLOCK_N
        expert = gl.load(of.experts + block)
        left_row = expert * stacks.rows_apart + first_row
        right_row = expert * stacks.up_rows_apart + first_row + stacks.right
        first, in_first = _gathered(x, of, block, 0, TOP_K, LAYOUT)
        second, in_second = _gathered(x, of, block, 1, TOP_K, LAYOUT)
        if SCALED:
            pair = pairs_of(of, block, 0, PAIRS, ONE_EACH)
            has_step = pair < of.num_pairs
            num_steps = of.num_pairs if PER_SLOT else of.num_pairs // TOP_K
            step_at = x.steps + (pair if PER_SLOT else pair // TOP_K)
        for k in range(0, x.num_cols, STEP):
            stage = acquire(ring, i, NUM_BYTES)
            full = ring.full.index(stage)
            weights = buffers.weights
            tma.async_copy_global_to_shared(
                left_desc, [left_row, k], full, weights.index(stage * 2)
            )
            tma.async_copy_global_to_shared(
                right_desc, [right_row, k], full, weights.index(stage * 2 + 1)
            )
            inside = k + column < x.num_cols
            a = buffers.a
            async_copy.async_copy_global_to_shared(
                a.index(stage * 2), first + (k + column), mask=in_first & inside
            )
            async_copy.async_copy_global_to_shared(
                a.index(stage * 2 + 1), second + (k + column), mask=in_second & inside
            )
            if SCALED:
                async_copy.async_copy_global_to_shared(
                    buffers.steps.index(stage), step_at, mask=has_step
                )
                step_at += num_steps
            async_copy.mbarrier_arrive(full, increment_count=False)
            i += 1
    clear_lost(result, ids, of.num_pairs, TOP_K)


@gluon.jit
def _scales(stacks, expert, row_block, up_block):
    """Pointers to the scales of an expert's blocks of rows."""
    left = expert * stacks.stride_scales_expert + row_block * stacks.stride_scales_row
    right = expert * stacks.stride_up_scales_expert + up_block * stacks.stride_up_scales_row
    return BlockScales(stacks.scales + left, stacks.up_scales + right)


@gluon.jit
def _biased(left, right, stacks, expert, first_row, num_rows, GATED: gl.constexpr):
    """Sums plus the bias of their rows."""
    n = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, sums_layout(ROWS)))
    left_row = gl.minimum(n, num_rows - 1)
    right_row = left_row + num_rows if GATED else gl.minimum(n + ROWS, num_rows - 1)
    bias = stacks.bias + expert * stacks.stride_bias_expert
    left += gl.load(bias + left_row).to(gl.float32)[None, :]
    right += gl.load(bias + right_row).to(gl.float32)[None, :]
    return left, right


@gluon.jit
def _consume(
    ring,
    buffers,
    of,
    stacks,
    result,
    num_cols,
    gate,
    ACTIVATION: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TOP_K: gl.constexpr,
    PART: gl.constexpr,
):
    """Multiply, add and store the PART-th pairs of this program's tiles."""
    tiles_n = gl.cdiv(result.num_rows, BLOCK_N)
    num_steps = gl.cdiv(num_cols, buffers.a.shape[2])
    last_block = gl.cdiv(result.num_rows, ROWS) - 1
    i = 0
    expert, entry = expert_of(of, gl.program_id(0), tiles_n, PART)
    for tile in range(gl.program_id(0), of.num_tiles, gl.num_programs(0)):
        # Asked for a tile ahead, so that no product waits for what it is of.
        later_expert, later_entry = expert_of(of, tile + gl.num_programs(0), tiles_n, PART)
        block, first_row = tile // tiles_n, tile % tiles_n * BLOCK_N
        # Padding comes after an expert's pairs.
        if entry < of.num_pairs:
            pairs = pairs_of(of, block, PART * TOKENS, TOKENS, gl.SliceLayout(1, STORED))
            if buffers.steps is not None:
                # A block past the last row reads the last one's scales, and is not stored.
                row_block = first_row // ROWS
                up_block = gl.minimum(row_block + (BLOCK_N // ROWS - 1), last_block)
                scales = _scales(stacks, expert, row_block.to(gl.int64), up_block.to(gl.int64))
                left, right = scaled_sums(ring, buffers, i, num_steps, scales, PART, True)
            else:
                left, right = plain_sums(ring, buffers, i, num_steps, PART, True)
            if stacks.bias is not None:
                left, right = _biased(
                    left, right, stacks, expert, first_row, result.num_rows, ACTIVATION != ""
                )
            row, known = begins(of, pairs, result.stride_token, result.stride_slot, TOP_K)
            at = result.y + row
            if ACTIVATION == "":
                store(result, left, at, known, first_row)
                store(result, right, at, known, first_row + ROWS)
            elif ACTIVATION == "clamped_swiglu":
                y = clamped_swiglu(left, right, gate.alpha, gate.limit)
                store(result, y, at, known, first_row)
            else:
                store(result, activated(left, ACTIVATION) * right, at, known, first_row)
        else:
            for step in range(num_steps):
                wait_full(ring, i + step)
                release(ring, i + step)
        i += num_steps
        expert, entry = later_expert, later_entry


@gluon_kernel(dynamic=("num_pairs", "alpha", "limit"))
def _experts_kernel(
    y_ptr,  # [num_tokens, top_k, n]
    a_ptr,  # [rows, k], in 16 bits or float8_e4m3fn, a row a token or a row a pair
    steps_ptr,  # float32 [groups, rows], scales of codes; or None
    scales_ptr,  # float32 [num_experts, row_blocks, groups], scales of weights; or None
    up_scales_ptr,  # likewise, of up or of the same
    bias_ptr,  # [num_experts, n], or [num_experts, 2 n]; or None
    ids_ptr,  # [num_tokens, top_k]
    sorted_ptr,  # int32 [num_blocks, PAIRS] pairs
    experts_ptr,  # int32 [num_blocks]
    total_ptr,  # int32 [1], entries in use
    left_desc,  # weights of all experts as rows [-1, k], ROWS at a time
    right_desc,  # likewise, of up or of the same
    stride_y_token,
    stride_y_slot,
    stride_a_token,
    stride_a_slot,
    stride_scales_expert,
    stride_scales_row,
    stride_up_scales_expert,
    stride_up_scales_row,
    stride_bias_expert,
    stride_ids_token,
    rows_apart,
    up_rows_apart,
    right,
    num_experts,
    num_rows,  # of y
    num_cols,
    num_pairs,
    alpha,
    limit,
    TOP_K: gl.constexpr,
    PER_SLOT: gl.constexpr,  # whether activations have a row a pair
    ACTIVATION: gl.constexpr,  # of gate; "" of one matrix
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[pair] = the products with its expert, or what ACTIVATION makes of gate and up."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    dtype: gl.constexpr = left_desc.dtype
    STEP: gl.constexpr = left_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = ROWS if ACTIVATION != "" else 2 * ROWS
    steps = None
    if steps_ptr is not None:
        STEPS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        steps = gl.allocate_shared_memory(gl.float32, [STAGES, PAIRS], STEPS)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [2 * STAGES, TOKENS, STEP], left_desc.layout),
        steps,
        gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, STEP], left_desc.layout),
    )
    ring = Ring(None, make_barriers(STAGES, FILLERS + 1), make_barriers(STAGES, 2))
    fence_async_shared()  # tensor maps see barriers
    num_tiles = gl.load(total_ptr) // PAIRS * gl.cdiv(num_rows, BLOCK_N)
    of = Sorted(sorted_ptr, experts_ptr, num_tiles, num_pairs)
    x = Activations(a_ptr, steps_ptr, stride_a_token, stride_a_slot, num_cols)
    stacks = Stacks(
        scales_ptr,
        up_scales_ptr,
        bias_ptr,
        rows_apart,
        up_rows_apart,
        right,
        stride_scales_expert,
        stride_scales_row,
        stride_up_scales_expert,
        stride_up_scales_row,
        stride_bias_expert,
    )
    result = Result(y_ptr, stride_y_token, stride_y_slot, num_rows)
    ids, gate = Ids(ids_ptr, stride_ids_token, num_experts), Gate(alpha, limit)
    # Of 504 registers for three warps; what is left to the producer it does not spill either.
    CONSUMER: gl.constexpr = 216 if steps_ptr is None else 224
    # Arguments stand in line: constants in a variable would become numbers of the device's.
    gl.warp_specialize(
        [
            (
                _consume,
                (ring, buffers, of, stacks, result, num_cols, gate, ACTIVATION, BLOCK_N, TOP_K, 0),
            ),
            (
                _consume,
                (ring, buffers, of, stacks, result, num_cols, gate, ACTIVATION, BLOCK_N, TOP_K, 1),
            ),
            (
                _produce,
                (
                    left_desc,
                    right_desc,
                    ring,
                    buffers,
                    x,
                    of,
                    stacks,
                    result,
                    ids,
                    BLOCK_N,
                    TOP_K,
                    PER_SLOT,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER, 504 - 2 * CONSUMER],
    )


def multiply_pairs(
    y: Tensor,
    a: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Config,
    *,
    up: Tensor | None = None,
    steps: Tensor | None = None,
    scales: Tensor | None = None,
    up_scales: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "",
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """y ← the products of pairs with their experts, or what ``activation`` makes of gate and up.

    Args:
        y: [num_tokens, top_k, n] in 16 bits, not empty.
        a: [num_tokens, k] or [num_tokens, top_k, k]; of FP8 their codes, float8_e4m3fn.
        ids: [num_tokens, top_k].
        weights: [num_experts, n, k]; with ``activation`` gate's, or [num_experts, 2 n, k] of gate
            and then up.
        config: a launch choice of the path ``"hopper"``.
        up: of FP8 with ``activation``, up's.
        steps: float32 [groups, rows of a], scales of codes.
        scales, up_scales: float32 [num_experts, row_blocks, groups], of weights.
        bias: [num_experts, n or 2 n].
    """
    (num_experts, _, num_cols), num_rows, num_pairs = weights.shape, y.shape[2], ids.numel()
    is_gated = activation != ""
    right = ROWS.value if not is_gated else num_rows if up is None else 0
    other, other_scales = (weights, scales) if up is None else (up, up_scales)
    short_last = config["SHORT_LAST"]
    pairs, experts, total = aligned_pairs(ids, num_experts, PAIRS.value, short_last=short_last)
    num_tiles = len(experts) * cdiv(num_rows, ROWS.value if is_gated else 2 * ROWS.value)
    _experts_kernel.launch(
        (min(num_tiles, processors(y.device)),),
        y_ptr=y,
        a_ptr=a,
        steps_ptr=steps,
        scales_ptr=scales,
        up_scales_ptr=other_scales,
        bias_ptr=bias,
        ids_ptr=ids,
        sorted_ptr=pairs,
        experts_ptr=experts,
        total_ptr=total,
        left_desc=rows_of(weights),
        right_desc=rows_of(other),
        stride_y_token=y.stride(0),
        stride_y_slot=y.stride(1),
        stride_a_token=a.stride(0),
        stride_a_slot=slot_stride(a),
        stride_scales_expert=0 if scales is None else scales.stride(0),
        stride_scales_row=0 if scales is None else scales.stride(1),
        stride_up_scales_expert=0 if other_scales is None else other_scales.stride(0),
        stride_up_scales_row=0 if other_scales is None else other_scales.stride(1),
        stride_bias_expert=0 if bias is None else bias.stride(0),
        stride_ids_token=ids.stride(0),
        rows_apart=rows_apart(weights),
        up_rows_apart=rows_apart(other),
        right=right,
        num_experts=num_experts,
        num_rows=num_rows,
        num_cols=num_cols,
        num_pairs=num_pairs,
        alpha=alpha,
        limit=limit,
        TOP_K=ids.shape[1],
        PER_SLOT=a.dim() == 3,
        ACTIVATION=activation,
        STAGES=config["STAGES"],
        num_warps=4,
        maxnreg=168,  # three partitions of four warps each, for the assembler
    )
