"""Times the candidate launches of ops on this GPU and writes the best ones down.

    python -m bench.tune [OP ...] [--case TEXT] [--path NAME] [--again] [--ship | --out DIRECTORY]

Every shape that a bench case asks a launch choice for is one measurement. All candidates are
compiled first, in as many processes as there are cores; what does not compile, takes more shared
memory than there is or spills, as :func:`ferrum_triton.kernels.sass.usage` counts, is dropped. The
others are checked against the reference and timed with a cold cache, products of few tokens behind
a norm (:mod:`bench.behind`). The best one and the heuristic's are timed again in turns, and a gain
within the noise leaves the heuristic's in place. A table is written after each shape, so a run that
was stopped goes on where it was: shapes measured with the same GPU, torch and triton are skipped.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from bench.behind import time_call
from bench.precompile import compile_all
from bench.results import environment
from bench.run import check
from bench.shipped import compile_refusal, first_line, picks_of
from bench.timing import copies_of
from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.kernels import tables
from ferrum_triton.kernels.gpu import Gpu, gpu_of
from ferrum_triton.kernels.jit import Launch, record_launches
from ferrum_triton.kernels.parameters import Config, Dim
from ferrum_triton.kernels.resources import TARGETS, Target
from ferrum_triton.kernels.sass import usage
from ferrum_triton.kernels.tables import BadTable, Row
from ferrum_triton.kernels.tuning import TUNABLES, Tunable
from ferrum_triton.registry import Case, Op
from ferrum_triton.testing import TensorFactory, assert_close

# A gain smaller than this is noise, even if times agree better.
LEAST_GAIN = 0.02
# How often the best launch and the heuristic's are timed again, one after the other.
TURNS = 3
# What a measurement was made with, as far as another need not be made.
VERSIONS = ("torch", "triton", "gpu")


@dataclass(frozen=True)
class Machine:
    """What is measured on.

    Attributes:
        backend: name of the backend whose ops are called.
        gpu: the GPU that launches are chosen for.
        target: the GPU as the compiler knows it.
    """

    backend: str
    gpu: Gpu
    target: Target


@dataclass(frozen=True)
class Job:
    """One shape of one launch choice.

    Attributes:
        tunable: the choice.
        shape: the shape.
        calls: the bench cases that ask for it; their times are added.
        path: the candidates that are timed beside what is chosen today; "": all.
    """

    tunable: Tunable
    shape: tuple[Dim, ...]
    calls: tuple[tuple[Op, Case], ...]
    path: str = ""

    def __str__(self) -> str:
        dims = zip(self.tunable.dims, self.shape, strict=True)
        return f"{self.tunable.op} {' '.join(f'{name}={value}' for name, value in dims)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="(default: all with a choice)")
    parser.add_argument("--case", default="", help="only cases whose op/id contains this")
    parser.add_argument("--path", default="", help="only candidates of this path, beside today's")
    parser.add_argument("--again", action="store_true", help="measure what has been measured too")
    add_place(parser)
    options = parser.parse_args(arguments)
    machine = this_machine()
    out = place_of(parser, options, options.ops)
    versions = environment(options.commit)
    print(f"finding shapes for {machine.gpu.arch}; tables go to {out}", flush=True)
    jobs = find_jobs(set(options.ops) or set(TUNABLES), options.case, machine.gpu, options.path)
    move_bad_tables(jobs, out, machine.gpu)
    run_jobs(jobs, machine, out, versions, options.again)


def add_place(parser: argparse.ArgumentParser) -> None:
    """The options that say where tables go, and what was measured."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--ship", action="store_true", help="write to the package's own tables")
    place.add_argument("--out", type=Path, help="write there (default: this user's tables)")
    parser.add_argument("--commit", help="the commit measured, where there is no git to ask")


