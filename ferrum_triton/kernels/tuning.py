"""Launch choices: measured rows of a table, and a plain heuristic where none is near.

A :class:`Tunable` belongs to one op. Its candidates are what ``python -m bench.tune`` times on a
GPU; the winners go to ``ferrum_triton/tuned/<op>/<arch>.json``, which is read here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
import triton

from ferrum_triton.kernels.gpu import Gpu, gpu_of

Dim = int | str | bool
Config = Mapping[str, int | str | bool]
"""Constexprs and compiler options of a launch, e.g. ``{"BLOCK_H": 4096, "num_warps": 8}``.

An op that has several kernels names the one to launch under ``"path"``.
"""

TUNABLES: dict[str, Tunable] = {}

# The ratio an integer of a measured shape may have to the one asked for.
MAX_RATIO = 2.0
MAX_PICKED = 4096


def fits_any(gpu: Gpu, config: Config, *shape: Dim) -> str:
    """The check of a choice whose every configuration can be launched."""
    return ""


class Tunable:
    """How one op's launches are configured.

    Args:
        op: the op's name.
        dims: names of the dimensions a configuration depends on. An integer is measured by its
            ratio to another; a string or a bool has to be equal.
        heuristic: GPU and dimensions to a configuration, where nothing was measured.
        candidates: GPU and dimensions to the configurations worth timing.
        shape_of: axes of a bench case to dimensions, where these are not axes by name.
        fits: GPU, configuration and dimensions to the reason why it cannot be launched, "" if it
            can. Rows of tables pass it for the shape asked for.
    """

    def __init__(
        self,
        op: str,
        dims: Sequence[str],
        heuristic: Callable[..., Config],
        candidates: Callable[..., Sequence[Config]],
        shape_of: Callable[[Mapping[str, Any]], Sequence[Dim]] | None = None,
        fits: Callable[..., str] | None = None,
    ) -> None:
        self.op, self.dims = op, tuple(dims)
        self.heuristic, self.candidates = heuristic, candidates
        self.shape_of = shape_of or (lambda axes: [axes[name] for name in self.dims])
        self.fits = fits or fits_any
        self._picked: dict[tuple, Config] = {}
        self._forced: Config | None = None
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
            found = self._picked[key] = self._choose(gpu, shape)
        return found

    def _choose(self, gpu: Gpu, shape: tuple[Dim, ...]) -> Config:
        if self._forced is not None:
            return self._forced
        config = nearest(read_table(self.op, gpu.arch), self.dims, shape)
        if config is not None and not self.fits(gpu, config, *shape):
            return config
        return self.heuristic(gpu, *shape)

    @contextlib.contextmanager
    def forced(self, config: Config) -> Iterator[None]:
        """Use ``config`` for every shape inside the block: how candidates are timed."""
        before, self._forced = self._forced, config
        self._picked.clear()
        try:
            yield
        finally:
            self._forced = before
            self._picked.clear()

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


def read_table(op: str, arch: str) -> list[dict[str, Any]]:
    """The measured rows of an op, none where nothing was measured."""
    file = resources.files("ferrum_triton").joinpath("tuned", op, f"{arch}.json")
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def nearest(
    table: Sequence[Mapping[str, Any]], dims: Sequence[str], shape: Sequence[Dim]
) -> Config | None:
    """The configuration measured nearest to ``shape``, or None where none is near enough."""
    best, least = None, math.inf
    for row in table:
        away = distance([row["shape"][name] for name in dims], shape)
        if away < least:
            best, least = row["config"], away
    return best


def distance(measured: Sequence[Dim], asked: Sequence[Dim]) -> float:
    """The sum of the dimensions' distances, in powers of e; infinite where one is too far."""
    total = 0.0
    for a, b in zip(measured, asked, strict=True):
        if type(a) is int and type(b) is int:
            low, high = sorted((max(a, 1), max(b, 1)))
            total += math.log(high / low) if high <= MAX_RATIO * low else math.inf
        elif a != b or type(a) is not type(b):
            return math.inf
    return total
