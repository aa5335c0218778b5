"""The interpreter's shortcuts against Triton's own ways, by the bit, and in their types."""

import contextlib
import itertools
import operator
import types

import hypothesis.strategies as st
import numpy as np
import pytest
import triton.language as tl
from hypothesis import given, settings
from triton.runtime import interpreter as tritons
from triton.runtime.interpreter import TensorHandle

from ferrum_triton.kernels import interpreter, shortcuts

TYPES = tuple(shortcuts.NUMPY)
ALL_TYPES = (*TYPES, tl.bfloat16)
NUMBERS = (0, 1, 3, -2, 200, -(2**31), 2**31, 2**40, 2**63, 0.0, -0.0, 0.3, -1e30, 1e-300)
NUMBERS += (float("inf"), float("nan"), True, False)
OPERATORS = tuple(
    getattr(operator, name, None) or getattr(operator, f"{name}_")
    for name in (*shortcuts.ARITHMETIC, *shortcuts.COMPARISONS, "truediv", "floordiv", "mod")
)
SHAPES = (None, (8,), (4, 1), (4, 8))

pytestmark = pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
each_operator = pytest.mark.parametrize("compute", OPERATORS, ids=lambda each: each.__name__)
once_or_twice = settings(max_examples=max(1, settings.default.max_examples // 10))
seeds = given(seed=st.integers(0, 2**31))


@contextlib.contextmanager
def tritons_own():
    """The language as Triton interprets it."""
    scope = tritons._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


def shape_of(pick):
    return SHAPES[pick.integers(len(SHAPES))]


def draw(pick, dtype, shape=None):
    """A tensor of a type: of large numbers, and of small ones that may be shifted by."""
    kind, size = shortcuts.NUMPY.get(dtype, np.dtype(np.uint16)), shape or (1,)
    if kind.kind == "b":
        value = pick.integers(0, 2, size).astype(bool)
    elif kind.kind == "f":
        value = (pick.standard_normal(size) * 10.0 ** pick.integers(-3, 4, size)).astype(kind)
        value.flat[0] = pick.choice([np.nan, np.inf, 0.0, -0.0, 1.0])
    else:
        info = np.iinfo(kind)
        value = pick.integers(info.min, info.max, size, dtype=kind, endpoint=True)
        value.flat[-2:] = pick.integers(1, 7)
    type_ = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(TensorHandle(value, dtype.scalar), type_)


def outcome(compute, args):
    """What a call gives, or that it is refused."""
    try:
        made = compute(*args)
    except Exception:  # of whatever kind: kernels that are refused are never launched
        return None
    return made


def assert_as_tritons(calls):
    """``calls`` are functions and their arguments."""
    with tritons_own():
        wants = [outcome(*call) for call in calls]
    with interpreter.interpreted_language():
        gots = [outcome(*call) for call in calls]
    assert sum(want is not None for want in wants) >= len(wants) / 8
    for (compute, args), got, want in zip(calls, gots, wants, strict=True):
        what = (compute, [getattr(arg, "type", arg) for arg in args])
        assert (got is None) == (want is None), what
        if want is None:
            continue
        assert got.type == want.type and got.dtype == want.dtype, what
        assert list(map(int, got.shape)) == list(map(int, want.shape)), what
        assert int(got.numel) == int(want.numel), what
        ours, theirs = got.handle.data, want.handle.data
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
        np.testing.assert_array_equal(ours, theirs, str(what), strict=True)
        if ours.dtype.kind == "f":  # whose zeros are equal whatever their sign
            ours, theirs = (np.signbit(data[~np.isnan(data)]) for data in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs, str(what))


@each_operator
@once_or_twice
@seeds
def test_operators_of_tensors(compute, seed):
    pick = np.random.default_rng(seed)
    assert_as_tritons(
        [
            (compute, tuple(draw(pick, dtype, shape_of(pick)) for dtype in pair))
            for pair in itertools.product(ALL_TYPES, ALL_TYPES)
        ]
    )


@each_operator
@once_or_twice
@seeds
def test_operators_of_tensors_and_numbers(compute, seed):
    pick = np.random.default_rng(seed)
    calls = []
    shortcuts._meeting_number.cache_clear()  # 0.0 and -0.0 are one to it: either may be the first
    for dtype in ALL_TYPES:
        for number in pick.permutation(np.array(NUMBERS, dtype=object)):
            x = draw(pick, dtype, shape_of(pick))
            calls += [
                (compute, (x, number)),
                (compute, (number, x)),
                (compute, (x, tl.constexpr(number))),
            ]
    assert_as_tritons(calls)


@once_or_twice
@seeds
def test_offsets_of_pointers(seed):
    pick = np.random.default_rng(seed)
    calls = []
    for element in ALL_TYPES:
        for offset in TYPES:
            for shapes in ((None, None), ((8,), None), (None, (8,)), ((4, 1), (4, 8))):
                at = draw(pick, tl.uint64, shapes[0])
                pointer = tl.pointer_type(element)
                at.handle.dtype = at.dtype = pointer
                at.type = tl.block_type(pointer, list(shapes[0])) if shapes[0] else pointer
                by = draw(pick, offset, shapes[1])
                calls += [
                    (operator.add, (at, by)),
                    (operator.add, (by, at)),
                    (operator.add, (at, 3)),
                ]
    assert_as_tritons(calls)


@once_or_twice
@seeds
def test_casts_and_choices(seed):
    pick = np.random.default_rng(seed)
    calls = []
    for dtype in TYPES:
        for other in TYPES:
            shape, second = shape_of(pick), shape_of(pick)
            x, y = draw(pick, dtype, shape), draw(pick, other, second)
            if dtype.is_floating():  # no integer is like these
                x.handle.data = np.nan_to_num(x.handle.data, posinf=1.0).clip(0, 99)
            condition = draw(pick, tl.int1, shape_of(pick))
            number = NUMBERS[pick.integers(len(NUMBERS))]
            calls += [
                (lambda x, to: x.to(to), (x, other)),
                (lambda x, to: x.to(to, bitcast=True), (x, other)),
                (lambda *args: tl.where(*args), (condition, x, y)),
                (lambda *args: tl.where(*args), (condition, x, number)),
                (lambda *args: tl.where(*args), (condition, number, 7)),
                (lambda to, value: tl.full((4, 8), value, to), (other, number)),
                (lambda x: x[None, :], (x,)),
                (lambda x, y: tl.broadcast(x, y)[0], (x, y)),
                (lambda x: -x, (x,)),
                (lambda x: ~x, (x,)),
            ]
    assert_as_tritons(calls)
