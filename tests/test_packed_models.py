"""Whole models in the mixes of formats that files hold, their weights in planes."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.models import Llama
from ferrum_triton.models.config import RopeConfig
from ferrum_triton.models.weights import load_weights
from ferrum_triton.quant import FusedTensor, QuantizedTensor
from tests.tiny_models import PACKED, PackedSource

# Every K is a block of 256.
LLAMA = replace(
    PACKED,
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    head_dim=64,
    rope=replace(PACKED.rope, dim=64),
    tie_embeddings=False,
)
QWEN3 = {"rope": RopeConfig(theta=1e6, dim=64), "qk_norm": True, "tie_embeddings": True}
MODELS = {"llama": LLAMA, "qwen3": replace(LLAMA, **QWEN3)}
# Most matrices' format, and that of those which llama.cpp gives more bits.
MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0"),
}
PREFILL, STEPS = 9, 2

each_model = pytest.mark.parametrize("model", MODELS)
each_mix = pytest.mark.parametrize("mix", MIXES)


def narrow(config):
    """Few rows, since the interpreter is slow at each.

    Products with short rows are left to a format of small blocks.
    """
    return replace(
        config,
        vocab_size=8,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rope=replace(config.rope, dim=16),
    )


@cache
def source(config, mix):
    """V and down of the second of two layers have more bits, and so has the head."""
    plain, more = MIXES[mix]
    finer = {"blk.1.attn_v", "blk.1.ffn_down", "token_embd" if config.tie_embeddings else "output"}
    short = {"attn_output": config.q_dim % 256, "ffn_down": config.intermediate_size % 256}

    def kind_of(name):
        if short.get(name.rpartition(".")[2]):
            return "Q4_0"
        return more if name in finer else plain

    return PackedSource(config, kind_of)


def load(config, mix, backend, dtype=torch.float32):
    weights = load_weights(source(config, mix), config, backend, dtype, planes=True)
    return Llama(config, weights, backend, dtype)


def logits_of(model, steps=STEPS):
    """Of a prefill and of decode steps."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, model.config.vocab_size, (PREFILL + steps,), generator=generator)
    cache = model.new_cache(len(ids))
    chunks = ids.to(model.backend.device).split([PREFILL] + [1] * steps)
    return torch.cat([model.forward(chunk, cache, all_logits=True) for chunk in chunks]).cpu()


@each_mix
@each_model
def test_planes_are_multiplied_like_decoded_weights(model, mix, monkeypatch):
    """By the definitions of the ops: what the model passes to which."""
    config = MODELS[model]
    backend = get_backend("cpu")
    want = logits_of(load(config, mix, backend))
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "provider_of", lambda self, op: "one that keeps them packed")
        packed = load(config, mix, backend)
    plain, more = (f"{kind}:planes" for kind in MIXES[mix])
    assert isinstance(packed.weights.embedding, QuantizedTensor)
    assert packed.weights.head.kind == more
    first, second = packed.weights.layers
    assert isinstance(first.qkv.weight, QuantizedTensor), "of one format, Q, K and V are one"
    assert isinstance(first.mlp.gate_up.weight, FusedTensor), (
        "gate and up are apart for their launch"
    )
    assert second.mlp.down.weight.kind == more
    parts = getattr(second.qkv.weight, "parts", (second.qkv.weight,))
    assert [part.kind for part in parts] == ([plain] if plain == more else [plain, more])
    torch.testing.assert_close(logits_of(packed), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model", "mix"), [("llama", "Q4_K_M"), ("qwen3", "Q5_K_M")])
def test_kernels_over_planes_equal_the_decoded_model(model, mix, interpreted):
    config = narrow(MODELS[model])
    want = logits_of(load(config, mix, get_backend("cpu")), steps=1)
    got = logits_of(load(config, mix, get_backend("interpret")), steps=1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert {"_decode_planes_kernel", "_gemv_repacked_kernel"} <= interpreted


@pytest.mark.gpu
@each_mix
@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_equals_the_decoded_model(model, mix, dtype):
    config = MODELS[model]
    want = logits_of(load(config, mix, get_backend("cpu")))
    got = logits_of(load(config, mix, get_backend("cuda"), dtype))
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}[dtype]
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_planes_are_for_what_stays_packed():
    for name, planes, kind in (("interpret", None, "Q4_1"), ("interpret", True, "Q4_1:planes")):
        source = PackedSource()
        weights = load_weights(source, PACKED, get_backend(name), torch.float32, planes=planes)
        assert weights.layers[0].qkv.weight.parts[0].kind == kind
    weights = load_weights(PackedSource(), PACKED, get_backend("cpu"), torch.float32, planes=True)
    assert isinstance(weights.layers[0].mlp.gate_up.weight, torch.Tensor), "gate and up are one"
