"""Benches of decode steps: the decoder that is timed, what it launches, what its rows say."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import decode, decode_layer, first_answer, transformers_models
from bench.launches import record
from bench.random_models import CONFIGS, RandomSource, random_model, uses_more_bits
from bench.results import read_rows
from bench.timed_step import TimedStep
from ferrum_triton import OPS, get_backend
from ferrum_triton.backends import Backend
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.qwen35_config import Qwen35Config
from tests.tiny_models import shrunk


def test_a_decode_step_gives_a_layers_time(monkeypatch, capsys):
    """The step less that of a first layer, and what it takes without each op."""
    model = random_model("qwen3-8b", "bf16", get_backend("cpu"), shrunk("qwen3-8b"))
    layers = model.config.num_layers
    times = {layers: 40.0 + 20.0 * layers, 1: 60.0, "paged_decode_attention": 40.0}

    def replay_us(step):
        calls = Counting(model.backend)
        owner = getattr(step, "__self__", None)
        assert step().shape == (2,)
        if owner is not None:
            return times[owner.model.config.num_layers]
        left_out = calls.backend.left_out
        return times[layers] - layers * (7.0 if left_out == "paged_decode_attention" else 1.0)

    monkeypatch.setattr(decode_layer, "replay_us", replay_us)
    (row,) = decode_layer.measure(model, "qwen3-8b/bf16/b2/ctx40", 2, 40)
    assert row.id == "decode_layer/qwen3-8b/bf16/b2/ctx40"
    assert (row.unit, row.value) == ("us", 20.0)
    printed = capsys.readouterr().out
    assert re.search(r"paged_decode_attention +7\.00 us", printed)
    assert re.search(r"argmax_rows +1\.00 us", printed)


def test_a_step_gives_tokens_with_any_op_left_out():
    """What is left out is not called; all else is."""
    model = random_model("qwen3-8b", "q4_K", get_backend("cpu"), shrunk("qwen3-8b"))
    step = TimedStep(model, 2, 40)
    whole = step.tokens()
    steps = list(decode_layer.without_each_op(step))
    assert {"argmax_rows", "paged_decode_attention"} < {name for name, _ in steps}
    assert isinstance(model.backend, Backend) and torch.equal(step.tokens(), whole)
    for name, without in decode_layer.without_each_op(step):
        noted = model.backend
        noted.backend = counting = Counting(noted.backend)
        assert torch.equal(without(), whole)
        assert name not in counting.calls and len(counting.calls) == len(noted.results) - sum(
            op == name for op, _ in noted.results
        )
        noted.backend = counting.backend


class Counting:
    """A backend that notes the ops called."""

    def __init__(self, backend):
        self.backend, self.calls = backend, []

    def __getattr__(self, name):
        found = getattr(self.backend, name)
        if name not in OPS:
            return found

        def call(*args, **kwargs):
            self.calls.append(name)
            return found(*args, **kwargs)

        return call


def test_half_of_the_layers_have_more_bits():
    assert sum(uses_more_bits(i, 36) for i in range(36)) == 18


def published():
    """Rows of the table of docs/models.md: model, weights, layers, launches by sequences."""
    page = (Path(__file__).parent.parent / "docs/models.md").read_text()
    _, found, table = page.partition("| model | weights | layers | 1 | 2 | 8 | 32 |\n")
    assert found
    for line in itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[1:]):
        model, weights, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
        form = {"Q4_K_M": "q4_K"}.get(weights, weights)
        for batch, count in zip((1, 2, 8, 32), numbers[1:], strict=True):
            yield f"decode/{model.lower()}/{form}/b{batch}/ctx1024", int(numbers[0]), int(count)


@pytest.mark.parametrize(("row", "layers", "count"), [*published()])
def test_a_step_launches_what_is_published(row, layers, count):
    found = record(decode.meta_call(row), "sm_90")
    products = [n for n in found.operations if "matmul" in n or "linear" in n]
    assert len(found.launches) + len(products) == count
    # A fill would be a launch that stands between two kernels.
    assert not [name for name in found.operations if "zero_" in name or "fill" in name]
    assert CONFIGS[row.split("/")[1]].num_layers == layers


# The most launches of a layer, by sequences.
MOST_A_LAYER = {
    "qwen3-8b/q4_K": (6, 9, 9, 9),
    "qwen3-8b/bf16": (7, 9, 7, 8),
    "qwen3-30b-a3b/q4_K": (10, 10, 11, 11),
}


def test_published_steps_keep_to_what_a_layer_may_launch():
    for row, layers, count in published():
        _, model, form, batch, _ = row.split("/")
        if most := MOST_A_LAYER.get(f"{model}/{form}"):
            assert count <= most[("b1", "b2", "b8", "b32").index(batch)] * layers + 7


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama-3.1-8b", "q4_1"),
        ("qwen3-30b-a3b", "mxfp4"),
        ("gemma3-27b", "bf16"),
        ("qwen3-30b-a3b", "bf16"),
        ("gpt-oss-20b", "mxfp4"),
        ("qwen3.5-9b", "q4_1"),
        ("qwen3.5-9b", "bf16"),
    ],
)
def test_steps_of_random_models_follow_from_the_cache(name, form):
    model = random_model(name, form, get_backend("cpu"), shrunk(name))
    ids = torch.randint(90, (21,)).tolist()
    whole, parts = model.new_cache(32), model.new_cache(32, num_seqs=2)
    want = model.forward(ids, whole)[0]
    model.forward(ids[:17], parts, seq=1)
    for token in ids[17:]:
        got = model.forward([token], parts, seq=1)[0]
    assert want.isfinite().all() and want.std() > 0.1
    assert (got - want).abs().max() < 0.1 * want.abs().max()  # 16-bit activations, twice rounded
    assert parts.lengths == [0, 21]


@pytest.mark.parametrize(
    "row",
    [
        "decode/gpt-oss-20b/mxfp4/b128/ctx8192",
        "decode/gemma3-27b/bf16/b128/ctx32768",
    ],
)
def test_large_models_have_a_step_at_their_sizes(row):
    (layers,) = (config.num_layers for name, config in CONFIGS.items() if f"/{name}/" in row)
    assert len(record(decode.meta_call(row), "sm_90").launches) > 5 * layers


def test_published_shapes_have_their_numbers_of_weights():
    def weights(name):
        config = CONFIGS[name]
        if isinstance(config, Qwen35Config):
            return sum(map(math.prod, RandomSource(config, "bf16", "meta").shapes.values())) / 1e9
        attention = config.hidden_size * (2 * config.q_dim + 2 * config.kv_dim)
        mlp = 3 * config.hidden_size * config.intermediate_size * (config.num_experts or 1)
        ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
        return (config.num_layers * (attention + mlp) + ends) / 1e9

    published = {"qwen3-8b": 8.2, "gemma3-27b": 27.0, "gpt-oss-20b": 20.9, "qwen3-30b-a3b": 30.5}
    published["qwen3.5-9b"] = 8.95
    for name, billions in published.items():
        assert weights(name) == pytest.approx(billions, rel=0.01), name


@pytest.mark.parametrize(("batch", "context"), [(1, 30), (5, 60), (6, 60)])
def test_sequences_decode_together_once_all_prompts_are_read(batch, context, monkeypatch, capsys):
    monkeypatch.setattr(decode, "PREFILL_CHUNK", 12)
    monkeypatch.setattr(decode.work_of, "__defaults__", (12,))
    monkeypatch.setattr(decode, "Engine", partial(Engine, chunk=12))
    running = []
    step = Engine.step

    def noted(engine):
        news = step(engine)
        running.append((len(news), any(new.stopped_by for new in news)))
        return news

    monkeypatch.setattr(Engine, "step", noted)
    model = random_model("llama-3.1-8b", "bf16", get_backend("cpu"), shrunk("llama-3.1-8b"))
    name = f"tiny/bf16/b{batch}/ctx{context}"
    rows = decode.measure(model, name, batch, context, steps=9)
    assert [row.id for row in rows] == [f"decode/{name}", f"prefill/{name}"]
    assert all(row.value > 0 and row.unit == "tok_s" for row in rows)
    assert f"decode/{name}: " in capsys.readouterr().out
    last = max(i for i, (count, ended) in enumerate(running) if count == batch and ended)
    assert [count for count, _ in running[last - 7 : last + 1]] == [batch] * 8
    for each in decode.work_of(batch, context, 9):
        assert each.prompt + each.tokens == context


def test_what_does_not_fit_costs_a_line(monkeypatch, capsys):
    def fails(*_):
        raise torch.cuda.OutOfMemoryError("Tried to allocate 999 GiB.\nAnd so on.")

    assert decode.attempt("a/b", lambda: 3) == 3
    assert decode.attempt("a/b", fails) is None
    out = capsys.readouterr().out
    assert out.splitlines() == ["a/b: left out, OutOfMemoryError: Tried to allocate 999 GiB."]


def test_peers_stand_beside_rows_of_decoding(capsys):
    rows = [
        decode.Row(f"{bench}/m/q4_K/b8/ctx1024", 60.0, "tok_s") for bench in ("decode", "prefill")
    ]
    size, peer = decode.Size(8, 1024), "transformers/bf16"
    with_peers = [decode.with_peer(row, peer, size, 20.0) for row in rows]
    assert with_peers == [replace(rows[0], peers={"transformers/bf16": 20.0}), rows[1]]
    assert "3.00 times transformers/bf16" in capsys.readouterr().out
    assert decode.with_peer(rows[0], peer, decode.Size(1, 1024), 20.0) == rows[0]


def test_a_first_answer_is_taken_apart():
    make = lambda: random_model("x", "bf16", get_backend("cpu"), shrunk("llama-3.1-8b"))  # noqa: E731
    parts = first_answer.answer(make, 20, 6)
    assert [*parts] == list(first_answer.PARTS[2:])
    assert parts["load"] > 0 and parts["first"] > 0 and parts["decode"] > 0
    text = first_answer.line("warm", {"import": 1.0, "gpu": 0.5} | dict.fromkeys(parts, 0.25))
    assert text.startswith("warm: first token 2.50 s, last 2.75 s:  import 1.00  gpu 0.50")


def test_a_process_without_a_model_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["first_answer", "no-such-model", "--began", "1.0"])
    with pytest.raises(SystemExit, match="no-such-model: no file, and no model of"):
        first_answer.main()


def test_rows_are_kept_as_they_come_and_peers_added(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is the peer")
    kept = tmp_path / "rows.json"
    arguments = ["tiny", "--formats", "q4_1", "--batches", "1", "2", "--contexts", "12"]
    beside = ["--beside", "transformers", "--through", "convert", "--json", str(kept)]
    monkeypatch.setattr("sys.argv", ["decode", *arguments, *beside])
    monkeypatch.setitem(decode.CONFIGS, "tiny", shrunk("qwen3-8b", width=256, head_dim=32))
    monkeypatch.setattr(decode, "get_backend", lambda name: get_backend("cpu"))
    theirs = decode.their_model
    monkeypatch.setattr(decode, "their_model", lambda config, device: theirs(config, "cpu"))
    monkeypatch.setattr(decode, "STEPS", 4)
    monkeypatch.setattr(transformers_models, "ANSWERS", 1)
    measure = decode.measure

    def measured(model, name, batch, context):
        if batch == 2:
            raise torch.cuda.OutOfMemoryError("too much")
        return measure(model, name, batch, context, steps=4)

    monkeypatch.setattr(decode, "measure", measured)
    decode.main()
    rows = {row["id"]: row for row in read_rows(kept)}
    assert [*rows] == ["decode/tiny/q4_1/b1/ctx12", "prefill/tiny/q4_1/b1/ctx12"]
    peers = rows["decode/tiny/q4_1/b1/ctx12"]["peers"]
    assert [*peers] == ["transformers/bf16", "convert/q4_1"] and min(peers.values()) > 0
    out = capsys.readouterr().out
    assert "tiny/q4_1/b2/ctx12: left out, OutOfMemoryError: too much" in out
    assert "tiny convert/q4_1 b2/ctx12: " in out


def test_first_answers_are_rows(monkeypatch, tmp_path, capsys):
    kept, caches = tmp_path / "rows.json", []

    def child(options, cache):
        caches.append(cache)
        return dict.fromkeys(first_answer.PARTS, 0.5 * len(caches))

    monkeypatch.setattr(first_answer, "child", child)
    monkeypatch.setattr("sys.argv", ["first_answer", "qwen3-8b", "--json", str(kept)])
    first_answer.main()
    values = {row["id"]: row["value"] for row in read_rows(kept)}
    assert len(values) == 2 * len(first_answer.PARTS) + 2 and caches[0] == caches[1]
    assert values["first_answer/qwen3-8b/cold/total"] == 0.5 * len(first_answer.PARTS)
    assert values["first_answer/qwen3-8b/warm/compile"] == 1.0
    assert "warm: first token 6.00 s, last 7.00 s" in capsys.readouterr().out
