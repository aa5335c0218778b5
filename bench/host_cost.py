"""Host time of one call: the two doors against the bare Triton launch of the same kernel.

    python -m bench.host_cost [--json FILE] [--commit HASH]

Each figure is the best of nine rounds of 2000 calls without synchronisation: the GPU's share of a
one-row norm is shorter than any of the host paths, so the queue never fills.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import triton

from bench.results import Row, print_rows, save_rows
from ferrum_triton import get_backend
from ferrum_triton.kernels import norm
from ferrum_triton.ops.norm import rms_norm

HIDDEN, CALLS, ROUNDS = 4096, 2000, 9


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of host time a call takes."""
    for _ in range(200):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="append the rows to this result file")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    options = parser.parse_args()

    backend = get_backend("cuda")
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(HIDDEN, device="cuda")
    out = torch.empty_like(x)
    backend.rms_norm(x, weight, 1e-6, out=out)
    kernel = norm._rms_norm_kernel.jit
    block = triton.next_power_of_2(HIDDEN)

    def bare() -> None:
        kernel[(1,)](out, x, weight, HIDDEN, HIDDEN, HIDDEN, 1e-6, BLOCK_H=block, num_warps=8)

    op = torch.ops.ferrum.rms_norm.default
    with torch.inference_mode():
        paths = {
            "bare_triton": host_us(bare),
            "backend": host_us(lambda: backend.rms_norm(x, weight, 1e-6)),
            "backend_out": host_us(lambda: backend.rms_norm(x, weight, 1e-6, out=out)),
            "torch_ops": host_us(lambda: op(x, weight, 1e-6)),
            "op_call": host_us(lambda: rms_norm(x, weight, 1e-6)),
            "torch_empty": host_us(lambda: torch.empty(x.shape, dtype=x.dtype, device=x.device)),
        }
    rows = [Row(f"host_cost/rms_norm/{name}", value, "us") for name, value in paths.items()]
    print_rows(rows)
    if options.json:
        save_rows(options.json, rows, options.commit)


if __name__ == "__main__":
    main()
