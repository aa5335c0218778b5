"""Gated DeltaNets of transformers' models: before a conversion, after it, and after its undoing."""

import copy

import pytest
import torch
from torch import nn

from ferrum_triton import InputError, get_backend
from ferrum_triton.integrations.transformers import convert, delta_net, keep_packed, layers
from ferrum_triton.integrations.transformers.delta_net import GatedDeltaNet, why_not
from tests import tiny_files
from tests.test_models import tokens
from tests.test_qwen35 import KINDS, LAYERS, make

transformers = pytest.importorskip("transformers", reason="transformers makes the models")
from transformers import masking_utils  # noqa: E402  after the check that it is there

# transformers' own logits in float32 are up to 2e-4 from those in float64.
BOUND = {"rtol": 1e-3, "atol": 1e-3}
TEXT = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def batch(length, rows=2):
    return torch.stack([tokens(length, seed=row) for row in range(rows)])


def padded(length=38):
    """Masks of a batch: nothing before a sequence or behind it, then either."""
    before, behind = (torch.ones(2, length, dtype=torch.int64) for _ in range(2))
    before[0, :9] = behind[1, -7:] = 0
    return {"whole": torch.ones_like(before), "before": before, "behind": behind}


@torch.inference_mode()
def in_chunks(model, ids, sizes, cache=None, **options):
    """The logits of a text that comes in several calls, and the states behind the last."""
    parts = []
    if cache is None:
        cache = transformers.DynamicCache(config=model.config)
    for part in ids.split(sizes, dim=1):
        parts.append(model(part, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1), torch.stack(recurrent(cache))


def linear(cache):
    """The cache's layers of linear attention, and their places."""
    return {i: layer for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")}


def recurrent(cache):
    return [cache.get_recurrent_state(i) for i in linear(cache)]


@torch.inference_mode()
def everything(model):
    """What a model says of texts: whole, in chunks, by tokens, with padding, and on its own."""
    ids, masks, said = batch(38), padded(), {}
    for name, mask in masks.items():  # padding changes states as a token would
        logits, states = in_chunks(model, ids, [38], attention_mask=mask)
        said[name], said[f"states {name}"] = logits[mask.bool()], states
    for sizes in ([2, 20, 1, 1, 14], [1] * 5 + [33]):
        said[str(sizes)], said[f"states {sizes}"] = in_chunks(model, ids, sizes)
    asked = {name: masks[name] for name in ("whole", "before")}
    text = {name: model.generate(ids, attention_mask=asked[name], **TEXT) for name in asked}
    return said, text


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_says_the_same(kind):
    model = make(kind)
    before, text = everything(model)
    had = {name: type(module) for name, module in model.named_modules()}
    own = {name: id(parameter) for name, parameter in model.named_parameters()}
    report = convert(model)
    after, text_after = everything(model)
    for name, want in before.items():
        torch.testing.assert_close(after[name], want, **BOUND, msg=name)
    for name, want in text.items():
        assert torch.equal(text_after[name], want) and len(want[:, 38:].unique()) > 8

    places = {f"model.layers.{i}.linear_attn" for i, k in enumerate(LAYERS) if k[0] == "l"}
    replaced = {entry.name: entry.now for entry in report.replaced}
    assert {name for name, now in replaced.items() if now == "GatedDeltaNet"} == places
    assert all(replaced[f"{place}.norm"] == "GatedRMSNorm" for place in places)
    norms = [n for n, t in had.items() if t.__name__.endswith("RMSNorm")]
    assert len(norms) == 11 and all(replaced[name] == "RMSNorm" for name in norms)
    assert all("weight" in entry.reason or "experts" in entry.reason for entry in report.left)
    assert "GatedDeltaNet  x 3" in str(report)

    report.undo()
    assert {name: type(module) for name, module in model.named_modules()} == had
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == own
    again, text_again = everything(model)
    assert all(torch.equal(again[name], want) for name, want in before.items())
    assert all(torch.equal(text_again[name], want) for name, want in text.items())


WAYS = {
    "beams": {"num_beams": 3},  # whose states change places at each step
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_generate_finds_the_same_text_in_other_ways(kind):
    model, ids = make(kind), batch(12)
    asked = {"attention_mask": torch.ones_like(ids), **TEXT}
    want = {way: model.generate(ids, **asked, **options) for way, options in WAYS.items()}
    convert(model)
    for way, options in WAYS.items():
        assert torch.equal(model.generate(ids, **asked, **options), want[way]), way


@pytest.mark.parametrize("attention", [True, False])
def test_a_conversion_changes_nothing_amid_a_text(attention):
    """States are transformers' own: what one began the other goes on with."""
    model, ids = make("qwen3_5"), batch(30)
    want, _ = in_chunks(model, ids, [30])
    cache, parts = transformers.DynamicCache(config=model.config), []
    with torch.inference_mode():
        for i, part in enumerate(ids.split([7, 1, 1, 4, 1, 16], dim=1)):
            if i % 2:
                report = convert(model, attention=attention)
            parts.append(model(part, past_key_values=cache).logits)
            if i % 2:
                report.undo()
    torch.testing.assert_close(torch.cat(parts, dim=1), want, **BOUND)


@pytest.mark.parametrize("first", [1, 2, 9])
def test_a_cache_that_records_its_past(first):
    """For a while, as for an assistant's guesses: it holds more inputs then, or too few."""
    model, ids = make("qwen3_next"), batch(first + 10)

    @torch.inference_mode()
    def said(begins):
        cache = transformers.DynamicCache(config=model.config)
        if begins:
            cache.activate_past_recording()
        parts = [model(ids[:, :first], past_key_values=cache).logits]
        cache.activate_past_recording()
        for start, end in ((0, 3), (3, 4), (4, 9)):
            part = ids[:, first + start : first + end]
            parts.append(model(part, past_key_values=cache).logits)
        for layer in linear(cache).values():
            layer.crop(0)
            layer.record_past = False
        parts.append(model(ids[:, -1:], past_key_values=cache).logits)
        return torch.cat(parts, dim=1)

    want = [said(begins) for begins in (False, True)]
    convert(model)
    for begins in (False, True):
        got = said(begins)
        torch.testing.assert_close(got, want[begins], **BOUND)


@torch.inference_mode()
def test_a_cache_is_begun_anew():
    model, x = make("qwen3_5"), torch.randn(2, 9, 64)
    convert(model)
    cache, layer = transformers.DynamicCache(config=model.config), model.model.layers[0].linear_attn
    want = layer(x, cache_params=cache)
    layer(x[:, :1], cache_params=cache)
    cache.reset()
    assert torch.equal(layer(x, cache_params=cache), want)


def test_more_sequences_than_slots_made_ahead(monkeypatch):
    model, ids = make("qwen3_5"), batch(9, rows=5)
    want, _ = in_chunks(model, ids, [7, 1, 1])
    monkeypatch.setattr(delta_net, "MAX_BATCH", 3)
    convert(model)
    got, _ = in_chunks(model, ids, [7, 1, 1])
    torch.testing.assert_close(got, want, **BOUND)


@torch.inference_mode()
def test_a_step_moves_no_states():
    """In a decode step they stay where they are, and no copy is made of them."""
    model, ids = make("qwen3_5"), batch(6)
    convert(model)
    cache = transformers.DynamicCache(config=model.config)
    in_chunks(model, ids, [6], cache)
    before = [*recurrent(cache), *(cache.get_conv_state(i) for i in linear(cache))]
    was = [state.clone() for state in before]
    in_chunks(model, ids[:, :1], [1], cache)
    after = [*recurrent(cache), *(cache.get_conv_state(i) for i in linear(cache))]
    assert [state.data_ptr() for state in after] == [state.data_ptr() for state in before]
    assert all((now != then).any() for now, then in zip(after, was, strict=True))
    marks = [vars(state) for state in after]  # the cache's own, for graphs that are captured
    assert marks[0] and all(mark == marks[0] for mark in marks)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_lose_no_more_than_before(kind):
    """With all experts chosen, so that no rounding has others chosen."""
    exact, ids = make(kind, **({} if kind == "qwen3_5" else {"num_experts_per_tok": 6})), batch(40)
    model = copy.deepcopy(exact).bfloat16()
    with torch.inference_mode():
        want, before = exact(ids).logits, model(ids).logits
        convert(model)
        got = model(ids).logits
    assert got.dtype == torch.bfloat16
    errors = [(logits.float() - want).square().mean().sqrt() for logits in (got, before)]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_interpreted_kernels_of_a_layer(kind, monkeypatch, interpreted):
    """The kernels of a GPU: a prompt by chunks, a few tokens more, and single ones."""
    model = make(kind, layer_types=LAYERS[:2], num_hidden_layers=2)
    theirs, x = model.model.layers[0].linear_attn, torch.randn(2, 22, 64)
    ours = GatedDeltaNet(theirs)
    ours.norm = layers.GatedRMSNorm(theirs.norm.weight, theirs.norm.variance_epsilon)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for module in (delta_net, layers):
        monkeypatch.setattr(module, "backend_of", lambda _: get_backend("interpret"))
    for part in x.split([17, 3, 1, 1], dim=1):
        got, want = (
            layer(part, cache_params=cache)
            for layer, cache in zip((ours, theirs), caches, strict=True)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    known = {"_gdn_prepare_kernel", "_gdn_decode_kernel", "_gated_rms_norm_kernel"}
    assert interpreted == known


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_says_the_same_on_a_gpu(kind, dtype):
    """In 16 bits it errs no more than before, experts left aside."""
    exact = make(kind, **({} if kind == "qwen3_5" else {"num_experts_per_tok": 6}))
    model, ids = copy.deepcopy(exact).to("cuda", dtype), batch(38)
    want, _ = in_chunks(exact, ids, [30, 6, 1, 1])
    before, _ = in_chunks(model, ids.cuda(), [30, 6, 1, 1])
    convert(model)
    got, _ = in_chunks(model, ids.cuda(), [30, 6, 1, 1])
    if dtype == torch.float32:
        torch.testing.assert_close(got.cpu(), want, **BOUND)
        text = exact.generate(ids, attention_mask=torch.ones_like(ids), **TEXT)
        mask = torch.ones_like(ids).cuda()
        assert torch.equal(model.generate(ids.cuda(), attention_mask=mask, **TEXT).cpu(), text)
    else:
        errors = [(x.cpu().float() - want).square().mean().sqrt() for x in (got, before)]
        assert errors[0] < 1.1 * errors[1]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_compiled_step_is_one_graph(kind):
    model, ids = make(kind), batch(12)
    convert(model)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, backend=keep, fullgraph=True)
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for cache in caches:
        model(ids, past_key_values=cache)
    for i in range(12, 15):
        new = ids[:, i - 12 : i - 11]
        inputs = {"past_key_values": caches[0], "position_ids": torch.full((2, 1), i)}
        made = masking_utils.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty(2, 1, 0),
            attention_mask=torch.ones(2, i + 1, dtype=torch.int64),
            **inputs,
        )
        got = step(new, attention_mask=made, **inputs).logits
        want = model(new, past_key_values=caches[1]).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_projections_of_a_gguf_file_stay_packed(architecture, tmp_path):
    tiny_files.write(tmp_path / "model.gguf", architecture)
    keep_packed()
    load = transformers.AutoModelForCausalLM.from_pretrained
    files = {"gguf_file": "model.gguf", "dtype": torch.float32}
    config = transformers.GgufConfig(dequantize=True)
    unpacked = load(tmp_path, **files, quantization_config=config)
    want, _ = in_chunks(unpacked, batch(20), [8, 11, 1])
    model = load(tmp_path, **files, quantization_config=transformers.GgufConfig())
    report = convert(model)
    got, _ = in_chunks(model, batch(20), [8, 11, 1])
    torch.testing.assert_close(got, want, **BOUND)
    ours = model.model.layers[0].linear_attn
    projections = [child for name, child in ours.named_children() if "proj" in name]
    assert isinstance(ours, GatedDeltaNet) and len(projections) == 5
    assert all(isinstance(child, layers.PackedLinear) for child in projections)
    packed = model.model.layers[0].linear_attn.in_proj_qkv.weight
    report.undo()
    theirs = model.model.layers[0].linear_attn
    assert type(theirs).__name__.endswith("GatedDeltaNet") and theirs is not ours
    assert theirs.in_proj_qkv.weight is not packed
    again, _ = in_chunks(model, batch(20), [8, 11, 1])
    torch.testing.assert_close(again, want, **BOUND)


def test_what_is_left_alone_has_a_reason():
    """And the model says the same with it."""
    model, ids = make("qwen3_5"), batch(20)
    want, _ = in_chunks(model, ids, [19, 1])
    first, third, fourth = (model.model.layers[i].linear_attn for i in (0, 2, 3))
    first.register_forward_hook(lambda *_: None)
    third.conv1d.register_forward_pre_hook(lambda *_: None)
    own = fourth.forward
    fourth.forward = lambda *args, **others: own(*args, **others)
    report = convert(model)
    reasons = {e.name: e.reason for e in report.left if e.was == "Qwen3_5GatedDeltaNet"}
    assert [*reasons] == [f"model.layers.{i}.linear_attn" for i in (0, 2, 3)]
    expected = ("it has hooks", "its convolution has hooks", "its forward is not its class's own")
    assert all(r.startswith(e) for r, e in zip(reasons.values(), expected, strict=True))
    got, _ = in_chunks(model, ids, [19, 1])
    torch.testing.assert_close(got, want, **BOUND)


def test_other_delta_nets_are_left_alone():
    config = transformers.OlmoHybridConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        layer_types=LAYERS[:2],
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        want = model(batch(9)).logits
        report = convert(model)
        torch.testing.assert_close(model(batch(9)).logits, want, rtol=1e-4, atol=1e-4)
    left = {entry.was: entry.reason for entry in report.left}
    assert left["OlmoHybridGatedDeltaNet"] == "its formula is not known"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_act": "gelu"}, "its activation is not silu"),
        ({"linear_conv_kernel_dim": 17}, "no kernel convolves 17 tokens"),
        ({"linear_value_head_dim": 264}, "no kernel takes heads of 264"),
        ({"linear_key_head_dim": 264}, "no kernel takes heads of 264"),
        ({"hidden_act": "swish", "linear_conv_kernel_dim": 1, "linear_key_head_dim": 256}, None),
    ],
)
def test_what_there_is_no_kernel_for(changed, reason):
    model = make("qwen3_5", layer_types=LAYERS[:2], num_hidden_layers=2, **changed)
    assert why_not(model.model.layers[0].linear_attn) == reason
    want, _ = in_chunks(model, batch(9), [5, 1, 3])
    convert(model)
    got, _ = in_chunks(model, batch(9), [5, 1, 3])
    torch.testing.assert_close(got, want, **BOUND)


