"""Compares a result file with a list of targets, and rows with the code as it is.

    python -m bench.check RESULTS.json TARGETS.json

Prints every target with its value, floor, goal, verdict and the age of its row, and counts them.
Rows that no target names are counted by op where something is wrong with them. A row is

* ``fresh`` if its fingerprint is that of the code today, ``stale`` if its kernel changed since,
* ``unknown age`` without a fingerprint, or where no triton is installed to compute one,
* ``dirty`` besides if its tree differed from its commit, and ``lacks op`` if git knows its commit
  and the op is not defined there: the row was measured elsewhere than it says. ``op is gone`` marks
  the row of an op that its commit had and the code today has not.

The exit status is 1 if a measured case is below its floor; a case without a row is listed as not
measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bench.results import ROOT, read_rows
from ferrum_triton.registry import OPS

HIGHER_IS_BETTER = {"tflops", "tbs", "gbs", "tok_s"}
VERDICTS = ("goal", "floor", "below", "not measured")
AGES = ("fresh", "stale", "unknown age")


class Line(NamedTuple):
    """One target beside its row."""

    id: str
    metric: str
    value: float | None
    floor: float
    goal: float
    verdict: str
    age: str


def verdict(case: dict[str, Any], value: float | None) -> str:
    """``goal``, ``floor``, ``below`` or ``not measured``."""
    if value is None:
        return "not measured"
    sign = 1 if case["metric"] in HIGHER_IS_BETTER else -1
    if sign * value >= sign * case["goal"]:
        return "goal"
    return "floor" if sign * value >= sign * case["floor"] else "below"


def compare(rows: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> list[Line]:
    """Every case beside its row, in the targets' order.

    Raises:
        ValueError: a row is in another unit than its target.
    """
    measured = {row["id"]: row for row in rows}
    lines = []
    for case in cases:
        row = measured.get(case["id"])
        if row is not None and row["unit"] != case["metric"]:
            raise ValueError(f"{case['id']} is in {row['unit']}, its target in {case['metric']}")
        value = None if row is None else row["value"]
        found, old = verdict(case, value), "" if row is None else age(row)
        lines.append(
            Line(case["id"], case["metric"], value, case["floor"], case["goal"], found, old)
        )
    return lines


def age(row: dict[str, Any]) -> str:
    """How a row stands to the code today, and what is wrong with it."""
    notes = [_age_by_code(row["id"], row.get("code"))]
    if row.get("dirty"):
        notes.append("dirty")
    op, defined = _op_of(row["id"]), ops_at(row["commit"])
    if defined is not None:
        if op is not None and op not in defined:
            notes.append("lacks op")
        if op is None and row["id"].split("/")[0] in defined:
            notes.append("op is gone")
    return ", ".join(notes)


def _age_by_code(row: str, code: str | None) -> str:
    if code is None or find_spec("triton") is None:
        return "unknown age"
    from bench.cases import code_of

    today = code_of(row, arch=code.split("/")[0])
    return "unknown age" if today is None else "fresh" if today == code else "stale"


def _op_of(row: str) -> str | None:
    """The op a row times, or None for a row of another bench."""
    name = row.split("/")[0]
    if name in OPS:
        return name
    variants = (op.name for op in OPS.values() for case in op.bench if case.op == name)
    return next(variants, None)


@functools.cache
def ops_at(commit: str) -> frozenset[str] | None:
    """The functions that ``ferrum_triton/ops`` defined at a commit, or None if git has no such."""
    command = ("git", "grep", "-hoE", r"^def \w+", commit, "--", "ferrum_triton/ops")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(line.split()[1] for line in done.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("targets", type=Path)
    options = parser.parse_args()
    rows = read_rows(options.results)
    lines = compare(rows, json.loads(options.targets.read_text())["cases"])
    targeted = {line.id for line in lines}
    others = {row["id"]: age(row) for row in rows if row["id"] not in targeted}
    width = max(len(line.id) for line in lines)
    print(f"{'case':<{width}} {'metric':>7} {'value':>9} {'floor':>8} {'goal':>8}  verdict")
    for line in lines:
        shown = "-" if line.value is None else f"{line.value:.4g}"
        mark = f" ({line.age})" if line.age not in ("", "fresh") else ""
        print(
            f"{line.id:<{width}} {line.metric:>7} {shown:>9} {line.floor:>8} {line.goal:>8}"
            f"  {line.verdict}{mark}"
        )
    print(_counted(VERDICTS, Counter(line.verdict for line in lines)))
    suspect = Counter((name.split("/")[0], found) for name, found in others.items())
    for (name, found), count in suspect.items():
        if found not in ("fresh", "unknown age"):
            print(f"{count} more rows of {name}: {found}")
    ages = [*(line.age for line in lines if line.age), *others.values()]
    print(f"rows: {_counted(AGES, Counter(found.split(', ')[0] for found in ages))}")
    return 1 if any(line.verdict == "below" for line in lines) else 0


def _counted(kinds: Sequence[str], counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
