"""Models of transformers before and after their conversion, and after it is undone."""

import gc
import re
import weakref
from importlib.metadata import version

import pytest
import torch
from torch import nn

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.integrations.transformers import (
    convert,
    keep_packed,
    kernel,
    layers,
    library,
    revert,
)
from ferrum_triton.integrations.transformers.recognise import mlp_of, norm_of, scale_of
from ferrum_triton.kernels.jit import note_launches
from ferrum_triton.quant import FORMATS, QuantizedTensor, dequantize_blocks, quantize_blocks
from ferrum_triton.quant.formats import GGUF_FORMATS
from tests import tiny_files
from tests.tiny_files import HEAD_DIM, INNER, VOCAB
from tests.tiny_models import SHAPE

transformers = pytest.importorskip("transformers", reason="transformers makes the models")

KEPT = ("lfm2", "qwen35", "qwen35moe")  # packed by transformers' own loader
UNPACKED = ("llama", "qwen3", "qwen3moe", "gemma3")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    for architecture in (*KEPT, *UNPACKED):
        tiny_files.write(directory / f"{architecture}.gguf", architecture)
    return directory


def load(files, architecture, **options):
    config = None
    if architecture in UNPACKED:  # of which the loader reads no sizes of heads and experts
        config = transformers.AutoConfig.from_pretrained(files, gguf_file=f"{architecture}.gguf")
        config.head_dim, config.moe_intermediate_size = HEAD_DIM, INNER
    keep_packed()
    return transformers.AutoModelForCausalLM.from_pretrained(
        files,
        gguf_file=f"{architecture}.gguf",
        config=config,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=options.pop("dequantize", False)),
        **({"dtype": torch.float32} | options),
    )


def source(files, architecture):
    """What ``convert`` takes beside the model."""
    return {} if architecture in KEPT else {"gguf_file": files / f"{architecture}.gguf"}


def prompt(length=12, rows=1):
    return torch.randint(1, VOCAB, (rows, length))  # 0 pads


