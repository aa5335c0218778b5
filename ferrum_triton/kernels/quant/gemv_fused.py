"""Products with several matrices: one launch, or other kernels where it cannot be.

Gate and up are multiplied with the activation between them; Q, K and V lie side by side in y.
Chosen for whatever calls ``gemv_quant_gate_up_silu`` and ``gemv_quant_qkv``. One or two tokens, or
float32 ones, take blocks of rows as :mod:`ferrum_triton.kernels.quant.gemv_repacked` does. More
tokens take the kernels that :mod:`ferrum_triton.kernels.quant.products` names.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.elementwise import activated, gated_split
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.pdl import pdl_trigger
from ferrum_triton.kernels.quant.activations import Tokens
from ferrum_triton.kernels.quant.gemv_config import FEW, gemv_heuristic
from ferrum_triton.kernels.quant.gemv_plan import Squares, closing, opened_arguments, plan_of
from ferrum_triton.kernels.quant.gemv_repacked import first_row, one_block, row_sums
from ferrum_triton.kernels.quant.matrices import launch_matrices, part_of_grid
from ferrum_triton.kernels.quant.mma import mma_products, order_of, share_launch
from ferrum_triton.kernels.quant.mma_config import MAX_TOKENS, MmaConfig, mma_heuristic
from ferrum_triton.kernels.quant.planes import Matrix, layout_of
from ferrum_triton.kernels.quant.products import (
    TILED,
    gemm_quant,
    mma_config,
    pick,
    product,
    small_m_of,
    tiled_products,
)
from ferrum_triton.kernels.quant.small_m import (
    order_for,
    small_m_product,
    takes_small_m,
)
from ferrum_triton.kernels.quant.small_m_config import (
    GROUP,
    SmallM,
    of_gate_and_up,
    of_several,
    of_sixteen,
)
from ferrum_triton.kernels.quant.thread_products import Activations
from ferrum_triton.kernels.quant.thread_sums import (
    Opening,
    OpenNorm,
    Output,
    closed,
    store_each,
    summed,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import quant_fused as ops
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS

# Tokens up to which gate and up of two products stay float32 until they are multiplied. For more
# tokens, float32 would be twice the memory to write and to read again.
FEW_SUMS = 64


@triton.jit
def _store_gate_up(totals, out, first, ACTIVATION: tl.constexpr, PLAN: tl.constexpr):
    """act(gate) · up of totals [row][token], gate's rows before up's, likewise."""
    M: tl.constexpr = PLAN.tokens
    ROWS: tl.constexpr = PLAN.rows
    SUMS: tl.constexpr = triton.next_power_of_2(ROWS * M)
    # A product of gate beside that of up, so that one exchange of threads does for both.
    flat = ()
    for r in tl.static_range(ROWS):
        for m in tl.static_range(M):
            flat += (totals[r][m], totals[ROWS + r][m])
    both = summed(flat, 2 * SUMS, PLAN.ptx)
    both = closed(both, tl.arange(0, 2 * SUMS) // 2 % M, out.opened, PLAN.parts, M)
    gate, up = tl.split(tl.reshape(both, (SUMS, 2)))
    i = tl.arange(0, SUMS)
    y = activated(gate, ACTIVATION) * up
    store_each(y, out, i % M, first + i // M, i < PLAN.rows * M)


@triton.jit
def _block_of_one(
    out,
    a,
    matrices,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of one of three matrices."""
    matrix, block, column, number = part_of_grid(matrices, PLAN.rows)
    # Matrices of one layout share one copy of the code, which then compiles once.
    if (FIRST == SECOND and SECOND == THIRD) or number == 0:
        one_block(out, a, matrix, block, column, FIRST, PLAN, PDL)
    elif SECOND == THIRD or number == 1:
        one_block(out, a, matrix, block, column, SECOND, PLAN, PDL)
    else:
        one_block(out, a, matrix, block, column, THIRD, PLAN, PDL)


