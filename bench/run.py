"""Times every op at its declared cases, after checking that it is right.

    python -m bench.run [OP ...] [--case TEXT] [--against PEER ...] [--json FILE]
                        [--missing] [--seconds N]

A case is timed only if its result matches the reference; a product of more than
MAX_CHECKED_OPERATIONS operations, whose reference's intermediates would not fit, is held against it
by smaller cases and the tests alone. Products of few tokens are timed behind a norm
(:mod:`bench.behind`). Rows are stored under ``<op>/<case>``, the ids of the targets, in the case's
metric, one after the other: a run that is stopped keeps what it has. Beside a row stand the share
of the roof (compulsory bytes at the copy bandwidth, or operations at the matrix rate, the larger)
and the peers of the same run. A case that fails is a line, and the exit status 1 in the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.behind import time_call
from bench.cases import Declared, code_of, declared, launches_of
from bench.launches import arch_here
from bench.peers import PEERS, absent, peer_call
from bench.precompile import compile_all
from bench.results import Row, add_options, read_rows, save_rows
from bench.timing import copies_of
from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.kernels.quant.products import MANY
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TWO_PRODUCTS, UNROUNDED, TensorFactory, assert_close

# Ops of gate and up, whose weights may be decoded for cuBLAS from MANY tokens on.
GATED = (
    "gemv_quant_gate_up_silu",
    "add_rms_norm_quant_gate_up_silu",
    "open_norm_quant_gate_up_silu",
)

# What an H200 reaches in a large copy, reads and writes counted, and in a large bf16 product.
COPY_BYTES_PER_US = 4.25e6
BF16_OPERATIONS_PER_US = 716e6

MAX_CHECKED_OPERATIONS = 1 << 37


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="(default: all)")
    parser.add_argument("--case", default="", help="only cases whose id contains this")
    parser.add_argument("--against", nargs="*", default=[], choices=PEERS, metavar="PEER")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only cases without a fresh row in the --json file: first those without any row, "
        "then stale ones, then those of unknown age",
    )
    parser.add_argument("--seconds", type=float, help="begin no further case after so long")
    parser.add_argument("--processes", type=int, help="that compile beforehand (default: by cores)")
    add_options(parser)
    options = parser.parse_args()
    start = time.monotonic()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}")
    if options.missing and not options.json:
        parser.error("--missing needs --json, the file whose rows are looked at")

    for name in absent(options.against):
        print(f"{name} is not installed, and left out")
    names = options.ops or list(OPS)
    chosen = [case for case in declared().values() if case.op.name in names]
    chosen = [case for case in chosen if options.case in case.id]
    arch = arch_here()
    if options.missing:
        chosen = without_fresh_row(chosen, read_rows(options.json), arch)
    recorders = [partial(launches_of, case.id, arch) for case in chosen]
    for line in compile_all(recorders, options.processes):
        print(f"does not compile: {line}")
    print(f"{len(chosen)} cases, after {time.monotonic() - start:.0f} s")
    print(f"{'case':<64} {'us':>9} {'roof':>6}  chained and peers")
    failed = 0
    for i, case in enumerate(chosen):
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"{len(chosen) - i} cases left when {options.seconds:.0f} s had passed")
            break
        try:
            row = measure(case.op, case.case, options.against)
        except Exception as error:  # the other cases still count
            failed += 1
            first = (str(error).splitlines() or [""])[0]
            print(f"{case.id:<64} failed: {type(error).__name__}: {first[:160]}", flush=True)
            torch.cuda.synchronize()  # raises where the device is lost, and so does every case
            torch.cuda.empty_cache()
            continue
        if options.json:
            save_rows(options.json, [row], options.commit, options.dirty)
    if failed:
        print(f"{failed} cases failed")
    return 1 if failed else 0


def without_fresh_row(
    cases: Sequence[Declared], rows: Sequence[dict[str, Any]], arch: str
) -> list[Declared]:
    """Cases without a row, then those of stale rows, then those of rows without a fingerprint."""
    codes = {row["id"]: row.get("code", "") for row in rows}
    never, stale, unknown = [], [], []
    for case in cases:
        if case.id not in codes:
            never.append(case)
        elif not codes[case.id].startswith(f"{arch}/"):
            unknown.append(case)
        elif codes[case.id] != code_of(case.id, arch):
            stale.append(case)
    return never + stale + unknown


def measure(op: Op, case: Case, against: Sequence[str] = ()) -> Row:
    """Check and time one case, and the peers that have it."""
    backend = get_backend("cuda")
    call = getattr(backend, op.name)
    arguments = op.make_sample(TensorFactory(case.dtype, backend.device), **case.axes)
    outputs = check(op, call, arguments)
    nbytes = op.bytes_moved(arguments, outputs)
    sets = copies_of(arguments, nbytes)
    operations = op.operations(arguments)
    # Operations a microsecond and a million, or bytes, are tera a second.
    work = {"us": None, "tflops": operations, "tbs": nbytes}[case.metric]

    def judged(time_us: float) -> float:
        return time_us if work is None else work / time_us / 1e6

    timed = partial(time_call, op, sets=sets, backend=backend, graph=case.graph)
    us, chained = timed(call)
    roof = nbytes / COPY_BYTES_PER_US
    if operations:
        roof = max(roof, operations / BF16_OPERATIONS_PER_US)
    peers = {}
    for name in against:
        other = peer_call(name, op, arguments)
        if other is not None:
            peers[name] = timed(other).us
    identity = Declared(op, case).id
    beside = ({} if chained is None else {"chained": chained}) | peers
    shown = "  ".join(f"{name} {value:.2f}" for name, value in beside.items())
    print(f"{identity:<64} {us:9.2f} {roof / us:6.1%}  {shown}", flush=True)
    return Row(
        identity,
        judged(us),
        case.metric,
        roof=roof / us,
        peers={name: judged(value) for name, value in peers.items()},
        chained=None if chained is None else judged(chained),
        code=code_of(identity, arch_here()) or "",
    )


def scale_of(op: Op, result: Tensor) -> float:
    """The factor on the table's bounds for a result."""
    if op.after_norm and result.dtype == torch.float32:
        return UNROUNDED
    return TWO_PRODUCTS if op.name in GATED and len(result) >= MANY else 1.0


def check(op: Op, call: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Raise unless the call's results match the reference; return its outputs."""

    def copied() -> dict[str, Any]:
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}

    ours, theirs = copied(), copied()
    got = _as_tuple(call(**ours))
    operations = op.operations(arguments) or 0
    if operations > MAX_CHECKED_OPERATIONS:
        return got
    want = _as_tuple(op.reference(**theirs))
    try:
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, name=op.name, scale=scale_of(op, g))
        for name in op.mutates:
            if ours[name] is None:
                continue
            assert_close(op.left_in(name, ours), theirs[name], name=f"{op.name} {name}")
    except AssertionError as error:
        raise FerrumError(f"{op.name} is wrong, so it is not timed: {error}") from error
    return got


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


if __name__ == "__main__":
    sys.exit(main())
