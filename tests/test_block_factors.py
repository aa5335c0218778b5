"""Activations with a factor for each block, and the products that ask for it at their end.

Tests whose device may be given run on a CPU, interpreted, and all together on a GPU.
"""

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant import small_m as launching
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.products import product
from ferrum_triton.kernels.quant.small_m import order_for, small_m_order, small_m_product
from ferrum_triton.kernels.quant.small_m_config import SmallM, limits, takes_blocks
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled
from tests.test_gemv_repacked import KINDS, matrix
from tests.test_small_m import activations, assert_near, small_m

HOPPER = gpu_of_capability((9, 0))
# Magnitudes of a block: nothing, the least and the most that bfloat16 has, and the bounds within
# which a factor is the usual one, of exponent bits 130.
MAGNITUDES = (0.0, 1e-38, 2**-9.5, 2**-9, 1.0, 32640.0, 32768.0, 3e38)
USUAL = 130


@pytest.fixture
def by_blocks(monkeypatch):
    """Whatever would be chosen."""
    monkeypatch.setattr(launching, "takes_blocks", lambda *shape: True)


def magnified(a, num_blocks):
    """Activations whose blocks reach each of MAGNITUDES, tokens in turn."""
    blocks = a.float().unflatten(1, (num_blocks, 256))
    blocks /= blocks.abs().amax(-1, keepdim=True)
    largest = torch.tensor(MAGNITUDES, device=a.device)
    i = torch.arange(a.shape[0])[:, None] + torch.arange(num_blocks)
    return (blocks * largest[i % len(MAGNITUDES)][..., None]).flatten(1).bfloat16()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(3, 5), (8, 8), (13, 3)])
def test_blocks_are_arranged_as_rows_of_their_own(num_tokens, num_blocks, device="cpu"):
    """Each as a row of 256 would be; those past the end have the usual factor."""
    a = magnified(activations(num_tokens, 256 * num_blocks, device), num_blocks)
    x, sums, factor, tickets = arrange(a, small_m_order(num_tokens, by_blocks=True))
    assert tickets is None and factor.dtype == torch.uint8
    assert factor.shape[1] % 4 == 0 and (factor[:num_tokens, num_blocks:] == USUAL).all()
    interleave = x.shape[0]
    x, sums = x.view(num_blocks, 8, interleave, 32), sums.view(num_blocks, interleave, 32)
    for b in range(num_blocks):
        row = arrange(a[:, 256 * b : 256 * b + 256], small_m_order(num_tokens))
        powers = 2.0 ** (factor[:num_tokens, b].double() - 127)
        of_row = row.factor[:num_tokens, None].double()
        here = x[b].transpose(0, 1)[:num_tokens].double()
        there = row.x.view(8, interleave, 32).transpose(0, 1)[:num_tokens].double()
        largest = here.abs().amax((1, 2))
        # The least factor is 2^-123, or else as a row's.
        as_row = (powers == of_row[:, 0]) & (largest >= 2**11) | (powers == 2**-123)
        assert (((largest == 0) | (largest >= 2**-12)) & (powers == 8) | as_row).all()
        assert (largest < 2**12).all()
        # A float16 is off by 2^-25 at most below its least exponent.
        off = (here - there * (of_row / powers[:, None])[..., None]).abs()
        assert (off <= 2**-25).all()
        of_words = sums[b, :num_tokens].double()
        wanted = row.sums.view(interleave, 32)[:num_tokens].double() * of_row / powers[:, None]
        assert ((of_words - wanted).abs() <= 2**-10 * wanted.abs() + 2**-22).all()
    magnitudes = torch.tensor(MAGNITUDES)
    i = torch.arange(num_tokens)[:, None] + torch.arange(num_blocks)
    inside = (magnitudes == 0) | (magnitudes >= 2**-9) & (magnitudes < 32768)
    is_usual = factor[:num_tokens, :num_blocks].cpu() == USUAL
    assert torch.equal(is_usual, inside[i % len(MAGNITUDES)])


@KINDS
def test_sums_by_usual_factors_are_those_by_rows(kind, by_blocks, device="cpu"):
    planes, weights = matrix(kind, 37, 1280, device)
    a = activations(8, 1280, device)
    assert_near(small_m(a, planes, kind, SmallM(4)), a, weights)


@KINDS
def test_one_unusual_factor_is_met(kind, by_blocks, device="cpu"):
    """Of the last token and block, so that all words of factors are asked."""
    planes, weights = matrix(kind, 37, 1280, device)
    a = activations(12, 1280, device)
    out = torch.empty(12, 37, device=device)
    a[-1, 1024:] = 1e6 * torch.randn(256, device=device)
    assert_near(small_m(a, planes, kind, SmallM(2), out=out), a, weights)
    # What is small is seen where the token's other blocks give nothing.
    a[-1, :1024] = 0
    a[-1, 1024:] = 1e-6 * torch.randn(256, device=device)
    assert_near(small_m(a, planes, kind, SmallM(2), out=out), a, weights)


