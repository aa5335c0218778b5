"""Products of one or two tokens by persistent programs, and what is chosen for them."""

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.gemv_config import gemv, persistent
from ferrum_triton.kernels.quant.products import product, products
from ferrum_triton.quant import FORMATS, dequantize_blocks, to_planes
from ferrum_triton.quant.planes import PLANE_FORMATS, views
from tests.compiling import compiled, in_turns
from tests.test_quant_ops import packed, seeded

NAMES = [fmt.file.name for fmt in PLANE_FORMATS.values()]
KINDS = pytest.mark.parametrize("kind", NAMES)
# Blocks of four rows; on the CPU, whose processors are four, programs have up to three of them.
EACH = persistent(4, 1)
DEFERRED = persistent(4, 1, deferred=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On the CPU kernels are interpreted."""
    return request.param


def matrix(kind, num_rows, k, device="cpu"):
    """Planes, and the weights in float64."""
    blocks = packed(kind, num_rows, k // FORMATS[kind].block_size)
    weights = dequantize_blocks(blocks, FORMATS[kind]).double()
    return to_planes(blocks, kind).to(device), weights.to(device)


def assert_near(got, a, weights, added=0.0):
    """Within what activations of 16 bits leave of the sum of magnitudes."""
    magnitude = a.double().abs() @ weights.abs().T
    rounding = 2**-10 if got.dtype == torch.float16 else 2**-8
    want = a.double() @ weights.T + added
    assert ((got.double() - want).abs() <= 2e-5 * magnitude + rounding * want.abs()).all()


def launched(config, a, planes, kind, **options):
    """The product by one launch choice."""
    with products.forced(config):
        return product(a, planes, f"{kind}:planes", **options)


@KINDS
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_every_row_is_met_once(kind, num_tokens, device):
    """The last block is part of the one before it, and threads are more than groups."""
    planes, weights = matrix(kind, 37, 768, device)
    a = torch.randn(num_tokens, 768, generator=seeded(1)).half().to(device)
    out = torch.full((num_tokens, 37), torch.nan, dtype=a.dtype, device=device)
    assert launched(EACH, a, planes, kind, out=out) is out
    assert_near(out, a, weights)


@KINDS
@pytest.mark.parametrize(("k", "tied"), [(768, False), (8448, True)], ids=["free", "tied"])
def test_sums_that_wait_for_the_last_block(kind, k, tied, device):
    """A part of a warp has no group, or a warp has none; and one program has a block less."""
    planes, weights = matrix(kind, 37, k, device)
    a = torch.randn(1, k, generator=seeded(3)).half().to(device)
    out = torch.full((1, 37), torch.nan, dtype=a.dtype, device=device)
    config = persistent(4, 1, deferred=True, ordered=tied)
    launched(config, a, planes, kind, out=out)
    assert_near(out, a, weights)


def test_an_idle_thread_adds_nothing_to_what_is_infinite(device):
    """It takes the last group again, whose d is infinite, times no activation."""
    planes, _ = matrix("Q2_K", 4, 768)
    parts = views(planes, "Q2_K")
    parts["d"][..., 8:12] = torch.tensor([0x00, 0x7C, 0, 0], dtype=torch.uint8)  # of block 2
    parts["q"][..., -64:] = 0x55  # codes of 1
    parts["s"][..., -16:] = 0x01  # times 1
    a = torch.ones(1, 768, dtype=torch.float16, device=device)
    got = launched(DEFERRED, a, planes.to(device), "Q2_K")
    assert (got == torch.inf).all()


def test_activations_that_are_integers_already(device):
    planes, weights = matrix("Q4_K", 24, 1024, device)
    a = torch.randn(2, 1024, generator=seeded(2)).bfloat16().to(device)
    got = launched(gemv(4, 2, prepared=True), a, planes, "Q4_K")
    assert_near(got, a, weights)


@pytest.mark.parametrize("config", [EACH, DEFERRED], ids=["each", "deferred"])
def test_bias_and_residual_are_added_before_the_rounding(device, config):
    planes, weights = matrix("Q6_K", 20, 256, device)
    a, residual = (
        torch.randn(1, size, generator=seeded(size)).half().to(device) for size in (256, 20)
    )
    bias = torch.randn(20, generator=seeded(5)).half().to(device)
    got = launched(config, a, planes, "Q6_K", bias=bias, residual=residual)
    assert_near(got, a, weights, bias.double() + residual.double())


def test_nothing_to_do_is_done():
    planes, _ = matrix("Q4_0", 3, 32)
    assert launched(EACH, torch.empty(0, 32).half(), planes, "Q4_0").shape == (0, 3)


# Beside the sizes of the benches, which compile every kind for one token and two: a kind of each
# shape that codes and scales have with one of them in turns.
SHAPES = ("Q4_0", "Q8_0", "Q2_K", "Q5_K", "Q6_K", "MXFP4")
SIZES = [(1, 28672, 4096), (2, 4096, 16384)]


@pytest.mark.parametrize(("kind", "num_tokens", "n", "k"), in_turns(SHAPES, SIZES))
def test_what_is_chosen_compiled_for_hopper(kind, num_tokens, n, k):
    planes = torch.empty(n, PLANE_FORMATS[f"{kind}:planes"].row_bytes(k), dtype=torch.uint8)
    a = torch.empty(num_tokens, k, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        product(a, planes.to("meta"), f"{kind}:planes")
    assert launches[-1].kernel.name == "_gemv_repacked_kernel"
    compiled(launches[-1])


def test_persistent_programs_are_for_rows_that_fill_their_threads():
    config, hopper = persistent(4, 1), gpu_of_capability((9, 0))
    takes = [
        groups
        for groups in (128, 140, 384, 448, 800)
        if not products.fits(hopper, config, "Q4_K", "1", 1, 4096, groups)
    ]
    assert takes == [128, 384, 448]
    assert products.fits(hopper, config, "Q4_K", "2", 2, 4096, 384)
    assert products.fits(hopper, config, "Q4_K", "few", 3, 4096, 128)
    assert products.fits(gpu_of_capability((0, 0)), config, "Q4_K", "1", 1, 4096, 128)
