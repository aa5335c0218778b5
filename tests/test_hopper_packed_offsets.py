"""Offsets of packed weights on Hopper that are a product of their own, executed by the emulator."""

import itertools

import pytest
import torch

from ferrum_triton.kernels.hopper import packed_offsets
from ferrum_triton.kernels.quant.activations import GROUP, Order, arrange
from ferrum_triton.kernels.quant.fragments import (
    LARGEST_SCALE,
    codes_of,
    places_of,
    scaling_of,
)
from ferrum_triton.kernels.quant.packed_config import (
    ORDER,
    experts_refusal,
    has_offsets,
    packed_candidates,
    packed_fits,
    shared_bytes,
)
from ferrum_triton.quant import FORMATS
from tests.test_hopper_packed import (
    CONFIGS,
    HOPPER,
    KINDS,
    LIMITS,
    assert_every_mutant_fails,
    assert_values,
    emulate,
    error,
    gated,
    matrix,
    tokens,
    wanted,
)
from tests.test_quant_mma import halves_of_word, run_ptx, seeded, word_of

SUMMED = [config._replace(sums_offsets=True) for config in CONFIGS]
SMALL, JOINED = SUMMED[0], SUMMED[7]
OFFSET = [kind for kind in KINDS if has_offsets(FORMATS[kind])]


def test_formats_with_something_to_add_up():
    assert OFFSET == ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q4_Z"]
    for kind in set(KINDS) - set(OFFSET):
        assert "in common" in packed_fits(HOPPER, SMALL, kind, 16, 4096, 4096)
        assert not any(c.sums_offsets for c in packed_candidates(HOPPER, kind, 16, 4096, 4096))
    for kind in OFFSET:
        assert any(c.sums_offsets for c in packed_candidates(HOPPER, kind, 16, 4096, 4096))
    assert "sums" in experts_refusal(HOPPER, SMALL._replace(streamed=False), "Q4_K")


@pytest.mark.parametrize("kind", OFFSET)
def test_ptx_scales_codes(kind):
    """Codes as they are masked out, times a scale: as they are in float16, rounded once."""
    fmt, places = FORMATS[kind], places_of(FORMATS[kind])
    words = torch.randint(0, 1 << 32, (8, 2), generator=seeded(5)).tolist()
    more = torch.randint(0, 1 << 32, (8,), generator=seeded(6)).tolist()
    for pair, above in zip(words, more, strict=True):
        operands = pair + [above, above] * (fmt.bits == 5)
        masked = [word_of(each) for each in run_ptx(codes_of(fmt), 8, operands)]
        scale = word_of(torch.randn(1, generator=seeded(pair[0])).half().repeat(2))
        sizes = [
            word_of(*run_ptx(packed_offsets._times_asm(-(2 ** (10 - place))), 1, [scale]))
            for place in places
        ]
        for i, got in enumerate(run_ptx(scaling_of(fmt), 8, [*masked, scale, *sizes])):
            h, n, o = i >> 2, i >> 1 & 1, i & 1
            codes = [
                pair[h] >> 8 * byte + 4 * n & 15
                | (fmt.bits == 5 and (above >> 8 * byte + 2 * h + n & 1) << 4)
                for byte in (o, o + 2)
            ]
            want = torch.tensor(codes) * halves_of_word(scale).double()
            assert torch.equal(got, want.half())


def test_ptx_scales_and_offsets():
    """Of a word of two scales and two minimums, and one of d and m."""
    for seed in range(8):
        both = torch.randn(2, generator=seeded(seed)).half()
        bytes_of = torch.randint(0, 64, (4,), generator=seeded(seed))
        s = sum(int(byte) << 8 * i for i, byte in enumerate(bytes_of))
        d, m = both.double()
        for byte in (0, 2):
            (got,) = run_ptx(packed_offsets._scale_asm(byte), 1, [s, word_of(both)])
            assert torch.equal(got, (bytes_of[byte] * d).half().repeat(2))
        (got,) = run_ptx(packed_offsets._minimums_asm(), 1, [s, word_of(both)])
        assert torch.equal(got, (-4 * m * bytes_of[1::2]).half())
        for power in (-1024, -64, -32, -4, 4):
            (got,) = run_ptx(packed_offsets._times_asm(power), 1, [word_of(both)])
            assert torch.equal(got, (power * both.double()).half())


