"""Chat templates: a conversation to the prompt the model was trained on.

A template is a Jinja program out of a model file, so it is hostile until shown otherwise. It runs
in Jinja's sandbox, narrowed by :mod:`ferrum_triton.files.chat_sandbox` to plain data and metered,
so that no template can reach Python objects, run on, or fill the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files.text import check_text, is_text

if TYPE_CHECKING:
    from ferrum_triton.files.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 64 << 10
"""Longest template accepted; the longest in use have about 20 000 characters. Compiling takes time
that grows with its square, some seconds at worst."""

MAX_OUTPUT_CHARS = 8 << 20
"""Longest prompt a template may write."""

_MAX_DEPTH = 32


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template, as :attr:`~ferrum_triton.files.tokenizer.Tokenizer.chat_template`
            has it; None when the model has none.
        bos: text of the model's begin token, which templates write themselves.
        eos: text of the model's end token.
        path: the file the template came from, for messages.

    Raises:
        FileError: there is no template, or it does not compile, or uses what chat templates have no
            business with: other templates, blocks, recursive loops, unknown filters.
    """

    def __init__(
        self, source: str | None, bos: str, eos: str, *, path: str | Path = "chat template"
    ) -> None:
        self.path = path
        if source is None:
            raise FileError(path, "the model has no chat template; prompt it with raw text")
        if len(source) > MAX_SOURCE_CHARS:
            raise FileError(path, f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        from ferrum_triton.files.chat_sandbox import MeteredEnvironment

        self._bos, self._eos = bos, eos
        self._lock = threading.Lock()
        self._environment = MeteredEnvironment(MAX_OUTPUT_CHARS)
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:
            reason = f"the chat template does not compile: {_words(error)}"
            raise FileError(path, reason) from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with a tokenizer.

        Raises:
            FileError: as the constructor.
        """
        return cls(
            tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token, path=tokenizer.path
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        The prompt holds the model's begin token where the template writes one: encode it with
        ``add_special=False``.

        Args:
            messages: the turns, oldest first, each with "role" and "content"; values are what JSON
                can hold.
            add_generation_prompt: end with the opening of the assistant's turn.
            **variables: other names the template reads, e.g. ``tools`` or ``enable_thinking``.

        Raises:
            InputError: messages or variables hold something JSON cannot, or half a surrogate pair.
            FileError: the template fails, refuses the conversation, or exceeds its limits.
        """
        variables = {name: _plain(value, name) for name, value in variables.items()}
        variables |= {
            "messages": _plain(list(messages), "messages"),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        with self._lock:
            try:
                prompt = self._environment.run(self._template, variables)
            except Exception as error:
                raise FileError(self.path, f"the chat template failed: {_words(error)}") from error
        if not is_text(prompt):
            raise FileError(self.path, "the chat template writes half a surrogate pair")
        return prompt


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """A copy of ``value`` of exactly JSON's types, so that a template meets no methods of ours."""
    if type(value) is str:
        check_text("render", name, value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return {key: _plain(item, name, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, name, depth + 1) for item in value]
    raise InputError(
        "render",
        name,
        f"or holds a {type(value).__name__}",
        f"what JSON can hold, nested at most {_MAX_DEPTH} deep",
        "Convert it first.",
    )
