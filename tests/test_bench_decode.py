"""Benches of decode steps: the decoder that is timed, what it launches, what its rows say."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import decode, decode_layer
from bench.decode_model import FORMATS as MODEL_FORMATS
from bench.decode_model import Decoder, Shape, make_weights, uses_more_bits
from bench.launches import record
from ferrum_triton import get_backend
from ferrum_triton.ops.quant_fused import MAX_ROWS
from ferrum_triton.quant import dequantize_rows
from ferrum_triton.testing import TensorFactory, assert_close

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
        ("decode/qwen3-8b/q4_K/b1/ctx1024", 36, 9),
        ("decode/qwen3-8b/q4_K/b8/ctx1024", 36, 11),
        ("decode/qwen3-8b/q4_K/b32/ctx1024", 36, 14),
        ("decode/qwen3-30b-a3b/q4_K/b1/ctx1024", 48, 12),
    ],
)
def test_a_layer_launches_no_more_than_is_published(row, layers, most):
    """docs/models.md has these numbers; beside its layers a step launches ten at most."""
    found = record(decode.meta_call(row), "sm_90")
    products = [name for name in found.operations if "matmul" in name]
    assert len(found.launches) + len(products) <= most * layers + 10
