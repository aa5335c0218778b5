"""Values in the emulator: Triton's arithmetic, its tuples and classes, memory, assembly."""

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.experimental.gluon import language as gl

from ferrum_triton.gluon_emulator import Misuse, OutOfBounds, run, twin_of
from ferrum_triton.kernels import interpreter
from tests import gluon_arithmetic as kernels
from tests.gluon_kernels import translate

BLOCK = 64


def both(kernel, make):
    """What the emulator computes, and what Triton's interpreter does."""
    x, results = make(), []
    for go in (run, interpreter.run):
        y = torch.zeros(64 * BLOCK, dtype=torch.int64 if x.dtype == torch.int32 else torch.float32)
        go(kernel, (1,), (y, x), {"BLOCK": BLOCK})
        results.append(y.view(64, BLOCK))
    assert results[1].any(1).sum() > 30
    return results


def test_integers_are_computed_as_triton_does():
    def make():
        x = torch.randint(-(2**31), 2**31 - 1, (2 * BLOCK,)).int()
        x[:20] = torch.arange(-10, 10)
        x[BLOCK:][:40] = torch.randint(1, 9, (40,)).int()
        return torch.where(x == 0, 3, x)

    ours, tritons = both(kernels.integers, make)
    assert torch.equal(ours, tritons)


def test_floats_are_computed_as_triton_does():
    ours, tritons = both(kernels.floats, lambda: torch.randn(2 * BLOCK))
    torch.testing.assert_close(ours, tritons, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_blocks_keep_their_elements_through_tuples_classes_and_shapes():
    x, y = torch.randn(32, 40), torch.full((64, 48), torch.nan)
    args = kernels.Matrix(y, y.stride(0)), kernels.Matrix(x, x.stride(0))
    run(kernels.copied, 1, args, {"SIZE": 32})
    translate(kernels.copied, args, {"SIZE": 32, "FACTOR": 2})
    assert torch.equal(y[:32, :32], 2 * x[:, :32])
    assert torch.equal(y[32:, :32], 2 * x[:, :32])
    assert y[:, 32:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "known"),
    [
        (gl.bfloat16, torch.bfloat16),
        (gl.float16, torch.float16),
        (gl.float8e4nv, torch.float8_e4m3fn),
        (gl.float8e5, torch.float8_e5m2),
    ],
)
def test_narrow_floats_are_rounded_and_stay_finite_in_8_bits(dtype, known):
    x = torch.randn(BLOCK) * torch.logspace(-6, 3, BLOCK)
    x[-3:] = torch.tensor([-7e4, 7e4, torch.inf])
    y = torch.empty_like(x)
    run(kernels.rounded, 1, (y, x), {"BLOCK": BLOCK, "DTYPE": dtype})
    most = torch.finfo(known).max if known.itemsize == 1 else torch.inf
    assert torch.equal(y, x.clamp(-most, most).to(known).float())


