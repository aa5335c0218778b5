"""A model directory's ``tokenizer.json``, checked before the tokenizers library runs it.

The file is a program: what it replaces may grow without end, and its regular expressions may take
time that doubles with each character. Both are refused where no model in use has them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import read_text
from ferrum_triton.files.tokenizer_limits import MAX_ADDED_TOKENS, failures, refuse_losses

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 128 << 20

_BEFORE_MODEL = ("normalizer", "pre_tokenizer")
_MAX_STEPS = 64
# Characters that the steps may make of one.
_MAX_GROWTH = 64
_MAX_PATTERN_CHARS = 4096
# A regular expression's escapes, character classes, counts, and single characters.
_SYNTAX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\{\d*,?\d*\}|.", re.DOTALL)
# What repeats: not what comes at most once, nor a small fixed number of times.
_LOOP = re.compile(r"[*+]|\{(?!0?,?1\}|[0-8]\})(?:\d+,?\d*|,\d+)\}")


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer that the file describes, without the random dropout of a training.

    Raises:
        FileError: the file is malformed or too large, asks for more than a tokenizer needs, or its
            vocabulary would drop parts of a text.
    """
    import tokenizers

    text = read_text(path, MAX_TOKENIZER_BYTES)
    with failures(path, "not a tokenizer"):
        description = json.loads(text)
        if not isinstance(description, dict):
            raise FileError(path, "not a tokenizer: no JSON object")
        _check_steps(description, path)
        added = description.get("added_tokens") or ()
        if len(added) > MAX_ADDED_TOKENS:
            raise FileError(path, f"{len(added)} added tokens; allowed: {MAX_ADDED_TOKENS}")
        # Written anew, so that of a key that comes twice the library takes what was checked.
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None
    spelled = itertools.chain(*(_steps(description, part) for part in _BEFORE_MODEL))
    byte_level = any(step["type"] == "ByteLevel" for step in spelled)
    refuse_losses(backend, path, byte_level=byte_level)
    return backend


def _check_steps(description: dict[str, Any], path: Path) -> None:
    for part in (*_BEFORE_MODEL, "decoder"):
        growth = 1
        steps = list(_steps(description, part))
        if len(steps) > _MAX_STEPS:
            raise FileError(path, f"{part} has {len(steps)} steps; allowed: {_MAX_STEPS}")
        for step in steps:
            kind, pattern = step["type"], step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if kind == "Precompiled":
                raise FileError(
                    path, f"{part} {kind!r} is not supported; use the model's GGUF file"
                )
            if isinstance(regex, str):
                _check_regex(regex, path)
            growth *= _growth(step, regex)
            if growth > _MAX_GROWTH:
                reason = f"{part} makes more than {_MAX_GROWTH} characters of one"
                raise FileError(path, f"{reason}, which no tokenizer needs")


def _steps(description: dict[str, Any], part: str) -> Iterator[dict[str, Any]]:
    """Every object with a type in one part of the file."""
    left = [description.get(part)]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                yield node
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def _growth(step: dict[str, Any], regex: Any) -> int:
    """Characters that a step makes of one at most."""
    if step["type"] == "ByteLevel":
        return 2
    if step["type"] not in ("Replace", "Prepend"):
        return 1
    written = step.get("content", step.get("prepend"))
    length = len(written) if isinstance(written, str) else 1
    # A regular expression also matches between characters, and prepending keeps what was there.
    keeps = isinstance(regex, str) or step["type"] == "Prepend"
    return max(1, length + keeps)


def _check_regex(regex: str, path: Path) -> None:
    """Refuse a repeated group that repeats something itself: the ways to match it multiply."""
    if len(regex) > _MAX_PATTERN_CHARS:
        reason = f"a regular expression of {len(regex)} characters"
        raise FileError(path, f"{reason}; allowed: {_MAX_PATTERN_CHARS}")
    loops = [False]  # of each open group: whether it holds a loop
    group = False  # whether what came last is a group that does
    for token in _SYNTAX.findall(regex):
        if token == "(":
            loops.append(False)
        elif token == ")" and len(loops) > 1:
            group = loops.pop()
            loops[-1] |= group
            continue
        elif _LOOP.fullmatch(token):
            if group:
                reason = f"the regular expression {regex!r:.80} repeats what repeats"
                raise FileError(path, f"{reason}, which may take time without end")
            loops[-1] = True
        group = False
