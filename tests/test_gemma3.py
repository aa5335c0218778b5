"""Gemma 3: files of both kinds, and what of them is refused. Its logits are in test_models."""

import json

import pytest
import torch

from ferrum_triton import FileError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.families import family_of_gguf, family_of_hf
from ferrum_triton.models.gemma3 import HF_NAMES, Gemma3, Gemma3Config
from tests.test_models import run, tokens
from tests.tiny_models import gguf_name, save_tiny, write_gguf

pytest.importorskip("transformers", reason="transformers makes and checks the tiny models")
LAYERS, WINDOW = 7, 5
# The family's own windows: none on each sixth layer.
OLD_SPELLING = {
    "num_hidden_layers": LAYERS,
    "layer_types": None,
    "sliding_window_pattern": 6,
    "rope_parameters": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
METADATA = {
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "feed_forward_length": 96,
    "block_count": LAYERS,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": WINDOW,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
    "vocab_size": 96,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of seven layers."""
    path = tmp_path_factory.mktemp("gemma3")
    types = ["full_attention" if i == 5 else "sliding_attention" for i in range(LAYERS)]
    shape = {"num_hidden_layers": LAYERS, "layer_types": types, "query_pre_attn_scalar": 24}
    return path, save_tiny(path, "gemma3", **shape, final_logit_softcapping=None)


def in_gguf(model):
    """The tensors of a transformers model as a GGUF file has them."""
    stems = {theirs: ours for ours, theirs in HF_NAMES.items()}
    return {
        gguf_name(name, stems): weight + 1 if "norm" in name else weight
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }


def test_a_gguf_file_is_the_directory(directory, tmp_path):
    path, theirs = directory
    file = tmp_path / "model.gguf"
    write_gguf(file, "gemma3", METADATA, in_gguf(theirs))
    backend, ids = get_backend("cpu"), tokens(20)
    model = load_model(file, backend)
    assert isinstance(model, Gemma3)
    want = theirs(ids[None]).logits[0].detach()
    torch.testing.assert_close(run(model, ids), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(model, ids), run(load_model(path, backend), ids))


def test_greedy_text_is_that_of_transformers(directory):
    path, theirs = directory
    model, ids = load_model(path, get_backend("cpu")), tokens(8, seed=3)
    with torch.inference_mode():
        want = theirs.generate(
            ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=48, do_sample=False
        )
    cache, new = model.new_cache(56), ids
    for _ in range(want.shape[1] - 8):
        new = model.forward(new, cache).argmax(-1)
        ids = torch.cat([ids, new])
    assert torch.equal(ids, want[0])


def test_older_files_spell_it_otherwise(directory):
    path = directory[0] / "config.json"
    written = json.loads(path.read_text())
    assert Gemma3Config.from_hf(written | OLD_SPELLING, path) == Gemma3Config.from_hf(written, path)
    least = {k: v for k, v in written.items() if k != "tie_word_embeddings"}
    assert Gemma3Config.from_hf(least, path).tie_embeddings


def test_the_largest_model_scales_its_scores_otherwise():
    metadata = {f"gemma3.{k}": v for k, v in METADATA.items()}
    small = Gemma3Config.from_gguf(metadata, {}, "x.gguf")
    large = Gemma3Config.from_gguf(metadata | {"gemma3.block_count": 62}, {}, "x.gguf")
    assert (small.softmax_scale, large.softmax_scale) == (24**-0.5, 16**-0.5)
    assert large.windows[:7] == (5, 5, 5, 5, 5, 0, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "no list of 7 types"),
        ({"layer_types": ["linear_attention"] * LAYERS}, "'linear_attention' is not supported"),
        ({"layer_types": [[]] * LAYERS}, "is not supported"),
        ({"hidden_activation": "gelu"}, "'gelu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attention's scores"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"quantization_config": {"bits": 4}}, "quantisation None is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"head_dim": 512}, "over 256"),
        ({"final_logit_softcapping": -1.0}, "soft cap"),
    ],
)
def test_bad_configs_are_refused(directory, change, message):
    path = directory[0] / "config.json"
    with pytest.raises(FileError, match=message):
        Gemma3Config.from_hf(json.loads(path.read_text()) | change, path)


def test_unknown_architectures_are_named_with_those_that_are_known():
    for find, values in (
        (family_of_gguf, {"general.architecture": "gpt2"}),
        (family_of_hf, {"architectures": ["gpt2"]}),
    ):
        with pytest.raises(
            FileError, match=r"'gpt2' is not supported; known: .*(?i:llama.*gemma3)"
        ):
            find(values, "x")
    for find in (family_of_gguf, family_of_hf):
        with pytest.raises(FileError, match="None is not supported"):
            find({}, "x")
