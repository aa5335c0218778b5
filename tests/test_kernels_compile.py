"""Every kernel, as the benches launch it, compiled for GPUs this machine has not.

The launchers run on meta tensors and tell which kernels they would launch; each is then compiled
to machine code, whose shared memory and spills the assembler reports.
"""

import re
from itertools import cycle

import pytest

from bench.shipped import picks_of
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.linear_config import BLAS
from ferrum_triton.kernels.resources import TARGETS, translate_launch
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory
from tests.compiling import compiled, launches_of
from tests.harness import smallest_axes

load_kernels("interpret")

# Every word of a case's id is compiled once for the GPU that is measured, but for sizes of
# matrices: between these a table chooses, each row of which test_shipped.py compiles. Of the words
# that choose a kernel or what it is made of, such as formats and layouts, each is compiled once for
# one of the others as well, and an op that is no product for each of them. Numbers of tokens choose
# between kernels in products alone. Products unpack a format by the same functions, whichever of
# them takes it: for the other GPUs it is compiled once for one or two tokens, for a few and for
# many. `--every-gpu` compiles every case for every GPU.
MEASURED = "sm_90"
ELSEWHERE = [name for name in TARGETS if name != MEASURED]
SHAPE = re.compile(r"n\d+k\d+")
SIZE = re.compile(r"n\d+k\d+|[mtbl]\d+|ctx\d+|(prefill|mixed)\(.*\)")
FORMATS = re.compile(r"(?:file )?(?:i?q|mxfp|nvfp)\d.*")
# Compiling for AMD takes 8 s and more (pytest --durations=0) where a program takes eight tokens,
# or four of several matrices, and for these formats: words are loaded one by one there, and most of
# the time goes to Triton's pass that coalesces loads (MLIR_ENABLE_TIMING=1). Such cases go to
# another GPU.
SLOW_ON_AMD = re.compile(
    r".*/m8|.*_qkv/.*/m4|gemv_quant/(q2_K|q3_K|q5_0|iq4_xs)/.*|gemm_quant/file/iq4_xs/.*"
)

# Kernels that are launched there too, but in none of the cases that words choose.
ALSO = {
    "add_rms_norm_quant_gate_up_silu/q4_K_q4_K/n12288k4096/m32": ("gfx942",),
    "add_rms_norm_quant_qkv/q4_K_q6_K/n6144k4096/m32": ("sm_80", "sm_100"),
    "add_rms_norm_quant_qkv/q4_K/n6144k5120/m8": ("sm_80",),
    "compute_ids_tpe/e128k8/m4096": ("sm_80", "sm_100", "gfx942"),
    "gemm_fp8_128x128/n4096k4096/m1": ("sm_80", "sm_100", "gfx942"),
    "gemm_fp8_128x128/n4096k4096/m64": ("sm_80", "sm_100", "gfx942"),
    "gemm_moe_id_fp8_128x128/e128k8n2048k768/m16": ("sm_80", "sm_100", "gfx942"),
    "gemm_moe_id_sum/bf16/e128k8n2048k768/m1": ("sm_80", "sm_100", "gfx942"),
    "gemm_moe_id_sum_fp8_128x128/e128k8n2048k768/m1": ("sm_80", "sm_100", "gfx942"),
    "gemm_quant/q4_0/n4096k14336/m2": ("sm_80", "sm_100"),
    "gemm_quant/q4_K/n4096k14336/m4": ("sm_100",),
    "gemm_quant/q4_K/n4096k14336/m16": ("gfx942",),
    "gemm_quant_moe_id/q4_0:planes/e128k8n2048k768/m256": ("sm_90",),
    "gemm_quant_moe_id/q4_k:planes/e128k8n768k2048/m4096": ("sm_100",),
    "gemm_quant_moe_id/q4_k:planes/e128k8n768k2048/m64": ("sm_80", "gfx942"),
    "gemm_quant_moe_id_gate_up_silu/q4_k:planes/e128k8n768k2048/m64": ("sm_100",),
    "gemv_quant_gate_up_silu/q4_K_q4_K/n14336k4096/m1": ("sm_80", "sm_100", "gfx942"),
    "gemv_quant_moe_id/q4_k:planes/e128k8n768k2048/m1": ("sm_80", "sm_100", "gfx942"),
    "gemv_quant_moe_id_sum/q4_k:planes/e128k8n2048k768/m1": ("sm_80", "sm_100", "gfx942"),
    "gemv_quant/q4_K/n4096k12288/m2": ("gfx942",),
    "linear_quant_open_norm/q4_K/n4096k4096/m1": ("gfx942",),
    "mlp_quant_moe_id/q4_k:planes_q4_k:planes/e128k8h2048i768/m32": ("sm_100",),
    "moe_align_block_size/e128k8/m4096": ("sm_80", "sm_100", "gfx942"),
    "open_norm_quant_qkv/q4_K/n6144k4096/m16": ("sm_80", "sm_100", "gfx942"),
    "paged_varlen_attention/bf16/h32k8d128/block16/chunk(1x128 on ctx 8192)": ("gfx942",),
    "softmax_rows/bf16/n4096/m1": ("sm_100",),
    "softmax_rows/bf16/n152064/m64": ("sm_80", "gfx942"),
}


