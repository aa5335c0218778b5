"""Three to eight activations by weights in planes: tensor cores fed without shared memory.

The instruction ``mma.m16n8k16`` sums over the four threads of a quad. Here a quad takes a block of
256 weights, so that d can wait for the sum, and each of its threads 64 that follow each other, of
two rows: eight apart, as the instruction wants them. Blocks of a row are shared out to warps.
Weights become pairs of float16 in registers (:mod:`ferrum_triton.kernels.quant.quad_weights`), and
activations come in their order (:func:`ferrum_triton.kernels.quant.activations.arrange`), so that
threads exchange nothing before the sums of warps are added. What a step needs is loaded during the
step before.

Scales times codes are exact in a float16 but for Q6_K's large ones, and d is taken in float32 after
the sum; formats without integer scales are rounded to float16 once, like dequantised ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.gemv_planes import STREAM, store_each
from ferrum_triton.kernels.quant.mma import codes_meta
from ferrum_triton.kernels.quant.planes import fp16_pair, load_words, may_chain, row_sizes, uses_ptx
from ferrum_triton.kernels.quant.quad_weights import block_scale, load_rows, minimum, weights
from ferrum_triton.kernels.quant.thread_sums import summed_over_warps
from ferrum_triton.kernels.rows import cdiv, previous_power_of_2

FEWEST_TOKENS, MOST_TOKENS = 3, 8
# Weights a quad takes at a time, and rows of a program.
BLOCK, ROWS = 256, 16
# From where on there are many rows of W, and up to where a row has few blocks: the warps differ.
MANY_ROWS, FEW_BLOCKS = 16384, 16
# Words of a token's arranged activations that lie beside the other tokens', and of all eight.
WORDS, PIECE = tl.constexpr(16), tl.constexpr(8 * 16)

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_MMA_CONSTRAINTS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


@triton.jit
def _mma(acc, a, b, PTX: tl.constexpr):
    """acc + a · b for each warp: a [16, 16] · b [16, 8], as their threads hold them.

    Args:
        acc: of a thread's two rows, two tokens each: float32 [threads].
        a: pairs of float16 in int32 [threads]: first of either row, second of either row.
        b: likewise of the token.
    """
    if PTX:
        acc = tl.inline_asm_elementwise(
            _MMA, _MMA_CONSTRAINTS,
            (a[0], a[1], a[2], a[3], b[0], b[1], acc[0], acc[1], acc[2], acc[3]),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = _sums_of_quads(a[0], b[0]) + _sums_of_quads(a[2], b[1])
        second = _sums_of_quads(a[1], b[0]) + _sums_of_quads(a[3], b[1])
        even, odd = tl.split(tl.reshape(first, [a[0].shape[0], 2]))
        low, high = tl.split(tl.reshape(second, [a[0].shape[0], 2]))
        acc = (acc[0] + even, acc[1] + odd, acc[2] + low, acc[3] + high)
    return acc


@triton.jit
def _sums_of_quads(a, b):
    """Of pairs of a row by pairs of a token: float32 [warps, 8 rows, 8 tokens]."""
    WARPS: tl.constexpr = a.shape[0] // 32
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    low, high = fp16_pair(a)
    b_low, b_high = fp16_pair(b)
    for row, token in ((low, b_low), (high, b_high)):
        product = tl.reshape(row, [WARPS, 8, 1, 4]) * tl.reshape(token, [WARPS, 1, 8, 4])
        total += tl.sum(product, axis=3)
    return total


@triton.jit
def _activations(x_ptr, block, PTX: tl.constexpr):
    """A thread's of a block: eight pairs, by which those of ``weights`` J are multiplied, [J]."""
    x = ()
    for j in tl.static_range(4):
        at = x_ptr + (block * 8 + 2 * j) * PIECE
        x += (load_words(at, None, 4, PTX, "") + load_words(at + PIECE, None, 4, PTX, ""),)
    return x