@kernel(dynamic=("num_rows", "num_rows_2", "num_rows_3", "eps"))
def _gemv_several_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    planes_ptr,  # uint8 [num_rows, row_bytes]
    planes_2_ptr,  # uint8 [num_rows_2, row_bytes]
    planes_3_ptr,  # uint8 [num_rows_3, row_bytes], or None
    squares_ptr,  # float32 [m, k / 8] of an open norm of a, or None
    stride_y_token,
    stride_a_token,
    stride_squares_token,
    num_rows,
    num_rows_2,
    num_rows_3,
    eps,
    LAYOUT: tl.constexpr,
    LAYOUT_2: tl.constexpr,
    LAYOUT_3: tl.constexpr,  # None of gate and up
    ACTIVATION: tl.constexpr,  # of gate, the first matrix; "" for matrices side by side
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if not PLAN.late_trigger:
        pdl_trigger(PDL)
    opened = OpenNorm(squares_ptr, stride_squares_token, eps)
    out = Output(y_ptr, None, None, stride_y_token, 0, opened, Opening(None, 0, None, 0, None))
    a = Activations(a_ptr, stride_a_token, None, 0)
    matrix = Matrix(planes_ptr, num_rows)
    if ACTIVATION != "":
        first = first_row(tl.program_id(0), num_rows, PLAN.rows)
        up = Matrix(planes_2_ptr, num_rows)
        totals = row_sums(a, matrix, up, first, LAYOUT, LAYOUT_2, PLAN, PDL)
        _store_gate_up(totals, out, first, ACTIVATION, PLAN)
    else:
        matrices = (matrix, Matrix(planes_2_ptr, num_rows_2), Matrix(planes_3_ptr, num_rows_3))
        _block_of_one(out, a, matrices, LAYOUT, LAYOUT_2, LAYOUT_3, PLAN, PDL)


def _launch_several(
    a: Tensor,
    parts: Sequence[tuple[Tensor, str]],
    config: Config,
    out: Tensor,
    opened: Squares | None,
    activation: str = "",
) -> None:
    """y = a · [W₁; W₂; W₃]ᵀ, or activation(a · Gᵀ) · (a · Uᵀ), by a launch of path ``"gemv"``.

    Args:
        a: [m, k], m <= 8.
        parts: matrices, uint8 [rows, row_bytes], and kinds such as ``"Q4_K:planes"``.
        out: [m, n], of at least one element.
        opened: what a norm of ``a`` is yet to be divided by.
    """
    counts = [planes.shape[0] for planes, _ in parts]
    layouts = [layout_of(planes, kind, a.shape[1]) for planes, kind in parts]
    plan = plan_of(config, a, a.shape[0], min(count for count in counts if count))
    if not plan.ptx:  # AMD's compiler spills with more, and is slow at it
        plan = replace(plan, rows=min(plan.rows, 2))
    if activation:
        counts = counts[:1]
    _gemv_several_kernel.launch(
        (sum(cdiv(count, plan.rows) for count in counts),),
        y_ptr=out,
        a_ptr=a,
        **opened_arguments(opened),
        stride_y_token=out.stride(0),
        stride_a_token=a.stride(0),
        **launch_matrices(parts, layouts, bool(activation)),
        ACTIVATION=activation,
        PLAN=closing(plan, opened),
        num_warps=plan.threads // 32,
    )


