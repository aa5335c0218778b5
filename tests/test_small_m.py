"""Products of three to 16 activations on tensor cores that are fed from memory."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant import small_m as launching
from ferrum_triton.kernels.quant.activations import (
    arrange,
)
from ferrum_triton.kernels.quant.products import (
    bucket_of,
    fits,
    heuristic,
    product,
    products,
)
from ferrum_triton.kernels.quant.products import small_m as choice
from ferrum_triton.kernels.quant.small_m import small_m_order, small_m_product
from ferrum_triton.kernels.quant.small_m_config import (
    SmallM,
    limits,
    limits_of_sixteen,
    of_gate_and_up,
    of_several,
    of_sixteen,
    small_m_heuristic,
)
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled
from tests.test_gemv_repacked import KINDS, matrix
from tests.test_quant_ops import seeded


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On the CPU kernels are interpreted."""
    return request.param


def assert_near(got, a, weights, added=0.0):
    """Within what weights of 16 bits leave of the sum of magnitudes."""
    rounding = 2**-10 if got.dtype == torch.float16 else 2**-8
    want = a.double() @ weights.T + added
    most = 2**-11 * (a.double().abs() @ weights.abs().T) + rounding * want.abs()
    assert ((got.double() - want).abs() <= most).all()


def activations(num_tokens, k, device, dtype=torch.bfloat16):
    return torch.randn(num_tokens, k, generator=seeded(num_tokens + k)).to(dtype).to(device)


def small_m(a, planes, kind, launch=SmallM(2), **options):
    """The product by this kernel, whatever would be chosen."""
    with products.forced(choice(launch)):
        return product(a, planes, f"{kind}:planes", **options)


@KINDS
@pytest.mark.parametrize(("num_tokens", "warps"), [(8, 4), (13, 2)])
def test_every_row_and_block_is_met_once(kind, num_tokens, warps, device):
    """The last rows are part of two programs, and three blocks of K are for two or four warps."""
    planes, weights = matrix(kind, 37, 768, device)
    a = activations(num_tokens, 768, device)
    out = torch.full((num_tokens, 37), torch.nan, dtype=a.dtype, device=device)
    assert small_m(a, planes, kind, SmallM(warps), out=out) is out
    assert_near(out, a, weights)


def test_scales_are_exact(device):
    """Codes times scales are summed as they are: nothing is lost of activations that are exact."""
    planes, weights = matrix("Q4_K", 16, 512, device)
    a = torch.randint(-8, 9, (4, 512), generator=seeded(3)).half().to(device)
    out = torch.empty(4, 16, dtype=torch.float32, device=device)
    got = small_m(a, planes, "Q4_K", out=out).double()
    magnitude = a.double().abs() @ weights.abs().T
    assert ((got - a.double() @ weights.T).abs() <= 2e-6 * magnitude).all()


def test_bias_and_residual_are_added_before_the_rounding(device):
    planes, weights = matrix("Q6_K", 24, 256, device)
    a = activations(5, 256, device, torch.float16)
    residual, bias = (torch.randn(n, 24, generator=seeded(n)).half().to(device) for n in (5, 1))
    got = small_m(a, planes, "Q6_K", bias=bias[0], residual=residual)
    assert_near(got, a, weights, bias.double() + residual.double())


def test_a_token_that_is_not_finite_stays_alone(device):
    planes, weights = matrix("Q5_0", 16, 256, device)
    a = activations(4, 256, device)
    a[1, 7] = torch.inf
    got = small_m(a, planes, "Q5_0")
    assert not got[1].isfinite().any()
    rest = torch.tensor([0, 2, 3], device=device)
    assert_near(got[rest], a[rest], weights)


def test_nothing_to_do_is_done():
    planes, _ = matrix("Q4_0", 16, 256)
    assert small_m(torch.empty(0, 256).half(), planes, "Q4_0").shape == (0, 16)