def place_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, ops: Sequence[str]
) -> Path:
    """The directory that tables go to, made; ends with a usage error if it or an op is none."""
    if unknown := set(ops) - set(TUNABLES):
        known = ", ".join(sorted(TUNABLES))
        parser.error(f"no launch choice: {', '.join(sorted(unknown))}; there are {known}")
    out = tables.SHIPPED if options.ship else options.out or tables.user_directory()
    if out is None:
        parser.error("there is no home directory to write to; name one with --out")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        parser.error(f"{out} cannot be written")
    return out


def this_machine() -> Machine:
    """The current CUDA device."""
    get_backend("cuda")
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    return Machine("cuda", gpu, target_of(gpu))


def target_of(gpu: Gpu) -> Target:
    """What to compile for, on GPUs without an entry in ``TARGETS`` too."""
    if gpu.arch in TARGETS:
        return TARGETS[gpu.arch]
    if gpu.capability == (0, 0):
        return Target(GPUTarget("hip", gpu.arch, gpu.warp_size), gpu.shared_limit, gpu.capability)
    number = int(gpu.arch.removeprefix("sm_"))
    return Target(GPUTarget("cuda", number, gpu.warp_size), gpu.shared_limit, gpu.capability)


def find_jobs(names: set[str], text: str, gpu: Gpu, path: str = "") -> list[Job]:
    """The shapes that bench cases ask the named choices for, and that a path has candidates for."""
    found: dict[tuple[str, tuple[Dim, ...]], list[tuple[Op, Case]]] = {}
    for op in OPS.values():
        for case in op.bench if "triton" in op.impls else ():
            if text not in f"{op.name}/{case.id}":
                continue
            for pick in picks_of(op, case, gpu.capability):
                if pick.tunable.op in names:
                    found.setdefault((pick.tunable.op, pick.shape), []).append((op, case))
    jobs = [
        Job(TUNABLES[name], shape, tuple(calls), path) for (name, shape), calls in found.items()
    ]
    return [job for job in jobs if not path or has_path(job, gpu)]


def has_path(job: Job, gpu: Gpu) -> bool:
    """Whether there is a candidate of the path that is asked for."""
    return any(c.get("path") == job.path for c in job.tunable.candidates(gpu, *job.shape))


def move_bad_tables(jobs: Sequence[Job], out: Path, gpu: Gpu) -> None:
    """Put aside what is in a table's place and is none, rather than write over it."""
    for tunable in dict.fromkeys(job.tunable for job in jobs):
        file = tables.table_file(out, tunable.op, gpu.arch)
        try:
            tables.read_rows(file, tunable.op, gpu.arch, tunable.dims)
        except BadTable as error:
            aside = file.with_name(f"{file.name}.bad")
            file.replace(aside)
            print(f"{file}: {error}; moved to {aside.name}")


def run_jobs(
    jobs: Sequence[Job], machine: Machine, out: Path, versions: dict[str, str], again: bool
) -> None:
    """Measure each shape, and write its table before the next."""
    gpu = machine.gpu
    work = [len(candidates_of(job.tunable, job.shape, gpu, job.path)) for job in jobs]
    start, done, skipped = time.monotonic(), 0, 0
    recorders = [
        partial(launches_with, job.tunable.op, dict(config), op.name, case.id, gpu.capability)
        for job in jobs
        for config in candidates_of(job.tunable, job.shape, gpu, job.path)
        for op, case in job.calls
    ]
    compile_all(recorders)
    took = spell(time.monotonic() - start)
    print(f"{sum(work)} candidates of {len(jobs)} shapes compiled in {took}", flush=True)
    for i, job in enumerate(jobs):
        tunable = job.tunable
        file = tables.table_file(out, tunable.op, gpu.arch)
        rows = {row.shape: row for row in tunable.read(file, gpu)}
        if not again and is_measured(rows.get(job.shape), versions):
            skipped += 1
            continue
        elapsed = time.monotonic() - start
        left = f", about {spell(elapsed / done * sum(work[i:]))} left" if done else ""
        print(f"[{i + 1}/{len(jobs)}] {job}, {work[i]} candidates, {spell(elapsed)}{left}")
        try:
            row = tune(job, machine, versions)
        except torch.OutOfMemoryError:
            print("  left out: its tensors do not fit this GPU's memory")
            row = None
        done += work[i]
        if row is not None:
            rows[job.shape] = row
            tables.write_rows(file, tunable.op, gpu.arch, tunable.dims, rows.values())
    print(f"{len(jobs) - skipped} shapes in {spell(time.monotonic() - start)}, {skipped} skipped")


