"""Times an op's candidate configurations on this GPU and writes the winners down.

    python -m bench.tune OP [OP ...] [--case SUBSTRING] [--out DIRECTORY]

For each bench case every candidate is compiled; what does not compile, spills or wants more shared
memory than there is, is dropped. The others are checked against the reference and timed with a cold
cache. A winner is written only if it beats the heuristic by more than the noise, in a second
measurement of both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from bench.results import environment
from bench.run import check
from bench.timing import copies_of, device_us
from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.kernels.gpu import Gpu, gpu_of
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.kernels.tuning import TUNABLES, Config
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory

TUNED = Path(__file__).parent.parent / "ferrum_triton" / "tuned"

# A gain smaller than this is noise, and not worth an entry.
LEAST_GAIN = 0.02


def main() -> None:
    get_backend("cuda")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+", choices=sorted(TUNABLES), metavar="OP")
    parser.add_argument("--case", default="", help="only cases whose id contains this")
    parser.add_argument("--out", type=Path, default=TUNED)
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")
    options = parser.parse_args()
    arch = this_gpu().arch
    for name in options.ops:
        entries = [
            entry
            for case in OPS[name].bench
            if options.case in case.id and (entry := tune(OPS[name], case)) is not None
        ]
        if entries:
            file = options.out / name / f"{arch}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            table = {"measured": environment(options.commit), "rows": entries}
            file.write_text(json.dumps(table, indent=1) + "\n")
            print(f"wrote {file.name} of {name} with {len(entries)} entries")


def this_gpu() -> Gpu:
    """The GPU measured on."""
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def tune(op: Op, case: Case) -> dict[str, Any] | None:
    """The winner's entry for one case, or None if nothing beats the heuristic."""
    tunable = TUNABLES[op.name]
    door = getattr(get_backend("cuda"), op.name)
    arguments = op.make_sample(TensorFactory(case.dtype, "cuda"), **case.axes)
    shape = [*tunable.shape_of(case.axes)]
    gpu = this_gpu()
    default = dict(tunable.heuristic(gpu, *shape))

    times: list[tuple[float, Config]] = []
    sets: list[dict[str, Any]] = []
    for candidate in [default, *tunable.candidates(gpu, *shape)]:
        with tunable.forced(candidate):
            if reason := too_large(op, case):
                print(f"  {dict(candidate)}: dropped, {reason}")
                continue
            try:
                outputs = check(op, door, arguments)
            except FerrumError as error:
                print(f"  {dict(candidate)}: dropped, {str(error).splitlines()[0][:80]}")
                continue
            sets = sets or copies_of(arguments, op.bytes_moved(arguments, outputs))
            times.append((device_us(door, sets), candidate))
    times.sort(key=lambda entry: entry[0])
    for us, candidate in times[:4]:
        print(f"  {us:9.2f} us {dict(candidate)}")
    best = dict(times[0][1])
    again = {}
    for label, candidate in (("default", default), ("best", best)):
        with tunable.forced(candidate):
            again[label] = device_us(door, sets)
    gain = again["default"] / again["best"] - 1
    verdict = "kept" if gain > LEAST_GAIN else "within noise"
    print(f"{op.name}/{case.id}: {again['default']:.2f} -> {again['best']:.2f} us, {verdict}")
    if gain <= LEAST_GAIN:
        return None
    measured = dict(zip(tunable.dims, shape, strict=True))
    return {"shape": measured, "config": best, "us": again["best"], "default_us": again["default"]}


def too_large(op: Op, case: Case) -> str | None:
    """Why the launches of a case cannot be worth timing, from compiling them; None if they can."""
    target = TARGETS[this_gpu().arch]
    sample = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with record_launches(target.capability) as launches:
        op.impls["triton"](**sample)
    for launch in launches:
        try:
            used = compile_launch(launch, target)
        except (TritonError, RuntimeError) as error:
            return f"{launch.kernel.name} does not compile: {str(error).splitlines()[0][:80]}"
        if used.spilled:
            return f"{launch.kernel.name} spills {used.spilled} bytes"
        if used.shared > target.shared_limit:
            return f"{launch.kernel.name} wants {used.shared} bytes of shared memory"
    return None


if __name__ == "__main__":
    main()
