"""Products of one or two activations whose programs walk over the rows."""

import pytest
import torch

from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.gemv_walk import Walk, gemv_walk, walk_of
from ferrum_triton.kernels.quant.int8 import quantize_activations
from ferrum_triton.kernels.quant.int16 import int16_activations
from ferrum_triton.kernels.quant.plane_products import product_of_few
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.quant import FORMATS, dequantize_blocks, to_planes
from ferrum_triton.quant.planes import PLANE_FORMATS, views
from tests.test_quant_ops import packed, seeded

KINDS = pytest.mark.parametrize("kind", [fmt.file.name for fmt in PLANE_FORMATS.values()])
# Blocks of four rows; on the CPU, whose processors are four, programs have up to three of them.
WALK = Walk(4, 1)


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


@KINDS
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_every_row_is_met_once(kind, num_tokens, device):
    """The last block is part of the one before it, and threads are more than groups."""
    planes, weights = matrix(kind, 37, 768, device)
    a = torch.randn(num_tokens, 768, generator=seeded(1)).half().to(device)
    out = torch.full((num_tokens, 37), torch.nan, dtype=a.dtype, device=device)
    assert gemv_walk(a, planes, f"{kind}:planes", WALK, out=out) is out
    assert_near(out, a, weights)


@KINDS
@pytest.mark.parametrize(("k", "tied"), [(768, False), (8448, True)], ids=["free", "tied"])
def test_sums_that_wait_for_the_last_block(kind, k, tied, device):
    """A part of a warp has no group, or a warp has none; and one program has a block less."""
    planes, weights = matrix(kind, 37, k, device)
    a = torch.randn(1, k, generator=seeded(3)).half().to(device)
    out = torch.full((1, 37), torch.nan, dtype=a.dtype, device=device)
    gemv_walk(a, planes, f"{kind}:planes", Walk(4, 1, kept=True, tied=tied), out=out)
    assert_near(out, a, weights)


def test_an_idle_thread_adds_nothing_to_what_is_infinite(device):
    """It takes the last group again, whose d is infinite, times no activation."""
    planes, _ = matrix("Q2_K", 4, 768)
    parts = views(planes, "Q2_K")
    parts["d"][..., 8:12] = torch.tensor([0x00, 0x7C, 0, 0], dtype=torch.uint8)  # of block 2
    parts["q"][..., -64:] = 0x55  # codes of 1
    parts["s"][..., -16:] = 0x01  # times 1
    a = torch.ones(1, 768, dtype=torch.float16, device=device)
    got = gemv_walk(a, planes.to(device), "Q2_K:planes", Walk(4, 1, kept=True))
    assert (got == torch.inf).all()


@pytest.mark.parametrize("make", [quantize_activations, int16_activations])
def test_activations_that_are_integers_already(make, device):
    planes, weights = matrix("Q4_K", 24, 1024, device)
    a = torch.randn(2, 1024, generator=seeded(2)).bfloat16().to(device)
    got = gemv_walk(make(a), planes, "Q4_K:planes", WALK).double()
    want = a.double() @ weights.T
    assert ((got - want).square().sum() / want.square().sum()).item() < 1e-4


@pytest.mark.parametrize("walk", [WALK, WALK._replace(kept=True)], ids=["each", "kept"])
def test_bias_and_residual_are_added_before_the_rounding(device, walk):
    planes, weights = matrix("Q6_K", 20, 256, device)
    a, residual = (
        torch.randn(1, size, generator=seeded(size)).half().to(device) for size in (256, 20)
    )
    bias = torch.randn(20, generator=seeded(5)).half().to(device)
    got = gemv_walk(a, planes, "Q6_K:planes", walk, bias=bias, residual=residual)
    assert_near(got, a, weights, bias.double() + residual.double())


def test_nothing_to_do_is_done():
    planes, _ = matrix("Q4_0", 3, 32)
    assert gemv_walk(torch.empty(0, 32).half(), planes, "Q4_0:planes", WALK).shape == (0, 3)


SIZES = [
    (num_tokens, *size)
    for num_tokens in (1, 2)
    for size in (
        (4096, 4096),
        (8192, 4096),
        (14336, 4096),
        (28672, 4096),
        (4096, 14336),
        (4096, 16384),
    )
]


@KINDS
@pytest.mark.parametrize(("num_tokens", "n", "k"), SIZES)
def test_what_is_chosen_compiled_for_hopper(kind, num_tokens, n, k):
    planes = torch.empty(n, PLANE_FORMATS[f"{kind}:planes"].row_bytes(k), dtype=torch.uint8)
    a = torch.empty(num_tokens, k, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        product_of_few(a, planes.to("meta"), f"{kind}:planes")
        walk = walk_of(kind, n, k // 32, num_tokens, a.device)
    assert (launches[-1].kernel.name == "_gemv_walk_kernel") == (walk is not None)
    assert compile_launch(launches[-1], TARGETS["sm_90"]).spilled == 0


def test_only_sizes_that_were_timed_walk():
    device = torch.device("meta")
    with record_launches((9, 0)):
        assert walk_of("Q4_K", 4096, 448, 1, device) == Walk(8, 1, kept=True, tied=True)
        assert walk_of("Q4_K", 1024, 448, 1, device) is None  # few rows
        assert walk_of("Q4_K", 4096, 300, 1, device) is None  # many idle threads
        assert walk_of("Q4_K", 4096, 448, 3, device) is None
    with record_launches((8, 0)):
        assert walk_of("Q4_K", 4096, 448, 1, device) is None
