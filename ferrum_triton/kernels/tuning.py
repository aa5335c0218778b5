"""Launch choices: measured rows of a table, and a plain heuristic where none is near.

A :class:`Tunable` chooses the launches of one op. ``python -m bench.tune`` times its candidates on
a GPU; the best go to a table file, which :mod:`ferrum_triton.kernels.tables` reads.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from ferrum_triton.kernels import tables
from ferrum_triton.kernels.gpu import Gpu, gpu_of
from ferrum_triton.kernels.hopper_config import is_gluon, serves
from ferrum_triton.kernels.jit import forget_replays
from ferrum_triton.kernels.parameters import OPTIONS, Config, Dim, Parameter, gpu_refusal, one_of
from ferrum_triton.kernels.tables import BadTable, Row, quoted

TUNABLES: dict[str, Tunable] = {}

# The ratio that an integer of a measured shape may have to the one asked for.
MAX_RATIO = 2.0
MAX_PICKED = 4096


@dataclass(frozen=True)
class Pick:
    """One choice that was made.

    Attributes:
        tunable: the choice of the op.
        shape: the dimensions asked for.
        config: the configuration.
        row: the row of a table that gave the configuration; None where the heuristic did.
    """

    tunable: Tunable
    shape: tuple[Dim, ...]
    config: Config
    row: Row | None


_picks: ContextVar[list[Pick] | None] = ContextVar("ferrum_picks", default=None)
_made_of_picks: list[Callable[[], None]] = []


def cached_picks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``lru_cache`` for a function that asks ``pick``: forgotten with the choices it was made of.

    A plain cache would hide a forced configuration from ``bench.tune``. The function's arguments
    have to hold what its choices depend on: the device, and for meta tensors the GPU.
    """
    cached = functools.lru_cache(MAX_PICKED)(fn)
    _made_of_picks.append(cached.cache_clear)
    return cached


