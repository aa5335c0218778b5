"""Compiles what benches will launch, in several processes, into Triton's cache.

A first call compiles for seconds on one core while the GPU waits; with a core for each launch a
hundred cases are ready in the time of the slowest.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from ferrum_triton.kernels.ahead import compile_key
from ferrum_triton.kernels.jit import Launch
from ferrum_triton.kernels.sources import hash_source

# A function of a module with its arguments, so that another process can call it again.
Recorder = Callable[[], list[Launch]]
# Fewer launches are compiled sooner than other processes have started.
FEWEST = 4


def spare_processes() -> int:
    """Cores to compile on beside the process that asks."""
    return max((os.cpu_count() or 2) - 2, 1)


def compile_all(recorders: Sequence[Recorder], processes: int | None = None) -> list[str]:
    """Compile every launch once for the GPU of this machine; a line for each failure."""
    if not torch.cuda.is_available():
        return []
    jobs = different(recorders)
    if len(jobs) < FEWEST:
        return []
    count = min(processes or spare_processes(), len(jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return [line for line in pool.map(_compile, jobs) if line]


def different(recorders: Sequence[Recorder]) -> list[partial[Launch]]:
    """One call for each launch that has machine code of its own."""
    found: dict[tuple, partial[Launch]] = {}
    for recorder in recorders:
        try:
            launches = recorder()
        except Exception:  # its case fails in the same way, and is reported by its name
            continue
        for i, launch in enumerate(launches):
            found.setdefault(compile_key(launch), partial(_nth, recorder, i))
    return list(found.values())


def _nth(recorder: Recorder, i: int) -> Launch:
    return recorder()[i]


def _compile(job: Callable[[], Launch]) -> str:
    launch = job()
    try:
        hash_source(launch.kernel.jit)  # a launch asks Triton's cache by this hash
        launch.kernel.jit.warmup(*launch.args, grid=launch.grid, **launch.meta)
    except Exception as error:  # as above
        first = (str(error).splitlines() or [""])[0]
        return f"{launch.kernel.name}: {type(error).__name__}: {first[:100]}"
    return ""
