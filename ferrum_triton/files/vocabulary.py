"""The vocabulary of a GGUF file, checked, and the tokenizers it describes.

Keys and their meaning: GGUF specification, section "Tokenizer"; defaults where a key is absent are
llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import GgufFile
from ferrum_triton.files.splits import SPLITS, Split
from ferrum_triton.files.tokenizer_limits import MAX_ADDED_TOKENS

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "bert")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Deriving merges takes time that grows with the square of a token's length; this is 50 times what
# the largest vocabularies need.
_MAX_MERGE_WORK = 10**9

T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """What ``tokenizer.ggml.*`` says.

    Attributes:
        path: the file.
        model: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE) or "bert" (WordPiece).
        tokens: the tokens by id, all different.
        types: their types by id: normal, unknown, control, user-defined, unused or byte.
        merges: pairs to merge, best first; None when the file has none.
        scores: the tokens' scores, higher merges first; None when the file has none.
        split: how text is cut before merging; None but for "gpt2".
        bos_id: the begin token; "[CLS]" for "bert".
        eos_id: the declared end token; "[SEP]" for "bert".
        end_ids: every declared token that ends generation.
        add_bos: a prompt starts with the begin token.
        add_eos: a prompt ends with the end token.
        add_space_prefix: a space goes before the text; "llama" only.
        lowercase: capitals become small letters; "bert" only, as the next two.
        strip_accents: accents are left out.
        unknown_id: the token of a word that the others cannot spell.
    """

    path: Path
    model: str
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]] | None
    scores: list[float] | None
    split: Split | None
    bos_id: int | None
    eos_id: int | None
    end_ids: set[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    lowercase: bool
    strip_accents: bool
    unknown_id: int | None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Vocabulary:
        """Read and check it.

        Raises:
            FileError: the tokenizer is missing, of an unknown kind, or inconsistent.
        """
        keys = _Keys(file)
        model = keys.get("model", str, None)
        if model is None:
            raise FileError(file.path, "the file has no tokenizer (tokenizer.ggml.model)")
        if model not in _MODELS:
            known = ", ".join(_MODELS)
            raise FileError(
                file.path, f"tokenizer model {model!r} is not supported; known: {known}"
            )
        tokens = keys.array("tokens", str)
        if not tokens:
            raise FileError(file.path, "the tokenizer has no tokens (tokenizer.ggml.tokens)")
        if len(set(tokens)) < len(tokens):
            raise FileError(file.path, "the vocabulary has the same token twice")
        types = keys.array("token_type", int) or [_NORMAL] * len(tokens)
        scores = keys.array("scores", float)
        for name, values in (("token_type", types), ("scores", scores)):
            if values is not None and len(values) != len(tokens):
                reason = f"{len(values)} elements for {len(tokens)} tokens"
                raise FileError(file.path, f"{_KEY}{name} has {reason}")
        split = _split(file.path, keys.get("pre", str, "default")) if model == "gpt2" else None
        sentencepiece, word_piece = model == "llama", model == "bert"
        unknown = None
        if word_piece:
            bos, eos, unknown = (
                keys.id(f"{name}_token_id", len(tokens), _index(tokens, token))
                for name, token in (("bos", "[CLS]"), ("seperator", "[SEP]"), ("unknown", "[UNK]"))
            )
        else:
            bos = keys.id("bos_token_id", len(tokens), 1 if sentencepiece else None)
            eos = keys.id("eos_token_id", len(tokens), 2 if sentencepiece else None)
        declared = {eos} | {keys.id(f"{n}_token_id", len(tokens), None) for n in ("eot", "eom")}
        add_bos = sentencepiece or (split is not None and split.add_bos)
        lowercase = keys.get("normalizer.lowercase", bool, True)
        return cls(
            path=file.path,
            model=model,
            tokens=tokens,
            types=types,
            merges=keys.merges(),
            scores=scores,
            split=split,
            bos_id=bos,
            eos_id=eos,
            end_ids={number for number in declared if number is not None},
            # Around a text of "bert" both go always: what files say of them differs by their age.
            add_bos=word_piece or (keys.get("add_bos_token", bool, add_bos) and bos is not None),
            add_eos=word_piece or (keys.get("add_eos_token", bool, False) and eos is not None),
            add_space_prefix=keys.get("add_space_prefix", bool, sentencepiece),
            lowercase=lowercase,
            strip_accents=keys.get("normalizer.strip_accents", bool, lowercase),
            unknown_id=unknown,
        )

    def control_ids(self) -> dict[str, int]:
        """Ids of the control tokens by their text."""
        return {self.tokens[i]: i for i, kind in enumerate(self.types) if kind == _CONTROL}


def byte_level_bpe(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BPE over the bytes of words, each byte spelled as one printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.merges is None or vocabulary.split is None:
        raise FileError(vocabulary.path, "the tokenizer has no merges (tokenizer.ggml.merges)")
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=numbers, merges=vocabulary.merges, ignore_merges=vocabulary.split.whole_words
        )
    )
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in vocabulary.split.patterns]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelling])
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, vocabulary)


def sentencepiece_bpe(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BPE over characters with "▁" for the space, and bytes for characters without a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    unknown = [
        t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN
    ]
    backend = Tokenizer(
        models.BPE(
            vocab=numbers,
            merges=vocabulary.merges or _merges_from_scores(vocabulary, numbers),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.add_space_prefix
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return _finish(backend, vocabulary)


def word_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The longest tokens that spell a word from its start on, as BERT has them.

    GGUF files write "▁" before tokens that begin a word, and nothing before those that go on.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    numbers = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id)
    if vocabulary.unknown_id is None or None in numbers:
        missing = ("[CLS]", "[SEP]", "[UNK]")[numbers.index(None)]
        raise FileError(vocabulary.path, f"the tokenizer has no token {missing}")
    if not any(token.startswith("▁") for token in vocabulary.tokens):
        raise FileError(vocabulary.path, "no token of the vocabulary begins with ▁, as words would")
    spelled: dict[str, int] = {}
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    for number, (token, kind) in enumerate(pairs):
        if kind != _CONTROL and number not in numbers:
            begins = token.startswith("▁") and token != "▁"
            token = token[1:] if begins else f"##{token}"
        if token in spelled:
            raise FileError(vocabulary.path, f"the vocabulary has the token {token!r:.80} twice")
        spelled[token] = number
    unknown = vocabulary.tokens[vocabulary.unknown_id]
    backend = Tokenizer(models.WordPiece(vocab=spelled, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _finish(backend, replace(vocabulary, tokens=[*spelled]))


def _merges_from_scores(
    vocabulary: Vocabulary, numbers: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges SentencePiece's scores stand for.

    SentencePiece joins, again and again, the neighbours whose union is the token of the highest
    score. That is BPE with every way to cut a token in two known tokens as a merge, in the order of
    the scores.
    """
    if vocabulary.scores is None:
        raise FileError(vocabulary.path, "the tokenizer has neither merges nor scores")
    joined = [
        number
        for number, kind in enumerate(vocabulary.types)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    ]
    tokens, scores = vocabulary.tokens, vocabulary.scores
    if sum(len(tokens[number]) ** 2 for number in joined) > _MAX_MERGE_WORK:
        raise FileError(vocabulary.path, "the vocabulary's tokens are too long to derive merges")
    ranked = []
    for number in joined:
        token = tokens[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                ranked.append((-scores[number], numbers[left], numbers[right], left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in ranked]


def _finish(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Add the tokens matched whole in the text, and what goes around a prompt."""
    from tokenizers import AddedToken, processors

    added = sum(kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) for kind in vocabulary.types)
    if added > MAX_ADDED_TOKENS:
        reason = f"{added} control and user-defined tokens; allowed: {MAX_ADDED_TOKENS}"
        raise FileError(vocabulary.path, reason)
    for special, kinds in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
                if kind in kinds and token
            ]
        )
    ends = []
    template = ["$A"]
    if vocabulary.add_bos and vocabulary.bos_id is not None:
        template.insert(0, "bos")
        ends.append(("bos", vocabulary.bos_id))
    if vocabulary.add_eos and vocabulary.eos_id is not None:
        template.append("eos")
        ends.append(("eos", vocabulary.eos_id))
    if ends:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    return backend


def _index(tokens: list[str], token: str) -> int | None:
    return tokens.index(token) if token in tokens else None


def _split(path: Path, name: str) -> Split:
    if name not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise FileError(path, f"tokenizer.ggml.pre is {name!r}; known: {known}")
    return SPLITS[name]


class _Keys:
    """Typed access to ``tokenizer.ggml.*``."""

    def __init__(self, file: GgufFile) -> None:
        self._metadata: Mapping[str, Any] = file.metadata
        self._path = file.path

    def get(self, name: str, kind: type[T], default: Any) -> Any:
        value = self._metadata.get(_KEY + name)
        if value is None:
            return default
        if type(value) is not kind:
            raise FileError(self._path, f"{_KEY}{name} is {value!r:.80}, no {kind.__name__}")
        return value

    def array(self, name: str, kind: type[T]) -> list[T] | None:
        values = self.get(name, list, None)
        # Arrays are of one type, so the first element tells.
        if values and type(values[0]) is not kind:
            raise FileError(self._path, f"{_KEY}{name} is no array of {kind.__name__}")
        return values

    def id(self, name: str, num_tokens: int, default: int | None) -> int | None:
        number = self.get(name, int, default)
        if number is not None and not 0 <= number < num_tokens:
            reason = f"{number}, but the vocabulary has {num_tokens} tokens"
            raise FileError(self._path, f"{_KEY}{name} is {reason}")
        return number

    def merges(self) -> list[tuple[str, str]] | None:
        merges = self.array("merges", str)
        if merges is None:
            return None
        # A piece may itself begin with a space, so the separator is sought after the first.
        cuts = [merge.find(" ", 1) for merge in merges]
        if -1 in cuts:
            wrong = merges[cuts.index(-1)]
            raise FileError(self._path, f"the merge {wrong!r:.80} is no pair of tokens")
        return [(m[:cut], m[cut + 1 :]) for m, cut in zip(merges, cuts, strict=True)]
