"""Launches: a kernel's programs, one after the other."""

from __future__ import annotations

import ast
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from ferrum_triton.gluon_emulator.assembly import known
from ferrum_triton.gluon_emulator.errors import Misuse
from ferrum_triton.gluon_emulator.ledger import Ledger
from ferrum_triton.gluon_emulator.schedule import Program, Scheduler
from ferrum_triton.gluon_emulator.tensors import Descriptor, Global
from ferrum_triton.gluon_emulator.twins import Twins
from ferrum_triton.gluon_emulator.values import to_value


@dataclass(frozen=True)
class Settings:
    """What holds for every program of a launch, and what they share."""

    name: str
    grid: tuple[int, ...]
    seed: int
    deadline: float
    num_warps: int
    strict: bool
    twins: Twins
    assembly: dict[Any, Callable]
    tensors: list[Global] = field(default_factory=list)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    bits: Iterator[int] = field(default_factory=itertools.count)


def run(
    kernel: JITFunction,
    grid: int | Sequence[int],
    args: Sequence[Any],
    constexprs: Mapping[str, Any],
    *,
    seed: int = 0,
    timeout: float = 10.0,
    num_warps: int = 4,
    assembly: Mapping[Any, Callable] | None = None,
    strict: bool = True,
    concurrent: int = 1,
    mutant: Any = None,
) -> None:
    """Execute a Gluon kernel on CPU tensors, and check that its accesses are synchronised.

    Args:
        kernel: a function that ``gluon.jit`` decorates.
        grid: how many programs; for a seed that is not 0 they run in an order drawn from it.
        args: the parameters that are not ``gl.constexpr``, in order: tensors, which stand for
            pointers and are written in place, host ``TensorDescriptor``, numbers, tuples of them.
        constexprs: the others, by name.
        seed: decides in which order partitions go on and asynchronous operations take effect.
        timeout: seconds that the launch may compute.
        num_warps: the kernel's warps, as a launch gives them. Where a kernel is specialised, they
            are its first partition's.
        assembly: Python twins of inline assembly, as :func:`twin_of` registers them, by its keys.
        strict: ask for what PTX asks for. Otherwise count on the barriers of a partition's threads
            that Triton 3.6 adds around fences and waits for copies, and take barriers that were
            initialised without a fence.
        concurrent: programs that run at a time; more than one for those that wait for another.
        mutant: a change of the kernel, from ``mutants``.

    Raises:
        EmulationError: the kernel is not right on a GPU, or uses what is not emulated.
    """
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    grid = (*grid, 1, 1)[:3]
    assembly = known(assembly)
    trees: dict[Any, ast.Module] = {} if mutant is None else {mutant.function: mutant.tree}
    settings = Settings(
        name=kernel.fn.__name__,
        grid=grid,
        seed=seed,
        deadline=time.process_time() + timeout,
        num_warps=num_warps,
        strict=strict,
        twins=Twins(assembly, trees),
        assembly=assembly,
    )
    bound = tuple(_bind(kernel, args, constexprs, settings))
    indices = list(itertools.product(*(range(size) for size in grid)))
    if seed:
        random.Random(seed).shuffle(indices)
    for first in range(0, len(indices), concurrent):
        together = indices[first : first + concurrent]
        scheduler = Scheduler(settings, together)
        programs = [Program(index, scheduler) for index in together]
        scheduler.run(programs, lambda: settings.twins.call(kernel, bound, {}))


def _bind(
    kernel: JITFunction, args: Sequence[Any], constexprs: Mapping[str, Any], settings: Settings
) -> list[Any]:
    rest, bound = list(args), []
    names = [each.name for each in kernel.params]
    unknown = set(constexprs) - set(names)
    for parameter in kernel.params:
        if parameter.name in constexprs:
            bound.append(constexprs[parameter.name])
        elif rest and not parameter.is_constexpr:
            bound.append(_argument(parameter.name, rest.pop(0), settings))
        elif parameter.has_default:
            bound.append(parameter.default)
        else:
            raise Misuse(f"{kernel.fn.__name__} lacks its argument {parameter.name}")
    if rest or unknown:
        raise Misuse(
            f"{kernel.fn.__name__} takes {names}; left over are {len(rest)} arguments and "
            f"{sorted(unknown)}"
        )
    return bound


def _argument(name: str, x: Any, settings: Settings) -> Any:
    if isinstance(x, tuple):
        fields = getattr(x, "_fields", range(len(x)))
        items = [
            _argument(f"{name}.{f}", each, settings) for f, each in zip(fields, x, strict=True)
        ]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, TensorDescriptor):
        base = _global(name, x.base, settings)
        return Descriptor(
            base, base.start, x.shape, x.strides, x.block_shape, base.dtype, x.layout, x.padding
        )
    if isinstance(x, Tensor):
        return _global(name, x, settings).pointer()
    return to_value(x) if isinstance(x, (bool, int, float)) else x


def _global(name: str, x: Tensor, settings: Settings) -> Global:
    storage = x.untyped_storage()
    place = storage.data_ptr() if x.is_cpu else 0
    ledger = settings.ledgers.setdefault(place, Ledger(storage.nbytes()))
    settings.tensors.append(Global(name, x.detach(), ledger))
    return settings.tensors[-1]
