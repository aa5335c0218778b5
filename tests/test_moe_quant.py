"""Laws of the products with packed experts, beyond agreement with their references."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.moe.buckets import tile_bound
from ferrum_triton.quant import FORMATS, dequantize_rows, quantize_rows
from ferrum_triton.quant.kinds import KINDS, format_of
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS, place, place_far_apart

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
FEW_KINDS = pytest.mark.parametrize("kind", ["Q4_K", "MXFP4", "Q4_K:planes", "Q6_K:planes"])
# Of planes float32 takes another way than the narrower dtypes.
BOTH_WAYS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
FAR = [-1, 2**31 - 1, -(2**31), 2**40, -(2**40)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def stack(kind, num_experts, n, num_blocks, seed=0):
    k = num_blocks * format_of(kind).block_size
    weights = torch.randn(num_experts, n, k, generator=seeded(seed)) / k**0.5
    return quantize_rows(weights, kind)


def rows_for(blocks, kind, *leading, seed=1):
    k = format_of(kind).row_weights(blocks.shape[-1])
    return torch.randn(*leading, k, generator=seeded(seed))


def wanted(a, blocks, ids, kind):
    """[num_tokens, top_k, n] in float64, a pair at a time."""
    weights = dequantize_rows(blocks, kind).double()
    y = torch.zeros(*ids.shape, blocks.shape[1], dtype=torch.float64)
    for t, s in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        if 0 <= ids[t, s] < len(blocks):
            y[t, s] = weights[int(ids[t, s])] @ (a[t, s] if a.dim() == 3 else a[t]).double()
    return y


def close(got, want):
    atol = {torch.float32: 2e-5, torch.float16: 5e-3}[got.dtype]
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=0, atol=atol, equal_nan=True)


def grouped(backend, a, blocks, ids, kind):
    """gemm_quant_moe_id through buckets that compute_ids_tpe makes of ids."""
    buckets, tpe, _ = backend.compute_ids_tpe(ids, blocks.shape[0], 1, 1)
    return backend.gemm_quant_moe_id(a, blocks, buckets, tpe, kind, ids.shape[1])


@ALL_KINDS
def test_one_expert_is_the_dense_product(backend, kind):
    """Of one block a row, and of no whole tile."""
    blocks = stack(kind, 1, 7, 1).to(backend.device)
    a = rows_for(blocks, kind, 3).to(backend.device)
    ids = torch.zeros(3, 1, dtype=torch.int32, device=backend.device)
    dense = backend.gemv_quant(a, blocks[0], kind)
    close(backend.gemv_quant_moe_id(a, blocks, ids, kind)[:, 0], dense.cpu())
    close(grouped(backend, a, blocks, ids, kind)[:, 0], dense.cpu())
    close(grouped(backend, a.half(), blocks, ids, kind)[:, 0], dense.cpu())
    gated = backend.gemv_quant_moe_id_gate_up_silu(a, blocks, blocks, ids, kind, kind)
    close(gated[:, 0], backend.silu_mul(dense, dense).cpu())


# Each kind with both dtypes; kinds of a file, and those in planes, between them with rows of tokens
# and of slots for each.
@pytest.mark.parametrize(
    ("kind", "dtype", "per_slot"),
    [
        ("Q4_K", torch.float32, False),
        ("Q4_K", torch.float16, True),
        ("MXFP4", torch.float32, True),
        ("MXFP4", torch.float16, False),
        ("Q4_K:planes", torch.float32, True),
        ("Q4_K:planes", torch.float16, False),
        ("Q6_K:planes", torch.float32, False),
        ("Q6_K:planes", torch.float16, True),
    ],
)
def test_slots_permute_through(backend, kind, dtype, per_slot):
    """A slot's row depends on its id and its activations alone, and equal ids give equal rows."""
    blocks = stack(kind, 4, 5, 2).to(backend.device)
    a = rows_for(blocks, kind, 3, *([4] if per_slot else [])).to(backend.device, dtype)
    ids = torch.tensor([[3, 0, 3, 1], [2, 2, 2, 2], [0, -1, 1, 4]], device=backend.device)
    order = torch.tensor([2, 0, 3, 1], device=backend.device)
    permuted = a[:, order] if per_slot else a
    for product in (backend.gemv_quant_moe_id, lambda *call: grouped(backend, *call)):
        y = product(a, blocks, ids, kind)
        assert torch.equal(product(permuted, blocks, ids[:, order], kind), y[:, order])
        close(y, wanted(a.cpu(), blocks.cpu(), ids.cpu(), kind))
        if not per_slot:
            assert torch.equal(y[0, 0], y[0, 2])
            assert all(torch.equal(row, y[1, 0]) for row in y[1])


