"""Up to three matrices in one launch: a program's share of it, and its arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.quant.planes import Matrix


class Part(NamedTuple):
    """One program's share of a launch.

    Attributes:
        matrix: Matrix that its rows belong to.
        block: number of its block of rows in the matrix.
        column: column of y where the matrix' products start.
        number: number of the matrix.
    """

    matrix: Any
    block: Any
    column: Any
    number: Any


@triton.jit
def part_of_grid(matrices, ROWS: tl.constexpr):
    """Part of a launch whose programs take blocks of ROWS rows of three matrices side by side.

    The last matrix may have no rows.
    """
    block = tl.program_id(0)
    first, second, third = matrices
    start_2 = tl.cdiv(first.num_rows, ROWS)
    start_3 = start_2 + tl.cdiv(second.num_rows, ROWS)
    ptr, num_rows, start, column, number = first.ptr, first.num_rows, 0, 0, 0
    if block >= start_3:
        ptr, num_rows, start, number = third.ptr, third.num_rows, start_3, 2
        column = first.num_rows + second.num_rows
    elif block >= start_2:
        ptr, num_rows, start, number = second.ptr, second.num_rows, start_2, 1
        column = first.num_rows
    return Part(Matrix(ptr, num_rows), block - start, column, number)


def launch_matrices(
    parts: Sequence[tuple[Tensor, str]], layouts: Sequence[Any], is_pair: bool
) -> dict[str, Any]:
    """The arguments of a launch that tell of its matrices.

    Args:
        parts: one to three matrices and their kinds.
        layouts: their layouts, constants of the kernel.
        is_pair: the matrices are gate and up, not side by side.
    """
    pointers: list[Tensor | None] = [planes for planes, _ in parts]
    counts, all_layouts = [planes.shape[0] for planes, _ in parts], list(layouts)
    if len(parts) == 2 and not is_pair:  # the third has no rows
        pointers, counts = [*pointers, pointers[1]], [*counts, 0]
        all_layouts.append(layouts[1])
    missing = 3 - len(pointers)
    pointers += [None] * missing
    counts += [0] * missing
    all_layouts += [None] * missing
    names = ("", "_2", "_3")
    return {
        **{f"planes{name}_ptr": ptr for name, ptr in zip(names, pointers, strict=True)},
        **{f"num_rows{name}": count for name, count in zip(names, counts, strict=True)},
        **{f"LAYOUT{name}": layout for name, layout in zip(names, all_layouts, strict=True)},
    }
