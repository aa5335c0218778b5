"""Benches of decode steps: the decoder that is timed, what it launches, what its rows say."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import decode, decode_layer, first_answer, transformers_models
from bench.decode_model import FORMATS as MODEL_FORMATS
from bench.decode_model import Decoder, Shape, make_weights, uses_more_bits
from bench.launches import record
from bench.random_models import CONFIGS, random_model
from bench.results import read_rows
from ferrum_triton import get_backend
from ferrum_triton.models.engine import Engine
from ferrum_triton.ops.quant_fused import MAX_ROWS
from ferrum_triton.quant import dequantize_rows
from ferrum_triton.testing import TensorFactory, assert_close
from tests.tiny_models import shrunk

TINY = Shape(
    hidden=256, num_heads=4, num_kv_heads=2, head_dim=64, intermediate=512, num_layers=1, vocab=90
)


def test_a_decode_step_gives_a_layers_time(monkeypatch, capsys):
    weights = make_weights(TINY, "bf16", "cpu", torch.float32, context=40)
    decoder = Decoder(get_backend("cpu"), weights, 2, 35)
    times = {"": 100.0, "ends": 40.0, "attention": 88.0, "head": 75.0}

    def replay_us(step):
        given = step.keywords if isinstance(step, partial) else {}
        part = "ends" if "with_layers" in given else given.get("left_out", "")
        return times.get(part, 100.0)

    monkeypatch.setattr(decode_layer, "replay_us", replay_us)
    (layer,) = decode_layer.measure(decoder, "qwen3-8b/bf16/b2/ctx1024")
    assert layer.id == "decode_layer/qwen3-8b/bf16/b2/ctx1024"
    assert (layer.unit, layer.value) == ("us", 60.0)
    printed = capsys.readouterr().out
    assert "attention       12.00 us" in printed and "head            25.00 us" in printed


def plain_layer(weights, decoder, x):
    """A layer as its definition has it, on dense weights in float32."""
    (w,), shape, batch = weights.layers, weights.shape, len(x)
    dense = lambda m: dequantize_rows(m.data, m.kind) if m.kind else m.data  # noqa: E731
    norm = lambda x, g: torch.nn.functional.rms_norm(x, g.shape, g, 1e-6)  # noqa: E731
    qkv = norm(x, w.attn_norm) @ torch.cat([dense(m) for m in w.qkv]).T
    q, k, v = (
        part.unflatten(1, (-1, shape.head_dim))
        for part in qkv.split([shape.q_dim, shape.kv_dim, shape.kv_dim], dim=1)
    )
    at = decoder.positions.long()
    cos, sin = (table[at][:, None] for table in (weights.cos, weights.sin))

    def rotated(heads, g):
        low, high = norm(heads, g).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    q, k = rotated(q, w.q_norm), rotated(k, w.k_norm)
    attended = []
    for i in range(batch):
        cached = [
            c[decoder.tables[i].long()].transpose(1, 2).flatten(0, 1) for c in decoder.caches[0]
        ]
        keys, values = (
            torch.cat((c[: at[i]], new[i][None])).repeat_interleave(2, 1)
            for c, new in zip(cached, (k, v), strict=True)
        )
        scores = torch.einsum("hd,khd->hk", q[i], keys) * shape.head_dim**-0.5
        attended.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
    x = x + torch.stack(attended) @ dense(w.out).T
    gate, up = (norm(x, w.mlp_norm) @ torch.cat([dense(m) for m in w.gate_up]).T).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ dense(w.down).T


@pytest.mark.parametrize(
    ("form", "batch", "backend"),
    [
        ("q4_K", 2, "cpu"),
        ("q4_K", MAX_ROWS + 1, "cpu"),
        ("bf16", 2, "cpu"),
        ("bf16", 1, "interpret"),
    ],
)
def test_a_decoders_layer_is_its_definition(form, batch, backend):
    weights = make_weights(TINY, form, "cpu", torch.float32, context=40)
    decoder = Decoder(get_backend(backend), weights, batch, 35)
    x = TensorFactory(torch.float32, seed=5).randn(batch, TINY.hidden)
    want = plain_layer(weights, decoder, x)
    residual = torch.zeros_like(x)
    x = decoder.layer(0, residual, x)
    assert_close(residual + x, want, scale=20)


@pytest.mark.parametrize("form", MODEL_FORMATS)
def test_a_step_gives_tokens_with_any_part_left_out(form):
    weights = make_weights(replace(TINY, num_layers=3), form, "cpu", torch.float32, context=40)
    assert form == "bf16" or [len(layer.qkv) for layer in weights.layers] == [1, 1, 2]
    decoder = Decoder(get_backend("cpu"), weights, 2, 35)
    first = decoder.step()
    assert first.shape == (2,) and decoder.logits.isfinite().all()
    decoder.backend = whole = Counting(get_backend("cpu"))
    assert torch.equal(decoder.step(), first)
    assert len(decoder.layer_parts) == (8 if form == "bf16" else 6)
    for part in (*decoder.layer_parts, *decode_layer.END_PARTS):
        decoder.backend = counting = Counting(get_backend("cpu"))
        decoder.step(left_out=part)
        assert len(counting.calls) < len(whole.calls), part
    decoder.backend = ends = Counting(get_backend("cpu"))
    assert decoder.step(with_layers=False).shape == (2,)
    assert len(ends.calls) == 4


class Counting:
    """A backend that notes the ops called."""

    def __init__(self, backend):
        self.backend, self.calls = backend, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.backend, name)


def test_half_of_the_layers_have_more_bits():
    assert sum(uses_more_bits(i, 36) for i in range(36)) == 18


@pytest.mark.parametrize(
    ("row", "layers", "most"),
    [
        ("decode/qwen3-8b/q4_K/b1/ctx1024", 36, 7),
        ("decode/qwen3-8b/q4_K/b8/ctx1024", 36, 11),
        ("decode/qwen3-8b/q4_K/b32/ctx1024", 36, 15),
        ("decode/qwen3-8b/bf16/b1/ctx1024", 36, 10),
        ("decode/qwen3-8b/bf16/b8/ctx1024", 36, 10),
        ("decode/qwen3-8b/bf16/b32/ctx1024", 36, 12),
        ("decode/qwen3-30b-a3b/q4_K/b1/ctx1024", 48, 12),
    ],
)
def test_a_layer_launches_no_more_than_is_published(row, layers, most):
    """docs/models.md has these numbers; beside its layers a step launches ten at most."""
    found = record(decode.meta_call(row), "sm_90")
    products = [n for n in found.operations if "matmul" in n or "linear" in n]
    assert len(found.launches) + len(products) <= most * layers + 10


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama-3.1-8b", "q4_1"),
        ("qwen3-30b-a3b", "mxfp4"),
        ("gemma3-27b", "bf16"),
        ("gpt-oss-20b", "mxfp4"),
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
        attention = config.hidden_size * (2 * config.q_dim + 2 * config.kv_dim)
        mlp = 3 * config.hidden_size * config.intermediate_size * (config.num_experts or 1)
        ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
        return (config.num_layers * (attention + mlp) + ends) / 1e9

    published = {"qwen3-8b": 8.2, "gemma3-27b": 27.0, "gpt-oss-20b": 20.9, "qwen3-30b-a3b": 30.5}
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
