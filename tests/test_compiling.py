"""What CI compiles of all pairs that a test could."""

import pytest

from tests.compiling import in_turns


@pytest.mark.parametrize(("num_kinds", "num_others"), [(7, 3), (2, 3), (3, 1)])
def test_each_is_met_once_and_every_pair_is_there(num_kinds, num_others):
    params = in_turns(range(num_kinds), [(f"tile {i}",) for i in range(num_others)])
    assert len({param.values for param in params}) == len(params) == num_kinds * num_others
    asked = [param.values for param in params if not param.marks]
    assert [kind for kind, _ in asked] == list(range(num_kinds))
    assert len({other for _, other in asked}) == min(num_kinds, num_others)
