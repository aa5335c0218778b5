"""What tests/recorded/ holds: tables of what the library decides, which ``test_recorded`` compares.

    python -m tests.record            writes them all
    python -m tests.record choices    writes those of one folder

A table is no definition of what is right: it shows in a diff what a change decides otherwise, where
nobody would have looked. Read that diff, and write the tables anew with the change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ferrum_triton.backends.triton_provider import load_kernels
from tests.recorded_choices import choices
from tests.recorded_launches import launches
from tests.recorded_refusals import refusals

load_kernels("interpret")

FOLDER = Path(__file__).parent / "recorded"
# Tables by their names, each folder's as a function that makes them.
TABLES: dict[str, Callable[[], dict[str, str]]] = {
    "choices": choices,
    "launches": launches,
    "refusals": refusals,
}


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        folder, tables = FOLDER / name, TABLES[name]()
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.txt"):
            if file.stem not in tables:
                file.unlink()
        for stem, text in tables.items():
            (folder / f"{stem}.txt").write_text(text)


if __name__ == "__main__":
    main()
