"""Calls of ``python -m tests.soak``, each with a launch choice in Gluon that a Hopper can launch.

A call is drawn on meta tensors first, which need no GPU: they tell what launchers choose between,
and whether the choice leads to a kernel in Gluon or to the plain one after all. A call that it does
not lead to one is drawn again. A group of ``ALIKE`` calls has one format, dtype and choice, and
other sizes, since compiling takes longest.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.launches import ARCH, meta_backend, record
from ferrum_triton import OPS, InputError
from ferrum_triton.backends import Backend
from ferrum_triton.kernels.gluon import GluonKernel
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper_config import is_gluon
from ferrum_triton.kernels.jit import Launch
from ferrum_triton.kernels.parameters import Config, Dim
from ferrum_triton.kernels.tuning import Pick, Tunable, record_picks
from ferrum_triton.registry import Op
from tests.harness import as_tuple, tensors
from tests.soak_axes import LARGE, Arguments, Limits, draw_call, is_known
from tests.test_attention_fuzz import ALIKE

# Draws of a group, and of one of its calls, before the next is tried.
MOST_GROUPS, MOST_CALLS = 400, 20

Option = tuple[Tunable, tuple[Dim, ...], Config]


@dataclass(frozen=True)
class Drawn:
    """One call and its launch choice.

    Attributes:
        name: by which its seed draws it again: op/group/member.
        op: the op.
        build: makes its arguments on a device.
        tunable: the launch choice that is forced.
        shape: what it is forced for.
        config: to what.
        about: what was drawn, in words.
    """

    name: str
    op: Op
    build: Callable[[torch.device | str], Arguments]
    tunable: Tunable
    shape: tuple[Dim, ...]
    config: Config
    about: str

    def forced(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Have the op launch what was drawn.

        The interpreter asks for choices by other facts, such as whether a GPU multiplies codes, so
        that there every shape has this one.
        """
        return self.tunable.forced(self.config, self.shape if device.type == "cuda" else None)

    def results(self, backend: Backend, call: Arguments) -> list[Tensor]:
        """What a call gives, and what it leaves in its arguments."""
        got = as_tuple(getattr(backend, self.op.name)(**call))
        return [*got, *(call[name] for name in self.op.mutates if call[name] is not None)]


def draws(
    names: Sequence[str], seed: int, count: int, limits: Limits, part: int = 1, parts: int = 1
) -> Iterator[Drawn]:
    """``count`` calls, ops in turn by groups, of whose groups ``part`` of ``parts`` are given."""
    for i in range(part - 1, -(-count // ALIKE), parts):
        number, place = divmod(i, len(names))
        size = min(count - ALIKE * i, ALIKE)
        yield from group(OPS[names[place]], seed, number, limits)[:size]


def named(name: str, seed: int, limits: Limits = LARGE) -> Drawn:
    """The call that has a name."""
    op, number, member = name.split("/")
    return group(OPS[op], seed, int(number), limits)[int(member)]


@functools.lru_cache(64)
def group(op: Op, seed: int, number: int, limits: Limits = LARGE) -> list[Drawn]:
    """Calls of one format, dtype and choice."""
    for attempt in range(MOST_GROUPS):
        found = _alike(op, f"{seed}/{op.name}/{number}/{attempt}", limits)
        if len(found) == ALIKE:
            name = f"{op.name}/{number}"
            return [replace(each, name=f"{name}/{i}") for i, each in enumerate(found)]
    raise LookupError(f"{MOST_GROUPS} draws of {op.name} launch no kernel in Gluon")


@functools.cache
def served_ops() -> tuple[str, ...]:
    """Ops of which some drawn call launches a kernel in Gluon."""
    meta_backend()  # which has the kernels declared
    drawn = (op for op in OPS.values() if "triton" in op.impls and is_known(op))
    return tuple(op.name for op in drawn if any(_draw(op, f"{n}", "", LARGE) for n in range(200)))


def operations(op: Op, call: Arguments) -> int:
    """Operations of a call on meta tensors, of pages as many as if all sequences had all keys."""
    if "cu_seqlens_q" in call:
        block_size = max(call["k_cache"].shape[1:3])  # pages have more slots than heads
        keys = call["block_tables"].shape[1] * block_size
        return 4 * call["q"].numel() * keys
    return op.operations(call) or 0


def launches_of(name: str, seed: int, limits: Limits = LARGE) -> list[Launch]:
    """What the call of a name launches, for another process to compile."""
    drawn = named(name, seed, limits)
    with drawn.tunable.forced(drawn.config, drawn.shape):
        return _launches(drawn.op, drawn.build("meta"))


def gluon_options(picks: Iterable[Pick]) -> list[Option]:
    """Launch choices in Gluon that a Hopper can have in the place of those made."""
    gpu = gpu_of_arch(ARCH)
    return [
        (pick.tunable, pick.shape, config)
        for pick in picks
        for config in pick.tunable.candidates(gpu, *pick.shape)
        if is_gluon(config) and not pick.tunable.refusal(gpu, config, *pick.shape)
    ]


def launches_gluon(launches: Iterable[Launch]) -> bool:
    """Whether one of the launches is of a kernel in Gluon."""
    return any(isinstance(launch.kernel, GluonKernel) for launch in launches)


def _alike(op: Op, key: str, limits: Limits) -> list[Drawn]:
    """The calls of a group, each another one, as far as draws find any."""
    found: list[Drawn] = []
    for member in range(ALIKE):
        tries = (_draw(op, key, f"{member}/{n}", limits) for n in range(MOST_CALLS))
        known = {each.about for each in found}
        drawn = next((each for each in tries if each and each.about not in known), None)
        if drawn is None:
            break
        found.append(drawn)
    return found


def _draw(op: Op, key: str, member: str, limits: Limits) -> Drawn | None:
    """A call, or None of one that is too large, or refused, or no kernel in Gluon's."""
    made = draw_call(op, key, member, limits)
    if made is None:
        return None
    build, about = made
    call = build("meta")
    largest = max(tensor.numel() for tensor in tensors(call).values())
    if largest > limits.elements or operations(op, call) > limits.operations:
        return None
    try:
        for rule in op.shape_rules:
            rule(**call)
    except InputError:
        return None
    launched = functools.partial(_launches, op, call)
    with record_picks() as picks:
        launched()
    options = gluon_options(picks)
    if not options:
        return None
    # By the same share of the options, calls of a group mostly have the same one.
    tunable, shape, config = options[int(random.Random(f"{key}/config").random() * len(options))]
    with tunable.forced(config, shape):
        is_served = launches_gluon(launched())
    return Drawn("", op, build, tunable, shape, config, about) if is_served else None


def _launches(op: Op, call: Arguments) -> list[Launch]:
    """What a call on meta tensors would launch on a Hopper."""
    return record(lambda: getattr(meta_backend(), op.name)(**call)).launches