def test_what_is_chosen_for_few_tokens():
    hopper, amd = (gpu_of_capability(capability) for capability in ((9, 0), (0, 0)))

    def path(gpu, num_tokens, k, num_rows):
        bucket = bucket_of(num_tokens)
        return heuristic(gpu, "Q4_K", bucket, num_tokens, num_rows, k // 32)["path"]

    assert path(hopper, 8, 768, 16) == "small_m"
    assert path(hopper, 16, 768, 16) == "small_m"
    assert path(hopper, 17, 768, 16) == path(amd, 9, 768, 16) == "mma"
    assert path(hopper, 8, 800, 16) == path(hopper, 8, 768, 15) == path(amd, 8, 768, 16) == "gemv"
    sizes = ((12288, 16), (5120, 100), (4096, 56), (64, 1))
    warps = [heuristic(hopper, "Q4_K", "few", 5, n, 8 * blocks)["warps"] for n, blocks in sizes]
    assert warps == [2, 4, 8, 1]


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_blocks", "launch"),
    [
        # All programs run at once.
        ("Q4_K", 4096, 56, SmallM(8)),
        ("Q4_K", 2048, 8, SmallM(8)),
        ("Q4_K", 4096, 4, SmallM(4)),
        ("Q4_0", 4096, 56, SmallM(8, unrolled=True)),
        ("Q4_1", 4096, 56, SmallM(8)),
        ("Q8_0", 4096, 56, SmallM(8, unrolled=True)),
        ("IQ4_XS", 4096, 56, SmallM(8, unrolled=True)),
        ("Q4_0", 18944, 14, SmallM(2, unrolled=True)),
        ("Q4_K", 16384, 16, SmallM(2)),
        # Few programs of long rows.
        ("Q4_K", 5120, 100, SmallM(4, steps_ahead=2)),
        ("Q6_K", 6144, 64, SmallM(4, steps_ahead=2)),
        ("Q4_K", 7168, 64, SmallM(4)),
        ("Q4_K", 5120, 20, SmallM(4)),
        ("Q3_K", 5120, 100, SmallM(4, late_tokens=True)),
        ("Q2_K", 5120, 100, SmallM(4)),
        ("Q4_1", 5120, 100, SmallM(8, late_tokens=True)),
        # Programs follow each other.
        ("Q4_K", 24576, 32, SmallM(4)),
        ("Q4_K", 28672, 16, SmallM(2, late_tokens=True)),
        ("Q4_K", 24576, 16, SmallM(4)),
        ("Q4_K", 24576, 4, SmallM(2)),
        ("Q5_K", 17408, 20, SmallM(4, late_tokens=True)),
        ("Q5_K", 24576, 32, SmallM(4)),
        ("Q2_K", 24576, 32, SmallM(4, late_tokens=True)),
        ("IQ4_NL", 28672, 16, SmallM(4, unrolled=True)),
        ("Q8_0", 28672, 16, SmallM(1)),
        ("Q8_0", 35840, 16, SmallM(4, unrolled=True)),
        ("Q4_1", 28672, 16, SmallM(2, unrolled=True, late_tokens=True)),
        ("Q4_0", 24576, 32, SmallM(4)),
    ],
)
def test_what_is_launched_on_hopper(kind, num_rows, num_blocks, launch):
    hopper = gpu_of_capability((9, 0))
    assert small_m_heuristic(hopper, kind, num_rows, num_blocks) == launch


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_blocks", "launch"),
    [
        # All programs run at once, on eight warps or four.
        ("Q4_K", 4096, 56, SmallM(8, late_tokens=True)),
        ("Q4_K", 4096, 16, SmallM(8, unrolled=True, late_tokens=True)),
        ("Q5_K", 4096, 56, SmallM(8, unrolled=True, late_tokens=True)),
        ("Q4_0", 4096, 56, SmallM(8, unrolled=True, late_tokens=True)),
        ("Q4_K", 2048, 2, SmallM(2, unrolled=True, late_tokens=True)),
        ("Q4_K", 6144, 16, SmallM(4, late_tokens=True)),
        ("Q5_K", 6144, 16, SmallM(4, late_tokens=True)),
        ("Q5_K", 8192, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q2_K", 8192, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q2_K", 8192, 32, SmallM(4, late_tokens=True)),
        ("Q4_K", 5120, 100, None),
        ("Q3_K", 5120, 100, None),
        # Tiles take less.
        ("Q4_K", 3584, 74, None),
        ("Q4_K", 8192, 112, None),
        ("Q4_0", 8192, 112, SmallM(4, unrolled=True, late_tokens=True)),
        # They fill waves, or do not.
        ("Q4_K", 12288, 16, None),
        ("Q6_K", 12288, 16, SmallM(4, late_tokens=True)),
        ("Q4_K", 16384, 16, SmallM(4, late_tokens=True)),
        ("Q4_K", 18432, 16, None),
        ("Q4_0", 18432, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q5_K", 24576, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q8_0", 24576, 16, None),
        ("Q8_0", 24576, 32, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q3_K", 20480, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("Q3_K", 28672, 16, None),
        ("MXFP4", 32768, 16, SmallM(4, unrolled=True, late_tokens=True)),
        ("MXFP4", 57344, 32, None),
    ],
)
def test_what_takes_two_groups_of_tokens_on_hopper(kind, num_rows, num_blocks, launch):
    hopper, ada = gpu_of_capability((9, 0)), gpu_of_capability((8, 9))
    assert of_sixteen(hopper, kind, num_rows, num_blocks) == launch
    assert of_sixteen(ada, kind, num_rows, num_blocks) is None


