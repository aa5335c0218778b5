"""Weights that packed products ask for ahead of the first activations."""

import contextlib

import pytest

from ferrum_triton.gluon_emulator import Deadlock
from ferrum_triton.kernels.jit import CPU_PROCESSORS
from ferrum_triton.kernels.quant.packed_config import PackedConfig, early_programs
from tests.test_hopper_packed import (
    LIMITS,
    SMALL,
    TOKENS_FIRST,
    emulate,
    error,
    tokens,
    wanted,
    whose,
    without,
)
from tests.test_quant_mma import packed as matrix

# Copies of a stage of weights, planes q, s and d for each warpgroup; and of a block's activations.
WEIGHTS, TOKENS = 2 * 3, 4
CONFIGS = [
    SMALL._replace(stages=4),
    SMALL._replace(stages=4, x_stages=0),
    SMALL._replace(stages=3, streamed=False),
    SMALL._replace(stages=5),
]


def copies(config, seed, mutant=None, stops=False):
    """Whose copies are asked for, one after the other, by two tokens: of each program.

    Args:
        stops: the mutant never ends.
    """
    a, blocks = tokens(2, 1280), [matrix("Q4_K", 500, 1280)]
    how = {"seed": seed, "mutant": mutant, "concurrent": CPU_PROCESSORS}
    ends = pytest.raises(Deadlock, match="asked") if stops else contextlib.nullcontext()
    with whose("TMA load") as asked, ends:
        y, _ = emulate(a, blocks, "Q4_K", config, **how)
        assert error(y, wanted(a, blocks, "Q4_K")) < LIMITS[a.dtype]
    return [asked[program] for program in range(CPU_PROCESSORS)]


def ahead_of_tokens(names):
    """Copies of weights ahead of the last one of the first block's activations."""
    return [i for i, name in enumerate(names) if name == "fetch_tokens"][TOKENS - 1] - (TOKENS - 1)


def allowed(config):
    """Two of four programs begin early, by two tokens. The others ask for one stage."""
    return [min(config.stages - 1, 3) * WEIGHTS] * 2 + [WEIGHTS] * 2


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_stop_until_activations_are_asked_for(config):
    """Where nobody ever says that they are, these are all that a program asks for."""
    mutant = without("mbarrier.arrive(asked.index(0), count=1)")
    stopped = copies(config, 0, mutant, stops=True)
    assert [names.count("fetch_weights") for names in stopped] == allowed(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_other_weights_are_ahead_of_the_first_activations(config):
    for seed in range(4):
        found = map(ahead_of_tokens, copies(config, seed))
        assert all(each <= most for each, most in zip(found, allowed(config), strict=True))


def test_nothing_but_the_wait_keeps_weights_behind_activations():
    mutant = without(TOKENS_FIRST)
    found = [
        ahead_of_tokens(names)
        for seed in range(6)
        for names in copies(CONFIGS[0], seed, mutant)[2:]
    ]
    assert max(found) > WEIGHTS


@pytest.mark.parametrize(
    ("num_tokens", "ctas_per_sm", "programs"),
    [(1, 1, 131), (32, 2, 200), (132, 1, 0), (500, 2, 0)],
)
def test_programs_are_early_where_no_token_has_their_sm(num_tokens, ctas_per_sm, programs):
    config = PackedConfig(16, ctas_per_sm=ctas_per_sm)
    assert early_programs(config, num_tokens, 132) == programs
