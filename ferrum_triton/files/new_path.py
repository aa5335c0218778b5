"""Files and directories that appear under their name when all of them has been written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import is_directory


def refuse_taken(target: Path) -> None:
    """Refuse a path that is taken, or has no directory to be made in."""
    if is_directory(target) or os.path.lexists(target):
        raise FileError(target, "is there already; name one that is not")
    if not is_directory(target.absolute().parent):
        raise FileError(target, "has no directory to be made in")


@contextlib.contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` at the end, or goes where there is a failure.

    Raises:
        FileError: the target is taken, or what is written cannot be, as on a full disk.
    """
    refuse_taken(target)
    where = target.absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=where) as folder:
            made = Path(folder) / target.name
            yield made
            refuse_taken(target)
            made.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(target, f"cannot be written: {reason}") from error
