"""Result rows: what was measured, on what, at which commit."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One measured figure; ``id`` names the case it belongs to.

    Attributes:
        roof: share of what the machine could do at best, where that was counted.
        peers: what others reached in the same run, in the same unit.
    """

    id: str
    value: float
    unit: str
    roof: float | None = None
    peers: dict[str, float] = field(default_factory=dict)


def environment(commit: str | None = None) -> dict[str, str]:
    """The machine and versions a row was measured with."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit or _ask("git", "rev-parse", "--short=12", "HEAD"),
        "torch": torch.__version__,
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "absent"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _ask(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        )
    return found


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def print_rows(rows: Sequence[Row]) -> None:
    width = max(len(row.id) for row in rows)
    for row in rows:
        print(f"{row.id:<{width}}  {row.value:10.4g} {row.unit}")


def save_rows(path: str, rows: Sequence[Row], commit: str | None = None) -> None:
    """Put rows into a result file, in place of older rows of the same id."""
    file = Path(path)
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    ids = {row.id for row in rows}
    shared = environment(commit)
    fresh = [{k: v for k, v in asdict(row).items() if v or k == "value"} | shared for row in rows]
    merged = [row for row in kept if row["id"] not in ids] + fresh
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": sorted(merged, key=lambda r: r["id"])}, indent=1) + "\n")
