"""``ferrum-triton ops``: the table of ops."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

SUMMARY = "list the ops with their backends and dtypes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    rows = table()
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    columns = {
        "op": [row["op"] for row in rows],
        "backends": [", ".join(f"{k} ({v})" for k, v in row["backends"].items()) for row in rows],
        "dtypes": [", ".join(row["dtypes"]) for row in rows],
        "does": [row["does"] for row in rows],
    }
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    widths["does"] = 0
    for cells in (tuple(columns), *zip(*columns.values(), strict=True)):
        line = "  ".join(c.ljust(widths[n]) for n, c in zip(columns, cells, strict=True))
        print(line.rstrip())
    return 0


def table() -> list[dict[str, Any]]:
    """One row an op: name, provider by backend, activation dtypes, first line of its docstring."""
    import ferrum_triton.ops  # declares them
    from ferrum_triton.backends import PROVIDERS
    from ferrum_triton.backends.triton_provider import load_kernels, ops_by_gluon
    from ferrum_triton.errors import BackendUnavailable
    from ferrum_triton.registry import OPS

    gluon: set[str] = set()
    with contextlib.suppress(BackendUnavailable):  # without triton, the table shows what is left
        load_kernels("interpret")
        gluon = ops_by_gluon()
    import ferrum_triton.backends.torch_moe
    import ferrum_triton.backends.torch_ops  # noqa: F401  these register the "torch" provider
    from ferrum_triton.backends.metal import load_shaders

    load_shaders()

    rows = []
    for op in OPS.values():
        served = {}
        for backend, providers in PROVIDERS.items():
            found = [p for p in providers if p == "reference" or p in op.impls]
            if found:
                served[backend] = found[0]
        if op.name in gluon:
            served["cuda"] += ", gluon"
        dtypes = [str(dtype).removeprefix("torch.") for dtype in op.dtypes]
        does = (op.reference.__doc__ or "").strip().splitlines()[0]
        rows.append({"op": op.name, "backends": served, "dtypes": dtypes, "does": does})
    return rows
