"""What comparisons of results let pass, and what not."""

import pytest
import torch

from ferrum_triton.testing import assert_close


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_one_code_may_be_a_step_away_and_no_more(dtype):
    codes = torch.arange(-100, 100).to(torch.int8).view(dtype)
    if dtype != torch.int8:
        codes = codes.float().nan_to_num(0.0).to(dtype)
    one, two, far = codes.clone(), codes.clone(), codes.clone()
    one.view(torch.int8)[7] += 1
    two.view(torch.int8)[7:9] += 1
    far.view(torch.int8)[7] += 2
    assert_close(one, codes)
    for wrong in (two, far):
        with pytest.raises(AssertionError):
            assert_close(wrong, codes)


def test_a_nan_is_no_neighbour_of_the_largest_code():
    largest, nan = (torch.full((4,), x).to(torch.float8_e4m3fn) for x in (448.0, float("nan")))
    with pytest.raises(AssertionError):
        assert_close(nan[:1], largest[:1])
