"""Sequences together: each one's tokens are what they are alone, whatever joins or leaves."""

import dataclasses
import random

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.models import Llama
from ferrum_triton.models.decoder import BLOCK_SIZE
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.generation import generate, stream
from ferrum_triton.models.roof import bytes_of_step
from ferrum_triton.models.weights import load_weights
from ferrum_triton.runtime.sampling import Sampling
from ferrum_triton.types import KvDtypeKind
from tests.tiny_models import PACKED, PackedSource

CONFIG = dataclasses.replace(PACKED, max_positions=160)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            backend = get_backend(name)
            weights = load_weights(PackedSource(CONFIG), CONFIG, backend, dtype)
            made[name, dtype] = Llama(CONFIG, weights, backend, dtype)
        return made[name, dtype]

    return get


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how it is answered; ``leaves`` after so many tokens, if not 0."""

    ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    joins: int
    leaves: int


def schedule(pick, count, settings):
    """Requests whose prompts begin alike more often than not."""
    stem = [pick.randrange(96) for _ in range(70)]
    requests = []
    for _ in range(count):
        shared = pick.choice((0, 15, 16, 33, 48))
        ids = stem[:shared] + [pick.randrange(96) for _ in range(pick.randrange(shared == 0, 12))]
        leaves = pick.choice((0, 0, 0, 2))
        joins = pick.randrange(12)
        length = min(pick.choice((1, 4, 9, 35, 60)), 97 - len(ids))
        requests.append(Request(tuple(ids), pick.choice(settings), length, joins, leaves))
    return requests


def answers(engine, requests):
    """Tokens and log-probabilities of each request, each added at its own step."""
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].joins)
    index, found, step = {}, [[] for _ in requests], 0
    while waiting or engine.busy:
        while waiting and requests[waiting[0]].joins <= step:
            i = waiting.pop(0)
            key = engine.add(requests[i].ids, requests[i].sampling, requests[i].max_tokens)
            index[key] = i
        for new in engine.step():
            i = index[new.key]
            found[i].append((new.token, new.logprob))
            if len(found[i]) == requests[i].leaves:
                engine.cancel(new.key)
        step += 1
    lengths = [min(r.leaves or r.max_tokens, r.max_tokens) for r in requests]
    assert [len(tokens) for tokens in found] == lengths
    return found


def assert_alone(model, request, got, want, rounding):
    """What the sequence is alone, up to the first token that was as likely but for rounding.

    Args:
        want: tokens and log-probabilities of the sequence alone.
    """
    for i, ((token, _), (expected, _)) in enumerate(zip(got, want, strict=True)):
        if token != expected:
            logits = logits_after(model, request, [t for t, _ in want[: i + 1]])[-1]
            assert abs(float(logits[expected] - logits[token])) < rounding
            return


def assert_likeliest(model, request, got, rounding):
    """Each token is the likeliest after those before it, or as likely but for rounding."""
    tokens = [token for token, _ in got]
    logits = logits_after(model, request, tokens)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    assert (logits.amax(1, keepdim=True) - chosen).max() < rounding


def logits_after(model, request, tokens):
    """Logits before each of the tokens of an answer, of one step over the sequence alone."""
    ids = [*request.ids, *tokens[:-1]]
    logits = model.forward(ids, model.new_cache(160), all_logits=True)
    return logits[len(request.ids) - 1 :].float()


def assert_nothing_held(engine):
    cache = engine.runner.cache
    assert cache.allocator.num_free == len(cache.k[0])
    assert not any(cache.blocks) and not any(cache.lengths)


def check_schedules(model, seeds, rounding, settings=()):
    """Random schedules with blocks for half of what could run; greedy ones without settings."""
    alone, preempted = Engine(model, capacity=96, max_seqs=1), 0
    for seed in seeds:
        pick = random.Random(seed)
        requests = schedule(pick, pick.randrange(2, 5), settings or (Sampling(),))
        sizes = {"max_seqs": pick.choice((2, 3, 5)), "num_blocks": pick.choice((6, 7, 30))}
        engine = Engine(model, capacity=96, chunk=pick.choice((5, 20, 200)), **sizes)
        for request, got in zip(requests, answers(engine, requests), strict=True):
            if settings:
                assert_alone(model, request, got, answers(alone, [request])[0], rounding)
            else:
                assert_likeliest(model, request, got, rounding)
        preempted += engine.num_preempted
        assert_nothing_held(engine)
    assert preempted > 0


@pytest.mark.parametrize("part", range(5))
def test_schedules_leave_every_sequence_what_it_is_alone(models, part):
    """500 schedules of joining, leaving, preempting and sharing."""
    check_schedules(models("cpu"), range(100 * part, 100 * (part + 1)), rounding=1e-4)


@pytest.mark.gpu
def test_schedules_with_graphs(models):
    check_schedules(models("cuda"), range(50), rounding=1e-3)


SETTINGS = (
    Sampling(logprobs=True),
    Sampling(temperature=0.8, top_k=20, seed=3, logprobs=True),
    Sampling(temperature=1.5, top_p=0.9, min_p=0.02, seed=4, logprobs=True),
    Sampling(repetition_penalty=1.3, logit_bias={5: 2.0, 7: -3.0}, logprobs=True),
)


@pytest.mark.parametrize("name", ["cpu", GPU])
def test_batch_invariant_results_are_equal_by_the_bit(models, name):
    """Tokens and log-probabilities, sampled and penalised ones too."""
    model, preempted = models(name), 0
    for seed in range(12):
        pick = random.Random(seed)
        requests = schedule(pick, 5, SETTINGS)
        one = {"capacity": 96, "max_seqs": 4, "batch_invariant": True}
        engine = Engine(model, num_blocks=pick.choice((6, 30)), **one)
        for request, got in zip(requests, answers(engine, requests), strict=True):
            assert got == answers(Engine(model, **one), [request])[0]
        preempted += engine.num_preempted
        assert_nothing_held(engine)
    assert preempted > 0


@pytest.mark.parametrize("name", ["cpu", GPU])
def test_draws_depend_on_seeds_and_positions_alone(models, name):
    """Through prefill, decode steps and after a preemption."""
    settings = [dataclasses.replace(setting, logprobs=False) for setting in SETTINGS]
    check_schedules(models(name), range(20), 0.05, settings)


def test_prompts_that_begin_alike_share_blocks(models):
    engine = Engine(models("cpu"), max_seqs=3, capacity=96)
    cache, stem = engine.runner.cache, list(range(40))
    first = engine.add(stem, max_tokens=30)
    engine.step()
    engine.add([*stem, 50, 51], max_tokens=2)
    engine.add(stem[:32], max_tokens=2)  # whole blocks: the last is copied before it is written
    engine.step()
    shared = [cache.blocks[row][:2] for row in range(3)]
    assert shared[0] == shared[1]
    assert shared[2][0] == shared[0][0] and shared[2][1] != shared[0][1]
    assert cache.allocator.holders(shared[0][0]) == 3
    assert engine.progress(first) >= 40
    while engine.busy:
        engine.step()
    assert_nothing_held(engine)
    again = engine.add([*stem, 60], max_tokens=1)  # of a sequence that has ended
    engine.step()
    assert engine.progress(again) == 0 and not engine.busy


BLOCK = list(range(BLOCK_SIZE))
OTHER = [50 + i for i in BLOCK]


@pytest.mark.parametrize(
    ("before", "num_blocks", "steps", "second", "together", "num_preempted"),
    [
        ([], 2, 0, OTHER, False, 0),
        ([], 3, 0, OTHER, True, 1),
        ([], 3, 2, BLOCK, False, 0),  # the last shared block is copied, to one that is free
        ([OTHER], 4, 2, [*OTHER, 1], False, 0),  # one of two free ones holds what is shared
        ([OTHER], 5, 2, [*OTHER, 1], True, 0),
    ],
)
def test_who_joins_has_a_block_to_go_on_with(
    models, before, num_blocks, steps, second, together, num_preempted
):
    """A prompt joins if a free block is left for each that runs.

    Args:
        before: prompts whose blocks are remembered.
        steps: steps of the first prompt before the second one comes.
        together: whether it joins before the first one ends.
    """
    capacity = min(num_blocks, 3) * BLOCK_SIZE
    engine = Engine(models("cpu"), max_seqs=2, capacity=capacity, num_blocks=num_blocks)
    for prompt in before:
        generate(engine.model, prompt, max_tokens=1, engine=engine)
    count = min(capacity - BLOCK_SIZE, 20)
    first = engine.add(BLOCK, max_tokens=count)
    order = [new.key for _ in range(steps) for new in engine.step()]
    joining = engine.add(second, max_tokens=8)
    while engine.busy:
        order += [new.key for new in engine.step()]
    assert (order.count(first), order.count(joining)) == (count, 8)
    assert (order.index(joining) < len(order) - order[::-1].index(first)) == together
    assert engine.num_preempted == num_preempted
    assert_nothing_held(engine)


def test_the_last_to_come_are_sent_away_first(models):
    """One for want of a second block, and the one before it for want of a third."""
    engine = Engine(models("cpu"), max_seqs=3, capacity=3 * BLOCK_SIZE, num_blocks=5)
    keys = [engine.add([i, *BLOCK[1:]], max_tokens=20) for i in range(3)]
    ends = []
    while engine.busy:
        ends += [new.key for new in engine.step() if new.stopped_by]
    assert ends == keys
    assert engine.num_preempted == 2


def test_interpreted_kernels_answer_as_the_cpu(models):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    got, want = (
        [a.ids for a in generate(models(name), prompts, max_tokens=3)]
        for name in ("interpret", "cpu")
    )
    assert got == want


def test_quantised_caches(models):
    """An int8 cache changes logits by its rounding alone."""
    model = models("cpu")
    engine = Engine(model, max_seqs=2, capacity=64, kind=KvDtypeKind.INT8)
    prompt = [5, 6, 7, 8, 9]
    coarse = generate(model, prompt, max_tokens=1, sampling=SETTINGS[0], engine=engine)
    exact = generate(model, prompt, max_tokens=1, sampling=SETTINGS[0])
    assert coarse.logprobs == pytest.approx(exact.logprobs, abs=0.05)
    assert coarse.logprobs != exact.logprobs


def test_one_prompt_many_prompts_and_an_iterator(models):
    model = models("cpu")
    prompts = [[i, i + 1, i + 2] for i in range(7)]
    many = generate(model, prompts, max_tokens=5)
    assert [a.stopped_by for a in many] == ["length"] * 7
    assert generate(model, prompts[3], max_tokens=5).ids == many[3].ids
    lazily = generate(model, (p for p in prompts), max_tokens=5, max_seqs=2)
    assert [a.ids for a in lazily] == [a.ids for a in many]
    pieces = list(stream(model, prompts, max_tokens=5))
    assert [p.token for p in pieces if p.index == 2] == many[2].ids
    assert [a.ids for a in generate(model, prompts, max_tokens=0)] == [[]] * 7
    end = many[0].ids[2]
    ended = generate(model, prompts[0], max_tokens=5, end_ids=[end])
    assert ended.ids == many[0].ids[: many[0].ids.index(end)] and ended.stopped_by == "end"
    full = generate(model, [1] * 150, max_tokens=50)
    assert full.stopped_by == "context" and len(full.ids) == 11


def test_an_answer_left_half_way_leaves_the_engine_idle(models):
    model = models("cpu")
    pieces = stream(model, [1, 2, 3], max_tokens=50)
    first = [next(pieces).token for _ in range(3)]
    pieces.close()
    assert generate(model, [1, 2, 3], max_tokens=3).ids == first
    kept = model.engine
    assert generate(model, [1, 2, 3], max_tokens=4).ids[:3] == first
    assert model.engine is kept  # with its graphs


def test_streams_that_share_an_engine(models):
    """Each gets its own tokens, whoever asks for the next step."""
    model = models("cpu")
    engine = Engine(model, max_seqs=2, capacity=64)
    want = [generate(model, p, max_tokens=6).ids for p in ([1, 2, 3], [5, 6])]
    first = stream(model, [1, 2, 3], max_tokens=6, engine=engine)
    begun = [next(first).token]
    assert generate(model, [5, 6], max_tokens=6, engine=engine).ids == want[1]
    assert begun + [piece.token for piece in first] == want[0]
    assert not engine.busy


def test_bounds_of_a_call_hold_on_a_larger_engine(models):
    model = models("cpu")
    generate(model, [[i] for i in range(8)], max_tokens=2)
    assert model.engine.max_seqs == 8
    short = generate(model, [1, 2, 3], max_tokens=50, capacity=20)
    assert short.stopped_by == "context" and len(short.ids) == 18
    running = []
    for piece in stream(model, [[1]] * 4, max_tokens=5, max_seqs=1):
        running.append(piece.index)
    assert running == sorted(running)
    empty = generate(model, (p for p in [[1]] * 5), max_tokens=0, max_seqs=1)
    assert [a.stopped_by for a in empty] == ["length"] * 5
    ids = torch.tensor([1, 2, 3])
    assert generate(model, ids, max_tokens=4).ids == generate(model, [1, 2, 3], max_tokens=4).ids
    assert len(generate(model, torch.stack((ids, ids)), max_tokens=1)) == 2


def test_settings_change_what_is_chosen(models):
    model = models("cpu")
    plain = generate(model, [1, 2, 3], max_tokens=6, sampling=Sampling(logprobs=True))
    logits = model.forward([1, 2, 3], model.new_cache(8))
    assert plain.logprobs[0] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
    banned = Sampling(logit_bias={plain.ids[0]: -torch.inf})
    assert generate(model, [1, 2, 3], max_tokens=1, sampling=banned).ids != plain.ids[:1]
    forced = Sampling(logit_bias={42: 1e4})
    assert generate(model, [1, 2, 3], max_tokens=3, sampling=forced).ids == [42] * 3
    harsh = generate(model, [1], max_tokens=40, sampling=Sampling(repetition_penalty=1e6)).ids
    assert len(set(harsh)) == len(harsh)
    hot = Sampling(temperature=3.0, min_p=1.0, seed=1)
    assert generate(model, [1, 2, 3], max_tokens=6, sampling=hot).ids == plain.ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts is none"),
        ({"prompts": [[]]}, "0 tokens"),
        ({"prompts": [[1], [96]]}, "holding 96"),
        ({"prompts": [[1] * 161]}, "161 tokens"),
        ({"prompts": "text"}, "token ids"),
        ({"prompts": [[1]], "max_tokens": -1}, "max_tokens"),
        ({"prompts": [[1]], "stop": "x"}, "without a tokenizer"),
        ({"prompts": [[1]], "stop": [""]}, "empty string"),
        ({"prompts": [[1]], "sampling": []}, "0 settings"),
        ({"prompts": [[1]], "sampling": Sampling(logit_bias={96: 1.0})}, "holding 96"),
        ({"prompts": [[1.5]]}, "holding 1.5"),
        ({"prompts": [1.5, 2]}, "holding 1.5"),
        ({"prompts": [[1]], "max_seqs": 0}, "max_seqs"),
        ({"prompts": [[1]], "capacity": 0}, "capacity"),
        ({"prompts": [[1, 2]], "capacity": 1}, "2 tokens"),
        ({"prompts": iter([[1]]), "sampling": [Sampling()]}, "iterator"),
    ],
)
def test_bad_prompts_and_settings_are_refused(models, arguments, message):
    model = models("cpu")
    with pytest.raises(InputError, match=message):
        generate(model, **arguments)
    assert len(generate(model, [1], max_tokens=2).ids) == 2  # nothing is left behind


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 3.5), ("seed", 1.5), ("logit_bias", {1.5: 3.0})]
)
def test_settings_of_another_type_are_refused(name, value):
    with pytest.raises(InputError, match=name):
        Sampling(**{name: value})
    assert hash(Sampling(logit_bias={1: 2.0})) == hash(Sampling(logit_bias={1: 2.0}))


def test_a_sequence_that_is_none_is_refused(models):
    model = models("cpu")
    with pytest.raises(InputError, match="seq"):
        model.forward([1], model.new_cache(8), seq=1)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"max_seqs": 0}, "max_seqs"), ({"chunk": 0}, "chunk"), ({"num_blocks": 5}, "num_blocks")],
)
def test_bad_engines_are_refused(models, sizes, name):
    with pytest.raises(InputError, match=name):
        Engine(models("cpu"), **{"capacity": 6 * BLOCK_SIZE, **sizes})


def test_bytes_of_a_step(models):
    """Every weight but the embedding's rows once, and the keys and values of each sequence."""
    model, c = models("cpu"), CONFIG
    attention = c.hidden_size * (2 * c.q_dim + 2 * c.kv_dim)
    weights = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    weights += c.vocab_size * c.hidden_size
    for batch, context in ((1, 0), (3, 50)):
        keys = batch * context * c.num_layers * 2 * c.kv_dim
        assert bytes_of_step(model, batch, context) == 4 * (weights + keys)


@pytest.mark.gpu
def test_ten_thousand_steps_take_no_memory_and_never_wait(models):
    """Replays after warm-up: no allocation by torch, no synchronising call, eager's tokens."""
    model = models("cuda", torch.bfloat16)
    engine = Engine(model, max_seqs=2, capacity=160)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    first = [generate(model, prompts, max_tokens=100, engine=engine) for _ in range(2)]
    eager = generate(
        model, prompts, max_tokens=100, engine=engine, sampling=Sampling(repetition_penalty=1.0001)
    )
    assert len(eager[0].ids) == 100
    torch.cuda.synchronize()
    before, steps = torch.cuda.memory_allocated(), 0
    peak = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while steps < 10_000:
            keys = [engine.add(ids, max_tokens=150) for ids in prompts]
            engine.step()  # a prefill, which is eager
            while engine.busy:
                engine.step()
                steps += 1
            assert len(keys) == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == peak
    assert first[0] == first[1]
