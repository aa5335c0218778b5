"""``ferrum-triton quantize``: what it rounds, that others read it, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_triton import FileError, get_backend
from ferrum_triton.cli import main
from ferrum_triton.files import quantize
from ferrum_triton.files.quantize import quantize_directory
from ferrum_triton.models import load_model
from ferrum_triton.quant import QuantizedTensor, load_compressed_tensors
from ferrum_triton.quant.integers import unpacked
from ferrum_triton.quant.rounding import SHARES, packed_words, round_to_nearest
from tests.test_models import run, tokens
from tests.tiny_models import save_tiny


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_the_best_of_its_scales(bits):
    """Each group by itself, in float64, one scale after the other."""
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(bits)) * 0.02
    weight[2, 32:64] = 0
    weight[3, 40] = 1.0  # far from the others of its group
    q, scales = round_to_nearest(weight, bits, 32)
    middle = 2 ** (bits - 1)
    assert q.dtype == torch.uint8 and q.int().max() < 2**bits and scales.shape == (5, 3)
    for row in range(5):
        for group in range(3):
            columns = slice(32 * group, 32 * group + 32)
            w = weight[row, columns].double()
            errors = []
            for share in SHARES:
                scale = (w.abs().max() * share / middle).bfloat16().double()
                if scale == 0:
                    continue
                rounded = (w / scale).round().clamp(-middle, middle - 1)
                errors.append((rounded * scale - w).square().sum().item())
            got = scales[row, group].double() * (q[row, columns].double() - middle)
            error = (got - w).square().sum().item()
            assert error <= min(errors, default=0) * (1 + 1e-5) + 1e-18
    assert torch.equal(scales.half().float(), scales) and torch.equal(scales.bfloat16(), scales)


@pytest.mark.parametrize(("bits", "columns"), [(4, 8), (4, 13), (8, 4), (8, 7)])
def test_words_are_those_that_are_unpacked(bits, columns):
    q = torch.randint(2**bits, (3, columns), dtype=torch.uint8)
    words = packed_words(q, bits)
    assert words.dtype == torch.int32
    assert torch.equal(unpacked(words, bits)[:, :columns].to(torch.uint8), q)


@pytest.fixture
def source(tmp_path):
    """A tiny model's directory, with a tokenizer's file and one that is not copied."""
    path = tmp_path / "source"
    path.mkdir()
    save_tiny(path, "qwen3")
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.bin").write_bytes(b"1")
    return path


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_runs_on_what_was_written(source, tmp_path, bits, capsys):
    target = tmp_path / "target"
    arguments = ["quantize", str(source), str(target), "--bits", str(bits), "--group-size", "32"]
    assert main(arguments) == 0
    assert f"matrices of {bits} bits" in capsys.readouterr().out
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
    count = quantize_directory(source, target, 4, 32)
    after = load_file(target / "model.safetensors")
    rounded = [name for name in before if name not in after]
    assert len(rounded) == count > 7
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in rounded)
    for name in rounded:
        stem = name.removesuffix("weight")
        parts = [after[f"{stem}weight_{part}"] for part in ("packed", "scale")]
        assert after[f"{stem}weight_shape"].tolist() == list(before[name].shape)
        q, scales = round_to_nearest(before[name], 4, 32)
        found = load_compressed_tensors(*parts, num_columns=before[name].shape[1])
        want = scales.repeat_interleave(32, 1) * (q.float() - 8)
        assert torch.equal(found.dequantize(), want)


def test_large_models_are_several_files(source, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "MAX_SHARD_BYTES", 9000)
    one, several = tmp_path / "one", tmp_path / "several"
    quantize_directory(source, several, 4, 32)
    monkeypatch.undo()
    quantize_directory(source, one, 4, 32)
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    models = [load_model(path, get_backend("cpu")) for path in (one, several)]
    assert torch.equal(*(run(model, tokens(4)) for model in models))


def edited(source, **changed):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changed))


def with_tensor(source, change):
    stored = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(stored | {name: change(stored[name])}, source / "model.safetensors")


@pytest.mark.parametrize(
    ("break_it", "size", "message"),
    [
        (
            lambda s: edited(s, architectures=["Qwen3MoeForCausalLM"]),
            32,
            "'Qwen3MoeForCausalLM' is",
        ),
        (lambda s: edited(s, architectures=None), 32, "architecture None is not quantised"),
        (lambda s: edited(s, quantization_config={"bits": 4}), 32, "quantised already"),
        (lambda s: None, 128, "no whole groups of 128; group sizes: 32"),
        (lambda s: with_tensor(s, lambda t: t.int()), 32, "is I32; known"),
        (lambda s: with_tensor(s, lambda t: t / 0), 32, "not finite"),
        (lambda s: (s / "model.safetensors").unlink(), 32, "holds neither"),
        (lambda s: (s.parent / "target").mkdir(), 32, "is there already"),
    ],
)
def test_what_is_not_quantised_leaves_nothing_behind(source, tmp_path, break_it, size, message):
    break_it(source)
    target = tmp_path / "target"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match=message):
        quantize_directory(source, target, 4, size)
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_says_in_one_line_what_is_wrong(tmp_path, capsys):
    assert main(["quantize", str(tmp_path / "none"), str(tmp_path / "to")]) == 2
    assert "is no directory" in capsys.readouterr().err
    with pytest.raises(FileError, match="no directory to be made in"):
        place = tmp_path / "source"
        place.mkdir()
        save_tiny(place, "qwen3")
        quantize_directory(place, tmp_path / "none" / "to", 4, 32)
