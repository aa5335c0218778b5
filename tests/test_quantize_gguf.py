"""GGUF files that ``ferrum-triton quantize`` makes: what they hold, and who reads it."""

import json

import numpy as np
import pytest
import torch

from ferrum_triton import FileError, get_backend
from ferrum_triton.cli import main
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.files.tokenizer import load_tokenizer
from ferrum_triton.files.write_gguf import TYPES, GgufWriter, Record, pair
from ferrum_triton.models import load_model, quantize
from ferrum_triton.models.quantize import Settings, quantize_model
from ferrum_triton.quant import FORMATS, QuantizedTensor, dequantize_blocks
from ferrum_triton.quant.codings import rounded
from tests import tiny_files
from tests.test_models import run, tokens
from tests.test_quantize import TEXT, edited, text, tiny_directory, with_tensor  # noqa: F401

# Heads as wide as transformers takes for granted; rows of whole blocks of 256, and of no such.
SHAPES = {
    "llama": {"hidden_size": 256, "intermediate_size": 96},
    "llama3_rope": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"intermediate_size": 256},
    "qwen3": {"head_dim": 128},
}
CALIBRATED = {"length": 32, "num_tokens": 768}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("variant", SHAPES)
def test_a_file_is_the_directory_s_model(tmp_path, monkeypatch, text, variant, kind):  # noqa: F811
    """What is decoded is what was chosen, in the file's order, here and by gguf's reader."""
    source = tiny_directory(tmp_path / "source", variant, **SHAPES[variant])
    target, chosen = tmp_path / "made.gguf", []

    def note(weight, coding, seen=None):
        q, grid = rounded(weight, coding, seen)
        chosen.append(grid.decode(q))
        return q, grid

    monkeypatch.setattr(quantize, "rounded", note)
    texts = (text,) if kind == "Q4_K" else ()
    counts = quantize_model(source, target, Settings(kind=kind, texts=texts, **CALIBRATED))
    longer = {"llama": 12, "qwen2": 2, "qwen3": 2}.get(variant, 0)
    if kind == "Q4_K":
        assert counts == {k: n for k, n in (("Q4_K", longer), ("Q5_0", 14 - longer)) if n}
    else:
        assert counts == {kind: 14}

    gguf = pytest.importorskip("gguf", reason="gguf reads what was written")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    with open_gguf(target) as file:
        assert [*file.tensors] == [*theirs]
        sums = []
        for name, tensor in file.tensors.items():
            found = tensor.data()
            if tensor.type.dtype is None:
                found = dequantize_blocks(found, FORMATS[tensor.type.name])
                sums.append(found.double().square().sum().item())
            read = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
            assert np.array_equal(read, found.float().numpy())
        assert file.metadata["tokenizer.chat_template"] == "{{ messages }}"
    # Rows may lie in another order.
    assert sorted(sums) == pytest.approx(sorted(c.double().square().sum().item() for c in chosen))

    model = load_model(target, get_backend("cpu"))
    plain = load_model(source, get_backend("cpu"))
    got, want = run(model, tokens(12)), run(plain, tokens(12))
    assert (got - want).norm() < (0.03 if kind == "Q8_0" else 0.45) * want.norm()
    for words in ("Hello <s> 12, ab!\n", "été", ""):
        assert model.tokenizer.encode(words) == plain.tokenizer.encode(words)
    assert model.tokenizer.eos_ids == plain.tokenizer.eos_ids
    packed = load_model(target, get_backend("interpret"))
    assert isinstance(packed.weights.layers[0].attn_out.weight, QuantizedTensor)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_the_same(tmp_path, variant):
    transformers = pytest.importorskip("transformers", reason="transformers reads the files")
    source = tiny_directory(tmp_path / "source", variant, **SHAPES[variant])
    quantize_model(source, tmp_path / "made.gguf", Settings(kind="Q4_K"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="made.gguf")
    ids = tokens(12)
    with torch.inference_mode():
        want = theirs.eval()(ids[None]).logits[0]
    got = run(load_model(tmp_path / "made.gguf", get_backend("cpu")), ids)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="made.gguf")
    said = "Hello <s> ab 12!"
    assert words.encode(said) == load_tokenizer(source).encode(said)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_file_of_a_file_keeps_what_is_not_rounded(tmp_path, architecture, capsys):
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    tiny_files.write(source, architecture)
    arguments = ["quantize", str(source), str(target), "--kind", "Q4_0"]
    assert main([*arguments, "--eight-bits", "*.ffn_down"]) == 0
    assert "12 matrices of Q4_0, 2 matrices of Q8_0, " in capsys.readouterr().out
    with open_gguf(source) as before, open_gguf(target) as after:
        said = {"general.file_type", "general.quantization_version"}
        assert {*after.metadata} == {*before.metadata} | said
        assert all(after.pair(key) == before.pair(key) for key in before.metadata)
        assert [*after.tensors] == [*before.tensors]
        for name, tensor in before.tensors.items():
            same = torch.equal(tensor.data().view(-1), after.tensors[name].data().view(-1))
            is_kept = not name.startswith("blk.") or "norm" in name
            assert same or not is_kept
            assert after.tensors[name].type == tensor.type or not is_kept
    models = [load_model(path, get_backend("cpu")) for path in (source, target)]
    before, after = (run(model, tokens(8)) for model in models)
    assert (before - after).norm() < 0.3 * before.norm()


