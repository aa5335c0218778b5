"""Kernels compiled for GPUs that this machine has not, and the limits they must keep."""

from ferrum_triton.kernels.jit import Launch, record_launches
from ferrum_triton.kernels.resources import TARGETS, Resources, Target, compile_launch
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory


def launches_of(op: Op, case: Case, target: Target) -> list[Launch]:
    """The launches one bench case makes on a target."""
    arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**arguments)
    return launches


def compiled(launch: Launch, target_name: str = "sm_90") -> Resources:
    """A launch compiled; it must fit its target's shared memory and spill no more than it may."""
    target = TARGETS[target_name]
    resources = compile_launch(launch, target)
    assert resources.shared <= target.shared_limit, launch.kernel.name
    assert resources.spilled <= target.spill_limit, launch.kernel.name
    return resources
