"""Products with packed weights beside llama.cpp's, as its own benchmark timed them on this GPU.

    test-backend-ops perf -o MUL_MAT -b CUDA0 > perf.txt
    python -m bench.llama_cpp perf.txt [--kinds q4_K ...] [--keep FILE] [--json FILE]

Each matrix of a type known here, by llama.cpp's float32 activations, is held against the product
of the same size with bfloat16 activations: packed types in planes where they have them and else as
files store them, f16 and bf16 through :func:`gemm`. Types without an op here are named and left
out. Its benchmark multiplies by the same weights again and again, so those that fit stay in the
cache; here none do, and products of few tokens are timed behind a norm. ``--keep`` stores the lines
read, so that the table can be made again from ``bench/results/``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.cases import DENSE, Declared, dense_product, launches_of
from bench.launches import arch_here
from bench.precompile import compile_all
from bench.results import add_options, save_rows
from bench.run import measure
from ferrum_triton import OPS
from ferrum_triton.ops.quant import product_case
from ferrum_triton.quant import FORMATS
from ferrum_triton.quant.planes import PLANE_FORMATS, SUFFIX

KIND_OF = {kind.lower(): kind for kind in FORMATS}
# MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n=8,k=14336,bs=[1,1],..): 852 runs - 30.12 us/run - ..
TIMED = re.compile(
    r"MUL_MAT\(type_a=(\w+),type_b=f32,m=(\d+),n=(\d+),k=(\d+),bs=\[1,1\].*?([\d.]+) us/run"
)


class Timed(NamedTuple):
    """A product of m activations with W [n, k], as llama.cpp timed it.

    Attributes:
        type: W's type in llama.cpp's spelling, in lower case.
    """

    type: str
    m: int
    n: int
    k: int
    us: float


def timed_products(lines: Iterable[str]) -> list[Timed]:
    """The products in what test-backend-ops printed. It calls W's rows m, and activations n."""
    found = []
    for line in lines:
        if match := TIMED.search(line):
            rows, tokens, columns = (int(match[i]) for i in (2, 3, 4))
            found.append(Timed(match[1].lower(), tokens, rows, columns, float(match[5])))
    return found


def ours(product: Timed) -> Declared | None:
    """The op and case of the same product, or None for a type without one."""
    _, m, n, k, _ = product
    if product.type in DENSE:
        return dense_product(product.type, m, n, k)
    kind = KIND_OF.get(product.type)
    if kind is None:
        return None
    kind = kind + SUFFIX if kind + SUFFIX in PLANE_FORMATS else kind
    return Declared(OPS["gemv_quant" if m == 1 else "gemm_quant"], product_case(kind, m, n, k))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timings", type=Path, help="what test-backend-ops perf printed")
    parser.add_argument("--kinds", nargs="*", type=str.lower, metavar="KIND", help="only these")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="store the lines read there")
    add_options(parser)
    options = parser.parse_args()
    lines = options.timings.read_text().splitlines()
    if options.keep:
        options.keep.parent.mkdir(parents=True, exist_ok=True)
        options.keep.write_text("\n".join(line for line in lines if TIMED.search(line)) + "\n")
    products = timed_products(lines)
    if options.kinds is not None:
        if absent := set(options.kinds) - {product.type for product in products}:
            parser.error(f"no timings of {', '.join(sorted(absent))}")
        products = [product for product in products if product.type in options.kinds]
    cases = [(product, ours(product)) for product in products]
    rows = [case.id for _, case in cases if case is not None]
    compile_all([partial(launches_of, row, arch_here()) for row in rows])
    compared = behind = 0
    for product, case in cases:
        if case is None:
            print(f"{product.type} n{product.n}k{product.k} m{product.m}: no op here has the type")
            continue
        row = replace(measure(case.op, case.case), peers={"llama.cpp": product.us})
        print(f"{'':<64} {product.us:9.2f} us in llama.cpp, {product.us / row.value:.2f} times")
        compared += 1
        behind += product.us < row.value
        if options.json:
            save_rows(options.json, [row], options.commit, options.dirty)
    print(f"{compared - behind} of {compared} products at or ahead of llama.cpp")


if __name__ == "__main__":
    main()
