"""Kernels in Gluon under stress, on a Hopper: drawn calls held to references, or launched for long.

    python -m tests.soak --count 2000 --seed N [--shard 1/4]
    python -m tests.soak --minutes 8 --seed N [--shard 1/4]

The first draws configurations of every op that has such kernels, each with a launch choice in Gluon
that fits, holds it against the op's reference in float64 under the tests' tolerances, and runs it
again, which has to give the same bits. One that fails is named with how to run it alone, ``--only
NAME``. The second does so with a pool of calls, and then launches them in random order, many in
flight, on one stream and on two, by themselves and in graphs: each output has to have the bits of
the call's first.

With ``--backend interpret`` the first runs without a GPU, in the emulator, over smaller calls.

What fails or differs is told, and the status is 1; of what hangs it is 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.precompile import compile_all, spare_processes
from ferrum_triton import get_backend
from ferrum_triton.backends import Backend
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.jit import note_launches
from ferrum_triton.testing import TWO_PRODUCTS
from tests import attention_twins, packed_twins
from tests.harness import assert_call_matches, bits, clone, expected, has_minimums
from tests.soak_axes import LARGE, SMALL, Arguments, Limits
from tests.soak_draws import Drawn, draws, launches_gluon, launches_of, named, served_ops
from tests.soak_streams import Soak, pool, share_of
from tests.test_attention_fuzz import is_lse
from tests.watchdog import Watchdog

NOT_SERVED = "launches no kernel in Gluon"
# Factor on the tests' bounds. They are of results in the thousands. Of the millions of a call here
# the largest are products of a gate and of up that both have a large error, of weights rounded to
# 16 bits. Rounding alone came to 1.1 times the bound of float16: Q4_0's, 7,936 a row, rounded by
# ``.half()`` and multiplied in float64 by torch.
TAILS = 2.0


@dataclass
class Tally:
    """What came of configurations.

    Attributes:
        ops: configurations by op.
        compared: those of which a kernel in Gluon was launched and what it gave was compared.
        failed: names of those that failed.
    """

    ops: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    failed: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        by_op = ", ".join(f"{name} {count}" for name, count in self.ops.items())
        compared, failed = f"{self.compared} compared", f"{len(self.failed)} failed"
        return f"{self.ops.total()} configurations, {compared}, {failed}: {by_op}"


def scale_of(drawn: Drawn, call: Arguments) -> float:
    """The factor on the tests' bounds for a call."""
    scale = TAILS
    # Codes whose zero is a product of its own are rounded before it is taken off. Of gate and up of
    # Q4_0, 2,560 a row, the largest error was 3.3 times the tests' bound so, and 1.2 times it with
    # the zero taken off first: torch in float64, of weights and sums that ``.half()`` rounded, for
    # ``--seed 3 --only add_rms_norm_quant_gate_up_silu/6/3``.
    is_apart = drawn.config.get("sums_offsets", False) and not has_minimums(call)
    if is_apart and "gate_up" in drawn.op.name:
        scale *= TWO_PRODUCTS
    if drawn.op.name == "gemv_quant_moe_id_sum":
        scale *= error_of_sums(call["ids"], call["weights"], len(call["blocks"]))
    return scale


def error_of_sums(ids: Tensor, weights: Tensor, num_experts: int) -> float:
    """The largest error of a token's sum over slots, where that of each product is 1.

    Experts' weights are rounded to 16 bits, so that a token's slots with one expert have the same
    error. Of eight slots of Q4_K, 1,536 a row, the largest error was 4.5 times the tests' bound:
    torch in float64, of minimums and weights that ``.half()`` rounded, for ``--seed 3 --only
    gemv_quant_moe_id_sum/0/5``.
    """
    experts = torch.arange(num_experts, device=ids.device)
    of_experts = ((ids[:, :, None] == experts) * weights[:, :, None].double()).sum(1)
    return max(1.0, of_experts.norm(dim=1).max().item())