def is_product(op):
    return "gemm" in op.name or "_quant" in op.name


def words_of(case):
    """What a case's id is made of; a format in file order is one word."""
    return set(case.id.replace("file/", "file ").split("/"))


def chooses(op, word):
    """Whether launches differ by a word in more than numbers, whatever the GPU."""
    return not (SHAPE if is_product(op) else SIZE).fullmatch(word)


def chosen_elsewhere(op, case):
    """What a case has compiled for a GPU that is not measured: an op's own words, or formats."""
    words = words_of(case)
    if not is_product(op):
        return {(op.name, word) for word in words if chooses(op, word)}
    tokens = case.axes["num_tokens"] if "num_tokens" in case.axes else case.axes.get("m", 1)
    few = next(most for most in (2, 8, 10**9) if tokens <= most)
    written = [word for word in words if FORMATS.fullmatch(word)]
    formats = {name for word in written for name in re.split(r"_(?=i?q\d|mxfp|nvfp)", word.lower())}
    return {("experts" * ("moe" in op.name), few, name) for name in formats or words}


def first_of_each():
    """(op's name, case's id, target) of what is compiled without being asked for every GPU."""
    asked, seen_elsewhere, turns_of_products = {}, set(), cycle(ELSEWHERE)
    for op in OPS.values():
        bench = op.bench if "triton" in op.impls else ()
        seen, met, turns = set(), set(), cycle(ELSEWHERE)
        for case in bench:
            name, words = f"{op.name}/{case.id}", words_of(case)
            if any(chooses(op, word) or not is_product(op) for word in words - seen):
                asked[op.name, case.id, MEASURED] = case
            seen |= words
            new = chosen_elsewhere(op, case) - seen_elsewhere
            # Formats at once, of which others have met each, take as long as they are many; and two
            # tokens take the kernel of one, which gemv_quant has compiled for every format.
            is_costly = case.id.count("_q") >= 2 or (op.name == "gemm_quant" and "m2" in words)
            if new and not is_costly:
                target = next(turns_of_products if is_product(op) else turns)
                is_slow = target == "gfx942" and SLOW_ON_AMD.fullmatch(name)
                asked[op.name, case.id, "sm_80" if is_slow else target] = case
                seen_elsewhere |= new
                met.add(target)
            for target in ALSO.get(name, ()):
                asked[op.name, case.id, target] = case
        if bench and not is_product(op):
            for target in ELSEWHERE:
                if target not in met:
                    asked[op.name, bench[0].id, target] = bench[0]
    return asked


def cases():
    """(op, case, target) of the kernels that bench cases launch."""
    asked, params = first_of_each(), []
    for op in OPS.values():
        for case in op.bench if "triton" in op.impls else ():
            for target in TARGETS:
                is_asked = (op.name, case.id, target) in asked
                marks = () if is_asked else pytest.mark.every_gpu
                name = f"{op.name}/{case.id}-{target}"
                params.append(pytest.param(op, case, target, id=name, marks=marks))
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
        compiled(launch, target_name)


@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if "triton" in op.impls], ids=lambda op: op.name
)
def test_sizes_of_one_are_translated(op):
    """Triton makes a constant of an argument that is 1, which has no methods of a tensor."""
    for dtype in op.dtypes:
        arguments = op.make_sample(TensorFactory(dtype, "meta"), **smallest_axes(op))
        with record_launches(TARGETS[MEASURED].capability) as launches:
            op.impls["triton"](**arguments)
        for launch in launches:
            translate_launch(launch, TARGETS[MEASURED])


@pytest.mark.parametrize("target_name", TARGETS)
def test_every_kernel_is_compiled_for_every_gpu_that_launches_it(target_name):
    """Without `--every-gpu`, whatever words choose."""
    asked, launched, chosen = first_of_each(), set(), set()
    for op in OPS.values():
        for case in op.bench if "triton" in op.impls else ():
            launches = launches_of(op, case, TARGETS[target_name])
            names = {launch.kernel.name for launch in launches}
            launched |= names
            chosen |= names if (op.name, case.id, target_name) in asked else set()
    assert launched
    assert chosen == launched, "what is missing needs a line in ALSO"
