"""gpt-oss: its logits against transformers', files of both kinds, and what of them is refused."""

import copy
import dataclasses
import json

import pytest
import torch

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.gpt_oss import (
    HF_NAMES,
    DenseBiasedExperts,
    GptOss,
    GptOssConfig,
)
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.quant.float4 import mxfp4_of_gguf
from ferrum_triton.testing import assert_close
from tests.test_models import run, tokens
from tests.tiny_models import gguf_name, write_gguf

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

NUM_EXPERTS, TOP_K, HIDDEN, INNER, LAYERS, WINDOW = 6, 2, 64, 32, 4, 5
SHAPE = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
METADATA = {
    "embedding_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.sliding_window": WINDOW,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": INNER,
    "expert_feed_forward_length": INNER,
    "expert_count": NUM_EXPERTS,
    "expert_used_count": TOP_K,
    "block_count": LAYERS,
    "context_length": 128,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "vocab_size": 96,
}
# transformers decodes what the files hold, so that both sides have the same numbers.
GATE_UP = (NUM_EXPERTS, 2 * INNER, HIDDEN // 32)
DOWN = (NUM_EXPERTS, HIDDEN, INNER // 32)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """transformers' model, and its tensors as its own directories and as GGUF files have them."""

    theirs: torch.nn.Module
    hf: dict[str, torch.Tensor]
    gguf: dict[str, torch.Tensor | QuantizedTensor]

    def save(self, directory, **changed):
        """A Hugging Face directory, its tensors changed by name; None leaves one out."""
        from safetensors.torch import save_file

        config = self.theirs.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
        config["quantization_config"] = {"quant_method": "mxfp4"}
        (directory / "config.json").write_text(json.dumps(config))
        stored = {k: v.contiguous() for k, v in (self.hf | changed).items() if v is not None}
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        return directory


def make(num_layers):
    """A random model, away from the initial ones and zeros, which would hide a lost bias."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(**SHAPE, num_hidden_layers=num_layers)
    torch.manual_seed(7)
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    hf, gguf = {}, {}
    ours = {name: stem for stem, name in HF_NAMES.items()}
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            stem = name.rpartition(".")[2]
            if stem in ("gate_up_proj", "down_proj"):
                shape = GATE_UP if stem == "gate_up_proj" else DOWN
                codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
                least = 122 if stem == "gate_up_proj" else 119
                scales = torch.randint(least, least + 3, shape, dtype=torch.uint8)
                weight.copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
                hf |= {f"{name}_blocks": codes, f"{name}_scales": scales}
                add_experts(gguf, name, mxfp4_of_gguf(codes, scales).split(1, 1))
                continue
            noise = torch.randn_like(weight)
            if stem == "weight" and weight.dim() == 1:
                weight.copy_(0.5 + 0.3 * noise)
            else:
                wide = weight.dim() == 1 or "embed" in name or stem == "gate_up_proj_bias"
                weight.copy_(noise if wide else 0.15 * noise)
            hf[name] = weight.clone()
            if stem.endswith("proj_bias"):
                add_experts(gguf, name.removesuffix("_bias"), weight.clone().split(1, 1))
            elif stem == "sinks":
                gguf[gguf_name(name, ours)] = weight.clone()
            else:
                kind = name.rpartition(".")[2]
                stem = gguf_name(name.removesuffix(f".{kind}"), ours).removesuffix("weight")
                gguf[stem + kind] = weight.clone()
    return Tiny(theirs, hf, gguf)


def add_experts(gguf, name, rows):
    """Rows of all experts, of which gate's and up's take turns in ``name``."""
    layer = name.split(".mlp.")[0].replace("model.layers", "blk")
    parts = {"down": rows} if "down" in name else {"gate": rows[::2], "up": rows[1::2]}
    for part, chosen in parts.items():
        stack = torch.cat(chosen, dim=1)
        packed = stack.dtype == torch.uint8
        kind = "weight" if packed else "bias"
        gguf[f"{layer}.ffn_{part}_exps.{kind}"] = (
            QuantizedTensor(stack, "MXFP4") if packed else stack
        )


@pytest.fixture(scope="module")
def tiny():
    return make(LAYERS)


@pytest.fixture(scope="module")
def directory(tiny, tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("gpt_oss"))


def logits_of(theirs, ids):
    with torch.inference_mode():
        return theirs(ids[None]).logits[0]


def test_equals_transformers(tiny, directory):
    """In one step, in several and token by token, over sequences four windows long."""
    model, ids = load_model(directory, get_backend("cpu")), tokens(20)
    assert isinstance(model, GptOss)
    assert model.config.windows == (WINDOW, 0, WINDOW, 0)
    assert model.weights.layers[0].mlp.gate.kind == "MXFP4", "experts stay packed"
    want = logits_of(tiny.theirs, ids)
    assert want.std() > 0.1
    for cuts in ([20], [12] + [1] * 8, [3, 9, 8]):
        torch.testing.assert_close(run(model, *ids.split(cuts)), want, rtol=1e-3, atol=1e-3)


def test_greedy_text_is_that_of_transformers(tiny, directory):
    model, ids = load_model(directory, get_backend("cpu")), tokens(8, seed=3)
    with torch.inference_mode():
        want = tiny.theirs.generate(
            ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=64, do_sample=False
        )
    got = model.generate(ids.tolist(), max_tokens=64, end_ids=())
    assert got.ids == want[0, 8:].tolist()
    assert len(set(got.ids)) > 4


def test_a_gguf_file_is_the_directory(tiny, directory, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, "gpt-oss", METADATA, tiny.gguf)
    models = [load_model(path, get_backend("cpu")) for path in (file, directory)]
    eps = models[0].config.rms_norm_eps  # in float32
    assert dataclasses.replace(models[1].config, rms_norm_eps=eps) == models[0].config
    torch.testing.assert_close(*(run(m, tokens(20)) for m in models), rtol=1e-5, atol=1e-5)


def test_matrices_of_gguf_files_may_be_packed_too(tiny, tmp_path):
    from ferrum_triton.quant import FORMATS, quantize_blocks

    stored = dict(tiny.gguf)
    for name, weight in tiny.gguf.items():
        if name.endswith((".attn_q.weight", ".attn_v.weight")) or name == "output.weight":
            packed = QuantizedTensor(quantize_blocks(weight, FORMATS["Q8_0"]), "Q8_0")
            stored[name] = packed
    file = tmp_path / "model.gguf"
    write_gguf(file, "gpt-oss", METADATA, stored)
    got = run(load_model(file, get_backend("cpu")), tokens(12))
    assert (got - logits_of(tiny.theirs, tokens(12))).norm() < 0.05 * got.norm()


def test_sinks_and_windows_matter(tiny, directory):
    """What the other tests compare depends on both."""
    model, ids = load_model(directory, get_backend("cpu")), tokens(20)
    want = logits_of(tiny.theirs, ids)
    layers = model.weights.layers
    without = tuple(dataclasses.replace(layer, sinks=None) for layer in layers)
    model.weights = dataclasses.replace(model.weights, layers=without)
    assert (run(model, ids) - want).abs().max() > 0.1
    model.weights = dataclasses.replace(model.weights, layers=layers)
    model.config = dataclasses.replace(model.config, windows=(0,) * LAYERS)
    assert (run(model, ids) - want).abs().max() > 0.1


def test_interpreted_kernels_equal_transformers(tmp_path, interpreted):
    """One layer: many tokens through buckets, few through their ids."""
    tiny = make(1)
    model, ids = load_model(tiny.save(tmp_path), get_backend("interpret")), tokens(9, seed=5)
    want = logits_of(tiny.theirs, ids)
    torch.testing.assert_close(run(model, *ids.split([7, 2])), want, rtol=1e-3, atol=1e-3)
    ours = {"_clamped_swiglu_kernel", "_expert_gemv_kernel", "_gemm_quant_moe_id_kernel"}
    assert ours | {"_paged_decode_kernel", "_weighted_sum_norm_kernel"} <= interpreted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_equals_transformers(tiny, directory, dtype):
    model, ids = load_model(directory, get_backend("cuda"), dtype), tokens(14, seed=6)
    want = logits_of(tiny.theirs, ids)
    got = run(model, *ids.cuda().split([10, 1, 1, 1, 1]))
    bound = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}[dtype]
    assert (got - want).norm() < bound * want.norm()
    # The engine's decode steps are replayed from graphs.
    answer = model.generate(ids.tolist(), max_tokens=32, end_ids=()).ids
    cache, new = model.new_cache(46), ids.cuda()
    for token in answer if dtype == torch.float32 else ():
        new = model.forward(new, cache).argmax(-1)
        assert new.item() == token


# Kernels over planes take a minute to interpret; test_moe_planes has them by themselves.
LAID_OUT = [("cpu", True), ("interpret", False)]
LAID_OUT += [pytest.param("cuda", planes, marks=pytest.mark.gpu) for planes in (False, True)]


@pytest.mark.parametrize(("backend_name", "planes"), LAID_OUT)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_mixture_is_that_of_transformers(tiny, directory, backend_name, num_tokens, planes):
    """In float64, with experts as the file has them and in planes; few tokens and many."""
    model = load_model(directory, get_backend(backend_name))
    block = copy.deepcopy(tiny.theirs.model.layers[0].mlp).double()
    block.experts.config._experts_implementation = "eager"  # the other one takes no float64
    h, residual = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, HIDDEN)
    with torch.inference_mode():
        want = residual + block(h[None].double())[0][0]
    experts = model.weights.layers[0].mlp
    if planes:
        stacks = {part: getattr(experts, part).in_planes() for part in ("gate", "up", "down")}
        experts = dataclasses.replace(experts, **stacks)
    placed = [x.to(model.backend.device) for x in (h, residual, 0.5 + torch.rand(HIDDEN))]
    with torch.inference_mode():
        normed = model._mixture(placed[0], experts, *placed[1:])
    assert_close(placed[1].cpu(), want, scale=64, name="mixture")  # three products in a row
    want = torch.nn.functional.rms_norm(want, (HIDDEN,), placed[2].cpu().double(), 1e-5)
    assert_close(normed.cpu(), want, scale=64, name="norm")


def test_the_activation_is_that_of_transformers(tiny):
    experts = tiny.theirs.model.layers[0].mlp.experts
    gate_up = 6 * torch.randn(3, TOP_K, 2 * INNER)
    ids = torch.randint(0, NUM_EXPERTS, (3, TOP_K))
    bias = experts.gate_up_proj_bias.detach()
    want = experts._apply_gate(gate_up + bias[ids])
    halves = [x[..., part::2].contiguous() for x in (gate_up, bias) for part in (0, 1)]
    got = get_backend("cpu").clamped_swiglu_moe_id(*halves, ids)
    assert_close(got, want)


def test_blocks_keep_every_weight():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 5, 2, 1).view(3, 5, 32, 16)
    scales = torch.randint(100, 140, (3, 5, 32), dtype=torch.uint8)
    want = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).mT
    assert torch.equal(QuantizedTensor(mxfp4_of_gguf(codes, scales), "MXFP4").dequantize(), want)


EXPERTS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.2.self_attn.sinks", None, r"2\.self_attn\.sinks' is missing"),
        ("model.layers.2.self_attn.o_proj.bias", None, r"2\.self_attn\.o_proj\.bias are missing"),
        ("model.layers.2.mlp.router.bias", None, r"2\.mlp\.router\.bias' is missing"),
        (f"{EXPERTS}down_proj_blocks", None, r"experts\.down_proj_blocks' is missing"),
        (f"{EXPERTS}down_proj_scales", None, r"experts\.down_proj_scales' is missing"),
        (f"{EXPERTS}gate_up_proj_bias", None, r"experts\.gate_up_proj_bias' is missing"),
        (f"{EXPERTS}gate_up_proj_bias", torch.ones(()), "has shape"),
        (f"{EXPERTS}gate_up_proj_scales", torch.ones(*GATE_UP), "no bytes"),
        (f"{EXPERTS}gate_up_proj_scales", torch.ones(3).byte(), "no bytes"),
        (f"{EXPERTS}down_proj_blocks", torch.ones(*DOWN, 8).byte(), "no bytes"),
        (f"{EXPERTS}down_proj_scales", torch.full(DOWN, 255).byte(), "not finite"),
        (f"{EXPERTS}extra", torch.ones(3), r"extra' the first"),
    ],
)
def test_bad_tensors_are_refused(tiny, tmp_path, name, tensor, message):
    with pytest.raises(FileError, match=message):
        load_model(tiny.save(tmp_path, **{name: tensor}), get_backend("cpu"))


def plain(tiny):
    """Tensors of a directory whose experts are not packed."""
    changed = {}
    for name in tiny.hf:
        if name.endswith(("_blocks", "_scales")):
            changed[name] = None
            stem = name.rpartition("_")[0]
            changed[stem] = tiny.theirs.get_parameter(stem).detach().clone()
    return changed


@pytest.mark.parametrize(
    "backend_name", ["cpu", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_experts_need_not_be_packed(tmp_path, backend_name):
    """Those of transformers' directories and of GGUF files; few tokens and many."""
    tiny, backend, ids = make(1), get_backend(backend_name), tokens(9, seed=5)
    want = logits_of(tiny.theirs, ids)
    path = tiny.save(tmp_path, **plain(tiny))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    stored = {
        name: held.dequantize() if isinstance(held, QuantizedTensor) else held
        for name, held in tiny.gguf.items()
    }
    file = tmp_path / "model.gguf"
    write_gguf(file, "gpt-oss", METADATA | {"block_count": 1}, stored)
    for place in (path, file):
        model = load_model(place, backend)
        assert isinstance(model.weights.layers[0].mlp, DenseBiasedExperts)
        got = run(model, *ids.to(backend.device).split([7, 2]))
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(NUM_EXPERTS, HIDDEN, 3), (NUM_EXPERTS, HIDDEN)])
def test_plain_experts_of_another_shape_are_refused(tiny, tmp_path, shape):
    path = tiny.save(tmp_path, **plain(tiny) | {f"{EXPERTS}down_proj": torch.ones(shape)})
    with pytest.raises(FileError, match="has shape"):
        load_model(path, get_backend("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' is not supported; known: mxfp4"),
        ({"quantization_config": [1]}, "is not supported; known: mxfp4"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"swiglu_limit": 0.0}, "swiglu_limit 0"),
        ({"swiglu_limit": "7"}, "swiglu_limit is '7'"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha -1"),
        ({"layer_types": ["full_attention"]}, "no list of 4 types"),
        ({"layer_types": ["chunked_attention"] * LAYERS}, "'chunked_attention' is not supported"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 7}, "7 of 6 experts"),
    ],
)
def test_bad_configs_are_refused(directory, change, message):
    path = directory / "config.json"
    with pytest.raises(FileError, match=message):
        GptOssConfig.from_hf(json.loads(path.read_text()) | change, path)


