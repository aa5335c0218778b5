"""Sums of packed products' tiles whose programs each add a slice, executed by the emulator."""

import ast
import itertools

import pytest
import torch

from ferrum_triton.gluon_emulator import Race
from ferrum_triton.gluon_emulator.mutants import Mutant
from ferrum_triton.gluon_emulator.twins import tree_of
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper import packed, packed_sums
from ferrum_triton.kernels.jit import CPU_PROCESSORS
from ferrum_triton.kernels.quant.packed_costs import best_by_count, programs_of
from ferrum_triton.kernels.rows import cdiv
from tests.compiling import compiled
from tests.test_hopper_packed import (
    LIMITS,
    SMALL,
    emulate,
    error,
    gated,
    launch_of,
    tokens,
    wanted,
)
from tests.test_quant_mma import packed as matrix

WIDE = SMALL._replace(tokens=32)
# A configuration, tokens, rows, weights of K; a tile's programs and slices that come of it: as many
# of either, a slice more, parts of two blocks and of one, and programs that have no slice.
SHARED = [
    (WIDE, 20, 100, 1024, 4, 4),
    (WIDE, 32, 70, 768, 3, 4),
    (SMALL, 13, 200, 768, 2, 2),
    (SMALL._replace(overlapped=True), 9, 128, 1024, 4, 2),
]


