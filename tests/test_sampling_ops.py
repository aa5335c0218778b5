"""Choosing tokens on the device: argmax, penalties, random numbers and sampling."""

import pytest
import torch
from triton.runtime import interpreter

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.tuning import TUNABLES
from ferrum_triton.ops.sampling import PHILOX_INCREMENTS, PHILOX_MULTIPLIERS, WORD
from tests.harness import BACKENDS
from tests.sampling_oracle import probabilities

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


def normal(backend, *shape, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(backend.device, dtype)


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def on(backend, values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=backend.device)


@pytest.mark.parametrize(
    ("row", "index"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([-2.0, -1.0, -3.0], 1),
        ([NAN, -5.0, NAN], 1),
        ([-INF, NAN, -INF], 0),
        ([1.0, INF, INF], 1),
        ([-1.0, -0.0, 0.0], 1),
        ([-1e-45, -1e-40, 1e-45], 2),
        ([NAN, -INF, -3.4e38], 2),
    ],
)
def test_argmax_of_one_row(backend, row, index):
    assert backend.argmax_rows(on(backend, [row])).tolist() == [index]


@pytest.mark.parametrize("num_rows", [1, 9])
def test_argmax_takes_the_first_of_equals_in_whatever_chunk(backend, num_rows):
    logits = normal(backend, num_rows, 20011)
    assert torch.equal(backend.argmax_rows(logits), logits.argmax(dim=1).int())
    for first, second in ((0, 20010), (4095, 4096), (1024, 9000)):
        logits[:, [first, second]] = 9.0
        assert (backend.argmax_rows(logits) == first).all()
        logits[:, [first, second]] = NAN
    for zeros in ((-0.0, 0.0), (0.0, -0.0)):
        logits = -uniform(num_rows, 20011).to(backend.device) - 1
        logits[:, [4095, 15000]] = on(backend, zeros)
        assert (backend.argmax_rows(logits) == 4095).all()


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
def test_argmax_in_chunks_of_every_candidate(backend_name):
    backend, tunable = get_backend(backend_name), TUNABLES["argmax_rows"]
    logits = normal(backend, 3, 9001, dtype=torch.float16)
    logits[1, [512, 8191]] = 9.0
    for config in tunable.candidates(gpu_of(logits.device), 3, 9001):
        with tunable.forced(config):
            got = backend.argmax_rows(logits)
        assert torch.equal(got, get_backend("cpu").argmax_rows(logits.cpu()).to(got.device))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_masked_argmax_chooses_finite_and_allowed(backend, dtype):
    logits = on(backend, [[5.0, INF, 4.0, 4.0, 9.0, 8.0], [NAN, INF, -INF, NAN, 9.0, 8.0]])
    mask = on(backend, [0, 1, 1, 1], dtype)  # columns 4 and 5 lie past its end
    assert backend.argmax_rows(logits, mask).tolist() == [2, -1]
    assert backend.argmax_rows(logits, mask * 0).tolist() == [-1, -1]
    assert backend.argmax_rows(logits, mask[:0]).tolist() == [-1, -1]
    longer = on(backend, [0, 0, 0, 0, 0, 1, 1, 1], dtype)
    assert backend.argmax_rows(logits, longer).tolist() == [5, 5]


def test_masked_argmax_over_chunks(backend):
    logits = normal(backend, 2, 20011)
    mask = (uniform(20000, seed=3) < 0.01).to(backend.device)
    want = logits[:, :20000].masked_fill(~mask, -INF).argmax(dim=1).int()
    assert torch.equal(backend.argmax_rows(logits, mask.to(torch.int8)), want)
    with pytest.raises(InputError, match="mask"):
        backend.argmax_rows(logits, mask.to(torch.int32))


def test_penalties_lower_each_listed_token_once(backend):
    logits = on(backend, [[2.0, -2.0, 0.0, 3.0], [2.0, -2.0, NAN, 3.0], [1.0, 1.0, 1.0, 1.0]])
    offsets, ids = [0, 4, 6, 6], [0, 1, 0, 2, 3, -1]  # token 0 of row 0 is listed twice
    penalties = on(backend, [2.0, 1.5, 3.0])
    backend.repetition_penalty_inplace(
        logits, on(backend, offsets, torch.int32), on(backend, ids, torch.int64), penalties
    )
    want = [[1.0, -4.0, 0.0, 3.0], [2.0, -2.0, NAN, 2.0], [1.0, 1.0, 1.0, 1.0]]
    torch.testing.assert_close(logits, on(backend, want), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_lists_are_penalised_once_a_token(backend, dtype):
    logits = normal(backend, 2, 300, dtype=dtype, scale=3.0)
    ids = torch.randint(0, 300, (3000,), generator=torch.Generator().manual_seed(1))
    offsets = on(backend, [0, 2900, 3000], torch.int64)
    penalties = on(backend, [1.3, 1.0])
    want, changed = logits.float(), ids[:2900].unique().to(backend.device)
    row = want[0, changed]
    want[0, changed] = torch.where(row > 0, row / 1.3, row * 1.3)
    assert len(changed) > 290
    backend.repetition_penalty_inplace(
        logits, offsets, ids.to(backend.device, torch.int32), penalties
    )
    torch.testing.assert_close(logits, want.to(dtype))


def test_lists_from_nowhere_touch_nothing_else(backend):
    """Ids outside the vocabulary and offsets outside the list, next to memory that must stay."""
    store = torch.ones(4, 8, device=backend.device)
    logits = store[1:3, 2:6]
    ids = on(backend, [-1, 4, 2**31 - 1, -(2**31), 1], torch.int32)
    offsets = on(backend, [-7, 3, 2**31 - 1], torch.int32)
    backend.repetition_penalty_inplace(logits, offsets, ids, on(backend, [2.0, 2.0]))
    want = torch.ones_like(store)
    want[2, 3] = 0.5
    assert torch.equal(store, want)


def test_penalty_then_masked_argmax(backend):
    logits = on(backend, [[4.0, 3.0, 9.0]])
    backend.repetition_penalty_inplace(
        logits, on(backend, [0, 1], torch.int32), on(backend, [0], torch.int32), on(backend, [2.0])
    )
    mask = on(backend, [1, 1, 0], torch.int8)
    assert backend.argmax_rows(logits, mask).tolist() == [1]


def philox(seed, offset):
    """The first word of Philox4x32-10, in Python's own integers."""
    c, k = [offset & WORD, offset >> 32, 0, 0], [seed & WORD, seed >> 32]
    for _ in range(10):
        first, second = PHILOX_MULTIPLIERS[0] * c[0], PHILOX_MULTIPLIERS[1] * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & WORD, first >> 32 ^ c[3] ^ k[1], first & WORD]
        k = [(key + step) & WORD for key, step in zip(k, PHILOX_INCREMENTS, strict=True)]
    return c[0]


def test_random_numbers_are_philox(backend):
    seeds = [0, 0, 1, 2**31, 2**32, 2**62 + 12345, 987654321987654321]
    offsets = [0, 1, 0, 5, 2**31 + 1, 2**40, 3]
    got = backend.uniform_rows(on(backend, seeds, torch.int64), on(backend, offsets, torch.int64))
    pairs = zip(seeds, offsets, strict=True)
    assert got.tolist() == [(philox(s, o) >> 8) / 2**24 for s, o in pairs]
    # The published vector of an all-zero key and counter begins with 6627e8d5.
    assert got[0].item() == (0x6627E8D5 >> 8) / 2**24


def test_random_numbers_are_uniform_and_streams_independent(backend):
    n, bins = 4000 if backend.name == "interpret" else 100_000, 32
    index = torch.arange(n, device=backend.device)
    streams = [
        backend.uniform_rows(torch.full_like(index, 1), index),
        backend.uniform_rows(torch.full_like(index, 2), index),
        backend.uniform_rows(index, torch.zeros_like(index)),
    ]
    for u in streams:
        assert 0 <= u.min() <= u.max() < 1
        # Chi-square of 31 degrees of freedom: mean 31, variance 62; five deviations.
        counts = torch.histc(u.cpu(), bins, 0, 1)
        assert ((counts - n / bins) ** 2 / (n / bins)).sum() < 31 + 5 * 62**0.5
    for a, b in ((streams[0], streams[1]), (streams[0], streams[2]), (u[:-1], u[1:])):
        assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 5 / n**0.5


def strata(backend, count):
    """The middles of ``count`` equal parts of [0, 1)."""
    return ((torch.arange(count) + 0.5) / count).to(backend.device)


def shares(backend, row, **filters):
    """How often each column of ``row`` is chosen for evenly spaced random numbers."""
    count = 60 if backend.name == "interpret" else 4000
    filters = {
        name: on(backend, [value], torch.int64 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    ids = backend.sample_rows(row.expand(count, -1), strata(backend, count), **filters)
    return torch.bincount(ids.cpu(), minlength=row.shape[1]) / count, 1.5 / count


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 1000, "top_p": 1.0},
    ],
)
def test_shares_follow_the_distribution(backend, filters):
    row = normal(backend, 1, 14, seed=2, scale=1.5)
    got, error = shares(backend, row, **filters)
    want = probabilities(row[0].cpu(), **filters)
    assert (got - want).abs().max() < error
    assert got.sum() == pytest.approx(1)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0, 5.0])
