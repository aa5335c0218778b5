"""Which code stands behind a row: the case of an op, or a bench that composes ops."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from typing import NamedTuple

import torch

from bench.fingerprint import fingerprint
from bench.launches import ARCH, Recorded, record, record_case
from ferrum_triton.kernels.jit import Launch
from ferrum_triton.ops.quant import case_name, product_case
from ferrum_triton.quant.kinds import KINDS
from ferrum_triton.registry import OPS, Case, Op

# Benches whose rows are the time of a composition: each has a function ``meta_call(row id)``.
COMPOSED = ("moe_layer", "cascade", "decode_layer", "decode", "convert")
# Rows of bench.compile_time: this, the arch, and the row that times the case.
COMPILE_TIME = "compile_time"
# A product of a size that no case declares, as bench.llama_cpp times them.
PRODUCT = re.compile(r"(gemv_quant|gemm_quant|gemm)/(.+)/n(\d+)k(\d+)/m(\d+)")
KIND_NAMES = {case_name(kind): kind for kind in KINDS}
DENSE = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class Declared(NamedTuple):
    """A bench case and its op."""

    op: Op
    case: Case

    @property
    def id(self) -> str:
        """The id of the row."""
        return f"{self.case.op or self.op.name}/{self.case.id}"


@functools.cache
def declared() -> dict[str, Declared]:
    """Every case an op declares, by the id of its row."""
    cases = [Declared(op, case) for op in OPS.values() for case in op.bench]
    return {case.id: case for case in cases}


def case_of(row: str) -> Declared | None:
    """The case behind a row, or None for a row of no op."""
    if row in declared():
        return declared()[row]
    match = PRODUCT.fullmatch(row)
    if match is None:
        return None
    n, k, m = (int(match[i]) for i in (3, 4, 5))
    if match[1] == "gemm":
        return dense_product(match[2], m, n, k) if match[2] in DENSE else None
    if match[2] not in KIND_NAMES:
        return None
    return Declared(OPS[match[1]], product_case(KIND_NAMES[match[2]], m, n, k))


def dense_product(dtype: str, m: int, n: int, k: int) -> Declared:
    """m rows of activations by a dense W [n, k]."""
    case = Case(f"{dtype}/n{n}k{k}/m{m}", DENSE[dtype], {"m": m, "n": n, "k": k})
    return Declared(OPS["gemm"], case)


def recorded(row: str, arch: str = ARCH) -> Recorded | None:
    """What the call behind a row launches, or None where nothing tells its call."""
    if row.startswith(f"{COMPILE_TIME}/"):
        row = row.split("/", 2)[2]
    found = case_of(row)
    if found is not None:
        return record_case(found.op, found.case, arch)
    for name in COMPOSED:
        call = import_module(f"bench.{name}").meta_call(row)
        if call is not None:
            return record(call, arch)
    return None


def launches_of(row: str, arch: str = ARCH) -> list[Launch]:
    """Triton's launches of the call behind a row."""
    found = recorded(row, arch)
    return [] if found is None else found.launches


def code_of(row: str, arch: str = ARCH) -> str | None:
    """The fingerprint of the code behind a row today, or None where nothing tells it."""
    found = recorded(row, arch)
    return None if found is None else fingerprint(found, arch)
