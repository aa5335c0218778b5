"""Products in Gluon for Hopper: executed by the emulator, compiled for sm_90, chosen by tables."""

import re
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import triton

from ferrum_triton import get_backend
from ferrum_triton.gluon_emulator import EmulationError, run
from ferrum_triton.gluon_emulator.mutants import mutants
from ferrum_triton.kernels.fp8 import config as fp8_config
from ferrum_triton.kernels.fp8 import experts_config as fp8_experts_config
from ferrum_triton.kernels.fp8 import product
from ferrum_triton.kernels.gpu import gpu_of, gpu_of_arch
from ferrum_triton.kernels.hopper_config import dense, experts, serves
from ferrum_triton.kernels.jit import OPTIONS, note_launches, record_launches
from ferrum_triton.kernels.moe import dense_config
from ferrum_triton.kernels.sass import cuobjdump, parse
from ferrum_triton.ops.moe import dense as definitions
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests import test_fp8, test_fp8_experts
from tests.compiling import compiled
from tests.test_pdl import find_fault
from tests.test_quant_formats import assert_same_bits

INTERPRET = get_backend("interpret")
CHOICES = {
    "gemm_fp8_128x128": fp8_config.TILES,
    "gemm_moe_id": dense_config.TILES,
    "gemm_moe_id_gate_up": dense_config.GATE_UP_TILES,
    "gemm_moe_id_fp8_128x128": fp8_experts_config.TILES,
    "gemm_moe_id_gate_up_fp8_128x128": fp8_experts_config.GATE_UP_TILES,
}
CONFIGS = {
    name: dense(16, 3, 2) if name == "gemm_fp8_128x128" else experts(3, True) for name in CHOICES
}


def by_hopper(op, arguments, config=None, kernel="_experts_kernel"):
    """What an op gives by its path for Hopper, and the launch of the product."""
    y, (launch,) = launches_by_hopper(op, arguments, config, kernel)
    return y, launch


def launches_by_hopper(op, arguments, config, kernel):
    """What an op gives by its path for Hopper, and the launches of products."""
    with (
        CHOICES[op].forced(config or CONFIGS[op]),
        note_launches(runs=True) as launches,
    ):
        y = getattr(INTERPRET, op)(**arguments)
    return y, [launch for launch in launches if launch.kernel.name == kernel]


