"""What ships for an architecture: every launch choice that its tables and heuristics make.

The bench cases are the shapes the library answers for. CI compiles their launches for every
architecture, and a table's row that none of them picks would ship without having been compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triton.errors import TritonError

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import Target, compile_launch
from ferrum_triton.kernels.tables import Row
from ferrum_triton.kernels.tuning import TUNABLES, Pick, Tunable, record_picks
from ferrum_triton.registry import OPS, Case, Op
from ferrum_triton.testing import TensorFactory


@dataclass(frozen=True)
class Shipped:
    """One choice of one bench case.

    Attributes:
        op: the op called.
        case: the case.
        pick: the choice; an op whose launches are made of several has one of each.
    """

    op: Op
    case: Case
    pick: Pick


def shipped(gpu: Gpu, ops: Iterable[Op] | None = None) -> Iterator[Shipped]:
    """The choices of the bench cases on a GPU's architecture, from shipped tables alone.

    Args:
        gpu: the GPU, see :func:`ferrum_triton.kernels.gpu.gpu_of_arch`.
        ops: the ops to call; all that have kernels if None.
    """
    for op in OPS.values() if ops is None else ops:
        for case in op.bench if "triton" in op.impls else ():
            for pick in picks_of(op, case, gpu.capability):
                yield Shipped(op, case, pick)


def picks_of(op: Op, case: Case, capability: tuple[int, int]) -> list[Pick]:
    """The choices a bench case makes on meta tensors."""
    sample = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(capability), record_picks() as picks:
        op.impls["triton"](**sample)
    return picks


def uncompiled(gpu: Gpu, choices: Iterable[Shipped]) -> list[tuple[Tunable, Row]]:
    """The rows shipped for a GPU's architecture that no bench case picks."""
    picked = {(c.pick.tunable.op, c.pick.row.shape) for c in choices if c.pick.row is not None}
    return [
        (tunable, row)
        for tunable in TUNABLES.values()
        for row in tunable.rows(gpu)
        if (tunable.op, row.shape) not in picked
    ]


def compile_refusal(op: Op, case: Case, target: Target) -> str:
    """Why a bench case's launches do not fit a target, from compiling them; "" if they do."""
    sample = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**sample)
    for launch in launches:
        name = launch.kernel.name
        try:
            used = compile_launch(launch, target)
        except (TritonError, RuntimeError) as error:
            return f"{name} does not compile: {first_line(error)}"
        if used.spilled:
            return f"{name} spills {used.spilled} bytes"
        if used.shared > target.shared_limit:
            return f"{name} takes {used.shared} bytes of shared memory"
    return ""


def first_line(error: Exception) -> str:
    """The beginning of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:80]
