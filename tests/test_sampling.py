"""Sampling: what may be chosen, how often, and that a seed and a position decide."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import InputError, get_backend
from ferrum_triton.runtime.graph import Graph
from ferrum_triton.runtime.sampling import GREEDY, Sampler, Sampling, change_logits
from tests.sampling_oracle import probabilities

CPU = get_backend("cpu")
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def logits(seed, size=50, rows=1):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row, count=1, **settings):
    """What one request chooses after the same logits at positions 0, 1, ..., in one batch."""
    sampler = Sampler(CPU, count)
    sampler.set([Sampling(**settings)] * count)
    positions = torch.arange(count, dtype=torch.int32)
    return sampler.choose(row.expand(count, -1), positions).tolist()


@given(seed=st.integers(0, 1000))
def test_greedy_is_the_argmax(seed):
    row = logits(seed)
    best = [int(row.argmax())]
    assert draws(row) == best
    assert draws(row, temperature=1.0, top_k=1, seed=seed) == best
    assert draws(row, temperature=1e-9, seed=seed) == best
    assert draws(row, temperature=1.0, top_p=1e-9, seed=seed) == best
    assert draws(row, temperature=1.0, min_p=1.0, seed=seed) == best
    unset = Sampler(CPU)
    position = torch.zeros(1, dtype=torch.int32)
    assert unset.choose(row, position, greedy=True).tolist() == best


@given(seed=st.integers(0, 1000), k=st.integers(1, 50), p=st.floats(0.05, 1.0))
def test_filters_keep_the_likeliest(seed, k, p):
    row = logits(seed)
    kept = probabilities(row[0], temperature=0.7, top_k=k, top_p=p)
    drawn = set(draws(row, 20, temperature=0.7, top_k=k, top_p=p, seed=seed))
    assert drawn <= set(kept.nonzero().flatten().tolist())
    # The smallest set that reaches p: without its least likely member it would not.
    full = torch.softmax(row[0] / 0.7, dim=0)
    among_k = full[full.topk(k).indices] / full[full.topk(k).indices].sum()
    count = int((kept > 0).sum())
    assert among_k.sort(descending=True).values[: count - 1].sum() < p + 1e-5


@given(seed=st.integers(0, 1000), min_p=st.floats(0.01, 0.99))
def test_min_p_is_relative_to_the_likeliest(seed, min_p):
    row = logits(seed)
    weights = torch.softmax(row[0] / 0.9, dim=0)
    kept = (weights >= min_p * weights.max() * (1 - 1e-5)).nonzero().flatten().tolist()
    assert set(draws(row, 20, temperature=0.9, min_p=min_p, seed=seed)) <= set(kept)


def test_a_seed_decides():
    row = logits(0)

    def draw(seed):
        return draws(row, 40, temperature=1.5, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(2**62) != draw(2**62 + 1)
    assert len(set(draw(1))) > 1  # and so does the position


SETTINGS = [
    Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5),
    GREEDY,
    Sampling(temperature=1.4, min_p=0.1, seed=2**63 - 1),
    Sampling(temperature=0.6, top_k=2**40, seed=5),
]


@pytest.mark.parametrize("name", BACKENDS)
def test_choices_are_those_of_the_ops(name):
    """The choice at a position is sample_rows of that number of the seed's stream."""
    backend = get_backend(name)
    sampler = Sampler(backend, len(SETTINGS))
    sampler.set(SETTINGS)
    for position in range(30):
        rows = logits(position, rows=4)
        positions = torch.tensor([position, 0, position + 7, 3], dtype=torch.int32)
        on = {"device": backend.device}
        chosen = sampler.choose(rows.to(**on), positions.to(**on))
        assert chosen.dtype == torch.int32 and chosen.device.type == backend.device.type
        u = CPU.uniform_rows(torch.tensor([s.seed for s in SETTINGS]), positions)
        want = CPU.sample_rows(
            rows,
            u,
            torch.tensor([s.temperature for s in SETTINGS]),
            torch.tensor([min(s.top_k, 50) for s in SETTINGS]),
            torch.tensor([s.top_p for s in SETTINGS]),
            torch.tensor([s.min_p for s in SETTINGS]),
        )
        assert chosen.tolist() == want.tolist()