def fault_of(drawn: Drawn, backend: Backend) -> str:
    """What is wrong with a call; "" if nothing is."""
    op, call = drawn.op, drawn.build(backend.device)
    again, (want, left) = clone(call), expected(op, call)
    with drawn.forced(backend.device):
        with note_launches(runs=True) as launches:
            found = drawn.results(backend, call)
        is_served = launches_gluon(launches)
        repeated = drawn.results(backend, again)
    if not is_served:
        return NOT_SERVED
    lse = left.pop("lse", None)
    if lse is not None and not is_lse(call["lse"], lse):
        return "its lse is not the reference's"
    try:
        assert_call_matches(op, tuple(found[: len(want)]), call, want, left, scale_of(drawn, call))
    except AssertionError as error:
        return " ".join(str(error).split())
    same = all(torch.equal(bits(x), bits(y)) for x, y in zip(found, repeated, strict=True))
    return "" if same else "a second run gives other bits"


def fuzz(calls: Iterable[Drawn], backend: Backend, again: str, watchdog: Watchdog) -> Tally:
    """Hold calls against their references, and tell of those that fail.

    Args:
        again: the command that runs one alone, up to its name.
    """
    tally = Tally()
    for drawn in calls:
        watchdog.expect([drawn.name])
        tally.ops[drawn.op.name] += 1
        try:
            fault = fault_of(drawn, backend)
            tally.compared += fault != NOT_SERVED
            torch.cuda.empty_cache()  # other parts share the GPU
        except Exception as error:  # of whatever kind: the others are still to be run
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault:
            tally.failed.add(drawn.name)
            about = f"{drawn.about}; {dict(drawn.config)}"
            print(f"{again} {drawn.name}: {fault[:400]} [{about}]", flush=True)
            if is_lost(backend):
                print("the GPU answers no more; what was left has not been run")
                break
    watchdog.rest()
    return tally


def is_lost(backend: Backend) -> bool:
    """Whether an error of a kernel has ended this process's use of the GPU."""
    try:
        torch.cuda.empty_cache()
        torch.ones(1, device=backend.device).item()
    except RuntimeError:
        return True
    return False


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("ops", nargs="*", help="(default: all with a kernel in Gluon)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--count", type=int, help="configurations to hold against references")
    what.add_argument("--only", metavar="NAME", help="the one configuration of that name")
    what.add_argument("--minutes", type=float, help="how long to launch the calls of a pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1", help="which part: 1/4 to 4/4")
    parser.add_argument("--pool", type=int, default=80, help="calls that are launched for long")
    parser.add_argument("--hang", type=float, default=180, help="seconds that make a hang")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "interpret"))
    options = parser.parse_args(arguments)
    if options.backend == "interpret" and options.minutes is not None:
        parser.error("only a GPU has streams")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    backend, limits = get_backend(options.backend), LARGE
    part, parts = map(int, options.shard.split("/"))
    if options.backend == "interpret":
        packed_twins.register()
        attention_twins.register()
        limits = SMALL
    elif not serves(gpu_of(backend.device)):
        print("needs a Hopper, and a Triton that kernels in Gluon were tested with")
        return 1
    seed = options.seed
    names = options.ops or served_ops()
    if options.minutes is not None:
        own, number = share_of(names, part, parts)
        calls = pool(own, seed, options.pool, number)
    elif options.only:
        calls = [named(options.only, seed, limits)]
    else:
        calls = list(draws(names, seed, options.count, limits, part, parts))
    compile_ahead(calls, seed, limits, parts)
    again = f"python -m tests.soak --seed {seed} --backend {options.backend} --only"
    start = time.monotonic()
    with Watchdog(options.hang) as watchdog:
        tally = fuzz(calls, backend, again, watchdog)
        print(tally, flush=True)
        if options.minutes is None:
            return int(bool(tally.failed))
        print(f"compared in {time.monotonic() - start:.0f} s", flush=True)
        sound = [drawn for drawn in calls if drawn.name not in tally.failed]
        with Soak(sound, backend, seed, watchdog) as run:
            run.launch_for(60 * options.minutes)
    print(run)
    return int(bool(tally.failed) or run.differences > 0)


def compile_ahead(calls: Sequence[Drawn], seed: int, limits: Limits, parts: int) -> None:
    """Compile what calls launch on as many cores as this part has."""
    start = time.monotonic()
    recorders = [partial(launches_of, drawn.name, seed, limits) for drawn in calls]
    for line in compile_all(recorders, max(spare_processes() // parts, 1)):
        print(f"does not compile: {line}")
    print(f"{len(calls)} calls, compiled in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
