"""Products with packed weights beside llama.cpp's, as its own benchmark timed them on this GPU.

    test-backend-ops perf -o MUL_MAT -b CUDA0 > perf.txt
    python -m bench.llama_cpp perf.txt [--kinds q4_K ...] [--json FILE]

Each line of a packed matrix and up to MOST_TOKENS float32 activations is held against the product
of the same size here, with weights in planes and bfloat16 activations. Its benchmark multiplies by
the same weights again and again, so those that fit stay in the cache; here none do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.results import save_rows
from bench.run import measure
from ferrum_triton import OPS
from ferrum_triton.ops.quant import product_case
from ferrum_triton.quant import FORMATS
from ferrum_triton.quant.planes import PLANE_FORMATS

MOST_TOKENS = 64
KIND_OF = {kind.lower(): kind for kind in FORMATS}
# MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n=8,k=14336,bs=[1,1],..): 852 runs - 30.12 us/run - ..
TIMED = re.compile(
    r"MUL_MAT\(type_a=(\w+),type_b=f32,m=(\d+),n=(\d+),k=(\d+),bs=\[1,1\].*?([\d.]+) us/run"
)


class Timed(NamedTuple):
    """A product of m activations with W [n, k], as llama.cpp timed it."""

    kind: str
    m: int
    n: int
    k: int
    us: float


def timed_products(lines: Iterable[str]) -> list[Timed]:
    """Those of packed kinds that have planes. llama.cpp calls W's rows m, and activations n."""
    found = []
    for line in lines:
        if (match := TIMED.search(line)) is None:
            continue
        kind = KIND_OF.get(match[1].lower())
        rows, tokens, columns = (int(match[i]) for i in (2, 3, 4))
        if kind is not None and f"{kind}:planes" in PLANE_FORMATS and tokens <= MOST_TOKENS:
            found.append(Timed(f"{kind}:planes", tokens, rows, columns, float(match[5])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timings", help="what test-backend-ops perf printed")
    parser.add_argument(
        "--kinds",
        nargs="*",
        type=str.lower,
        choices=sorted(KIND_OF),
        default=sorted(KIND_OF),
        metavar="KIND",
        help="only these, as q4_K",
    )
    parser.add_argument("--json", help="put the rows into this result file")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    options = parser.parse_args()
    kinds = {f"{KIND_OF[kind]}:planes" for kind in options.kinds}
    products = timed_products(Path(options.timings).read_text().splitlines())
    products = [product for product in products if product.kind in kinds]
    behind = 0
    for product in products:
        op = OPS["gemv_quant" if product.m == 1 else "gemm_quant"]
        case = product_case(product.kind, product.m, product.n, product.k)
        row = replace(measure(op, case, []), peers={"llama.cpp": product.us})
        print(f"{'':<64} {product.us:9.2f} us in llama.cpp, {product.us / row.value:.2f} times")
        behind += product.us < row.value
        if options.json:
            save_rows(options.json, [row], options.commit)
    print(f"{len(products) - behind} of {len(products)} products at or ahead of llama.cpp")


if __name__ == "__main__":
    main()
