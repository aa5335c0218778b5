"""Bounded reading of the JSON files that come with a model."""

import json
import stat
from pathlib import Path
from typing import Any

from ferrum_triton.errors import FileError

MAX_JSON_BYTES = 16 << 20


def is_directory(path: Path) -> bool:
    """Whether a directory lies at ``path``; False where nothing does.

    Raises:
        FileError: the system takes no such path.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise FileError(path, f"cannot be opened: {error.strerror or error}") from error


def read_text(path: str | Path, max_bytes: int) -> str:
    """Read a UTF-8 file.

    Args:
        path: a regular file.
        max_bytes: largest size accepted.

    Raises:
        FileError: it cannot be read, is no regular file, too large, or not UTF-8.
    """
    path = Path(path)
    try:
        # Before opening: to open a named pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError(path, "not a regular file")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror or error}") from error
    if len(raw) > max_bytes:
        raise FileError(path, f"larger than {max_bytes} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"not UTF-8: {error.reason}", error.start) from error


def read_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object, such as ``config.json``.

    Args:
        path: a regular file of UTF-8 JSON.
        max_bytes: largest size accepted.

    Raises:
        FileError: as :func:`read_text`, or the contents are no JSON object.
    """
    value = _parse(path, max_bytes)
    if not isinstance(value, dict):
        raise FileError(path, "not a JSON object")
    return value


def read_json_array(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> list[Any]:
    """Read a file that holds one JSON array; otherwise as :func:`read_json`."""
    value = _parse(path, max_bytes)
    if not isinstance(value, list):
        raise FileError(path, "not a JSON array")
    return value


def _parse(path: str | Path, max_bytes: int) -> Any:
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"not JSON: {error}") from error
