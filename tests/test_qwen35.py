"""Qwen3.5, its mixtures and Qwen3-Next: logits of transformers, in any steps, from any file."""

import dataclasses
import json
from collections import Counter

import pytest
import torch

from bench import decode, launches
from ferrum_triton import FileError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.experts import mixture
from ferrum_triton.models.linear import Linear
from ferrum_triton.models.qwen35 import HF_NAMES, Qwen35
from ferrum_triton.models.step import varlen_step
from ferrum_triton.quant import QuantizedTensor
from tests import tiny_files
from tests.test_models import run, tokens
from tests.tiny_models import write_gguf

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
    "max_position_embeddings": 160,
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


def configured(kind, **changed):
    name, extra = KINDS[kind]
    shape = {k: v for k, v in SHAPE.items() if not extra or k != "intermediate_size"}
    return getattr(transformers, name)(**shape | extra | changed)


def make(kind, **changed):
    config = configured(kind, **changed)
    torch.manual_seed(0)
    return shaken(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def shaken(model):
    """A model of random weights, away from ones and zeros, which would hide a swapped norm."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter * 0.5 + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model.eval()


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


def assert_same(got, want, bound=1e-3):
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(tiny, kind):
    """In one step, in several and token by token, by either form of the delta rule."""
    directory, theirs = tiny(kind)
    model, ids = load_model(directory, get_backend("cpu")), tokens(38)
    assert isinstance(model, Qwen35)
    want = logits_of(theirs, ids)
    for cuts in ([38], [30] + [1] * 8, [3, 9, 26]):
        assert_same(run(model, *ids.split(cuts)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_step_equals_transformers(tiny, kind):
    """A token of one sequence beside a chunk of a second and the whole of a third."""
    directory, theirs = tiny(kind)
    model = load_model(directory, get_backend("cpu"))
    cache = model.new_cache(40, num_seqs=4)
    texts = {3: tokens(12, seed=1), 0: tokens(30, seed=2), 2: tokens(5, seed=3)}
    read = {3: 11, 0: 7, 2: 0}
    for seq, count in read.items():
        if count:
            model.forward(texts[seq][:count], cache, seq)
    cache.reserve({seq: len(ids) for seq, ids in texts.items()})
    with torch.inference_mode():
        parts = [(seq, ids[read[seq] :].tolist()) for seq, ids in texts.items()]
        got = model.run(varlen_step(cache, parts), cache)
    want = [logits_of(theirs, ids)[read[seq] :] for seq, ids in texts.items()]
    assert_same(got, torch.cat(want))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(tiny, kind):
    directory, theirs = tiny(kind)
    model, ids = load_model(directory, get_backend("cpu")), tokens(8, seed=3)
    with torch.inference_mode():
        want = theirs.generate(
            ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=64, do_sample=False
        )
    got = model.generate(ids.tolist(), max_tokens=64, end_ids=())
    assert got.ids == want[0, 8:].tolist()
    assert len(set(got.ids)) > 4


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_one_with_a_vision_tower(kind, tmp_path):
    """Saved whole, with its experts in one tensor as published files have them."""
    name = KINDS[kind][0].replace("Text", "")
    text = configured(kind, tie_word_embeddings=False).to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = getattr(transformers, name)(
        text_config=text, vision_config=vision | {"out_hidden_size": 64}
    )
    theirs = shaken(transformers.AutoModelForImageTextToText.from_config(config))
    fused = {k: v.clone() for k, v in theirs.state_dict().items()}
    assert any("visual" in key for key in fused)
    save(tmp_path, fused, {**config.to_dict(), "architectures": [type(theirs).__name__]})
    ids = tokens(12)
    assert_same(run(load_model(tmp_path, get_backend("cpu")), ids), logits_of(theirs, ids))
    theirs.save_pretrained(tmp_path)
    assert_same(run(load_model(tmp_path, get_backend("cpu")), ids), logits_of(theirs, ids))


def save(directory, tensors, config):
    from safetensors.torch import save_file

    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_a_gguf_file_is_what_transformers_reads_of_it(architecture, tmp_path):
    """Value heads lie as llama.cpp's files have them, and columns of a last product with them."""
    tiny_files.write(tmp_path / "model.gguf", architecture)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()
    model, ids = load_model(tmp_path / "model.gguf", get_backend("cpu")), tokens(30)
    assert model.config.has_tiled_values and model.config.linear == (True, False)
    assert_same(run(model, *ids.split([20, 9, 1])), logits_of(theirs, ids))
    packed = load_model(tmp_path / "model.gguf", get_backend("interpret"))
    parts = packed.weights.layers[0].qkv.weight.parts
    assert all(isinstance(part, QuantizedTensor) for part in parts), "they stay packed"
    assert_same(run(packed, *ids[:7].split([5, 1, 1])), run(model, ids[:7]))


@pytest.mark.parametrize("batch", [1, 8])
def test_heads_as_a_file_has_them_take_no_launch_more(batch):
    """A layer's convolution, its rule and its norm are a launch each, of Qwen3.5-9B's shape."""
    recorded = launches.record(decode.meta_call(f"decode/qwen3.5-9b/q4_K/b{batch}/ctx1024"))
    names = Counter(launch.kernel.name for launch in recorded.launches)
    kernels = ("_gdn_prepare_kernel", "_gdn_decode_kernel", "_gated_rms_norm_kernel")
    assert [names[name] for name in kernels] == [24, 24, 24]


@torch.inference_mode()
def test_a_shared_expert_in_planes(tmp_path, interpreted):
    """As a GPU has it: gate, up and activation are one launch."""
    tiny_files.write(tmp_path / "model.gguf", "qwen35moe")
    model, h = load_model(tmp_path / "model.gguf", get_backend("interpret")), torch.randn(2, 64)
    experts = model.weights.layers[0].mlp
    want = mixture(model.backend, h, experts)
    in_planes = Linear(experts.shared.gate_up.weight.in_planes())
    shared = dataclasses.replace(experts.shared, gate_up=in_planes)
    got = mixture(model.backend, h, dataclasses.replace(experts, shared=shared))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert "_gemv_several_kernel" in interpreted


def test_states_that_would_grow_are_refused(tmp_path):
    theirs = make("qwen3_next", layer_types=LAYERS[:2] * 2)
    tensors = dict(tensors_of_next(theirs, False))
    tensors["blk.0.ssm_a"][1] = 0.01
    write_gguf(tmp_path / "model.gguf", "qwen3next", METADATA, tensors)
    with pytest.raises(FileError, match=r"ssm_a.*lets states grow"):
        load_model(tmp_path / "model.gguf", get_backend("cpu"))


def test_a_gguf_file_of_qwen3_next(tmp_path):
    """By the names of llama.cpp's converter, queries to z apart and joined."""
    theirs, ids = make("qwen3_next", layer_types=LAYERS[:2] * 2), tokens(12)
    want = logits_of(theirs, ids)
    for is_joined in (False, True):
        tensors, metadata = dict(tensors_of_next(theirs, is_joined)), dict(METADATA)
        if is_joined:  # with a layer that guesses ahead, which is left out
            metadata |= {"block_count": len(LAYERS) + 1, "nextn_predict_layers": 1}
            tensors["blk.4.nextn.eh_proj.weight"] = torch.zeros(64, 128)
        write_gguf(tmp_path / "model.gguf", "qwen3next", metadata, tensors)
        model = load_model(tmp_path / "model.gguf", get_backend("cpu"))
        assert not model.config.has_tiled_values
        assert_same(run(model, ids), want)


def tensors_of_next(theirs, is_joined):
    """Tensors of Qwen3-Next by llama.cpp's names, and with its meanings."""
    ours = {name: stem for stem, name in HF_NAMES.items() if "experts" not in name}
    for name, weight in theirs.state_dict().items():
        stem = ".".join(name.split(".")[3:]) if ".layers." in name else name
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        kind = stem.rpartition(".")[2]
        if kind == "A_log":
            yield f"{layer}ssm_a", -weight.exp()
        elif kind == "dt_bias":
            yield f"{layer}ssm_dt.bias", weight
        elif kind == "gate_up_proj":
            yield from zip(
                (f"{layer}ffn_{part}_exps.weight" for part in ("gate", "up")),
                weight.chunk(2, dim=1),
                strict=True,
            )
        elif kind == "down_proj":
            yield f"{layer}ffn_down_exps.weight", weight
        elif "in_proj_qkvz" in stem and not is_joined:
            q, k, v, z = weight.unflatten(0, (2, -1)).split([16, 16, 72, 72], dim=1)
            yield f"{layer}attn_qkv.weight", torch.cat([x.flatten(0, 1) for x in (q, k, v)])
            yield f"{layer}attn_gate.weight", z.flatten(0, 1)
        else:
            is_centred = "norm" in stem and "linear_attn" not in stem
            one = "conv1d" in stem or "shared_expert_gate" in stem
            weight = weight.squeeze(1 if "conv1d" in stem else 0) if one else weight
            yield f"{layer}{ours[stem.removesuffix('.weight')]}.weight", weight + is_centred


METADATA = {
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 40,
    "expert_count": 6,
    "expert_used_count": 2,
    "block_count": len(LAYERS),
    "context_length": 160,
    "full_attention_interval": 2,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 144,
    "vocab_size": 96,
}


@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernels_equal_transformers(kind, tmp_path, interpreted):
    """A layer of each kind: a chunk by products of matrices, then tokens in turn."""
    theirs = make(kind, layer_types=LAYERS[:2], num_hidden_layers=2)
    theirs.save_pretrained(tmp_path)
    model, ids = load_model(tmp_path, get_backend("interpret")), tokens(20, seed=5)
    assert_same(run(model, *ids.split([18, 1, 1])), logits_of(theirs, ids))
    assert {"_gdn_prepare_kernel", "_gated_rms_norm_kernel", "_sigmoid_gate_kernel"} <= interpreted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_transformers(tiny, kind, dtype):
    directory, theirs = tiny(kind)
    model, ids = load_model(directory, get_backend("cuda"), dtype), tokens(38, seed=6)
    want = logits_of(theirs, ids)
    got = run(model, *ids.cuda().split([30, 5, 1, 1, 1]))
    # Where rounding has other experts chosen, a token and those behind it differ, as transformers'
    # own results do between its dtypes: of 16 bits the median of tokens is held to a bound.
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    error = errors.max() if dtype == torch.float32 else errors.median()
    assert error < {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2.5e-1}[dtype]
