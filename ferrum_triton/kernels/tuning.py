"""Launch configurations: measured ones from a table, a plain heuristic behind it.

A :class:`Tunable` belongs to one op. Its candidates are what ``python -m bench.tune`` times on a
GPU; the winners go to ``ferrum_triton/tuned/<op>/<arch>.json``, which is read here. An entry serves
the shapes that equal its own in every dimension but the first, the nearest first dimension (in
ratio) winning. Where there is no entry within a factor of two, the heuristic decides. Kernel
authors can hand the same candidates to ``triton.autotune`` through :meth:`Tunable.triton_configs`.
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

Config = Mapping[str, int]
"""Constexprs and compiler options of a launch, e.g. ``{"BLOCK_H": 4096, "num_warps": 8}``."""

TUNABLES: dict[str, Tunable] = {}

# How far, in ratio, the first dimension of a measured shape may be from the one asked for.
MAX_RATIO = 2.0
MAX_PICKED = 4096


class Tunable:
    """How one op's launches are configured.

    Args:
        op: the op's name.
        dims: names of the dimensions a configuration depends on, the one that varies first.
        heuristic: dimensions to configuration, where nothing was measured.
        candidates: dimensions to the configurations worth timing.
        shape_of: axes of a bench case to dimensions, where these are not axes by name.
    """

    def __init__(
        self,
        op: str,
        dims: Sequence[str],
        heuristic: Callable[..., Config],
        candidates: Callable[..., Sequence[Config]],
        shape_of: Callable[[Mapping[str, Any]], Sequence[int]] | None = None,
    ) -> None:
        self.op, self.dims = op, tuple(dims)
        self.heuristic, self.candidates = heuristic, candidates
        self.shape_of = shape_of or (lambda axes: [int(axes[name]) for name in self.dims])
        self._picked: dict[tuple, Config] = {}
        self._forced: Config | None = None
        TUNABLES[op] = self

    def pick(self, device: torch.device, *shape: int) -> Config:
        """The configuration for a shape, given in the order of ``dims``."""
        key = (device, *shape)
        found = self._picked.get(key)
        if found is None:
            if len(self._picked) >= MAX_PICKED:
                self._picked.clear()
            found = self._picked[key] = self._choose(device, shape)
        return found

    def _choose(self, device: torch.device, shape: tuple[int, ...]) -> Config:
        if self._forced is not None:
            return self._forced
        table = read_table(self.op, arch_of(device))
        return nearest(table, self.dims, shape) or self.heuristic(*shape)

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

    def triton_configs(self, *shape: int) -> list[triton.Config]:
        """The candidates for a shape, as ``triton.autotune`` takes them."""
        options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
        return [
            triton.Config(
                {k: v for k, v in candidate.items() if k not in options},
                **{k: v for k, v in candidate.items() if k in options},
            )
            for candidate in self.candidates(*shape)
        ]


def arch_of(device: torch.device) -> str | None:
    """``"sm_90"`` and the like; None for a device no table is about."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def read_table(op: str, arch: str | None) -> list[dict[str, Any]]:
    """The measured entries of an op, empty where nothing was measured."""
    if arch is None:
        return []
    file = resources.files("ferrum_triton").joinpath("tuned", op, f"{arch}.json")
    return json.loads(file.read_text())["entries"] if file.is_file() else []


def nearest(
    table: Sequence[Mapping[str, Any]], dims: Sequence[str], shape: Sequence[int]
) -> Config | None:
    """The configuration measured nearest to ``shape``, or None where none is near enough."""
    best, best_ratio = None, math.log(MAX_RATIO)
    for entry in table:
        measured = [entry["shape"][name] for name in dims]
        if measured[1:] == list(shape[1:]):
            ratio = abs(math.log(max(measured[0], 1) / max(shape[0], 1)))
            if ratio <= best_ratio:
                best, best_ratio = entry["config"], ratio
    return best
