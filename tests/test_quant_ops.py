"""Laws of the ops on packed weights, beyond agreement with their references."""

import re
from dataclasses import replace

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.ops import quant as ops
from ferrum_triton.quant import FORMATS, dequantize_blocks, quantize_blocks
from ferrum_triton.quant.kinds import file_kind, quantize_rows
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.compiling import in_turns, launches_of
from tests.harness import BACKENDS
from tests.test_quant_formats import HALVES, SPECIAL_HALVES, assert_same_bits, random_blocks

KINDS = pytest.mark.parametrize("kind", FORMATS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def packed(kind, num_rows, num_blocks, seed=0):
    weights = torch.randn(num_rows, num_blocks * FORMATS[kind].block_size, generator=seeded(seed))
    return quantize_blocks(weights, FORMATS[kind])


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_decode_to_the_formats_bits(backend, kind, dtype):
    fmt = FORMATS[kind]
    blocks = random_blocks(fmt, 3, 5, seed=1)
    want = dequantize_blocks(blocks, fmt).to(dtype)
    got = backend.dequantize(blocks.to(backend.device), kind, dtype).cpu()
    assert_same_bits(got, want)


@KINDS
def test_special_scales_decode_to_the_formats_bits(backend, kind):
    """Denormal, infinite and NaN scales, with the largest and the most negative sub-scales."""
    fmt = FORMATS[kind]
    blocks = random_blocks(fmt, len(SPECIAL_HALVES), 4, seed=2)
    each = blocks.unflatten(-1, (4, fmt.block_bytes))
    each[:, 0] |= 0x80
    each[:, 1], each[:, 2] = 0xFF, 0x00
    halves = torch.tensor(SPECIAL_HALVES)
    for i, at in enumerate(HALVES[kind]):
        bits = halves.roll(3 * i)[:, None]
        each[..., at], each[..., at + 1] = bits & 255, bits >> 8
    if kind == "MXFP4":
        each[..., 0] = torch.tensor([*range(8), *range(248, 256)])[:, None]
    want = dequantize_blocks(blocks, fmt)
    placed = blocks.to(backend.device)
    assert_same_bits(backend.dequantize(placed, kind, torch.float32).cpu(), want)
    ids = torch.arange(len(blocks), device=backend.device)
    rows = backend.embedding_lookup_quant(placed, ids, kind, torch.float32)
    assert_same_bits(rows.cpu(), want)


@KINDS
@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
def test_rows_may_start_at_any_byte(backend, kind, offset):
    """Loads get wider with the rows' alignment; the result stays."""
    blocks = packed(kind, 3, 2, seed=3)
    stride = (blocks.shape[1] + 15) // 16 * 16 + offset
    memory = torch.full((offset + 3 * stride,), 255, dtype=torch.uint8, device=backend.device)
    placed = memory[offset:].as_strided(blocks.shape, (stride, 1), offset)
    placed.copy_(blocks)
    want = dequantize_blocks(blocks, FORMATS[kind])
    assert_same_bits(backend.dequantize(placed, kind, torch.float32).cpu(), want)
    ids = torch.tensor([2, 0], device=backend.device)
    rows = backend.embedding_lookup_quant(placed, ids, kind, torch.float32)
    assert_same_bits(rows.cpu(), want[[2, 0]])
    unit = torch.zeros(1, want.shape[1], device=backend.device)
    unit[0, 17] = 1.0
    assert torch.equal(backend.gemv_quant(unit, placed, kind).cpu(), want[None, :, 17])


@KINDS
@pytest.mark.parametrize("m", [8, 16])
def test_unit_vectors_pick_columns_of_weights(backend, kind, m):
    """Row j of the identity times W is column j of W, to the bit: nothing else leaks in."""
    blocks = packed(kind, 5, 2, seed=4)
    weights = dequantize_blocks(blocks, FORMATS[kind])
    product = backend.gemv_quant if m <= 8 else backend.gemm_quant
    k = weights.shape[1]
    identity = torch.eye(k)
    # Every column where they are few, else the start and end of every 64.
    starts = range(0, k, m) if k <= 64 else [*range(0, k, 64), *range(64 - m, k, 64)]
    for first in starts:
        chosen = slice(first, first + m)
        a = identity[chosen].to(backend.device)
        got = product(a, blocks.to(backend.device), kind).cpu()
        assert torch.equal(got, weights[:, chosen].T)


@KINDS
@pytest.mark.parametrize("m", [3, 17])
def test_products_are_linear(backend, kind, m):
    blocks = packed(kind, 7, 3, seed=5).to(backend.device)
    k = FORMATS[kind].row_weights(blocks.shape[1])
    a = torch.randn(m, k, generator=seeded(6)).to(backend.device)
    b = torch.randn(m, k, generator=seeded(7)).to(backend.device)
    product = backend.gemv_quant if m <= 8 else backend.gemm_quant
    assert torch.equal(product(4 * a, blocks, kind), 4 * product(a, blocks, kind))
    total, parts = product(a + b, blocks, kind), product(a, blocks, kind) + product(b, blocks, kind)
    # Entries are sums of k products of order 1: their rounding, not the table's, is the scale.
    torch.testing.assert_close(total, parts, rtol=0, atol=1e-6 * k)
    assert total.abs().max() > 1.0


@KINDS
def test_rows_of_weights_and_activations_permute_through(backend, kind):
    """Every row meets every weight row alike, whichever tile it falls in."""
    blocks = packed(kind, 70, 1, seed=8).to(backend.device)
    k = FORMATS[kind].row_weights(blocks.shape[1])
    a = torch.randn(70, k, generator=seeded(9)).to(backend.device)
    m, n = (torch.randperm(70, generator=seeded(s)).to(backend.device) for s in (10, 11))
    straight = backend.gemm_quant(a, blocks, kind)
    permuted = backend.gemm_quant(a[m], blocks[n], kind)
    # A product of matrices may sum K in another order where a row lies elsewhere.
    assert_close(permuted, straight[m][:, n], scale=4)


@KINDS
@pytest.mark.parametrize(("m", "n"), [(0, 3), (1, 1), (8, 1), (9, 1), (9, 0), (2, 0), (33, 65)])
def test_odd_sizes(backend, kind, m, n):
    """Ends that fill no tile; 3 blocks of 32 fill none either."""
    blocks = packed(kind, n, 3, seed=12)
    weights = dequantize_blocks(blocks, FORMATS[kind])
    a = torch.randn(m, weights.shape[1], generator=seeded(13))
    got = backend.gemm_quant(a.to(backend.device), blocks.to(backend.device), kind).cpu()
    assert got.shape == (m, n)
    torch.testing.assert_close(got, a @ weights.T, rtol=0, atol=1e-6 * weights.shape[1])


@KINDS
@pytest.mark.parametrize("m", [3, 17])
def test_memory_between_rows_is_not_read(backend, kind, m):
    """Three blocks fill no tile: what follows a row, of NaN here, stays out of its sums."""
    blocks = packed(kind, 5, 3, seed=17)
    weights = dequantize_blocks(blocks, FORMATS[kind])
    k = weights.shape[1]
    a = torch.randn(m, k, generator=seeded(18))
    wide = torch.full((m + 1, k + 256), float("nan"), device=backend.device)
    wide[:m, :k] = a
    table = torch.full((6, blocks.shape[1] + 288), 255, dtype=torch.uint8, device=backend.device)
    table[:5, : blocks.shape[1]] = blocks
    got = backend.gemm_quant(wide[:m, :k], table[:5, : blocks.shape[1]], kind).cpu()
    torch.testing.assert_close(got, a @ weights.T, rtol=0, atol=1e-6 * k)


@KINDS
@pytest.mark.parametrize("m", [2, 20])
def test_rows_without_blocks_give_zeros(backend, kind, m):
    blocks = torch.empty(3, 0, dtype=torch.uint8, device=backend.device)
    got = backend.gemm_quant(torch.empty(m, 0, device=backend.device), blocks, kind)
    assert torch.equal(got.cpu(), torch.zeros(m, 3))


@KINDS
def test_gemm_of_few_rows_is_gemv(backend, kind):
    blocks = packed(kind, 9, 2, seed=14).to(backend.device)
    k = FORMATS[kind].row_weights(blocks.shape[1])
    a = torch.randn(8, k, generator=seeded(15)).to(backend.device, torch.bfloat16)
    assert torch.equal(backend.gemm_quant(a, blocks, kind), backend.gemv_quant(a, blocks, kind))


@KINDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unknown_ids_give_zeros(backend, kind, dtype):
    """Ids outside the table read no memory: its neighbours are NaN."""
    blocks = packed(kind, 4, 2, seed=16)
    guarded = torch.full((12, blocks.shape[1]), 255, dtype=torch.uint8, device=backend.device)
    table = guarded[4:8]
    table.copy_(blocks)
    far = 2**40 if dtype == torch.int64 else 2**31 - 1
    ids = torch.tensor([[3, -1, 4], [0, far, -far]], dtype=dtype, device=backend.device)
    got = backend.embedding_lookup_quant(table, ids, kind, torch.float32).cpu()
    weights = dequantize_blocks(blocks, FORMATS[kind])
    want = torch.zeros(2, 3, weights.shape[1])
    want[0, 0], want[1, 0] = weights[3], weights[0]
    assert_same_bits(got, want)


def test_wrong_calls_are_refused(backend):
    device = backend.device
    blocks = packed("Q4_1", 3, 2).to(device)
    a = torch.randn(2, 64, device=device)
    refused = [
        (backend.gemv_quant, (a, blocks, "Q4_2"), "kind"),
        (backend.gemv_quant, (a, blocks[:, :-1], "Q4_1"), "blocks"),
        (backend.gemv_quant, (a[:, :32], blocks, "Q4_1"), "a"),
        (backend.gemv_quant, (a.repeat(5, 1), blocks, "Q4_1"), "a"),
        (backend.gemm_quant, (a[:, :32], blocks, "Q4_1"), "a"),
        (backend.gemm_quant, (a, blocks, "Q8_0"), "blocks"),
        (backend.dequantize, (blocks, "F16", torch.float32), "kind"),
        (backend.dequantize, (blocks, "Q4_1", torch.float64), "dtype"),
        (backend.dequantize, (blocks.view(torch.int8), "Q4_1", torch.float32), "blocks"),
        (
            backend.embedding_lookup_quant,
            (blocks[:0], torch.tensor([0], device=device), "Q4_1", torch.float32),
            "blocks",
        ),
    ]
    for door, arguments, argument in refused:
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument == argument


# Each GPU's assembly: its name, products alone, and products with a sum.
PRODUCTS = {
    "sm_90": ("ptx", r"mul\.rn\.f32", r"fma\.\w+\.f32"),
    "gfx942": ("amdgcn", r"v_(pk_)?mul_f32", r"v_(pk_)?(fma|mad|mac)\w*_f32"),
}


# A format in planes for one GPU, and in file order for the other.
@pytest.mark.parametrize(
    ("case", "target_name"),
    in_turns(ops.dequantize.bench, [(name,) for name in PRODUCTS]),
    ids=lambda value: getattr(value, "id", value),
)
def test_decoding_is_not_contracted(case, target_name):
    """No multiply and add of the decoder is fused, which would change its last bit."""
    target = TARGETS[target_name]
    assembly, multiply, fused = PRODUCTS[target_name]
    (launch,) = launches_of(ops.dequantize, case, target)
    code = compile_launch(launch, target).asm[assembly]
    assert re.search(multiply, code)
    fmt = FORMATS[file_kind(case.axes["kind"])]
    if target_name == "gfx942" and fmt.is_row_scaled:
        return  # divides, by fused ones
    assert re.search(fused, code) is None
    if fmt.m is not None and not fmt.has_zero:  # has a sum to fuse: the pattern finds it
        fusing = replace(launch, meta=launch.meta | {"enable_fp_fusion": True})
        assert re.search(fused, compile_launch(fusing, target).asm[assembly])


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 10])
def test_up_to_eight_rows_of_activations_are_few(num_tokens):
    """In float32, whatever the weights' layout; 16-bit ones of a file's too."""

    def last_launch(kind, dtype):
        a = torch.empty(num_tokens, 256, dtype=dtype, device="meta")
        blocks = quantize_rows(torch.zeros(16, 256), kind).to("meta")
        with record_launches((9, 0)) as launches:
            OPS["gemm_quant"].impls["triton"](a, blocks, kind)
        return launches[-1].kernel.name if launches else ""

    of_blocks = "_gemv_quant_kernel" if num_tokens <= 8 else "_gemm_quant_kernel"
    assert last_launch("Q4_K", torch.float32) == last_launch("Q4_K", torch.half) == of_blocks
    of_planes = "_gemv_repacked_kernel" if num_tokens <= 8 else "_decode_planes_kernel"
    assert last_launch("Q4_K:planes", torch.float32) == of_planes
