"""Text to token ids and back, from what a model file says about its vocabulary.

The algorithms are those of the tokenizers library; this module sets it up as the file asks. GGUF
files store a vocabulary under ``tokenizer.ggml.*`` (GGUF specification, section "Tokenizer"), model
directories in ``tokenizer.json``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import GgufFile, open_gguf
from ferrum_triton.files.json_file import is_directory, read_json, read_text
from ferrum_triton.files.text import check_text
from ferrum_triton.files.tokenizer_json import read_tokenizer
from ferrum_triton.files.tokenizer_limits import encode, failures, refuse_losses
from ferrum_triton.files.vocabulary import (
    Vocabulary,
    byte_level_bpe,
    sentencepiece_bpe,
    word_piece,
)

if TYPE_CHECKING:
    import tokenizers

MAX_TEMPLATE_BYTES = 1 << 20

# By what a GGUF file calls its kind of vocabulary.
_BUILDERS = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe, "bert": word_piece}

# Ends of a turn that files do not always declare; counted only where marked as control tokens.
_END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
)


class Tokenizer:
    """A model's tokenizer. Build one with :meth:`from_gguf` or :meth:`from_directory`.

    Attributes:
        path: the file or directory it came from.
        bos_id: id of the token that begins a text, None when the model has none.
        eos_ids: ids after which generation ends: end of text, of turn, of message.
        vocab_size: number of tokens, added ones included.
        bos_token: text of ``bos_id``, or "".
        eos_token: text of the model's declared end token, or "".
        chat_template: source of the model's chat template, None when it has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        *,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: Iterable[int],
        chat_template: str | None,
    ) -> None:
        # A file may ask for truncation or padding of training batches; prompts want neither.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()
        self.path = path
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token = self._text_of(bos_id)
        self.eos_token = self._text_of(eos_id)
        self.chat_template = chat_template

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """The tokenizer stored in a GGUF file: byte-level BPE, SentencePiece BPE or WordPiece.

        Raises:
            FileError: the file has no tokenizer, one of another kind, or an inconsistent one.
        """
        vocabulary = Vocabulary.from_gguf(file)
        with failures(file.path, "the tokenizer is inconsistent"):
            backend = _BUILDERS[vocabulary.model](vocabulary)
        refuse_losses(backend, file.path, byte_level=vocabulary.model == "gpt2")
        template = file.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise FileError(file.path, "tokenizer.chat_template is no string")
        return cls(
            backend,
            file.path,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            eos_ids=vocabulary.end_ids | _end_ids(vocabulary.control_ids()),
            chat_template=template,
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory.

        Reads ``tokenizer.json``, and where present ``tokenizer_config.json``,
        ``generation_config.json`` and ``chat_template.jinja``.

        Raises:
            FileError: a file is missing, malformed or too large, or asks for more than a tokenizer
                needs.
        """
        directory = Path(directory)
        backend = read_tokenizer(directory / "tokenizer.json")
        config = _read_if_present(directory / "tokenizer_config.json")
        generation = _read_if_present(directory / "generation_config.json")
        bos = backend.token_to_id(_token_text(config.get("bos_token")))
        eos = backend.token_to_id(_token_text(config.get("eos_token")))
        listed = generation.get("eos_token_id")
        ends = {i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int}
        special = {
            token.content: number
            for number, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        return cls(
            backend,
            directory,
            bos_id=bos,
            eos_id=eos,
            eos_ids=ends | _end_ids(special) | ({eos} if eos is not None else set()),
            chat_template=_directory_template(directory, config),
        )

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text.
            add_special: add what the model wants around a prompt, such as the begin token. False
                for the output of a chat template, which writes it itself.
            parse_special: read the names of control tokens in the text as those tokens. False for
                text that must not be able to end a turn or begin one.

        Raises:
            InputError: the text is none: it holds half a surrogate pair.
            FileError: the tokenizer fails, or takes longer than one can need.
        """
        check_text("encode", "text", text)
        with self._lock, failures(self.path, "the tokenizer failed"):
            self._backend.encode_special_tokens = not parse_special
            return encode(self._backend, text, add_special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        Args:
            ids: token ids.
            skip_special: leave control tokens out.
        """
        with failures(self.path, "the tokenizer failed"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder that takes ids one by one."""
        return TextStream(self._backend, self.path, skip_special=skip_special)

    def token(self, number: int) -> str | None:
        """The vocabulary's own spelling of a token, None for an unknown id."""
        return self._backend.id_to_token(number)

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's spelling, None when there is none."""
        return self._backend.token_to_id(token)

    def _text_of(self, number: int | None) -> str:
        return "" if number is None else self._backend.id_to_token(number) or ""


def has_tokenizer(path: Path) -> bool:
    """Whether a model's file or directory holds a tokenizer, of whatever kind."""
    if is_directory(path):
        return (path / "tokenizer.json").exists()
    with open_gguf(path) as file:
        return "tokenizer.ggml.model" in file.metadata


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that came with a model.

    Raises:
        FileError: there is none, or it is of an unknown kind.
    """
    path = Path(path)
    if is_directory(path):
        return Tokenizer.from_directory(path)
    with open_gguf(path) as file:
        return Tokenizer.from_gguf(file)


class TextStream:
    """Text of a growing sequence of ids, whole characters at a time.

    ``tokenizers.decoders.DecodeStream`` does the work. What it holds back at the end (an unfinished
    character), and what it cannot go on from (a run of byte tokens that turns out not to be UTF-8
    after characters of it were given out), is taken from a decoding of all ids instead.

    The pieces of :meth:`push` and :meth:`finish` joined are what decoding all ids at once gives,
    as long as the bytes of the tokens are UTF-8.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, path: Path, *, skip_special: bool = True
    ) -> None:
        self._backend, self._path, self._skip_special = backend, path, skip_special
        self._stream = self._new_stream()
        self._ids: list[int] = []
        self._num_sent = 0  # characters given out

    def push(self, number: int) -> str:
        """Take one id; returns the text that is certain now: none, a character or several.

        Raises:
            FileError: the tokenizer fails.
        """
        with failures(self._path, "the tokenizer failed"):
            return self._push(number)

    def _push(self, number: int) -> str:
        self._ids.append(number)
        try:
            piece = self._stream.step(self._backend, number) or ""
        except Exception:  # the library's own class for "Invalid prefix encountered"
            piece = self._rest()
            self._stream = self._new_stream()
            self._stream.step(self._backend, number)  # the context of what follows
        self._num_sent += len(piece)
        return piece

    def finish(self) -> str:
        """The rest of the text. The stream starts afresh after it."""
        rest = self._rest()
        self._stream, self._ids, self._num_sent = self._new_stream(), [], 0
        return rest

    def _new_stream(self) -> tokenizers.decoders.DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=self._skip_special)

    def _rest(self) -> str:
        with failures(self._path, "the tokenizer failed"):
            text = self._backend.decode(self._ids, skip_special_tokens=self._skip_special)
        return text[self._num_sent :]


def _end_ids(control: Mapping[str, int]) -> set[int]:
    """Ids of the control tokens known to end a turn."""
    ends = {token: control[token] for token in _END_TOKENS if token in control}
    if "<|return|>" in ends and "<|call|>" in ends:
        # In the harmony format <|end|> only ends one message of several.
        ends.pop("<|end|>", None)
    return set(ends.values())


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(token: object) -> str:
    """A token of ``tokenizer_config.json``: its text, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