def sixteen_bits(dtype, num_tokens=90, num_experts=3, top_k=3, n=208, k=144, **more):
    """A call of experts in 16 bits, and what it should give."""
    activation, make = more.get("activation", ""), torch.Generator().manual_seed(num_tokens)
    rows, leading = n * (2 if activation else 1), (num_tokens, top_k)[: 1 + more["per_slot"]]
    arguments = {
        "a": torch.randn(*leading, k, generator=make).to(dtype),
        "weights": (torch.randn(num_experts, rows, k, generator=make) * k**-0.5).to(dtype),
        "ids": torch.randint(-1, num_experts + 1, (num_tokens, top_k), generator=make),
        "bias": torch.randn(num_experts, rows, generator=make) if more.get("bias") else None,
    }
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    if not activation:
        return arguments, definitions.gemm_moe_id.reference(**wide)
    gate = {"activation": activation, "alpha": 1.5, "limit": 1.0}
    return arguments | gate, definitions.gemm_moe_id_gate_up.reference(**wide, **gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (5, 200, 304, dense(16, 3, 2)),
        (130, 264, 128, dense(1, 2, 1)),
        (300, 776, 400, dense(2, 3, 2)),
    ],
)
def test_dense_products_in_fp8(dtype, m, n, k, config):
    arguments = test_fp8.call(m=m, n=n, k=k, dtype=dtype)
    y, _ = by_hopper("gemm_fp8_128x128", arguments, config, "_fp8_gemm_kernel")
    assert_close(y, test_fp8.exact_product(**arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh", "clamped_swiglu"])
def test_experts_in_16_bits(dtype, per_slot, activation):
    op = "gemm_moe_id_gate_up" if activation else "gemm_moe_id"
    gate = {"activation": activation} if activation else {}
    arguments, want = sixteen_bits(dtype, per_slot=per_slot, bias=not per_slot, **gate)
    assert_close(by_hopper(op, arguments, experts(3, per_slot))[0], want)


@pytest.mark.parametrize("per_slot", [False, True])
def test_experts_in_fp8(per_slot):
    axes = {"num_tokens": 90, "num_experts": 3, "n": 336, "k": 272, "dtype": torch.bfloat16}
    arguments = test_fp8_experts.call(**axes, per_slot=per_slot)
    y, _ = by_hopper("gemm_moe_id_fp8_128x128", arguments)
    assert_close(y, test_fp8_experts.exact(**arguments))
    arguments, want = test_fp8_experts.gate_up(**axes, per_slot=per_slot)
    assert_close(by_hopper("gemm_moe_id_gate_up_fp8_128x128", arguments)[0], want)


@pytest.mark.gpu
@pytest.mark.parametrize("op", CHOICES)
@pytest.mark.parametrize("num_tokens", [1, 65, 1000])
def test_products_of_a_gpu(op, num_tokens):
    """Right, and the same to the last bit every time."""
    if not serves(gpu_of(torch.device("cuda", torch.cuda.current_device()))):
        pytest.skip("needs a GPU and a Triton that kernels in Gluon are for")
    axes = {"num_tokens": num_tokens, "num_experts": 8, "n": 336, "k": 528}
    if op == "gemm_fp8_128x128":
        arguments = test_fp8.call(m=num_tokens, n=1000, k=528)
        want, config = test_fp8.exact_product(**arguments), dense(16, 4, 1)
    elif op == "gemm_moe_id_fp8_128x128":
        arguments = test_fp8_experts.call(**axes, dtype=torch.bfloat16, per_slot=True)
        want, config = test_fp8_experts.exact(**arguments), experts(4, num_tokens > 65)
    elif op == "gemm_moe_id_gate_up_fp8_128x128":
        arguments, want = test_fp8_experts.gate_up(**axes, dtype=torch.half)
        config = experts(4, num_tokens > 65)
    else:
        gate = {"activation": "silu"} if op == "gemm_moe_id_gate_up" else {}
        per_slot = op == "gemm_moe_id"
        arguments, want = sixteen_bits(torch.bfloat16, per_slot=per_slot, **axes, **gate)
        config = experts(4, num_tokens > 65)
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    call = getattr(get_backend("cuda"), op)
    with CHOICES[op].forced(config):
        found = [call(**moved) for _ in range(5)]
    assert_close(found[0], want)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("op", ["gemm_moe_id", "gemm_moe_id_fp8_128x128"])
@pytest.mark.parametrize("chosen", [-1, 0, 2])
def test_one_expert_or_none_takes_all_pairs(op, chosen):
    """And experts that nobody chose may be anything."""
    if op == "gemm_moe_id":
        arguments, _ = sixteen_bits(torch.float16, num_tokens=50, per_slot=True)
        arguments["weights"][1] = float("nan")
    else:
        axes = {"num_tokens": 50, "num_experts": 3, "n": 256, "k": 272, "dtype": torch.float16}
        arguments = test_fp8_experts.call(**axes, per_slot=True)
        arguments["scales"][1] = float("nan")
    arguments["ids"][:] = chosen
    arguments["out"] = torch.full((50, 3, arguments["weights"].shape[1]), float("nan")).half()
    got = by_hopper(op, arguments)[0]
    arguments.pop("out")
    assert_close(got, OPS[op].reference(**arguments))
    assert chosen >= 0 or not got.any()


def test_strides_are_honoured():
    """Of rows, of experts apart by more than a matrix, and of results."""
    arguments, want = sixteen_bits(torch.bfloat16, per_slot=True)
    for name, rows in (("a", 32), ("weights", 16)):
        wide = torch.full((*arguments[name].shape[:2], 144 + rows), float("nan")).bfloat16()
        wide[..., :144] = arguments[name]
        arguments[name] = wide[..., :144]
    arguments["weights"] = torch.cat([arguments["weights"]] * 2, 1)[:, :208]
    arguments["out"] = torch.zeros(90, 3, 300).bfloat16()[..., :208]
    assert_close(by_hopper("gemm_moe_id", arguments)[0], want)


@pytest.mark.parametrize("op", ["gemm_moe_id", "gemm_moe_id_fp8_128x128", "gemm_fp8_128x128"])
def test_the_plain_kernel_serves_what_tma_cannot_take(op):
    """Rows of weights that do not begin at multiples of 16 bytes."""
    if op == "gemm_fp8_128x128":
        arguments = test_fp8.call(m=20, n=40, k=144, dtype=torch.float32)
        want, name = test_fp8.exact_product(**arguments), "weight"
    elif op == "gemm_moe_id":
        arguments, want = sixteen_bits(torch.float16, n=40, per_slot=False)
        name = "weights"
    else:
        arguments = test_fp8_experts.call(n=40, k=144)
        want, name = test_fp8_experts.exact(**arguments), "weights"
    weights = arguments[name]
    raw = weights if op == "gemm_moe_id" else weights.view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, 1))[..., :-1]
    arguments[name] = padded.view(weights.dtype)
    with CHOICES[op].forced(CONFIGS[op]), note_launches(runs=True) as launches:
        y = getattr(INTERPRET, op)(**arguments)
    assert_close(y, want)
    assert not any(launch.kernel.name in KERNELS for launch in launches)


