"""How long the launches of every op's bench cases take to compile, without a GPU.

    python -m bench.compile_time [OP ...] [--case TEXT] [--arch sm_90] [--seconds N] [--json FILE]

Each launch is compiled once, from its Python source to machine code, into an empty Triton cache;
cases that share machine code share its figure. Seconds are of processor time, the assembler's
included: a compilation is one thread, so they are what it takes on a machine with nothing else to
do. A row ``compile_time/<arch>/<op>/<case>`` is the sum of a case's launches, which is what its
first call waits for. The slowest launches are printed in the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from triton import knobs

from bench.cases import COMPILE_TIME, declared, recorded
from bench.fingerprint import fingerprint
from bench.launches import ARCH
from bench.results import Row, add_options, save_rows
from ferrum_triton import OPS
from ferrum_triton.kernels.ahead import compile_key
from ferrum_triton.kernels.jit import Launch
from ferrum_triton.kernels.resources import TARGETS, Target, compile_launch


class Compiler:
    """Compiles each launch once for a target.

    Attributes:
        seconds: what each launch took, by what its machine code depends on.
        first: the case and kernel that each stands for.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[tuple, float] = {}
        self.first: dict[tuple, str] = {}

    def took(self, launch: Launch, row: str) -> float:
        """Seconds that compiling a launch takes."""
        key = compile_key(launch)
        if key not in self.seconds:
            start = _processor_seconds()
            compile_launch(launch, self.target)
            self.seconds[key] = _processor_seconds() - start
            self.first[key] = f"{launch.kernel.name} of {row}"
        return self.seconds[key]

    def slowest(self, count: int) -> list[tuple[float, str]]:
        """Seconds, kernel and case of the launches that took longest."""
        order = sorted(self.seconds.items(), key=lambda item: -item[1])
        return [(seconds, self.first[key]) for key, seconds in order[:count]]


def _processor_seconds() -> float:
    """Of this process and those it waited for."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="(default: all)")
    parser.add_argument("--case", default="", help="only cases whose id contains this")
    parser.add_argument("--arch", choices=TARGETS, default=ARCH)
    parser.add_argument("--seconds", type=float, help="begin no further case after so long")
    parser.add_argument("--top", type=int, default=20, help="launches printed in the end")
    add_options(parser)
    options = parser.parse_args()
    start = time.monotonic()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}")
    compiler = Compiler(TARGETS[options.arch])
    with tempfile.TemporaryDirectory() as directory:
        knobs.cache.dir = directory
        for case in declared().values():
            if case.op.name not in (options.ops or OPS) or options.case not in case.id:
                continue
            if options.seconds is not None and time.monotonic() - start > options.seconds:
                print(f"stopped after {options.seconds:.0f} s")
                break
            found = recorded(case.id, options.arch)
            if found is None or not found.launches:
                continue
            seconds = sum(compiler.took(launch, case.id) for launch in found.launches)
            print(f"{case.id:<64} {seconds:7.2f} s in {len(found.launches)} launches", flush=True)
            code = fingerprint(found, options.arch)
            row = Row(f"{COMPILE_TIME}/{options.arch}/{case.id}", seconds, "s", code=code)
            if options.json:
                save_rows(options.json, [row], options.commit, options.dirty)
    total = sum(compiler.seconds.values())
    print(f"{len(compiler.seconds)} different launches in {total:.0f} s; the slowest:")
    for seconds, name in compiler.slowest(options.top):
        print(f"{seconds:7.2f} s  {name}")


if __name__ == "__main__":
    main()
