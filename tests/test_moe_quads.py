"""Few pairs of an expert by tensor cores that are fed as weights are read: tiles of eight pairs."""

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.moe import prepare
from ferrum_triton.kernels.moe.plane_config import (
    GATE_UP_TILES,
    TILES,
    Quads,
    quads_heuristic,
)
from ferrum_triton.kernels.moe.plane_gemm import gemm_plane_pairs
from ferrum_triton.kernels.moe.quad_tiles import takes_quads
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant.kinds import format_of, quantize_rows
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.compiling import compiled

FAST = Quads(16, 1, late_tokens=True)  # few turns for an interpreter


def stack_of(kind, num_experts, num_rows, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_experts, num_rows, k, generator=generator) / k**0.5
    return quantize_rows(weights, kind)


def activations(num_tokens, k):
    return torch.randn(num_tokens, k, generator=torch.Generator().manual_seed(1)).half()


def buckets_of(ids, num_experts):
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, num_experts, 1, 1)
    return buckets, tpe


@pytest.mark.parametrize("kind", PLANE_FORMATS)
def test_every_kind_gives_the_products(kind):
    """Of one matrix and of gate and up; an expert has more pairs than a tile, and one has none."""
    stack, up = (stack_of(kind, 3, 40, 512, seed) for seed in (0, 1))
    ids = torch.tensor([2, 0]).repeat_interleave(torch.tensor([11, 3])).view(7, 2)
    a, buckets = activations(7, 512), buckets_of(ids, 3)
    with TILES.forced(FAST.flat()):
        got = gemm_plane_pairs(a, stack, *buckets, kind, 2)
    assert_close(got, OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, kind))
    with GATE_UP_TILES.forced(FAST.flat()):
        got = gemm_plane_pairs(a, stack, *buckets, kind, 2, up)
    gated = OPS["gemv_quant_moe_id_gate_up_silu"].reference
    assert_close(got, gated(a.double(), stack, up, ids, kind, kind), scale=2)


@pytest.mark.parametrize("num_rows", [16, 24, 70])
@pytest.mark.parametrize(
    "quads", [Quads(1, 1), Quads(2, 3, unrolled=True), Quads(4, 1, True, True)], ids=str
)
def test_programs_share_all_tiles(quads, num_rows):
    """Whatever their number is, and where rows are not whole tiles."""
    kind = "Q4_K:planes"
    stack, a = stack_of(kind, 3, num_rows, 256), activations(9, 256)
    ids = torch.tensor([[0], [2], [2]]).repeat(3, 1)
    with TILES.forced(quads.flat()):
        got = gemm_plane_pairs(a, stack, *buckets_of(ids, 3), kind, 1)
    assert_close(got, OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, kind))


@pytest.mark.parametrize("stale", [0, 1, (2 << 32) | 1, -1, (3 << 32) | 5])
def test_pairs_of_no_expert_are_zeros(stale, monkeypatch):
    """Nobody writes their places, so that these hold what lay in that memory."""
    room_for_pairs = prepare.room_for_pairs

    def stale_room(*sizes):
        table = room_for_pairs(*sizes)
        table.places.fill_(stale)
        return table

    monkeypatch.setattr(prepare, "room_for_pairs", stale_room)
    kind = "Q4_0:planes"
    stack, a = stack_of(kind, 3, 24, 256), activations(4, 256)
    ids = torch.tensor([[0, 2], [-1, 0], [2, 3], [-1, -1]])
    out = torch.full((4, 2, 24), torch.nan, dtype=a.dtype)
    with TILES.forced(FAST.flat()):
        gemm_plane_pairs(a, stack, *buckets_of(ids, 3), kind, 2, out=out)
    assert_close(out, OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, kind))
    assert not out[(ids < 0) | (ids > 2)].any()