KERNELS = {"_experts_kernel", "_fp8_gemm_kernel"}


def failure(launch, y, want, seed, mutant=None):
    """What goes wrong when a launch, by one program and changed, is executed."""
    constexprs = {name: value for name, value in launch.meta.items() if name not in OPTIONS}
    y.fill_(float("nan"))
    try:
        run(launch.kernel.jit, (1,), launch.args, constexprs, seed=seed, mutant=mutant)
        assert_close(y, want)
    except (EmulationError, AssertionError) as error:
        return str(error)
    return ""


def test_each_synchronisation_is_needed():
    """Without any one of them some launch fails: in 16 bits, in FP8 and dense."""
    axes = {"num_tokens": 50, "num_experts": 3, "n": 256, "k": 528, "dtype": torch.bfloat16}
    in_fp8 = test_fp8_experts.call(**axes, per_slot=True)
    of_dense = test_fp8.call(m=130, n=520, k=272)
    in_16_bits, want = sixteen_bits(torch.bfloat16, num_tokens=50, n=136, k=272, per_slot=False)
    runs = [
        (*by_hopper("gemm_moe_id", in_16_bits), want),
        (*by_hopper("gemm_moe_id_fp8_128x128", in_fp8), test_fp8_experts.exact(**in_fp8)),
        *(
            (
                *by_hopper("gemm_fp8_128x128", of_dense, config, "_fp8_gemm_kernel"),
                test_fp8.exact_product(**of_dense),
            )
            for config in (dense(1, 3, 2), dense(2, 2, 1))
        ),
    ]
    for y, launch, want in runs:
        assert not failure(launch, y, want, 0)
    left = {str(m): m for _, launch, _ in runs for m in mutants(launch.kernel.jit)}
    for seed in range(3):
        for y, launch, want in runs:
            mine = {str(mutant): mutant for mutant in mutants(launch.kernel.jit)}
            for name in left.keys() & mine.keys():
                if failure(launch, y, want, seed, mine[name]):
                    left.pop(name)
    assert not left


