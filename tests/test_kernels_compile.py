"""Every kernel, as the benches launch it, compiled for GPUs this machine has not.

The launchers run on meta tensors and tell which kernels they would launch; each is then compiled
to machine code, whose shared memory and spills the assembler reports.
"""

import re
from itertools import cycle

import pytest

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions, overwritten_operands
from ferrum_triton.registry import OPS
from tests.compiling import compiled, launches_of

load_kernels("interpret")

# What is measured is compiled for each shape. Elsewhere an op's first case is, and of the others
# those whose id has a word not met before, on one of these in turn.
MEASURED = "sm_90"
ELSEWHERE = [name for name in TARGETS if name != MEASURED]
SHAPE = re.compile(r"/n\d+k\d+")


def words_of(case):
    """The words of a case's id but for its shape; a format in file order is one word."""
    return set(SHAPE.sub("", case.id).replace("file/", "file ").split("/"))


def cases():
    """(op, case, target) of every kernel that a bench case launches."""
    params, turns = [], cycle(ELSEWHERE)
    for op in OPS.values():
        seen = set()
        for case in op.bench if "triton" in op.impls else ():
            words = words_of(case)
            others = ELSEWHERE if not seen else [next(turns)] if words - seen else []
            seen |= words
            names = [MEASURED, *others]
            params += [
                pytest.param(op, case, name, id=f"{op.name}/{case.id}-{name}") for name in names
            ]
    return params


@pytest.mark.parametrize(("op", "case", "target_name"), cases())
def test_compiles_within_limits(op, case, target_name):
    launches = launches_of(op, case, TARGETS[target_name])
    assert launches, f"{op.name}/{case.id} launches nothing"
    for launch in launches:
        asm = compiled(launch, target_name).asm
        if "wgmma" in asm.get("ptx", ""):
            assert not overwritten_operands(instructions(asm["cubin"])), launch.kernel.name