def test_a_pair_in_two_buckets_has_one_of_their_rows():
    """And buckets that hold more than all pairs are passed over."""
    kind = "Q4_K:planes"
    stack, a = stack_of(kind, 3, 16, 256), activations(8, 256)
    buckets = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 5, 0, 0], [6, 7, 7, 6, 4]], dtype=torch.int32)
    tpe = torch.tensor([5, 4, 5], dtype=torch.int32)
    with TILES.forced(FAST.flat()):
        got = gemm_plane_pairs(a, stack, buckets, tpe, kind, 1)[:, 0]
    every = torch.arange(3).expand(8, 3)
    rows = OPS["gemv_quant_moe_id"].reference(a.double(), stack, every, kind)
    homes = {0: (0, 1), 1: (0,), 2: (0,), 3: (0, 1), 4: (0, 1, 2), 5: (1,), 6: (2,), 7: (2,)}
    for pair, experts in homes.items():
        allowed = [torch.zeros(16), *(rows[pair, expert] for expert in experts)]
        assert min((got[pair] - want).abs().max() for want in allowed) < 5e-3, pair


@pytest.mark.parametrize(("num_rows", "k"), [(15, 256), (16, 288), (64, 0)])
def test_other_shapes_are_taken_by_mixes(num_rows, k):
    """A row that serves them, or a heuristic that does not know of them, is passed over."""
    kind = "Q4_0:planes"
    assert not takes_quads(num_rows, k, 1)
    stack = torch.empty(3, num_rows, format_of(kind).row_bytes(k), dtype=torch.uint8, device="meta")
    a = torch.empty(7, k, dtype=torch.bfloat16, device="meta")
    buckets = torch.empty(3, 14, dtype=torch.int32, device="meta")
    tpe = torch.empty(3, dtype=torch.int32, device="meta")
    with record_launches((9, 0)) as launches, TILES.forced(FAST.flat()):
        gemm_plane_pairs(a, stack, buckets, tpe, kind, 2)
    names = [launch.kernel.name for launch in launches]
    assert "_quad_tiles_kernel" not in names and ("_plane_tiles_kernel" in names) == (k > 0)


def test_only_where_they_gain():
    hopper = gpu_of_capability((9, 0))
    for kind in ("Q4_K:planes", "Q4_0:planes", "Q8_0:planes"):
        assert quads_heuristic(hopper, 512, 128, kind, is_gated=True)
        assert not quads_heuristic(hopper, 1024, 128, kind, is_gated=False)
        for capability in ((0, 0), (8, 0), (10, 0), (12, 0)):
            other = gpu_of_capability(capability)
            assert not quads_heuristic(other, 512, 128, kind, is_gated=True)


@pytest.mark.parametrize(
    "quads", [Quads(4, 4), Quads(4, 4, True), Quads(4, 4, True, True)], ids=str
)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_rows_of_any_length_compiled(blocks, quads):
    kind, k = "Q4_0:planes", 256 * blocks
    stack = torch.empty(5, 64, format_of(kind).row_bytes(k), dtype=torch.uint8, device="meta")
    a = torch.empty(9, k, dtype=torch.float16, device="meta")
    buckets = torch.empty(5, 18, dtype=torch.int32, device="meta")
    tpe = torch.empty(5, dtype=torch.int32, device="meta")
    with record_launches((9, 0)) as launches, TILES.forced(quads.flat()):
        gemm_plane_pairs(a, stack, buckets, tpe, kind, 2)
    compiled(launches[-1])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K:planes", "Q4_0:planes", "Q6_K:planes", "MXFP4:planes"])
def test_compiled_for_hopper(kind, is_gated):
    """Wide loads, no spill in a loop, and as many programs on an SM as are meant."""
    k = 2048
    shape = 128, 768, format_of(kind).row_bytes(k)
    stack = torch.empty(*shape, dtype=torch.uint8, device="meta")
    a = torch.empty(64, k, dtype=torch.bfloat16, device="meta")
    buckets = torch.empty(128, 512, dtype=torch.int32, device="meta")
    tpe = torch.empty(128, dtype=torch.int32, device="meta")
    with record_launches((9, 0)) as launches:
        gemm_plane_pairs(a, stack, buckets, tpe, kind, 8, stack if is_gated else None)
    (launch,) = (each for each in launches if each.kernel.name == "_quad_tiles_kernel")
    quads = launch.meta["TILE"].quads
    resources = compiled(launch)
    assert resources.registers <= quads.registers
    assert quads.registers * 32 * quads.warps * quads.ctas_per_sm <= 65536
    code = [each.name for each in instructions(resources.asm["cubin"])]
    assert any(name.startswith("LDG.E.128") for name in code)
    assert any(name.startswith("HMMA.16816") for name in code)
