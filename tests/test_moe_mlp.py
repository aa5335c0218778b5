"""Experts from ids to slots in three launches: the numbers of six."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.moe import mlp, next_product, pairs, prepare_ids
from ferrum_triton.kernels.moe.mlp import tiles_of
from ferrum_triton.kernels.moe.plane_config import GATE_UP_TILES, MIXES, TILES, Mix, Quads
from ferrum_triton.kernels.moe.prepare import pairs_in
from ferrum_triton.kernels.moe.tile_table import Found
from ferrum_triton.kernels.quant.mma_config import OTHER_TILES
from ferrum_triton.quant.kinds import format_of, quantize_rows
from ferrum_triton.registry import OPS

NUM_EXPERTS, HIDDEN, INNER = 5, 512, 256
FUSED = ["_prepare_ids_kernel", "_quad_tiles_kernel", "_quad_tiles_kernel"]
BY_MIXES = ["_prepare_ids_kernel", "_gate_up_arranged_kernel", "_plane_tiles_kernel"]

# Tiles that gather activations, as tiles of few pairs do on every GPU: of gate and up, and of down.
GATHERING = Mix(OTHER_TILES[16]).flat()
QUADS = Quads(16, 1).flat()
CHOICES = {
    "mixes": (GATHERING, GATHERING),
    "quads": (QUADS, Quads(8, 1, unrolled=True, late_tokens=True).flat()),
}


@pytest.fixture(params=CHOICES)
def choices(request):
    gate_up, down = CHOICES[request.param]
    with GATE_UP_TILES.forced(gate_up), TILES.forced(down):
        yield request.param


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, choices):
    yield get_backend(request.param)


def stack(kind, n, k, seed, device):
    weights = torch.randn(NUM_EXPERTS, n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
    return quantize_rows(weights, kind).to(device)


def layer(gate_kind, down_kind, device, inner=INNER):
    """Arguments of the op but activations and ids."""
    kinds = gate_kind, gate_kind, down_kind
    sizes = ((inner, HIDDEN), (inner, HIDDEN), (70, inner))
    stacks = [
        stack(kind, *size, i, device)
        for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    return stacks, kinds


def by_buckets(backend, a, stacks, ids, kinds):
    gate, up, down = stacks
    buckets, tpe, _ = backend.compute_ids_tpe(ids, NUM_EXPERTS, INNER, HIDDEN)
    middle = backend.gemm_quant_moe_id_gate_up_silu(
        a, gate, up, buckets, tpe, *kinds[:2], ids.shape[1]
    )
    return backend.gemm_quant_moe_id(middle, down, buckets, tpe, kinds[2], ids.shape[1])


@pytest.mark.parametrize(
    ("kinds", "num_tokens", "inner", "dtype"),
    [
        (("Q4_K", "Q6_K"), 30, 256, torch.int32),  # an expert has more pairs than a tile
        (("Q4_K", "Q4_K"), 9, 256, torch.int64),
        (("Q5_0", "Q8_0"), 21, 96, torch.int32),  # neither whole steps nor whole tiles
        (("Q6_K", "Q3_K"), 5, 256, torch.int64),  # parts of steps
        (("Q4_1", "MXFP4"), 12, 320, torch.int32),
    ],
)
def test_the_numbers_are_those_of_products_by_buckets(
    backend, choices, kinds, num_tokens, inner, dtype
):
    """Ids that name no expert, an expert that none names, rows of very different sizes."""
    stacks, kinds = layer(*(f"{kind}:planes" for kind in kinds), backend.device, inner)
    generator = torch.Generator().manual_seed(num_tokens)
    a = torch.randn(num_tokens, HIDDEN, generator=generator)
    a *= torch.logspace(-3, 0.5, num_tokens)[:, None]
    ids = torch.randint(-1, NUM_EXPERTS - 1, (num_tokens, 3), generator=generator, dtype=dtype)
    ids[0], ids[1, 1] = -1, 2**30
    a, ids = a.to(backend.device, torch.float16), ids.to(backend.device)
    # Down of other rows than tiles of eight take may be of tiles that are sorted by expert.
    assert tiles_of(a, stacks[0], stacks[2], ids, *kinds) or (choices == "quads" and inner % 256)
    for rows in (ids, torch.stack((ids, ids), dim=1)[:, 0]):  # dense and strided
        got = backend.mlp_quant_moe_id(a, *stacks, rows, *kinds)
        assert torch.equal(got, by_buckets(backend, a, stacks, rows, kinds))
        assert not got[0].any() and not got[1, 1].any()


@pytest.mark.parametrize("stale", [0, -1, (2 << 32) + 1])
def test_more_pairs_are_sorted_once_for_both_products(backend, stale, monkeypatch):
    """Entries behind an expert's last and places of pairs that have no expert are any."""
    room_for_pairs = pairs.room_for_pairs

    def stale_pairs(*sizes):
        table = room_for_pairs(*sizes)
        table.pairs.fill_(stale % 7)
        table.places.fill_(stale)
        return table

    stacks, kinds = layer("Q4_K:planes", "Q6_K:planes", backend.device)
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(40, HIDDEN, generator=generator).to(backend.device, torch.float16)
    ids = torch.randint(-1, NUM_EXPERTS + 1, (40, 3), generator=generator).to(backend.device)
    monkeypatch.setattr(mlp, "FEW_PAIRS", 0)
    monkeypatch.setattr(pairs, "room_for_pairs", stale_pairs)
    got = backend.mlp_quant_moe_id(a, *stacks, ids, *kinds)
    assert torch.equal(got, by_buckets(backend, a, stacks, ids, kinds))
    assert not got[(ids < 0) | (ids >= NUM_EXPERTS)].any()
    found, buckets = Found.by_ids(ids, NUM_EXPERTS), pairs.sorted_pairs(ids, NUM_EXPERTS)
    table, want = found.pairs, pairs_in(*buckets, ids.numel(), absent=stale)
    assert torch.equal(table.counts, want.counts) and torch.equal(table.places, want.places)
    for expert, count in enumerate(want.counts.tolist()):
        assert torch.equal(table.pairs[expert, :count], want.pairs[expert, :count])


