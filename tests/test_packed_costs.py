"""Tiles and programs of packed products on Hopper that are chosen by count."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.quant import packed_costs
from ferrum_triton.kernels.quant.mma_config import mma_heuristic
from ferrum_triton.kernels.quant.packed_config import PackedConfig, packed_tile
from ferrum_triton.kernels.quant.packed_costs import (
    MOST_SLICES,
    best_by_count,
    count_refusal,
    microseconds,
    mma_refusal,
    programs_of,
)
from ferrum_triton.kernels.quant.products import heuristic, products
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.quant.formats import FORMATS

HOPPER = gpu_of_arch("sm_90")


@given(
    tiles=st.integers(1, 500),
    blocks=st.integers(1, 120),
    num_sms=st.integers(1, 148),
    tokens=st.sampled_from((8, 16, 64, 256)),
    streamed=st.booleans(),
)
def test_programs_take_all_blocks(tiles, blocks, num_sms, tokens, streamed):
    found = programs_of(PackedConfig(tokens, streamed=streamed), tiles, blocks, num_sms)
    assert 1 <= found.count <= num_sms
    assert found.count * found.blocks >= tiles * blocks
    if not streamed:
        assert found.blocks == cdiv(tiles, found.count) * blocks
    if found.slices > 1:
        programs = found.count // tiles
        assert found.count % tiles == 0 and 2 <= programs <= blocks
        assert found.blocks == cdiv(blocks, programs)
        assert found.slices <= MOST_SLICES and tokens // found.slices >= 8
    if found.cut:
        assert found.blocks == cdiv(tiles * blocks, found.count)


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((64, 4096, 14336), (64, True)),
        ((64, 28672, 4096), (64, False)),
        ((128, 5120, 25600), (128, True)),
        ((128, 34816, 5120), (128, True)),  # 272 tiles: three turns of whole ones, or a cut
        ((256, 8192, 8192), (128, False)),
        ((512, 8192, 8192), (256, False)),
        ((1024, 57344, 8192), (256, False)),
        ((512, 512, 4096), None),  # cuBLAS fills the GPU, tiles do not
        ((2048, 2048, 2048), None),
        ((32, 14336, 4096), (32, False)),
        ((16, 5120, 25600), (16, True)),
        ((32, 4096, 4096), None),  # the plain kernel takes less
    ],
)
def test_tiles_are_those_that_take_least_by_count(shape, chosen):
    tokens, rows, weights = shape
    found = heuristic(HOPPER, "Q4_K", "many", tokens, rows, weights // 32)
    if chosen is None:
        assert found["path"] in ("mma", "decode")
    else:
        assert (found["tokens"], found["streamed"]) == chosen


@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "weights", "found"),
    [
        ("Q4_K", 64, 5120, 5120, True),  # three programs a tile
        ("Q4_K", 64, 14336, 4096, True),  # one tile a program
        ("Q4_0", 32, 14336, 4096, True),
        ("Q4_K", 64, 28672, 4096, False),  # a second tile for most
        ("Q4_K", 64, 51200, 5120, False),  # parts of several
        ("Q4_K", 32, 28672, 4096, False),  # two programs for an SM
        ("Q4_0", 64, 14336, 4096, False),  # offsets are taken off where weights are unpacked
        ("Q6_K", 64, 5120, 5120, False),
        ("Q4_K", 128, 5120, 5120, False),
    ],
)
def test_warpgroups_take_turns_where_a_program_has_one_tile_or_a_part(
    kind, tokens, rows, weights, found
):
    tile, _ = best_by_count(HOPPER, kind, tokens, rows, weights)
    assert tile.pingpong == found and (tile.span == 4 or not found)


@pytest.mark.parametrize(
    ("rows", "weights", "path"),
    [
        (4096, 14336, "packed"),  # 17.2 us, and 18.3 by the plain kernel
        (7168, 8192, "packed"),  # 17.1 and 18.1
        (5120, 5120, "mma"),  # 11.9 and 11.3
        (6144, 4096, "mma"),  # 12.6 and 10.2
        (4096, 4096, "mma"),  # 9.7 and 9.1
    ],
)
def test_turns_decide_between_the_kernels(rows, weights, path):
    assert heuristic(HOPPER, "Q4_0", "many", 32, rows, weights // 32)["path"] == path


def test_a_row_is_not_for_shapes_whose_waves_it_does_not_fill():
    """28672 rows are 224 tiles, 1.7 for an SM; 17408 are 136, of which four would be a wave."""
    whole = PackedConfig(64, 4, streamed=False, stages=3, x_stages=0, sums_offsets=True)
    assert not count_refusal(HOPPER, whole, "Q4_K", 64, 28672, 4096)
    assert "by count" in count_refusal(HOPPER, whole, "Q4_K", 64, 17408, 4096)
    # What was not fitted is not refused.
    assert not count_refusal(HOPPER, whole._replace(tokens=8), "Q4_K", 8, 17408, 4096)


def test_a_row_is_not_for_smaller_tiles_that_take_as_long():
    """By 288 tokens of 6144x4096 whole tiles of 128 and a part take what tiles cut anywhere do."""
    whole, _ = best_by_count(HOPPER, "Q4_K", 256, 6144, 4096)
    assert (whole.tokens, whole.streamed) == (128, False)
    assert not count_refusal(HOPPER, whole, "Q4_K", 256, 6144, 4096)
    assert "by count" in count_refusal(HOPPER, whole, "Q4_K", 288, 6144, 4096)


# Kind, tokens, rows, weights, programs for an SM, whether streamed, and microseconds on an H200
# (``bench.timing.Replay`` of ``gemm_quant`` under ``products.forced``, copies of 71162e4).
TIMED = [
    ("Q4_K", 16, 28672, 4096, 2, False, 24.40),
    ("Q4_K", 16, 57344, 8192, 2, False, 89.89),
    ("Q4_0", 16, 5120, 25600, 2, True, 30.34),
    ("Q4_K", 32, 14336, 4096, 1, False, 16.79),
    ("Q4_K", 32, 28672, 4096, 1, False, 31.02),  # two turns
    ("Q4_K", 32, 57344, 8192, 1, False, 118.97),  # four
    ("Q4_K", 32, 34816, 5120, 2, False, 49.88),  # eight tiles of the second turn are alone
    ("Q4_K", 32, 57344, 8192, 2, False, 108.12),
    ("Q4_K", 32, 5120, 25600, 2, True, 34.67),
    ("Q4_K", 32, 57344, 8192, 2, True, 100.67),
    ("Q4_0", 32, 28672, 4096, 2, False, 26.21),
    ("Q6_K", 32, 8192, 28672, 1, True, 65.17),
]


@pytest.mark.parametrize(("kind", "tokens", "rows", "weights", "ctas", "streamed", "us"), TIMED)
def test_few_tokens_take_what_is_counted(kind, tokens, rows, weights, ctas, streamed, us):
    config = PackedConfig(tokens, 2, streamed=streamed, ctas_per_sm=ctas)
    took = microseconds(HOPPER, config, FORMATS[kind], tokens, rows, weights)
    assert took == pytest.approx(us, rel=0.09)


def test_what_was_not_timed_is_not_counted():
    for kind, tokens in (("IQ4_NL", 32), ("Q6_K", 16)):
        assert best_by_count(HOPPER, kind, tokens, 14336, 4096) is None
        assert best_by_count(HOPPER, kind, 64, 14336, 4096)
    wide = mma_heuristic(HOPPER, "Q4_K", 32, 14336, 4096)._replace(rows=128)
    assert not mma_refusal(HOPPER, wide, "Q4_K", 32, 14336, 4096)


def test_the_plain_kernel_keeps_its_rows_where_packed_products_gain_little(monkeypatch):
    plain = mma_heuristic(HOPPER, "Q4_K", 32, 4096, 4096)
    assert not mma_refusal(HOPPER, plain, "Q4_K", 32, 4096, 4096)
    assert "by count" in mma_refusal(HOPPER, plain._replace(splits=1), "Q4_K", 32, 14336, 4096)
    assert not mma_refusal(gpu_of_arch("sm_80"), plain, "Q4_K", 32, 14336, 4096)
    # A product that is smaller than anything timed stays with it, whatever is counted.
    assert heuristic(HOPPER, "Q4_K", "many", 32, 1024, 24)["path"] == "mma"
    monkeypatch.setattr(packed_costs, "LEAST_WEIGHTS", 0)
    assert heuristic(HOPPER, "Q4_K", "many", 32, 1024, 24)["path"] == "packed"


def test_measured_rows_are_close_to_the_best_by_count():
    measured = [row for row in products.rows(HOPPER) if row.config["path"] == "packed"]
    measured = [row for row in measured if packed_tile(row.config).tokens >= 64]
    assert len(measured) > 50
    for row in measured:
        kind, _, tokens, rows, groups = row.shape
        shape = kind, tokens, rows, 32 * groups
        assert not count_refusal(HOPPER, packed_tile(row.config), *shape), shape
        if packed_tile(row.config).pingpong:
            continue  # which is not counted
        _, took = best_by_count(HOPPER, *shape)
        # What is published is of a card that has grown warm, and of programs one of which adds all.
        assert 0.7 * row.us < took < 1.05 * row.us, (shape, took, row.us)


def test_other_gpus_have_none():
    shapes = itertools.product(("sm_80", "sm_100", "gfx942"), ("Q4_K", "Q2_K"), (64, 1024))
    for arch, kind, tokens in shapes:
        gpu = gpu_of_arch(arch)
        assert best_by_count(gpu, kind, tokens, 4096, 4096) is None
        assert heuristic(gpu, kind, "many", tokens, 4096, 128)["path"] in ("mma", "decode")
