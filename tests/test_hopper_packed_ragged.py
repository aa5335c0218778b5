"""Packed products whose last tokens fill a half or a quarter of a tile."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.quant.packed_config import PackedConfig, last_tile
from ferrum_triton.kernels.quant.packed_costs import (
    BLOCK_US,
    ENDS_US,
    RAGGED_TURN_US,
    best_by_count,
    microseconds,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS
from tests.compiling import compiled
from tests.test_hopper_packed import LIMITS, emulate, error, gated, launch_of, tokens, wanted
from tests.test_quant_mma import packed as matrix

HOPPER = gpu_of_arch("sm_90")
WHOLE = PackedConfig(128, span=2, streamed=False, stages=2, x_stages=2)


@pytest.mark.parametrize(
    ("config", "m", "last"),
    [
        (WHOLE, 100, 128),  # the only tile
        (WHOLE, 128, 128),
        (WHOLE, 129, 32),
        (WHOLE, 160, 32),
        (WHOLE, 161, 64),
        (WHOLE, 192, 64),
        (WHOLE, 193, 128),
        (WHOLE, 288, 32),
        (WHOLE._replace(tokens=256), 320, 64),
        (WHOLE._replace(tokens=256), 321, 128),
        (WHOLE._replace(tokens=64), 65, 64),  # of tiles that are small nothing is left out
        (WHOLE._replace(streamed=True), 129, 128),
    ],
)
def test_last_tile(config, m, last):
    assert last_tile(config, m) == last


@pytest.mark.parametrize(
    ("config", "m", "n", "added"),
    [
        (WHOLE, 130, 300, {}),
        (WHOLE._replace(overlapped=True), 321, 200, {}),
        (WHOLE._replace(sums_offsets=True, x_stages=0), 180, 200, {}),
        (WHOLE, 150, 150, {"activation": "silu"}),
    ],
)
def test_values(config, m, n, added):
    """Programs have tiles of both sizes, and go on in rings that the last tile left anywhere."""
    count = 2 if added else 1
    a, blocks = tokens(m, 512), [matrix("Q4_K", n, 512, seed=i) for i in range(count)]
    y, tickets = emulate(a, blocks, "Q4_K", config, a.new_full((m, n), torch.nan), **added)
    want = gated(a, blocks, "Q4_K", "silu") if added else wanted(a, blocks, "Q4_K")
    assert error(y, want) < count * LIMITS[a.dtype]
    assert not tickets.any()


def test_what_is_added_beside_other_matrices():
    a, blocks = tokens(140, 256, torch.bfloat16), [matrix("Q6_K", n, 256, seed=n) for n in (70, 40)]
    bias, residual = torch.randn(110), tokens(140, 110)
    y, _ = emulate(a, blocks, "Q6_K", WHOLE, bias=bias, residual=residual)
    want = wanted(a, blocks, "Q6_K") + bias.double() + residual.double()
    assert error(y, want) < LIMITS[a.dtype]


@given(
    rows=st.integers(1, 400),
    full_m=st.integers(1, 5),
    left=st.integers(1, 128),
    tokens=st.sampled_from((128, 256)),
)
def test_the_longest_program_is_counted(rows, full_m, left, tokens):
    config, num_tokens = WHOLE._replace(tokens=tokens), full_m * tokens + left
    part = last_tile(config, num_tokens)
    assume(part < tokens)
    sizes = [tokens] * (rows * full_m) + [part] * rows
    count = HOPPER.num_sms
    took = [sum(BLOCK_US[size, 1][1] for size in sizes[i::count]) for i in range(count)]
    turns = cdiv(len(sizes), count)
    want = 16 * max(took) + ENDS_US[tokens, 1].whole + (turns - 1) * RAGGED_TURN_US
    shape = num_tokens, 128 * rows, 4096
    assert microseconds(HOPPER, config, FORMATS["Q4_K"], *shape) == pytest.approx(want)


def test_a_few_tokens_more_take_a_small_tile_by_count():
    for m, rows in itertools.product((129, 160, 192, 288), (14336, 28672)):
        shape = rows, 4096
        config, took = best_by_count(HOPPER, "Q4_K", m, *shape)
        assert last_tile(config, m) < config.tokens
        assert took < best_by_count(HOPPER, "Q4_K", 512, *shape)[1]


@pytest.mark.parametrize(
    ("kind", "tokens", "added"),
    [("Q4_K", 256, {"matrices": 2, "activation": "silu"}), ("Q6_K", 128, {})],
)
def test_no_part_of_a_tile_spills(kind, tokens, added):
    config, _ = best_by_count(HOPPER, kind, 4 * tokens, 28672, 4096)
    assert config.tokens == 256 and not config.streamed
    config = config._replace(tokens=tokens)
    launch = launch_of(kind, config, tokens + 1, **added)
    assert launch.meta["TILE"].ragged
    assert compiled(launch).spilled == 0
