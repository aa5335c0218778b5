"""Sampling: what may be chosen, how often, and that a seed decides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import InputError, get_backend
from ferrum_triton.runtime.sampling import Sampler
from tests.sampling_oracle import probabilities

CPU = get_backend("cpu")


def logits(seed, size=50):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 2


@given(seed=st.integers(0, 1000))
def test_greedy_is_the_argmax(seed):
    row = logits(seed)
    assert Sampler(CPU).choose(row) == int(row.argmax())
    assert Sampler(CPU, temperature=1.0, top_k=1, seed=seed).choose(row) == int(row.argmax())
    assert Sampler(CPU, temperature=1e-9, seed=seed).choose(row) == int(row.argmax())
    assert Sampler(CPU, temperature=1.0, top_p=1e-9, seed=seed).choose(row) == int(row.argmax())


@given(seed=st.integers(0, 1000), k=st.integers(1, 50), p=st.floats(0.05, 1.0))
def test_filters_keep_the_likeliest(seed, k, p):
    row = logits(seed)
    sampler = Sampler(CPU, temperature=0.7, top_k=k, top_p=p, seed=seed)
    kept = probabilities(row[0], temperature=0.7, top_k=k, top_p=p)
    drawn = {sampler.choose(row) for _ in range(20)}
    assert drawn <= set(kept.nonzero().flatten().tolist())
    # The smallest set that reaches p: without its least likely member it would not.
    full = torch.softmax(row[0] / 0.7, dim=0)
    among_k = full[full.topk(k).indices] / full[full.topk(k).indices].sum()
    count = int((kept > 0).sum())
    assert among_k.sort(descending=True).values[: count - 1].sum() < p + 1e-5


def test_a_seed_decides():
    rows = [logits(i) for i in range(40)]

    def draw(seed):
        sampler = Sampler(CPU, temperature=1.5, seed=seed)
        return [sampler.choose(row) for row in rows]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(2**62) != draw(2**62 + 1)


def test_choices_are_those_of_the_ops():
    """The n-th choice is sample_rows of the n-th number of the seed's stream."""
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    sampler = Sampler(CPU, **filters, seed=5)
    for step in range(30):
        row = logits(step)
        u = CPU.uniform_rows(torch.tensor([5]), torch.tensor([step]))
        settings = {name: torch.tensor([value]) for name, value in filters.items()}
        assert sampler.choose(row) == int(CPU.sample_rows(row, u, **settings))


def test_frequencies_follow_the_distribution():
    filters = {"temperature": 1.3, "top_k": 6, "top_p": 0.95}
    sampler = Sampler(CPU, **filters, seed=3)
    row = logits(7, size=12)
    want = probabilities(row[0], **filters)
    counts = torch.zeros(12)
    n = 1_500
    for _ in range(n):
        counts[sampler.choose(row)] += 1
    # Five standard deviations of a binomial count.
    bound = 5 * (want * (1 - want) / n).sqrt() + 1e-9
    assert ((counts / n - want).abs() <= bound).all()


def test_nan_and_infinities_do_no_harm():
    row = torch.tensor([[1.0, float("nan"), float("-inf"), 2.0]])
    sampler = Sampler(CPU, temperature=1.0)
    assert {sampler.choose(row) for _ in range(50)} <= {0, 3}
    assert sampler.choose(torch.full((1, 4), float("nan"))) == 0
    assert sampler.choose(torch.tensor([[0.0, float("inf"), 1.0]])) == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 2),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value):
    with pytest.raises(InputError, match=argument):
        Sampler(CPU, **{argument: value})