def test_min_p_keeps_what_is_near_the_likeliest(backend, min_p):
    row = normal(backend, 1, 14, seed=3, scale=2.0)
    weights = ((row - row.max()) / 1.5).exp()[0].cpu()
    kept = torch.where(weights >= min(min_p, 1), weights, 0)
    got, error = shares(backend, row, temperature=1.5, min_p=min_p)
    assert (got - kept / kept.sum()).abs().max() < error


def test_filters_keep_the_first_of_equals(backend):
    level = torch.zeros(1, 10, device=backend.device)
    level[0, [0, 4]] = -1.0
    thirds = [0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0, 0]
    for filters in ({"top_k": 3}, {"top_k": 3, "top_p": 0.99}, {"top_k": 5, "top_p": 0.55}):
        got, error = shares(backend, level, **filters)
        assert (got - torch.tensor(thirds)).abs().max() < error, filters
    got, error = shares(backend, level, top_p=0.4, top_k=8)
    kept = got.nonzero().flatten().tolist()
    assert kept == [1, 2, 3, 5], "0.4 of the eight kept is 3.2 of them"


def test_equals_are_counted_across_blocks(backend):
    """Of three equals before the largest, in blocks of their own, top-k keeps the first."""
    row = normal(backend, 1, 20011, seed=11, dtype=torch.float16).clamp(max=3)
    row[0, [100, 9000, 17000, 20000]] = on(backend, [5.0, 5.0, 5.0, 6.0], torch.float16)
    u = on(backend, [0.0, 0.2, 0.3, 0.5, 0.7, 0.99])  # the first column's share is 0.27
    ids = backend.sample_rows(row.expand(6, -1), u, top_k=on(backend, [2], torch.int32))
    assert ids.tolist() == [100, 100, 20000, 20000, 20000, 20000]


