"""Models: equal to transformers, to themselves in other steps, and on other backends."""

import dataclasses
import json

import pytest
import torch

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.models import Llama, LlamaConfig, load_model, memory
from ferrum_triton.models.config import RopeConfig
from ferrum_triton.models.rope import rope_tables
from ferrum_triton.models.weights import GgufSource, load_weights
from ferrum_triton.ops import rope_tables as schemes
from ferrum_triton.quant import FORMATS, QuantizedTensor
from ferrum_triton.quant.formats import GGUF_FORMATS
from tests import gguf_writer
from tests.tiny_models import PACKED, VARIANTS, PackedSource, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, transformers' model) by variant, made once."""
    pytest.importorskip("transformers", reason="transformers makes and checks the tiny models")
    made = {}

    def get(variant):
        if variant not in made:
            directory = tmp_path_factory.mktemp(variant)
            made[variant] = directory, save_tiny(directory, variant)
        return made[variant]

    return get


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def packed(backend_name, dtype=torch.float32):
    backend = get_backend(backend_name)
    weights = load_weights(PackedSource(), PACKED, backend, dtype)
    return Llama(PACKED, weights, backend, dtype)


def tokens(count, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, (count,), generator=generator).to(device)


def run(model, *chunks):
    """All logits of a sequence fed in chunks."""
    cache = model.new_cache(40)
    return torch.cat([model.forward(c, cache, all_logits=True) for c in chunks]).cpu()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(tiny, variant):
    directory, theirs = tiny(variant)
    model = load_model(directory, get_backend("cpu"))
    ids = tokens(20)
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(run(model, ids), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_then_decode_is_one_forward(tiny, variant):
    model = load_model(tiny(variant)[0], get_backend("cpu"))
    ids = tokens(20, seed=1)
    whole = run(model, ids)
    for cuts in ([12] + [1] * 8, [1] * 20, [3, 9, 8]):
        torch.testing.assert_close(run(model, *ids.split(cuts)), whole, rtol=1e-5, atol=1e-5)


def test_last_logits_are_the_last_of_all(tiny):
    model = load_model(tiny("llama")[0], "cpu")  # as well as the backend of that name
    ids = tokens(9)
    last = model.forward(ids, model.new_cache(9))
    torch.testing.assert_close(last, run(model, ids)[-1:], rtol=1e-6, atol=1e-6)


def test_later_tokens_cannot_change_earlier_logits(tiny):
    model = load_model(tiny("qwen2")[0], get_backend("cpu"))
    first, second = tokens(12, seed=2), tokens(12, seed=3)
    second[:7] = first[:7]
    assert torch.equal(run(model, first)[:7], run(model, second)[:7])
    assert not torch.equal(run(model, first)[7:], run(model, second)[7:])


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral", "gemma3", "packed"])
def test_interpreted_kernels_equal_the_cpu(tiny, variant, interpreted):
    """A prefill of 8 tokens and two decode steps, every kernel of the path interpreted."""
    models = [
        packed(name) if variant == "packed" else load_model(tiny(variant)[0], get_backend(name))
        for name in ("cpu", "interpret")
    ]
    # More than 8 tokens at once multiply packed weights in tiles, fewer row by row.
    prefill = 10 if variant == "packed" else 8
    ids = tokens(prefill + 2, seed=5)
    want, got = (run(model, *ids.split([prefill, 1, 1])) for model in models)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    shared = {
        "_paged_qkv_norm_rope_kernel",
        "_paged_decode_kernel",
        "_gated_split_kernel",
    }
    sandwich = {"_rms_norm_kernel", "_rms_norm_add_kernel"}
    norms = sandwich if variant == "gemma3" else {"_fused_add_rms_norm_kernel"}
    assert shared | norms <= interpreted
    if variant == "packed":
        assert {"_gemv_quant_kernel", "_gemm_quant_kernel"} <= interpreted


def test_packed_weights_stay_packed_where_kernels_read_them():
    model = packed("interpret")
    layer = model.weights.layers[0]
    kinds = [part.kind for part in layer.qkv.weight.parts]
    assert kinds == ["Q4_1", "Q8_0"], "q and k are fused, v is of another format"
    assert layer.qkv.weight.parts[0].shape == (96, 64)
    assert isinstance(model.weights.embedding, QuantizedTensor)
    assert isinstance(packed("cpu").weights.embedding, torch.Tensor)


def test_what_decoding_takes_is_told_before_it_is_done(monkeypatch, caplog):
    """The source refuses to be read, so what is told was told before."""

    def load(backend_name, dtype):
        caplog.clear()
        with (
            caplog.at_level("INFO", logger="ferrum_triton.models"),
            pytest.raises(AssertionError, match="read"),
        ):
            load_weights(source, PACKED, get_backend(backend_name), dtype)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    source = PackedSource()
    sizes = source.packed()
    numel, nbytes = sum(p.numel for p in sizes), sum(p.nbytes for p in sizes)
    monkeypatch.setattr(memory, "_megabytes", lambda count: f"{count} bytes")
    monkeypatch.setattr(PackedSource, "fetch", unread)
    took = f"{nbytes} bytes of packed weights take {2 * numel} bytes as bfloat16, which the cpu"
    assert load("interpret", torch.bfloat16) == []
    [(level, line)] = load("cpu", torch.bfloat16)
    assert level == "INFO"
    assert took in line
    monkeypatch.setattr(memory, "_physical_memory", lambda: 4 * numel - 1)
    assert load("cpu", torch.bfloat16)[0][0] == "INFO"
    [(level, line)] = load("cpu", torch.float32)
    assert level == "WARNING"
    assert f"{4 * numel} bytes as float32" in line
    assert "less memory" in line


def unread(source, name):
    raise AssertionError(f"{name} is read")


def test_every_block_format_of_a_file_is_fetched_packed(tmp_path):
    records, data = [], b""
    blocks = {}
    for fmt in GGUF_FORMATS.values():
        name = fmt.name
        blocks[name] = torch.randint(0, 256, (3, 512 // fmt.block_size * fmt.block_bytes)).byte()
        records.append(gguf_writer.tensor(name, (512, 3), fmt.ggml_id, len(data)))
        data += blocks[name].numpy().tobytes()
        data += b"\0" * (-len(data) % 32)
    records.append(gguf_writer.tensor("row", (32,), FORMATS["Q8_0"].ggml_id, len(data)))
    records.append(gguf_writer.tensor("IQ2_S", (256, 1), 22, len(data) + 64))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_writer.gguf((), records, data + b"\0" * 256))
    with open_gguf(path) as file:
        source = GgufSource(file)
        for name in blocks:
            weight = source.fetch(name)
            assert (weight.kind, weight.shape) == (name, (3, 512))
            assert torch.equal(weight.blocks, blocks[name])
        with pytest.raises(FileError, match=r"'row' of shape .* only matrices"):
            source.fetch("row")
        with pytest.raises(FileError, match="IQ2_S, which has no decoder"):
            source.fetch("IQ2_S")


def test_rotary_tables_grow_under_live_caches(tiny):
    model = load_model(tiny("llama")[0], get_backend("cpu"))
    ids = tokens(10, seed=8)
    cache = model.new_cache(10)
    model.forward(ids[:6], cache)
    model.new_cache(64)
    got = model.forward(ids[6:], cache)
    torch.testing.assert_close(got, run(model, ids)[-1:], rtol=1e-5, atol=1e-5)


def test_tied_embeddings_share_memory(tiny):
    model = load_model(tiny("qwen3")[0], get_backend("cpu"))
    assert model.weights.head.data_ptr() == model.weights.embedding.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral", "gemma3", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_equals_the_cpu(tiny, variant, dtype):
    ids = tokens(14, seed=6)
    logits = []
    for name in ("cpu", "cuda"):
        kind = torch.float32 if name == "cpu" else dtype
        if variant == "packed":
            model = packed(name, kind)
        else:
            model = load_model(tiny(variant)[0], get_backend(name), kind)
        placed = ids.to(model.backend.device)
        logits.append(run(model, placed[:10], *placed[10:].split(1)))
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}[dtype]
    torch.testing.assert_close(logits[1], logits[0], rtol=bound, atol=bound)


def test_cache_overflow_is_refused_before_anything_is_written(tiny):
    model = load_model(tiny("llama")[0], get_backend("cpu"))
    cache = model.new_cache(6)
    model.forward(tokens(4), cache)
    before = [k.clone() for k in cache.k]
    for ids in (tokens(3), tokens(0)):
        with pytest.raises(InputError, match="1 to 2"):
            model.forward(ids, cache)
    assert cache.lengths[0] == 4
    assert all(torch.equal(a[:, :4], b[:, :4]) for a, b in zip(cache.k, before, strict=True))
    with pytest.raises(InputError, match="context length of 64"):
        model.new_cache(65)


def test_ids_out_of_range_read_nothing_foreign(tiny):
    model = load_model(tiny("llama")[0], get_backend("cpu"))
    logits = model.forward(torch.tensor([5, 96, -1, 2**31 - 1]), model.new_cache(4))
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture None"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": 4000}, "4000 layers"),
        ({"num_attention_heads": 3}, "heads"),
        ({"rms_norm_eps": 0}, "epsilon"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "embeddings is missing"),
        ({"rope_parameters": YARN | {"truncate": "no"}}, "truncate is 'no'"),
        ({"rope_parameters": YARN | {"beta_fast": 16}}, "'beta_fast' of 16 is not supported"),
        ({"rope_parameters": {"mrope_section": [8, 8]}}, r"'mrope_section' of \[8, 8\] is not"),
        ({"rope_parameters": {"full_attention": YARN, "rope_theta": 1e6}}, "'rope_theta' stands"),
        (
            {"rope_parameters": {"sliding_attention": YARN}, "layer_types": ["full_attention"] * 2},
            "layer type 'full_attention' are missing",
        ),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}},
            "'full_attention' and 'sliding_attention' layers differ",
        ),
        ({"rope_parameters": [1]}, "no object"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full"),
        ({"use_sliding_window": True}, "some of the layers"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta is 1000"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "and type 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": float("nan")}}, "factor is nan"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "factor is 1.5"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported; known: gptq"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"max_position_embeddings": 1 << 23}, "positions are over"),
        ({"attention_bias": True}, r"model\.layers\.0\.self_attn\.q_proj\.bias, .* are missing"),
        ({"num_hidden_layers": 1}, "9 tensors have no place .* 'model.layers.1"),
        ({"vocab_size": 97}, "shape"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is"),
    ],
)
def test_bad_configs_are_refused(tiny, tmp_path, change, message):
    directory, _ = tiny("llama")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match=message):
        load_model(tmp_path, get_backend("cpu"))