def launches_with(
    choice: str, config: Config, op_name: str, case_id: str, capability: tuple[int, int]
) -> list[Launch]:
    """What a bench case launches with one configuration of a choice."""
    op = OPS[op_name]
    case = next(case for case in op.bench if case.id == case_id)
    sample = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    with TUNABLES[choice].forced(config), record_launches(capability) as launches:
        op.impls["triton"](**sample)
    return launches


def is_measured(row: Row | None, versions: dict[str, str]) -> bool:
    """Whether ``row`` was measured with the versions there are."""
    return row is not None and all(
        row.measured.get(name) == versions.get(name) for name in VERSIONS
    )


def spell(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def candidates_of(
    tunable: Tunable, shape: tuple[Dim, ...], gpu: Gpu, path: str = ""
) -> list[Config]:
    """The heuristic's configuration, what tables say, and the candidates (of a path): each once."""
    measured = [
        row.config
        for row in tunable.rows(gpu, with_users=True)
        if tunable.distance(row.shape, shape) == 0
    ]
    tried = [c for c in tunable.candidates(gpu, *shape) if path in ("", c.get("path"))]
    every = [tunable.heuristic(gpu, *shape), *measured, *tried]
    return list({tuple(sorted(config.items())): config for config in every}.values())


def tune(job: Job, machine: Machine, versions: dict[str, str]) -> Row | None:
    """The best configuration for one shape; None if nothing could be measured."""
    bench = Bench(job, machine)
    default, *others = candidates_of(job.tunable, job.shape, machine.gpu, job.path)
    times = []
    for candidate in (default, *others):
        us = bench.time_checked(candidate, must_run=candidate is default)
        if us is not None:
            times.append((us, candidate))
    if not times:
        print("  nothing runs")
        return None
    for us, candidate in sorted(times, key=lambda pair: pair[0])[:4]:
        print(f"  {us:9.2f} us {dict(candidate)}")
    best = min(times, key=lambda pair: pair[0])[1]
    if all(candidate is not default for _, candidate in times):
        us, default_us, gain = bench.time(best), None, "the heuristic's does not run"
    else:
        turns = sorted(in_turns(bench, best, default), key=lambda turn: turn.gain)
        middle, noise = turns[TURNS // 2], max(LEAST_GAIN, turns[-1].gain - turns[0].gain)
        us, default_us = middle
        gain = f"{middle.gain:+.1%}, noise {noise:.1%}"
        if middle.gain <= noise:
            best, us = default, default_us
    verdict = "the heuristic stays" if best is default else "kept"
    print(f"  {gain}: {verdict}, {us:.2f} us {dict(best)}", flush=True)
    cases = f" --case {job.calls[0][0].name}/{job.calls[0][1].id}"
    cases += f" --path {job.path}" if job.path else ""
    command = {"command": f"python -m bench.tune {job.tunable.op}{cases}"}
    slower = None if default_us is None else round(default_us, 3)
    measured = command | {name: str(value) for name, value in versions.items()}
    return Row(job.shape, dict(best), round(us, 3), slower, measured)


class Turn(NamedTuple):
    """Microseconds of the best launch and of the heuristic's, timed one after the other."""

    us: float
    default_us: float

    @property
    def gain(self) -> float:
        """How much longer the heuristic's takes, as a share of the best one's time."""
        return self.default_us / self.us - 1


def in_turns(bench: Bench, best: Config, default: Config) -> list[Turn]:
    """Both timed again, several times.

    A GPU slows down as it grows warm: what is timed first seems faster than what is timed last.
    Gate and up of experts in bfloat16 by 4,096 tokens took 467 us first and 520 last
    (``python -m bench.tune gemm_moe_id_gate_up --case m4096`` on an H200, 3f1036f).
    """
    return [Turn(bench.time(best), bench.time(default)) for _ in range(TURNS)]


class Bench:
    """The calls of one job, ready to be timed with any configuration."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        backend = get_backend(machine.backend)
        self.calls = [getattr(backend, op.name) for op, _ in job.calls]
        self.arguments = [
            op.make_sample(TensorFactory(case.dtype, backend.device), **case.axes)
            for op, case in job.calls
        ]
        # What was checked against the references, and copies of the arguments to time with.
        self.outputs: list[tuple[torch.Tensor, ...]] = []
        self.sets: list[list[dict[str, Any]]] = []

    def time_checked(self, candidate: Config, must_run: bool = False) -> float | None:
        """Microseconds with ``candidate``; None, and a line why, if it is dropped.

        Args:
            candidate: the configuration.
            must_run: whether it is timed although it spills, since that is what runs now.
        """
        job = self.job
        reason = job.tunable.refusal(self.machine.gpu, candidate, *job.shape)
        try:
            with job.tunable.forced(candidate):
                reason = reason or ("" if must_run else self._unfit()) or self._wrong()
            if not reason:
                return self.time(candidate)
        except Exception as error:
            error.add_note(f"while {job} was timed with {dict(candidate)}")
            raise
        print(f"  {dict(candidate)}: dropped, {reason}")
        return None

    def _unfit(self) -> str:
        """Why the compiled launches cannot be worth timing, or ""."""
        if self.machine.backend != "cuda":
            reasons = (
                compile_refusal(op, case, self.machine.target) for op, case in self.job.calls
            )
            return next(filter(None, reasons), "")
        for op, case in self.job.calls:
            sample = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
            with record_launches(self.machine.gpu.capability) as launches:
                op.impls["triton"](**sample)
            for launch in launches:
                try:
                    used = launch.kernel.jit.warmup(*launch.args, grid=launch.grid, **launch.meta)
                    used._init_handles()
                except (TritonError, RuntimeError) as error:
                    return f"{launch.kernel.name}: {first_line(error)}"
                if used.n_spills and (spilled := usage(used.asm["cubin"]).spilled):
                    return f"{launch.kernel.name} spills {spilled} bytes"
        return ""

    def _wrong(self) -> str:
        """Why the calls do not compute what the references do, or ""."""
        for i, ((op, _), call, arguments) in enumerate(
            zip(self.job.calls, self.calls, self.arguments, strict=True)
        ):
            try:
                if i < len(self.outputs) and not op.mutates:
                    self._differ(call(**arguments), self.outputs[i])
                    continue
                outputs = check(op, call, arguments)
            except (AssertionError, FerrumError, TritonError) as error:
                return first_line(error)
            if i == len(self.outputs):
                self.outputs.append(outputs)
                self.sets.append(copies_of(arguments, op.bytes_moved(arguments, outputs)))
        return ""

    @staticmethod
    def _differ(got: Any, checked: tuple[torch.Tensor, ...]) -> None:
        """Raise unless a call gives what one that was held against the reference gave."""
        got = (got,) if isinstance(got, torch.Tensor) else tuple(got)
        for one, other in zip(got, checked, strict=True):
            assert_close(one, other, scale=2)

    def time(self, candidate: Config) -> float:
        """Microseconds of one call of each case."""
        with self.job.tunable.forced(candidate):
            backend = get_backend(self.machine.backend)
            every = zip(self.job.calls, self.calls, self.sets, strict=True)
            return sum(time_call(op, call, sets, backend).us for (op, _), call, sets in every)


if __name__ == "__main__":
    main()
