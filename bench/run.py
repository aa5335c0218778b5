"""Times every op at its declared cases, after checking that it is right.

    python -m bench.run [OP ...] [--case SUBSTRING] [--against PEER ...] [--json FILE]

A case is timed only if its result matches the reference; a product of more than
MAX_CHECKED_OPERATIONS operations, whose reference's intermediates would not fit, is held against it
by smaller cases and the tests alone. Rows are stored under ``<op>/<case>``,
the ids of the targets, in the case's metric. Beside it stand the share of the roof (compulsory
bytes at the copy bandwidth, or operations at the matrix rate, the larger) and the peers of the
same run.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor

from bench.peers import PEERS, absent, peer_call
from bench.results import Row, save_rows
from bench.timing import copies_of, device_us
from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory, assert_close

# What an H200 reaches in a large copy, reads and writes counted, and in a large bf16 product.
COPY_BYTES_PER_US = 4.25e6
BF16_OPERATIONS_PER_US = 716e6

MAX_CHECKED_OPERATIONS = 1 << 37


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="(default: all)")
    parser.add_argument("--case", default="", help="only cases whose id contains this")
    parser.add_argument("--against", nargs="*", default=[], choices=PEERS, metavar="PEER")
    parser.add_argument("--json", help="put the rows into this result file")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}")

    for name in absent(options.against):
        print(f"{name} is not installed, and left out")
    names = options.ops or list(OPS)
    print(f"{'case':<64} {'us':>9} {'roof':>6}  peers")
    for op in (OPS[name] for name in names):
        for case in (c for c in op.bench if options.case in f"{op.name}/{c.id}"):
            row = measure(op, case, options.against)
            if options.json:
                save_rows(options.json, [row], options.commit)


def measure(op: Op, case: Case, against: list[str]) -> Row:
    """Check and time one case, and the peers that have it."""
    call = getattr(get_backend("cuda"), op.name)
    arguments = op.make_sample(TensorFactory(case.dtype, "cuda"), **case.axes)
    outputs = check(op, call, arguments)
    nbytes = op.bytes_moved(arguments, outputs)
    sets = copies_of(arguments, nbytes)
    us = device_us(call, sets)
    roof = nbytes / COPY_BYTES_PER_US
    if operations := op.operations(arguments):
        roof = max(roof, operations / BF16_OPERATIONS_PER_US)
    peers = {}
    for name in against:
        other = peer_call(name, op, arguments)
        if other is not None:
            peers[name] = device_us(other, sets)
    identity = f"{case.op or op.name}/{case.id}"
    shown = "  ".join(f"{name} {value:.2f}" for name, value in peers.items())
    print(f"{identity:<64} {us:9.2f} {roof / us:6.1%}  {shown}", flush=True)
    # Operations a microsecond and a million, or bytes, are tera a second.
    work = {"us": None, "tflops": operations, "tbs": nbytes}[case.metric]

    def judged(time_us: float) -> float:
        return time_us if work is None else work / time_us / 1e6

    peers = {name: judged(value) for name, value in peers.items()}
    return Row(identity, judged(us), case.metric, roof=roof / us, peers=peers)


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
            assert_close(g, w, name=op.name)
        for name in op.mutates:
            if ours[name] is None:
                continue
            assert_close(ours[name], theirs[name], name=f"{op.name} {name}")
    except AssertionError as error:
        raise FerrumError(f"{op.name} is wrong, so it is not timed: {error}") from error
    return got


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


if __name__ == "__main__":
    main()
