"""Activations by weights in planes, on tensor cores: one program per tile of the product.

Chosen for more tokens than :mod:`ferrum_triton.kernels.quant.small_m` takes, up to where a
decoded matrix and cuBLAS win. Rows of W [n, k] are in planes (:mod:`ferrum_triton.quant.planes`),
and K is taken in the steps of :mod:`ferrum_triton.kernels.quant.mma_steps`.

Weights are the tensor cores' first operand, from registers, and tokens the second: a tile takes 64
or 128 rows of W and 8 to 256 tokens.

Of formats with integer scales a product sums scale · code exactly over 256 weights and is scaled by
d in float32 (``scale_after``); the mins are products of their own, with the activations' sums over
words. Or weights are scaled in registers, rounded to float16 like dequantised ones are, which takes
more instructions a weight and fewer a token; one beyond float16's range is infinite then.

One launch takes one matrix, or several of one kind: gate and up, whose rows alternate in a tile so
that a thread has both, or Q, K and V, side by side in y. Of two side by side the second may be of
another kind: a program then runs the loop of the kind that its tile is of.

K of a tile may be split among programs. Each stores its float32 sums, and the one that draws a
tile's last ticket adds up all of them, in one order whoever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import can_overlap, capability, kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait, prefetch_l2
from ferrum_triton.kernels.quant.activations import TICKETS, Arranged, Order
from ferrum_triton.kernels.quant.descriptors import descriptors_of, no_descriptors
from ferrum_triton.kernels.quant.mma_config import MmaConfig, mma_fits
from ferrum_triton.kernels.quant.mma_operands import (
    MatrixTma,
    Operands,
    Place,
    PlaneRows,
    Tile,
    TokensTma,
    block_scales,
    halves_of,
    pointers,
    q_columns,
    tile_of,
    times_row_scales,
)
from ferrum_triton.kernels.quant.mma_steps import add_step, gated
from ferrum_triton.kernels.quant.planes import row_sizes, row_units
from ferrum_triton.kernels.rows import cdiv


@dataclass(frozen=True)
class Launch:
    """What is constant in a launch, beside the tile.

    Attributes:
        splits: programs that share a tile's K.
        whole_tiles: whether the activations have room for whole tiles of tokens.
        activation: y = activation(gate) * up, "silu" or "gelu_tanh"; or "".
        prefetch_lines: lines of 128 bytes of each row that are asked for before the PDL wait.
        prefetch_distance: steps from one to that whose first plane is asked for; 0 for none.
    """

    splits: int
    whole_tiles: bool
    activation: str
    prefetch_lines: int
    prefetch_distance: int


@dataclass(frozen=True)
class Other:
    """A second matrix of another kind.

    Attributes:
        tile: that of its kind.
        q_row, h_row, s_row, t_row, d_row: units of 16 bytes of its rows in each plane.
    """

    tile: Tile
    q_row: int
    h_row: int
    s_row: int
    t_row: int
    d_row: int


class Matrix(NamedTuple):
    """One of the matrices of a launch: a pointer to its planes, its rows and its descriptors."""

    planes: Any
    num_rows: Any
    tma: Any  # MatrixTma


class Activations(NamedTuple):
    """Arranged activations: pointers to them and their sums, a token's stride, descriptors."""

    x: Any
    sums: Any
    stride: Any
    tma: Any  # TokensTma


class Where(NamedTuple):
    """Where a program's tile lies.

    Attributes:
        planes: a pointer to the planes of its rows, or one for each row, [rows].
        row: its rows of W, int64 [rows].
        first: the first of them in descriptors.
        token: its tokens, int64 [tokens].
    """

    planes: Any
    row: Any
    first: Any
    token: Any


