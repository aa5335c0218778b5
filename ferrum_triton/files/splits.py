"""How byte-level BPE vocabularies cut text into words before merging: one entry a known name.

A GGUF file names its rule in ``tokenizer.ggml.pre``; the names are llama.cpp's and the patterns are
those of the models' own ``tokenizer.json``. Patterns apply in turn, each to the pieces the last one
left; what a pattern does not match is a piece of its own.
"""

from dataclasses import dataclass

_ENGLISH_SUFFIXES = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_ENGLISH_SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _lines(digits: str, word: str = r"\p{L}+", marks: str = "") -> str:
    """The GPT-4 family: digits in groups, punctuation keeps the line breaks after it."""
    return (
        rf"(?i:{_ENGLISH_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?{word}|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _cased(digits: str, suffix: str = "") -> str:
    """As :func:`_lines`, with words cut where lower case turns to upper."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


@dataclass(frozen=True)
class Split:
    """One rule.

    Attributes:
        patterns: regular expressions, in the order they apply.
        whole_words: a word that is itself a token stays whole, whatever the merges say.
        add_bos: a prompt starts with the begin token when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_DIGITS_THEN_GPT2 = Split((r"\p{N}", _GPT2))
_LLAMA3 = Split((_lines(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_QWEN2 = Split((_lines(r"\p{N}"),))
_GPT4O = Split((_cased(r"\p{N}{1,3}", rf"(?i:{_ENGLISH_SUFFIXES})?"),))

SPLITS: dict[str, Split] = {
    "default": _DEFAULT,
    "gpt-2": Split((_GPT2,)),
    "phi-2": Split((_GPT2,)),
    "olmo": Split((_GPT2,)),
    "mpt": Split((_GPT2,)),
    "exaone4": Split((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "minerva-7b": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": Split(_LLAMA3.patterns),
    "smaug-bpe": Split(_LLAMA3.patterns),
    "glm4": Split(_LLAMA3.patterns),
    "chatglm-bpe": Split(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": Split((_lines(r"\p{N}", r"[\p{L}\p{M}]+", r"\p{M}"),)),
    "tekken": Split((_cased(r"\p{N}"),), whole_words=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
"""Every known rule by its name in ``tokenizer.ggml.pre``."""