def test_kinds_that_have_no_tile_together_take_two_groups_sooner():
    hopper = gpu_of_capability((9, 0))
    assert of_sixteen(hopper, "Q4_K", 24576, 16) is None
    launch = of_sixteen(hopper, "Q4_K", 24576, 16, several=True)
    assert launch == SmallM(4, late_tokens=True)
    unrolled = launch._replace(unrolled=True)
    assert of_several(hopper, launch, ("Q4_K", "Q6_K"), 24576) == unrolled
    assert of_several(hopper, launch, ("Q4_K", "Q4_K"), 24576) == launch
    assert of_several(hopper, launch, ("Q6_K", "Q6_K"), 6144) == launch
    assert of_sixteen(hopper, "Q4_K", 28672, 16, several=True) is None


def test_registers_of_two_groups_are_limited_where_an_sm_is_full():
    hopper, late = gpu_of_capability((9, 0)), SmallM(4, late_tokens=True)
    full, q4, q5 = {"maxnreg": 128}, [FORMATS["Q4_K"]], [FORMATS["Q5_0"]]
    assert limits_of_sixteen(hopper, late._replace(warps=8), 256, q4) == full
    assert limits_of_sixteen(hopper, late._replace(unrolled=True), 256, q4) == full
    assert limits_of_sixteen(hopper, late, 397, q4) == full
    assert limits_of_sixteen(hopper, late, 396, q4) == {}
    assert limits_of_sixteen(hopper, late._replace(warps=2), 512, q4) == {}
    # Two programs that arrange by block have room beside two of 112 registers.
    by_blocks = hopper, late._replace(warps=8), 256
    assert limits_of_sixteen(*by_blocks, q4, by_blocks=True) == {"maxnreg": 112}
    assert limits_of_sixteen(*by_blocks, q4 + q5, by_blocks=True) == full


def test_a_measured_tile_serves_no_shape_that_two_groups_take():
    """16384 rows took 22.1 us by the row of 28672, and take 18.0, as ``_fills_waves`` says."""
    with record_launches((9, 0)):
        picked = [
            products.pick(torch.device("meta"), "Q4_K", "many", 16, rows, 128)["path"]
            for rows in (16384, 28672)
        ]
    assert picked == ["small_m", "packed"]


@pytest.mark.parametrize(
    ("kinds", "launch", "most"),
    [
        # An SM holds two programs of eight warps.
        (["Q4_K"], SmallM(8), 120),
        (["Q4_0"], SmallM(8, unrolled=True), 120),
        (["Q4_K", "Q6_K"], SmallM(8), 128),
        (["IQ4_XS"], SmallM(8, unrolled=True), 128),
        (["Q5_K"], SmallM(8), 128),
        (["Q8_0"], SmallM(8), None),
        # Unrolled loops, and weights of six bits, gain by a limit with fewer warps too.
        (["Q8_0"], SmallM(8, unrolled=True), 128),
        (["Q4_0"], SmallM(4, unrolled=True), 128),
        (["IQ4_NL", "Q4_0"], SmallM(2, unrolled=True), 128),
        (["Q6_K"], SmallM(4), 128),
        (["Q4_K", "Q6_K"], SmallM(4), None),
        (["Q4_K"], SmallM(4), None),
        # Late tokens and weights two steps ahead lose.
        (["Q4_0"], SmallM(8, unrolled=True, late_tokens=True), None),
        (["Q6_K"], SmallM(4, steps_ahead=2), None),
    ],
)
def test_registers_of_one_group_are_limited_where_that_gains(kinds, launch, most):
    hopper, formats = gpu_of_capability((9, 0)), [FORMATS[kind] for kind in kinds]
    limited = limits(hopper, launch, 256, formats)
    assert limited == ({} if most is None else {"maxnreg": most})


