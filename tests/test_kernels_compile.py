"""Every kernel, as the benches launch it, compiled for GPUs this machine has not.

The launchers run on meta tensors and tell which kernels they would launch; each is then compiled
to machine code, whose shared memory and spills the assembler reports.
"""

import re

import pytest

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.kernels.sass import instructions, overwritten_operands
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory

load_kernels("interpret")

# What is measured is compiled for each shape; elsewhere one shape of a weight's format will do.
MEASURED = "sm_90"
SHAPE = re.compile(r"/n\d+k\d+")


def cases():
    """(op, case, target) of every kernel that a bench case launches."""
    params, seen = [], set()
    for op in OPS.values():
        for case in op.bench if "triton" in op.impls else ():
            name = f"{op.name}/{case.id}"
            is_new = SHAPE.sub("", name) not in seen
            seen.add(SHAPE.sub("", name))
            targets = TARGETS if is_new else [MEASURED]
            params += [pytest.param(op, case, t, id=f"{name}-{t}") for t in targets]
    return params


def launches_of(op, case, target):
    """The launches one bench case makes on a target."""
    arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**arguments)
    return launches


@pytest.mark.parametrize(("op", "case", "target_name"), cases())
def test_compiles_within_limits(op, case, target_name):
    target = TARGETS[target_name]
    launches = launches_of(op, case, target)
    assert launches, f"{op.name}/{case.id} launches nothing"
    for launch in launches:
        used = compile_launch(launch, target)
        assert used.shared <= target.shared_limit, launch.kernel.name
        assert used.spilled == 0, launch.kernel.name
        if "wgmma" in used.asm.get("ptx", ""):
            assert not overwritten_operands(instructions(used.asm["cubin"])), launch.kernel.name
