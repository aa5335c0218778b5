"""Activations as codes of FP8: the nearest ones, by scales of groups of 128."""

import pytest
import torch

from ferrum_triton import OPS, get_backend
from ferrum_triton.kernels.fp8.config import QUANTISING, groups_of
from tests.test_fp8 import BACKENDS, CPU, INTERPRET, POSITIVE, bits, exact_groups


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [1, 127, 128, 129, 640])
def test_codes_are_the_nearest(backend, dtype, k):
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    x[2] = 0
    x[3] *= torch.linspace(1, 2**-12, k).to(dtype)  # down to codes below the normal ones
    codes, scales = backend.quantize_fp8_groups(x)
    want, steps = exact_groups(x)
    assert torch.equal(scales, steps) and torch.equal(bits(codes), want)
    assert (scales[2] == 1).all() and not bits(codes)[2].any()


@BACKENDS
def test_ties_go_to_even_codes(backend):
    """By a scale of one: halfway between each two neighbours, and both signs."""
    halfway = torch.from_numpy((POSITIVE[1:] + POSITIVE[:-1]) / 2).float()
    x = torch.cat((halfway, torch.tensor([448.0, -0.0])))[None]
    for sign in (1, -1):
        codes, scales = backend.quantize_fp8_groups(sign * x)
        assert scales.item() == 1
        assert (bits(codes)[0, :126] % 2 == 0).all()
        assert torch.equal(bits(codes), exact_groups(sign * x)[0])


@BACKENDS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_groups_that_are_not_finite_have_no_scale(backend, value):
    """And others are what they are without."""
    x = torch.randn(3, 300)
    want, steps = backend.quantize_fp8_groups(x)
    x[1, 200] = value
    codes, scales = backend.quantize_fp8_groups(x)
    assert scales[1, 1].isnan() and not bits(codes)[1, 128:256].any()
    scales[1, 1] = steps[1, 1]
    bits(codes)[1, 128:256] = bits(want)[1, 128:256]
    assert torch.equal(scales, steps) and torch.equal(bits(codes), bits(want))


@BACKENDS
@pytest.mark.parametrize(
    ("largest", "scale"),
    [(2.0**-100, 2.0**-100 / 448), (2.0**-101, 1.0), (1e-45, 1.0), (3e38, 3e38 / 448)],
)
def test_scales_of_tiny_and_of_huge_groups(backend, largest, scale):
    x = torch.full((1, 128), largest)
    x[0, ::2] *= -1
    codes, scales = backend.quantize_fp8_groups(x)
    torch.testing.assert_close(scales.item(), scale, rtol=1e-6, atol=0)
    assert (codes.float().abs() == (0 if scale == 1 else 448)).all()


@pytest.mark.parametrize(
    ("backend_name", "size"),
    [("interpret", 256), pytest.param("cuda", 4096, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quotients_are_rounded_once(backend_name, size, dtype):
    """Many numbers and scales, among them quotients halfway between codes and the floats beside."""
    backend = get_backend(backend_name)
    x = torch.randn(size, size, device=backend.device).to(dtype)
    x[: size // 2] *= (2 * torch.randn(size // 2, 1, device=x.device)).exp2().to(dtype)
    limits = x[size // 4 :].unflatten(1, (-1, 128)).float().abs().amax(-1, keepdim=True) / 448
    codes = torch.randint(126, (*limits.shape[:2], 128), device=x.device)
    halfway = torch.from_numpy((POSITIVE[1:] + POSITIVE[:-1]) / 2).float().to(x.device)
    near = (halfway[codes] * limits * (1 + torch.randint_like(codes, -2, 3) * 2.0**-24)).to(dtype)
    near[..., 0], near[..., 1] = 448 * limits[..., 0], -0.0
    x[size // 4 :] = near.flatten(1)
    got = backend.quantize_fp8_groups(x)
    want = OPS["quantize_fp8_groups"].reference(x)
    assert torch.equal(bits(got[0]), bits(want[0])) and torch.equal(got[1], want[1])


def test_every_number_of_groups_gives_the_same_codes():
    x = torch.randn(3, 700)
    want, steps = CPU.quantize_fp8_groups(x)
    for groups in (1, 2, 8):
        with QUANTISING.forced(groups_of(groups)):
            codes, scales = INTERPRET.quantize_fp8_groups(x)
        assert torch.equal(bits(codes), bits(want)) and torch.equal(scales, steps)
