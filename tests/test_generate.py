"""The real model, SmolLM2-135M-Instruct, against transformers on the same GGUF file."""

import itertools
from pathlib import Path

import pytest
import torch

from bench.agreement import compare, log_probabilities
from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.cli.default_model import INSTALL, find_default_model
from ferrum_triton.files.chat import ChatTemplate
from ferrum_triton.models import load_model, load_tokenizer
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.generation import Stats, generate_ids, generate_text
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.runtime.sampling import Sampling

MODEL = find_default_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason=f"the real model is absent: {INSTALL}")

TEXT = (Path(__file__).parent / "data" / "alice.txt").read_text()
PAGE = (Path(__file__).parent.parent / "docs" / "README.md").read_text()
CHATS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
)
RAW = (
    "The quick brown fox",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, get_backend("cpu"))


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    pytest.importorskip("accelerate", reason="transformers needs it to load GGUF files")
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(MODEL.parent), gguf_file=MODEL.name, dtype=torch.float32
    ).eval()


def chat_ids(tokenizer, question):
    text = ChatTemplate.from_tokenizer(tokenizer).render([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special=False)


def greedy(model, prompt, count):
    return list(generate_ids(model, prompt, Sampling(), count))


def greedy_together(model, prompts, count):
    """Each prompt's tokens, in steps of all of them, which read the weights once."""
    engine = Engine(model, capacity=128, max_seqs=len(prompts))
    found = {engine.add(prompt, Sampling(), count): [] for prompt in prompts}
    while engine.busy:
        for new in engine.step():
            found[new.key].append(new.token)
    return list(found.values())


def test_greedy_text_equals_transformers(model, tokenizer, theirs):
    """64 tokens on chats and raw prompts, id for id: each the likeliest after those before it.

    All prompts together, and one alone.
    """
    prompts = [chat_ids(tokenizer, chat) for chat in CHATS]
    prompts += [tokenizer.encode(text) for text in RAW]
    answers = [*greedy_together(model, prompts, 64), greedy(model, prompts[0], 64)]
    for prompt, ours in zip([*prompts, prompts[0]], answers, strict=True):
        assert len(ours) == 64
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + ours])).logits[0]
        likeliest = logits[len(prompt) - 1 : -1].argmax(-1)
        assert ours == likeliest.tolist(), tokenizer.decode(prompt)


def test_logits_equal_transformers(model, tokenizer, theirs):
    ids = torch.tensor(tokenizer.encode(TEXT)[:256])
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    got = model.forward(ids, model.new_cache(256), all_logits=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_prefill_then_decode_is_one_forward(model, tokenizer):
    ids = torch.tensor(tokenizer.encode(TEXT)[:48])
    whole = model.forward(ids, model.new_cache(48), all_logits=True)
    cache = model.new_cache(48)
    parts = [model.forward(c, cache, all_logits=True) for c in ids.split([40] + [1] * 8)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-3)


def test_it_knows_the_capital_of_france(model, tokenizer):
    stats = Stats()
    pieces = generate_text(model, tokenizer, chat_ids(tokenizer, CHATS[0]), Sampling(), 40, stats)
    assert "Paris" in "".join(pieces)
    assert stats.stopped_by == "end"
    assert stats.new_tokens >= 3
    assert stats.decode_speed > 0
    assert stats.prefill_speed > 0


def test_streamed_text_is_the_decoded_whole(model, tokenizer):
    prompt = tokenizer.encode("Emoji for weather: ☀️ 🌧️")
    ids = greedy(model, prompt, 24)
    limited = list(generate_ids(model, prompt, Sampling(), 24, tokenizer.eos_ids))
    pieces = list(generate_text(model, tokenizer, prompt, Sampling(), 24))
    assert ids[: len(limited)] == limited
    assert "".join(pieces) == tokenizer.decode(limited)


def test_seeds_decide_what_is_sampled(model, tokenizer):
    prompt = tokenizer.encode("My favourite colour is")

    def draw(seed):
        sampler = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=seed)
        return list(generate_ids(model, prompt, sampler, 12))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(4)}) > 1


