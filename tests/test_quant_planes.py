"""Packed weights in planes: their layout, the way back, and products with them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ferrum_triton import InputError
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.gemv_config import gemv, gemv_heuristic
from ferrum_triton.kernels.quant.gemv_repacked import launch_gemv
from ferrum_triton.kernels.quant.integer_activations import int16_activations
from ferrum_triton.kernels.quant.mma_config import MmaConfig
from ferrum_triton.kernels.quant.products import gemm_quant, gemv_quant, mma, products, small_m
from ferrum_triton.kernels.quant.products import product as chosen_product
from ferrum_triton.kernels.quant.rows import dequantize
from ferrum_triton.kernels.quant.small_m_config import SmallM
from ferrum_triton.quant import (
    FORMATS,
    BlockFormat,
    QuantizedTensor,
    dequantize_blocks,
    dequantize_rows,
    from_planes,
    quantize_blocks,
    to_planes,
)
from ferrum_triton.quant.layout import Half, Integers, Run
from ferrum_triton.quant.planes import PLANE_FORMATS, SUFFIX, PlaneFormat, views
from ferrum_triton.testing import assert_close
from tests.compiling import compiled
from tests.test_quant_formats import random_blocks
from tests.test_quant_ops import packed, seeded

SMALL_M = small_m(SmallM(2))
KINDS = pytest.mark.parametrize("kind", [fmt.file.name for fmt in PLANE_FORMATS.values()])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On the CPU kernels are interpreted."""
    return request.param


def form_of(kind):
    return PLANE_FORMATS[f"{kind}:planes"]


def product(a, planes, kind, config=None, out=None):
    """By the kernel of one and two tokens, whatever would be chosen for so many."""
    num_tokens, num_rows = len(a.codes if hasattr(a, "codes") else a), planes.shape[0]
    y = out
    if y is None:
        y = torch.empty(num_tokens, num_rows, dtype=a.dtype, device=planes.device)
    if config is None:
        is_wide, k = getattr(a, "dtype", None) == torch.float32, planes.shape[1]
        groups = form_of(kind).row_weights(k) // 32
        config = gemv_heuristic(kind, num_tokens, num_rows, groups, is_wide)
    return launch_gemv(a, planes, f"{kind}:planes", config, y)


def blocks_for(kind, num_rows, k, seed=0):
    return packed(kind, num_rows, k // FORMATS[kind].block_size, seed)


@KINDS
@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (7, 3), (2, 3, 2)])
def test_planes_hold_every_bit_of_the_file(kind, shape):
    blocks = random_blocks(FORMATS[kind], *shape, seed=3)
    planes = to_planes(blocks, kind, chunk_bytes=300)
    num_weights = shape[-1] * FORMATS[kind].block_size
    assert planes.shape == (*shape[:-1], form_of(kind).row_bytes(num_weights))
    assert form_of(kind).row_weights(planes.shape[-1]) == num_weights
    assert planes.shape[-1] % 16 == 0
    assert torch.equal(from_planes(planes, kind, chunk_bytes=300), blocks)


@KINDS
def test_each_bit_alone_comes_back(kind):
    """One bit of the block set at a time, and one clear."""
    bits = torch.eye(8 * FORMATS[kind].block_bytes, dtype=torch.uint8).unflatten(-1, (-1, 8))
    ones = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    blocks = torch.cat([ones, ~ones])
    planes = to_planes(blocks, kind)
    assert torch.equal(from_planes(planes, kind), blocks)
    used = [plane.ne(0).any(-1) for plane in views(to_planes(ones, kind), kind).values()]
    assert torch.stack(used).any(0).all()


