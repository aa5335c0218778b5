"""Times launches inside a whole decode step and writes the best ones down.

    python -m bench.tune_step [MODEL] [--formats q4_K] [--batches 1 8 32] [--context 1024]
                              [--only OP ...] [--ship | --out DIRECTORY]

A launch that is fastest by itself may not be in a step: programs of the launches before and after
it share the SMs with it. So each choice that a step asks for is tried in the captured step of a
model of known shape and random weights, one after the other, those found before it in place. A
candidate stays if it takes at least LEAST_GAIN off the step, twice; its row has the times of the
step. :mod:`bench.tune` comes first: it measures every shape, and its rows are what is improved on.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from triton.errors import TritonError

from bench.random_models import CONFIGS, FORMATS_OF_MODELS, random_model
from bench.results import environment
from bench.shipped import first_line
from bench.timed_step import TimedStep, replay_us
from bench.tune import Machine, add_place, candidates_of, place_of, spell, this_machine
from ferrum_triton import FerrumError, get_backend
from ferrum_triton.kernels import tables
from ferrum_triton.kernels.parameters import Config, Dim
from ferrum_triton.kernels.tables import Row
from ferrum_triton.kernels.tuning import Pick, Tunable, record_picks

# A share of a step that two measurements of one step do not differ by.
LEAST_GAIN = 0.0015
# How far logits may be apart by another order of summing, as a share of their size.
MOST_APART = 0.1

Choice = tuple[Tunable, tuple[Dim, ...]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="qwen3-8b", choices=CONFIGS)
    parser.add_argument("--formats", nargs="*", choices=FORMATS_OF_MODELS, default=("q4_K",))
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 8, 32), metavar="N")
    parser.add_argument("--context", type=int, default=1024, metavar="N")
    parser.add_argument("--only", nargs="*", default=(), metavar="OP", help="choices to try")
    add_place(parser)
    options = parser.parse_args(arguments)
    machine = this_machine()
    out = place_of(parser, options, options.only)
    versions = {name: str(value) for name, value in environment(options.commit).items()}
    for form in options.formats:
        model = random_model(options.model, form, get_backend(machine.backend))
        for batch in options.batches:
            name = f"{options.model} --formats {form} --batches {batch}"
            print(f"{name} --context {options.context}", flush=True)
            command = f"python -m bench.tune_step {name} --context {options.context}"
            command += " --only " * bool(options.only) + " ".join(options.only)
            step = TunedStep(model, batch, options.context)
            for tunable, row in improve(step, machine, set(options.only)):
                measured = {"command": command, **versions}
                write(out, tunable, machine, replace(row, measured=measured))


class TunedStep(TimedStep):
    """A step whose launches are chosen anew."""

    def picks(self) -> list[Pick]:
        """The choices that the step asks for."""
        with record_picks() as picks:
            self.logits()
        return picks

    def time(self) -> float:
        """Microseconds of the step with the choices as they are now."""
        return replay_us(self.logits)

    def differs(self, expected: Tensor) -> str:
        """Why the logits are not those expected, or ""."""
        error = (self.logits() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        return "" if error < MOST_APART else f"logits are {float(error):.3g} off"


@torch.inference_mode()
def improve(step: TunedStep, machine: Machine, names: set[str]) -> Iterator[tuple[Tunable, Row]]:
    """Rows of the choices that another candidate is better for; prints what it does."""
    start = time.monotonic()
    expected = step.logits()
    plan = {
        (pick.tunable, pick.shape): pick.config
        for pick in step.picks()
        if not names or pick.tunable.op in names
    }
    others = {choice: other_candidates(*choice, now, machine) for choice, now in plan.items()}
    compiled = compile_all(step, others)
    print(f"  {compiled} kernels compiled in {spell(time.monotonic() - start)}", flush=True)
    count = 0
    with contextlib.ExitStack() as found:
        for (tunable, shape), now in plan.items():
            before = step.time()
            times = []
            for candidate in others[tunable, shape]:
                with tunable.forced(candidate, shape):
                    us, reason = time_checked(step, expected)
                if reason:
                    print(f"  {tunable.op} {dict(candidate)}: dropped, {reason}")
                else:
                    times.append((us, candidate))
            if not times:
                continue
            after, best = min(times, key=lambda pair: pair[0])
            with tunable.forced(best, shape):
                after = max(after, step.time())
            before = min(before, step.time())
            gain = before / after - 1
            if gain > LEAST_GAIN:
                found.enter_context(tunable.forced(best, shape))
            verdict = f"kept {dict(best)}" if gain > LEAST_GAIN else f"{dict(now)} stays"
            print(f"  {tunable.op} {shape}: {gain:+.2%}, {verdict}", flush=True)
            if gain > LEAST_GAIN:
                count += 1
                yield tunable, Row(shape, dict(best), round(after, 3), round(before, 3))
        took = spell(time.monotonic() - start)
        print(f"  {step.time():.1f} us a step, {count} rows, {took}", flush=True)
    print(f"  {step.time():.1f} us before", flush=True)


def time_checked(step: TunedStep, expected: Tensor) -> tuple[float, str]:
    """Microseconds of the step, and why the candidate is dropped, or ""."""
    try:
        reason = step.differs(expected)
        return (0.0, reason) if reason else (step.time(), "")
    except (FerrumError, TritonError, RuntimeError) as error:
        return 0.0, first_line(error)


def other_candidates(
    tunable: Tunable, shape: tuple[Dim, ...], now: Config, machine: Machine
) -> list[Config]:
    """Candidates that fit, but for the one in use."""
    return [
        config
        for config in candidates_of(tunable, shape, machine.gpu)
        if config != now and not tunable.refusal(machine.gpu, config, *shape)
    ]


def compile_all(step: TunedStep, others: dict[Choice, list[Config]]) -> int:
    """Compile what candidates launch on all cores, and say how many kernels that were."""

    def every_step() -> None:
        for (tunable, shape), candidates in others.items():
            for candidate in candidates:
                with tunable.forced(candidate, shape), contextlib.suppress(FerrumError):
                    step.logits()

    try:
        return step.model.backend.compile_ahead(every_step)
    except (TritonError, RuntimeError) as error:  # the candidate is dropped when it is tried
        print(f"  {first_line(error)}")
        return 0


def write(out: Path, tunable: Tunable, machine: Machine, row: Row) -> None:
    """Put a row into its table, in place of one of the same shape."""
    file = tables.table_file(out, tunable.op, machine.gpu.arch)
    rows = {other.shape: other for other in tunable.read(file, machine.gpu)} | {row.shape: row}
    tables.write_rows(file, tunable.op, machine.gpu.arch, tunable.dims, rows.values())


if __name__ == "__main__":
    main()