def test_metadata_pairs_are_those_that_are_read(tmp_path):
    written = {"a": 3, "b": 1.5, "c": True, "d": "é", "e": [1, -2], "f": ["x", ""], "g": [0.5]}
    path = tmp_path / "made.gguf"
    records = [Record("x", (3, 5), TYPES["F32"]), Record("y", (2, 32), TYPES["Q8_0"])]
    data = {"x": torch.randn(3, 5), "y": torch.randint(256, (2, 34), dtype=torch.uint8)}
    out = GgufWriter(path, [pair(key, value) for key, value in written.items()], records)
    for name in ("y", "x"):
        out.put(name, data[name])
    out.finish()
    with open_gguf(path) as file:
        assert dict(file.metadata) == written
        assert all(torch.equal(file.tensors[name].data(), data[name]) for name in data)


def sentencepiece(path):
    """A tokenizer as Llama 2 has it, of a few merges and all bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    # A token of rank r was made by merge r: "▁the" by way of "he" and "the".
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("a", "b"), ("▁", "ab")]
    pieces = ["▁", *"abehtx", *("".join(m) for m in merges)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: number for number, token in enumerate(names)}
    settings = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, **settings))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    backend.add_special_tokens([AddedToken(t) for t in ("<unk>", "<s>", "</s>")])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return len(names)


def test_sentencepiece(tmp_path):
    source = tiny_directory(tmp_path / "source", "llama", vocab_size=288)
    assert sentencepiece(source) < 288
    target = tmp_path / "made.gguf"
    quantize_model(source, target, Settings(kind="Q8_0"))
    ours, theirs = load_tokenizer(target), load_tokenizer(source)
    for words in ("the abba the", "hé\n", "x"):
        assert ours.encode(words, add_special=False) == theirs.encode(words, add_special=False)
    assert ours.vocab_size == 288 and ours.bos_id == theirs.bos_id == 1
    with open_gguf(target) as file:
        assert file.metadata["tokenizer.ggml.model"] == "llama"
        assert file.metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
        assert file.metadata["tokenizer.ggml.tokens"][-1] == "[PAD287]"


def rule_of_its_own(source):
    described = json.loads((source / "tokenizer.json").read_text())
    described["pre_tokenizer"] |= {"use_regex": False}
    (source / "tokenizer.json").write_text(json.dumps(described))


def other_vocabulary(source):
    described = json.loads((source / "tokenizer.json").read_text())
    described["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (source / "tokenizer.json").write_text(json.dumps(described))


def lower_case(source):
    described = json.loads((source / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "Lowercase"}
    (source / "tokenizer.json").write_text(json.dumps(described))


DOWN = "model.layers.1.mlp.down_proj.weight"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("variant", "break_it", "message"),
    [
        ("gemma3", lambda s: None, "Gemma3ForCausalLM is not written as GGUF; known: Llama"),
        ("qwen3", lambda s: edited(s, rope_parameters=YARN), "rope scaling 'yarn' is not written"),
        ("qwen3", lambda s: (s / "tokenizer.json").unlink(), "tokenizer.json: cannot be read"),
        ("qwen3", rule_of_its_own, "by a rule that GGUF files have no name for"),
        ("qwen3", other_vocabulary, "a vocabulary of 'WordLevel' is not written"),
        ("qwen3", lower_case, "it would read text otherwise"),
        (
            "qwen3",
            lambda s: with_tensor(
                s, lambda t: torch.randn(64, 80), "model.layers.1.mlp.down_proj.weight"
            ),
            "80 columns, no whole groups of 32; a GGUF file has blocks of 32",
        ),
        ("qwen3", lambda s: (s.parent / "made.gguf").write_text(""), "is there already"),
    ],
)
def test_what_is_not_written_leaves_nothing_behind(tmp_path, variant, break_it, message):
    source = tiny_directory(tmp_path / "source", variant)
    break_it(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match=message):
        quantize_model(source, tmp_path / "made.gguf", Settings(kind="Q4_0"))
    assert sorted(tmp_path.iterdir()) == before


def test_files_become_files_alone(tmp_path):
    source = tiny_files.write(tmp_path / "a.gguf", "llama")
    with pytest.raises(FileError, match=r"give the target a name that ends in \.gguf"):
        quantize_model(source, tmp_path / "directory")
    mixture = tiny_files.write(tmp_path / "m.gguf", "qwen3moe")
    with pytest.raises(FileError, match="architecture 'qwen3moe' is not quantised"):
        quantize_model(mixture, tmp_path / "b.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "m.gguf"]