def test_what_a_config_leaves_out_is_the_familys(directory):
    path = directory / "config.json"
    named = json.loads(path.read_text())
    optional = ("layer_types", "swiglu_alpha", "swiglu_limit", "attention_bias", "hidden_act")
    least = {key: value for key, value in named.items() if key not in optional}
    assert GptOssConfig.from_hf(least, path) == GptOssConfig.from_hf(named, path)
    rope = GptOssConfig.from_hf(least | {"rope_parameters": None}, path).rope
    assert (rope.theta, rope.kind, rope.factor) == (150000.0, "yarn", 32.0)
    assert (rope.original_positions, rope.truncate) == (4096, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope.scaling.type": "linear"}, "'linear' is not supported; known: yarn"),
        ({"rope.scaling.type": None}, "'none' is not supported; known: yarn"),
        ({"rope.scaling.factor": None}, "rope.scaling.factor is missing"),
        ({"rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast of 16"),
        ({"expert_count": None}, "expert_count is missing"),
        ({"expert_used_count": 40}, "40 of 6 experts"),
    ],
)
def test_bad_metadata_is_refused(change, message):
    metadata = {f"gpt-oss.{key}": value for key, value in (METADATA | change).items()}
    with pytest.raises(FileError, match=message):
        GptOssConfig.from_gguf(metadata, {}, "x.gguf")


def test_experts_of_none_are_refused():
    x, bias = torch.ones(2, 3, 8), torch.ones(0, 8)
    with pytest.raises(InputError, match="at least one expert"):
        get_backend("cpu").clamped_swiglu_moe_id(x, x, bias, bias, torch.zeros(2, 3).int())
