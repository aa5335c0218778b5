"""Kernels compiled for GPUs that this machine has not, and the limits they must keep."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import pytest

from ferrum_triton.gluon_emulator import idle_barriers
from ferrum_triton.kernels.jit import Launch, record_launches
from ferrum_triton.kernels.resources import TARGETS, Resources, Target, compile_launch
from ferrum_triton.kernels.sass import instructions, overwritten_operands, unset_registers
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory

# Tensors of bench cases, without memory, by the op and what a case asks of it: making them takes
# longer than asking what is launched. Nothing writes to them, so that all targets and tests share
# them.
_samples: dict[tuple, dict[str, Any]] = {}


def in_turns(kinds: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters (kind, *other) of a test that compiles: each kind with one of the others.

    The rest of all pairs follows, for ``--every-gpu`` alone: what they compile differs from another
    case by one word of it.
    """
    params = []
    for kind, turn in zip(kinds, cycle(range(len(others))), strict=False):
        for i, other in enumerate(others):
            marks = () if i == turn else pytest.mark.every_gpu
            params.append(pytest.param(kind, *other, marks=marks))
    return params


def launches_of(op: Op, case: Case, target: Target) -> list[Launch]:
    """The launches one bench case makes on a target."""
    key = (op.name, case.dtype, repr(case.axes))
    if key not in _samples:
        _samples[key] = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**_samples[key])
    return launches


def spill_limit(launch: Launch, target: Target) -> int:
    """Bytes a thread may spill.

    Launches of small_m by two groups of tokens, or by factors of blocks, have a limit on registers.
    They spill by it, and take less time all the same: ``limits_of_sixteen`` and ``limits`` have the
    figures.
    """
    if launch.kernel.name != "_small_m_kernel" or "maxnreg" not in launch.meta:
        return target.spill_limit
    if launch.meta["GROUPS"] == 2:
        return 112
    return 48 if launch.meta["PARTS"] else target.spill_limit


def compiled(launch: Launch, target_name: str = "sm_90") -> Resources:
    """A launch compiled.

    It must fit its target's shared memory and spill no more than it may, and what ptxas is known to
    get wrong must be right.
    """
    target = TARGETS[target_name]
    resources = compile_launch(launch, target)
    assert resources.shared <= target.shared_limit, launch.kernel.name
    assert resources.spilled <= spill_limit(launch, target), launch.kernel.name
    ptx = resources.asm.get("ptx", "")
    if "mbarrier.init" in ptx:
        assert not idle_barriers(resources.asm["ttgir"]), launch.kernel.name
    if "wgmma" in ptx:
        code = instructions(resources.asm["cubin"])
        assert not overwritten_operands(code), launch.kernel.name
        assert not unset_registers(code), launch.kernel.name
    return resources
