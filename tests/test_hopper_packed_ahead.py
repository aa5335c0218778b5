"""Weights that packed products ask for ahead of the first activations."""

import pytest

from ferrum_triton.gluon_emulator import Deadlock, hopper
from ferrum_triton.gluon_emulator.schedule import Operation, current
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
    without,
)
from tests.test_quant_mma import packed as matrix

# Copies of a stage of weights, planes q, s and d for each warpgroup; and of a block's activations.
WEIGHTS, TOKENS = 2 * 3, 4


CONFIGS = [
    SMALL._replace(stages=4),
    SMALL._replace(stages=4, x_stages=0),
    SMALL._replace(stages=3, streamed=False),
]


def copies(monkeypatch, config, seed, mutant=None):
    """Whose copies were asked for, one after the other, by two tokens: of each program."""
    asked = {program: [] for program in range(CPU_PROCESSORS)}

    def noted(program, what):
        if what == "TMA load":
            asked[program.index[0]].append(current().name.split()[0])
        return Operation(program, what)

    a, blocks = tokens(2, 1280), [matrix("Q4_K", 500, 1280)]
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "Operation", noted)
        try:
            y, _ = emulate(
                a, blocks, "Q4_K", config, seed=seed, mutant=mutant, concurrent=CPU_PROCESSORS
            )
        except Deadlock as stopped:
            assert "asked" in str(stopped)
        else:
            assert error(y, wanted(a, blocks, "Q4_K")) < LIMITS[a.dtype]
    return list(asked.values())


def ahead_of_tokens(names):
    """Copies of weights ahead of the last one of the first block's activations."""
    return [i for i, name in enumerate(names) if name == "fetch_tokens"][TOKENS - 1] - (TOKENS - 1)


def allowed(config):
    """Two of four programs begin early, by two tokens. The others ask for one stage."""
    return [(config.stages - 1) * WEIGHTS] * 2 + [WEIGHTS] * 2


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_stop_until_activations_are_asked_for(monkeypatch, config):
    """Where nobody ever says that they are, these are all that a program asks for."""
    stopped = copies(monkeypatch, config, 0, without("mbarrier.arrive(asked.index(0), count=1)"))
    assert [names.count("fetch_weights") for names in stopped] == allowed(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_other_weights_are_ahead_of_the_first_activations(monkeypatch, config):
    for seed in range(4):
        found = map(ahead_of_tokens, copies(monkeypatch, config, seed))
        assert all(each <= most for each, most in zip(found, allowed(config), strict=True))


def test_nothing_but_the_wait_keeps_weights_behind_activations(monkeypatch):
    mutant = without(TOKENS_FIRST)
    found = [
        ahead_of_tokens(names)
        for seed in range(6)
        for names in copies(monkeypatch, CONFIGS[0], seed, mutant)[2:]
    ]
    assert max(found) > WEIGHTS


@pytest.mark.parametrize(
    ("tokens", "ctas_per_sm", "programs"), [(1, 1, 131), (32, 2, 200), (132, 1, 0), (500, 2, 0)]
)
def test_programs_are_early_where_no_token_has_their_sm(tokens, ctas_per_sm, programs):
    config = PackedConfig(16, ctas_per_sm=ctas_per_sm)
    assert early_programs(config, tokens, 132) == programs
