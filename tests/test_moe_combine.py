"""Combining experts' outputs: sums over a token's slots, added to the residual and normalised."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ferrum_triton import get_backend
from ferrum_triton.testing import assert_close
from tests.test_moe import INF, NAN, both, generator, pair_shapes, run


@pytest.fixture
def backend(backend_name):
    return get_backend(backend_name)


@both
@given(**{**pair_shapes, "num_tokens": st.sampled_from([0, 1, 30])})
def test_combining_what_was_packed_gives_it_back(
    backend_name, num_tokens, top_k, num_experts, seed
):
    backend = get_backend(backend_name)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator(seed))
    pairs, packed_tokens, _ = run(backend, "moe_build_pairs_by_token", ids, num_experts)
    x = torch.randn(num_tokens, 20, generator=generator(seed))
    weights = torch.rand(num_tokens, top_k, generator=generator(seed + 1)).softmax(dim=-1)
    y = run(backend, "moe_combine", x[packed_tokens.long()], pairs, weights)
    torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)


@both
def test_dropped_pairs_add_nothing(backend):
    packed = torch.full((3, 5), NAN)
    packed[1] = 2.0
    pairs = torch.tensor([[-1, 1], [3, 1], [1, -7], [-1, 2**20]], dtype=torch.int32)
    weights = torch.tensor([[INF, 1.0], [NAN, 2.0], [3.0, NAN], [NAN, INF]])
    y = run(backend, "moe_combine", packed, pairs, weights)
    assert torch.equal(y, torch.tensor([2.0, 4.0, 6.0, 0.0])[:, None].expand(4, 5))


@both
@given(seed=st.integers(0, 2**31), top_k=st.integers(1, 8))
def test_sums_over_slots_are_one_combination(backend_name, seed, top_k):
    """weighted_sum is moe_combine of slots in place; the residual forms add to it."""
    backend = get_backend(backend_name)
    slots = torch.randn(6, top_k, 70, generator=generator(seed))
    weights = torch.rand(6, top_k, generator=generator(seed + 1))
    y = run(backend, "weighted_sum", slots, weights)
    pairs = torch.arange(6 * top_k, dtype=torch.int32).view(6, top_k)
    assert torch.equal(y, run(backend, "moe_combine", slots.view(-1, 70), pairs, weights))
    one = torch.nn.functional.one_hot(torch.full((6,), top_k - 1), top_k).float()
    assert torch.equal(run(backend, "weighted_sum", slots, one), slots[:, -1])
    stacked = run(backend, "weighted_sum", slots[2:3], weights[2:3])
    assert torch.equal(stacked, y[2:3])

    residual = torch.randn(6, 70, generator=generator(seed + 2)).to(backend.device)
    norm_weight = torch.rand(70, generator=generator(seed + 3)).to(backend.device)
    slots, weights = slots.to(backend.device), weights.to(backend.device)
    with_norm = residual.clone()
    normed = backend.weighted_sum_residual_norm(slots, weights, with_norm, norm_weight, 1e-5)
    updated = residual.clone()
    backend.weighted_sum_residual(slots, weights, updated)
    torch.testing.assert_close(updated, residual + y.to(backend.device))
    assert torch.equal(with_norm, updated)
    torch.testing.assert_close(normed, backend.rms_norm(updated, norm_weight, 1e-5))


@both
def test_the_residual_is_rounded_once(backend):
    slots = torch.randn(9, 1, 64, generator=generator(0)).bfloat16()
    residual = torch.randn(9, 64, generator=generator(1)).bfloat16()
    want = (residual.float() + slots[:, 0].float()).bfloat16()
    ones = torch.ones(9, 1, device=backend.device)
    updated = residual.to(backend.device)
    backend.weighted_sum_residual(slots.to(backend.device), ones, updated)
    assert torch.equal(updated.cpu(), want)


@both
def test_what_is_normalised_is_the_residual_as_it_is_stored(backend):
    """And it is rounded once: what a rounding of the sum over slots would lose is left of both."""
    slots = 100 * torch.randn(9, 3, 64, generator=generator(0)).half()
    weights = torch.rand(9, 3, generator=generator(1))
    total = (weights[..., None].double() * slots.double()).sum(1)
    norm_weight = torch.rand(64, generator=generator(2))
    for residual in (-total.half(), (50 * torch.randn(9, 64, generator=generator(3))).half()):
        pairs = slots.to(backend.device), weights.to(backend.device)
        updated, with_norm = (residual.to(backend.device, copy=True) for _ in range(2))
        backend.weighted_sum_residual(*pairs, updated)
        normed = backend.weighted_sum_residual_norm(
            *pairs, with_norm, norm_weight.to(backend.device), 0.0
        )
        assert_close(updated.cpu(), total + residual.double())
        assert torch.equal(updated, with_norm)
        stored = updated.cpu().double()
        want = stored * stored.square().mean(-1, keepdim=True).rsqrt() * norm_weight.double()
        error = (normed.cpu().double() - want).abs()
        # One rounding of the result, and far less of all before.
        assert (error <= (2**-11 + 1e-5) * want.abs() + 2**-24).all()