@triton.jit
def _sums(
    where,
    matrix,
    up,
    a,
    rows,
    num_words,
    TILE: tl.constexpr,
    LAUNCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products of a tile's rows and tokens, summed over this program's part of K.

    Args:
        where: :class:`Where`.
        matrix: :class:`Matrix`, of the kind of TILE.
        up: descriptors of one whose rows alternate with the first's.
        a: :class:`Activations`.
        rows: units of 16 bytes of a row in each plane.
    """
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_M: tl.constexpr = TILE.tokens
    Q_COLUMNS: tl.constexpr = q_columns(TILE)
    operands = Operands(
        pointers(
            where.planes,
            a.x,
            a.sums,
            rows,
            a.stride,
            where.row,
            where.token,
            matrix.num_rows,
            TILE,
        ),
        rows,
        matrix.tma,
        up,
        a.tma,
        where.first,
    )
    steps = tl.cdiv(num_words, TILE.words)
    per_split = tl.cdiv(steps, LAUNCH.splits)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, steps)
    lines = where.planes.to(tl.pointer_type(tl.int32)) + where.row * rows.q * 4
    if LAUNCH.prefetch_lines > 0:
        # Weights were there before the kernel that arranges the activations was launched.
        line = begin * Q_COLUMNS + tl.arange(0, LAUNCH.prefetch_lines) * 32
        prefetch_l2(lines[:, None] + tl.minimum(line, steps * Q_COLUMNS - 32)[None, :])
    pdl_wait(PDL)

    none = tl.full((), 0, tl.int64)
    scales = block_scales(operands, Place(none, tl.minimum(begin, steps - 1)), TILE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        after = tl.minimum(step + 1, steps - 1)
        if LAUNCH.prefetch_distance > 0:
            ahead = tl.minimum(step + LAUNCH.prefetch_distance, steps - 1)
            prefetch_l2(lines + ahead * Q_COLUMNS)
        acc, scales = add_step(
            acc, scales, operands, Place(none, step), Place(none, after), num_words, TILE
        )
    return times_row_scales(acc, operands, none, TILE)


@kernel(dynamic=("num_tokens",))
def _mma_quant_kernel(
    y_ptr,  # [m, n]
    partial_ptr,  # float32 [tiles, splits, tile's rows, its tokens], or None of one split
    tickets_ptr,  # int32 [tiles] zeros, which are left so, or None of one split
    x_ptr,  # [m, padded k]
    sums_ptr,  # [m, padded k / 8]
    factor_ptr,  # [m]
    planes_ptr,  # [num_rows, row_bytes]
    second_ptr,  # [num_rows_second, row_bytes]: up, or what follows in y; or None
    third_ptr,  # [num_rows_third, row_bytes]: what follows that; or None
    bias_ptr,  # [n], or None
    residual_ptr,  # [m, n], or None
    q_desc,  # of planes, see descriptors_of; or None
    h_desc,
    s_desc,
    d_desc,
    second_q_desc,
    second_h_desc,
    second_s_desc,
    second_d_desc,
    third_q_desc,
    third_h_desc,
    third_s_desc,
    third_d_desc,
    x_desc,  # of activations, or None
    sums_desc,
    stride_y_token,
    stride_x_token,
    stride_residual_token,
    q_row,  # units of 16 bytes of a row in each plane
    h_row,
    s_row,
    t_row,
    d_row,
    num_rows,
    num_rows_second,
    num_rows_third,
    num_words,  # of eight weights in a row
    num_tokens,
    TILE: tl.constexpr,
    OTHER: tl.constexpr,  # of a second matrix of another kind, or None
    LAUNCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = factor · x · Wᵀ + bias + residual, or activation(gate) * up of two such products."""
    GATED: tl.constexpr = LAUNCH.activation != ""
    BLOCK_N: tl.constexpr = TILE.rows
    BLOCK_M: tl.constexpr = TILE.tokens
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    # Programs that share rows of W run side by side.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    first_token = tl.program_id(0) % tiles_m * BLOCK_M
    tile_n = tl.program_id(0) // tiles_m
    m = first_token.to(tl.int64) + tl.arange(0, BLOCK_M)

    first = MatrixTma(q_desc, h_desc, s_desc, d_desc, 0)
    second = MatrixTma(second_q_desc, second_h_desc, second_s_desc, second_d_desc, 0)
    third = MatrixTma(third_q_desc, third_h_desc, third_s_desc, third_d_desc, 0)
    matrix = Matrix(planes_ptr, num_rows, first)
    up = MatrixTma(None, None, None, None, 0)
    column = tl.full((), 0, tl.int64)  # of y, where the matrix begins
    is_second = False
    if GATED:
        up = second
    elif OTHER is not None:
        before = tl.cdiv(num_rows, ROWS)
        is_second = tile_n >= before
        if is_second:
            tile_n -= before
            column += num_rows
            matrix = Matrix(second_ptr, num_rows_second, first)
    elif second_ptr is not None:
        before = tl.cdiv(num_rows, ROWS)
        if tile_n >= before:
            tile_n -= before
            column += num_rows
            matrix = Matrix(second_ptr, num_rows_second, second)
            before = tl.cdiv(num_rows_second, ROWS)
            if third_ptr is not None:
                if tile_n >= before:
                    tile_n -= before
                    column += num_rows_second
                    matrix = Matrix(third_ptr, num_rows_third, third)
    n = tile_n.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, planes = n, matrix.planes
    if GATED:
        # Eight rows of each in turn, as ``gated`` takes them.
        i = tl.arange(0, BLOCK_N)
        row = tile_n.to(tl.int64) * ROWS + (i // 16 * 8 + i % 8)
        planes = tl.where(i // 8 % 2 == 1, second_ptr, planes_ptr)
    # Past the end the last row is read again, and the last token where there is no room behind it.
    w_row, token = tl.minimum(row, matrix.num_rows - 1), m
    if not LAUNCH.whole_tiles:
        token = tl.minimum(m, num_tokens - 1)
    rows = PlaneRows(q_row, h_row, s_row, t_row, d_row)
    where = Where(planes, w_row, tile_n * ROWS, token)
    a = Activations(x_ptr, sums_ptr, stride_x_token, TokensTma(x_desc, sums_desc, first_token))
    if OTHER is None:
        acc = _sums(where, matrix, up, a, rows, num_words, TILE, LAUNCH, PDL)
    else:
        SECOND: tl.constexpr = OTHER.tile
        if is_second:
            other = Matrix(second_ptr, num_rows_second, second)
            others = PlaneRows(OTHER.q_row, OTHER.h_row, OTHER.s_row, OTHER.t_row, OTHER.d_row)
            acc = _sums(where, other, up, a, others, num_words, SECOND, LAUNCH, PDL)
        else:
            acc = _sums(where, matrix, up, a, rows, num_words, TILE, LAUNCH, PDL)
    pdl_trigger(PDL)  # before the loop it would cost registers
    if LAUNCH.splits > 1:
        SPLITS: tl.constexpr = LAUNCH.splits
        PART: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial_ptr + tl.program_id(0).to(tl.int64) * (SPLITS * PART) + place
        tl.store(parts + tl.program_id(1) * PART, acc)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        ticket = tickets_ptr + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(ticket, 0)
        acc = tl.load(parts, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            acc += tl.load(parts + split * PART, cache_modifier=".cg")
    acc *= tl.load(factor_ptr + token)[None, :]
    if GATED:
        ACTIVATION: tl.constexpr = LAUNCH.activation
        acc = gated(acc, ACTIVATION)
    mask = (m < num_tokens)[None, :] & (n < matrix.num_rows)[:, None]
    n += column
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < column + matrix.num_rows, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if residual_ptr is not None:
        residual = residual_ptr + m[None, :] * stride_residual_token + n[:, None]
        acc += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        y_ptr + m[None, :] * stride_y_token + n[:, None],
        acc.to(y_ptr.dtype.element_ty),
        mask=mask,
    )


def options_of(config: MmaConfig) -> dict[str, int]:
    """The compiler options of a configuration."""
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return options | ({"maxnreg": config.maxnreg} if config.maxnreg else {})


def order_of(kind: str, config: MmaConfig) -> Order:
    """The order in which products of a kind take activations."""
    return Order(config.words, halves_of(kind))


def share_launch(gpu: Gpu, config: MmaConfig, kinds: Sequence[str]) -> bool:
    """Whether two matrices of these kinds may be one launch of a configuration."""
    one_order = len({order_of(kind, config) for kind in kinds}) == 1
    return one_order and not any(mma_fits(gpu, config, kind) for kind in kinds)


def mma_products(
    y: Tensor,
    arranged: Arranged,
    matrices: Sequence[Tensor],
    kind: str,
    config: MmaConfig,
    k: int,
    *,
    second_kind: str = "",
    activation: str = "",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias[n] + residual[m, n], rounded once.

    Args:
        y: [m, n], of at least one element.
        arranged: a, float16 or bfloat16 [m, k], in the order of :func:`order_of`.
        matrices: W, or up to three side by side in y; or gate and up. uint8 [rows, row_bytes].
        kind: theirs, such as ``"Q4_K:planes"``.
        second_kind: another kind, which the second of two matrices is of; its order is the same.
        config: the launch's configuration; of gate and up half of a tile's rows are either's.
        activation: what gate passes through, ``"silu"`` or ``"gelu_tanh"``.
        bias: [n], contiguous, in any float dtype.
        residual: [m, n] in any float dtype.
    """
    num_tokens = y.shape[0]
    first, second, third = [*matrices, None, None][:3]
    kinds = [kind, second_kind or kind, kind]
    # Every one is checked.
    sizes, *more_sizes = [row_sizes(w, of, k) for w, of in zip(matrices, kinds, strict=False)]
    tile = tile_of(kind, config, k, y.device)
    rows = tile.rows // 2 if activation else tile.rows
    tiles = cdiv(len(first), rows) if activation else sum(cdiv(len(w), rows) for w in matrices)
    tiles *= cdiv(num_tokens, tile.tokens)
    # A measured choice may serve a shape of more tiles than it was measured at.
    splits, partial = config.splits if tiles <= TICKETS.value else 1, None
    if splits > 1:
        shape = tiles, splits, tile.rows, tile.tokens
        partial = torch.empty(shape, dtype=torch.float32, device=y.device)
    each = {"": first, "second_": second, "third_": third}
    stacks = {prefix: None if w is None else w[None] for prefix, w in each.items()}
    descriptors, other = no_descriptors(stacks), None
    of_tiles = [(tile, sizes, stacks)]
    if second_kind:
        other = Other(tile_of(second_kind, config, k, y.device), **row_units(more_sizes[0]))
        alike = {prefix: stacks[prefix] for prefix in ("", "third_")}
        of_tiles = [
            (tile, sizes, alike),
            (other.tile, more_sizes[0], {"second_": stacks["second_"]}),
        ]
    if config.use_tma:
        for of_kind, row, planes in of_tiles:
            found = descriptors_of(of_kind, rows, arranged, planes, row, k)
            # One kind may take the activations' sums where the other does not.
            descriptors |= {name: found[name] for name in found if found[name] is not None}
    _mma_quant_kernel.launch(
        (tiles, splits),
        y_ptr=y,
        partial_ptr=partial,
        tickets_ptr=None if partial is None else arranged.tickets,
        x_ptr=arranged.x,
        sums_ptr=arranged.sums,
        factor_ptr=arranged.factor,
        planes_ptr=first,
        second_ptr=second,
        third_ptr=third,
        bias_ptr=bias,
        residual_ptr=residual,
        **descriptors,
        stride_y_token=y.stride(0),
        stride_x_token=arranged.x.stride(0),
        stride_residual_token=0 if residual is None else residual.stride(0),
        **row_units(sizes),
        num_rows=len(first),
        num_rows_second=0 if second is None else len(second),
        num_rows_third=0 if third is None else len(third),
        num_words=k // 8,
        num_tokens=num_tokens,
        TILE=tile,
        OTHER=other,
        LAUNCH=Launch(
            splits,
            whole_tiles=len(arranged.x) % tile.tokens == 0,
            activation=activation,
            **_prefetches(config, y.device),
        ),
        **options_of(config),
    )
    return y


def _prefetches(config: MmaConfig, device: torch.device) -> dict[str, int]:
    """What a launch of a configuration asks for ahead: not every GPU prefetches."""
    return {
        "prefetch_lines": config.prefetch_lines if can_overlap(device) else 0,
        "prefetch_distance": config.prefetch_distance if capability(device) >= (8, 0) else 0,
    }
