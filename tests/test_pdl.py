"""Programmatic dependent launch: what the compiled kernels do before they wait, and that they do.

A kernel may start before the launch before it has ended. It has to wait before it reads what that
launch wrote, and before it writes what that launch reads, in every program and on every branch.
The check reads the PTX from its start: a wait that comes before the first access, branch and
return is one that every program comes to.
"""

import re

import pytest

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.registry import OPS
from tests.compiling import launches_of

load_kernels("interpret")

# Ops whose kernels have no PDL yet. None may be added; one whose kernels all pass must go.
WITHOUT_PDL = frozenset({"dequantize", "embedding_lookup_quant"})

# Packages whose kernels read packed weights, which no kernel writes, before they wait.
READ_WEIGHTS = ("ferrum_triton.kernels.quant.", "ferrum_triton.kernels.moe.")

# Modules whose kernels ask L2 for lines before they wait, which changes no byte, whoever writes it.
PREFETCH = (
    "ferrum_triton.kernels.linear",
    "ferrum_triton.kernels.open_norm",
    "ferrum_triton.kernels.fp8.gemv",
    "ferrum_triton.kernels.fp8.product",
)
PREFETCHED = re.compile(r"prefetch\.global\.L2 \[[^]]*\];")

# Modules whose kernels read, past L1 alone, what leads them to such lines, and branch on their way.
HINTS = (
    "ferrum_triton.kernels.attention.paged_decode",
    "ferrum_triton.kernels.attention.paged_step",
    "ferrum_triton.kernels.fp8.experts_sum",
)
HINT = re.compile(r"\bld\.global\.cg\.[^;]*;")

# Modules whose warps are specialised: all but the first four go to where these, which wait, send
# them on.
SPECIALISED = "ferrum_triton.kernels.hopper."

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
STORE = re.compile(r"\b(?:st|atom|red)\.\S*global|\bcp\.(?:async|reduce)\.bulk\S*\.global\.shared")
ACCESS = re.compile(r"\b(?:ld|st|atom|red|prefetch)\.\S*global|\bcp\.(?:async|reduce)")
BRANCH = re.compile(r"\bbra\b|\bret;")
RETURN = re.compile(r"\bret;")

_faults: dict[str, str] = {}


def fault_of(launch) -> str:
    """What is wrong with a launch, once for each kernel; nothing is the empty text."""
    name = launch.kernel.name
    if name not in _faults:
        _faults[name] = find_fault(launch)
    return _faults[name]


def find_fault(launch) -> str:
    if not launch.meta.get("PDL"):
        return "has no PDL"
    ptx = compile_launch(launch, TARGETS["sm_90"]).asm["ptx"]
    body = ptx[ptx.index(".entry") :]
    if TRIGGER not in body:
        return "never triggers"
    before, wait, _ = body.partition(WAIT)
    if not wait:
        return "never waits"
    module = launch.kernel.jit.fn.__module__
    if module.startswith(READ_WEIGHTS):
        return "writes before it waits" if STORE.search(before) else ""
    if module in PREFETCH + HINTS:
        before = PREFETCHED.sub("", before)
    if module in HINTS:
        before = HINT.sub("", before)
    if ACCESS.search(before):
        return "accesses memory before it waits"
    if module in HINTS:
        return "ends before it waits" if RETURN.search(before) else ""
    if module.startswith(SPECIALISED):
        return ""
    return "branches before it waits" if BRANCH.search(before) else ""


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name) for op in OPS.values() if "triton" in op.impls and op.bench]
)
def test_kernels_wait_before_they_touch_memory(op):
    launches = launches_of(op, op.bench[0], TARGETS["sm_90"])
    assert launches
    faults = {launch.kernel.name: fault_of(launch) for launch in launches}
    faults = {name: fault for name, fault in faults.items() if fault}
    if op.name in WITHOUT_PDL:
        assert faults, f"{op.name} has PDL: take it off the list"
    else:
        assert not faults


def test_every_op_without_pdl_exists():
    assert OPS.keys() >= WITHOUT_PDL


def test_the_check_finds_what_comes_before_the_wait():
    assert ACCESS.search("@%p1 ld.global.v4.b32 { %r1, %r2 }, [ %rd1 + 0 ];")
    assert ACCESS.search("cp.async.cg.shared.global [ %r9 + 0 ], [ %rd4 + 0 ], 0x10, %r8;")
    assert not ACCESS.search("ld.param.b64 %rd1, [_rms_norm_kernel_param_0];")
    assert not ACCESS.search("ld.shared.b32 %r1, [%r2];")
    assert not ACCESS.search(PREFETCHED.sub("", "prefetch.global.L2 [%rd11]; mov.b32 %r3, 0;"))
    assert ACCESS.search(
        PREFETCHED.sub("", "prefetch.global.L2 [%rd1]; ld.global.b32 %r1, [%rd2];")
    )
    assert STORE.search("@%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2 };")
    assert STORE.search("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}]")
    assert not STORE.search("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1]")
    assert BRANCH.search("@%p5 bra $L__BB0_2;")
    assert RETURN.search("@%p5 bra $L__BB0_2; ret;")
    assert not ACCESS.search(HINT.sub("", "@%p1 ld.global.cg.b32 { %r175 }, [ %rd48 + 0 ];"))
    assert ACCESS.search(HINT.sub("", "ld.global.cg.b32 {%r1}, [%rd1]; ld.global.b32 %r1, [%rd2];"))