@pytest.mark.parametrize(("config", "m", "n", "k", "programs", "slices"), SHARED)
def test_sums_are_the_same_whoever_waits_and_whoever_leaves(config, m, n, k, programs, slices):
    """One program at a time leaves its slices to the last one; of all at a time, some wait."""
    tiles = cdiv(n, 128)
    found = programs_of(config, tiles, k // 256, CPU_PROCESSORS)
    assert (found.count, found.slices) == (tiles * programs, slices)
    a, blocks = tokens(m, k), [matrix("Q4_K", n, k)]
    results = []
    for concurrent, seed in itertools.product((1, 2, tiles * programs), range(2)):
        y, tickets = emulate(a, blocks, "Q4_K", config, seed=seed, concurrent=concurrent)
        assert not tickets.any()
        results.append(y)
    assert error(results[0], wanted(a, blocks, "Q4_K")) < LIMITS[a.dtype]
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("concurrent", [1, 2, 4])
def test_sums_are_the_same_where_programs_depart_late(concurrent, monkeypatch):
    a, blocks = tokens(20, 1024), [matrix("Q4_K", 100, 1024)]
    y, _ = emulate(a, blocks, "Q4_K", WIDE)
    asked = []

    def late(tile):
        asked.append(tile)
        return False

    for module in (packed, packed_sums):
        assert module.departs_early(launch_of("Q4_K", WIDE, 20).meta["TILE"])
        monkeypatch.setattr(module, "departs_early", late)
    departed, tickets = emulate(a, blocks, "Q4_K", WIDE, concurrent=concurrent)
    assert asked and torch.equal(departed, y) and not tickets.any()


@pytest.mark.parametrize(("concurrent", "left_out"), [(4, 4), (1, 1)])
def test_a_program_stores_its_own_slice_only_if_it_leaves_it(concurrent, left_out, monkeypatch):
    """Of four programs none leaves while all wait; one at a time, all do but the last one."""
    made, empty = [], torch.empty

    def noted(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1].fill_(float("nan")) if made[-1].dtype == torch.float32 else made[-1]

    monkeypatch.setattr(packed_sums, "MOST_POLLS", 1 << 20 if concurrent > 1 else 0)
    a, blocks = tokens(WIDE.tokens, 1024), [matrix("Q4_K", 100, 1024)]
    monkeypatch.setattr(torch, "empty", noted)
    y, _ = emulate(a, blocks, "Q4_K", WIDE, concurrent=concurrent)
    monkeypatch.undo()
    assert error(y, wanted(a, blocks, "Q4_K")) < LIMITS[a.dtype]
    partial = next(x for x in made if x.shape == (4, 2, 2, 64, WIDE.tokens))
    slices = partial[:, 0].reshape(4, 2, 4, -1).isnan()
    assert torch.equal(slices.all(-1), slices.any(-1))
    assert slices.all(-1).sum(dim=(0, 2)).tolist() == [left_out] * 2  # of either warpgroup


@pytest.mark.parametrize("concurrent", [1, 4])
def test_slices_are_finished_as_whole_tiles_are(concurrent):
    """With a bias and a residual, gate and up, and matrices side by side."""
    a, blocks = tokens(20, 1024, torch.bfloat16), [matrix("Q4_K", 70, 1024)]
    bias, residual = torch.randn(70), tokens(20, 2 * 70)[:, :70]
    y, _ = emulate(a, blocks, "Q4_K", WIDE, concurrent=concurrent, bias=bias, residual=residual)
    want = wanted(a, blocks, "Q4_K") + bias.double() + residual.double()
    assert error(y, want) < LIMITS[a.dtype]
    pair = [matrix("Q4_1", 60, 1024, seed=i) for i in range(2)]
    added = {"activation": "silu", "concurrent": concurrent}
    y, _ = emulate(a, pair, "Q4_1", WIDE, a.new_empty(20, 60), **added)
    assert error(y, gated(a, pair, "Q4_1", "silu")) < 2 * LIMITS[a.dtype]
    beside = [matrix("Q6_K", n, 512, seed=n) for n in (130, 40)]
    x = tokens(12, 512)
    y, _ = emulate(x, beside, "Q6_K", SMALL, concurrent=concurrent)
    assert error(y, wanted(x, beside, "Q6_K")) < LIMITS[x.dtype]


def weakened(function):
    """A mutant for each atomic that orders anything, which then orders nothing."""
    for number in itertools.count():
        tree = tree_of(function)
        orders = [x for x in ast.walk(tree) if isinstance(x, ast.keyword) and x.arg == "sem"]
        if number == len(orders):
            return
        order = orders[number].value
        orders[number].value = ast.copy_location(ast.Constant("relaxed"), order)
        yield Mutant(function, tree, __file__, order.lineno, ast.unparse(order))


@pytest.mark.parametrize(("number", "polls"), [(0, 64), (1, 64), (2, 0)])
def test_each_atomic_has_to_order_what_it_counts(number, polls, monkeypatch):
    """To arrive, to ask whether all have, and to leave slices, where all have meanwhile."""
    monkeypatch.setattr(packed_sums, "MOST_POLLS", polls)
    mutants = list(weakened(packed_sums.hand_on))
    assert len(mutants) == 3
    a, blocks = tokens(20, 1024), [matrix("Q4_K", 100, 1024)]
    with pytest.raises(Race):
        for concurrent, seed in itertools.product((1, 2, 4), range(4)):
            how = {"seed": seed, "concurrent": concurrent, "mutant": mutants[number]}
            emulate(a, blocks, "Q4_K", WIDE, **how)


@pytest.mark.parametrize(
    ("kind", "m", "slices", "added"),
    [
        ("Q4_K", 128, 4, {}),
        ("Q6_K", 64, 2, {"matrices": 2, "activation": "silu"}),
        ("Q4_0", 256, 2, {}),
    ],
)
def test_slices_spill_nothing(kind, m, slices, added):
    config, _ = best_by_count(gpu_of_arch("sm_90"), kind, m, 4096, 4096)
    launch = launch_of(kind, config, m, n=4096, **added)
    assert launch.meta["TILE"].slices == slices
    assert compiled(launch).spilled == 0


def test_few_sums_spill_where_registers_do_not_hold_a_tile():
    """720 bytes, more than are few, where programs of such tiles departed early."""
    config, _ = best_by_count(gpu_of_arch("sm_90"), "Q4_K", 256, 4096, 14336)
    launch = launch_of("Q4_K", config, 256, n=4096, k=14336)
    tile = launch.meta["TILE"]
    assert (tile.tokens, tile.slices) == (256, 4) and not packed_sums.departs_early(tile)
    assert compiled(launch).spilled == 0
