"""What bounds the tokenizers library, whose algorithms trust the file that describes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ferrum_triton.errors import FileError

if TYPE_CHECKING:
    import tokenizers

MAX_ADDED_TOKENS = 1 << 16
"""Most tokens matched whole in a text. Models have some thousands at most, and the library takes
time that grows faster than their number: 0.3 s for these, 100 s for three million."""

MAX_WORD_CHARS = 1 << 10
"""Longest word that WordPiece may look for pieces of, which takes the square of its length; BERT's
is 100."""

# Time for a text: no tokenizer in use takes a hundredth of it.
_SECONDS, _CHARS_PER_SECOND = 10, 100_000

T = TypeVar("T")


@contextmanager
def failures(path: Path, reason: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into FileError.

    It raises plain ``Exception``; where its Rust code panics, a ``BaseException`` of a type that
    cannot be imported.
    """
    try:
        yield
    except (FileError, ModuleNotFoundError):  # the latter: the library is not installed
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileError(path, f"{reason}: {error}") from error


def encode(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    """The ids of ``text``.

    Raises:
        TimeoutError: it takes longer than a tokenizer can need. The thread that runs it cannot be
            ended from outside and goes on until the process ends.
    """
    seconds = _SECONDS + len(text) / _CHARS_PER_SECOND
    # Of one text as of several: unlike ``encode``, this lets other threads run meanwhile.
    return _in_time(lambda: backend.encode_batch([text], add_special_tokens=add_special), seconds)[
        0
    ].ids


def _in_time(call: Callable[[], T], seconds: float) -> T:
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"it took more than {seconds:.0f} seconds") from None
    if error is not None:
        raise error
    return value


def refuse_losses(backend: tokenizers.Tokenizer, path: Path, *, byte_level: bool) -> None:
    """Check that a vocabulary has tokens for any text, of which it would drop the rest.

    Args:
        backend: the tokenizer.
        path: the file it came from.
        byte_level: whether a byte is spelled as one character of :func:`byte_alphabet`.

    Raises:
        FileError: bytes that text needs have no token, and there is no unknown token; or words of
            WordPiece are too long to be cut in time.
    """
    from tokenizers import models

    model = backend.model
    if isinstance(model, models.WordPiece):
        if backend.token_to_id(model.unk_token) is None:
            raise FileError(path, f"the vocabulary lacks its unknown token {model.unk_token!r:.80}")
        if model.max_input_chars_per_word > MAX_WORD_CHARS:
            reason = f"words of {model.max_input_chars_per_word} characters"
            raise FileError(path, f"the tokenizer takes {reason}; allowed: {MAX_WORD_CHARS}")
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return
    needed = byte_alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    missing = [token for token in needed if backend.token_to_id(token) is None]
    if missing or not (byte_level or model.byte_fallback):
        few = ", ".join(map(repr, missing[:4])) or "byte_fallback"
        reason = f"the vocabulary would drop parts of a text: it lacks {few}"
        raise FileError(path, f"{reason}, of {len(missing)} byte tokens, and an unknown token")


def byte_alphabet() -> list[str]:
    """The byte-level spellings of the bytes of assigned characters, but for control characters."""
    from tokenizers.pre_tokenizers import ByteLevel

    # All continuation bytes, and each first byte up to that of the plane of emoji.
    codes = (*b"\t\n\r", *range(32, 127), *range(0x80, 0x1000), *range(0x1000, 0xD000, 0x1000))
    text = "".join(map(chr, (*codes, 0xD7FF, 0xE000, 0xF900, 0x1F600)))
    spelled = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return sorted(set("".join(piece for piece, _ in spelled)))
