"""Mixtures of experts, packed and not: Qwen3-MoE's and Mixtral's files and directories."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, get_backend
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.models import Llama, LlamaConfig, load_model
from ferrum_triton.models.experts import DenseExperts, PackedExperts, mixture
from ferrum_triton.models.roof import bytes_of_step
from ferrum_triton.models.weights import HF_NAMES
from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS
from tests.test_models import run, tokens
from tests.tiny_models import gguf_name, write_gguf

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 64, 32
METADATA = {
    "embedding_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "feed_forward_length": 96,
    "expert_feed_forward_length": INNER,
    "expert_count": NUM_EXPERTS,
    "expert_used_count": TOP_K,
    "block_count": 2,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
    "vocab_size": 96,
}
STEMS = {theirs: ours for ours, theirs in HF_NAMES.items()} | {"mlp.gate": "ffn_gate_inp"}


def pack(weights, kind="Q8_0"):
    return QuantizedTensor(quantize_blocks(weights.contiguous(), FORMATS[kind]), kind)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    """(GGUF file with packed experts, transformers' model of the same weights)"""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    stored = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = 0.2 * torch.randn_like(weight)
            weight.copy_(1 + noise if weight.dim() == 1 else noise)
            layer = name.split(".mlp.")[0].replace("model.layers", "blk")
            if weight.dim() == 3:
                names = ("down",) if "down" in name else ("gate", "up")
                for part, values in zip(names, weight.chunk(len(names), 1), strict=True):
                    packed = pack(values)
                    values.copy_(packed.dequantize())
                    stored[f"{layer}.ffn_{part}_exps.weight"] = packed
            else:
                stored[gguf_name(name, STEMS)] = weight.clone()
    file = tmp_path_factory.mktemp("qwen3moe") / "model.gguf"
    write_gguf(file, "qwen3moe", METADATA, stored)
    return file, model


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_equals_transformers(qwen3_moe, backend_name):
    file, theirs = qwen3_moe
    model, ids = load_model(file, get_backend(backend_name)), tokens(12)
    assert isinstance(model, Llama)
    assert model.weights.layers[0].mlp.gate.kind == "Q8_0", "experts stay packed"
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    # Many tokens go through buckets, few through their ids.
    for cuts in ([12], [8, 3, 1]):
        torch.testing.assert_close(run(model, *ids.split(cuts)), want, rtol=1e-4, atol=1e-4)


# A token alone, and as many as end one way and begin the other; more of them where that is cheap,
# for the interpreter runs each pair and four rows of an expert in planes by itself.
@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize(
    ("num_tokens", "planes"),
    [(1, False), (3, False), (4, False), (11, False), (3, True), (4, True)],
)
def test_a_mixture_is_the_sum_over_its_experts(backend_name, num_tokens, planes):
    backend = get_backend(backend_name)
    shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    stacks = [pack(torch.randn(NUM_EXPERTS, *shape) * 0.2) for shape in shapes]
    router, h = torch.randn(NUM_EXPERTS, HIDDEN), torch.randn(num_tokens, HIDDEN)
    gate, up, down = (stack.dequantize().double() for stack in stacks)
    scores = (h.double() @ router.double().T).softmax(-1)
    weights, chosen = scores.topk(TOP_K)
    want = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for token in range(num_tokens):
        for share, e in zip(weights[token] / weights[token].sum(), chosen[token], strict=True):
            row = h[token].double()
            inner = torch.nn.functional.silu(gate[e] @ row) * (up[e] @ row)
            want[token] += share * (down[e] @ inner)
    if planes:
        stacks = [stack.in_planes() for stack in stacks]
    names = ("gate", "up", "down")
    placed = {n: stack.to(backend.device) for n, stack in zip(names, stacks, strict=True)}
    experts = PackedExperts(router=router.to(backend.device), top_k=TOP_K, **placed)
    got = mixture(backend, h.to(backend.device), experts)
    assert_close(got.cpu(), want, scale=64, name="mixture")  # three products in a row


def test_bytes_of_a_step_are_of_the_experts_expected(qwen3_moe):
    """Of each layer the router, and the share of its experts that some token of a batch chooses."""
    model = load_model(qwen3_moe[0], get_backend("cpu"))
    c = model.config
    stack = model.weights.layers[0].mlp
    dense = 4 * (c.vocab_size + 2 * c.num_layers * (c.q_dim + c.kv_dim)) * HIDDEN
    router = 4 * NUM_EXPERTS * HIDDEN
    packed = sum(part.blocks.nbytes for part in stack.matrices)
    for batch, share in ((0, 0.0), (1, TOP_K / NUM_EXPERTS), (10_000, 1.0)):
        want = dense + c.num_layers * (router + share * packed)
        assert bytes_of_step(model, batch, 0) == pytest.approx(want, rel=1e-12)


def test_hyperparameters_are_checked():
    metadata = {"general.architecture": "qwen3moe"}
    metadata |= {f"qwen3moe.{key}": value for key, value in METADATA.items()}
    config = LlamaConfig.from_gguf(metadata, {}, "x.gguf")
    assert (config.num_experts, config.experts_per_token, config.intermediate_size) == (6, 2, 32)
    assert config.qk_norm
    for change, message in (
        ({"expert_used_count": 7}, "7 of 6 experts"),
        ({"expert_used_count": None}, "expert_used_count is missing"),
        ({"expert_count": 2000, "expert_used_count": 8}, "8 of 2000 experts"),
        ({"expert_shared_count": 1}, "every token shares"),
    ):
        changed = {f"qwen3moe.{key}": value for key, value in change.items()}
        with pytest.raises(FileError, match=message):
            LlamaConfig.from_gguf(metadata | changed, {}, "x.gguf")
    mixtral = {key.replace("qwen3moe", "llama"): value for key, value in metadata.items()}
    mixtral |= {"general.architecture": "llama", "llama.expert_feed_forward_length": None}
    config = LlamaConfig.from_gguf(mixtral, {}, "x.gguf")
    assert (config.num_experts, config.intermediate_size, config.rope.interleaved) == (6, 96, True)


def saved(theirs, folder, **changes):
    """A directory that transformers wrote, with other values in its config.json."""
    theirs.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))
    return folder