@ops.gemv_quant_gate_up_silu.impl("triton")
def gemv_quant_gate_up_silu(
    a: Tensor,
    gate_blocks: Tensor,
    up_blocks: Tensor,
    gate_kind: str,
    up_kind: str,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    y = a.new_empty((a.shape[0], gate_blocks.shape[0])) if out is None else out
    if y.numel():
        gate_up(Tokens(a), [(gate_blocks, gate_kind), (up_blocks, up_kind)], activation, y)
    return y


@ops.gemv_quant_qkv.impl("triton")
def gemv_quant_qkv(
    a: Tensor,
    q_blocks: Tensor,
    k_blocks: Tensor | None,
    v_blocks: Tensor,
    q_kind: str,
    k_kind: str,
    v_kind: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    parts = stacked((q_blocks, q_kind), (k_blocks, k_kind), (v_blocks, v_kind))
    num_rows = sum(blocks.shape[0] for blocks, _ in parts)
    y = a.new_empty((a.shape[0], num_rows)) if out is None else out
    if y.numel():
        side_by_side(Tokens(a), parts, y)
    return y


def stacked(*parts: tuple[Tensor | None, str]) -> list[tuple[Tensor, str]]:
    """The matrices there are, and their kinds."""
    return [(blocks, kind) for blocks, kind in parts if blocks is not None]


def side_by_side(tokens: Tokens, parts: Sequence[tuple[Tensor, str]], out: Tensor) -> None:
    """y = a · [W₁; W₂; W₃]ᵀ, of at least one element."""
    if all(kind in PLANE_FORMATS for _, kind in parts) and _side_by_side(tokens, parts, out):
        return
    a, counts = tokens.values(), [blocks.shape[0] for blocks, _ in parts]
    for (blocks, kind), columns in zip(parts, out.split(counts, dim=1), strict=True):
        gemm_quant(a, blocks, kind, out=columns)


def gate_up(
    tokens: Tokens, parts: Sequence[tuple[Tensor, str]], activation: str, out: Tensor
) -> None:
    """y = act(a · Gᵀ) · (a · Uᵀ), of at least one element."""
    if all(kind in PLANE_FORMATS for _, kind in parts) and _gate_up(tokens, parts, activation, out):
        return
    a, (num_tokens, n) = tokens.values(), out.shape
    dtype = torch.float32 if num_tokens <= FEW_SUMS else a.dtype
    both = torch.empty((num_tokens, 2 * n), dtype=dtype, device=a.device)
    for (blocks, kind), columns in zip(parts, both.split(n, dim=1), strict=True):
        gemm_quant(a, blocks, kind, out=columns)
    gated_split(both, activation, out)


def _side_by_side(tokens: Tokens, parts: Sequence[tuple[Tensor, str]], out: Tensor) -> bool:
    """Try y = a · [W₁; W₂; W₃]ᵀ with ``a`` arranged once; False if it cannot be.

    Matrices of one kind are one launch, and so are two that take ``a`` in one order, those of any
    kinds for up to eight tokens, and what small_m takes of more.
    """
    a, matrices = tokens.like, [planes for planes, _ in parts]
    counts = [planes.shape[0] for planes in matrices]
    if takes_small_m(a, min(count for count in counts if count)):
        config = pick(a, parts[0][1], sum(counts))
        if config["path"] == "packed" and len({kind for _, kind in parts}) == 1:
            tiled_products(out, tokens, matrices, parts[0][1], config)
            return True
        launch = _small_m_launch(config, a, parts, sum(counts))
        if launch is not None:
            small_m_product(tokens.arranged(order_for(a, parts, launch)), parts, launch, out)
            return True
    if a.shape[0] <= FEW:
        a, opened = tokens.open()
        if len(parts) == 1:
            product(a, *parts[0], out=out, opened=opened)
            return True
        config = _plain_beside(pick(a, parts[0][1], sum(counts)), a, parts, sum(counts))
        _launch_several(a, parts, config, out, opened)
        return True
    kinds = list(dict.fromkeys(kind for _, kind in parts))
    if len(kinds) == len(parts) == 2 and all(counts):
        tile = _shared_tile(a, kinds, sum(counts))
        if tile is not None:
            arranged = tokens.arranged(order_of(kinds[0], tile))
            mma_products(out, arranged, matrices, kinds[0], tile, a.shape[1], second_kind=kinds[1])
            return True
    rows = [sum(counts)] * len(parts) if len(kinds) == 1 else counts
    configs = [pick(a, kind, max(n, 1)) for (_, kind), n in zip(parts, rows, strict=True)]
    if any(config["path"] not in TILED for config in configs):
        return False
    if len(kinds) == 1:
        tiled_products(out, tokens, matrices, parts[0][1], configs[0])
        return True
    for (planes, kind), config, y in zip(parts, configs, out.split(counts, dim=1), strict=True):
        if y.numel():
            tiled_products(y, tokens, [planes], kind, config)
    return True


def _shared_tile(a: Tensor, kinds: Sequence[str], num_rows: int) -> MmaConfig | None:
    """The tile in which matrices of two kinds are one launch of ``mma``; None if there is none.

    Up to MAX_TOKENS one launch gains more than ``packed`` does for the larger matrix: Q and K of
    Q4_K and V of Q6_K, 5120 and 1024 by 4096, take 20.7 us by 64 tokens and 27.7 apart, 30.5 by 128
    and 41.1, but 52.5 by 192 and 45.2 (``bench.timing.Replay`` of ``add_rms_norm_quant_qkv`` as it
    was and under ``products.forced``, H200, e7b4576).
    """
    gpu, config = gpu_of(a.device), pick(a, kinds[0], num_rows)
    if config["path"] == "packed" and a.shape[0] <= MAX_TOKENS:
        tile = mma_heuristic(gpu, kinds[0], a.shape[0], num_rows, a.shape[1])
    elif config["path"] == "mma":
        tile = mma_config(config)
    else:
        return None
    return tile if share_launch(gpu, tile, kinds) else None


def _gate_up(
    tokens: Tokens, parts: Sequence[tuple[Tensor, str]], activation: str, out: Tensor
) -> bool:
    """Try y = act(a · Gᵀ) · (a · Uᵀ) in one launch; False if it cannot be."""
    a, ((gate, kind), (up, up_kind)) = tokens.like, parts
    num_rows = 2 * gate.shape[0]
    config = pick(a, kind, num_rows)
    is_tiled = config["path"] in TILED and kind == up_kind
    if takes_small_m(a, num_rows) and not is_tiled:
        launch = _small_m_launch(config, a, parts, num_rows, activation)
        if launch is not None:
            arranged = tokens.arranged(order_for(a, parts, launch, gated=True))
            small_m_product(arranged, parts, launch, out, activation=activation)
            return True
    if a.shape[0] <= FEW:
        a, opened = tokens.open()
        config = _plain(config, a, parts, num_rows)
        config = {**config, "rows": max(config["rows"] // 2, 1)}
        _launch_several(a, parts, config, out, opened, activation)
        return True
    if is_tiled:
        tiled_products(out, tokens, [gate, up], kind, config, activation=activation)
    return is_tiled


def _small_m_launch(
    config: Config,
    a: Tensor,
    parts: Sequence[tuple[Tensor, str]],
    num_rows: int,
    activation: str = "",
) -> SmallM | None:
    """The launch in which small_m takes several matrices; None where tiles take less time.

    Args:
        config: what is chosen for as many rows of the first matrix's kind.
        activation: what gate passes through; "" for matrices side by side.
    """
    num_tokens, num_weights = a.shape
    kinds = [file_kind(kind) for _, kind in parts]
    if num_tokens <= GROUP:
        launch = small_m_of(config)
        return of_gate_and_up(launch, *kinds) if activation else launch
    gpu = gpu_of(a.device)
    if config["path"] == "small_m":
        return of_several(gpu, small_m_of(config), kinds, num_rows)
    unlike = list(dict.fromkeys(kind for _, kind in parts))
    if len(unlike) == 1:
        return None
    if not activation and len(unlike) == 2 and _shared_tile(a, unlike, num_rows) is not None:
        return None
    # Tiles would take matrices in a launch each.
    launch = of_sixteen(gpu, kinds[0], num_rows, num_weights // 256, several=True)
    return None if launch is None else of_several(gpu, launch, kinds, num_rows)


def _plain(config: Config, a: Tensor, parts: Sequence[tuple[Tensor, str]], num_rows: int) -> Config:
    """``config``, or where that is of persistent programs, which take one matrix, a plain one."""
    if config["path"] == "gemv":
        return config
    num_tokens, num_weights = a.shape
    kind, is_wide = file_kind(parts[0][1]), a.dtype == torch.float32
    return gemv_heuristic(kind, num_tokens, num_rows, num_weights // 32, is_wide)


def _plain_beside(
    config: Config, a: Tensor, parts: Sequence[tuple[Tensor, str]], num_rows: int
) -> Config:
    """:func:`_plain` of matrices side by side.

    One token by 6144 rows of 4096 takes less time on half as many programs of 16 rows: Q and K of
    Q4_K and V of Q6_K 5.3 us for 5.9, and behind an open norm 5.7 for 6.8, of Q5_K and Q6_K 6.9 for
    7.6; but 3072 rows of 2048 2.8 for 2.5 (``bench.timing.Replay`` of ``gemv_quant_qkv`` and
    ``open_norm_quant_qkv`` under ``products.forced``, H200, c7bdf02).
    """
    plain = _plain(config, a, parts, num_rows)
    gains = file_kind(parts[0][1]) in ("Q4_K", "Q5_K") and 4096 <= num_rows < 8192
    is_narrow_token = a.shape[0] == 1 and a.dtype != torch.float32
    if config["path"] != "gemv" and gains and is_narrow_token and a.shape[1] >= 4096:
        return {**plain, "rows": 16}
    return plain