@FEW_KINDS
def test_experts_nobody_chose_do_not_matter(backend, kind):
    """Their bytes are all NaN here, and so are those before and behind the stack."""
    blocks = stack(kind, 6, 3, 2)
    ids = torch.tensor([[4, 1], [1, -1]])
    memory = torch.full((10, *blocks.shape[1:]), 255, dtype=torch.uint8)
    memory[2 + 4], memory[2 + 1] = blocks[4], blocks[1]
    a = rows_for(blocks, kind, 2)
    noisy = memory.to(backend.device)[2:8]
    moved = [t.to(backend.device) for t in (a, blocks, ids)]
    y = backend.gemv_quant_moe_id(moved[0], noisy, moved[2], kind)
    assert torch.equal(y, backend.gemv_quant_moe_id(*moved, kind))
    for rows in (moved[0], moved[0].half()):
        assert torch.equal(grouped(backend, rows, noisy, moved[2], kind),
                           grouped(backend, rows, *moved[1:], kind))  # fmt: skip
    gated = backend.gemv_quant_moe_id_gate_up_silu(moved[0], noisy, noisy, moved[2], kind, kind)
    assert gated.isfinite().all()
    close(y, wanted(a, blocks, ids, kind))


@FEW_KINDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_read_nothing(backend, kind, dtype):
    """Rows of zeros, whatever lies where such an expert would be, or in the activations."""
    k = 2 * format_of(kind).block_size
    blocks = torch.full((3, 4, format_of(kind).row_bytes(k)), 255, dtype=torch.uint8)
    blocks = blocks.to(backend.device)
    far = [i for i in FAR if dtype == torch.int64 or abs(i) < 2**31 or i == -(2**31)]
    ids = torch.tensor([[*far, 3]], dtype=dtype, device=backend.device)
    a = torch.full((1, k), torch.nan, device=backend.device)
    for y in (
        backend.gemv_quant_moe_id(a, blocks, ids, kind),
        backend.gemv_quant_moe_id_gate_up_silu(a, blocks, blocks, ids, kind, kind),
        grouped(backend, a, blocks, ids, kind),
        grouped(backend, a.half(), blocks, ids, kind).float(),
    ):
        assert torch.equal(y.cpu(), torch.zeros(1, len(far) + 1, 4))


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        ("Q4_K", "Q6_K"),
        ("Q8_0", "MXFP4"),
        ("Q5_0", "Q5_0"),
        ("Q4_K:planes", "Q4_K:planes"),
        ("Q4_K:planes", "Q6_K:planes"),
        ("Q5_1:planes", "Q3_K:planes"),
        ("Q4_K:planes", "MXFP4"),
        ("Q8_0", "Q2_K:planes"),
    ],
)
def test_gate_and_up_may_differ_in_format(backend, gate, up):
    """Equal to its three parts in float32; in 16 bits that, rounded once.

    Both in planes, 16-bit activations are integers, and sums differ in their last bits.
    """
    blocks = stack(gate, 3, 5, 512 // format_of(gate).block_size, seed=2).to(backend.device)
    others = stack(up, 3, 5, 512 // format_of(up).block_size, seed=3).to(backend.device)
    a = rows_for(blocks, gate, 2, seed=4).half().to(backend.device)
    ids = torch.tensor([[2, 0, 5], [1, 1, 0]], device=backend.device)
    y = backend.gemv_quant_moe_id_gate_up_silu(a.float(), blocks, others, ids, gate, up)
    parts = [
        backend.gemv_quant_moe_id(a.float(), *args)
        for args in ((blocks, ids, gate), (others, ids, up))
    ]
    close(y, backend.silu_mul(*parts).cpu())
    assert y.abs().max() > 0.05
    rounded = backend.gemv_quant_moe_id_gate_up_silu(a, blocks, others, ids, gate, up)
    close(rounded, y.cpu())
    if not (gate in PLANE_FORMATS and up in PLANE_FORMATS):
        assert torch.equal(rounded, y.half())


@FEW_KINDS
def test_strides_cover_the_traits_forms(backend, kind):
    """Pair p reads a[(p // top_k) · outer + (p mod top_k) · inner], from any offset."""
    blocks = stack(kind, 3, 4, 1)
    k = format_of(kind).row_weights(blocks.shape[-1])
    flat = torch.randn(4000, generator=seeded(5))
    ids = torch.tensor([9, 9, 0, 2, 1, 1])[2:].view(2, 2)
    for outer, inner in ((k, 0), (2 * k, k), (k + 3, 7)):
        a = flat.as_strided((2, 2, k), (outer, inner, 1), 11)
        near, want = flat.to(backend.device), wanted(a, blocks, ids, kind)
        a = near.as_strided((2, 2, k), (outer, inner, 1), 11)
        close(backend.gemv_quant_moe_id(a, *(t.to(backend.device) for t in (blocks, ids)), kind),
              want)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dim"),  # a matrix in planes is contiguous
    [("Q8_0", 0), ("Q8_0", 1), ("Q4_K", 0), ("Q4_K", 1), ("Q4_K:planes", 0), ("Q5_0:planes", 0)],
)
def test_stacks_may_pass_two_gigabytes(backend, kind, dim):
    """The last expert, or every last row, lies 2^31 bytes away; blocks are aligned or not."""
    blocks = stack(kind, 3, 3, 1)
    a, ids = rows_for(blocks, kind, 2), torch.tensor([[2, 0], [1, 2]])
    want = wanted(a, blocks, ids, kind)
    a, blocks, ids = (t.to(backend.device) for t in (a, blocks, ids))
    far = place_far_apart(blocks, dim)
    assert far.stride(dim) * 2 >= 2**31
    close(backend.gemv_quant_moe_id(a, far, ids, kind), want)
    close(grouped(backend, a, far, ids, kind), want)
    close(grouped(backend, a.half(), far, ids, kind), want)
    gated = backend.gemv_quant_moe_id_gate_up_silu(a, blocks, far, ids, kind, kind)
    each = want.float().to(backend.device)
    close(gated, backend.silu_mul(each, each).cpu())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in ("gemv", "gemm", "gate_up")
        for shape in ((0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0))
        if name != "gemm" or shape[1] > 0  # gemm_quant_moe_id takes a top_k of at least 1
    ],
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q8_0:planes"])
@BOTH_WAYS
def test_nothing_to_do(backend, name, shape, kind, dtype):
    num_tokens, top_k, n = shape
    row_bytes = format_of(kind).row_bytes(32)
    blocks = torch.zeros(2, n, row_bytes, dtype=torch.uint8, device=backend.device)
    a = torch.ones(num_tokens, 32, device=backend.device, dtype=dtype)
    ids = torch.zeros(num_tokens, top_k, dtype=torch.int64, device=backend.device)
    if name == "gemv":
        y = backend.gemv_quant_moe_id(a, blocks, ids, kind)
    elif name == "gemm":
        y = grouped(backend, a, blocks, ids, kind)
    else:
        y = backend.gemv_quant_moe_id_gate_up_silu(a, blocks, blocks, ids, kind, kind)
    assert y.shape == shape


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_K:planes"])
@BOTH_WAYS
def test_rows_without_blocks_are_zeros(backend, kind, dtype):
    a = torch.empty(2, 0, device=backend.device, dtype=dtype)
    blocks = torch.empty(3, 4, 0, dtype=torch.uint8, device=backend.device)
    ids = torch.tensor([[0, 2], [1, 1]], device=backend.device)
    zeros = torch.zeros(2, 2, 4, dtype=dtype)
    assert torch.equal(backend.gemv_quant_moe_id(a, blocks, ids, kind).cpu(), zeros)
    assert torch.equal(grouped(backend, a, blocks, ids, kind).cpu(), zeros)


