"""Shaders on the GPU of a Mac: the values, over what every other backend is given."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ferrum_triton import get_backend
from ferrum_triton.backends import metal
from ferrum_triton.registry import OPS
from tests.harness import check_edge_values, check_matches_reference

pytestmark = pytest.mark.metal

metal.load_shaders()
SHADED = [pytest.param(op, id=name) for name, op in OPS.items() if "metal" in op.impls]


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_matches_reference(op, data, seed):
    check_matches_reference(get_backend("metal"), op, data, seed)


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_edge_values(op, data, seed):
    check_edge_values(get_backend("metal"), op, data, seed)
