"""Every kernel, as the benches launch it, compiled for GPUs this machine has not.

The launchers run on meta tensors and tell which kernels they would launch; each is then compiled
to machine code, whose shared memory and spills the assembler reports.
"""

import re
from itertools import cycle

import pytest

from bench.shipped import picks_of
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.linear_config import BLAS
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions, overwritten_operands
from ferrum_triton.registry import OPS
from tests.compiling import compiled, launches_of

load_kernels("interpret")

# Every word of a case's id is compiled once for the GPU that is measured. Of the words that choose
# a kernel or what it is made of, such as formats and layouts, each is compiled once for one of the
# others as well, and an op that is no product for each of them. Numbers of tokens choose between
# kernels in products alone.
MEASURED = "sm_90"
ELSEWHERE = [name for name in TARGETS if name != MEASURED]
SHAPE = re.compile(r"n\d+k\d+")
SIZE = re.compile(r"n\d+k\d+|[mtbl]\d+|ctx\d+|(prefill|mixed)\(.*\)")
# Compiling for AMD takes 14 s and more (pytest --durations=0) where a program takes eight tokens,
# or four of several matrices, and for these formats: words are loaded one by one there, and most of
# the time goes to Triton's pass that coalesces loads (MLIR_ENABLE_TIMING=1). Such cases go to
# another GPU.
SLOW_ON_AMD = re.compile(r".*/m8|.*_qkv/.*/m4|gemv_quant/(q2_K|iq4_xs)/.*")

# Kernels that are launched there too, but in none of the cases that words choose.
ALSO = {
    "gemm_quant/q4_0/n4096k14336/m2": ("sm_80", "sm_100"),
    "gemm_quant/q4_K/n4096k14336/m16": ("sm_80",),
    "add_rms_norm_quant_gate_up_silu/q4_K_q4_K/n12288k4096/m32": ("gfx942",),
    "softmax_rows/bf16/n4096/m1": ("sm_100",),
    "softmax_rows/bf16/n152064/m64": ("sm_80", "gfx942"),
}


def is_product(op):
    return "gemm" in op.name or "_quant" in op.name


def chooses(op, word):
    """Whether launches differ by a word in more than numbers, whatever the GPU."""
    return not (SHAPE if is_product(op) else SIZE).fullmatch(word)


def cases():
    """(op, case, target) of the kernels that bench cases launch."""
    params = []
    for op in OPS.values():
        asked, seen, seen_elsewhere, turns = {}, set(), set(), cycle(ELSEWHERE)
        for case in op.bench if "triton" in op.impls else ():
            # A format in file order is one word.
            words = set(case.id.replace("file/", "file ").split("/"))
            name = f"{op.name}/{case.id}"
            if words - seen:
                asked[case.id, MEASURED] = case
            seen |= words
            # Two tokens take the kernel of one, which gemv_quant has compiled for every format.
            if not (op.name == "gemm_quant" and "m2" in words):
                chosen = {word for word in words if chooses(op, word)}
                # Three formats at once, of which a kernel of two has met each, take three times as
                # long as two.
                is_needed = chosen - seen_elsewhere and case.id.count("_q") < 2
                if not seen_elsewhere or is_needed:
                    target = next(turns)
                    is_slow = target == "gfx942" and SLOW_ON_AMD.fullmatch(name)
                    asked[case.id, "sm_80" if is_slow else target] = case
                seen_elsewhere |= words
        met = {target for _, target in asked}
        if asked and not is_product(op):
            case = op.bench[0]
            asked |= {(case.id, target): case for target in ELSEWHERE if target not in met}
        for case in op.bench:
            more = ALSO.get(f"{op.name}/{case.id}", ())
            asked |= {(case.id, target): case for target in more}
        for (case_id, target), case in asked.items():
            params.append(pytest.param(op, case, target, id=f"{op.name}/{case_id}-{target}"))
    return params


def is_for_torch(op, case, target):
    """Whether a dense product is torch's: chosen so, or of too many tokens to be chosen for."""
    picks = picks_of(op, case, target.capability)
    return op.name == "gemm" and all(pick.config == BLAS for pick in picks)


@pytest.mark.parametrize(("op", "case", "target_name"), cases())
def test_compiles_within_limits(op, case, target_name):
    target = TARGETS[target_name]
    launches = launches_of(op, case, target)
    assert launches or is_for_torch(op, case, target), f"{op.name}/{case.id} launches nothing"
    for launch in launches:
        asm = compiled(launch, target_name).asm
        if "wgmma" in asm.get("ptx", ""):
            assert not overwritten_operands(instructions(asm["cubin"])), launch.kernel.name
