"""Qwen3.5, its mixtures and Qwen3-Next: equal to transformers in any steps, from files of each kind."""

import dataclasses
import json

import pytest
import torch

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.decoder import BLOCK_SIZE
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.qwen35 import Qwen35
from ferrum_triton.models.step import varlen_step
from ferrum_triton.runtime.states import StateCache
from tests.test_models import run, tokens

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
KINDS = {
    "qwen3_5": ("Qwen3_5TextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", EXPERTS),
}


def make(kind, **changed):
    """A random model, away from the initial ones and zeros, which would hide a swapped norm."""
    name, extra = KINDS[kind]
    shape = {k: v for k, v in SHAPE.items() if not extra or k != "intermediate_size"}
    config = getattr(transformers, name)(**shape | extra | changed)
    torch.manual_seed(sum(kind.encode()))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    shake(model)
    return model


def shake(model):
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter * 0.5 + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, transformers' model) by kind, made once."""
    made = {}

    def get(kind):
        if kind not in made:
            theirs, directory = make(kind), tmp_path_factory.mktemp(kind)
            theirs.save_pretrained(directory)
            made[kind] = directory, theirs
        return made[kind]

    return get


def logits_of(theirs, ids):
    with torch.inference_mode():
        return theirs(ids[None]).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(tiny, kind):
    """In one step, in several and token by token; longer than a chunk of the delta rule."""
    directory, theirs = tiny(kind)
    model, ids = load_model(directory, get_backend("cpu")), tokens(38)
    assert isinstance(model, Qwen35)
    want = logits_of(theirs, ids)
    assert want.std() > 0.1
    for cuts in ([38], [30] + [1] * 8, [3, 9, 26]):
        torch.testing.assert_close(run(model, *ids.split(cuts)), want, rtol=1e-3, atol=1e-3)
