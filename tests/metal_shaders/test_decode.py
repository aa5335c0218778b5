"""A real model's decode steps through the emulated Metal backend."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.backends import PROVIDERS, metal
from ferrum_triton.backends.backend import Backend
from ferrum_triton.backends.metal.shader import Shader
from ferrum_triton.cli.default_model import INSTALL, find_default_model
from ferrum_triton.models import load_model, load_tokenizer
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.testing import assert_close
from tests.metal_shaders.emulator import emulated, needs_clang

MODEL = find_default_model()
pytestmark = [
    needs_clang,
    pytest.mark.skipif(MODEL is None, reason=f"the real model is absent: {INSTALL}"),
]

PROMPT = "The quick brown fox jumps over the lazy dog, and then"
# What a step is made of, but for copies.
OF_A_STEP = {
    "embedding_quant",
    "fused_add_rms_norm",
    "gemv_quant",
    "prepare_heads",
    "attend_split",
    "activate_multiply_split",
}


def test_two_tokens_are_those_of_the_cpu(monkeypatch):
    """A prompt, then two decode steps: the CPU backend's logits, and its choices."""
    launched = []
    launch = Shader.launch

    def counted(shader, *args, **kwargs):
        launched.append(shader.name)
        launch(shader, *args, **kwargs)

    monkeypatch.setattr(Shader, "launch", counted)
    metal.load_shaders()
    prompt = torch.tensor(load_tokenizer(MODEL).encode(PROMPT))
    with emulated():
        backend = Backend("metal", "cpu", PROVIDERS["metal"])
        ours, theirs = (load_model(MODEL, b) for b in (backend, get_backend("cpu")))
        assert isinstance(ours.weights.layers[0].attn_out.weight, QuantizedTensor)
        caches = [model.new_cache(len(prompt) + 2) for model in (ours, theirs)]
        ids = prompt
        for step in range(3):
            if step == 1:
                assert {"dequantize", "attend_tiles"} <= set(launched)  # of many tokens
                launched.clear()
            logits, want = (
                m.forward(ids, cache) for m, cache in zip((ours, theirs), caches, strict=True)
            )
            assert_close(logits[-1], want[-1].double(), scale=20)  # thirty layers deep
            ids = backend.argmax_rows(logits[-1:]).long()
            assert torch.equal(ids, want[-1:].argmax(-1))
    assert set(launched) == {*OF_A_STEP, "argmax_rows"}