@pytest.mark.parametrize(
    ("filters", "one_of_equals"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": -1.0}, True),
        ({"temperature": NAN}, True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, True),
        ({"top_k": 1}, True),
        ({"top_p": 1e-6}, True),
        ({"top_p": -1.0}, True),
        ({"temperature": 1e-6}, False),
        ({"min_p": 1.0}, False),
    ],
)
def test_the_narrowest_filters_are_the_argmax(backend, filters, one_of_equals):
    logits = normal(backend, 6, 200, seed=4)
    logits[3, [50, 60]] = on(backend, [8.0, 8.0 if one_of_equals else 7.0])
    arguments = {
        name: on(backend, [value], torch.int32 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    for u in (0.0, 0.6, 0.999):
        ids = backend.sample_rows(logits, on(backend, [u] * 6), **arguments)
        assert torch.equal(ids, backend.argmax_rows(logits))


@pytest.mark.parametrize(
    "filters", [{"top_k": -3}, {"top_p": 1.5}, {"min_p": -1.0}, {"min_p": NAN}]
)
def test_filters_can_be_off(backend, filters):
    row = normal(backend, 1, 14, seed=2, scale=1.5)
    got, error = shares(backend, row, **filters)
    assert (got - row[0].softmax(0).cpu()).abs().max() < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("top_k", [0, 3, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_rows_of_several_blocks(backend, dtype, top_k, top_p):
    """Aim at the middle of a kept column's share: no rounding can miss it."""
    logits = normal(backend, 5, 20011, seed=6, scale=3.0, dtype=dtype)
    logits[:, 17] = NAN
    logits[:, 10000:10050] = -INF
    wide = logits.double().cpu().masked_fill(logits.isnan().cpu(), -INF)
    order = wide.argsort(dim=1, descending=True, stable=True)
    weights = wide.softmax(dim=1)
    ranked = weights.gather(1, order)
    rank = torch.arange(20011)
    ranked[:, top_k or 20011 :] = 0
    ranked *= ranked.cumsum(1) - ranked < top_p * ranked.sum(1, keepdim=True)
    weights = torch.zeros_like(ranked).scatter(1, order, ranked)
    # One of the five likeliest of those kept.
    count = (ranked > 0).sum(dim=1).clamp(max=5)
    aim = order.gather(1, (rank[:5] % count)[:, None])
    prefix = weights.cumsum(1)
    middle = (prefix - weights / 2).gather(1, aim) / prefix[:, -1:]
    got = backend.sample_rows(
        logits,
        middle[:, 0].float().to(backend.device),
        top_k=on(backend, [top_k] * 5, torch.int32),
        top_p=on(backend, [top_p]),
    )
    assert got.tolist() == aim[:, 0].tolist()


def test_rows_without_a_choice_and_numbers_out_of_range(backend):
    logits = on(
        backend,
        [[-INF] * 4, [NAN] * 4, [1.0, INF, 2.0, NAN], [-INF, 3.0, NAN, 3.0], [NAN, -9, 1, 1]],
    )
    u = on(backend, [0.5, 0.5, 0.9, 0.999, 0.0])
    assert backend.sample_rows(logits, u).tolist() == [0, 0, 1, 3, 1]
    row = logits[3:4].expand(6, -1)
    u = on(backend, [-1.0, -INF, 1.0, 7.0, INF, NAN])
    for top_p in (None, on(backend, [0.9])):
        assert backend.sample_rows(row, u, top_p=top_p).tolist() == [1, 1, 3, 3, 3, 3]


def test_any_range_of_logits_ends_the_search(backend):
    """Logits masked with huge values, and values that floats next to zero barely tell apart."""
    values = [-3.4e38, 3.4e38, -1e30, 1e-45, 3e-45, -1e-45, 0.0, -0.0, 1.0, 1.0000001, -5.0, 2e-38]
    row = on(backend, [values])
    order = sorted(range(len(values)), key=lambda i: -values[i])
    for k in (2, 3, 5, 7, 9, 11):
        ids = backend.sample_rows(
            row.expand(8, -1),
            strata(backend, 8),
            temperature=on(backend, [INF]),  # every column weighs the same
            top_k=on(backend, [k], torch.int32),
        )
        assert set(ids.tolist()) <= set(order[:k])
        assert len(set(ids.tolist())) == min(k, 8)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_search_reads_a_row_some_dozen_times(sign, monkeypatch):
    """Halving the range takes one reading a bit, also where the ends' sum is no float."""
    backend, builder = get_backend("interpret"), interpreter.interpreter_builder
    row = sign * (2.5e38 + 0.9e38 * uniform(1, 3000, seed=12))
    loads, load = [], builder.create_masked_load

    def note(pointers, *args):
        loads.append(pointers.data.size)
        return load(pointers, *args)

    monkeypatch.setattr(builder, "create_masked_load", note)
    top_k, heat = on(backend, [1500], torch.int32), on(backend, [INF])
    ids = backend.sample_rows(row.expand(2, -1), on(backend, [0.0, 0.9999]), heat, top_k)
    kept = row[0].topk(1500).indices
    assert ids.tolist() == [kept.min(), kept.max()]
    assert 2 * 8 < len([size for size in loads if size > 1]) < 2 * 30


def test_parameters_may_be_one_or_one_a_row(backend):
    logits, u = normal(backend, 6, 50, seed=7), uniform(6, seed=8).to(backend.device)
    one = {
        "temperature": on(backend, [0.8]),
        "top_k": on(backend, [9], torch.int32),
        "top_p": on(backend, [0.9]),
        "min_p": on(backend, [0.01]),
    }
    each = {name: value.repeat(6) for name, value in one.items()}
    assert torch.equal(
        backend.sample_rows(logits, u, **one), backend.sample_rows(logits, u, **each)
    )
    for name, value in one.items():
        with pytest.raises(InputError, match=name):
            backend.sample_rows(logits, u, **{name: value.repeat(2)})


def test_rows_differ_in_their_parameters(backend):
    row = normal(backend, 1, 30, seed=9, scale=2.0)
    u = on(backend, [0.9] * 4)
    each = {
        "temperature": [0.0, 1.0, 3.0, 1.0],
        "top_k": [0, 2, 0, 9],
        "top_p": [1.0, 1.0, 0.5, 0.8],
    }
    tensors = {
        name: on(backend, values, torch.int64 if name == "top_k" else torch.float32)
        for name, values in each.items()
    }
    together = backend.sample_rows(row.expand(4, -1), u, **tensors)
    alone = [
        backend.sample_rows(row, u[:1], **{n: t[i : i + 1] for n, t in tensors.items()}).item()
        for i in range(4)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > 1


DRAWS = [
    pytest.param("cpu", 200_000, id="cpu"),
    pytest.param("cuda", 1_000_000, id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("name", "n"), DRAWS)
def test_a_seeded_stream_follows_the_distribution(name, n):
    """Many draws of one request: a chi-square against torch's softmax, and the seed decides."""
    backend = get_backend(name)
    row = normal(backend, 1, 40, seed=10)
    steps = torch.arange(n, device=backend.device)
    seeds = torch.full_like(steps, 1234)
    heat = on(backend, [1.2])

    def draw(seeds):
        return backend.sample_rows(row.expand(n, -1), backend.uniform_rows(seeds, steps), heat)

    ids = draw(seeds)
    want = (row[0].double() / 1.2).softmax(0).cpu() * n
    counts = torch.bincount(ids.cpu(), minlength=40)
    # 39 degrees of freedom: mean 39, variance 78; five deviations.
    assert ((counts - want) ** 2 / want).sum() < 39 + 5 * 78**0.5
    assert torch.equal(draw(seeds), ids)
    assert not torch.equal(draw(seeds + 1), ids)