def test_a_pair_of_one_kind_has_no_late_activations():
    late = SmallM(2, late_tokens=True)
    assert of_gate_and_up(late, "Q4_K", "Q4_K") == SmallM(2)
    for kinds in (("Q4_K", "Q6_K"), ("Q2_K", "Q2_K"), ("Q4_0", "Q4_0")):
        assert of_gate_and_up(late, *kinds) == late


def test_other_gpus_have_plain_launches():
    ada = gpu_of_capability((8, 9))
    for kind in ("Q4_K", "Q4_0", "IQ4_NL", "Q3_K"):
        sizes = ((4096, 56), (5120, 100), (14336, 16), (28672, 16))
        launches = [small_m_heuristic(ada, kind, *size) for size in sizes]
        assert launches == [SmallM(8), SmallM(4), SmallM(2), SmallM(2)]


def test_a_measured_launch_serves_no_shape_that_it_does_not_fill():
    """14336 rows by eight tokens took 17.5 us by the row of 24576, 13.6 by the heuristic."""
    hopper = gpu_of_capability((9, 0))
    for rows, served in ((14336, False), (16384, False), (16912, True), (24576, True)):
        assert (not fits(hopper, choice(SmallM(1)), "Q4_K", "few", 8, rows, 128)) is served
    # A row of one block is one warp's in any case.
    assert not fits(hopper, choice(SmallM(1)), "Q4_K", "few", 8, 4096, 8)
    with record_launches((9, 0)):
        picked = products.pick(torch.device("meta"), "Q4_K", "few", 8, 14336, 128)
    assert picked["warps"] == 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q4_K"])
@pytest.mark.parametrize(
    "launch",
    [
        SmallM(2, unrolled=True),
        SmallM(1, late_tokens=True),
        SmallM(2, True, True),
        SmallM(2, steps_ahead=2),
    ],
)
def test_every_launch_sums_in_one_order(kind, launch, device):
    """The same bits, of an odd number of steps and an even one."""
    for k in (768, 1024):
        planes, _ = matrix(kind, 40, k, device)
        a = activations(5, k, device, torch.bfloat16)
        want = small_m(a, planes, kind, SmallM(launch.warps))
        assert torch.equal(small_m(a, planes, kind, launch), want)


@pytest.mark.parametrize(
    ("kinds", "num_tokens"), [(("Q4_K", "Q4_K", "Q6_K"), 3), (("Q5_0", "Q4_K", "Q2_K"), 8)]
)
def test_matrices_side_by_side_and_gate_beside_up(kinds, num_tokens, device):
    """Each as the product of its own, of formats whose d waits for the sum and whose does not."""
    parts = [matrix(kind, n, 512, device) for kind, n in zip(kinds, (37, 16, 24), strict=True)]
    a = activations(num_tokens, 512, device, torch.float16)
    backend = get_backend("interpret" if device == "cpu" else device)
    names = [f"{kind}:planes" for kind in kinds]
    got = backend.gemv_quant_qkv(a, *(planes for planes, _ in parts), *names)
    assert_near(got, a, torch.cat([weights for _, weights in parts]))
    for i, j in ((0, 1), (1, 0), (2, 2)):
        (gate, gate_weights), (up, up_weights) = (
            matrix(kinds[i], 19, 512, device),
            matrix(kinds[j], 19, 512, device),
        )
        a_64 = a.double()
        gates, ups = a_64 @ gate_weights.T, a_64 @ up_weights.T
        want = torch.nn.functional.silu(gates) * ups
        got = backend.gemv_quant_gate_up_silu(a, gate, up, names[i], names[j])
        assert ((got.double() - want).norm() / want.norm()).item() < 1e-3


