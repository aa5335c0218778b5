"""What a thread takes at a time of rows of one matrix in planes, or of two of different kinds."""

import triton
import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.quant.planes import load_rows, row_sizes, span_of
from ferrum_triton.quant.formats import FORMATS, BlockFormat
from ferrum_triton.quant.kinds import file_kind


def layout_of(planes: Tensor, kind: str, num_weights: int) -> tuple[int | BlockFormat, ...]:
    """What :func:`entry` reads."""
    return *row_sizes(planes, kind, num_weights).values(), FORMATS[file_kind(kind)]


@triton.constexpr_function
def entry(layout, i):
    """Of a layout: bytes of a row of the planes q, h, s, t and d, and the format."""
    return layout[i]


@triton.constexpr_function
def span_of_both(first, second, num_groups):
    """Groups that a thread takes at a time of matrices of two layouts, the second None of one."""
    return max(span_of(layout[5], num_groups) for layout in (first, second) if layout is not None)


@triton.jit
def _parts_of(
    ptr, num_rows, row, at, mask, LAYOUT: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, ASM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """SPAN groups of ROWS rows, from SPAN · at on: parts of what is loaded at once, [part][row]."""
    OWN: tl.constexpr = span_of(entry(LAYOUT, 5), GROUPS)
    parts = ()
    for i in tl.static_range(SPAN // OWN):
        part = load_rows(
            ptr, num_rows, row, at * (SPAN // OWN) + i, mask, entry(LAYOUT, 0), entry(LAYOUT, 1),
            entry(LAYOUT, 2), entry(LAYOUT, 3), entry(LAYOUT, 4), entry(LAYOUT, 5), OWN, ROWS, ASM,
            HINT,
        )  # fmt: skip
        parts += (part,)
    return parts


@triton.jit
def rows_of(
    first_ptr, second_ptr, num_rows, row, at, mask, FIRST: tl.constexpr, SECOND: tl.constexpr,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """What a thread needs of ROWS rows of each matrix: [part][row], one kind's together."""
    parts = _parts_of(first_ptr, num_rows, row, at, mask, FIRST, GROUPS, SPAN, ROWS, ASM, HINT)
    if SECOND is not None:
        others = _parts_of(
            second_ptr, num_rows, row, at, mask, SECOND, GROUPS, SPAN, ROWS, ASM, HINT
        )
        if entry(SECOND, 5) == entry(FIRST, 5):
            both = ()
            for i in tl.static_range(len(parts)):
                both += (parts[i] + others[i],)
            parts = both
        else:
            parts += others
    return parts


@triton.jit
def part_of(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of a tuple from FIRST on."""
    part = ()
    for i in tl.static_range(COUNT):
        part += (values[FIRST + i],)
    return part