def test_every_spelling_of_the_rotary_embedding_is_read(tiny, tmp_path):
    """transformers' own frequencies, of files as it writes them and as it wrote them."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain, flat = {"rope_type": "default"}, {"rope_theta": 5e5}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    spellings = [
        flat | {"rope_scaling": None},
        flat | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        flat | {"rope_scaling": llama3},
        {"rope_parameters": plain | flat},
        {"rope_parameters": llama3 | flat},
        {"rope_parameters": YARN | flat},
        {"rope_parameters": YARN | flat | {"truncate": False}},
        {"rope_parameters": {"full_attention": plain | flat}},
        {"rope_parameters": {"full_attention": llama3 | flat, "sliding_attention": None}},
    ]
    written = json.loads((tiny("qwen3")[0] / "config.json").read_text())
    del written["rope_parameters"]
    for spelling in spellings:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(written | spelling))
        theirs = AutoConfig.from_pretrained(tmp_path)
        nested = theirs.rope_parameters.get("full_attention")
        theirs.rope_parameters = nested or theirs.rope_parameters
        kind = theirs.rope_parameters["rope_type"]
        if kind == "default":
            want = 5e5 ** -(torch.arange(0, 24, 2) / 24)
        else:
            want, _ = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
        config = LlamaConfig.from_hf(written | spelling, path)
        assert (config.rope.kind, config.rope.theta) == (kind, 5e5), spelling
        cos, sin = rope_tables(config.rope, 2)
        torch.testing.assert_close(torch.atan2(sin[1], cos[1]), want, rtol=1e-5, atol=1e-7)


def save_with(directory, theirs, name, change):
    """The model's own directory with one weight replaced."""
    from safetensors.torch import load_file, save_file

    for file in theirs.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int8, torch.int64])