@pytest.mark.parametrize("num_tokens", [7, 9, 16])
def test_one_launch_takes_three_matrices_or_two(num_tokens, device):
    """Of one group of tokens and of two, by this kernel whatever would be chosen."""
    kinds = ("Q4_K", "Q4_0", "Q6_K")
    parts = [matrix(kind, n, 512, device) for kind, n in zip(kinds, (37, 16, 24), strict=True)]
    a = activations(num_tokens, 512, device, torch.float16)
    arranged, launch = arrange(a, small_m_order(num_tokens)), SmallM(2, late_tokens=True)
    named = [(planes, f"{kind}:planes") for (planes, _), kind in zip(parts, kinds, strict=True)]
    out = a.new_full((num_tokens, 77), torch.nan)
    small_m_product(arranged, named, launch, out)
    assert_near(out, a, torch.cat([weights for _, weights in parts]))

    gate, (up, up_weights) = parts[0], matrix("Q6_K", 37, 512, device)
    out = a.new_full((num_tokens, 37), torch.nan)
    pair = [(gate[0], "Q4_K:planes"), (up, "Q6_K:planes")]
    small_m_product(arranged, pair, launch, out, activation="silu")
    want = torch.nn.functional.silu(a.double() @ gate[1].T) * (a.double() @ up_weights.T)
    assert ((out.double() - want).norm() / want.norm()).item() < 1e-3


# Every format for Hopper, and for Ampere one of each shape that codes and scales have.
@pytest.mark.parametrize(
    ("kind", "target", "n", "k"),
    [(form.file.name, "sm_90", 512, 8192) for form in PLANE_FORMATS.values()]
    + [(kind, "sm_80", 4096, 14336) for kind in ("Q4_0", "Q8_0", "Q2_K", "Q5_K", "Q6_K", "MXFP4")],
)
def test_what_is_launched_compiled(kind, target, n, k):
    """Wide loads to registers, from which tensor cores take weights.

    Nothing is converted, and nothing spills in the loops but two words of Q5_K, under a limit by
    which it gains (``limits``).
    """
    planes = torch.empty(n, PLANE_FORMATS[f"{kind}:planes"].row_bytes(k), dtype=torch.uint8)
    a = torch.empty(4, k, dtype=torch.bfloat16, device="meta")
    with record_launches(TARGETS[target].capability) as launches:
        product(a, planes.to("meta"), f"{kind}:planes")
    assert launches[-1].kernel.name == "_small_m_kernel"
    cubin = compiled(launches[-1], target).asm["cubin"]
    code = [instruction.name for instruction in instructions(cubin)]
    loads = {"Q2_K": 1, "Q3_K": 1, "Q8_0": 4}.get(kind, 2) + (kind == "Q6_K")
    wide = [name for name in code if name.startswith("LDG") and ".EF" in name and ".128" in name]
    # Of two rows, before the loop and in each of its steps, and in the one that takes factors.
    steps = 2 if launches[-1].meta["LAUNCH"].unrolled else 1
    steps += launches[-1].meta["PARTS"] > 0
    assert len(wide) == (1 + steps) * 2 * loads
    products = sum(name.startswith("HMMA.16816") for name in code)
    assert products == steps * (16 + 2 * (kind in ("Q2_K", "Q4_K", "Q5_K")))
    assert not [name for name in code if name.startswith("I2F")]
    multiplies = [i for i, name in enumerate(code) if name.startswith("HMMA")]
    loops = code[multiplies[0] : multiplies[-1]]
    spilled = sum(name.startswith(("LDL", "STL")) for name in loops)
    assert spilled <= (2 if kind == "Q5_K" and launches[-1].meta["PARTS"] else 0)


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "IQ4_XS"])
def test_two_groups_take_weights_that_are_loaded_once(kind, by_blocks, monkeypatch):
    """Twice as many products as of one group, by as many loads of weights."""
    monkeypatch.setattr(launching, "takes_blocks", lambda *shape: by_blocks)
    planes = torch.empty(512, PLANE_FORMATS[f"{kind}:planes"].row_bytes(14336), dtype=torch.uint8)
    counts = []
    for num_tokens in (8, 16):
        a = torch.empty(num_tokens, 14336, dtype=torch.bfloat16, device="meta")
        launch = SmallM(8, late_tokens=True)
        with record_launches((9, 0)) as launches, products.forced(choice(launch)):
            product(a, planes.to("meta"), f"{kind}:planes")
        code = [i.name for i in instructions(compiled(launches[-1]).asm["cubin"])]
        wide = sum(name.startswith("LDG") and ".EF" in name and ".128" in name for name in code)
        counts.append((wide, sum(name.startswith("HMMA") for name in code)))
    (loads, multiplies), of_two = counts
    assert of_two == (loads, 2 * multiplies)
