"""Benches beside transformers: a layer before and after conversion, and whole models."""

import argparse
from dataclasses import replace

import pytest
import torch

from bench import convert, transformers_models
from bench.cases import code_of
from bench.random_models import CONFIGS, random_blocks
from ferrum_triton.integrations.transformers import convert as convert_model
from ferrum_triton.integrations.transformers.layers import PackedLinear
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.testing import TensorFactory
from tests.test_bench_decode import shrunk

pytest.importorskip("transformers", reason="transformers makes the models")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_every_way_of_a_packed_layer_is_its_product(kind, num_tokens):
    weight = random_blocks(kind, (70, 512), "cpu")
    x = TensorFactory(torch.bfloat16, seed=int(torch.randint(2**31, ()))).randn(num_tokens, 512)
    ways = convert.ways(weight, x.dtype)
    assert [*ways] == ["planes", "door", "transformers", "dense"]
    assert isinstance(ways["planes"], PackedLinear) and ways["planes"].kind == f"{kind}:planes"
    for name, way in ways.items():
        convert.check(name, way, x, weight)
    other = random_blocks(kind, (70, 512), "cpu")
    with pytest.raises(AssertionError, match="planes"):
        convert.check("planes", ways["planes"], x, other)


def test_rows_of_a_converted_layer_have_code():
    row = "convert/Q4_K/n4096k4096/m8"
    assert code_of(row) == code_of("gemm_quant/q4_K/n4096k4096/m8") != code_of(row, "sm_80")
    assert convert.meta_call("convert/F16/n4096k4096/m8") is None
    assert convert.shape_of("14336x4096") == (14336, 4096)
    with pytest.raises(argparse.ArgumentTypeError, match="ROWSxCOLUMNS"):
        convert.shape_of("14336")


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_has_the_same_shapes(name):
    config = CONFIGS[name]
    changed = {"num_layers": 1}
    if hasattr(config, "windows"):
        changed["windows"] = config.windows[:1]
    if isinstance(config, Qwen35Config):  # a layer of each kind
        changed = {"num_layers": 2, "linear": (False, True)}
    config = replace(config, **changed)
    theirs = transformers_models.their_model(config, "meta")
    source = transformers_models.RandomSource(config, "bf16", "meta")
    linears = {
        transformers_models.gguf_name(module): tuple(m.weight.shape)
        for module, m in theirs.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    ours = {key: source.fetch(key).shape for key in linears if key in source}
    assert ours and all(linears[key] == tuple(shape) for key, shape in ours.items())
    assert {"blk.0.attn_q.weight", "blk.0.attn_output.weight"} <= ours.keys()
    assert len(ours) == len(linears) or not isinstance(config, Qwen35Config)
    assert theirs.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma3-27b", "gpt-oss-20b"])
def test_a_converted_model_is_timed_at_its_generate(name):
    config = shrunk(name, width=256, head_dim=32)
    model = transformers_models.their_model(config, "cpu")
    assert transformers_models.decode_speed(model, 2, 24, 5) > 0
    assert transformers_models.pack(model, config, "q4_K") >= 8
    report = convert_model(model)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert report.attention == "ferrum" and len(packed) >= 8
    assert {module.kind for module in packed} >= {"Q4_K:planes", "Q6_K:planes"}
    assert transformers_models.decode_speed(model, 2, 24, 5) > 0
