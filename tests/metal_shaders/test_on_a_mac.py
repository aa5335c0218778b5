"""Shaders on the GPU of a Mac: the values, over what every other backend is given."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ferrum_triton import get_backend
from tests.harness import check_edge_values, check_matches_reference
from tests.metal_shaders.calls import SHADED, kinds_of, with_shader

pytestmark = pytest.mark.metal


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_matches_reference(op, data, seed):
    check_matches_reference(get_backend("metal"), op, data, seed, **with_shader(op))


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_edge_values(op, data, seed):
    check_edge_values(get_backend("metal"), op, data, seed, **kinds_of(op))
