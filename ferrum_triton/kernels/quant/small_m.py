"""Three to 16 tokens by weights in the repacked layout: a small-m mma fed without shared memory.

y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual. Chosen for few tokens in float16 or bfloat16 by
rows of whole blocks of 256 weights; one launch takes one matrix, up to three side by side (Q, K and
V), or gate and up with the activation between them. More than eight tokens are two groups of eight
by weights that are unpacked once.

A warp multiplies 16 rows, as :mod:`ferrum_triton.kernels.quant.quad_products` says, and blocks of a
row are shared out to warps, whose sums are added at the end. Weights of a step are loaded during
the step before, or two steps ahead. Its activations are loaded during the step before too, or late,
in the step itself, which takes fewer registers and so leaves room for more warps (:class:`SmallM`).

Activations have one factor for each token, or one for each block of 256
(:mod:`ferrum_triton.kernels.quant.block_factors`). The loop takes these for the usual one. Where
one is another, a second loop computes the sums anew, and the product takes twice as long.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.quant.activations import Arranged, Order
from ferrum_triton.kernels.quant.block_factors import (
    PER_WORD,
    USUAL,
    any_is_other,
    hidden_zero,
    relative_factor,
    words_of_factors,
)
from ferrum_triton.kernels.quant.matrices import Part, launch_matrices, part_of_grid
from ferrum_triton.kernels.quant.planes import Matrix, load_words, uses_ptx
from ferrum_triton.kernels.quant.quad_products import (
    WORDS,
    activations_of,
    add_quarter,
    block_begun,
    block_ended,
    quarter_of,
    two_rows,
)
from ferrum_triton.kernels.quant.quad_weights import (
    BLOCK,
    quad_layout,
    sums_minimums,
)
from ferrum_triton.kernels.quant.small_m_config import (
    GROUP,
    SmallM,
    limits,
    limits_of_sixteen,
    takes_blocks,
)
from ferrum_triton.kernels.quant.thread_sums import (
    Opening,
    OpenNorm,
    Output,
    store_each,
    summed_over_warps,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.kinds import file_kind

FEWEST_TOKENS, MOST_TOKENS = 3, 2 * GROUP
# Rows of W a program takes: of one matrix, or half of gate and half of up.
ROWS = 16
# Words of a group's activations that lie together.
PIECE = tl.constexpr(GROUP * WORDS.value)


def small_m_order(num_tokens: int, by_blocks: bool = False) -> Order:
    """The order in which small_m takes activations of ``num_tokens`` tokens."""
    interleave = GROUP * cdiv(num_tokens, GROUP)
    return Order(BLOCK // 8, interleave=interleave, early=by_blocks, by_blocks=by_blocks)


def order_for(
    a: Tensor, parts: Sequence[tuple[Tensor, str]], launch: SmallM, *, gated: bool = False
) -> Order:
    """The order in which a launch takes activations a [m, k]; see :func:`small_m_product`."""
    (num_tokens, k), kinds = a.shape, [file_kind(kind) for _, kind in parts]
    programs = _num_programs(parts, gated)
    gains = takes_blocks(gpu_of(a.device), launch, kinds, num_tokens, k // BLOCK, programs)
    return small_m_order(num_tokens, by_blocks=gains)


def _num_programs(parts: Sequence[tuple[Tensor, str]], gated: bool) -> int:
    """Programs that take all rows of matrices side by side, or of gate and up."""
    if gated:
        return cdiv(parts[0][0].shape[0], ROWS // 2)
    return sum(cdiv(planes.shape[0], ROWS) for planes, _ in parts)


@triton.jit
def _sums_of_rows(
    x,
    num_tokens,
    first,
    second,
    row,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GROUPS: tl.constexpr,
    LAUNCH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The products of 16 rows with all tokens, float32 [32, GROUPS, 2, 2] end to end.

    Entry (lane, group, half, t) belongs to token group · 8 + lane % 4 · 2 + t and row lane // 4, of
    the rows or the matrix that half tells.

    Args:
        x: Arranged pointers, interleaved.
        num_tokens: tokens there are, at most 8 in a group.
        first, second: Matrix; the second is not read where SECOND is None.
        row: first row, int32.
        FIRST, SECOND: layouts.
        GROUPS: groups of eight tokens, 1 or 2.
        LAUNCH: SmallM.
        PARTS: words of a token's factors; 0 where it has one. The caller multiplies by that one, or
            by the usual one.
    """
    WARPS: tl.constexpr = LAUNCH.warps
    LATE: tl.constexpr = LAUNCH.late_tokens
    AHEAD: tl.constexpr = LAUNCH.steps_ahead
    FACTOR: tl.constexpr = 2 if LAUNCH.unrolled else 1
    BOTH: tl.constexpr = FIRST if SECOND is None else SECOND
    BLOCKS: tl.constexpr = FIRST.groups // 8
    APART: tl.constexpr = GROUPS * PIECE
    SUMS: tl.constexpr = sums_minimums(FIRST.format) or sums_minimums(BOTH.format)
    i = tl.arange(0, 32 * WARPS)
    warp, quad, thread = i // 32, i // 4 % 8, i % 4
    first_row = row
    row = (row + quad).to(tl.int64)
    # Weights past a row's end are 0, and multiplied by the last block's activations.
    window = ()
    for step in tl.static_range(AHEAD):
        ahead = step * WARPS + warp
        window += (two_rows(first, second, row, thread, ahead, ahead < BLOCKS, FIRST, SECOND),)
    # Columns past the last token are its again, and not stored.
    none = tl.zeros([32 * WARPS], tl.float32)
    x_ptrs, sums_ptrs, accs = (), (), ()
    for group in tl.static_range(GROUPS):
        at = tl.minimum(group * 8 + quad, num_tokens - 1) * WORDS + thread * 4
        x_ptrs += (x.x.to(tl.pointer_type(tl.int32)) + at,)
        sums_ptrs += (x.sums.to(tl.pointer_type(tl.int32)) + at,)
        accs += ((none, none, none, none),)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    if PARTS > 0:
        count = num_tokens * PARTS
        words = words_of_factors(x.factor, count, 8 * GROUPS * PARTS, WARPS, FIRST.asm != "")
    activations = ()
    if not LATE:
        activations = _activations(x_ptrs, tl.minimum(warp, BLOCKS - 1), APART, FIRST.asm != "")
    for step in tl.range((BLOCKS + WARPS - 1) // WARPS, loop_unroll_factor=FACTOR):
        block = tl.minimum(step * WARPS + warp, BLOCKS - 1)
        sums = None
        # One group's come before its activations: 4096x14336 of Q4_K takes 12.4 us for 12.5 by four
        # tokens. Two groups' come where each is added (:func:`_sixteen_rows` has the figures).
        if SUMS and GROUPS == 1:
            sums = load_words(sums_ptrs[0] + block * APART, None, 4, FIRST.asm != "", "")
        if LATE:
            now = _activations(x_ptrs, block, APART, FIRST.asm != "")
        else:
            now = activations
            next_block = tl.minimum((step + 1) * WARPS + warp, BLOCKS - 1)
            activations = _activations(x_ptrs, next_block, APART, FIRST.asm != "")
        ahead = (step + AHEAD) * WARPS + warp
        later = two_rows(first, second, row, thread, ahead, ahead < BLOCKS, FIRST, SECOND)
        totals = block_begun(accs, FIRST, BOTH)
        for j in tl.static_range(4):
            quarter = ()
            for group in tl.static_range(GROUPS):
                quarter += (now[group][j],)
            totals = add_quarter(totals, window[0], quarter, j, FIRST, BOTH)
        added = ()
        for group in tl.static_range(GROUPS):
            if SUMS and GROUPS == 2:
                sums = load_words(sums_ptrs[group] + block * APART, None, 4, FIRST.asm != "", "")
            added += (block_ended(accs[group], totals[group], window[0], sums, FIRST, BOTH),)
        accs = added
        if AHEAD == 2:
            window = (window[1], later)
        else:
            window = (later,)
    flat = ()
    for group in tl.static_range(GROUPS):
        flat += accs[group]
    if PARTS > 0:
        if any_is_other(words, FIRST.asm != ""):
            flat = _sums_by_factors(
                x, num_tokens, first, second, first_row, FIRST, SECOND, GROUPS, WARPS, PARTS
            )
    return summed_over_warps(flat, 4 * GROUPS)


@triton.jit
def _sums_by_factors(
    x,
    num_tokens,
    first,
    second,
    row,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GROUPS: tl.constexpr,
    WARPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A thread's sums of rows with all tokens, of each group four, each block times its factor over
    the usual one.

    Addresses start from a zero that no compiler knows. It would else keep parts of them in
    registers through the loop before: rows of 14,336 of Q6_K then spill 32 bytes by eight tokens
    and of Q4_K eight by 16, which spill none so, and of Q5_K 56 for 16 by eight
    (``compile_launch`` for sm_90).

    Args:
        x: Arranged pointers, interleaved, by blocks.
        num_tokens: tokens there are, at most 8 in a group.
        first, second: Matrix; the second is not read where SECOND is None.
        row: first row, int32.
        FIRST, SECOND: layouts.
        PARTS: words of a token's factors.
    """
    BOTH: tl.constexpr = FIRST if SECOND is None else SECOND
    BLOCKS: tl.constexpr = FIRST.groups // 8
    APART: tl.constexpr = GROUPS * PIECE
    SUMS: tl.constexpr = sums_minimums(FIRST.format) or sums_minimums(BOTH.format)
    PTX: tl.constexpr = FIRST.asm != ""
    zero = hidden_zero(x.factor)
    i = tl.arange(0, 32 * WARPS) + zero
    warp, quad, thread = i // 32 % WARPS, i // 4 % 8, i % 4
    row = (row + zero + quad).to(tl.int64)
    none = tl.zeros([32 * WARPS], tl.float32)
    nothing = (none, none, none, none)
    flat = nothing * GROUPS
    for step in tl.range((BLOCKS + WARPS - 1) // WARPS, loop_unroll_factor=1):
        block = step * WARPS + warp
        rows = two_rows(first, second, row, thread, block, block < BLOCKS, FIRST, SECOND)
        block = tl.minimum(block, BLOCKS - 1)
        added = ()
        for group in tl.static_range(GROUPS):
            at = tl.minimum(group * 8 + quad, num_tokens - 1) * WORDS + thread * 4
            x_ptr = x.x.to(tl.pointer_type(tl.int32)) + at
            totals = (nothing,)
            for j in tl.static_range(4):
                quarter = (quarter_of(x_ptr, block, j, APART, PTX),)
                totals = add_quarter(totals, rows, quarter, j, FIRST, BOTH)
            sums = None
            if SUMS:
                sums_ptr = x.sums.to(tl.pointer_type(tl.int32)) + at
                sums = load_words(sums_ptr + block * APART, None, 4, PTX, "")
            y = block_ended(nothing, totals[0], rows, sums, FIRST, BOTH)
            token = group * 8 + thread * 2
            next_token = tl.minimum(token + 1, num_tokens - 1)
            token = tl.minimum(token, num_tokens - 1)
            even = relative_factor(x.factor + token * (PARTS * PER_WORD) + block)
            odd = relative_factor(x.factor + next_token * (PARTS * PER_WORD) + block)
            added += (
                tl.fma(y[0], even, flat[4 * group]),
                tl.fma(y[1], odd, flat[4 * group + 1]),
                tl.fma(y[2], even, flat[4 * group + 2]),
                tl.fma(y[3], odd, flat[4 * group + 3]),
            )
        flat = added
    return flat


@triton.jit
def _activations(x_ptrs, block, APART: tl.constexpr, PTX: tl.constexpr):
    """A thread's activations of a block, of each group's token: :func:`activations_of`."""
    x = ()
    for group in tl.static_range(len(x_ptrs)):
        x += (activations_of(x_ptrs[group], block, APART, PTX),)
    return x


@triton.jit
def _sixteen_rows(
    out,
    x,
    num_tokens,
    part,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    LAUNCH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """16 rows of one matrix."""
    # The last program starts early enough to have all its rows; some are done twice.
    first = tl.minimum(part.block * 16, part.matrix.num_rows - 16)
    y = _sums_of_rows(
        x, num_tokens, part.matrix, part.matrix, first, LAYOUT, None, GROUPS, LAUNCH, PARTS, PDL
    )
    i = tl.arange(0, 128 * GROUPS)
    lane, entry = i // (4 * GROUPS), i % (4 * GROUPS)
    # The compiler sees in the first form that neighbouring tokens follow each other, and lays out
    # the sums by it. Two groups lose by that: 6144x4096 of IQ4_XS takes 11.4 us for 9.8 by 16
    # tokens, and 4096x4096 of Q4_K, whose sums of words came first too, 7.0 for 6.7. One group
    # gains by both together: 28672x4096 of Q4_K takes 23.0 us for 23.4 by eight
    # (bench.timing.Replay of gemm_quant, H200, 3c5693a with and without).
    token = lane % 4 * 2 + i % 2 if GROUPS == 1 else entry // 4 * 8 + lane % 4 * 2 + i % 2
    mask = token < num_tokens
    factor = USUAL
    if PARTS == 0:
        factor = tl.load(x.factor + token, mask=mask, other=0.0)
    y *= factor
    row = part.column + first + lane // 4 + i // 2 % 2 * 8
    store_each(y, out, token, row, mask)


@triton.jit
def _gate_and_up(
    out,
    x,
    num_tokens,
    gate,
    up,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,
    LAUNCH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Eight rows of gate and the same of up: act(gate) · up."""
    first = tl.minimum(tl.program_id(0) * 8, gate.num_rows - 8)
    sums = _sums_of_rows(x, num_tokens, gate, up, first, GATE, UP, GROUPS, LAUNCH, PARTS, PDL)
    # [row, pair of tokens, group, gate or up, token of the pair]
    sums = tl.permute(tl.reshape(sums, [8, 4, GROUPS, 2, 2]), (0, 1, 2, 4, 3))
    gate_sums, up_sums = tl.split(tl.reshape(sums, [64 * GROUPS, 2]))
    i = tl.arange(0, 64 * GROUPS)
    token = i // 2 % GROUPS * 8 + i // (2 * GROUPS) % 4 * 2 + i % 2
    mask = token < num_tokens
    factor = USUAL
    if PARTS == 0:
        factor = tl.load(x.factor + token, mask=mask, other=0.0)
    y = activated(gate_sums * factor, ACTIVATION) * (up_sums * factor)
    store_each(y, out, token, first + i // (8 * GROUPS), mask)


@kernel(dynamic=("num_rows", "num_rows_2", "num_rows_3", "num_tokens"))
def _small_m_kernel(
    y_ptr,  # [m, n]
    x_ptr,  # arranged, [k / 32, 8 * GROUPS, 32]
    sums_ptr,  # [k / 256, 8 * GROUPS, 32]
    factor_ptr,  # float32 [m], or uint8 [m, PER_WORD * PARTS]
    planes_ptr,  # uint8 [num_rows, row_bytes]
    planes_2_ptr,  # uint8 [num_rows_2, row_bytes], or None
    planes_3_ptr,  # uint8 [num_rows_3, row_bytes], or None
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    stride_y_token,
    stride_residual_token,
    num_rows,  # at least 16, or 8 of gate
    num_rows_2,
    num_rows_3,
    num_tokens,  # at most 8 in a group
    LAYOUT: tl.constexpr,
    LAYOUT_2: tl.constexpr,  # None where there is one matrix
    LAYOUT_3: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gate, the first matrix; "" for matrices side by side
    GROUPS: tl.constexpr,  # groups of eight tokens, 1 or 2
    LAUNCH: tl.constexpr,  # SmallM
    PARTS: tl.constexpr,  # words of a token's factors, or 0
    PDL: tl.constexpr,
):
    no_norm, no_opening = OpenNorm(None, 0, 0.0), Opening(None, 0, None, 0, None)
    out = Output(
        y_ptr, bias_ptr, residual_ptr, stride_y_token, stride_residual_token, no_norm, no_opening
    )
    x = Arranged(x_ptr, sums_ptr, factor_ptr)
    matrix = Matrix(planes_ptr, num_rows)
    if ACTIVATION != "":
        up = Matrix(planes_2_ptr, num_rows)
        _gate_and_up(
            out,
            x,
            num_tokens,
            matrix,
            up,
            LAYOUT,
            LAYOUT_2,
            ACTIVATION,
            GROUPS,
            LAUNCH,
            PARTS,
            PDL,
        )
    elif LAYOUT_2 is None:
        part = Part(matrix, tl.program_id(0), 0, 0)
        _sixteen_rows(out, x, num_tokens, part, LAYOUT, GROUPS, LAUNCH, PARTS, PDL)
    else:
        matrices = (matrix, Matrix(planes_2_ptr, num_rows_2), Matrix(planes_3_ptr, num_rows_3))
        part = part_of_grid(matrices, 16)
        # Matrices of one layout share one copy of the code, which then compiles once.
        if (LAYOUT == LAYOUT_2 and LAYOUT_2 == LAYOUT_3) or part.number == 0:
            _sixteen_rows(out, x, num_tokens, part, LAYOUT, GROUPS, LAUNCH, PARTS, PDL)
        elif LAYOUT_2 == LAYOUT_3 or part.number == 1:
            _sixteen_rows(out, x, num_tokens, part, LAYOUT_2, GROUPS, LAUNCH, PARTS, PDL)
        else:
            _sixteen_rows(out, x, num_tokens, part, LAYOUT_3, GROUPS, LAUNCH, PARTS, PDL)


def takes_small_m(a: Tensor, num_rows: int) -> bool:
    """Whether activations a [m, k] by so many rows of W can be a product of this kernel."""
    num_tokens, k = a.shape
    return (
        FEWEST_TOKENS <= num_tokens <= MOST_TOKENS
        and a.dtype != torch.float32
        and k % BLOCK == 0 < k
        and num_rows >= ROWS
        and uses_ptx(a)
    )


def small_m_product(
    arranged: Arranged,
    parts: Sequence[tuple[Tensor, str]],
    launch: SmallM,
    out: Tensor,
    *,
    activation: str = "",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual, for m <= 16 and k a multiple of 256.

    Args:
        arranged: a, float16 or bfloat16 [m, k], in a :func:`small_m_order` of m.
        parts: one to three matrices side by side, or gate and up: uint8 [rows, row_bytes] in
            planes, at least 16 rows or none, and a kind such as ``"Q4_K:planes"``.
        launch: the launch's configuration.
        out: products, [m, n].
        activation: what gate passes through, ``"silu"`` or ``"gelu_tanh"``.
        bias: [n], unit stride.
        residual: [m, n], unit stride along n.
    """
    num_tokens, k = out.shape[0], arranged.x.shape[1]
    layouts = [quad_layout(planes, kind, k) for planes, kind in parts]
    groups, programs = cdiv(num_tokens, GROUP), _num_programs(parts, bool(activation))
    by_blocks = arranged.factor.dtype == torch.uint8
    formats = [layout.format for layout in layouts]
    limits_of = limits if groups == 1 else limits_of_sixteen
    limited = limits_of(gpu_of(out.device), launch, programs, formats, by_blocks)
    _small_m_kernel.launch(
        (programs,),
        y_ptr=out,
        x_ptr=arranged.x,
        sums_ptr=arranged.sums,
        factor_ptr=arranged.factor,
        bias_ptr=bias,
        residual_ptr=residual,
        stride_y_token=out.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        num_tokens=num_tokens,
        **launch_matrices(parts, layouts, bool(activation)),
        ACTIVATION=activation,
        GROUPS=groups,
        LAUNCH=launch,
        PARTS=arranged.factor.shape[1] // PER_WORD.value if by_blocks else 0,
        num_warps=launch.warps,
        **limited,
    )
    return out
