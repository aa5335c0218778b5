"""Packed products of experts on Hopper: executed by the emulator, and what is compiled of them."""

import itertools

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.gluon_emulator import EmulationError, run
from ferrum_triton.gluon_emulator.mutants import mutants
from ferrum_triton.kernels.hopper.packed_experts import (
    has_maps,
    packed_experts_kernel,
    packed_pairs,
)
from ferrum_triton.kernels.jit import note_launches, record_launches
from ferrum_triton.kernels.moe.plane_config import (
    GATE_UP_TILES,
    TILES,
    mix_candidates,
)
from ferrum_triton.kernels.moe.plane_gemm import gemm_plane_pairs
from ferrum_triton.kernels.moe.prepare_sorted import prepare_sorted
from ferrum_triton.kernels.moe.tile_table import Found
from ferrum_triton.kernels.quant.packed_config import (
    ORDER,
    PackedConfig,
    experts_candidates,
    packed,
)
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant import FORMATS, dequantize_blocks
from tests.compiling import compiled, in_turns
from tests.packed_twins import twins
from tests.test_hopper_packed import (
    HOPPER,
    KINDS,
    LIMITS,
    TAKES_OVER,
    assembler_says,
    error,
    tokens,
)
from tests.test_quant_mma import packed as matrix
from tests.test_quant_mma import planes_of, seeded

SMALL = PackedConfig(16, span=2, streamed=False, stages=2, x_stages=2)
CONFIGS = [
    SMALL,
    SMALL._replace(tokens=8, span=4),
    SMALL._replace(span=1, overlapped=True),
    SMALL._replace(tokens=32, span=4, overlapped=True, stages=3, x_stages=3),
    SMALL._replace(span=4, x_stages=0, pingpong=True),
]


def buckets(ids, num_experts):
    return get_backend("cpu").compute_ids_tpe(ids.int(), num_experts, 1, 1)[:2]


def in_planes(stacks, kind):
    """Stacks of matrices in planes."""
    return [torch.stack([planes_of(each, kind) for each in stack]) for stack in stacks]


def multiply(y, arranged, table, planes, kind, config, k, **options):
    """The launch alone, by the emulator."""
    form = f"{kind}:planes"
    with note_launches(runs=False) as launches:
        packed_pairs(y, arranged, table, planes, form, k, config)
    (launch,) = launches
    constexprs = {name: launch.meta[name] for name in launch.kernel.constexprs}
    options |= {"assembly": twins(FORMATS[kind]), "timeout": 60}
    run(launch.kernel.jit, launch.grid, launch.args, constexprs, **options)


def emulate(a, stacks, ids, kind, config, num_rows, seed=0, mutant=None):
    """Products of pairs with their experts' rows; of gate and up."""
    top_k, k = ids.shape[1], a.shape[-1]
    y = a.new_full((len(a), top_k, num_rows), torch.nan)
    found = Found(*buckets(ids, len(stacks[0])), ids.numel())
    arranged = prepare_sorted(a, found, ORDER, y, config.tokens)
    table = found.tiles[config.tokens]
    planes, options = in_planes(stacks, kind), {"seed": seed, "mutant": mutant}
    multiply(y, arranged, table, planes, kind, config, k, **options)
    return y


def wanted(a, stack, ids, kind):
    weights = [dequantize_blocks(each, FORMATS[kind]).double() for each in stack]
    rows = a.double() if a.dim() == 3 else a.double()[:, None].expand(-1, ids.shape[1], -1)
    want = torch.zeros(*ids.shape, len(stack[0]), dtype=torch.float64)
    for e, w in enumerate(weights):
        want[ids == e] = rows[ids == e] @ w.T
    return want


def routed(num_tokens, top_k, num_experts, seed=0):
    order = torch.rand(num_tokens, num_experts, generator=seeded(seed)).argsort(dim=1)
    return order[:, :top_k]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Q4_K", CONFIGS[0]),
        ("Q4_0", CONFIGS[1]),
        ("Q6_K", CONFIGS[2]),
        ("Q8_0", CONFIGS[3]),
        ("Q4_K", CONFIGS[3]),
        ("Q4_1", CONFIGS[4]),
    ],
)
@pytest.mark.parametrize("per_pair", [False, True])
def test_values(kind, config, per_pair):
    """Experts of many pairs, of few and of none; a pair of no expert gets zeros."""
    ids = routed(21, 2, 3)
    ids[ids == 1] = 3
    ids[4, 1] = -1
    a = tokens(21, 512) if not per_pair else tokens(42, 512).view(21, 2, 512)
    stack = [matrix(kind, 192, 512, seed=e) for e in range(4)]
    y = emulate(a, [stack], ids, kind, config, 192)
    assert error(y, wanted(a, stack, ids, kind)) < LIMITS[a.dtype]
    assert not y[4, 1].any()