@pytest.mark.parametrize("num_tokens", [5, 16])
def test_each_block_has_its_factor(num_tokens, by_blocks, device="cpu"):
    """Where a token has one block that is other than 0. Factors are of up to 24 decades."""
    num_blocks = 9  # three words of factors for each token: more than a warp has threads
    planes, weights = matrix("Q4_K", 16, 256 * num_blocks, device)
    full = activations(num_tokens, 256 * num_blocks, device).unflatten(1, (num_blocks, 256))
    token = torch.arange(num_tokens, device=device)
    for shift in (0, 4, 8):
        a, block = torch.zeros_like(full), (token + shift) % num_blocks
        scale = 10.0 ** ((token * 7 + shift * 3) % 24 - 12)
        a[token, block] = (full[token, block].float() * scale[:, None]).bfloat16()
        a = a.flatten(1)
        out = torch.empty(num_tokens, 16, device=device)
        assert_near(small_m(a, planes, "Q4_K", SmallM(1), out=out), a, weights)


@pytest.mark.parametrize("spoiled", [torch.inf, torch.nan])
def test_a_token_that_is_not_finite_stays_alone(spoiled, by_blocks, device="cpu"):
    planes, weights = matrix("Q5_0", 16, 512, device)
    a = activations(4, 512, device)
    a[1, 300] = spoiled
    got = small_m(a, planes, "Q5_0")
    assert not got[1].isfinite().any()
    rest = torch.tensor([0, 2, 3], device=device)
    assert_near(got[rest], a[rest], weights)


@pytest.mark.parametrize("num_tokens", [7, 16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-4])
def test_one_launch_takes_three_matrices_or_two(num_tokens, magnitude, device="cpu"):
    kinds = ("Q4_K", "Q4_0", "Q6_K")
    parts = [matrix(kind, n, 512, device) for kind, n in zip(kinds, (37, 16, 24), strict=True)]
    a = activations(num_tokens, 512, device, torch.float16)
    a[2, :256] *= magnitude
    arranged = arrange(a, small_m_order(num_tokens, by_blocks=True))
    assert (arranged.factor[:num_tokens] == USUAL).all() == (magnitude == 1.0)
    named = [(planes, f"{kind}:planes") for (planes, _), kind in zip(parts, kinds, strict=True)]
    out = torch.full((num_tokens, 77), torch.nan, device=device)
    small_m_product(arranged, named, SmallM(2, late_tokens=True), out)
    assert_near(out, a, torch.cat([weights for _, weights in parts]))

    gate, (up, up_weights) = parts[0], matrix("Q6_K", 37, 512, device)
    out = torch.full((num_tokens, 37), torch.nan, device=device)
    pair = [(gate[0], "Q4_K:planes"), (up, "Q6_K:planes")]
    small_m_product(arranged, pair, SmallM(2, late_tokens=True), out, activation="silu")
    want = torch.nn.functional.silu(a.double() @ gate[1].T) * (a.double() @ up_weights.T)
    assert ((out.double() - want).norm() / want.norm()).item() < 1e-3


@pytest.mark.gpu
def test_all_of_it_on_a_gpu(by_blocks):
    """What is above, by the PTX that no interpreter runs."""
    for sizes in ((3, 5), (8, 8), (13, 3)):
        test_blocks_are_arranged_as_rows_of_their_own(*sizes, device="cuda")
    for form in PLANE_FORMATS.values():
        test_sums_by_usual_factors_are_those_by_rows(form.file.name, by_blocks, device="cuda")
        test_one_unusual_factor_is_met(form.file.name, by_blocks, device="cuda")
    for spoiled in (torch.inf, torch.nan):
        test_a_token_that_is_not_finite_stays_alone(spoiled, by_blocks, device="cuda")
    for num_tokens in (5, 16):
        test_each_block_has_its_factor(num_tokens, by_blocks, device="cuda")
        for magnitude in (1.0, 1e-4):
            test_one_launch_takes_three_matrices_or_two(num_tokens, magnitude, device="cuda")


