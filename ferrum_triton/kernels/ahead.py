"""Compiling ahead: what a step would launch, on all cores at once, before it runs.

A first call compiles its kernels one after the other, seconds each. Here the step's launches are
noted without running, and those without machine code are compiled by threads: Triton compiles
outside of Python's lock. Their launchers are loaded one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor
from triton.compiler import make_backend
from triton.runtime import cache, driver

from ferrum_triton.kernels.compiled import LOADING
from ferrum_triton.kernels.jit import Launch, note_launches
from ferrum_triton.kernels.machine_code import refuse_wrong_code
from ferrum_triton.kernels.sources import hash_source

Progress = Callable[[int, int], None]


def compile_key(launch: Launch) -> tuple:
    """What the machine code of a launch depends on: launches of one key share it."""

    def specialised(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, tuple):
            return tuple(specialised(part) for part in value)
        if type(value) is int:
            return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
        if hasattr(value, "block_shape"):  # a host tensor descriptor
            return value.base.dtype, *value.block_shape
        return value if value is None else type(value)

    meta = tuple(sorted((name, repr(value)) for name, value in launch.meta.items()))
    return launch.kernel.name, meta, tuple(specialised(value) for value in launch.args)


def compile_ahead(step: Callable[[], object], progress: Progress | None = None) -> int:
    """Compile what a step would launch, and say how many kernels that were.

    Args:
        step: calls ops; its kernels do not run, so what it returns means nothing.
        progress: a function called with the numbers of kernels compiled and to compile.
    """
    with note_launches(runs=False) as launches:
        step()
    wanted = {compile_key(launch): launch for launch in launches}
    missing = [launch for launch in wanted.values() if not _is_compiled(launch)]
    if not missing:
        return 0
    if progress is not None:
        progress(0, len(missing))
    device = torch.cuda.current_device()
    _hash_triton()
    for launch in missing:
        hash_source(launch.kernel.jit)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, len(missing))) as pool:
        jobs = [pool.submit(_compile, launch, device) for launch in missing]
        for done, job in enumerate(as_completed(jobs), start=1):
            job.result()
            if progress is not None:
                progress(done, len(missing))
    return len(missing)


def _is_compiled(launch: Launch) -> bool:
    return launch.kernel.find(launch.grid, *launch.args, **launch.meta) is not None


def _hash_triton() -> None:
    """Have Triton compute once what its cache's keys have in common.

    It keeps what it computed, but threads that all ask first would each compute it: the assembler's
    version, which is a process to start, and a hash of its own library of 0.4 GB. One thread takes
    0.6 s for the hash and sixteen take 3.9 s on two cores, in a new process each:
    ``ThreadPoolExecutor(n).map(lambda _: triton.runtime.cache.triton_key(), range(n))``.
    """
    if hasattr(cache, "triton_key"):
        cache.triton_key()
    make_backend(driver.active.get_current_target()).hash()


def _compile(launch: Launch, device: int) -> None:
    """Compile a launch's kernel, build its launcher in C and load both, as its first call would."""
    with torch.cuda.device(device):
        compiled = launch.kernel.jit.warmup(*launch.args, grid=launch.grid, **launch.meta)
        if compiled is not None:
            refuse_wrong_code(compiled, launch.kernel.name)
            with LOADING:
                _ = compiled.run