@pytest.mark.parametrize(("kind", "config"), [("Q4_K", SMALL), ("Q4_1", CONFIGS[2])])
def test_gate_and_up(kind, config):
    ids, a = routed(21, 2, 3), tokens(21, 512)
    gate, up = ([matrix(kind, 96, 512, seed=e + i) for e in range(3)] for i in (0, 7))
    y = emulate(a, [gate, up], ids, kind, config, 96)
    g, u = wanted(a, gate, ids, kind), wanted(a, up, ids, kind)
    assert error(y, g * g.sigmoid() * u) < 2 * LIMITS[a.dtype]


def test_stacks_of_one_matrix_have_no_maps():
    planes = torch.stack([planes_of(matrix("Q4_K", 96, 512), "Q4_K")] * 3)
    assert has_maps(planes)
    assert not has_maps(planes[:1].expand(3, -1, -1))


@pytest.mark.parametrize(("kind", "k"), [("Q4_K", 768), ("Q6_K", 768), ("Q8_0", 544)])
def test_experts_any_number_of_bytes_apart(kind, k):
    """Rows of a plane that do not divide a matrix, of stacks that are part of others."""
    a, ids = tokens(21, k), routed(21, 2, 3)
    stack = [matrix(kind, 97, k, seed=e) for e in range(3)]
    y = emulate(a, [stack], ids, kind, SMALL, 97)
    assert error(y, wanted(a, stack, ids, kind)) < LIMITS[a.dtype]


def tiles_of(ids, num_experts):
    """The table of tiles of 32."""
    found, a = Found(*buckets(ids, num_experts), len(ids)), tokens(len(ids), 256)
    prepare_sorted(a, found, ORDER, a.new_empty(len(ids), 1, 8), 32)
    return found.tiles[32]


def test_short_tiles_come_last():
    """Tiles of 32: of experts of 70, 0, 16, 32 and 17 pairs two end with at most half of one."""
    ids = torch.arange(5).repeat_interleave(torch.tensor([70, 0, 16, 32, 17]))[:, None]
    table = tiles_of(ids, 5)
    want = [(0, 0, 70), (0, 32, 38), (3, 86, 32), (4, 118, 17), (0, 64, 6), (2, 70, 16)]
    assert [tuple(row) for row in table.tiles[: int(table.total)].tolist()] == want
    assert table.pairs.tolist() == [*range(len(ids))]


def test_a_table_has_room_for_its_tiles_alone():
    """Whole tiles of one expert are as many as there can be: nothing is written behind them."""
    ids = torch.zeros(96, 1, dtype=torch.int32)
    table = tiles_of(ids, 1)
    assert table.tiles.tolist() == [[0, 0, 96], [0, 32, 64], [0, 64, 32]]
    assert table.total.tolist() == [3]


def test_a_pair_in_two_places_is_multiplied_by_one_of_its_experts():
    """Buckets that are wrong write each pair's row once, and nothing else."""
    a, stack = tokens(4, 512), [matrix("Q4_K", 192, 512, seed=e) for e in range(2)]
    y = a.new_full((4, 1, 192), torch.nan)
    bucket_ids = torch.tensor([[0, 1, 2, 9], [2, 1, -3, 3]], dtype=torch.int32)
    found = Found(bucket_ids, torch.tensor([4, 4], dtype=torch.int32), 4)
    arranged = prepare_sorted(a, found, ORDER, y, SMALL.tokens)
    table = found.tiles[SMALL.tokens]
    assert table.total.tolist() == [2] and table.tiles[:2, 2].sum() <= 4
    multiply(y, arranged, table, in_planes([stack], "Q4_K"), "Q4_K", SMALL, 512)
    either = [wanted(a, stack, torch.full((4, 1), e), "Q4_K") for e in range(2)]
    assert error(y[0], either[0][0]) < LIMITS[a.dtype]
    # Which of its places a pair has is the last written; rows past the last pair there are not.
    for pair in (1, 2):
        errors = [error(y[pair], want[pair]) for want in either]
        assert min(errors) < LIMITS[a.dtype] or not y[pair].any()