def multiplied(backend, a, blocks, kind):
    """Both products of single rows with one expert, [2, num_tokens, n]."""
    ids = torch.zeros(len(a), 1, dtype=torch.int32, device=backend.device)
    products = (backend.gemv_quant_moe_id, lambda *call: grouped(backend, *call))
    return torch.stack([product(a, blocks, ids, kind)[:, 0] for product in products]).cpu()


@FEW_KINDS
@BOTH_WAYS
def test_what_is_no_number_stays_in_its_row(backend, kind, dtype):
    """Infinite sums are such, or NaN with planes; a NaN is one; rows beside them are finite."""
    blocks = stack(kind, 1, 5, 1).to(backend.device)
    a = rows_for(blocks, kind, 5).to(backend.device, dtype)
    a[0, 3], a[1, 5], a[3, 7] = torch.inf, -torch.inf, torch.nan
    got = multiplied(backend, a, blocks, kind)
    weights = dequantize_rows(blocks[0].cpu(), kind)
    want = a.cpu().float() @ weights.T
    lost = ~want.isfinite()
    assert lost[[0, 1, 3]].any(-1).all() and torch.equal(got.isfinite(), ~lost.expand_as(got))
    if kind in FORMATS:
        close(got, want.expand_as(got))
    close(got[:, [2, 4]], want[[2, 4]].expand(2, 2, 5))


