"""What is constant in a launch of matrix-vector products, and how many programs it has.

Chosen by every launch that starts from :func:`.gemv_repacked.row_sums`, of one matrix or several.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.parameters import Config
from ferrum_triton.kernels.quant.planes import Layout, is_aligned, uses_ptx
from ferrum_triton.kernels.rows import cdiv, next_power_of_2, previous_power_of_2
from ferrum_triton.ops.open_norm import PART

# Sums of a persistent program that are reduced together at most: more find no registers.
MOST_SUMS = 32


@dataclass(frozen=True)
class GemvPlan:
    """What is constant in a launch.

    Attributes:
        tokens: rows of activations.
        rows: rows of W in a block, a power of two, at most those of the smallest matrix.
        threads: threads of a program.
        persistent: programs take several blocks of rows, K in one step.
        deferred: blocks of a persistent program whose sums are reduced together at its end; 0 to
            reduce after each block.
        ordered: loads of scales stay beside those of weights; of deferred sums, a block's loads
            stay behind the sums of the block two before it.
        prefetch: a step's weights are loaded before the step before is computed.
        late_trigger: the next launch may begin when the one before this has ended, not at once.
        integers: activations are integers or become such; else float32.
        wide: rows of activations start at multiples of 16 bytes.
        ptx: PTX is used.
        parts: sums of squares of an open norm of the activations; 0 where it is closed.
        opens: sums that are deferred are of rows that follow each other, whose norm is opened.
    """

    tokens: int
    rows: int
    threads: int
    persistent: bool = False
    deferred: int = 0
    ordered: bool = True
    prefetch: bool = False
    late_trigger: bool = False
    integers: bool = True
    wide: bool = False
    ptx: bool = False
    parts: int = 0
    opens: bool = False


class Squares(NamedTuple):
    """What activations are yet to be divided by: the root of their mean squares and eps.

    Attributes:
        squares: sums by PART columns, float32 [m, parts].
        eps: added to the mean.
    """

    squares: Tensor
    eps: float


class NormOpening(NamedTuple):
    """A norm to open over a product y: h [m, n] = y · weight, and sums of y² [m, n / PART]."""

    h: Tensor
    squares: Tensor
    weight: Tensor


def plan_of(config: Config, x: Tensor, num_tokens: int, fewest: int) -> GemvPlan:
    """The plan of a launch whose programs each take ``num_tokens`` tokens of ``x``.

    Args:
        fewest: rows of the smallest matrix.
    """
    ptx = uses_ptx(x)
    rows = min(int(config["rows"]), previous_power_of_2(fewest))
    if not ptx and num_tokens > 2:  # AMD's compiler spills with more, and is slow at it
        rows = min(rows, 4)
    return GemvPlan(
        tokens=num_tokens,
        rows=rows,
        threads=32 * int(config.get("warps", 1)),
        ordered=ptx and bool(config.get("ordered", True)),
        prefetch=bool(config.get("prefetch", False)),
        late_trigger=bool(config.get("late_trigger", False)),
        integers=x.dtype != torch.float32,
        wide=ptx and is_aligned(x),
        ptx=ptx,
    )


def launch_plan(
    config: Config, x: Tensor, layout: Layout, num_rows: int, opens: bool = False
) -> tuple[GemvPlan, int] | None:
    """The plan of a launch of one matrix, and its programs; None if it cannot open a norm.

    Of a norm to be opened a program has rows that follow each other, in whole parts, and its last
    block is there.

    Args:
        config: launch choice of path ``"gemv"`` or ``"persistent"``.
        x: activations [m, k], or what stands for them.
        layout: W's.
        num_rows: rows of W.
        opens: whether a norm over the product is opened.
    """
    plan = plan_of(config, x, x.shape[0], num_rows)
    programs = cdiv(num_rows, plan.rows)
    if config["path"] == "persistent":
        plan, programs = _persistent(config, plan, layout, programs, x)
    if not opens:
        return plan, programs
    steps = next_power_of_2(plan.deferred)
    rows = steps * plan.rows
    if plan.deferred == 0 or num_rows % rows or rows % PART or rows * plan.tokens > MOST_SUMS:
        return None
    return replace(plan, deferred=steps, opens=True), num_rows // rows


def _persistent(
    config: Config, plan: GemvPlan, layout: Layout, blocks: int, x: Tensor
) -> tuple[GemvPlan, int]:
    """A plan of persistent programs, and their number."""
    programs = min(blocks, processors(x.device) * int(config["ctas_per_sm"]))
    steps = cdiv(blocks, programs)
    deferred = steps if config["deferred"] and steps * plan.rows * plan.tokens <= MOST_SUMS else 0
    threads = persistent_threads(layout.groups // layout.span)
    return replace(plan, persistent=True, deferred=deferred, threads=threads), programs


def persistent_threads(parts: int) -> int:
    """Threads of a persistent program, which has all parts of a row at once."""
    return max(next_power_of_2(parts), 32)


def closing(plan: GemvPlan, opened: Squares | None) -> GemvPlan:
    """The plan of the same launch on activations whose norm may be open."""
    return plan if opened is None else replace(plan, parts=opened.squares.shape[1])


def opened_arguments(opened: Squares | None) -> dict[str, Tensor | float | None]:
    """A kernel's arguments that tell of an open norm of its activations."""
    return {
        "squares_ptr": None if opened is None else opened.squares,
        "stride_squares_token": 0 if opened is None else opened.squares.stride(0),
        "eps": 0.0 if opened is None else opened.eps,
    }