def test_atomics_count_every_lane_and_masked_lanes_are_undefined():
    count, y, x = torch.zeros(3).int(), torch.empty(3, BLOCK), torch.randn(BLOCK)
    run(kernels.counted_and_masked, 1, (count, y, x), {"BLOCK": BLOCK})
    translate(kernels.counted_and_masked, (count, y, x), {"BLOCK": BLOCK})
    lanes = torch.arange(BLOCK - 2)
    assert count.tolist() == [(lanes % 3 == k).sum() for k in range(3)]
    assert torch.equal(y[0, :-2].long(), lanes // 3)
    assert torch.equal(y[1:, :5], x[:5].expand(2, 5))
    assert y[1, 5:].isnan().all()
    assert (y[2, 5:] == 7).all()


def test_other_functions_of_the_language():
    x = torch.randn(64)
    y, n = torch.full((7, 32), torch.nan), torch.tensor([5, 0, 0]).int()
    args = (y, n, torch.tensor([x.data_ptr() + 32 * 4]), x)
    run(kernels.uses, 1, args, {})
    translate(kernels.uses, args, {})
    lanes, x, other = torch.arange(32), x[:32], x[32:]
    square = x.view(4, 8)
    torch.testing.assert_close(y[0], x.sum() + lanes.clamp(3, 7) + 2)
    assert torch.equal(y[1].view(4, 8), square - square.amax(1, keepdim=True))
    assert torch.equal(y[2:4], x.min().expand(2, 32))
    assert torch.equal(y[4:], torch.stack((x.flip(0), other, -x)))
    assert n.tolist() == [9, 9, 0x03020100]


# What is raised for each misuse of values.
MISUSES = {
    "ranks differ": "have different ranks",
    "shapes differ": r"shapes \(32,\) and \(64,\) do not broadcast",
    "truths added": "of two int1",
    "bits of floats": "bits of integers alone",
    "division of floats": "// of fp32",
    "moved by a float": "a pointer is moved by fp32",
    "mask of integers": "the mask is int32",
    "between elements": "is not a multiple of 4",
    "nowhere": "lies in no tensor",
    "load of a number": "of int32, which is no pointer",
    "reshaped to more": r"shape \(32,\) is not reshaped to \[64\]",
    "exponential of integers": "gl.exp2 at .* of int32",
    "stored shape": r"buf has shape \(4, 8\), what is stored at .* \(32,\)",
    "stored type": "line_buf holds fp16; what is stored at .* is fp32",
    "order of three": r"buf.permute\(\[0, 2, 1\]\) at .* of 2 dimensions",
    "slice too long": r"buf.slice\(2, 4, dim=0\) at .* of a dimension of 4",
    "reinterpreted as more": "does not fit",
    "static assertion": "not five",
    "block as condition": "is taken for a condition",
    "block as index": "is taken for an index",
    "indexed by a number": "indexed by None and : alone",
    "unknown function": "fp4_to_fp at .* is not emulated",
    "unknown rounding": "rounding 'rtz' is not emulated",
    "specialised twice": "inside of a partition",
    "copies unwaited": "nobody has waited for cp.async",
}


@pytest.mark.parametrize("fault", MISUSES)
def test_misuse_of_values_is_refused(fault):
    with pytest.raises((Misuse, OutOfBounds), match=MISUSES[fault]):
        run(kernels.misused, 1, (torch.randn(32),), {"FAULT": fault})


def test_tiles_end_where_their_tensor_does():
    y = torch.zeros(10, 20)
    layout = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float32)
    run(kernels.described_on_the_device, 1, (y, 10, 20), {"SHARED": layout})
    translate(kernels.described_on_the_device, (y, 10, 20), {"SHARED": layout})
    expected = torch.zeros(10, 20)
    expected[1:, :12] = 1
    assert torch.equal(y, expected)


def test_assembly_runs_by_the_twin_of_its_text_or_of_its_function():
    x, y = torch.randn(BLOCK), torch.empty(BLOCK)
    args = (kernels.squared_by_assembly, 1, (y, x), {"BLOCK": BLOCK})
    with pytest.raises(Misuse, match="has no twin"):
        run(*args)
    run(*args, assembly={" mul.f32  $0, $1, $1;": lambda x: x * x})
    assert torch.equal(y, x * x)
    run(*args, assembly={kernels.squared: lambda x: -x})
    assert torch.equal(y, -x)
    twin_of(kernels.squared)(lambda x: x + 1)
    run(*args)
    assert torch.equal(y, x + 1)
    run(*args, assembly={kernels.squared: lambda x: x + 2})
    assert torch.equal(y, x + 2)


def test_a_constant_assigned_to_a_variable_is_none_any_more():
    args = (torch.zeros(BLOCK),), {"BLOCK": BLOCK}
    with pytest.raises(Misuse, match=r"argument BLOCK of squared_by_assembly .* gl\.constexpr"):
        run(kernels.constant_lost, 1, *args)
    with pytest.raises(CompilationError):
        translate(kernels.constant_lost, *args)


def test_arguments_that_are_lacking_or_left_over_are_named():
    x = torch.zeros(BLOCK)
    with pytest.raises(Misuse, match="rounded lacks its argument DTYPE"):
        run(kernels.rounded, 1, (x, x), {"BLOCK": BLOCK})
    with pytest.raises(Misuse, match=r"left over are 1 arguments and \['SIZE'\]"):
        run(kernels.constant_lost, 1, (x, x), {"BLOCK": BLOCK, "SIZE": 3})
    with pytest.raises(Misuse, match="x_ptr is on meta"):
        run(kernels.rounded, 1, (x, x.to("meta")), {"BLOCK": BLOCK, "DTYPE": gl.float16})