def test_every_synchronisation_is_needed():
    kind, ids, a = "Q4_K", routed(40, 2, 3), tokens(40, 512)
    stack, seen = [matrix(kind, 192, 512, seed=e) for e in range(3)], []
    want = wanted(a, stack, ids, kind)
    variants = [SMALL, SMALL._replace(overlapped=True, span=2), SMALL._replace(pingpong=True)]
    for mutant in mutants(packed_experts_kernel.jit):
        if mutant.text == TAKES_OVER:
            continue
        seen.append(str(mutant))
        for config, seed in itertools.product(variants, range(4)):
            try:
                y = emulate(a, [stack], ids, kind, config, 192, seed=seed, mutant=mutant)
            except EmulationError:
                break
            if not error(y, want) < LIMITS[a.dtype]:
                break
        else:
            pytest.fail(str(mutant))
    assert len(seen) >= 6, seen


def launches_of(kind, config, gated, n=768, k=2048, stack=None):
    """The launches for 4096 tokens, 8 experts of 128 each."""
    empty = {"device": "meta", "dtype": torch.int32}
    a = torch.empty(4096, k, dtype=torch.bfloat16, device="meta")
    if stack is None:
        rows = planes_of(matrix(kind, 1, k), kind).shape[1]
        stack = torch.empty(128, n, rows, dtype=torch.uint8, device="meta")
    found, tpe = torch.empty(128, 4096, **empty), torch.empty(128, **empty)
    tiles = GATE_UP_TILES if gated else TILES
    with tiles.forced(packed(config)), record_launches((9, 0)) as launches:
        up = stack if gated else None
        gemm_plane_pairs(a, stack, found, tpe, f"{kind}:planes", 8, up)
    return launches


def test_it_is_tried_on_hopper_alone_and_chosen_by_a_measured_row_alone():
    asked = 32768, 128, "Q4_K:planes"
    tried = [config for config in mix_candidates(HOPPER, *asked) if config.get("path")]
    assert {config["tokens"] for config in tried} == {128, 256}
    assert "path" not in TILES.heuristic(HOPPER, *asked)
    assert TILES.fits(HOPPER, packed(SMALL._replace(streamed=True)), *asked)
    assert not experts_candidates(HOPPER, "Q3_K", 256)
    launches = launches_of("Q4_K", SMALL._replace(tokens=64), False)
    names = [launch.kernel.name for launch in launches]
    assert names[-2:] == ["_arrange_pairs_kernel", "packed_experts_kernel"]
    assert (launches[-1].meta["TILE"].registers, launches[-1].meta["maxnreg"]) == (240, 168)
    one = torch.empty(1, 768, 1184, dtype=torch.uint8, device="meta").expand(128, -1, -1)
    names = [launch.kernel.name for launch in launches_of("Q4_K", SMALL, False, stack=one)]
    assert names[-1] == "_plane_tiles_kernel"


# Pairs of a format that a choice is asked for.
PAIRS = {"Q4_K": 256, "Q4_0": 64, "Q6_K": 16}


@pytest.mark.parametrize(("kind", "gated"), in_turns(PAIRS, [(False,), (True,)]))
def test_what_is_compiled(kind, gated):
    config = experts_candidates(HOPPER, kind, PAIRS[kind])[-1]
    resources = compiled(launches_of(kind, config, gated)[-1])
    assert resources.registers == (80 if config.ctas_per_sm == 2 else 168)
    code = instructions(resources.asm["cubin"])
    parts = sum(config.tokens >= least for least in (8, 16, 32))  # a whole tile, half, a quarter
    assert sum(each.name.startswith("HGMMA.64x") for each in code) == parts * 2 * 4 * 4
    assert "C75" not in assembler_says(resources.asm["ptx"])


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 40, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_on_a_gpu(kind, num_tokens, gated):
    """Right, and the same bits at every launch."""
    ids, a = routed(num_tokens, 2, 6), tokens(num_tokens, 1024, torch.bfloat16)
    ids[ids == 3] = 1
    stacks = [[matrix(kind, 256, 1024, seed=9 * i + e) for e in range(6)] for i in range(1 + gated)]
    (planes, up), (found, tpe) = [*in_planes(stacks, kind), None][:2], buckets(ids, 6)
    want = wanted(a, stacks[0], ids, kind)
    if gated:
        want = want * want.sigmoid() * wanted(a, stacks[1], ids, kind)
    call = [x.cuda() for x in (a, planes, found, tpe)] + [f"{kind}:planes", 2]
    call.append(None if up is None else up.cuda())
    for config in experts_candidates(HOPPER, kind, num_tokens):
        with (GATE_UP_TILES if gated else TILES).forced(packed(config)):
            y = gemm_plane_pairs(*call)
            assert torch.equal(gemm_plane_pairs(*call), y), config
        assert error(y.cpu(), want) < 2 * LIMITS[a.dtype], config
