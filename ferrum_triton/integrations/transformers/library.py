"""The library behind this package: its version, and its parts by name.

transformers keeps most of what is touched here private, so it is only touched where it was tested.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ferrum_triton.errors import FerrumError

TESTED = "5.23."


def part(name: str) -> Any:
    """The module of transformers called ``name``.

    Raises:
        FerrumError: transformers is absent, or not of the version this was tested with.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise FerrumError("transformers is not installed; pip install transformers") from error
    if not found.startswith(TESTED):
        raise FerrumError(
            f"transformers is {found}; conversion was tested with {TESTED}*. Install that, or run "
            "the file with this package's own models."
        )
    return import_module(f"transformers.{name}")