def test_weights_that_are_no_floats_are_refused(tiny, tmp_path, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    save_with(tmp_path, tiny("llama")[0], name, lambda weight: weight.to(dtype))
    words = str(dtype).removeprefix("torch.")
    with pytest.raises(FileError, match=f"'{name}' is of {words}; weights are of float64, "):
        load_model(tmp_path, get_backend("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_weights_that_are_not_finite_are_refused(tiny, tmp_path, name, value):
    def harm(weight):
        weight.view(-1)[[1, 5]] = value
        return weight

    save_with(tmp_path, tiny("llama")[0], name, harm)
    backend = get_backend("cpu")
    # Norm weights stay in float32, where 1e5 is a number like another.
    if value == 1e5:
        load_model(tmp_path, backend)
    if value != 1e5 or "norm" not in name:
        with pytest.raises(FileError, match=f"'{name}' holds 2 weights not finite in float"):
            load_model(tmp_path, backend, torch.float16)
    load_model(tmp_path, backend, torch.float16, allow_non_finite=True)


def with_divisors(divisors):
    source = PackedSource()
    source._tensors["rope_freqs.weight"] = torch.as_tensor(divisors)
    return source


def test_divisors_of_frequencies_are_the_scaling_that_a_file_stores():
    """Llama 3's scaling, written as a divisor of each frequency, is that scaling."""
    scaled = dataclasses.replace(
        PACKED.rope, kind="llama3", factor=8.0, original_positions=int(torch.randint(9, 30, ()))
    )
    plain = schemes.frequencies(scaled.dim, scaled.theta)
    ramp = scaled.low_freq_factor, scaled.high_freq_factor
    divisors = plain / schemes.llama3(plain, 8.0, *ramp, scaled.original_positions)
    assert divisors.unique().numel() > 1
    backend, ids = get_backend("cpu"), tokens(20)

    def logits(config, source):
        weights = load_weights(source, config, backend, torch.float32)
        return run(Llama(config, weights, backend, torch.float32), ids)

    got = logits(PACKED, with_divisors(divisors.float()))
    want = logits(dataclasses.replace(PACKED, rope=scaled), PackedSource())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, logits(PACKED, PackedSource()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_divisors_that_stretch_no_wave_are_refused(bad):
    source = with_divisors([1.0, 2.0, bad, *[1.0] * 5])
    with pytest.raises(FileError, match="unusable divisors"):
        load_weights(source, PACKED, get_backend("cpu"), torch.float32, allow_non_finite=True)


def test_gguf_metadata_is_checked():
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.embedding_length": 64,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 24,
        "qwen3.attention.value_length": 24,
        "qwen3.feed_forward_length": 96,
        "qwen3.block_count": 2,
        "qwen3.context_length": 64,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": ["a"] * 96,
    }
    names = {"blk.0.attn_q_norm.weight": None, "output.weight": None}
    config = LlamaConfig.from_gguf(metadata, names, "x.gguf")
    assert (config.qk_norm, config.qkv_bias, config.tie_embeddings) == (True, False, False)
    assert (config.vocab_size, config.head_dim, config.rope.interleaved) == (96, 24, False)
    for change, message in (
        ({"general.architecture": "gpt2"}, "'gpt2' is not supported"),
        ({"qwen3.rope.scaling.type": "yarn"}, "yarn"),
        ({"qwen3.attention.value_length": 16}, "different head sizes"),
        ({"qwen3.block_count": True}, "block_count is True"),
        ({"qwen3.rope.dimension_count": 23}, "23 rotary"),
        ({"qwen3.attention.key_length": 512, "qwen3.attention.value_length": 512}, "over 256"),
    ):
        with pytest.raises(FileError, match=message):
            LlamaConfig.from_gguf(metadata | change, names, "x.gguf")
    del metadata["qwen3.context_length"]
    with pytest.raises(FileError, match="context_length is missing"):
        LlamaConfig.from_gguf(metadata, names, "x.gguf")


def test_rope_scaling_laws():
    plain = RopeConfig(theta=10000.0, dim=16)
    cos, sin = rope_tables(plain, 32)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    linear = rope_tables(RopeConfig(theta=10000.0, dim=16, kind="linear", factor=4.0), 32)[0]
    torch.testing.assert_close(linear[::4], cos[:8])
    ones = rope_tables(plain, 32, torch.ones(8))[0]
    assert torch.equal(ones, cos)
    llama3 = RopeConfig(10000.0, 16, kind="llama3", factor=8.0, original_positions=64)
    scaled = rope_tables(llama3, 32)[0]
    assert torch.equal(scaled[:, 0], cos[:, 0]), "the shortest wavelength is kept"
    torch.testing.assert_close(scaled[8::8, -1], cos[1:4, -1])  # the longest is stretched
