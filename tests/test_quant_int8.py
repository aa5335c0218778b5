"""Activations of eight bits: their error, and the steps that ops make of odd values."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.quant.gemv_planes import gemv_planes
from ferrum_triton.kernels.quant.int8 import quantize_activations
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.ops import quant_int8 as ops
from ferrum_triton.quant.kinds import dequantize_rows, quantize_rows
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.harness import BACKENDS
from tests.test_kernels_compile import launches_of
from tests.test_quant_ops import seeded

KINDS = pytest.mark.parametrize("kind", PLANE_FORMATS)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


@KINDS
def test_error_is_small_beside_that_of_the_weights(backend, kind):
    """Below 1e-4 of the products' power: normal activations by weights as they are decoded."""
    blocks = quantize_rows(torch.randn(16, 1024, generator=seeded(1)), kind).to(backend.device)
    a = torch.randn(4, 1024, generator=seeded(2)).to(backend.device)
    got = backend.gemv_quant_q8(*backend.quantize_q8(a), blocks, kind, torch.float32).double()
    exact = a.double() @ dequantize_rows(blocks, kind).double().T
    error = (got - exact).square().sum() / exact.square().sum()
    assert 1e-6 < error < 1e-4


def test_of_the_norm_directly(backend):
    """Steps and codes of the norm in float32, but for what rounding moves."""
    x = torch.randn(3, 320, generator=seeded(3)).to(backend.device)
    weight = 1 + 0.2 * torch.randn(320, generator=seeded(4)).to(backend.device)
    codes, info = backend.rms_norm_q8(x, weight)
    want_codes, want_info = backend.quantize_q8(backend.rms_norm(x, weight))
    assert (codes.int() - want_codes.int()).abs().sum() <= 2
    steps, want = (i[..., 0].contiguous().view(torch.float32) for i in (info, want_info))
    torch.testing.assert_close(steps, want, rtol=1e-6, atol=0)


def test_what_is_not_finite_or_next_to_nothing(backend):
    """A NaN step says the former wherever it is; the latter counts as zeros."""
    a = torch.ones(1, 6 * 32)
    a[0, 5], a[0, 40], a[0, 70] = float("nan"), float("inf"), float("-inf")
    a[0, 96:128], a[0, 128:160] = 2.0**-120, 2.0**-119
    codes, info = (t.cpu() for t in backend.quantize_q8(a.to(backend.device)))
    steps = info[0, :, 0].contiguous().view(torch.float32)
    assert steps.isnan().tolist() == [True] * 3 + [False] * 3
    assert steps[3] == 0 and steps[4] == 2.0**-119 / 127 and steps[5] == 1 / torch.tensor(127.0)
    want = torch.tensor([0, 0, 0, 0, 127, 127], dtype=torch.int8)
    assert torch.equal(codes, want.repeat_interleave(32)[None])
    sums = 16 * want.int()
    assert torch.equal(info[0, :, 1], sums | sums << 16)


def test_halves_go_to_the_even_code(backend):
    """127 magnitudes a group make codes of the activations themselves: x.5 is a tie."""
    a = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127.0] * 4)[None]
    codes, _ = backend.quantize_q8(a.to(backend.device))
    want = torch.tensor([0, 2, 2, 0, -2, -2, 126, -127] * 4, dtype=torch.int8)
    assert torch.equal(codes.cpu(), want[None])


def test_products_are_those_of_the_kernel():
    """The op and the launcher below it take the same path, whatever codes and info lie in."""
    blocks = quantize_rows(torch.randn(5, 512, generator=seeded(5)), "Q4_K:planes")
    a = torch.randn(2, 512, generator=seeded(6))
    backend = get_backend("interpret")
    want = gemv_planes(quantize_activations(a), blocks, "Q4_K:planes")
    codes, info = backend.quantize_q8(a)
    wide = torch.zeros(2, 515, dtype=torch.int8)
    wide[:, 1:513] = codes
    apart = torch.zeros(2, 16, 3, dtype=torch.int32)
    apart[..., :2] = info
    for c, i in ((codes, info), (wide[:, 1:513], apart[..., :2])):
        assert torch.equal(backend.gemv_quant_q8(c, i, blocks, "Q4_K:planes", a.dtype), want)


def test_nothing_to_multiply(backend):
    codes, info = backend.quantize_q8(torch.empty(2, 0, device=backend.device))
    blocks = torch.empty(3, 0, dtype=torch.uint8, device=backend.device)
    got = backend.gemv_quant_q8(codes, info, blocks, "Q4_K:planes", torch.float32)
    assert torch.equal(got.cpu(), torch.zeros(2, 3))


def test_wrong_calls_are_refused(backend):
    device = backend.device
    blocks = quantize_rows(torch.randn(3, 64), "Q8_0:planes").to(device)
    codes, info = backend.quantize_q8(torch.randn(2, 64, device=device))
    many = codes.repeat(5, 1), info.repeat(5, 1, 1)
    product = backend.gemv_quant_q8
    refused = [
        (backend.quantize_q8, (torch.randn(2, 48, device=device),), "a"),
        (backend.rms_norm_q8, (torch.randn(2, 48, device=device), torch.ones(48)), "x"),
        (product, (codes, info, blocks, "Q8_0", torch.float32), "kind"),
        (product, (codes, info, blocks, "Q8_0:planes", torch.float64), "dtype"),
        (product, (codes[:, :32], info, blocks, "Q8_0:planes", torch.float32), "codes"),
        (product, (codes, info[:, :1], blocks, "Q8_0:planes", torch.float32), "info"),
        (product, (*many, blocks, "Q8_0:planes", torch.float32), "codes"),
        (product, (codes, info, blocks[:, :-1], "Q8_0:planes", torch.float32), "blocks"),
    ]
    for door, arguments, argument in refused:
        with pytest.raises(InputError) as error:
            door(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments))
        assert error.value.argument == argument


@pytest.mark.parametrize("op", [ops.quantize_q8, ops.rms_norm_q8], ids=lambda op: op.name)
def test_rounding_is_not_fused(op):
    """A product and the addition that rounds it to an integer stay two."""
    (launch,) = launches_of(op, op.bench[0], TARGETS["sm_90"])
    ptx = compile_launch(launch, TARGETS["sm_90"]).asm["ptx"]
    assert "add.f32" in ptx or "add.rn.f32" in ptx
    assert "div.rn.f32" in ptx and "fma.rn.ftz" not in ptx
    assert not [line for line in ptx.splitlines() if "fma" in line and "0f4B400000" in line]
