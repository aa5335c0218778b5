"""Tokenizers of model directories: what is read of them, and what is refused before it runs."""

import json
import threading

import pytest

from ferrum_triton.errors import FileError
from ferrum_triton.files import tokenizer_limits
from ferrum_triton.files.splits import SPLITS
from ferrum_triton.files.tokenizer import Tokenizer
from tests import gguf_writer as w
from tests.test_cli_failures import failure, run_with_closed_stderr
from tests.test_tokenizer import BYTES, NORMAL, SPELLING, gpt2, load

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [cli]")


def write_directory(path, **files):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate([*BYTES, "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t) for t in ("<s>", "</s>", "<|im_end|>")])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))


def test_directory(tmp_path):
    write_directory(
        tmp_path,
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "chat_template": [
                {"name": "tools", "template": "t"},
                {"name": "default", "template": "d"},
            ],
        },
        generation_config={"eos_token_id": [97, 98]},
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("ab" * 30) == [256] * 30  # neither truncated nor padded
    assert (tokenizer.bos_id, tokenizer.bos_token) == (257, "<s>")
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.eos_ids == {258, 259, 97, 98}
    assert tokenizer.vocab_size == 260
    assert tokenizer.chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_directory(tmp_path).chat_template == "own file"


def test_directory_of_a_tokenizer_alone(tmp_path):
    write_directory(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids == {259}
    assert tokenizer.chat_template is None


def test_bad_directories(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        Tokenizer.from_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    for contents in ("", "{}", "[" * 100_000, '{"model": {"type": "BPE", "vocab": 3}}'):
        path.write_text(contents)
        with pytest.raises(FileError, match="not a tokenizer"):
            Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(FileError, match="not a JSON object"):
        Tokenizer.from_directory(tmp_path)


# Hostile files.


def rewritten(directory, **parts):
    """The tokenizer of a directory with parts of its ``tokenizer.json`` replaced."""
    write_directory(directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return lambda: Tokenizer.from_directory(directory)


def replace(old, new):
    return {"type": "Replace", "pattern": old, "content": new}


def split(regex):
    """Cuts at matches, then spells bytes."""
    cut = {"type": "Split", "pattern": {"Regex": regex}, "invert": False, "behavior": "Isolated"}
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spelling["use_regex"] = False
    return {"type": "Sequence", "pretokenizers": [cut, spelling]}


HOSTILE = [
    ({"pre_tokenizer": split("(a+)+$b")}, "repeats what repeats"),
    ({"pre_tokenizer": split(r"x(?:[^(]|\(\w{2,}y?)*")}, "repeats what repeats"),
    ({"pre_tokenizer": split("((a{9}){9}){9}")}, "repeats what repeats"),
    ({"pre_tokenizer": split("a|" * 3000)}, "of 6000 characters; allowed: 4096"),
    ({"normalizer": replace({"Regex": "(a*)*"}, "")}, "repeats what repeats"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not supported"),
    (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [replace({"String": "a"}, "aaaaaaaa")] * 8,
            }
        },
        "normalizer makes more than 64 characters of one",
    ),
    (
        {"decoder": {"type": "Sequence", "decoders": [replace({"Regex": ""}, "abcdefgh")] * 8}},
        "decoder makes more than 64 characters of one",
    ),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}}, "100 steps"),
    ({"added_tokens": [{}] * 70_000}, "70000 added tokens; allowed: 65536"),
]


@pytest.mark.parametrize(("parts", "reason"), HOSTILE, ids=[reason for _, reason in HOSTILE])
def test_hostile_directory_is_refused_before_it_runs(tmp_path, parts, reason, capfd):
    with pytest.raises(FileError, match=reason):
        rewritten(tmp_path, **parts)()
    assert capfd.readouterr().err == ""  # the library writes of its panics


def test_a_key_that_comes_twice_is_checked_as_it_is_built(tmp_path):
    write_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    hostile = json.dumps({"normalizer": replace({"Regex": "a"}, "b")})
    path.write_text(hostile[:-1] + "," + path.read_text()[1:])
    assert Tokenizer.from_directory(tmp_path).encode("ab") == [256]


def test_patterns_in_use_are_taken(tmp_path):
    digits = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
    for split_rule in SPLITS.values():
        for pattern in (*split_rule.patterns, digits, r"\p{N}{1,3}+| ?[^\s\p{L}]++[\r\n]*+"):
            assert rewritten(tmp_path, pre_tokenizer=split(pattern))().encode("ab 123")


def test_a_slow_tokenizer_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("ferrum_triton.files.tokenizer_limits._SECONDS", 0.2)
    monkeypatch.setattr("ferrum_triton.files.tokenizer_limits._CHARS_PER_SECOND", 1e9)
    tokenizer = rewritten(tmp_path, pre_tokenizer=split("a*a*[^a]"))()
    with pytest.raises(FileError, match="the tokenizer failed: it took more than 0 seconds"):
        tokenizer.encode("a" * 1200)


def test_what_a_slow_tokenizer_still_runs_keeps_no_process_alive():
    end = threading.Event()
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError):
        tokenizer_limits._in_time(end.wait, 0.01)
    try:
        (left,) = set(threading.enumerate()) - before
        assert left.daemon
    finally:
        end.set()


def test_panics_are_one_error(tmp_path):
    """Ten million steps of one match are the library's own bound, at which it panics."""
    tokenizer = rewritten(tmp_path, pre_tokenizer=split("(a|aa)*[^a]"))()
    with pytest.raises(FileError, match=r"the tokenizer failed: .*retry-limit"):
        tokenizer.encode("a" * 40)
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 2**63}
    tokenizer = rewritten(tmp_path, decoder=strip)()
    ids = tokenizer.encode("aaa")
    stream = tokenizer.stream()
    for use in (lambda: tokenizer.decode(ids), lambda: stream.push(ids[0]), stream.finish):
        with pytest.raises(FileError, match="the tokenizer failed"):
            use()


def test_a_panic_is_one_line_of_the_command(tmp_path):
    rewritten(tmp_path, pre_tokenizer=split("(a|aa)*[^a]"))
    prompt = ["generate", "--raw", "--model", str(tmp_path), "a" * 60]
    assert "the tokenizer failed" in failure(prompt)
    assert run_with_closed_stderr(prompt) == 2


def test_dropout_is_for_training(tmp_path):
    write_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    description = json.loads(path.read_text())
    description["model"]["dropout"] = 0.5
    path.write_text(json.dumps(description))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert all(tokenizer.encode("ab" * 9) == [256] * 9 for _ in range(9))


@pytest.mark.parametrize("byte", ["e", "\n", "\u00e9"])
def test_vocabularies_that_drop_text_are_refused(tmp_path, byte):
    """In a byte-level vocabulary each byte needs a token, but for those of no character."""
    spelled = SPELLING[byte.encode()[-1]]
    pairs = gpt2()
    tokens = ["<0>" if token == spelled else token for token in [*BYTES, "Ġa", "ab"]]
    pairs["tokens"] = w.array("tokenizer.ggml.tokens", w.STRING, tokens)
    pairs["token_type"] = w.array("tokenizer.ggml.token_type", w.I32, [NORMAL] * 258)
    with pytest.raises(FileError, match=f"lacks '{spelled}', of 1 byte tokens"):
        load(tmp_path, pairs)
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    with pytest.raises(FileError, match="would drop parts of a text"):
        rewritten(tmp_path, model=model)()
    rewritten(tmp_path, model=model | {"unk_token": "<0>"})()