@pytest.mark.parametrize("num_tokens", [8, 16])
def test_a_program_asks_for_factors_by_one_barrier(num_tokens):
    """Each thread loads its word before the loop, and nothing goes through shared memory."""
    planes = torch.empty(4096, PLANE_FORMATS["Q4_K:planes"].row_bytes(14336), dtype=torch.uint8)
    a = torch.empty(num_tokens, 14336, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        product(a, planes.to("meta"), "Q4_K:planes")
    assert [launch.kernel.name for launch in launches] == [
        "_arrange_blocks_kernel",
        "_small_m_kernel",
    ]
    code = [i.name for i in instructions(compiled(launches[-1]).asm["cubin"])]
    assert sum(name.startswith("BAR.RED.OR") for name in code) == 1
    products = [i for i, name in enumerate(code) if name.startswith("HMMA")]
    ask = next(i for i, name in enumerate(code) if name.startswith("BAR.RED.OR"))
    before, behind = (sum(i < ask for i in products), sum(i > ask for i in products))
    assert before == behind > 0 or before == 2 * behind > 0


def test_programs_that_arrange_have_room_beside_those_of_16_tokens():
    planes = torch.empty(4096, PLANE_FORMATS["Q4_0:planes"].row_bytes(14336), dtype=torch.uint8)
    a = torch.empty(16, 14336, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        product(a, planes.to("meta"), "Q4_0:planes")
    arranging, multiplying = (8 * -(-compiled(launch).registers // 8) for launch in launches)
    assert [launch.meta["num_warps"] for launch in launches] == [4, 8]
    assert 2 * (128 * arranging + 256 * multiplying) <= 65536


@pytest.mark.parametrize(
    ("kinds", "launch", "programs", "most"),
    [
        (["Q5_K", "Q4_K"], SmallM(8), 256, 120),
        (["IQ4_NL"], SmallM(8, unrolled=True), 256, 120),
        (["Q5_K", "Q6_K"], SmallM(8), 256, 128),
        (["Q4_0"], SmallM(2, unrolled=True, late_tokens=True), 1792, 72),
        (["Q2_K"], SmallM(4, late_tokens=True), 529, 96),
        (["Q3_K"], SmallM(4, late_tokens=True), 528, 128),
        (["Q4_0"], SmallM(8, unrolled=True, late_tokens=True), 320, None),
        (["Q4_K"], SmallM(4, steps_ahead=2), 320, None),
    ],
)
def test_registers_are_limited_where_that_gains(kinds, launch, programs, most):
    formats = [FORMATS[kind] for kind in kinds]
    limited = limits(HOPPER, launch, programs, formats, by_blocks=True)
    assert limited == ({} if most is None else {"maxnreg": most})


@pytest.mark.parametrize(
    ("kinds", "launch", "num_tokens", "num_blocks", "programs", "gains"),
    [
        (["Q4_K"], SmallM(8), 8, 56, 256, True),
        (["Q6_K"], SmallM(8), 3, 16, 256, True),
        # Programs of one or two warps, but where they fill all SMs.
        (["Q4_K"], SmallM(2), 8, 16, 768, False),
        (["Q4_K"], SmallM(2, late_tokens=True), 8, 16, 1716, False),
        (["Q4_K"], SmallM(2, late_tokens=True), 8, 16, 1717, True),
        (["Q8_0"], SmallM(1, late_tokens=True), 8, 16, 1792, False),
        (["Q3_K"], SmallM(4, late_tokens=True), 8, 64, 384, True),
        # Long rows of eight bits.
        (["Q8_0"], SmallM(8, unrolled=True), 8, 31, 256, True),
        (["Q4_0", "Q8_0"], SmallM(8, unrolled=True), 8, 32, 256, False),
        # Two groups of tokens: long rows of eight warps.
        (["Q4_0"], SmallM(8, unrolled=True, late_tokens=True), 9, 33, 256, True),
        (["Q4_0"], SmallM(8, unrolled=True, late_tokens=True), 9, 32, 256, False),
        (["Q4_0"], SmallM(4, unrolled=True, late_tokens=True), 9, 56, 512, False),
        (["Q4_0", "Q6_K"], SmallM(8, late_tokens=True), 16, 56, 256, False),
        (["MXFP4"], SmallM(8, late_tokens=True), 16, 56, 256, False),
    ],
)
def test_which_launches_take_factors_of_blocks(
    kinds, launch, num_tokens, num_blocks, programs, gains
):
    shape = launch, kinds, num_tokens, num_blocks, programs
    assert takes_blocks(HOPPER, *shape) == gains
    assert not takes_blocks(gpu_of_capability((8, 9)), *shape)


def test_gate_and_up_have_programs_of_eight_rows():
    """28672 rows of late tokens are 1792 programs, and 14336 of gate and of up are too."""
    a, launch = torch.empty(8, 4096, device="meta"), SmallM(2, late_tokens=True)
    planes = torch.empty(14336, 1, dtype=torch.uint8, device="meta")
    pair = [(planes, "Q4_K:planes"), (planes, "Q6_K:planes")]
    with record_launches((9, 0)):
        assert order_for(a, pair, launch, gated=True).by_blocks
        assert order_for(a, pair, launch).by_blocks
        assert not order_for(a, pair[:1], launch).by_blocks
