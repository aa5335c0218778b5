"""The rotary embedding of a model, as its hyperparameters describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrum_triton.errors import FileError
from ferrum_triton.models.config_keys import Keys

_KINDS = ("default", "linear", "llama3", "yarn")
_READ = (
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "truncate",
)
# Parameters that are taken only at the value which they have by definition.
_FIXED = {"beta_fast": 32, "beta_slow": 1}
# What older files write beside the scaling, not in it.
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: angle = position · theta^(-2i/dim), then scaled.

    Attributes:
        theta: base of the wavelengths.
        dim: dimensions rotated, at most head_dim.
        interleaved: pairs are (2i, 2i + 1), as in GGUF's ``llama`` files, not (i, i + dim/2).
        kind: ``"default"``, ``"linear"`` (angles divided by factor), ``"llama3"`` (long
            wavelengths divided by factor, medium ones in part) or ``"yarn"`` with its published
            bounds.
        factor: the scaling's factor.
        low_freq_factor, high_freq_factor: bounds of llama3's ramp.
        original_positions: context length before llama3's or yarn's scaling.
        truncate: whether yarn's ramp is widened to whole pairs, as gpt-oss's is not.
    """

    theta: float
    dim: int
    interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    truncate: bool = True


def gguf_rope(
    keys: Keys, head_dim: int, theta: float, path: Path, interleaved: bool = False
) -> RopeConfig:
    """The rotary embedding of a GGUF file; ``theta`` is its base where the file has none."""
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise FileError(path, f"rope scaling {kind!r} is not supported; known: none, linear")
    return RopeConfig(
        theta=keys.number("rope.freq_base", theta),
        dim=keys.size("rope.dimension_count", head_dim),
        interleaved=interleaved,
        kind="linear" if kind == "linear" else "default",
        factor=keys.number("rope.scaling.factor", None if kind == "linear" else 1.0),
    )


def hf_rope(
    config: Mapping[str, Any], head_dim: int, path: Path, layer_type: str | None = None
) -> RopeConfig:
    """The rotary embedding of a Hugging Face ``config.json``, in each spelling there is.

    Older files have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters`` with both,
    or one such object for each type of layer: ``layer_type``'s is taken, or that of all layers.

    Raises:
        FileError: a parameter is unknown, unusable or not supported, or layers differ.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise FileError(path, f"rope parameters {scaling!r:.80} are no object")
    types = config.get("layer_types") if layer_type is None else [layer_type]
    scaling = _of_all_layers(scaling, types, path)
    for name, value in scaling.items():
        if name not in _READ and value not in (None, _FIXED.get(name)):
            raise FileError(path, f"rope parameter {name!r} of {value!r:.80} is not supported")
    beside = {name: config.get(name) for name in _BESIDE}
    keys = Keys(beside | {k: v for k, v in scaling.items() if v is not None}, path)
    kind = keys.text("rope_type", keys.text("type", "default"))
    if keys.text("type", kind) != kind:
        raise FileError(path, f"rope_type is {kind!r} and type {keys.text('type', '')!r}")
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise FileError(path, f"rope scaling {kind!r} is not supported; known: {known}")
    part = keys.number("partial_rotary_factor", 1.0)
    if not 0 < part <= 1:
        raise FileError(path, f"partial_rotary_factor is {part}, not above 0 and up to 1")
    ramp = kind == "llama3"
    stretched = kind in ("llama3", "yarn")
    return RopeConfig(
        theta=keys.number("rope_theta", 10000.0),
        dim=int(head_dim * part),
        kind=kind,
        factor=keys.number("factor", 1.0 if kind == "default" else None),
        low_freq_factor=keys.number("low_freq_factor", None if ramp else 1.0),
        high_freq_factor=keys.number("high_freq_factor", None if ramp else 4.0),
        original_positions=keys.size(
            "original_max_position_embeddings", None if stretched else 8192
        ),
        truncate=scaling.get("truncate") is None or keys.flag("truncate"),
    )


def _of_all_layers(scaling: Mapping[str, Any], layer_types: Any, path: Path) -> Mapping[str, Any]:
    """The parameters without their nesting by type of layer, of which all must have the same."""
    nested = {name: value for name, value in scaling.items() if isinstance(value, Mapping)}
    if not nested:
        return scaling
    if others := [name for name in scaling if name not in nested and scaling[name] is not None]:
        raise FileError(path, f"rope parameter {others[0]!r} stands beside those of layer types")
    used = sorted(set(map(str, layer_types))) if isinstance(layer_types, list) else [*nested]
    for name in used:
        if name not in nested:
            raise FileError(path, f"rope parameters of layer type {name!r} are missing")
        if nested[name] != nested[used[0]]:
            reason = f"rope parameters of {used[0]!r} and {name!r} layers differ"
            raise FileError(path, f"{reason}, which is not supported")
    return nested[used[0]]
