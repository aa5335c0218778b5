"""Packed products whose warpgroups begin their products in turn."""

import itertools

import pytest

from ferrum_triton.gluon_emulator import Deadlock
from ferrum_triton.kernels.quant.packed_config import (
    PackedConfig,
    packed_candidates,
    packed_fits,
    registers_of,
    shared_bytes,
)
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant import FORMATS
from tests.compiling import compiled
from tests.test_hopper_packed import (
    HOPPER,
    LIMITS,
    SMALL,
    TAKES_OVER,
    assembler_says,
    emulate,
    error,
    launch_of,
    tokens,
    unpacking_in_flight,
    wanted,
    whose,
    without,
)
from tests.test_quant_mma import packed as matrix

BLOCKS = SMALL._replace(span=4, x_stages=0, streamed=False, pingpong=True)
ROWS = SMALL._replace(streamed=False, pingpong=True)


def warpgroups_of_rows(config, seed, mutant=None):
    """Of each program, whose rows of steps are begun, one after the other."""
    a, blocks = tokens(20, 1024), [matrix("Q4_K", 130, 1024)]
    with whose("warpgroup_mma") as begun:
        y, _ = emulate(a, blocks, "Q4_K", config, seed=seed, mutant=mutant)
    assert error(y, wanted(a, blocks, "Q4_K")) < LIMITS[a.dtype]
    return [
        [name for i, name in enumerate(names) if names[:i].count(name) % config.span == 0]
        for names in begun.values()
    ]


def alternate(names):
    return all(one != other for one, other in itertools.pairwise(names))


@pytest.mark.parametrize("config", [BLOCKS, ROWS])
def test_warpgroups_begin_their_products_in_turn(config):
    programs = [names for seed in range(4) for names in warpgroups_of_rows(config, seed)]
    assert len(programs) == 4 * 4
    for names in programs:
        assert len(names) == 2 * 4 * 4 // config.span
        assert names[0].endswith("0") and alternate(names)


def test_nothing_but_the_wait_keeps_their_order():
    mutant = without(TAKES_OVER)
    orders = [names for seed in range(4) for names in warpgroups_of_rows(ROWS, seed, mutant)]
    assert not all(map(alternate, orders))


def test_who_never_hands_over_stops_the_other():
    mutant = without("mbarrier.arrive(w.go.index(1 - WARPGROUP), count=1)")
    with pytest.raises(Deadlock, match="go"):
        warpgroups_of_rows(BLOCKS, 0, mutant)


def test_whole_blocks_of_32_and_64_tokens_are_tried_so():
    for m in (8, 16, 32, 64, 128, 256):
        found = packed_candidates(HOPPER, "Q4_K", m, 4096, 14336)
        spans = {config.span for config in found if config.pingpong}
        assert spans == ({4} if m in (32, 64) else set())
    config = PackedConfig(64, 2, overlapped=True, stages=3, x_stages=0, pingpong=True)
    assert "overlapped" in packed_fits(HOPPER, config, "Q4_K", 64, 4096, 14336)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Q4_K", PackedConfig(32, 4, False, True, 1, 5, 0, True, True)),
        ("Q4_K", PackedConfig(64, 4, False, True, 1, 3, 0, True, True)),
        ("Q4_0", PackedConfig(64, 4, False, True, 1, 3, 0, True, True)),
    ],
)
def test_what_is_compiled(kind, config):
    """A block is unpacked before its products. The other warpgroup may begin behind twelve of them,
    ahead of the last step's four and the one of offsets.
    """
    resources = compiled(launch_of(kind, config, config.tokens, n=4096, k=14336))
    assert resources.registers == registers_of(config, FORMATS[kind]).average
    assert resources.shared <= shared_bytes(config, FORMATS[kind])
    code = instructions(resources.asm["cubin"])
    found = unpacking_in_flight(code)
    assert len(found) == 2 * 16 * 4 and not any(found)
    names = [each.name for each in code]
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA")]
    assert len(products) == 2 * 17
    for before, behind, last in zip(
        products[11::17], products[12::17], products[16::17], strict=True
    ):
        found = [i for i in range(before, last) if names[i].startswith("SYNCS.ARRIVE")]
        assert len(found) == 1 and found[0] < behind
    assert "C75" not in assembler_says(resources.asm["ptx"])