def run(model, ids, new_tokens=5):
    """Logits of a prompt, and the text that follows."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        return model(ids).logits, model.generate(ids, eos_token_id=None, **options)


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("architecture", [*KEPT, *UNPACKED])
def test_a_converted_model_says_the_same(files, architecture):
    ids, model = prompt(), load(files, architecture)
    before = run(model, ids) if architecture in UNPACKED else None
    want = before or run(load(files, architecture, dequantize=True), ids)
    had = classes(model)
    report = convert(model, **source(files, architecture))
    got = run(model, ids)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1], want[1])
    packed = [m for m in model.modules() if isinstance(m, layers.PackedModule)]
    assert all(":planes" in kind for m in packed for kind in m._kinds.values())
    left = {"qwen35moe": "model.layers.0.mlp.shared_expert_gate"}
    assert [entry.name for entry in report.left[:1]] == [
        left[a] for a in [architecture] if a in left
    ]
    assert (report.attention, len(packed) > 10) == ("ferrum", True)

    report.undo()
    assert classes(model) == had and model.config._attn_implementation == "eager"
    again = run(model, ids)
    if before:  # to the bit
        assert torch.equal(again[0], want[0])
        assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(again[0], want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", [*KEPT, *UNPACKED])
def test_a_converted_model_says_the_same_on_a_gpu(files, architecture):
    ids = prompt()
    want = run(load(files, architecture, dequantize=True), ids)
    model = load(files, architecture).to("cuda")
    convert(model, **source(files, architecture))
    got = run(model, ids.to("cuda"))
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-3, atol=1e-3)
    assert torch.equal(got[1].cpu(), want[1])


def test_weights_are_not_held_twice(files):
    model = load(files, "llama")
    old = [weakref.ref(parameter) for name, parameter in model.named_parameters() if "proj" in name]
    convert(model, **source(files, "llama"))
    gc.collect()
    assert [reference() for reference in old] == [None] * len(old)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.requires_grad for _, parameter in model.lm_head.named_parameters())


def test_a_report_is_read_and_undone_once(files):
    model = load(files, "lfm2")
    report = convert(model)
    text = str(report)
    assert "model.layers.*.feed_forward.w1" in text and "PackedLinear Q8_0:planes" in text
    assert text.startswith(f"{len(report.replaced)} modules replaced")
    assert text.endswith("attention: ferrum")
    assert "_undo" not in repr(report)
    counts = [int(n) for n in re.findall(r"  x (\d+)$", text, re.MULTILINE)]
    listed = [line for line in text.splitlines() if line.startswith("  ")]
    assert min(counts) > 1, "one module is no group"
    single = len(listed) - len(counts)
    assert sum(counts) + single == len(report.replaced) + len(report.left)
    revert(model)
    with pytest.raises(FerrumError, match="undone before"):
        report.undo()
    with pytest.raises(InputError, match="model is not converted"):
        revert(model)
    assert convert(model, attention=False).attention == "eager"


def test_sixteen_bits_lose_no_more_than_before(files):
    ids, model = prompt(length=40), load(files, "llama", dtype=torch.bfloat16)
    with torch.inference_mode():
        want, before = load(files, "llama")(ids).logits, model(ids).logits
        convert(model, **source(files, "llama"))
        got = model(ids).logits
    assert got.dtype == torch.bfloat16
    errors = [(logits.float() - want).square().mean().sqrt() for logits in (got, before)]
    assert errors[0] < 1.2 * errors[1]


def test_what_cannot_be_converted_is_named(files, tmp_path, monkeypatch):
    model, file = load(files, "llama"), files / "llama.gguf"
    other = tiny_files.write(tmp_path / "other.gguf", "llama", seed=1)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:40])
    dense = load(files, "qwen35", dequantize=True)
    had = classes(model)

    def refused(got, model=model, **arguments):
        with pytest.raises(InputError, match=got):
            convert(model, **arguments)

    refused("model is a Linear", nn.Linear(2, 2))
    refused("gguf_file is 'nowhere', which is no file", gguf_file="nowhere")
    refused("gguf_file is .*, which cannot be read", gguf_file=broken)
    refused("gguf_file is one whose .* is not the model's", gguf_file=other)
    refused("gguf_file is one whose blk.0.attn_q.weight is", gguf_file=files / "gemma3.gguf")
    refused("gguf_file is given for a model .*keep_packed", dense, gguf_file=files / "qwen35.gguf")
    refused("model is in training mode", model.train())
    model.eval()
    tiny = transformers.LlamaConfig(**SHAPE)
    refused("model is of torch.float64", transformers.LlamaForCausalLM(tiny).eval().double())
    with torch.device("meta"):
        refused("model is on meta", transformers.LlamaForCausalLM(tiny).eval())
    assert classes(model) == had
    convert(model, gguf_file=file)
    refused("model is converted already", gguf_file=file)
    refused("model is converted already", model.model)
    for found in ("5.22.0", "5.2.3", "15.23.0"):
        monkeypatch.setattr(library, "version", lambda _, found=found: found)
        with pytest.raises(FerrumError, match=re.escape(f"transformers is {found};")):
            library.part("modeling_utils")
    monkeypatch.setattr(library, "version", lambda _: version("a package that is not there"))
    with pytest.raises(FerrumError, match="pip install transformers"):
        library.part("modeling_utils")
    monkeypatch.setattr(library, "version", lambda _: "5.22.0")
    for call in (keep_packed, lambda: convert(model)):
        with pytest.raises(FerrumError, match=r"5\.22\.0"):
            call()


def test_nothing_is_half_converted(files, monkeypatch):
    ids, model = prompt(), load(files, "llama")
    want, had = run(model, ids), classes(model)

    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(layers, "GatedMLP", fails)  # the last to be made
    with pytest.raises(MemoryError):
        convert(model, **source(files, "llama"))
    assert classes(model) == had and not hasattr(model, "_ferrum_report")
    assert torch.equal(run(model, ids)[0], want[0])


def test_what_is_left_alone_has_a_reason(files, monkeypatch):
    model = load(files, "llama")
    model.model.norm.register_forward_hook(lambda *_: None)
    model.model.layers[0].input_layernorm.weight.data = torch.ones(64, dtype=torch.float16)
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", staticmethod(lambda: False))
    report = convert(model)
    reasons = {entry.name: entry.reason for entry in report.left}
    assert "hooks" in reasons["model.norm"]
    assert "torch.float16" in reasons["model.layers.0.input_layernorm"]
    assert "pass gguf_file" in reasons["lm_head"]
    assert "cannot be chosen" in reasons["attention"] and report.attention == "eager"


def module_of(name, *arguments, **options):
    module, _, name = name.partition(".")
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    return getattr(models, name)(*arguments, **options)


def test_norms_are_known_by_what_they_compute():
    for name, offset in (
        ("llama.LlamaRMSNorm", 0),
        ("gpt_oss.GptOssRMSNorm", 0),
        ("gemma3.Gemma3RMSNorm", 1),
        ("qwen3_5.Qwen3_5RMSNorm", 1),
    ):
        module = module_of(name, 24, eps=1e-3)
        assert norm_of(module) == (1e-3, offset, False)
        x = torch.randn(2, 3, 24)
        nn.init.normal_(module.weight)
        with torch.inference_mode():
            replacement = layers.RMSNorm(module.weight, 1e-3, offset)
            torch.testing.assert_close(replacement(x), module(x), rtol=1e-5, atol=1e-5)
    assert norm_of(module_of("qwen3_5.Qwen3_5RMSNormGated", 24, eps=1e-3)) == (1e-3, 0, True)
    assert norm_of(nn.LayerNorm(24)) is None
    assert norm_of(module_of("nanochat.NanoChatRMSNorm")) is None  # without a weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embeddings_are_known_by_what_they_compute(dtype):
    scaled = module_of("gemma3.Gemma3TextScaledWordEmbedding", 9, 8, 7, embed_scale=50.6).to(dtype)
    ids = torch.tensor([[3, 0]])
    with torch.inference_mode():
        scale = scale_of(scaled)
        assert torch.equal(nn.functional.embedding(ids, scaled.weight) * scale, scaled(ids))

    class Shifted(nn.Embedding):
        def forward(self, input_ids):
            return super().forward(input_ids) + 1

    assert scale_of(Shifted(9, 8).to(dtype)) is None


@pytest.mark.parametrize(
    ("name", "config", "activation"),
    [
        ("llama.LlamaMLP", {}, "silu"),
        ("llama.LlamaMLP", {"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ("llama.LlamaMLP", {"hidden_act": "relu"}, None),
        ("llama.LlamaMLP", {"mlp_bias": True}, "silu"),
        ("phi3.Phi3MLP", {}, None),  # gate and up are one matrix
    ],
)
def test_mlps_are_known_by_what_they_compute(name, config, activation):
    sizes = {"hidden_size": 64, "intermediate_size": 24, "pad_token_id": 0}
    family = {"llama": transformers.LlamaConfig, "phi3": transformers.Phi3Config}
    module = module_of(name, family[name.partition(".")[0]](**sizes | config))
    found = mlp_of(module)
    assert (found and found.activation) == activation
    if found:
        children = {layer: getattr(module, layer) for layer in found.layers}
        x = torch.randn(2, 3, 64)
        with torch.inference_mode():
            got = layers.GatedMLP(children, activation)(x)
            torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)


def pack(*shape, kind="Q8_0"):
    return QuantizedTensor(quantize_blocks(torch.randn(shape) * 0.1, FORMATS[kind]), kind)


@pytest.mark.parametrize("num_rows", [0, 1, 9, 70])
def test_packed_layers_take_any_number_of_rows(num_rows):
    gate, up, down = pack(96, 64), pack(96, 64, kind="Q4_0"), pack(64, 96, kind="IQ4_NL")
    bias, order = nn.Parameter(torch.randn(64), requires_grad=False), torch.randperm(96)
    linears = [layers.PackedLinear(layers.Packed.of(w), None) for w in (gate, up)]
    last = layers.PackedLinear(layers.Packed.of(down), bias, order)
    x = torch.randn(1, num_rows, 64)
    wide = [w.dequantize() for w in (gate, up, down)]
    for activation, function in (
        ("silu", nn.functional.silu),
        ("gelu_tanh", lambda g: nn.functional.gelu(g, approximate="tanh")),
    ):
        names = ("gate_proj", "up_proj", "down_proj")
        mlp = layers.GatedMLP(dict(zip(names, (*linears, last), strict=True)), activation)
        middle = function(x @ wide[0].T) * (x @ wide[1].T)
        want = middle[..., order] @ wide[2].T + bias
        torch.testing.assert_close(mlp(x), want, rtol=1e-4, atol=1e-4)


def test_packed_layers_are_compiled_whole():
    gate, up, down = (layers.Packed.of(pack(64, 64)) for _ in range(3))
    linears = [layers.PackedLinear(weight, None) for weight in (gate, up, down)]
    mlp = layers.GatedMLP(dict(zip("abc", linears, strict=True)), "silu")
    table = layers.PackedEmbedding(gate, torch.float32)
    stacks = (layers.Packed.of(pack(4, 64, 64)) for _ in range(3))
    experts = layers.PackedExperts(*stacks)

    def layer(ids, shares):
        x = mlp(table(ids))
        return linears[0](x) + experts(x, ids[:, None] // torch.tensor([32, 64]), shares)

    for num_tokens in (1, 5):  # pairs by themselves, and sorted by expert
        ids, shares = torch.randint(64, (num_tokens,)), torch.rand(num_tokens, 2)
        got = torch.compile(layer, backend="eager", fullgraph=True)(ids, shares)
        torch.testing.assert_close(got, layer(ids, shares), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_packed_experts_are_the_sum_of_those_chosen(num_tokens):
    gate, up, down = pack(4, 96, 64), pack(4, 96, 64, kind="Q4_1"), pack(4, 64, 96)
    experts = layers.PackedExperts(*(layers.Packed.of(w) for w in (gate, up, down)))
    x, shares = torch.randn(num_tokens, 64), torch.rand(num_tokens, 2)
    ids = torch.rand(num_tokens, 4).argsort(-1)[:, :2]
    g, u, d = (w.dequantize() for w in (gate, up, down))
    middle = nn.functional.silu(torch.einsum("tk,tsnk->tsn", x, g[ids]))
    middle = middle * torch.einsum("tk,tsnk->tsn", x, u[ids])
    want = torch.einsum("ts,tsn,tskn->tk", shares, middle, d[ids])
    torch.testing.assert_close(experts(x, ids, shares), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "launches"), [(1, 4, 2), (2, 4, 2), (2, 16, 2), (6, 16, 3)]
)
def test_packed_experts_launch_few_kernels(monkeypatch, dtype, num_tokens, num_experts, launches):
    """Few tokens' sum over experts is in the last product."""
    monkeypatch.setattr(layers, "backend_of", lambda x: get_backend("interpret"))
    packed = [pack(num_experts, *sizes) for sizes in ((96, 64), (96, 64), (64, 96))]
    experts = layers.PackedExperts(*map(layers.Packed.of, packed))
    x, shares = torch.randn(num_tokens, 64).to(dtype), torch.rand(num_tokens, 2)
    ids = torch.rand(num_tokens, num_experts).argsort(-1)[:, :2]
    with note_launches(runs=True) as noted:
        got = experts(x, ids, shares)
    assert len(noted) == launches
    monkeypatch.undo()
    want = experts(x.float(), ids, shares)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_every_format_has_the_products_that_loading_asks_for():
    assert set(kernel.GEMV_TYPES) == set(GGUF_FORMATS)
    x = torch.randn(3, 512)
    for fmt in GGUF_FORMATS.values():
        packed = quantize_blocks(torch.randn(5, 512), fmt)
        wide = dequantize_blocks(packed, fmt)
        number = fmt.ggml_id
        torch.testing.assert_close(kernel.mul_mat_vec(packed, x, number, 5), x @ wide.T)
        assert torch.equal(kernel.dequantize(packed, number, 5, 512, torch.float32), wide)
        rows = kernel.get_rows(packed, torch.tensor([4, 0]), number, 512, torch.float32)
        assert torch.equal(rows, wide[[4, 0]])


def test_experts_are_chosen_by_id():
    fmt = FORMATS["Q4_K"]
    stack = torch.stack([quantize_blocks(torch.randn(6, 256), fmt) for _ in range(3)])
    x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]], dtype=torch.int32)
    got = kernel.mul_mat_id(stack, x, ids, fmt.ggml_id, 6)
    want = torch.einsum("tk,tsnk->tsn", x, dequantize_blocks(stack, fmt)[ids.long()])
    torch.testing.assert_close(got, want)


def test_what_is_not_served_is_named():
    with pytest.raises(InputError, match="ggml_type"):
        kernel.mul_mat_vec(torch.zeros(2, 66, dtype=torch.uint8), torch.randn(1, 256), 16, 2)
    with pytest.raises(InputError, match="out_features"):
        kernel.mul_mat_vec(torch.zeros(2, 18, dtype=torch.uint8), torch.randn(1, 32), 2, 3)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(InputError, match="out_features"):
        kernel.mul_mat_id(torch.zeros(1, 2, 18, dtype=torch.uint8), torch.randn(1, 32), ids, 2, 3)
