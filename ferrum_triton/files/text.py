"""What is text: any characters but halves of surrogate pairs, which no encoding can write."""

from __future__ import annotations

from ferrum_triton.errors import InputError


def is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(op: str, argument: str, value: str) -> None:
    """Refuse what Python makes of undecodable bytes, and of half an escaped surrogate pair.

    Raises:
        InputError: ``value`` cannot be written as UTF-8.
    """
    if not is_text(value):
        advice = "Decode it from UTF-8, or replace what cannot be decoded."
        raise InputError(op, argument, "holding half a surrogate pair", "text", advice)