@KINDS
def test_integers_lie_where_the_layout_says(kind):
    """Weight i = 4 (n j + p) + b of a word of n fours is bits 8 b + p · bits of word j."""
    fmt = FORMATS[kind]
    blocks = random_blocks(fmt, 3, 2, seed=4)
    planes = to_planes(blocks, kind)
    codes = fmt.q.read(blocks.unflatten(-1, (2, fmt.block_bytes))).flatten(-2).int() + fmt.q.offset
    low = fmt.q.low[0].bits
    planes = views(planes, kind)
    want = [("q", low, codes & (1 << low) - 1)]
    if fmt.q.high:
        want.append(("h", fmt.q.high.bits, codes >> low))
    i = torch.arange(codes.shape[-1])
    for plane, bits, values in want:
        fours = 8 // bits
        words = planes[plane].view(torch.int32)[:, i // (4 * fours)].long()
        got = words >> (8 * (i % 4) + bits * (i // 4 % fours)) & (1 << bits) - 1
        assert torch.equal(got.int(), values & (1 << bits) - 1)


@KINDS
def test_planes_take_little_more_than_the_file(kind):
    blocks = random_blocks(FORMATS[kind], 2, 4096 // FORMATS[kind].block_size)
    assert to_planes(blocks, kind).numel() <= 1.03 * blocks.numel()


def test_what_is_no_row_of_a_format_is_refused():
    with pytest.raises(InputError, match="MXFP4"):
        to_planes(torch.zeros(1, 17, dtype=torch.uint8), "IQ1_S")
    with pytest.raises(InputError):
        to_planes(torch.zeros(1, 19, dtype=torch.uint8), "Q4_0")
    for row_bytes in (16, 18, 40, 56):
        with pytest.raises(InputError, match="filled up"):
            from_planes(torch.zeros(1, row_bytes, dtype=torch.uint8), "Q4_0")


@KINDS
def test_a_packed_tensor_in_planes_and_back(kind):
    weight = QuantizedTensor(blocks_for(kind, 3, 512), kind)
    planes = weight.in_planes()
    assert (planes.kind, planes.shape) == (f"{kind}:planes", weight.shape)
    assert planes.in_planes() is planes and weight.as_in_file() is weight
    assert torch.equal(planes.as_in_file().blocks, weight.blocks)
    assert torch.equal(planes.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL"])
def test_every_matrix_of_a_stack_is_in_planes_of_its_own(kind, device):
    blocks = quantize_blocks(torch.randn(2, 3, 4, 512), FORMATS[kind])
    want = dequantize_rows(blocks, kind).half()
    planes = to_planes(blocks, kind).to(device)
    assert torch.equal(dequantize(planes, f"{kind}:planes", torch.float16).cpu(), want)


def test_planes_that_lie_apart_or_between_words_are_refused():
    planes = to_planes(blocks_for("Q4_K", 3, 256), "Q4_K")
    a = torch.randn(1, 256)
    for bad in (
        torch.zeros(3, 161, dtype=torch.uint8)[:, 1:],
        planes.new_zeros(700)[8:648].view(4, 160),
    ):
        with pytest.raises(InputError, match="contiguous planes"):
            product(a, bad, "Q4_K")


@KINDS
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 1, 256, None),
        (1, 5, 1280, gemv(4, 1, prefetch=True)),
        (3, 3, 512, {**gemv(2, 2), "ordered": False}),
        (8, 2, 256, None),
        (1, 2, 3584, None),  # as many groups of 32 as three warps and a half have threads
    ],
)
def test_products_are_the_definitions(device, kind, m, n, k, config):
    """Rows that fill no tile, threads past the row's end, counts that are no power of two."""
    blocks = blocks_for(kind, n, k, seed=5)
    weights = dequantize_blocks(blocks, FORMATS[kind]).double() * k**-0.5
    planes = to_planes(blocks, kind).to(device)
    a = torch.randn(m, k, generator=seeded(6)) * k**-0.5
    want = a.double() @ (weights * k**0.5).T
    assert_close(product(a.to(device), planes, kind, config), want, name="exact")


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (1, 3, 512, torch.float16),
        (2, 2, 1280, torch.bfloat16),
        (4, 1, 256, torch.bfloat16),
        pytest.param(3, 9, 2048, torch.float16, marks=pytest.mark.gpu),
    ],
)
@KINDS
def test_activations_of_16_bits(device, kind, m, n, k, dtype):
    """As integers made by each program or before: what they lose is less than float32 keeps."""
    blocks = blocks_for(kind, n, k, seed=7)
    a = torch.randn(m, k, generator=seeded(8)).to(dtype)
    planes = to_planes(blocks, kind).to(device)
    weights = dequantize_blocks(blocks, FORMATS[kind]).double()
    want = a.double() @ weights.T
    size = a.double().abs() @ weights.abs().T
    for x in (a.to(device), int16_activations(a.to(device))):
        got = product(x, planes, kind, out=torch.empty(m, n, device=device)).cpu()
        assert ((got - want).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize(("kind", "k"), [("Q2_K", 8448), ("Q3_K", 768)])
@pytest.mark.parametrize("most", [False, True], ids=["random", "most"])
def test_pairs_of_groups(device, kind, k, most):
    """Rows long enough for Q2_K's threads to take two groups too; and integers at their ends."""
    fmt, num_blocks = FORMATS[kind], k // FORMATS[kind].block_size
    blocks = blocks_for(kind, 5, k, seed=21)
    a = torch.randn(2, k, generator=seeded(22)).bfloat16()
    if most:  # 32640, the most that a bfloat16 becomes, and as much below 0
        a = torch.tensor([[255.0], [-255.0]], dtype=torch.bfloat16).repeat(1, k)
        blocks = torch.full((5, num_blocks, fmt.block_bytes), 0xFF, dtype=torch.uint8)
        for half in (fmt.d, fmt.m):
            if half is not None:
                half.write(blocks, torch.full((5, num_blocks, 1), 2.0**-9))
        blocks = blocks.flatten(-2)
    planes = to_planes(blocks, kind).to(device)
    weights = dequantize_blocks(blocks, fmt).double()
    want, size = a.double() @ weights.T, a.double().abs() @ weights.abs().T
    wide = a.to(device)
    options = {"config": gemv(4, 8), "out": torch.empty(2, 5, device=device)}
    for x in (wide, int16_activations(wide), wide.float()):
        got = product(x, planes, kind, **options).cpu()
        assert ((got - want).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_integers_of_16_bits(device, dtype):
    """Off by half a step at most, and a step is 2^-14 of the power of two below the largest."""
    a = torch.randn(2, 320, generator=seeded(18)).to(dtype)
    a[0, 5], a[1, 40:64], a[1, 64:96] = 900.0, a[1, 40:64] * 2.0**-20, 0.0
    got = int16_activations(a.to(device))
    info = got.scales_and_sums.cpu()
    steps = info[..., 0].contiguous().view(torch.float32)
    integers = got.codes.cpu().view(torch.int16).unflatten(-1, (-1, 32))
    groups = a.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    assert ((integers * steps[..., None] - groups).abs() <= steps[..., None] / 2).all()
    assert (steps <= largest * 2.0**-14)[largest > 0].all() and (integers[largest == 0] == 0).all()
    assert torch.equal(info[..., 1:3], integers.unflatten(-1, (2, 16)).int().sum(-1).int())
    kept = groups.abs() >= largest[..., None] * (2.0**-7 if dtype == torch.bfloat16 else 2.0**-4)
    assert torch.equal((integers * steps[..., None])[kept], groups[kept])


def test_an_activation_among_smaller_ones(device):
    """One a thousand times the others: what they lose is less than what it may have lost before."""
    blocks = blocks_for("Q5_K", 6, 1024, seed=19)
    weights = dequantize_blocks(blocks, FORMATS["Q5_K"]).double()
    a = torch.randn(1, 1024, generator=seeded(20)).to(torch.bfloat16)
    a[0, 77] = 1000.0
    planes = to_planes(blocks, "Q5_K").to(device)
    got = product(a.to(device), planes, "Q5_K", out=torch.empty(1, 6, device=device)).cpu()
    want = a.double() @ weights.T
    assert ((got - want).abs() <= 2.0**-14 * (a.double().abs() @ weights.abs().T)).all()


@KINDS
def test_largest_and_smallest_integers(device, kind):
    """Rows of all ones and all zeros but the fp16 scales: integers and sub-scales at their ends."""
    fmt = FORMATS[kind]
    blocks = torch.zeros(4, 256 // fmt.block_size, fmt.block_bytes, dtype=torch.uint8)
    blocks[1], blocks[2], blocks[3] = 0xFF, 0x55, 0x80
    for half in (fmt.d, fmt.m):
        if half is not None:
            half.write(blocks, torch.full((4, blocks.shape[1], 1), 2.0**-9))
    blocks = blocks.flatten(-2)
    a = torch.rand(1, 256, generator=seeded(9)) + 0.5
    want = a.double() @ dequantize_blocks(blocks, fmt).double().T
    got = product(a.to(device), to_planes(blocks, kind).to(device), kind).cpu().double()
    # Positive activations: what rounding is relative to are the integers before their offset.
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


def test_rows_of_activations_may_lie_anywhere(device):
    """Strided, and at addresses no wide load can start at; what lies between is NaN."""
    blocks = blocks_for("Q4_K", 4, 512, seed=10)
    planes = to_planes(blocks, "Q4_K").to(device)
    a = torch.randn(2, 512, generator=seeded(11)).to(torch.float16)
    wide = torch.full((3, 531), float("nan"), dtype=a.dtype, device=device)
    wide[:2, 3:515] = a.to(device)
    want = a.double() @ dequantize_blocks(blocks, FORMATS["Q4_K"]).double().T
    assert_close(product(wide[:2, 3:515], planes, "Q4_K"), want)
    out = torch.full((2, 9), float("nan"), dtype=a.dtype, device=device)
    product(a.to(device), planes, "Q4_K", out=out[:, 2:6])
    assert_close(out[:, 2:6], want)
    assert out[:, :2].isnan().all() and out[:, 6:].isnan().all()


@KINDS
def test_a_lost_number_stays_lost(device, kind):
    """And is lost to its own row alone."""
    planes = to_planes(blocks_for(kind, 3, 512), kind).to(device)
    a = torch.randn(2, 512, generator=seeded(15))
    want = product(a[1:].to(device), planes, kind)
    for lost in (torch.nan, torch.inf, -torch.inf):
        a[0, 300] = lost
        got = product(a.to(device), planes, kind)
        assert not got[0].isfinite().any()
        assert_close(got[1:], want)
        got = product(a.to(device, torch.bfloat16), planes, kind)
        assert not got[0].isfinite().any() and got[1].isfinite().all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 256), (2, 0, 256), (2, 3, 0)])
