"""One packed linear layer of transformers, before its conversion and after.

    python -m bench.convert [--kinds Q4_K Q6_K] [--shapes 14336x4096 4096x4096] [--tokens 1 8 64]
                            [--seconds N] [--json FILE]

Rows ``convert/<kind>/n<rows>k<columns>/m<tokens>`` are microseconds of the module that ``convert``
puts in place of a ``GgufLinear``, in bfloat16. Its peers, on the same weight in the same run:

- ``door``: the ``GgufLinear`` itself, after ``keep_packed()``;
- ``transformers``: its products with transformers' own decoding, for want of any kernel;
- ``dense``: the ``Linear`` that transformers makes of it where nothing stays packed.

Results are compared with the float64 product before they are timed. Times are of captured graphs
over weights that no cache can hold; those of ``transformers``, which cannot be captured, are of
eager calls, enqueued and awaited, and marked so.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bench.cases import code_of, launches_of
from bench.launches import arch_here, meta_backend
from bench.precompile import compile_all
from bench.random_models import SPREAD, random_blocks
from bench.results import Row, add_options, save_rows
from bench.timing import COLD_BYTES, device_us, eager_us
from ferrum_triton.integrations.transformers import keep_packed
from ferrum_triton.integrations.transformers.layers import Packed, PackedLinear
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.ops.quant import MAX_GEMV_ROWS, case_name
from ferrum_triton.quant import FORMATS, QuantizedTensor
from ferrum_triton.testing import TensorFactory, assert_close

ROW = re.compile(r"convert/(\w+)/n(\d+)k(\d+)/m(\d+)")
SHAPES = ("14336x4096", "4096x4096")
# Calls timed together, and timings: one takes milliseconds.
EAGER_TIMES = 10, 5
# transformers' decoding uploads its shifts at every call, which no graph can hold.
EAGER = ("transformers",)

Way = Callable[[Tensor], Tensor]


def ways(weight: QuantizedTensor, dtype: torch.dtype) -> dict[str, Way]:
    """The ways to multiply by a packed matrix, the module of a conversion first."""
    keep_packed()
    n, k = weight.shape
    packed = part("integrations.gguf.utils").GgufLinear(k, n, FORMATS[weight.kind].ggml_id)
    packed.weight = nn.Parameter(weight.blocks, requires_grad=False)
    dense = nn.Linear(k, n, bias=False, device="meta")
    dense.weight = nn.Parameter(weight.dequantize(dtype), requires_grad=False)
    return {
        "planes": PackedLinear(Packed.of(weight), None),
        "door": packed,
        "transformers": partial(without_kernels, packed),
        "dense": dense,
    }


def without_kernels(linear: Any, x: Tensor) -> Tensor:
    """A ``GgufLinear``'s product where transformers has found no kernel."""
    kernels = part("integrations.gguf.kernels")
    found, kernels._gguf_kernel = kernels._gguf_kernel, False
    try:
        return linear._unpack_matmul(x)
    finally:
        kernels._gguf_kernel = found


def check(name: str, way: Way, x: Tensor, weight: QuantizedTensor) -> None:
    """Raise unless a way gives the float64 product.

    Ways that decode before they multiply round weights to x's dtype: twice the tolerance of sums.
    """
    want = x.double() @ weight.dequantize(torch.float32).double().T
    assert_close(way(x), want, name=name, scale=2)


@torch.inference_mode()
def measure(kind: str, n: int, k: int, m: int) -> Row:
    """Check and time every way at a shape; prints the row."""
    row = f"convert/{kind}/n{n}k{k}/m{m}"
    make = TensorFactory(torch.bfloat16, "cuda", seed=int(time.time()))
    nbytes = n * FORMATS[kind].row_bytes(k)
    copies = max(math.ceil(COLD_BYTES / nbytes), 2)
    sets = [(ways(random_blocks(kind, (n, k), "cuda"), make.dtype), make.randn(m, k))]
    weight = QuantizedTensor(sets[0][0]["door"].weight.data, kind)
    for name, way in sets[0][0].items():
        check(f"{row} {name}", way, sets[0][1], weight)
    for _ in range(copies - 1):
        sets.append((ways(random_blocks(kind, (n, k), "cuda"), make.dtype), make.randn(m, k)))
    times = {}
    for name in sets[0][0]:
        calls = [{"way": each[name], "x": x} for each, x in sets]
        times[name] = (
            eager_us(_call, calls, *EAGER_TIMES) if name in EAGER else device_us(_call, calls)
        )
    shown = "  ".join(
        f"{name} {us:.2f}{' (eager)' if name in EAGER else ''}" for name, us in times.items()
    )
    print(f"{row:<32} {shown}", flush=True)
    ours = times.pop("planes")
    return Row(row, ours, "us", peers=times, code=code_of(row, arch_here()) or "")


def _call(way: Way, x: Tensor) -> Tensor:
    return way(x)


def meta_call(row: str) -> Callable[[], Tensor] | None:
    """The converted module's product, on meta tensors; None for a row of another bench."""
    match = ROW.fullmatch(row)
    if match is None or match[1] not in SPREAD:
        return None
    n, k, m = (int(match[i]) for i in (2, 3, 4))
    weight = random_blocks(match[1], (n, k), "meta").in_planes()
    x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    return lambda: meta_backend().gemm_quant(x, weight.blocks, weight.kind)


def shape_of(text: str) -> tuple[int, int]:
    """(rows, columns) of ``"14336x4096"``."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no ROWSxCOLUMNS")
    return int(match[1]), int(match[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", choices=SPREAD, default=("Q4_K", "Q6_K"))
    parser.add_argument("--shapes", nargs="*", type=shape_of, default=[shape_of(s) for s in SHAPES])
    parser.add_argument("--tokens", nargs="*", type=int, default=(1, 8, 64), metavar="N")
    parser.add_argument("--seconds", type=float, help="begin no further row after so long")
    add_options(parser)
    options = parser.parse_args()
    start = time.monotonic()
    cases = list(product(options.kinds, options.shapes, options.tokens))
    rows = [f"{kind}/n{n}k{k}/m{m}" for kind, (n, k), m in cases]
    rows = [f"convert/{row}" for row in rows] + [
        f"gemm_quant/{case_name(kind)}/n{n}k{k}/m{m}"
        for kind, (n, k), m in cases
        if m <= MAX_GEMV_ROWS
    ]
    for line in compile_all([partial(launches_of, row, arch_here()) for row in rows]):
        print(f"does not compile: {line}")
    for kind, (n, k), m in cases:
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"stopped after {options.seconds:.0f} s")
            break
        row = measure(kind, n, k, m)
        if options.json:
            save_rows(options.json, [row], options.commit, options.dirty)


if __name__ == "__main__":
    main()
