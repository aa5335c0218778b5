"""A few activations by several matrices in one launch, and by other kernels where one cannot."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ferrum_triton.kernels.elementwise import (
    activated,
    fused_gelu_tanh_mul_split,
    fused_silu_mul_split,
)
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.quant.gemm import gemm_quant
from ferrum_triton.kernels.quant.gemv_planes import (
    STREAM,
    Tile,
    first_row,
    row_sums,
    store_rows,
    tile_of,
)
from ferrum_triton.kernels.quant.matrix_parts import layout_of
from ferrum_triton.kernels.quant.planes import is_aligned, may_chain, uses_ptx
from ferrum_triton.kernels.quant.thread_sums import summed
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.ops import quant_fused as ops
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS

HINT = tl.constexpr(STREAM)


@kernel(dynamic=("num_rows",))
def _gate_up_planes_kernel(
    y_ptr,  # [m, n]
    a_ptr,  # [m, k]
    gate_ptr,  # [n, row_bytes], in planes
    up_ptr,  # [n, row_bytes], in planes
    stride_y_token,
    stride_a_token,
    num_rows,
    GATE: tl.constexpr,  # see entry
    UP: tl.constexpr,  # likewise
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,  # of 32 in a row
    M: tl.constexpr,
    ROWS: tl.constexpr,  # of each matrix, at most num_rows
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    VECTOR: tl.constexpr,
    NARROW: tl.constexpr,
    CHAINED: tl.constexpr,  # weights are loaded while the launch before may still run
):
    if CHAINED:
        gdc_launch_dependents()
    first = first_row(tl.program_id(0), num_rows, ROWS)
    totals = row_sums(
        a_ptr, None, gate_ptr, up_ptr, stride_a_token, 0, num_rows, first, GATE, UP, GROUPS, M,
        ROWS, THREADS, False, ASM, ASM, HINT, VECTOR, NARROW, CHAINED,
    )  # fmt: skip
    # A product of gate beside that of up, so that one exchange of threads does for both.
    flat = ()
    for r in tl.static_range(ROWS):
        for m in tl.static_range(M):
            flat += (totals[r][m], totals[ROWS + r][m])
    sums = summed(flat, 2 * SUMS, ASM)
    gate, up = tl.split(tl.reshape(sums, (SUMS, 2)))
    store_rows(y_ptr, activated(gate, ACTIVATION) * up, stride_y_token, first, M, ROWS)


@triton.jit
def _part_of_rows(
    y_ptr, a_ptr, planes_ptr, stride_y_token, stride_a_token, num_rows, program,
    LAYOUT: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    SUMS: tl.constexpr, THREADS: tl.constexpr, ASM: tl.constexpr, VECTOR: tl.constexpr,
    NARROW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    first = first_row(program, num_rows, ROWS)
    totals = row_sums(
        a_ptr, None, planes_ptr, None, stride_a_token, 0, num_rows, first, LAYOUT, None, GROUPS,
        M, ROWS, THREADS, False, ASM, ASM, HINT, VECTOR, NARROW, CHAINED,
    )  # fmt: skip
    flat = ()
    for r in tl.static_range(ROWS):
        flat += totals[r]
    y = summed(flat, SUMS, ASM)
    store_rows(y_ptr, y, stride_y_token, first, M, ROWS)


@kernel(dynamic=("nq", "nk", "nv"))
def _qkv_planes_kernel(
    y_ptr,  # [m, nq + nk + nv]
    a_ptr,  # [m, k]
    q_ptr,  # [nq, row_bytes], in planes
    k_ptr,  # [nk, row_bytes], in planes, or None
    v_ptr,  # [nv, row_bytes], in planes
    stride_y_token,
    stride_a_token,
    nq,
    nk,
    nv,
    Q: tl.constexpr,  # see entry
    K: tl.constexpr,  # likewise
    V: tl.constexpr,  # likewise
    GROUPS: tl.constexpr,  # of 32 in a row
    M: tl.constexpr,
    ROWS: tl.constexpr,  # at most those of any part that has some
    SUMS: tl.constexpr,  # power of two >= M * ROWS
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    VECTOR: tl.constexpr,
    NARROW: tl.constexpr,
    CHAINED: tl.constexpr,  # weights are loaded while the launch before may still run
):
    if CHAINED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    first_k = tl.cdiv(nq, ROWS)
    first_v = first_k + tl.cdiv(nk, ROWS)
    if program < first_k:
        _part_of_rows(
            y_ptr, a_ptr, q_ptr, stride_y_token, stride_a_token, nq, program,
            Q, GROUPS, M, ROWS, SUMS, THREADS, ASM, VECTOR, NARROW, CHAINED,
        )  # fmt: skip
    elif program >= first_v:
        _part_of_rows(
            y_ptr + nq + nk, a_ptr, v_ptr, stride_y_token, stride_a_token, nv,
            program - first_v, V, GROUPS, M, ROWS, SUMS, THREADS, ASM, VECTOR, NARROW, CHAINED,
        )  # fmt: skip
    elif k_ptr is not None:
        _part_of_rows(
            y_ptr + nq, a_ptr, k_ptr, stride_y_token, stride_a_token, nk, program - first_k,
            K, GROUPS, M, ROWS, SUMS, THREADS, ASM, VECTOR, NARROW, CHAINED,
        )  # fmt: skip


def _with_rows(tile: Tile, most: int, a: Tensor) -> Tile:
    """``tile`` of at most ``most`` rows of each matrix; of 2 for AMD's compiler, slow with more."""
    return tile._replace(rows=min(tile.rows, most if uses_ptx(a) else min(most, 2)))


