"""``ferrum-triton quantize``: directories that it writes, what calibrates them, what it refuses."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.cli import main
from ferrum_triton.files import write_safetensors
from ferrum_triton.files.int_weights import IntFiles, packing_of
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.models import load_model, quantize
from ferrum_triton.models.calibration import calibration_ids, run_and_round
from ferrum_triton.models.families import family_of_hf
from ferrum_triton.models.quantize import Settings, quantize_model
from ferrum_triton.models.weights import LlamaLoader
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.quant.codings import IntCoding, rounded
from tests.test_models import run, tokens
from tests.test_tokenizer_directory import write_directory
from tests.tiny_models import save_tiny

TEXT = "The quick brown fox jumps over the lazy dog; 12 foxes, 345 dogs. " * 20
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CALIBRATED = {"group_size": 32, "length": 32, "num_tokens": 768}


def tiny_directory(path, variant="qwen3", **changed):
    """A tiny model's directory, with a tokenizer's files and one that is not copied."""
    path.mkdir()
    save_tiny(path, variant, **{"vocab_size": 272} | changed)
    write_directory(path, tokenizer_config=SPECIAL)
    (path / "notes.bin").write_bytes(b"1")
    return path


@pytest.fixture
def source(tmp_path):
    return tiny_directory(tmp_path / "source")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_runs_on_what_was_written(source, tmp_path, bits, capsys):
    target = tmp_path / "target"
    arguments = ["quantize", str(source), str(target), "--bits", str(bits), "--group-size", "32"]
    assert main(arguments) == 0
    assert f"14 matrices of {bits} bits, " in capsys.readouterr().out
    assert {path.name for path in target.iterdir()} >= {"config.json", "tokenizer.json"}
    assert not (target / "notes.bin").exists()
    backend = get_backend("interpret")
    plain, packed = (load_model(path, backend) for path in (source, target))
    assert isinstance(packed.weights.layers[0].mlp.down.weight, QuantizedTensor)
    got, want = (run(model, tokens(6)) for model in (packed, plain))
    assert (got - want).norm() < (0.3 if bits == 4 else 0.02) * want.norm()


def test_every_matrix_is_what_rounding_gives(source, tmp_path):
    target = tmp_path / "target"
    before = load_file(source / "model.safetensors")
    assert quantize_model(source, target, Settings(group_size=32)) == {"4 bits": 14}
    after = load_file(target / "model.safetensors")
    found = decoded(target)
    matrices = [name for name in before if name not in after]
    assert len(matrices) == 14
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in matrices)
    for name in matrices:
        q, grid = rounded(before[name], IntCoding(4, 32))
        assert torch.equal(found[name].dequantize(), grid.decode(q))
    assert all(torch.equal(before[name], after[name]) for name in before if name in after)


def decoded(path):
    config = json.loads((path / "config.json").read_text())
    return IntFiles(open_safetensors(path), packing_of(config, path))


def matrices_of(names):
    """Names of matrices in the order in which a step comes to them."""
    words = [name.split(".") for name in names if name.endswith("proj.weight")]
    return [".".join(w) for w in sorted(words, key=lambda w: (int(w[2]), PARTS.index(w[4])))]


def walk(path, ids, round_them):
    """A model that is calibrated as it is, whatever it is of."""
    config = json.loads((path / "config.json").read_text())
    family = family_of_hf(config, path)
    files = decoded(path) if "quantization_config" in config else open_safetensors(path)
    origin = family.hf_source(files, family.hf_names, family.hf_norm_offset)
    sizes = family.config.from_hf(config, path)
    run_and_round(family.model, sizes, origin, get_backend("cpu"), ids, round_them)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("gemma3", {}),
        ("mistral", {"eight_bits": ("*.down_proj", "*layers.0*")}),
    ],
)
def test_gptq(tmp_path, text, monkeypatch, variant, settings):
    """Less error than rounding in every layer, by inputs as they are in the model that is made."""
    source, target = tiny_directory(tmp_path / "source", variant), tmp_path / "target"
    chosen = []

    def note(weight, coding, seen):
        before = weight.clone()  # which is replaced
        q, grid = rounded(weight, coding, seen)
        chosen.append((before, grid.decode(q), coding))
        return q, grid

    monkeypatch.setattr(quantize, "rounded", note)
    counts = quantize_model(source, target, Settings(texts=(text,), **CALIBRATED, **settings))
    assert sum(counts.values()) == len(chosen) and len(counts) == 1 + ("eight_bits" in settings)

    made = decoded(target)
    names = matrices_of(made)
    ids = calibration_ids((text,), source, CALIBRATED["num_tokens"], CALIBRATED["length"])
    products = {}

    def note_products(weights, found):
        products.update(dict.fromkeys(weights, found.double()))

    walk(target, ids, note_products)
    for name, (before, after, coding) in zip(names, chosen, strict=True):
        assert torch.equal(made[name].dequantize(), after)
        q, grid = rounded(before, coding)
        errors = [(found - before).double() for found in (after, grid.decode(q))]
        gptq, nearest = ((e @ products[name] * e).sum() for e in errors)
        assert gptq < nearest, name


def test_two_layers_are_in_memory_at_a_time(tmp_path, monkeypatch):
    source = tiny_directory(tmp_path / "source", num_hidden_layers=4)
    events, read = [], LlamaLoader.layer

    def note(self, index):
        events.append(index)
        return read(self, index)

    monkeypatch.setattr(LlamaLoader, "layer", note)
    walk(source, [tokens(8).tolist()], lambda weights, _: events.append(min(weights)))
    assert [event for event in events if isinstance(event, int)] == [0, 1, 2, 3]
    for layer in (2, 3):
        rounded_before = [str(event) for event in events[: events.index(layer)]]
        assert sum(f"layers.{layer - 2}." in event for event in rounded_before) == 4


def test_some_modules_may_have_eight_bits(source, tmp_path):
    target = tmp_path / "target"
    settings = Settings(group_size=32, eight_bits=("*.v_proj", "model.layers.1.mlp.*"))
    assert quantize_model(source, target, settings) == {"4 bits": 9, "8 bits": 5}
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    usual, others = config["config_groups"].values()
    assert usual["targets"] == ["Linear"] and usual["weights"]["num_bits"] == 4
    assert others["weights"]["num_bits"] == 8 and len(others["targets"]) == 5
    found = decoded(target)
    kinds = {n.removesuffix(".weight"): found[n].kind for n in matrices_of(found)}
    assert {n for n, kind in kinds.items() if kind == "Q8_0"} == set(others["targets"])
    model = load_model(target, get_backend("interpret"))
    assert model.weights.layers[1].mlp.down.weight.kind == "Q8_0"
    assert torch.isfinite(run(model, tokens(4))).all()
    assert [kind for kind, _, _ in found.sizes()].count("Q8_0") == 5


def test_large_models_are_several_files(source, tmp_path, monkeypatch):
    monkeypatch.setattr(write_safetensors, "MAX_SHARD_BYTES", 9000)
    one, several = tmp_path / "one", tmp_path / "several"
    quantize_model(source, several, Settings(group_size=32))
    monkeypatch.undo()
    quantize_model(source, one, Settings(group_size=32))
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    models = [load_model(path, get_backend("cpu")) for path in (one, several)]
    assert torch.equal(*(run(model, tokens(4)) for model in models))


def edited(source, **changed):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changed))


def with_tensor(source, change, name="model.layers.0.self_attn.q_proj.weight"):
    stored = load_file(source / "model.safetensors")
    save_file(stored | {name: change(stored.get(name))}, source / "model.safetensors")


BROKEN = [
    (lambda s: edited(s, architectures=["Qwen3MoeForCausalLM"]), {}, "'Qwen3MoeForCausalLM' is"),
    (lambda s: edited(s, architectures=None), {}, "architecture None is not quantised"),
    (lambda s: edited(s, quantization_config={"bits": 4}), {}, "quantised already"),
    (lambda s: None, {"group_size": 128}, "no whole groups of 128; group sizes: 32"),
    (lambda s: with_tensor(s, lambda t: t.int()), {}, "is I32; known"),
    (lambda s: with_tensor(s, lambda t: t / 0), {}, "not finite"),
    (lambda s: with_tensor(s, lambda t: t[None]), {}, r"shape \[1, 96, 64\], no matrix"),
    (lambda s: with_tensor(s, lambda t: torch.ones(2, 2), "odd.weight"), {}, "'odd.weight' has no"),
    (lambda s: (s / "model.safetensors").unlink(), {}, "holds neither"),
    (lambda s: (s.parent / "target").mkdir(), {}, "is there already"),
    (lambda s: (s.parent / "target").symlink_to("nowhere"), {}, "is there already"),
    (lambda s: None, {"eight_bits": ("*.fc1",)}, "eight_bits is '\\*.fc1'.* named as model.layers"),
    (lambda s: None, {"group_size": 48}, "group_size is 48; allowed: 32, 64, 128"),
    (lambda s: None, {"length": 0}, "length is 0"),
]


@pytest.mark.parametrize(("break_it", "settings", "message"), BROKEN)
def test_what_is_not_quantised_leaves_nothing_behind(source, tmp_path, break_it, settings, message):
    break_it(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises((FileError, InputError), match=message):
        quantize_model(source, tmp_path / "target", Settings(**{"group_size": 32} | settings))
    assert sorted(tmp_path.iterdir()) == before


def not_finite_inputs(source):
    """An embedding of NaN, which no matrix is to blame for."""
    with_tensor(source, lambda t: t / 0, "model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("words", "break_it", "message"),
    [
        ("", None, "text.txt: the calibration text has 0 tokens; 32 or more are needed"),
        ("a few words", None, "the calibration text has 11 tokens; 32 or more are needed"),
        (TEXT, lambda s: (s / "tokenizer.json").unlink(), "tokenizer.json: cannot be read"),
        (TEXT, lambda s: with_tensor(s, lambda t: t / 0), "q_proj.weight' holds what is not"),
        (TEXT, lambda s: with_tensor(s, lambda t: t[:48]), "has shape .* expected"),
        (TEXT, not_finite_inputs, "inputs of tensor .*q_proj.weight' .* hessian is not finite"),
    ],
)
def test_what_cannot_be_calibrated_leaves_nothing_behind(
    source, text, tmp_path, words, break_it, message
):
    text.write_text(words)
    if break_it is not None:
        break_it(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match=message):
        quantize_model(source, tmp_path / "target", Settings(texts=(text,), **CALIBRATED))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["target", "target.gguf"])
def test_a_disk_that_is_full_is_one_error(source, tmp_path, name):
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(FileError, match=r"target.*: cannot be written: [^\[]*File too large"):
            quantize_model(source, tmp_path / name, Settings(group_size=32, kind="Q4_0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_says_in_one_line_what_is_wrong(source, text, tmp_path, capsys):
    assert main(["quantize", str(tmp_path / "none"), str(tmp_path / "to")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    arguments = ["quantize", str(source), str(tmp_path / "none" / "to"), "--group-size", "32"]
    assert main(arguments) == 2
    assert "no directory to be made in" in capsys.readouterr().err
    text.write_text("short")
    arguments = ["quantize", str(source), str(tmp_path / "to"), "--group-size", "32"]
    assert main([*arguments, "--calibration", str(text), "--sequence", "32"]) == 2
    said = capsys.readouterr().err
    assert "has 5 tokens; 32 or more are needed" in said and said.count("\n") == 1