def test_a_row_ends_before_what_is_arranged_at_once():
    """Of 768 elements, which go by 1024: no other pair's row is touched."""
    backend = get_backend("interpret")
    stacks, kinds = layer("Q4_K:planes", "Q4_K:planes", "cpu", inner=768)
    a = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)).half()
    ids = torch.tensor([[4, 3], [2, 1], [0, 4], [3, 2], [1, 0], [0, 3]])
    gate_up, down = CHOICES["quads"]
    with GATE_UP_TILES.forced(gate_up), TILES.forced(down):
        got = backend.mlp_quant_moe_id(a, *stacks, ids, *kinds)
        assert torch.equal(got, by_buckets(backend, a, stacks, ids, kinds))


@pytest.mark.parametrize("gate_up_by", ["mixes", "quads"])
def test_gate_and_up_in_tiles_of_one_kind_and_down_in_the_other(gate_up_by):
    backend = get_backend("interpret")
    stacks, kinds = layer("Q4_K:planes", "Q4_0:planes", "cpu")
    a = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).half()
    ids = torch.randint(-1, NUM_EXPERTS, (9, 2), generator=torch.Generator().manual_seed(2))
    down_by = {"mixes": "quads", "quads": "mixes"}[gate_up_by]
    gate_up, down = CHOICES[gate_up_by][0], CHOICES[down_by][1]
    with GATE_UP_TILES.forced(gate_up), TILES.forced(down):
        got = backend.mlp_quant_moe_id(a, *stacks, ids, *kinds)
        assert torch.equal(got, by_buckets(backend, a, stacks, ids, kinds))


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_every_pair_of_one_expert(backend, num_tokens):
    stacks, kinds = layer("Q4_K:planes", "Q6_K:planes", backend.device)
    a = torch.randn(num_tokens, HIDDEN).to(backend.device, torch.float16)
    ids = torch.full((num_tokens, 2), NUM_EXPERTS - 1, dtype=torch.int32, device=backend.device)
    for _ in range(2):  # the same memory again: tickets are zeros
        got = backend.mlp_quant_moe_id(a, *stacks, ids, *kinds)
        assert torch.equal(got, by_buckets(backend, a, stacks, ids, kinds))