def test_nothing_to_multiply(device, m, n, k):
    planes = to_planes(torch.zeros(n, k // 256 * 144, dtype=torch.uint8), "Q4_K").to(device)
    got = chosen_product(torch.ones(m, k, device=device), planes, "Q4_K:planes")
    assert torch.equal(got.cpu(), torch.zeros(m, n))


def exponents(kind, num_rows, k, e):
    """Random codes, and blocks whose exponents are ``e`` in turn."""
    blocks = random_blocks(FORMATS[kind], num_rows, k // 32, seed=31).unflatten(-1, (-1, 17))
    blocks[..., 0] = torch.tensor(e, dtype=torch.uint8).repeat(k // 32 // len(e))
    return blocks.flatten(-2)


@pytest.mark.parametrize("e", [0, 1, 220])
def test_powers_of_two_of_any_size(device, e):
    """Far beyond float16's range, and down to float32's smallest numbers."""
    blocks = exponents("MXFP4", 16, 256, [e])
    planes = to_planes(blocks, "MXFP4").to(device)
    a = torch.randn(3, 256, generator=seeded(32)).bfloat16()
    weights = dequantize_blocks(blocks, FORMATS["MXFP4"]).double()
    want, size = a.double() @ weights.T, a.double().abs() @ weights.abs().T
    out = torch.empty(3, 16, device=device)
    for config in (gemv(4, 2, prepared=True), SMALL_M, mma(MmaConfig(32, 16))):
        with products.forced(config):
            got = chosen_product(a.to(device), planes, "MXFP4:planes", out=out).cpu()
        assert ((got - want).abs() <= 1e-5 * size + 2.0**-149).all()


def test_powers_of_two_far_from_the_largest(device):
    """Weights are exact down to 2^-29 of the largest power, and blocks of zeros do not count."""
    blocks = exponents("MXFP4", 16, 256, [120, 110, 100, 95, 92, 91, 200, 112])
    blocks.unflatten(-1, (-1, 17))[:, 6, 1:] = 0x80  # 0 and -0
    planes = to_planes(blocks, "MXFP4").to(device)
    assert torch.equal(from_planes(planes.cpu(), "MXFP4"), blocks)
    a = torch.eye(256, dtype=torch.float16)[16::32].to(device)
    want = a.cpu().double() @ dequantize_blocks(blocks, FORMATS["MXFP4"]).double().T
    out = torch.empty(8, 16, device=device)
    for config in (SMALL_M, mma(MmaConfig(32, 16))):
        with products.forced(config):
            got = chosen_product(a, planes, "MXFP4:planes", out=out)
        assert torch.equal(got.cpu().double(), want)


def described_in_contributing():
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    return eval(re.search(r"```py\n(.*?)```", text, re.S)[1])


MADE_UP = (
    described_in_contributing(),
    # Five bits in an odd number of bytes.
    BlockFormat(
        "M5",
        1003,
        32,
        23,
        d=Half(1),
        q=Integers((Run(3, 4, lanes=16, planes=2),), high=Run(19, 1, lanes=4, planes=8), offset=13),
    ),
    # Sub-blocks of 32 weights, and a codebook.
    BlockFormat(
        "M4_X",
        1005,
        256,
        138,
        d=Half(0),
        scales=Integers((Run(2, 8, lanes=8),), signed=True),
        q=Integers((Run(10, 4, lanes=16, planes=2, chunks=8),)),
        values=(-54, -41, -31, -23, -16, -11, -7, -3, 0, 4, 8, 12, 18, 25, 34, 46),
    ),
)


@pytest.mark.parametrize("fmt", MADE_UP, ids=lambda fmt: fmt.name)
def test_a_description_is_all_that_a_format_takes(fmt, monkeypatch):
    """One that no other file knows of is encoded, laid out, decoded and multiplied by."""
    kind = fmt.name + SUFFIX
    monkeypatch.setitem(FORMATS, fmt.name, fmt)
    monkeypatch.setitem(PLANE_FORMATS, kind, PlaneFormat(fmt))
    weights = torch.randn(17, 256, generator=seeded(33)) / 16
    weight = QuantizedTensor(quantize_blocks(weights, fmt), fmt.name)
    decoded = weight.dequantize()
    assert (decoded - weights).norm() < 0.25 * weights.norm()
    planes = weight.in_planes()
    assert torch.equal(planes.as_in_file().blocks, weight.blocks)
    a = torch.randn(20, 256, generator=seeded(34)).half()
    want = a.double() @ decoded.double().T
    for stored in (weight, planes):
        assert torch.equal(dequantize(stored.blocks, stored.kind, torch.float32), decoded)
        for x, multiply in ((a[:1], gemv_quant), (a[:1].float(), gemv_quant), (a, gemm_quant)):
            assert_close(multiply(x, stored.blocks, stored.kind), want[: len(x)])


def launch_for(kind, warps=2):
    blocks = torch.zeros(64, 4096 // FORMATS[kind].block_size * FORMATS[kind].block_bytes)
    planes = to_planes(blocks.to(torch.uint8), kind).to("meta")
    a = torch.empty(1, 4096, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        product(a, planes, kind, gemv(4, warps))
    return launches[-1]


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "Q3_K"])
def test_weights_are_read_in_wide_words_and_not_converted(kind):
    """Wide loads, no spill, no denormals flushed, and fewer conversions than one in eight."""
    launch = launch_for(kind)
    ptx = compiled(launch).asm["ptx"]
    assert ".ftz" not in ptx
    loads = re.findall(r"ld\.global\.L1::evict_first\S*\.v(\d)\.b32", ptx)
    # Of 32 weights, or of 64 of Q3_K.
    words = {"Q8_0": 8, "Q3_K": 4 + 2, "Q6_K": 4 + 2}.get(kind, 4)
    assert sum(map(int, loads)) == 4 * words  # of the four rows of a program
    assert max(map(int, loads)) == min(words, 4)
    assert len(re.findall(r"cvt\.rn\.f32\.[su]", ptx)) <= 4 * 32 // 8
    assert not re.findall(r"dp4a", ptx)


def test_no_ptx_for_other_makers():
    launch = launch_for("Q6_K")
    plan = replace(launch.meta["PLAN"], ptx=False, wide=False, ordered=False)
    plain = replace(launch, meta=launch.meta | {"PLAN": plan, "PDL": False, "launch_pdl": False})
    asm = compiled(plain, "gfx942").asm
    # Denormal weights have to be taken as they are.
    assert re.search(r"\.amdhsa_float_denorm_mode_32 3", asm["amdgcn"])


def test_a_launch_waits_after_its_weights_and_before_its_activations():
    one_step = launch_for("Q4_K", warps=4)
    ptx = compiled(one_step).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait;")
    weights = r"ld\.global\.L1::evict_first"
    assert len(re.findall(weights, before)) == 4 and not re.findall(weights, after)
    assert not re.findall(r"ld\.global\.v[24]", before) and re.findall(r"ld\.global\.v4", after)


@pytest.mark.gpu
def test_a_chain_of_launches(device="cuda"):
    """Each product takes what the launch before it wrote."""
    planes = to_planes(blocks_for("Q6_K", 4096, 4096, seed=13), "Q6_K").to(device)
    a = torch.randn(2, 4096, generator=seeded(14)).to(device, torch.bfloat16) * 0.015
    for _ in range(3):
        want, got = a, a
        for _ in range(4):
            want = product(want, planes, "Q6_K", gemv(4, 4)) * 0.015
            torch.cuda.synchronize()
        for _ in range(4):
            got = product(got, planes, "Q6_K", gemv(4, 4)) * 0.015
        assert torch.equal(got, want)
        a = got