@pytest.mark.parametrize("kind", PLANE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensor_cores_take_any_kind_in_planes(backend, kind, dtype):
    """Tiles of pairs that are full and not, rows that fill no tile, and tiles with no pair."""
    blocks = stack(kind, 3, 70, 2 if format_of(kind).block_size == 256 else 9, seed=15)
    a = rows_for(blocks, kind, 21, seed=16).to(dtype)
    ids = torch.tensor([0, 2, 2, -1, 0, 0, 3]).repeat(6).view(21, 2)
    got = grouped(backend, *(t.to(backend.device) for t in (a, blocks, ids)), kind)
    assert got.dtype == dtype
    assert_close(got, wanted(a, blocks, ids, kind))


# Buckets.


SPREADS = [("even", False), ("one expert", True), ("last expert", False), ("mostly none", True)]


# Each kind with every spread. The kinds of a file meet each of them in both dtypes between them,
# and so do those in planes.
@pytest.mark.parametrize(
    ("kind", "spread", "per_slot", "dtype"),
    [
        (kind, *spread, (torch.float32, torch.float16)[(i + first) % 2])
        for kind, first in (("Q4_K", 0), ("MXFP4", 1), ("Q4_K:planes", 0), ("Q6_K:planes", 1))
        for i, spread in enumerate(SPREADS)
    ],
)
def test_buckets_give_what_ids_give(backend, kind, spread, per_slot, dtype):
    """However pairs are spread: over all tiles, or all in one bucket."""
    # float32 has no tiles of planes.
    num_tokens = 20 if kind in PLANE_FORMATS and dtype == torch.float32 else 70
    num_experts, top_k = 5, 2
    blocks = stack(kind, num_experts, 3, 1, seed=6)
    a = rows_for(blocks, kind, num_tokens, *([top_k] if per_slot else []), seed=7).to(dtype)
    low, high = {
        "even": (0, num_experts),
        "one expert": (1, 2),
        "last expert": (num_experts - 1, num_experts),
        "mostly none": (-20, num_experts + 20),
    }[spread]
    ids = torch.randint(low, high, (num_tokens, top_k), generator=seeded(8))
    got = grouped(backend, *(t.to(backend.device) for t in (a, blocks, ids)), kind)
    close(got, wanted(a, blocks, ids, kind))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("kind", "of_rows"),
    [("Q8_0", torch.float32), ("Q8_0:planes", torch.float32), ("Q8_0:planes", torch.float16)],
)
def test_buckets_are_not_trusted(backend, dtype, kind, of_rows):
    """Counts past the bucket, and entries that are no pair: nothing outside is read or written."""
    num_experts, num_tokens, top_k = 4, 20, 2
    blocks = stack(kind, num_experts, 3, 1, seed=9)
    a = rows_for(blocks, kind, num_tokens, seed=10).to(of_rows)
    num_pairs = num_tokens * top_k
    huge = 2**40 if dtype == torch.int64 else 2**31 - 1
    # Behind each bucket lie pairs that would be taken if its count were believed.
    memory = torch.zeros(num_experts, num_pairs + 8, dtype=dtype)
    buckets = memory[:, :num_pairs].fill_(-1)
    ids = torch.full((num_pairs,), -1)
    order = torch.randperm(num_pairs, generator=seeded(11))
    for expert, pairs in ((0, order[:3]), (1, order[3:5]), (3, order[5:30])):
        buckets[expert, 7 : 7 + len(pairs)] = pairs.to(dtype)
        ids[pairs] = expert
    junk = torch.tensor([-huge, huge, num_pairs, -2], dtype=dtype)
    buckets[:, :4], buckets[:, -4:] = junk, junk
    tpe = torch.tensor([huge, num_pairs + 1, -huge, huge], dtype=dtype)
    tiles = num_experts * 3 - 3  # more than pairs in one bucket each can need
    assert tiles > tile_bound(num_pairs, num_experts, num_pairs, 16)
    zeros = torch.zeros(num_tokens, top_k, 3, dtype=of_rows, device=backend.device)
    out = place(zeros, "padded", own_rows=True)
    got = backend.gemm_quant_moe_id(
        a.to(backend.device),
        blocks.to(backend.device),
        memory.to(backend.device)[:, :num_pairs],
        tpe.to(backend.device),
        kind,
        top_k,
        out=out.tensor,
    )
    close(got, wanted(a, blocks, ids.view(num_tokens, top_k), kind))
    assert out.guards_intact()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_0:planes"])