def _launch_options(a: Tensor, tile: Tile) -> dict[str, Any]:
    num_tokens, num_weights = a.shape
    asm, chained = uses_ptx(a), may_chain(a)
    return {
        "GROUPS": num_weights // 32,
        "M": num_tokens,
        "ROWS": tile.rows,
        "SUMS": next_power_of_2(tile.rows * num_tokens),
        "THREADS": 32 * tile.warps,
        "ASM": asm,
        "VECTOR": asm and is_aligned(a),
        "NARROW": a.dtype != torch.float32,
        "CHAINED": chained,
        "num_warps": tile.warps,
        **({"launch_pdl": True} if chained else {}),
    }


def _is_one_launch(a: Tensor, kinds: Sequence[str]) -> bool:
    return a.shape[0] <= ops.FEW and all(kind in PLANE_FORMATS for kind in kinds)


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
    (num_tokens, k), n = a.shape, gate_blocks.shape[0]
    y = a.new_empty((num_tokens, n)) if out is None else out
    if y.numel() == 0:
        return y
    if not _is_one_launch(a, (gate_kind, up_kind)):
        both = torch.empty((num_tokens, 2 * n), dtype=torch.float32, device=a.device)
        gemm_quant(a, gate_blocks, gate_kind, out=both[:, :n])
        gemm_quant(a, up_blocks, up_kind, out=both[:, n:])
        if activation == "silu":
            return fused_silu_mul_split(both, out=y)
        return fused_gelu_tanh_mul_split(both, out=y)
    tile = tile_of(file_kind(gate_kind), 2 * n, k // 32, num_tokens)
    tile = _with_rows(tile, max(tile.rows // 2, 1), a)
    _gate_up_planes_kernel.launch(
        (cdiv(n, tile.rows),),
        y,
        a,
        gate_blocks,
        up_blocks,
        y.stride(0),
        a.stride(0),
        n,
        GATE=layout_of(gate_blocks, gate_kind, k),
        UP=layout_of(up_blocks, up_kind, k),
        ACTIVATION=activation,
        **_launch_options(a, tile),
    )
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
    num_tokens, k = a.shape
    parts = [(q_blocks, q_kind), (v_blocks, v_kind)]
    if k_blocks is not None:
        parts.insert(1, (k_blocks, k_kind))
    counts = [blocks.shape[0] for blocks, _ in parts]
    y = a.new_empty((num_tokens, sum(counts))) if out is None else out
    if y.numel() == 0:
        return y
    if not _is_one_launch(a, [kind for _, kind in parts]):
        for (blocks, kind), columns in zip(parts, y.split(counts, dim=1), strict=True):
            gemm_quant(a, blocks, kind, out=columns)
        return y
    layouts = [layout_of(blocks, kind, k) for blocks, kind in parts]
    fewest = min(count for count in counts if count)
    tile = tile_of(file_kind(q_kind), sum(counts), k // 32, num_tokens)
    tile = _with_rows(tile, previous_power_of_2(fewest), a)
    _qkv_planes_kernel.launch(
        (sum(cdiv(count, tile.rows) for count in counts),),
        y,
        a,
        q_blocks,
        k_blocks,
        v_blocks,
        y.stride(0),
        a.stride(0),
        counts[0],
        0 if k_blocks is None else counts[1],
        counts[-1],
        Q=layouts[0],
        K=layouts[0] if k_blocks is None else layouts[1],
        V=layouts[-1],
        **_launch_options(a, tile),
    )
    return y