@triton.jit
def _add_block(
    acc, first, second, x, sums, BITS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """acc plus a block of a thread's two rows by the activations, of :func:`_activations`."""
    PTX: tl.constexpr = ASM != ""
    LATE: tl.constexpr = SCALES != ""
    none = tl.zeros_like(acc[0])
    total = acc
    if LATE:
        total = (none, none, none, none)
    for j in tl.static_range(4):
        a = weights(first, j, BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS)
        b = weights(second, j, BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS)
        for p in tl.static_range(4):
            pairs = (a[2 * p], b[2 * p], a[2 * p + 1], b[2 * p + 1])
            total = _mma(total, pairs, (x[j][2 * p], x[j][2 * p + 1]), PTX)
    if LATE and MINS:
        low = (none, none, none, none)
        for j in tl.static_range(2):
            pairs = (
                minimum(first, 2 * j, SCALES, PTX), minimum(second, 2 * j, SCALES, PTX),
                minimum(first, 2 * j + 1, SCALES, PTX), minimum(second, 2 * j + 1, SCALES, PTX),
            )  # fmt: skip
            low = _mma(low, pairs, (sums[2 * j], sums[2 * j + 1]), PTX)
        d, m = fp16_pair(first[3][0])
        d_second, m_second = fp16_pair(second[3][0])
        total = (
            tl.fma(-m, low[0], tl.fma(d, total[0], acc[0])),
            tl.fma(-m, low[1], tl.fma(d, total[1], acc[1])),
            tl.fma(-m_second, low[2], tl.fma(d_second, total[2], acc[2])),
            tl.fma(-m_second, low[3], tl.fma(d_second, total[3], acc[3])),
        )
    elif LATE:
        d, d_second = block_scale(first, SCALES), block_scale(second, SCALES)
        total = (
            tl.fma(d, total[0], acc[0]), tl.fma(d, total[1], acc[1]),
            tl.fma(d_second, total[2], acc[2]), tl.fma(d_second, total[3], acc[3]),
        )  # fmt: skip
    return total


@kernel(dynamic=("num_rows", "num_tokens"))
def _gemv_quads_kernel(
    y_ptr,  # [m, n]
    x_ptr,  # arranged, [k / 32, 8, 32]
    sums_ptr,  # [k / 256, 8, 32]
    factor_ptr,  # [m]
    planes_ptr,  # [n, row_bytes]
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_residual_token,
    num_rows,  # at least 16
    num_tokens,  # at most 8
    Q: tl.constexpr,  # bytes of a row of each plane
    H: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 256 in a row
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    WARPS: tl.constexpr,
    HINT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    PTX: tl.constexpr = ASM != ""
    THREADS: tl.constexpr = 32 * WARPS
    i = tl.arange(0, THREADS)
    warp, quad, thread = i // 32, i // 4 % 8, i % 4
    # The last program starts early enough to have all its rows; some are done twice.
    first = tl.minimum(tl.program_id(0) * 16, num_rows - 16)
    row = (first + quad).to(tl.int64)
    matrix_rows = tl.full((), 1, tl.int64) * num_rows
    # Weights past a row's end are 0, and multiplied by the last block's activations.
    rows = load_rows(
        planes_ptr, matrix_rows, row, thread, warp, warp < BLOCKS, Q, H, S, T, D, BITS, SCALES,
        MINS, PTX, HINT,
    )  # fmt: skip
    # Columns past the last token are its again, and not stored.
    token = tl.minimum(quad, num_tokens - 1)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + token * WORDS + thread * 4
    sums_ptr = sums_ptr.to(tl.pointer_type(tl.int32)) + token * WORDS + thread * 4
    none = tl.zeros([THREADS], tl.float32)
    acc = (none, none, none, none)
    if CHAINED:
        gdc_wait()
    x = _activations(x_ptr, tl.minimum(warp, BLOCKS - 1), PTX)
    for step in range((BLOCKS + WARPS - 1) // WARPS):
        block = tl.minimum(step * WARPS + warp, BLOCKS - 1)
        sums = None
        if SCALES != "" and MINS:
            sums = load_words(sums_ptr + block * PIECE, None, 4, PTX, "")
        ahead = (step + 1) * WARPS + warp
        x_later = _activations(x_ptr, tl.minimum(ahead, BLOCKS - 1), PTX)
        later = load_rows(
            planes_ptr, matrix_rows, row, thread, ahead, ahead < BLOCKS, Q, H, S, T, D, BITS,
            SCALES, MINS, PTX, HINT,
        )  # fmt: skip
        acc = _add_block(
            acc, rows[0], rows[1], x, sums, BITS, OFFSET, SCALES, MINS, ASM, CONSTRAINTS
        )
        rows, x = later, x_later
    # Four of each lane: two rows, eight apart, by two tokens.
    y = summed_over_warps(acc, 4)
    i = tl.arange(0, 128)
    token = i // 4 % 4 * 2 + i % 2
    n = first + i // 16 + i // 2 % 2 * 8
    mask = token < num_tokens
    y *= tl.load(factor_ptr + token, mask=mask, other=0.0)
    store_each(
        y_ptr, y, stride_y_token, token, n, mask, bias_ptr, residual_ptr, stride_residual_token
    )


def takes_quads(a: Tensor, num_rows: int) -> bool:
    """Whether there is a product of activations a [m, k] in 16 bits with so many rows for quads."""
    num_tokens, k = a.shape
    return (
        FEWEST_TOKENS <= num_tokens <= MOST_TOKENS
        and a.dtype != torch.float32
        and k % BLOCK == 0 < k
        and num_rows >= ROWS
        and uses_ptx(a)
    )


def warps_of(num_rows: int, num_blocks: int) -> int:
    """Of a program; of those that ``bench.quant_tiles`` timed at its sizes the fastest, or nearly.

    Args:
        num_rows: of W.
        num_blocks: of 256 weights in a row.
    """
    most = 2 if num_rows >= MANY_ROWS else (4 if num_blocks <= FEW_BLOCKS else 8)
    return min(most, previous_power_of_2(num_blocks))


def gemv_quads(
    a: Tensor,
    planes: Tensor,
    kind: str,
    *,
    warps: int | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, for m <= 8, k a multiple of 256.

    Args:
        a: [m, k], float16 or bfloat16.
        planes: uint8 [n, row_bytes], W's rows in planes, at least 16.
        kind: their kind, such as ``"Q4_K:planes"``.
        warps: of a program, a power of two; None for :func:`warps_of`'s.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
        out: [m, n] to write to.
    """
    (num_tokens, k), num_rows = a.shape, planes.shape[0]
    if out is None:
        out = a.new_empty((num_tokens, num_rows))
    if out.numel() == 0:
        return out
    if warps is None:
        warps = warps_of(num_rows, k // BLOCK)
    chained = may_chain(a)
    x, sums, factor = arrange(a, BLOCK // 8, release=chained, beside=MOST_TOKENS)
    _gemv_quads_kernel.launch(
        (cdiv(num_rows, ROWS),),
        out,
        x,
        sums,
        factor,
        planes,
        bias,
        residual,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        num_tokens,
        **row_sizes(planes, kind, k),
        BLOCKS=k // BLOCK,
        **codes_meta(kind, a.device),
        WARPS=warps,
        HINT=STREAM,
        CHAINED=chained,
        num_warps=warps,
        **({"launch_pdl": True} if chained else {}),
    )
    return out