@BOTH_WAYS
def test_buckets_may_be_narrower_than_the_pairs(backend, kind, dtype):
    blocks = stack(kind, 3, 2, 1, seed=12)
    a = rows_for(blocks, kind, 50, seed=13).to(dtype)
    buckets = torch.tensor([[7, 49, 0], [3, 3, 3], [8, 9, 10]], dtype=torch.int32)
    tpe = torch.tensor([3, 0, 2], dtype=torch.int32)
    ids = torch.full((50, 1), -1)
    ids[[7, 49, 0]], ids[[8, 9]] = 0, 2
    moved = [t.to(backend.device) for t in (a, blocks, buckets, tpe)]
    close(backend.gemm_quant_moe_id(*moved, kind, 1), wanted(a, blocks, ids, kind))
    empty = backend.gemm_quant_moe_id(moved[0], moved[1], moved[2][:, :0], moved[3], kind, 1)
    assert torch.equal(empty.cpu(), torch.zeros(50, 1, 2, dtype=dtype))


def test_the_grid_holds_every_routing():
    """tile_bound is no less than the tiles of any spread of pairs over buckets."""
    draw = seeded(14)
    for _ in range(300):
        num_experts, block_m = (int(torch.randint(1, 40, (), generator=draw)) for _ in range(2))
        num_pairs = int(torch.randint(1, 200, (), generator=draw))
        used = int(torch.randint(1, num_experts + 1, (), generator=draw))
        experts = torch.randint(0, used, (num_pairs,), generator=draw)
        counts = experts.bincount(minlength=num_experts)
        tiles = int((-(-counts // block_m)).sum())
        assert tiles <= tile_bound(num_pairs, num_experts, num_pairs, block_m)
        assert tiles <= tile_bound(num_pairs, num_experts, int(counts.max()), block_m)


def test_wrong_calls_are_refused(backend):
    device = backend.device
    blocks, a = stack("Q4_1", 2, 3, 2).to(device), torch.randn(4, 64, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)
    buckets, tpe = ids.new_zeros(2, 8), ids.new_zeros(2)
    gemv, gemm = backend.gemv_quant_moe_id, backend.gemm_quant_moe_id
    gate_up = backend.gemv_quant_moe_id_gate_up_silu
    refused = [
        (gemv, (a, blocks, ids, "Q4_2"), "kind"),
        (gemv, (a, blocks[..., :-1], ids, "Q4_1"), "blocks"),
        (gemv, (a, blocks, ids, "Q4_1:planes"), "blocks"),
        (gemv, (a, blocks, ids, "IQ1_S:planes"), "kind"),
        (gemv, (a, blocks[:0], ids, "Q4_1"), "blocks"),
        (gemv, (a[:, :32], blocks, ids, "Q4_1"), "a"),
        (gemv, (a[:3], blocks, ids, "Q4_1"), "a"),
        (gemv, (a[:, None].expand(4, 3, 64), blocks, ids, "Q4_1"), "a"),
        (gate_up, (a, blocks, blocks, ids, "Q4_1", "Q5_9"), "up_kind"),
        (gate_up, (a, blocks, blocks, ids, "Q8_0", "Q4_1"), "gate_blocks"),
        (gate_up, (a, blocks, blocks[..., :20], ids, "Q4_1", "Q4_1"), "a"),
        (gate_up, (a, blocks, blocks[:1], ids, "Q4_1", "Q4_1"), "up_blocks"),
        (gate_up, (a, blocks, blocks[:, :2], ids, "Q4_1", "Q4_1"), "up_blocks"),
        (gemm, (a, blocks, buckets, tpe, "Q4_2", 2), "kind"),
        (gemm, (a, blocks, buckets, tpe[:1], "Q4_1", 2), "tpe"),
        (gemm, (a, blocks, buckets[:1], tpe, "Q4_1", 2), "bucket_ids"),
        (gemm, (a, blocks, buckets, tpe, "Q4_1", 0), "top_k"),
        (gemm, (a[:, None].expand(4, 3, 64), blocks, buckets, tpe, "Q4_1", 2), "a"),
        (
            gemm,
            (a, blocks[:1].expand(1025, 3, 40), buckets[:1].expand(1025, 8),
             tpe[:1].repeat(1025), "Q4_1", 2),
            "blocks",
        ),
    ]  # fmt: skip
    for door, arguments, argument in refused:
        with pytest.raises(InputError) as error:
            door(*arguments)
        assert error.value.argument == argument, arguments
