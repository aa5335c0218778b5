"""Grids and the integers on them: the nearest, and GPTQ's; what is stored is what was chosen."""

import pytest
import torch

from ferrum_triton import InputError
from ferrum_triton.quant import FORMATS, QuantizedTensor, load_compressed_tensors, quantize_blocks
from ferrum_triton.quant.codings import IntCoding, block_coding, rounded
from ferrum_triton.quant.gptq import DAMPING, curvature, gptq
from ferrum_triton.quant.integers import unpacked
from ferrum_triton.quant.rounding import SHARES, packed_words, range_grid, symmetric_grid

CODINGS = [
    *(IntCoding(4, size) for size in (32, 128)),
    IntCoding(8, 64),
    *map(block_coding, ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K")),
]
by_coding = pytest.mark.parametrize("coding", CODINGS, ids=lambda c: f"{c.name}-{c.columns}")


def drawn(seed, rows=24, columns=256, tokens=512):
    """A matrix, and inputs whose columns are of unlike size and resemble each other."""
    make = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(rows, columns, generator=make)
    mix = torch.randn(columns, columns, generator=make) * torch.rand(columns, generator=make) ** 3
    return weight, torch.randn(tokens, columns, generator=make) @ mix


def squared(x, error):
    """The squared error of a layer's outputs, in float64."""
    return (x.double() @ error.double().T).square().sum().item()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_symmetric_grid_is_the_best_of_its_steps(bits):
    """Each group by itself, in float64, one step after the other."""
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(bits)) * 0.02
    weight[2, 32:64] = 0
    weight[3, 40] = 1.0  # far from the others of its group
    grid = symmetric_grid(weight, bits, 32)
    q, middle = grid.nearest(weight), 2 ** (bits - 1)
    assert q.dtype == torch.uint8 and q.int().max() < 2**bits and grid.step.shape == (5, 3)
    for row in range(5):
        for group in range(3):
            columns = slice(32 * group, 32 * group + 32)
            w = weight[row, columns].double()
            errors = []
            for share in SHARES:
                step = (w.abs().max() * share / middle).bfloat16().double()
                if step == 0:
                    continue
                nearest = (w / step).round().clamp(-middle, middle - 1)
                errors.append((nearest * step - w).square().sum().item())
            got = grid.step[row, group].double() * (q[row, columns].double() - middle)
            error = (got - w).square().sum().item()
            assert error <= min(errors, default=0) * (1 + 1e-5) + 1e-18
    assert torch.equal(grid.step.half().float(), grid.step)
    assert torch.equal(grid.step.bfloat16(), grid.step)


def test_grids_heed_what_columns_matter():
    weight, _ = drawn(1)
    importance = torch.rand(256) ** 8
    for choose in (symmetric_grid, range_grid):
        plain, weighed = (choose(weight, 4, 64, given) for given in (None, importance))
        errors = [(g.decode(g.nearest(weight)) - weight).square() for g in (plain, weighed)]
        assert (errors[1] * importance).sum() < (errors[0] * importance).sum()
        assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K"])
def test_blocks_are_nearer_than_plain_rounding_makes_them(kind):
    weight, _ = drawn(2)
    plain = QuantizedTensor(quantize_blocks(weight, FORMATS[kind]), kind).dequantize()
    q, grid = rounded(weight, block_coding(kind))
    assert (grid.decode(q) - weight).norm() < (plain - weight).norm()


@by_coding
def test_gptq_brings_outputs_nearer_than_rounding(coding):
    weight, x = drawn(3)
    seen = curvature(x.T @ x)
    near, near_grid = rounded(weight, coding)
    q, grid = rounded(weight, coding, seen)
    assert q.dtype == torch.uint8 and q.int().max() <= grid.largest
    errors = [squared(x, g.decode(n) - weight) for n, g in ((q, grid), (near, near_grid))]
    assert errors[0] < 0.75 * errors[1]
    # The same on one grid: it is the integers that do it.
    assert errors[0] < 0.75 * squared(x, grid.decode(grid.nearest(weight)) - weight)


@by_coding
@pytest.mark.parametrize("calibrated", [False, True])
def test_what_is_stored_decodes_to_what_was_chosen(coding, calibrated):
    weight, x = drawn(4, rows=21)
    weight[3, 32:64] = 0
    weight[5] = 0
    q, grid = rounded(weight, coding, curvature(x.T @ x) if calibrated else None)
    parts = coding.stored(q, grid)
    if isinstance(coding, IntCoding):
        found = load_compressed_tensors(
            parts["weight_packed"],
            parts["weight_scale"],
            num_columns=256,
            bits=coding.bits,
        )
        assert parts["weight_shape"].tolist() == [21, 256]
    else:
        found = QuantizedTensor(parts["weight"], coding.name)
    assert isinstance(found, QuantizedTensor)  # no format was too small for it
    assert torch.equal(found.dequantize(), grid.decode(q))


def test_gptq_is_one_column_after_the_other():
    """The textbook's loop, whole columns at a time in float64, on blocks and their rest alike."""
    weight, x = drawn(5, rows=7, columns=160)
    hessian = x.T @ x
    grid = symmetric_grid(weight, 4, 32)
    got = grid.decode(gptq(weight, curvature(hessian), grid)).double()

    damped = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(160)
    order = hessian.diagonal().argsort(descending=True)
    w, left = weight.double(), order.tolist()
    want = torch.empty_like(w)
    inverse = damped.inverse()
    while left:
        j = left.pop(0)
        step, low = (part[:, j // 32].double() for part in (grid.step, grid.low))
        want[:, j] = ((w[:, j] - low) / step).round().clamp(0, 15) * step + low
        error = (w[:, j] - want[:, j]) / inverse[j, j]
        w = w - error[:, None] * inverse[j]
        inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
    # Where two integers are as near, float32 may take the other one, and later ones follow it.
    errors = [squared(x, found - weight) for found in (got, want)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert (got == want).double().mean() > 0.9


def test_columns_that_no_input_reached_are_rounded_to_the_nearest():
    weight, x = drawn(6)
    x[:, 40:50] = 0
    grid = symmetric_grid(weight, 4, 32)
    q = gptq(weight, curvature(x.T @ x), grid)
    assert torch.equal(q[:, 40:50], grid.nearest(weight)[:, 40:50])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h * torch.nan, "hessian is not finite"),
        (lambda h: -h, "hessian is not positive"),
        (lambda h: h * 0, "hessian is not positive"),
        (lambda h: h - 2 * h.diagonal().mean() * torch.eye(256), "hessian is not positive"),
    ],
)
def test_a_hessian_that_is_none_is_refused(change, message):
    _, x = drawn(7)
    with pytest.raises(InputError, match=message):
        curvature(change(x.T @ x))


@pytest.mark.parametrize(("bits", "columns"), [(4, 8), (4, 13), (8, 4), (8, 7)])
def test_words_are_those_that_are_unpacked(bits, columns):
    q = torch.randint(2**bits, (3, columns), dtype=torch.uint8)
    words = packed_words(q, bits)
    assert words.dtype == torch.int32
    assert torch.equal(unpacked(words, bits)[:, :columns].to(torch.uint8), q)
