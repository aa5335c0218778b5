"""Packed products on Hopper: executed by the emulator, and what is compiled."""

import pytest
import torch

from ferrum_triton.gluon_emulator import run
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper.packed_products import packed_products
from ferrum_triton.kernels.hopper.packed_config import HELD, ORDER, OVERLAPPED, TURNS, PackedConfig
from ferrum_triton.kernels.jit import note_launches
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.quant import FORMATS, dequantize_blocks, quantize_blocks, to_planes
from ferrum_triton.quant.planes import PLANE_FORMATS, views
from tests.packed_twins import twins

HOPPER = gpu_of_arch("sm_90")


def planes_of(blocks, kind):
    """Planes whose rows end in what is no number, where anything may lie between them."""
    planes, form = to_planes(blocks, kind), PLANE_FORMATS[f"{kind}:planes"]
    num_blocks = blocks.shape[-1] // FORMATS[kind].block_bytes
    for name, plane in views(planes, kind).items():
        plane[..., form.used_bytes(name, num_blocks) :] = 0xFF
    return planes


def emulate(a, planes, kind, config, out=None, seed=0, mutant=None, **added):
    arranged = arrange(a, *ORDER)
    y = torch.full((len(a), len(planes)), torch.nan, dtype=a.dtype) if out is None else out
    with note_launches(runs=False) as launches:
        packed_products(y, arranged, [planes], f"{kind}:planes", config, a.shape[1], **added)
    (launch,) = launches
    names = launch.kernel.constexprs
    constexprs = {name: launch.meta[name] for name in names}
    run(
        launch.kernel.jit,
        launch.grid,
        launch.args,
        constexprs,
        seed=seed,
        assembly=twins(FORMATS[kind]),
        mutant=mutant,
        timeout=60,
    )
    return y, arranged


def sample(kind, m, n, k, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(dtype)
    blocks = quantize_blocks(torch.randn(n, k, generator=generator) * k**-0.5, FORMATS[kind])
    return a, blocks


def error(got, a, blocks, kind):
    want = a.double() @ dequantize_blocks(blocks, FORMATS[kind]).double().T
    return ((got.double() - want).square().sum() / want.square().sum()).item() ** 0.5


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
@pytest.mark.parametrize("order", [TURNS, OVERLAPPED, HELD])
@pytest.mark.parametrize("streamed", [True, False])
def test_values(kind, order, streamed):
    a, blocks = sample(kind, 20, 200, 768)
    config = PackedConfig(16, 2, order, streamed, 1, stages=2, x_stages=2, x_steps=2)
    y, _ = emulate(a, planes_of(blocks, kind), kind, config)
    assert error(y, a, blocks, kind) < 1e-3