class Tunable:
    """How one op's launches are configured.

    Args:
        op: the op's name.
        dims: names of the dimensions a configuration depends on. An integer is measured by its
            ratio to another; a string or a bool has to be equal.
        heuristic: a function of the GPU and the dimensions; it gives the configuration where
            nothing was measured.
        candidates: a function of the GPU and the dimensions; it gives the configurations worth
            timing.
        fits: a function of the GPU, a configuration and the dimensions; it gives the reason why
            the configuration cannot be launched, "" if it can. A row serves only shapes it fits.
        within: the largest ratio of a measured integer to the one asked for, by dimension; 2 where
            none is given, 1 where it has to be equal.
        parameters: the values that a row of a table may give each parameter. A parameter that is
            not declared may have the values of the heuristic and the candidates. Compiler options
            are declared already.
    """

    def __init__(
        self,
        op: str,
        dims: Sequence[str],
        heuristic: Callable[..., Config],
        candidates: Callable[..., Sequence[Config]],
        fits: Callable[..., str] | None = None,
        within: Mapping[str, float] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.op, self.dims = op, tuple(dims)
        self.heuristic, self.candidates = heuristic, candidates
        self.fits = fits or (lambda gpu, config, *shape: "")
        self.ratios = [(within or {}).get(name, MAX_RATIO) for name in self.dims]
        self.parameters = OPTIONS | dict(parameters or {})
        self._picked: dict[tuple, Config] = {}
        self._tables: dict[tuple[Gpu, bool], list[Row]] = {}
        self._forced: dict[tuple[Dim, ...] | None, Config] = {}
        TUNABLES[op] = self

    def pick(self, device: torch.device, *shape: Dim) -> Config:
        """The configuration for a shape, given in the order of ``dims``."""
        found = self._picked.get((device, *shape))
        return self._resolve(device, shape) if found is None else found

    def _resolve(self, device: torch.device, shape: tuple[Dim, ...]) -> Config:
        gpu = gpu_of(device)
        # Meta tensors stand for another GPU in every recording.
        key = (gpu if device.type == "meta" else device, *shape)
        found = self._picked.get(key)
        if found is None:
            if len(self._picked) >= MAX_PICKED:
                self._picked.clear()
            pick = self._choose(gpu, shape, with_users=device.type == "cuda")
            found = self._picked[key] = pick.config
            if (picks := _picks.get()) is not None:
                picks.append(pick)
        return found

    def _choose(self, gpu: Gpu, shape: tuple[Dim, ...], with_users: bool) -> Pick:
        forced = self._forced.get(shape, self._forced.get(None))
        if forced is not None:
            return Pick(self, shape, forced, None)
        near = [
            (away, row)
            for row in self.rows(gpu, with_users)
            if (away := self.distance(row.shape, shape)) < math.inf
        ]
        for _, row in sorted(near, key=lambda pair: pair[0]):
            if not self.refusal(gpu, row.config, *shape):
                return Pick(self, shape, row.config, row)
        return Pick(self, shape, self.heuristic(gpu, *shape), None)

    def distance(self, measured: Sequence[Dim], asked: Sequence[Dim]) -> float:
        """The sum of the dimensions' distances, in powers of e; infinite where one is too far."""
        total = 0.0
        for a, b, most in zip(measured, asked, self.ratios, strict=True):
            if type(a) is int and type(b) is int:
                low, high = sorted((max(a, 1), max(b, 1)))
                if high > most * low:
                    return math.inf
                total += math.log(high / low)
            elif a != b or type(a) is not type(b):
                return math.inf
        return total

    def refusal(self, gpu: Gpu, config: Config, *shape: Dim) -> str:
        """Why ``config`` cannot be launched on a GPU for a shape, or ""."""
        for name, value in config.items():
            if name in self.parameters and (reason := self.parameters[name].refusal(value)):
                return f"{name} is {quoted(value)}, {reason}"
        return gpu_refusal(gpu, config) or self.fits(gpu, config, *shape)

    def rows(self, gpu: Gpu, with_users: bool = False) -> list[Row]:
        """The rows measured on a GPU's architecture that can be launched, read once.

        Args:
            gpu: the GPU.
            with_users: whether the user's own tables are read too, before those shipped.
        """
        key = (gpu, with_users)
        if key not in self._tables:
            directories = [tables.user_directory()] if with_users else []
            self._tables[key] = [
                row
                for directory in (*directories, tables.SHIPPED)
                if directory is not None
                for row in self.read(tables.table_file(directory, self.op, gpu.arch), gpu)
            ]
        return self._tables[key]

    def read(self, file: Path, gpu: Gpu) -> list[Row]:
        """The rows of a table that can be launched for the shapes they were measured for.

        What is wrong with the others is logged in one line a file. Rows of kernels in Gluon are
        left out without a word where those do not serve, as they are meant to be.
        """
        try:
            numbered, reasons = tables.read_rows(file, self.op, gpu.arch, self.dims)
        except BadTable as error:
            tables.tell(file, f"ignored, {error}")
            return []
        rows = []
        for number, row in numbered:
            if is_gluon(row.config) and not serves(gpu):
                continue
            try:
                reason = self.outdated(gpu, row) or self.refusal(gpu, row.config, *row.shape)
            except Exception as error:  # a heuristic has no answer for a shape that cannot be
                reason = f"its shape is not one of {self.op}'s: {quoted(str(error))}"
            if reason:
                reasons.append(f"row {number}: {reason}")
            else:
                rows.append(row)
        if reasons:
            total = len(rows) + len(reasons)
            tables.tell(file, f"{len(reasons)} of {total} rows ignored; the first, {reasons[0]}")
        return rows

    def outdated(self, gpu: Gpu, row: Row) -> str:
        """Why ``row`` is not a configuration of this version of the op, or ""."""
        known = [self.heuristic(gpu, *row.shape), *self.candidates(gpu, *row.shape)]
        same_path = [config for config in known if config.get("path") == row.config.get("path")]
        if not same_path:
            return f"its path is {quoted(row.config.get('path'))}, which {self.op} has not"
        if not any(config.keys() == row.config.keys() for config in same_path):
            names = sorted({quoted(n) for n in row.config.keys() ^ same_path[0].keys()})
            return f"its parameters are of another version: {', '.join(names)[:80]}"
        for name, value in row.config.items():
            values = dict.fromkeys(config[name] for config in same_path if name in config)
            if name not in self.parameters and (reason := one_of(*values).refusal(value)):
                return f"{name} is {quoted(value)}, {reason}"
        return ""

    @contextlib.contextmanager
    def forced(self, config: Config, shape: tuple[Dim, ...] | None = None) -> Iterator[None]:
        """Use ``config`` inside the block, for one shape or for every: how candidates are timed."""
        before, self._forced = self._forced, self._forced | {shape: config}
        self._choose_anew()
        try:
            yield
        finally:
            self._forced = before
            self._choose_anew()

    def forget(self) -> None:
        """Choose anew, from the tables as they are now."""
        self._tables.clear()
        self._choose_anew()

    def _choose_anew(self) -> None:
        """Forget what was chosen, and the plans and calls whose launches were chosen so."""
        self._picked.clear()
        forget_replays()
        for forget in _made_of_picks:
            forget()

    def triton_configs(self, gpu: Gpu, *shape: Dim) -> list[triton.Config]:
        """The candidates for a shape, as ``triton.autotune`` takes them."""
        options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
        return [
            triton.Config(
                {k: v for k, v in candidate.items() if k not in options},
                **{k: v for k, v in candidate.items() if k in options},
            )
            for candidate in self.candidates(gpu, *shape)
        ]


@contextlib.contextmanager
def record_picks() -> Iterator[list[Pick]]:
    """Collect the choices made inside the block, each shape's once."""
    for tunable in TUNABLES.values():
        tunable._choose_anew()
    picks: list[Pick] = []
    token = _picks.set(picks)
    try:
        yield picks
    finally:
        _picks.reset(token)
