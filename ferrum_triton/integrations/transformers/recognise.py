"""Which modules compute a formula that there is an op for, told by trying them.

A module is a candidate by the name of its class and by what it holds. It counts as known if its own
``forward``, with small random weights in the place of its own, gives the formula's values.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, INNER = 8, 12  # of the weights that are tried
LAYER_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x²) + eps) · (weight + offset), times silu(gate) if gated."""

    eps: float
    offset: int
    gated: bool


class Gated(NamedTuple):
    """A gated MLP: the names of its layers gate, up and down, and its activation."""

    layers: tuple[str, str, str]
    activation: str


def norm_of(module: nn.Module) -> Norm | None:
    """What kind of RMSNorm a module is, or None."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
    if [*held] != ["weight"] or held["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    # Rows that eps does not matter to, and one that it does.
    x = _random(4, WIDTH) * torch.tensor([[1.0], [3.0], [1.0], [eps**0.5]])
    weight, gate = 1 + 0.5 * _random(WIDTH, seed=1), _random(4, WIDTH, seed=2)
    unit = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    trial = _with(module, {"weight": weight}, {})
    for norm in (Norm(eps, 0, False), Norm(eps, 1, False), Norm(eps, 0, True)):
        want = unit * (weight + norm.offset)
        inputs = (x, gate) if norm.gated else (x,)
        if norm.gated:
            want = want * nn.functional.silu(gate)
        if _gives(trial, inputs, want):
            return norm
    return None


def mlp_of(module: nn.Module) -> Gated | None:
    """What kind of gated MLP a module is, or None."""
    children = dict(module.named_children())
    names = next((n for n in LAYER_NAMES if all(name in children for name in n)), None)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if names is None or own:
        return None
    others = {name: child for name, child in children.items() if name not in names}
    if any(True for child in others.values() for _ in child.parameters()):
        return None
    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    weights = [_random(*shape, seed=i) * 0.5 for i, shape in enumerate(shapes)]
    layers = {name: _linear(weight) for name, weight in zip(names, weights, strict=True)}
    x = _random(3, WIDTH, seed=3)
    gate, up = x @ weights[0].T, x @ weights[1].T
    trial = _with(module, {}, others | layers)
    for activation in ("silu", "gelu_tanh"):
        if _gives(trial, (x,), (activate(gate, activation) * up) @ weights[2].T):
            return Gated(names, activation)
    return None


def scale_of(module: nn.Embedding) -> Tensor | None:
    """The factor of an embedding that scales its rows, in its weight's dtype; None of another."""
    weight = module.weight
    rows, ids = _random(5, WIDTH).to(weight.device), torch.arange(5, device=weight.device)

    def scaled(values: Tensor) -> Tensor:
        trial = _with(module, {"weight": values}, {})
        vars(trial).update(_buffers=module._buffers, padding_idx=None)  # the ids' own alone
        return trial(ids)

    with torch.inference_mode():
        try:
            scale = scaled(torch.ones_like(rows, dtype=weight.dtype))[0, 0]
            wide = scaled(torch.ones_like(rows))[0, 0]
            got = scaled(rows)
        except Exception:  # whatever it needs, it is no scaled table
            return None
    is_scaled = got.shape == rows.shape and torch.allclose(got, rows * wide, rtol=1e-5, atol=0.0)
    return scale.clone() if is_scaled else None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module calls more than its ``forward``, accelerate's hooks among it."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return hasattr(module, "_hf_hook") or bool(hooks)


def is_silu(function: Any) -> bool:
    """Whether an activation is silu."""
    x = _random(16) * 3
    with torch.inference_mode():
        return bool(torch.allclose(function(x), nn.functional.silu(x), rtol=1e-5, atol=1e-6))


def activate(x: Tensor, activation: str) -> Tensor:
    """silu or gelu_tanh of x."""
    if activation == "silu":
        return nn.functional.silu(x)
    return nn.functional.gelu(x, approximate="tanh")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _with(
    module: nn.Module, weights: dict[str, Tensor], children: dict[str, nn.Module]
) -> nn.Module:
    """The module with other weights and children, itself left as it is."""
    trial = copy.copy(module)
    parameters = {n: nn.Parameter(w, requires_grad=False) for n, w in weights.items()}
    vars(trial).update(_parameters=parameters, _buffers={}, _modules=children)
    return trial


def _gives(module: nn.Module, inputs: tuple[Tensor, ...], want: Tensor) -> bool:
    with torch.inference_mode():
        try:
            got = module(*inputs)
        except Exception:  # whatever it needs, it is not the formula's
            return False
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    return bool(torch.allclose(got, want, rtol=1e-4, atol=1e-5))