def test_rows_are_chosen_as_they_are_alone():
    """Whatever the other rows' settings, and however many of the sampler's rows there are."""
    rows, positions = logits(3, rows=4), torch.tensor([4, 0, 9, 2], dtype=torch.int32)
    together = Sampler(CPU, 6)
    together.set([Sampling(temperature=2.0, seed=77)] * 6)
    together.set(SETTINGS)
    chosen = together.choose(rows, positions).tolist()
    for i, setting in enumerate(SETTINGS):
        alone = Sampler(CPU)
        alone.set([setting])
        assert alone.choose(rows[i : i + 1], positions[i : i + 1]).tolist() == [chosen[i]]
    assert together.choose(rows[:2], positions[:2]).tolist() == chosen[:2]
    # Settings of the first rows leave those of the others.
    together.set(SETTINGS[1:2])
    assert together.choose(rows, positions).tolist() == [int(rows[0].argmax()), *chosen[1:]]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_choice_follows_settings_and_positions(name):
    backend = get_backend(name)
    sampler, graph = Sampler(backend, 4), Graph(backend.device)
    rows = logits(1, rows=4).to(backend.device)
    positions = torch.zeros(4, dtype=torch.int32, device=backend.device)
    captured = graph.capture("choose", lambda: sampler.choose(rows, positions))
    for position, settings in ((0, SETTINGS), (5, SETTINGS[::-1]), (9, SETTINGS)):
        sampler.set(settings)
        positions.fill_(position)
        graph.replay("choose")
        assert captured.tolist() == sampler.choose(rows, positions).tolist()


def test_frequencies_follow_the_distribution():
    filters = {"temperature": 1.3, "top_k": 6, "top_p": 0.95}
    row = logits(7, size=12)
    want = probabilities(row[0], **filters)
    n = 1_500
    counts = torch.tensor(draws(row, n, **filters, seed=3)).bincount(minlength=12)
    # Five standard deviations of a binomial count.
    bound = 5 * (want * (1 - want) / n).sqrt() + 1e-9
    assert ((counts / n - want).abs() <= bound).all()


def test_nan_and_infinities_do_no_harm():
    row = torch.tensor([[1.0, float("nan"), float("-inf"), 2.0]])
    assert set(draws(row, 50, temperature=1.0)) == {0, 3}
    assert draws(torch.full((1, 4), float("nan")), temperature=1.0) == [0]
    assert draws(torch.tensor([[0.0, float("inf"), 1.0]]), temperature=1.0) == [1]


BIASES = st.dictionaries(st.integers(0, 11), st.floats(-5, 5) | st.just(-math.inf), max_size=4)
REQUESTS = st.tuples(BIASES, st.sampled_from([1.0, 0.5, 1.3]), st.lists(st.integers(0, 11)))


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_changed_logits_are_what_each_request_asks(requests, seed):
    """First what is added, then what is divided or multiplied by, once for each token listed."""
    rows = logits(seed, size=12, rows=len(requests))
    want = rows.double()
    for row, (bias, penalty, ids) in zip(want, requests, strict=True):
        for token, added in bias.items():
            row[token] += added
        for token in set(ids):
            row[token] *= 1 / penalty if row[token] > 0 else penalty
    settings = [Sampling(logit_bias=bias, repetition_penalty=p) for bias, p, _ in requests]
    got = rows.clone()
    change_logits(CPU, got, settings, [ids for *_, ids in requests])
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    plain = [i for i, s in enumerate(settings) if not s.changes_logits]
    assert torch.equal(got[plain], rows[plain])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_of_any_dtype_and_device_are_changed_alike(name, dtype):
    backend = get_backend(name)
    settings = [
        Sampling(logit_bias={3: 1.5, 49: -2.0}, repetition_penalty=1.25),
        GREEDY,
        Sampling(repetition_penalty=0.5),
    ]
    ids = [[3, 3, 7], [1, 2], []]
    want, got = (logits(5, rows=3).to(dtype) for _ in range(2))
    change_logits(CPU, want, settings, ids)
    got = got.to(backend.device)
    change_logits(backend, got, settings, ids)
    torch.testing.assert_close(got.cpu(), want)
    assert not torch.equal(want[0], logits(5, rows=3).to(dtype)[0])
    assert torch.equal(want[1:], logits(5, rows=3).to(dtype)[1:])


def test_what_the_host_has_to_do_is_known_beforehand():
    plain = (GREEDY, Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=4))
    assert not any(setting.changes_logits for setting in plain)
    for change in ({"repetition_penalty": 1.1}, {"logit_bias": {1: 0.5}}, {"logprobs": True}):
        assert Sampling(**change).changes_logits


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 2),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {1: 0.0, 2: float("nan")}),
    ],
)
def test_settings_out_of_range_are_refused(argument, value):
    with pytest.raises(InputError, match=argument):
        Sampling(**{argument: value})