def renamed(folder, change):
    """Its tensors after ``change``, a function of the mapping from names to tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe of any sum", "mixtral"])
def theirs(request):
    """transformers' model of a family, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    sizes = {"vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    sizes |= {"num_experts_per_tok": TOP_K, "max_position_embeddings": 96}
    if request.param == "mixtral":
        config = transformers.MixtralConfig(
            **sizes, intermediate_size=INNER, num_local_experts=NUM_EXPERTS
        )
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes,
            intermediate_size=96,
            moe_intermediate_size=INNER,
            num_experts=NUM_EXPERTS,
            norm_topk_prob=request.param == "qwen3_moe",
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = 0.2 * torch.randn_like(weight)
            weight.copy_(1 + noise if weight.dim() == 1 else noise)
    return model


@pytest.mark.parametrize("backend_name", ["cpu", "interpret"])
def test_directories_equal_transformers(theirs, tmp_path, backend_name):
    model, ids = load_model(saved(theirs, tmp_path), get_backend(backend_name)), tokens(12)
    assert isinstance(model.weights.layers[0].mlp, DenseExperts)
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    for cuts in ([12], [8, 3, 1]):
        torch.testing.assert_close(run(model, *ids.split(cuts)), want, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(theirs, tmp_path):
    model, prompt = load_model(saved(theirs, tmp_path), get_backend("cpu")), tokens(7)
    want = theirs.generate(prompt[None], max_new_tokens=64, do_sample=False)[0, 7:].tolist()
    got = model.generate(prompt.tolist(), max_tokens=64, end_ids=()).ids
    assert len(got) == 64 and got[: len(want)] == want  # theirs stop at their end token


def test_names_of_older_directories_are_read(theirs, tmp_path):
    """Before transformers 5 the number of Qwen3's experts had a name of its own."""
    folder = saved(theirs, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    assert LlamaConfig.from_hf(config, folder).num_experts == NUM_EXPERTS


def stem_of(tensors, number, layer=1):
    """The name of a matrix of one expert."""
    return next(n for n in tensors if f"layers.{layer}." in n and f"experts.{number}." in n)


def cut(tensors):
    name = stem_of(tensors, 2)
    return tensors | {name: tensors[name][:-1].contiguous()}


def left_out(tensors):
    name = stem_of(tensors, NUM_EXPERTS - 1)
    return {n: t for n, t in tensors.items() if n != name}


def one_more(tensors):
    name = stem_of(tensors, NUM_EXPERTS - 1)
    more = name.replace(f"experts.{NUM_EXPERTS - 1}.", f"experts.{NUM_EXPERTS}.")
    return tensors | {more: tensors[name].clone()}


def of_no_number(tensors):
    name = stem_of(tensors, 0)
    return tensors | {name: torch.full_like(tensors[name], float("nan"))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "are of different shapes or dtypes"),
        (left_out, rf"has shape \[{NUM_EXPERTS - 1}, "),
        (one_more, rf"has shape \[{NUM_EXPERTS + 1}, "),
        (of_no_number, "weights not finite"),
    ],
)
def test_directories_that_are_not_whole_are_refused(theirs, tmp_path, change, message):
    with pytest.raises(FileError, match=message):
        load_model(renamed(saved(theirs, tmp_path), change), get_backend("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"num_local_experts": 1}, f"{TOP_K} of 1 experts"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
    ],
)
def test_hyperparameters_of_directories_are_checked(theirs, tmp_path, changes, message):
    with pytest.raises(FileError, match=message):
        load_model(saved(theirs, tmp_path, **changes), get_backend("cpu"))


def test_files_of_plain_experts_are_those_of_packed_ones(qwen3_moe, tmp_path):
    """Of weights that both hold exactly; those of gate alone in plain numbers too."""
    with open_gguf(qwen3_moe[0]) as file:
        stored = {name: tensor.data().clone() for name, tensor in file.tensors.items()}
    stacks = [name for name in stored if name.endswith("_exps.weight")]
    packed = {name: QuantizedTensor(stored[name], "Q8_0") for name in stacks}
    ids = tokens(12)
    want = run(load_model(qwen3_moe[0], get_backend("cpu")), ids)
    for plain in (stacks, [name for name in stacks if "gate" in name]):
        found = stored | packed | {name: packed[name].dequantize() for name in plain}
        write_gguf(tmp_path / "plain.gguf", "qwen3moe", METADATA, found)
        model = load_model(tmp_path / "plain.gguf", get_backend("cpu"))
        assert isinstance(model.weights.layers[0].mlp, DenseExperts)
        torch.testing.assert_close(run(model, ids), want, rtol=1e-4, atol=1e-4)
