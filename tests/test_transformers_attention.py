"""The attention "ferrum" of transformers' models, against their own with masks of all pairs."""

import pytest
import torch
from torch import nn

from ferrum_triton import InputError
from ferrum_triton.integrations.transformers import convert
from ferrum_triton.integrations.transformers.attention import Pattern, attention, mask
from tests.tiny_models import SHAPE, VARIANTS

transformers = pytest.importorskip("transformers", reason="transformers makes the models")
from transformers import masking_utils  # noqa: E402  after the check that it is there

NEW = 9
# Windows are shorter than the prompt, and than the text after it.
MODELS = {
    "llama": VARIANTS["llama"],
    "mistral": VARIANTS["mistral"],
    "gemma3": VARIANTS["gemma3"],
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 0.7,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


def make(name):
    """(a converted model, the same one with masks of all pairs), of random weights."""
    kind, extra = MODELS[name]
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        # Each has a configuration of its own, which says what its attention is.
        config = getattr(transformers, kind)(**SHAPE | extra, pad_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
        pair.append(model.eval())
    assert convert(pair[0]).attention == "ferrum"
    assert pair[1].config._attn_implementation == "eager"
    return pair


def padded(lengths, size=11, left=True):
    """Ids of sequences of these lengths, and their mask."""
    ids = torch.randint(3, SHAPE["vocab_size"], (len(lengths), size))
    place = torch.arange(size).expand(len(lengths), -1)
    own = torch.tensor(lengths)[:, None]
    shown = (place >= size - own if left else place < own).long()
    return ids * shown, shown


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_text_is_that_of_masks_of_all_pairs(name, cache):
    for lengths in ([11], [11, 6]):
        ids, shown = padded(lengths)
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        got, want = (
            model.generate(
                ids,
                attention_mask=shown,
                cache_implementation=cache,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
            for model in make(name)
        )
        assert torch.equal(got.sequences, want.sequences)
        for ours, theirs in zip(got.scores, want.scores, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padding_behind_a_prompt_and_a_prompt_in_parts():
    ours, theirs = make("mistral")
    ids, shown = padded([7, 11, 3], left=False)
    with torch.inference_mode():
        got, want = (m(ids, attention_mask=shown).logits[shown.bool()] for m in (ours, theirs))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        cache, logits = None, []
        for part in ids[1:2].split([4, 5, 2], dim=1):
            out = ours(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        torch.testing.assert_close(torch.cat(logits, dim=1)[0], want[7:18], rtol=1e-4, atol=1e-4)


def test_a_compiled_step_is_one_graph_for_all_lengths():
    ours, theirs = make("llama")
    ids, _ = padded([9, 9], size=9)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(ours.forward, backend=keep, fullgraph=True)
    static = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.inference_mode():
        ours(ids[:, :5], past_key_values=static)
        for i in range(5, 9):
            ids_so_far = torch.ones(2, i + 1, dtype=torch.int64)
            inputs = {"past_key_values": static, "position_ids": torch.full((2, 1), i)}
            made = masking_utils.create_masks_for_generate(
                config=ours.config,
                inputs_embeds=torch.empty(2, 1, 0),
                attention_mask=ids_so_far,
                **inputs,
            )
            got = step(ids[:, i : i + 1], attention_mask=made, **inputs).logits
            want = theirs(ids[:, : i + 1]).logits[:, -1:]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(graphs) <= 2


def test_masks_say_what_they_are():
    window = masking_utils.sliding_window_causal_mask_function(3)
    full = masking_utils.bidirectional_mask_function
    shown = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()

    def pattern(*sizes, **options):
        made = mask(*sizes, **options)
        assert made.dtype == torch.int32 and made.shape == (sizes[0], 1, 1, 1)
        return made.pattern, made.flatten().tolist()

    assert pattern(2, 4, 4) == (Pattern(True, 0, 4, 4, None), [4, 4])
    spans = ((1, 4), (0, 4))
    assert pattern(2, 4, 4, attention_mask=shown) == (Pattern(True, 0, 4, 4, spans), [4, 4])
    assert pattern(2, 4, 4, attention_mask=shown[1:])[0].spans is None
    assert pattern(1, 1, 4, q_offset=9, kv_offset=6, mask_function=window) == (
        Pattern(True, 3, 4, 4, None),
        [4],
    )
    # A static cache's length is the device's to know.
    options = {"q_offset": torch.tensor(5), "attention_mask": torch.ones(1, 6).bool()}
    assert pattern(1, 1, 16, **options) == (Pattern(True, 0, 16, None, None), [6])
    assert pattern(1, 3, 7, mask_function=full) == (Pattern(False, 0, 7, 7, None), [7])


def test_masks_that_are_not_known_are_refused():
    causal, padding = masking_utils.causal_mask_function, torch.tensor([[1, 0, 1, 1]]).bool()
    chunks = masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64))
    blocks = masking_utils.blockwise_overlay(torch.zeros(1, 4, dtype=torch.int64))
    for function in (
        chunks,
        masking_utils.or_masks(causal, blocks),
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(2), blocks),
        lambda *_: True,
    ):
        with pytest.raises(InputError, match=r"mask_function is .*attention=False"):
            mask(1, 4, 4, mask_function=function)
    with pytest.raises(InputError, match="padded inside of a sequence"):
        mask(1, 4, 4, attention_mask=padding)
    with pytest.raises(InputError, match="queries past the 4 keys"):
        mask(1, 4, 4, q_offset=2)


def test_what_attention_cannot_heed_is_refused():
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16)
    module = nn.Module()

    def refused(got, attention_mask=None, **arguments):
        with pytest.raises(InputError, match=got):
            attention(module, q, k, k, attention_mask, **arguments)

    refused("dropout is 0.1", dropout=0.1)
    refused("output_attentions is True", output_attentions=True)
    refused("position_bias is given", position_bias=q)
    refused("cache is given", cache=object())
    refused(r"a tensor of shape \[1, 1, 3, 5\]", torch.zeros(1, 1, 3, 5))
    refused("of 4 keys, where 5 are given", mask(1, 3, 4, q_offset=1))
    refused("None for 3 causal queries on 5 keys")
    refused("sliding_window is 2", is_causal=False, sliding_window=2)
    out, weights = attention(module, q, k, k, None, is_causal=False)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    want = (scores.softmax(-1) @ k.repeat_interleave(2, 1)).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
