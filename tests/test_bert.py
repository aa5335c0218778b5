"""BERT's encoders: equal to transformers from files of both kinds, and what of them is refused."""

import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.models import (
    Bert,
    BertConfig,
    bert,
    load_encoder,
    load_model,
    load_tokenizer,
)
from ferrum_triton.models.bert import HF_NAMES
from ferrum_triton.quant import FORMATS, QuantizedTensor, quantize_blocks
from tests import gguf_writer as w
from tests.tiny_models import save_tiny, write_gguf

transformers = pytest.importorskip(
    "transformers", reason="transformers makes and checks the tiny models"
)
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
METADATA = {
    "block_count": 2,
    "context_length": 32,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-12,
    "attention.causal": False,
    "pooling_type": 1,
    "vocab_size": 96,
}
LENGTHS = (7, 1, 32, 12)


def save(directory, kind="BertModel", **changed):
    """A random model, saved to ``directory`` and returned."""
    torch.manual_seed(7)
    model = getattr(transformers, kind)(transformers.BertConfig(**SHAPE | changed)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(parameter * 0.5 + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    return path, save(path)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the directory, to be changed."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def in_gguf(model):
    """The tensors of a transformers model as a GGUF file has them."""
    stems = {theirs: ours for ours, theirs in HF_NAMES.items()}
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem == "pooler.dense":
            continue
        layer = ""
        if stem.startswith("encoder.layer."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        tensors[f"{layer}{stems[stem]}.{kind}"] = tensor
    return tensors


@pytest.fixture(scope="module")
def file(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "bert", METADATA, in_gguf(saved[1]))
    return path


def texts(*lengths, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=make).tolist() for n in lengths]


@torch.inference_mode()
def expected(model, ids, types=None):
    types = None if types is None else torch.tensor([types])
    return model(torch.tensor([ids]), token_type_ids=types).last_hidden_state[0]


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.float().cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_equals_transformers(saved, file, kind):
    model = load_encoder(saved[0] if kind == "directory" else file, get_backend("cpu"))
    assert isinstance(model, Bert)
    batch = texts(*LENGTHS)
    want = [expected(saved[1], ids) for ids in batch]
    for ids, states in zip(batch, want, strict=True):
        close(model.hidden_states(ids), states)
    mean, cls = torch.stack([s.mean(0) for s in want]), torch.stack([s[0] for s in want])
    close(model.encode(batch), mean)
    close(model.encode(batch, pooling="cls"), cls)
    unit = mean / mean.norm(dim=1, keepdim=True)
    close(model.encode(batch, normalize=True), unit)


def test_token_types_count(saved):
    model = load_encoder(saved[0], get_backend("cpu"))
    batch = texts(9, 4)
    types = [[0] * 4 + [1] * 5, [1, 0, 1, 0]]
    want = [expected(saved[1], *pair) for pair in zip(batch, types, strict=True)]
    close(model.hidden_states(batch[0], types[0]), want[0])
    close(model.encode(batch, types), torch.stack([states.mean(0) for states in want]))
    assert not torch.allclose(want[0], expected(saved[1], batch[0]), atol=1e-2)


@given(lengths=st.lists(st.integers(1, 9), min_size=1), most=st.integers(1, 20))
def test_batches_are_full(lengths, most):
    """Texts in order, together while they fit: the next one would be too much for each batch."""
    batch = [SimpleNamespace(ids=[0] * length) for length in lengths]
    with mock.patch.object(bert, "_TOKENS_AT_A_TIME", most):
        batches = list(bert._batches(batch))
    assert [text for part in batches for text in part] == batch
    sums = [sum(len(text.ids) for text in part) for part in batches]
    assert all(total <= most or len(part) == 1 for total, part in zip(sums, batches, strict=True))
    for total, after in zip(sums, batches[1:], strict=False):
        assert total + len(after[0].ids) > most


def test_a_vector_is_its_text_s_alone(saved, monkeypatch):
    model = load_encoder(saved[0], get_backend("cpu"))
    batch = texts(*LENGTHS, seed=1)
    alone = torch.cat([model.encode([ids]) for ids in batch])
    close(model.encode(batch), alone)
    runs, run = [], model._run
    monkeypatch.setattr(model, "_run", lambda part: runs.append(len(part)) or run(part))
    monkeypatch.setattr(bert, "_TOKENS_AT_A_TIME", 8)
    close(model.encode(batch), alone)
    assert runs == [2, 1, 1]


def test_bfloat16_is_near(saved):
    model = load_encoder(saved[0], get_backend("cpu"), torch.bfloat16)
    batch = texts(*LENGTHS)
    assert model.hidden_states(batch[0]).dtype == torch.bfloat16
    got, want = model.encode(batch), [expected(saved[1], ids).mean(0) for ids in batch]
    assert got.dtype == torch.float32
    assert (torch.cosine_similarity(got, torch.stack(want)) > 0.999).all()


@pytest.mark.parametrize("kind", ["float32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "backend_name", ["cpu", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_weights_may_be_packed(tmp_path, backend_name, kind):
    """Against transformers with the weights that the packed ones stand for."""
    theirs = save(tmp_path, num_hidden_layers=1)
    tensors = in_gguf(theirs)
    matrices = [name for name, tensor in tensors.items() if tensor.dim() == 2]
    for name in matrices if kind != "float32" else ():
        packed = QuantizedTensor(quantize_blocks(tensors[name], FORMATS[kind]), kind)
        tensors[name].copy_(packed.dequantize(torch.float32))
        tensors[name] = packed
    file = tmp_path / "model.gguf"
    write_gguf(file, "bert", METADATA | {"block_count": 1}, tensors)
    model = load_encoder(file, get_backend(backend_name))
    batch = texts(7, 3)
    want = torch.stack([expected(theirs, ids).mean(0) for ids in batch])
    close(model.encode(batch), want, 1e-3)
    close(model.hidden_states(batch[0]), expected(theirs, batch[0]), 1e-3)


def test_kernels_run_it(saved, interpreted):
    model = load_encoder(saved[0], get_backend("interpret"))
    model.encode(texts(3, 2))
    kernels = ("embedding_lookup", "layer_norm", "add", "activation", "flash_attention")
    assert interpreted >= {f"_{name}_kernel" for name in kernels}


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_heads_are_left_out(tmp_path, kind):
    theirs = save(tmp_path, kind)
    ids = texts(6)[0]
    model = load_encoder(tmp_path, get_backend("cpu"))
    close(model.hidden_states(ids), expected(theirs.bert, ids))


def rewrite(directory, change):
    """Change the tensors of a directory."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_older_files_call_norms_otherwise(saved, copy):
    def older(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        tensors["embeddings.position_ids"] = torch.arange(32)[None]

    rewrite(copy, older)
    ids = texts(6)[0]
    close(load_encoder(copy, get_backend("cpu")).hidden_states(ids), expected(saved[1], ids))


def configured(path, **changed):
    values = json.loads((path / "config.json").read_text()) | changed
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; known: gelu"),
        ({"hidden_act": "gelu_new"}, "'gelu_new' is not supported"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
        ({"model_type": "nomic_bert"}, "'nomic_bert' is not supported; known: bert"),
        ({"is_decoder": True}, "is_decoder is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"quantization_config": {"bits": 4}}, "in GGUF files only"),
        ({"num_attention_heads": 5}, "no multiple of 5 heads"),
        ({"hidden_size": 1 << 23, "num_attention_heads": 2}, "over 256"),
        ({"num_hidden_layers": 1 << 20}, "layers are over"),
        ({"max_position_embeddings": 1 << 23}, "positions are over"),
        ({"layer_norm_eps": 0.0}, "norm epsilon"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
        ({"architectures": ["RobertaModel"]}, "'RobertaModel' is not supported; known: BertModel"),
        ({"architectures": ["LlamaForCausalLM"]}, "is a decoder; load it with load_model"),
        ({"num_hidden_layers": 3}, "'encoder.layer.2.attention.self.query.weight' is missing"),
        ({"num_hidden_layers": 1}, "no place in this model, 'encoder.layer.1."),
        ({"vocab_size": 97}, r"has shape \[96, 64\], expected \[97, 64\]"),
    ],
)
def test_bad_directories_are_refused(copy, change, message):
    configured(copy, **change)
    with pytest.raises(FileError, match=message):
        load_encoder(copy, get_backend("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.causal": True}, "causal attention"),
        ({"pooling_type": 3}, "pooling 'last' is not supported; known: mean, cls"),
        ({"pooling_type": 4}, "pooling 'rank'"),
        ({"pooling_type": 5}, "pooling '5'"),
        ({"attention.head_count": 7}, "no multiple of 7 heads"),
        ({"context_length": 16}, r"'position_embd.weight' has shape \[32, 64\]"),
    ],
)
def test_bad_gguf_files_are_refused(saved, tmp_path, change, message):
    file = tmp_path / "model.gguf"
    write_gguf(file, "bert", METADATA | change, in_gguf(saved[1]))
    with pytest.raises(FileError, match=message):
        load_encoder(file, get_backend("cpu"))


def test_tensors_are_checked(saved, copy, tmp_path):
    tensors = in_gguf(saved[1])
    file = tmp_path / "model.gguf"
    name = "blk.1.ffn_up.bias"
    for kept, message in (
        ({k: v for k, v in tensors.items() if k != name}, f"some of {name} are missing"),
        ({k: v for k, v in tensors.items() if k != "token_types.weight"}, "is missing"),
        (tensors | {"blk.0.ffn_up.weight": torch.zeros(64, 64)}, "has shape"),
        (tensors | {"cls.weight": torch.zeros(64, 64)}, "no place in this model, 'cls.weight'"),
        (tensors | {name: torch.full((96,), torch.nan)}, "96 weights not finite"),
    ):
        write_gguf(file, "bert", METADATA, kept)
        with pytest.raises(FileError, match=message):
            load_encoder(file, get_backend("cpu"))
    assert load_encoder(file, get_backend("cpu"), allow_non_finite=True)
    rewrite(copy, lambda tensors: tensors["embeddings.LayerNorm.weight"].fill_(torch.inf))
    with pytest.raises(FileError, match=r"'embeddings\.LayerNorm\.weight' holds 64 weights"):
        load_encoder(copy, get_backend("cpu"))


def test_other_models_are_sent_to_their_loader(saved, file, tmp_path):
    backend = get_backend("cpu")
    for path in (file, saved[0]):
        with pytest.raises(FileError, match="is a text encoder; load it with load_encoder"):
            load_model(path, backend)
    save_tiny(tmp_path, "llama")
    with pytest.raises(FileError, match="'LlamaForCausalLM' is a decoder; load it with load_model"):
        load_encoder(tmp_path, backend)
    for name, message in (
        ("llama", "'llama' is a decoder; load it with load_model"),
        ("gemma3", "'gemma3' is a decoder"),
        ("nomic-bert", "'nomic-bert' is not supported; known: bert"),
    ):
        other = tmp_path / f"{name}.gguf"
        write_gguf(other, name, {}, {})
        with pytest.raises(FileError, match=message):
            load_encoder(other, backend)


BAD_TEXTS = [
    ([], "texts is empty; allowed: at least one text"),
    ([[1, 2], []], "ids is of 0 tokens; allowed: 1 to the model's 32 positions"),
    ([[1] * 33], "ids is of 33 tokens"),
    ([[1, 96]], r"ids is holding 96; allowed: a list of integers in \[0, 96\)"),
    ([[-1]], "ids is holding -1"),
    ([[True]], "ids is holding True"),
    ([[1.0]], "ids is holding 1.0"),
    (["text"], "ids is holding 't'"),
    ([1, 2], "ids is of type int; allowed: a list of integers for each text"),
    (torch.ones(1, 2).long(), "ids is of type Tensor"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_TEXTS)
def test_bad_texts_are_refused(saved, batch, message):
    model = load_encoder(saved[0], get_backend("cpu"))
    with pytest.raises(InputError, match=message):
        model.encode(batch)
    if len(batch) == 1:
        with pytest.raises(InputError, match=message):
            model.hidden_states(batch[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_types": [[0, 2]]}, r"token_types is holding 2; .*in \[0, 2\)"),
        ({"token_types": [[0]]}, "token_types is of 1 tokens; allowed: the 2 of ids"),
        ({"token_types": []}, "token_types is of 0 texts; allowed: 1"),
        ({"token_types": [0]}, "token_types is of type int"),
        ({"pooling": "max"}, "pooling is 'max'; allowed: 'mean' or 'cls'"),
    ],
)
def test_bad_options_are_refused(saved, options, message):
    model = load_encoder(saved[0], get_backend("cpu"))
    with pytest.raises(InputError, match=message):
        model.encode([[1, 2]], **options)


def test_pooling_is_the_file_s(saved, file, copy, tmp_path):
    cls_file = tmp_path / "cls.gguf"
    write_gguf(cls_file, "bert", METADATA | {"pooling_type": 2}, in_gguf(saved[1]))
    backend, batch = get_backend("cpu"), texts(5, 3)
    model = load_encoder(cls_file, backend)
    assert torch.equal(model.encode(batch), model.encode(batch, pooling="cls"))
    assert not torch.equal(model.encode(batch), model.encode(batch, pooling="mean"))
    write_gguf(cls_file, "bert", METADATA | {"pooling_type": 0}, in_gguf(saved[1]))
    assert load_encoder(cls_file, backend).config.pooling == "mean"

    def pooled(**values):
        (copy / "1_Pooling").mkdir(exist_ok=True)
        (copy / "1_Pooling" / "config.json").write_text(json.dumps(values))
        return BertConfig.from_hf(json.loads((copy / "config.json").read_text()), copy / "x")

    off = {"pooling_mode_max_tokens": False}
    assert pooled(**off, pooling_mode_mean_tokens=True).pooling == "mean"
    assert pooled(pooling_mode_cls_token=True, pooling_mode_mean_tokens=False).pooling == "cls"
    assert pooled(pooling_mode="cls").pooling == "cls"
    with pytest.raises(FileError, match="'pooling_mode_max_tokens' is not supported"):
        pooled(pooling_mode_max_tokens=True)
    with pytest.raises(FileError, match="'mean and cls' is not supported"):
        pooled(pooling_mode_mean_tokens=True, pooling_mode_cls_token=True)


def test_steps_behind_pooling_are_refused(copy):
    kinds = ["Transformer", "Pooling", "Normalize"]
    for kind in [*kinds, "Dense"]:
        modules = [{"type": f"sentence_transformers.models.{k}"} for k in [*kinds, kind]]
        (copy / "modules.json").write_text(json.dumps(modules))
        if kind != "Dense":
            load_encoder(copy, get_backend("cpu"))
            continue
        with pytest.raises(FileError, match=r"'sentence_transformers.models.Dense' is not"):
            load_encoder(copy, get_backend("cpu"))
    for text, message in (("{}", "not a JSON array"), ("[1]", "None"), ("[", "not JSON")):
        (copy / "modules.json").write_text(text)
        with pytest.raises(FileError, match=message):
            load_encoder(copy, get_backend("cpu"))


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'()-#▁",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
    *("hello", "world", "##ing", "naive", "cafe", "strasse", "##ßen", "straße", "[unused0]"),
    *("日", "本", "語", "и", "##и", "к", "##к", "é", "##é", "H", "##H", "##▁", "É", "###"),
]
SENTENCES = [
    "Hello, WORLD!",
    "naïve Café — CAFE\u0301, Straße",
    "日本語 and 日語x",
    "don't (walking) x#y ## #",
    "кики \u00e9\u00c9 e\u0301",
    "unknowable Ωmega 🎉 🎉🎉",
    "tabs\tand\nlines\u00a0\u3000 \u200b\x00\x07 x",
    "[MASK] is [CLS] or [mask] [unused0]",
    "",
    "   ",
    "a" * 101 + " " + "b" * 100,
    "▁ a▁b",
]


def phantom(token):
    """As GGUF files spell it."""
    return token if token in SPECIAL else token[2:] if token[:2] == "##" else f"▁{token}"


TOKENS = [phantom(token) for token in (*SPECIAL, *WORDS)]


def vocabulary(path, tokens, **rest):
    """A GGUF file of these tokens, which are spelled as such files have it."""
    types = [3 if token in SPECIAL or token.startswith("<") else 1 for token in tokens]
    pairs = {
        "model": w.pair("tokenizer.ggml.model", w.STRING, "bert"),
        "tokens": w.array("tokenizer.ggml.tokens", w.STRING, tokens),
        "types": w.array("tokenizer.ggml.token_type", w.I32, types),
    }
    path.write_bytes(w.gguf([*(pairs | rest).values()]))
    return path


@pytest.mark.parametrize("lowercase", [True, False])
def test_tokenizers_are_transformers_own(tmp_path, lowercase):
    numbers = {token: i for i, token in enumerate((*SPECIAL, *WORDS))}
    theirs = transformers.BertTokenizer(vocab=numbers, do_lower_case=lowercase)
    theirs.save_pretrained(tmp_path)
    cased = w.pair("tokenizer.ggml.normalizer.lowercase", w.BOOL, False)
    rest = {} if lowercase else {"cased": cased}
    for path in (tmp_path, vocabulary(tmp_path / "model.gguf", TOKENS, **rest)):
        ours = load_tokenizer(path)
        assert ours.vocab_size == len(numbers)
        for text in SENTENCES:
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, (path, text)
            assert ours.decode(ids) == theirs.backend_tokenizer.decode(ids)
        assert ours.encode("a", add_special=False) == [numbers["a"]]
        assert numbers["[MASK]"] not in ours.encode("[MASK]", parse_special=False)
    assert (ours.bos_token, ours.eos_token) == ("[CLS]", "[SEP]")


def test_vocabularies_may_name_their_special_tokens(tmp_path):
    rest = {
        name: w.pair(f"tokenizer.ggml.{name}_token_id", w.U32, number)
        for name, number in (("unknown", 0), ("bos", 1), ("seperator", 2))
    }
    path = vocabulary(tmp_path / "model.gguf", ["<u>", "<s>", "</s>", "▁a"], **rest)
    assert load_tokenizer(path).encode("a b") == [1, 3, 0, 2]


def test_bad_vocabularies_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for missing in ("[UNK]", "[CLS]", "[SEP]"):
        tokens = [token for token in TOKENS if token != missing]
        with pytest.raises(FileError, match=rf"has no token \{missing}"):
            load_tokenizer(vocabulary(path, tokens))
    with pytest.raises(FileError, match="no token of the vocabulary begins with ▁"):
        load_tokenizer(vocabulary(path, [*SPECIAL, "a", "##b"]))
    with pytest.raises(FileError, match="'##a' twice"):
        load_tokenizer(vocabulary(path, [*SPECIAL, "▁##a", "a"]))


def test_directories_with_a_bad_word_piece_are_refused(tmp_path):
    transformers.BertTokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    written = json.loads(path.read_text())
    for changed, message in (
        ({"unk_token": "[gone]"}, r"lacks its unknown token '\[gone\]'"),
        ({"max_input_chars_per_word": 10**9}, "words of 1000000000 characters; allowed: 1024"),
    ):
        path.write_text(json.dumps(written | {"model": written["model"] | changed}))
        with pytest.raises(FileError, match=message):
            load_tokenizer(tmp_path)
