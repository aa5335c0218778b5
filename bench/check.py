"""Compares a result file with a list of targets.

    python -m bench.check RESULTS.json TARGETS.json

Prints every target with its value, floor, goal and verdict, and counts them. The exit status is 1
if a measured case is below its floor; a case without a row is listed as not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HIGHER_IS_BETTER = {"tflops", "tbs", "gbs", "tok_s"}


def verdict(case: dict[str, Any], value: float | None) -> str:
    """``goal``, ``floor``, ``below`` or ``not measured``."""
    if value is None:
        return "not measured"
    sign = 1 if case["metric"] in HIGHER_IS_BETTER else -1
    if sign * value >= sign * case["goal"]:
        return "goal"
    return "floor" if sign * value >= sign * case["floor"] else "below"


def compare(rows: list[dict[str, Any]], cases: list[dict[str, Any]]) -> list[tuple]:
    """(id, metric, value, floor, goal, verdict) for every case, in the targets' order.

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
        found = verdict(case, value)
        lines.append((case["id"], case["metric"], value, case["floor"], case["goal"], found))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("targets", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"]
    lines = compare(rows, json.loads(options.targets.read_text())["cases"])
    width = max(len(line[0]) for line in lines)
    print(f"{'case':<{width}} {'metric':>7} {'value':>9} {'floor':>8} {'goal':>8}  verdict")
    for name, metric, value, floor, goal, found in lines:
        shown = "-" if value is None else f"{value:.4g}"
        print(f"{name:<{width}} {metric:>7} {shown:>9} {floor:>8} {goal:>8}  {found}")
    counts = {kind: sum(line[-1] == kind for line in lines) for kind in
              ("goal", "floor", "below", "not measured")}  # fmt: skip
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["below"] else 0


if __name__ == "__main__":
    sys.exit(main())