def test_texts_together_are_what_they_are_alone(model, tokenizer):
    """Prompts as text, one by one, as a list, and as a stream."""
    alone = [model.generate(text, max_tokens=12) for text in RAW]
    together = model.generate(list(RAW), max_tokens=12)
    assert [a.text for a in together] == [a.text for a in alone]
    for text, answer in zip(RAW, together, strict=True):
        assert answer.ids == greedy(model, tokenizer.encode(text), len(answer.ids))
        assert answer.text == tokenizer.decode(answer.ids)
    pieces = model.stream(list(RAW), max_tokens=12)
    texts = ["", "", ""]
    for piece in pieces:
        texts[piece.index] += piece.text
    assert texts == [a.text for a in alone]


def test_stop_strings_end_an_answer_and_are_not_in_it(model):
    whole = model.generate(RAW[0], max_tokens=16)
    word = whole.text.split()[3]
    at = whole.text.index(word)
    stopped = model.generate(RAW[0], max_tokens=16, stop=[word, "no such words"])
    assert (stopped.text, stopped.stopped_by) == (whole.text[:at], "stop")
    assert len(stopped.ids) < len(whole.ids)
    # A string that the text only begins with is held back, and given in the end.
    begun = whole.text[-3:] + "\0"
    assert model.generate(RAW[0], max_tokens=16, stop=begun).text == whole.text
    pieces = list(model.stream(RAW[0], max_tokens=16, stop=word))
    assert "".join(piece.text for piece in pieces) == whole.text[:at]
    assert pieces[-1].stopped_by == "stop" and not model.engine.busy


def test_length_limits(model, tokenizer):
    prompt = tokenizer.encode("One")
    for count in (0, 1, 3):
        assert len(greedy(model, prompt, count)) == count
    stats = Stats()
    endless = generate_ids(model, prompt, Sampling(), 10**9, stats=stats)
    assert len(list(itertools.islice(endless, 5))) == 5
    for prompt, message in (([], "0 tokens"), ([49152], "49152"), ([1] * 8193, "8193 tokens")):
        with pytest.raises(InputError, match=message):
            greedy(model, prompt, 1)


def test_truncated_files_are_refused(tmp_path):
    cut = tmp_path / "cut.gguf"
    with MODEL.open("rb") as file:
        cut.write_bytes(file.read(3_000_000))
    with pytest.raises(FileError, match=r"cut\.gguf"):
        load_model(cut, get_backend("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [512, 1], ids=["prefill", "decode"])
def test_packed_weights_agree_with_float32(model, tokenizer, dtype, chunk):
    """Teacher-forced over 512 tokens of real text, at once and token by token."""
    ids = torch.tensor(tokenizer.encode(TEXT)[:512])
    packed = load_model(MODEL, get_backend("cuda"), dtype)
    assert isinstance(packed.weights.layers[0].mlp.down.weight, QuantizedTensor)
    found = compare(packed, log_probabilities(model, ids, 512), ids, chunk)
    assert found.argmax_agreement >= 0.985
    assert found.mean_kl < 5e-3


def perplexity(log_probabilities, ids):
    """Of every token but the first, which nothing predicts."""
    predicted = log_probabilities[:-1].gather(1, ids[1:, None])
    return predicted.mean().neg().exp().item()


# Interpreted, a pass through this model's 30 layers takes minutes.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [512, 64, 1])
def test_packed_weights_keep_the_perplexity(model, tokenizer, dtype, chunk):
    """On this repository's own pages; each chunk is multiplied in another way."""
    ids = torch.tensor(tokenizer.encode(PAGE)[:512])
    packed = load_model(MODEL, get_backend("cuda"), dtype)
    want = perplexity(log_probabilities(model, ids, 512), ids)
    got = perplexity(log_probabilities(packed, ids, chunk), ids)
    assert 1 < want < 100, "the model does not know this language"
    assert abs(got / want - 1) < 0.01


@pytest.mark.gpu
def test_cuda_generates_the_same_answer(model, tokenizer):
    prompt = chat_ids(tokenizer, CHATS[0])
    packed = load_model(MODEL, get_backend("cuda"), torch.float16)
    assert greedy(packed, prompt, 8) == greedy(model, prompt, 8)
