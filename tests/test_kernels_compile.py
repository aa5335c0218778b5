"""Every kernel, at every configuration the benches launch, compiled for GPUs this machine has not.

The launchers run on meta tensors and tell which kernels they would launch; each is then compiled
to machine code, whose shared memory and spills the assembler reports.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import OPTIONS, record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory

load_kernels("interpret")

# Shared memory one block may use, in bytes.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}

CASES = [
    pytest.param(op, case, id=f"{op.name}/{case.id}")
    for op in OPS.values()
    if "triton" in op.impls
    for case in op.bench
]


def launches_of(op, case):
    """The launches one bench case makes."""
    arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches() as launches:
        op.impls["triton"](**arguments)
    return launches


def source_of(launch, target):
    """What Triton would compile for a launch: types, constants and alignment of its arguments."""
    kernel = launch.kernel.jit
    constants = {k: v for k, v in launch.meta.items() if k not in OPTIONS}
    options = {k: v for k, v in launch.meta.items() if k in OPTIONS}
    signature, attributes = {}, {}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    for i, (name, value) in enumerate(zip(names, launch.args, strict=True)):
        generic = kernel.params[i].do_not_specialize
        if value is None or (type(value) is int and value == 1 and not generic):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        aligned = isinstance(value, torch.Tensor) or (
            type(value) is int and value % 16 == 0 and not generic
        )
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in constants if name not in signature}
    ordered = {p.name: signature[p.name] for p in kernel.params}
    positions = {p.name: i for i, p in enumerate(kernel.params)}
    constexprs = {(positions[name],): value for name, value in constants.items()}
    return ASTSource(kernel, ordered, constexprs, attributes), options


def spilled_bytes(compiled, target):
    """Registers or bytes of them a kernel spills to memory, as the assembler reports them."""
    if target.backend == "hip":
        # Scalar registers spill to lanes of vector registers, not to memory.
        return int(re.search(r"vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[1])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"STACK:(\d+)", usage.stdout)
    assert found, usage.stdout
    return int(found[1])


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_compiles_within_limits(op, case, target_name):
    target, shared_limit = TARGETS[target_name]
    launches = launches_of(op, case)
    assert launches, f"{op.name}/{case.id} launches nothing"
    for launch in launches:
        source, options = source_of(launch, target)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.metadata.shared <= shared_limit, launch.kernel.name
        assert spilled_bytes(compiled, target) == 0, launch.kernel.name