def assembler_warnings(ptx, folder):
    """What the assembler says of products that it makes wait for one another."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [tool, "-v", "--gpu-name=sm_90a", file, "-o", folder / "kernel.o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in said.splitlines() if re.search(r"C75\d\d|serializ", line)]


# Products of 64 x 128 by 32 bytes that the machine code has: four a step, of consumers alike; in
# FP8 a step is a turn of one half, in 16 bits two halves.
PRODUCTS = {
    "gemm_fp8_128x128": ("QGMMA", 8),
    "gemm_moe_id": ("HGMMA", 8),
    "gemm_moe_id_gate_up": ("HGMMA", 8),
    "gemm_moe_id_fp8_128x128": ("QGMMA", 8),
    "gemm_moe_id_gate_up_fp8_128x128": ("QGMMA", 8),
}


@pytest.mark.parametrize("op", CHOICES)
def test_machine_code(op, tmp_path):
    """Nothing is spilled, products overlap, and registers go from the producer to consumers."""
    case = next(case for case in OPS[op].bench if case.id.endswith("m4096"))
    sample = OPS[op].make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    config = dense(16, 4, 1) if op == "gemm_fp8_128x128" else experts(4, True)
    with CHOICES[op].forced(config), record_launches((9, 0)) as launches:
        OPS[op].impls["triton"](**sample)
    (launch,) = [launch for launch in launches if launch.kernel.name in KERNELS]
    resources = compiled(launch)
    assert resources.spilled == 0
    assert not find_fault(launch)
    assert not assembler_warnings(resources.asm["ptx"], tmp_path)
    code = parse(cuobjdump(resources.asm["cubin"], "-sass"))
    names = Counter(instruction.name.split(".")[0] for instruction in code)
    name, count = PRODUCTS[op]
    assert names[name] == count
    given = {i.operands[-1] for i in code if i.name.startswith("USETMAXREG.TRY_ALLOC")}
    expected = 240 if op == "gemm_fp8_128x128" else 224 if "fp8" in op else 216
    assert hex(expected) in given
    if op != "gemm_fp8_128x128":  # rows are gathered 16 bytes a thread
        gathered = [i for i in code if i.name == "LDGSTS.E.BYPASS.128"]
        assert len(gathered) == 8


@pytest.mark.parametrize("op", CHOICES)
def test_hopper_is_asked_for_on_its_gpu_alone(op):
    """Of experts by a row of a table alone."""
    tunable, config = CHOICES[op], CONFIGS[op]
    sizes = {"native": True, "num_tokens": 4096, "num_pairs": 32768, "num_experts": 128}
    sizes |= {"num_rows": 2048, "num_cols": 768, "element_size": 2}
    shape = [sizes[name] for name in tunable.dims]
    hopper, other = gpu_of_arch("sm_90"), gpu_of_arch("sm_100")
    config = config | {"STAGES": 4, "OUTPUTS": 1} if "OUTPUTS" in config else experts(4, False)
    assert config in tunable.candidates(hopper, *shape)
    assert not tunable.refusal(hopper, config, *shape)
    by_heuristic = tunable.heuristic(hopper, *shape)["path"] == "hopper"
    assert by_heuristic == (op == "gemm_fp8_128x128")
    assert tunable.heuristic(other, *shape)["path"] != "hopper"
    assert not any(c["path"] == "hopper" for c in tunable.candidates(other, *shape))
    assert "not for sm_100" in tunable.refusal(other, config, *shape)
    odd = [sizes[name] + (name == "num_cols") for name in tunable.dims]
    assert "multiples of 16" in tunable.refusal(hopper, config, *odd)


@pytest.mark.parametrize(
    ("m", "n", "k", "path", "splits"),
    [
        (1, 28672, 4096, "gemv", None),
        (2, 28672, 4096, "tiles", 1),
        (24, 4096, 14336, "tiles", 8),
        (64, 28672, 4096, "tiles", 1),
        (65, 28672, 4096, "hopper", None),
        (128, 4096, 4096, "tiles", 4),
        (192, 4096, 14336, "tiles", 2),
        (384, 4096, 14336, "tiles", 1),
        (384, 6144, 4096, "hopper", None),
    ],
)
def test_dense_choices_are_those_that_a_map_of_sizes_gave(m, n, k, path, splits):
    """Without a row of a table: ``TILES.forced`` of each on an H200, see the heuristic."""
    tunable = CHOICES["gemm_fp8_128x128"]
    config = tunable.heuristic(gpu_of_arch("sm_90"), True, m, n, k)
    assert (config["path"], config.get("SPLITS")) == (path, splits)
    assert not tunable.refusal(gpu_of_arch("sm_90"), config, True, m, n, k)


@pytest.mark.parametrize(
    ("m", "n", "k", "first"),
    [
        (1024, 4096, 14336, 0),
        (1025, 4096, 14336, 1024),
        (1536, 4096, 14336, 1024),
        (2049, 4096, 14336, 2048),
        (3000, 4096, 14336, 0),
        (4097, 4096, 14336, 0),
        (513, 7168, 2048, 512),
        (1537, 7168, 2048, 0),
        (1025, 28672, 4096, 0),
    ],
)
def test_few_tokens_beyond_whole_waves_are_a_product_of_their_own(m, n, k, first):
    """Where both together were seen to take less on an H200, see the function."""
    assert fp8_config.whole_waves(gpu_of_arch("sm_90"), m, n, k) == first
    op = OPS["gemm_fp8_128x128"]
    arguments = op.make_sample(TensorFactory(torch.bfloat16, "meta"), m=m, n=n, k=k)
    with record_launches((9, 0)) as launches:
        op.impls["triton"](**arguments)
    names = [launch.kernel.name for launch in launches]
    assert names[:2] == ["_quantise_kernel", "_fp8_gemm_kernel"]
    assert (len(names) > 2) == bool(first), names


def test_tokens_of_both_products_are_in_the_result(monkeypatch):
    monkeypatch.setattr(product, "whole_waves", lambda gpu, m, n, k: 128 if m > 128 else 0)
    arguments = test_fp8.call(m=130, n=264, k=128)
    y, launches = launches_by_hopper("gemm_fp8_128x128", arguments, None, "_fp8_gemm_kernel")
    assert len(launches) == 2
    assert_close(y, test_fp8.exact_product(**arguments))


def test_codes_of_no_token_are_not_in_a_result(monkeypatch):
    """Tiles are read whole: codes behind the last token are in memory, and any."""
    arguments, results, quantised = test_fp8.call(m=5, n=200, k=304), [], product.quantised

    def filled(fill, *given):
        codes, steps = quantised(*given)
        assert len(codes) == 128
        codes[5:] = fill
        return codes, steps

    for fill in (0, 0x7F):  # and no number
        monkeypatch.setattr(product, "quantised", partial(filled, fill))
        results.append(by_hopper("gemm_fp8_128x128", arguments, kernel="_fp8_gemm_kernel")[0])
    assert_same_bits(*results)
    assert results[0].isfinite().all()
