"""Host time of one call of every op, beside a bare launch by Triton.

    python -m bench.host_cost [OP ...] [--json FILE] [--commit HASH]

Calls are enqueued without waiting for them, at the shapes of an op's first bench case, and at those
of CASES. A figure is the median over rounds of calls, and the GPU is waited for between rounds, so
that its queue never fills: a full queue would make the host wait inside a call. ``bare_triton`` is
one launch of a kernel with two pointers by Triton alone: hosts differ, and other figures are judged
beside it. ``torch_empty`` is one allocation. An op that fails costs its row and one line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.results import Row, save_rows
from ferrum_triton import OPS, get_backend
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory

# A queue of launches holds about a thousand, and no op makes more than eight a call.
CALLS, ROUNDS, WARM_UP = 60, 15, 5

# Rounds end early where the device takes long over each call.
MAX_SECONDS = 0.75

# Cases by the end of their rows' ids: the first of the op's bench cases that has this in its id.
CASES = {
    "paged_decode_attention/b1": "b1",
    "gemv_quant/m1": "m1",
    "gemm_quant/m8": "m8",
    "gemm_quant/m16": "m16",
    "linear_quant/m16": "m16",
    "gemv_quant_gate_up_silu/m4": "m4",
    "gemv_quant_qkv/m4": "m4",
    "route_topk_softmax/m64": "m64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="(default: all)")
    parser.add_argument("--json", help="put the rows into this result file")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}")

    with torch.inference_mode():
        rows = [Row(f"host/{name}", host_us(call), "us") for name, call in bare_calls()]
        for row in rows:
            print(f"{row.id:<56} {row.value:8.2f} us", flush=True)
        bare = rows[0].value
        for name, op, case in cases(options.ops or list(OPS)):
            try:
                value = measure(op, case)
            except Exception as error:  # one op must not cost the others' rows
                print(f"host/{name} failed: {str(error).splitlines()[0]}", flush=True)
                torch.cuda.synchronize()
                continue
            print(f"{f'host/{name}':<56} {value:8.2f} us {value / bare:6.2f} x bare", flush=True)
            rows.append(Row(f"host/{name}", value, "us", peers={"bare_triton": bare}))
    if options.json:
        save_rows(options.json, rows, options.commit)


def cases(names: list[str]) -> Iterator[tuple[str, Op, Case]]:
    """What is measured: the end of a row's id, the op, the case that has the shapes."""
    for name in names:
        op = OPS[name]
        yield name, op, op.bench[0]
        for identity, size in CASES.items():
            if identity.split("/")[0] == name:
                sized = (case for case in op.bench if size in case.id.split("/"))
                yield identity, op, next(sized)


def measure(op: Op, case: Case) -> float:
    """Microseconds of host time a call of one case takes."""
    call = getattr(get_backend("cuda"), op.name)
    arguments = op.make_sample(TensorFactory(case.dtype, "cuda"), **case.axes)
    return host_us(lambda: call(**arguments))


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of host time that a call takes to enqueue."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    rounds, begin = [], time.perf_counter()
    while len(rounds) < ROUNDS and (not rounds or time.perf_counter() - begin < MAX_SECONDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(rounds) / CALLS * 1e6


@triton.jit
def _copy_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def bare_calls() -> list[tuple[str, Callable[[], object]]]:
    """A launch by Triton, and an allocation by torch."""
    x, y = (torch.zeros(64, device="cuda") for _ in range(2))

    def launch() -> Tensor:
        _copy_kernel[(1,)](y, x, 64, BLOCK=64, num_warps=1)
        return y

    return [
        ("bare_triton", launch),
        ("torch_empty", lambda: torch.empty(64, device="cuda")),
    ]


if __name__ == "__main__":
    main()
