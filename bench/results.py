"""Result rows: what was measured, on what, by which code."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
# Files that differ from the commit; those this module writes do not count.
CHANGES = ("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")


@dataclass(frozen=True)
class Row:
    """One measured figure; ``id`` names the case it belongs to.

    Attributes:
        roof: share of what the machine could do at best, where that was counted.
        peers: what others reached in the same run, in the same unit.
        chained: the figure in a chain of the op with itself, where the row's is another
            (:mod:`bench.behind`).
        code: fingerprint of the code that ran (:mod:`bench.fingerprint`).
    """

    id: str
    value: float
    unit: str
    roof: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    chained: float | None = None
    code: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every bench that stores rows."""
    parser.add_argument("--json", help="put the rows into this result file")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    parser.add_argument(
        "--dirty", action="store_true", help="the tree differed from --commit when it was measured"
    )


def environment(commit: str | None = None, dirty: bool = False) -> dict[str, Any]:
    """The machine and versions a row was measured with.

    Args:
        commit: the commit measured; None asks git, for it and for ``dirty``.
        dirty: whether files under version control differed from the commit.
    """
    if commit is None:
        dirty = _ask(*CHANGES) not in ("", "unknown")
        commit = _ask("git", "rev-parse", "--short=12", "HEAD")
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "dirty": dirty,
        "torch": torch.__version__,
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "absent"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _driver()
    return found


@functools.cache
def _driver() -> str:
    return _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def print_rows(rows: Sequence[Row]) -> None:
    width = max(len(row.id) for row in rows)
    for row in rows:
        print(f"{row.id:<{width}}  {row.value:10.4g} {row.unit}")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a result file, none where there is no file yet."""
    file = Path(path)
    return json.loads(file.read_text())["rows"] if file.exists() else []


def save_rows(
    path: str, rows: Sequence[Row], commit: str | None = None, dirty: bool = False
) -> None:
    """Put rows into a result file, in place of older rows of the same id.

    The file is replaced at once, so that an interrupted run leaves a whole one.
    """
    file = Path(path)
    kept = read_rows(file)
    ids = {row.id for row in rows}
    shared = environment(commit, dirty)
    fresh = [{k: v for k, v in asdict(row).items() if v or k == "value"} | shared for row in rows]
    merged = [row for row in kept if row["id"] not in ids] + fresh
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(file.name + ".new")
    written.write_text(json.dumps({"rows": sorted(merged, key=lambda r: r["id"])}, indent=1) + "\n")
    written.replace(file)