@pytest.mark.parametrize("stale", [0, -1, (2 << 32) + 1])
def test_what_lay_in_memory_does_not_matter(backend, stale, monkeypatch):
    """Of a pair without an expert neither a place nor activations are ever written."""
    room_for_pairs, room_for = prepare_ids.room_for_pairs, next_product.room_for

    def stale_pairs(*sizes):
        table = room_for_pairs(*sizes)
        table.places.fill_(stale)
        return table

    def stale_rows(*sizes):
        rows = room_for(*sizes)
        for part in rows[:3]:
            if part is not None:
                part.fill_(torch.nan)
        return rows

    stacks, kinds = layer("Q4_K:planes", "Q6_K:planes", backend.device)
    a = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    a = a.to(backend.device, torch.float16)
    ids = torch.tensor([[-1, 2], [-1, 0], [2, 9], [-1, -1]], device=backend.device)
    want = by_buckets(backend, a, stacks, ids, kinds)
    monkeypatch.setattr(prepare_ids, "room_for_pairs", stale_pairs)
    monkeypatch.setattr(next_product, "room_for", stale_rows)
    got = backend.mlp_quant_moe_id(a, *stacks, ids, *kinds)
    assert torch.equal(got, want) and not got[(ids < 0) | (ids >= NUM_EXPERTS)].any()


def meta(*shape, dtype=torch.uint8):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(num_tokens, gate, up, down, dtype=torch.bfloat16, inner=768, experts=128):
    kinds, sizes = (gate, up, down), ((inner, 2048), (inner, 2048), (2048, inner))
    stacks = [
        meta(experts, n, format_of(kind).row_bytes(k))
        for kind, (n, k) in zip(kinds, sizes, strict=True)
    ]
    a, ids = meta(num_tokens, 2048, dtype=dtype), meta(num_tokens, 8, dtype=torch.int32)
    with record_launches((9, 0)) as recorded:
        OPS["mlp_quant_moe_id"].impls["triton"](a, *stacks, ids, *kinds)
    return [launch.kernel.name for launch in recorded]


@pytest.mark.parametrize(
    ("num_tokens", "kinds", "options", "is_fused"),
    [
        (32, ("Q4_K:planes",) * 3, {}, True),
        (32, ("Q4_K:planes", "Q4_K:planes", "Q6_K:planes"), {}, True),
        (64, ("Q4_K:planes",) * 3, {}, True),
        (0, ("Q4_K:planes",) * 3, {}, False),
        (128, ("Q4_K:planes",) * 3, {}, False),  # activations come by TMA
        (32, ("Q4_K:planes", "Q5_K:planes", "Q4_K:planes"), {}, False),
        (32, ("Q4_K", "Q4_K", "Q4_K:planes"), {}, False),
        (32, ("Q4_K:planes", "Q4_K:planes", "Q4_K"), {}, False),
        (32, ("Q4_K:planes",) * 3, {"dtype": torch.float32}, False),
        (32, ("Q4_K:planes",) * 3, {"inner": 1280}, False),  # more than a program arranges
        (40, ("Q4_K:planes",) * 3, {"experts": 512}, False),  # more tiles than were timed
    ],
)
def test_what_is_launched(num_tokens, kinds, options, is_fused):
    names = launches(num_tokens, *kinds, **options)
    assert (names == FUSED) == is_fused
    assert is_fused or "_prepare_ids_kernel" not in names
    of_eight = MIXES[4].flat()
    with GATE_UP_TILES.forced(of_eight), TILES.forced(of_eight):
        names = launches(num_tokens, *kinds, **options)
    assert (names == BY_MIXES) == is_fused or num_tokens == 128


def test_wrong_calls_are_refused():
    backend = get_backend("cpu")
    (gate, up, down), kinds = layer("Q8_0", "Q8_0", "cpu")
    a, ids = torch.randn(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int32)
    backend.mlp_quant_moe_id(a, gate, up, down, ids, *kinds)
    for wrong in (
        (a[:, 1:], gate, up, down, ids, *kinds),
        (a, gate, up, down[..., :-34], ids, *kinds),
        (a, gate, up[:, 1:], down, ids, *kinds),
        (a, gate[:0], up[:0], down[:0], ids, *kinds),
        (a, gate, up, down, ids[:1], *kinds),
        (a, gate, up, down, ids, "Q8_0", "Q8_0", "Q4_0"),
    ):
        with pytest.raises(InputError, match="mlp_quant_moe_id"):
            backend.mlp_quant_moe_id(*wrong)