@pytest.mark.parametrize(
    ("kind", "config"), [*zip(OFFSET, itertools.cycle(SUMMED)), *(("Q4_K", c) for c in SUMMED)]
)
def test_values(kind, config):
    assert_values(kind, config)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "dtype"),
    [
        ("Q4_K", 1, 1, 256, torch.bfloat16),
        ("Q4_0", 9, 129, 352, torch.float16),
        ("Q5_1", 17, 8, 32, torch.float32),
        ("Q4_Z", 33, 200, 800, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("config", [SMALL, JOINED])
def test_odd_sizes(kind, m, n, k, dtype, config):
    assert_values(kind, config, m, n, k, dtype, scale=100)


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_Z"])
def test_activations_of_one_sign(kind):
    """Where scale · code and the offset nearly cancel: up to twice the error of the other way.

    Of Q4_K that is 9e-6 here: it rounds minimums too.
    """
    a, blocks = (tokens(12, 512).abs() + 1).bfloat16(), [matrix(kind, 130, 512)]
    y, _ = emulate(a, blocks, kind, SMALL)
    assert error(y, wanted(a, blocks, kind)) < 2e-5


@pytest.mark.parametrize(
    ("config", "kind", "activation"), [(SMALL, "Q4_K", "silu"), (JOINED, "Q5_0", "gelu_tanh")]
)
def test_gate_and_up(config, kind, activation):
    a, blocks = tokens(20, 512), [matrix(kind, 100, 512, seed=i) for i in range(2)]
    y, _ = emulate(a, blocks, kind, config, a.new_empty(20, 100), activation=activation)
    assert error(y, gated(a, blocks, kind, activation)) < 2 * LIMITS[a.dtype]


def test_three_matrices_and_what_is_added():
    a, blocks = tokens(20, 512), [matrix("Q4_K", n, 512, seed=n) for n in (200, 70, 136)]
    bias, residual = torch.randn(406), tokens(20, 406, seed=2)
    y, _ = emulate(a, blocks, "Q4_K", JOINED, bias=bias, residual=residual)
    want = wanted(a, blocks, "Q4_K") + bias.double() + residual.double()
    assert error(y, want) < LIMITS[a.dtype]


@pytest.mark.parametrize("below", [True, False])
def test_a_scale_that_is_too_large_is_seen(below):
    """Its row is no number, and the others are as they were."""
    scale = LARGEST_SCALE * (1 - 2**-11) if below else float(LARGEST_SCALE)
    a, blocks = tokens(12, 256, torch.bfloat16), matrix("Q4_0", 20, 256)
    d = torch.tensor([scale]).half().view(torch.uint8)
    blocks.view(20, -1, FORMATS["Q4_0"].block_bytes)[3, :, :2] = d
    y, _ = emulate(a, [blocks], "Q4_0", SMALL)
    if below:
        assert error(y, wanted(a, [blocks], "Q4_0")) < LIMITS[a.dtype]
    else:
        assert not y[:, 3].isfinite().any()
    rest = [i for i in range(20) if i != 3]
    assert error(y[:, rest], wanted(a, [blocks[rest]], "Q4_0")) < LIMITS[a.dtype]


@pytest.mark.parametrize("config", [SMALL, JOINED])
def test_sums_are_the_same_in_whatever_order_programs_run(config):
    a, blocks = tokens(20, 512), [matrix("Q4_K", 330, 512)]
    results = [emulate(a, blocks, "Q4_K", config, seed=seed)[0] for seed in range(3)]
    assert all(torch.equal(y, results[0]) for y in results)


def test_every_synchronisation_is_needed():
    """Of sums that come with a stage of weights while activations have a ring of their own."""
    assert assert_every_mutant_fails([SMALL, JOINED, JOINED._replace(pingpong=True)])


def test_sums_over_groups_are_exact_in_two_parts():
    """Eight of a block, then what rounding took off them, for every token; zeros past its end."""
    a = torch.randn(3, 544, generator=seeded(4)) * torch.tensor([1.0, 1e-4, 1e4])[:, None]
    a[0] = a[0].abs()  # sums that are much larger than what they are of
    x, sums, factor = (part[:3] for part in arrange(a, ORDER._replace(sums=GROUP))[:3])
    assert x.shape == (3, 768) and sums.shape == (3, 48)
    nearest, left = sums.double().view(3, 3, 2, 8).unbind(2)
    got = 4 * (nearest + left).flatten(1) * factor[:, None].double()
    want = torch.nn.functional.pad(a, (0, 224)).double().view(3, 24, 32).sum(-1)
    magnitude = a.double().abs().amax(1, keepdim=True)
    assert ((got - want).abs() <= 2**-18 * magnitude).all()
    largest = torch.full((1, 256), 4095.9)
    assert arrange(largest, Order(32, halves=4, sums=GROUP)).sums.isfinite().all()


def test_sums_take_a_little_shared_memory():
    more = [shared_bytes(c, FORMATS["Q4_K"]) for c in (SMALL, SMALL._replace(sums_offsets=False))]
    assert more[0] - more[1] == SMALL.stages * SMALL.tokens * 32