def test_where_there_is_no_kernel():
    with torch.device("meta"):  # for want of an Apple GPU
        layer = make("qwen3_5").model.layers[0].linear_attn
    assert why_not(layer) == "meta has no kernel for it"
    assert why_not(nn.Linear(2, 2)) == "its formula is not known"


@torch.inference_mode()
def test_what_cannot_be_heeded_is_refused():
    model = make("qwen3_next")
    report = convert(model)
    with pytest.raises(InputError, match="model is converted already"):
        convert(model)
    with pytest.raises(InputError, match="model is converted already"):
        convert(model.model)
    layer, x = model.model.layers[0].linear_attn, torch.randn(1, 4, 64)
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(InputError, match=f"{name} is given"):
            layer(x, **{name: torch.tensor([0, 2, 4], dtype=torch.int32)})
    cache = transformers.DynamicCache(config=model.config)
    layer(x, cache_params=cache)
    held = [cache.get_recurrent_state(0).clone(), cache.get_conv_state(0).clone()]
    with pytest.raises(InputError, match="cache_params is of 1 sequences; allowed: one of 3"):
        layer(torch.randn(3, 1, 64), cache_params=cache)
    assert torch.equal(cache.get_recurrent_state(0), held[0])
    assert torch.equal(cache.get_conv_state(0), held[1])
    report.undo()
    with pytest.raises(InputError, match=r"model is of torch\.float64"):
        convert(model.double())
