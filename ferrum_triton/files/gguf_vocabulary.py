"""A model directory's tokenizer as ``tokenizer.*`` metadata of a GGUF file.

Byte-level BPE and SentencePiece's BPE, as the two families of Llama and Qwen have them. What is
written is compared with what it was made of: how a text is cut here, its tokens by
:func:`same_tokens` once the file is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import Value
from ferrum_triton.files.json_file import read_text
from ferrum_triton.files.splits import SPLITS
from ferrum_triton.files.tokenizer import Tokenizer, load_tokenizer
from ferrum_triton.files.tokenizer_json import MAX_TOKENIZER_BYTES, read_tokenizer
from ferrum_triton.files.tokenizer_limits import failures

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# What rules of cutting differ in: cases, digits, marks, line breaks, other scripts.
_PROBE = (
    "Hello World, it's 1234567 o'clock!\n\n\tHe'LL  say: (a+b)*c=12.50€\r\n x  y \u00e9t\u00e9 "
    "iPhone15Pro don't WE'VE 日本語 がんば привет שלום ১২৩ e\u0301 👍🏽 ... --- ###\n  end "
)


def vocabulary_metadata(directory: Path, num_tokens: int) -> dict[str, Value]:
    """Pairs that describe the tokenizer of a directory.

    Args:
        directory: a model directory, with ``tokenizer.json``.
        num_tokens: rows of the embedding; those without a token get one that no text has.

    Raises:
        FileError: there is no tokenizer, or one that GGUF files have no description of.
    """
    path = directory / "tokenizer.json"
    with failures(path, "the tokenizer is inconsistent"):
        return _pairs(directory, path, num_tokens)


def _pairs(directory: Path, path: Path, num_tokens: int) -> dict[str, Value]:
    backend, tokenizer = read_tokenizer(path), load_tokenizer(directory)
    described = json.loads(read_text(path, MAX_TOKENIZER_BYTES))
    model = described["model"]
    if model.get("type") != "BPE":
        raise FileError(path, f"a vocabulary of {model.get('type')!r:.40} is not written; BPE is")
    names: dict[int, str] = {number: token for token, number in backend.get_vocab().items()}
    if not names or max(names) >= num_tokens:
        raise FileError(path, f"tokens up to {max(names, default=0)} for {num_tokens} rows")
    is_sentencepiece = bool(model.get("byte_fallback"))
    types = dict.fromkeys(names, _NORMAL)
    for number, token in backend.get_added_tokens_decoder().items():
        types[number] = _CONTROL if token.special else _USER_DEFINED
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    found: dict[str, Value] = {}
    if is_sentencepiece:
        types |= {i: _BYTE for i, token in names.items() if _is_byte(token)}
        unknown = backend.token_to_id(model.get("unk_token") or "")
        if unknown is not None:
            types[unknown] = _UNKNOWN
        found["model"], found["pre"] = "llama", "default"
        found["add_space_prefix"] = _adds_space(backend)
    else:
        found["model"], found["pre"] = (
            "gpt2",
            _rule(backend, bool(model.get("ignore_merges")), path),
        )
        found["merges"] = [f"{left} {right}" for left, right in merges]
    tokens = [names.get(i, f"[PAD{i}]") for i in range(num_tokens)]
    found["tokens"] = tokens
    found["token_type"] = [types.get(i, _UNUSED) for i in range(num_tokens)]
    if is_sentencepiece:
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        last = float(len(merges))
        found["scores"] = [-float(ranks.get(token, last)) for token in tokens]
    for key, number in _special(tokenizer).items():
        found[f"{key}_token_id"] = number
    around = tokenizer.encode("a"), tokenizer.encode("a", add_special=False)
    found["add_bos_token"] = around[0][:1] == [tokenizer.bos_id] != around[1][:1]
    found["add_eos_token"] = around[0][-1] != around[1][-1]
    pairs = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if tokenizer.chat_template is not None:
        pairs["tokenizer.chat_template"] = tokenizer.chat_template
    return pairs


def same_tokens(directory: Path, written: Tokenizer) -> None:
    """Refuse a tokenizer that reads a text otherwise than the one it was made of.

    Raises:
        FileError: it does.
    """
    if load_tokenizer(directory).encode(_PROBE) != written.encode(_PROBE):
        reason = "a GGUF file has no description of this tokenizer: it would read text otherwise"
        raise FileError(directory / "tokenizer.json", reason)


def _rule(backend: tokenizers.Tokenizer, whole_words: bool, path: Path) -> str:
    """The name of the rule by which byte-level BPE cuts a text as this tokenizer does."""
    from tokenizers import Regex, pre_tokenizers

    def pieces(cutter: Any) -> list[str]:
        return [piece for piece, _ in cutter.pre_tokenize_str(_PROBE)]

    if backend.pre_tokenizer is not None:
        wanted = pieces(backend.pre_tokenizer)
        for name, rule in SPLITS.items():
            cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in rule.patterns]
            spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            same = pieces(pre_tokenizers.Sequence([*cuts, spelling])) == wanted
            if same and rule.whole_words == whole_words:
                return name
    raise FileError(path, "cuts text into words by a rule that GGUF files have no name for")


def _adds_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether a SentencePiece vocabulary writes a space before a text."""
    first = backend.encode("a", add_special_tokens=False).tokens[:1]
    return bool(first) and first[0].startswith("▁")


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _special(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Ids of tokens that begin and end a text, by GGUF's names."""
    eos = tokenizer.token_id(tokenizer.eos_token)
    found = {"bos": tokenizer.bos_id, "eos": eos}
    found |= dict(zip(("eot", "eom"), sorted(tokenizer.eos_ids - {eos}), strict=False))
    return {key: number for key, number in found.items() if number is not None}
