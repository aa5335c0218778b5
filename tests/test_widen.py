"""``bench.widen``: the wider model computes what the narrower one does, and has whole groups."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from bench import widen
from ferrum_triton import FileError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.quantize import Settings, quantize_model
from tests.test_models import run, tokens
from tests.test_quantize import tiny_directory

pytest.importorskip("transformers", reason="transformers reads and writes the models")
NARROW = {
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


@pytest.fixture
def to_wide(tmp_path, monkeypatch):
    """A function that makes a tiny model and the wider one of it, and gives their directories."""

    def make(variant="llama", dtype="float32", **changed):
        source = tiny_directory(tmp_path / "narrow", variant, **NARROW | changed)
        target = tmp_path / "wide"
        monkeypatch.setattr(sys, "argv", ["widen", str(source), str(target), "--dtype", dtype])
        widen.main()
        return source, target

    return make


def matrices(path):
    """The matrices of layers in a directory."""
    found = load_file(path / "model.safetensors")
    return [w for name, w in found.items() if "layers" in name and w.dim() == 2]


@pytest.mark.parametrize(
    ("variant", "changed"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
        ("mistral", {"rms_norm_eps": 0.1}),
        ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ],
)
def test_the_wider_model_has_the_same_logits(to_wide, variant, changed):
    paths = to_wide(variant, **changed)
    narrow, wide = (load_model(path, get_backend("cpu")) for path in paths)
    heads, more = narrow.config, wide.config
    assert more.num_heads * heads.num_kv_heads == heads.num_heads * more.num_kv_heads
    assert all(weight.shape[1] % 128 == 0 for weight in matrices(paths[1]))
    assert any(weight.shape[1] % 128 for weight in matrices(paths[0]))
    want, got = (run(model, tokens(20)) for model in (narrow, wide))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_wider_model_has_groups_of_128(to_wide, tmp_path):
    source, wide = to_wide(dtype="bfloat16")
    with pytest.raises(FileError, match="no whole groups of 128"):
        quantize_model(source, tmp_path / "made", Settings(group_size=128))
    assert quantize_model(wide, tmp_path / "made", Settings(bits=8)) == {"8 bits": 14}
    want, got = (run(load_model(p, "cpu"), tokens(9)) for p in (source, tmp_path / "made"))
    assert (got - want).norm() < 0.05 * want.norm()


def test_what_is_whole_already_stays(to_wide):
    source, wide = to_wide(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    before, after = (load_file(path / "model.safetensors") for path in (source, wide))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_made_wider_is_refused(to_wide, tmp_path):
    with pytest.raises(FileError, match="Qwen3ForCausalLM is not made wider; known: Llama"):
        to_wide("qwen3")
    (tmp_path / "narrow").rename(tmp_path / "other")
    (tmp_path / "wide").mkdir()
    with pytest.raises(FileError, match="is there already"):
        to_wide()
