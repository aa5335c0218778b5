"""The checked entry of one op on one backend: what ``backend.<op>`` is.

Checking a call in full costs tens of microseconds, a decode step makes hundreds of calls, and the
same few combinations of shapes, strides, dtypes and devices come back each time. So the door keeps
the combinations it has admitted, and a known one costs a dictionary look-up. Where kernels on a GPU
follow, that look-up finds the launches too: see :mod:`ferrum_triton.kernels.replay`. The door's
Python source is generated, as dataclasses generate ``__init__``, so that it has the op's own
signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrum_triton.registry import Op

# Combinations one door remembers before it starts over: bounds memory under ever-changing shapes.
MAX_ADMITTED = 4096


def make_door(
    op: Op, implementation: Callable[..., Any], device_type: str, replays: bool | None = None
) -> Callable[..., Any]:
    """Build ``backend.<op>`` around ``implementation``.

    Args:
        op: the op.
        implementation: a provider's.
        device_type: where tensors must lie.
        replays: repeat the launches of calls that are like earlier ones; if None, where launching
            costs more than finding that out: on a GPU.
    """
    launcher = op.impls.get("triton")
    if replays is None:
        replays = device_type == "cuda" and implementation is launcher
    if replays:
        from ferrum_triton.kernels import replay

        replays = replay.can_replay(op)
    admitted: dict[tuple, Callable[..., Any] | bool] = replay.ReplayTable() if replays else {}
    checked: set[tuple] = set()
    source, num_checked = _source_of(op, device_type, replay.arguments_of(op) if replays else None)

    def admit(key: tuple | None, arguments: dict[str, Any]) -> Callable[..., Any] | bool:
        if key is None or key[:num_checked] not in checked:
            _check(op, dict(arguments), device_type)
        if key is None:
            return False
        if max(len(admitted), len(checked)) >= MAX_ADMITTED:
            admitted.clear()
            checked.clear()
        checked.add(key[:num_checked])
        admitted[key] = replay.Trial(op, implementation, admitted, key) if replays else False
        return admitted[key]

    namespace: dict[str, Any] = {
        "defaults": {name: p.default for name, p in op.signature.parameters.items()},
        "admitted": admitted,
        "admit": admit,
        "call_rules": op.call_rules,
        "implementation": implementation,
        "out_key": _out_key,
    }
    exec(compile(source, f"<door of {op.name}>", "exec"), namespace)
    door = namespace[op.name]
    door.__doc__ = op.reference.__doc__
    door.__module__ = op.reference.__module__
    return door


def _source_of(op: Op, device_type: str, replayed: list[str] | None) -> tuple[str, int]:
    """The Python source of a door, and how many elements of its key checks depend on.

    Args:
        op: the op.
        device_type: where tensors must lie.
        replayed: what a replay is called with, of doors that replay.
    """
    parameters = op.signature.parameters
    declared = [
        f"{name}=defaults[{name!r}]" if p.default is not p.empty else name
        for name, p in parameters.items()
    ]
    outs = ["out"] if op.has_out else []
    optional = {n for n in op.contract.specs if parameters[n].annotation is not Tensor} | {*outs}
    # An index names a CUDA device as well as a torch.device does, for a third of the time.
    device_key = "{}.get_device()" if device_type == "cuda" else "{}.device"
    tensors = [*op.contract.specs, *(outs if op.num_outputs == 1 else [])]
    scalars = {name: p.annotation for name, p in parameters.items() if name not in tensors}
    parts = [part for n in tensors for part in _tensor_key(n, n in optional, device_key)]
    if op.num_outputs > 1:
        parts.append(f"None if out is None else out_key(out, {16 if replayed else 1})")
    parts += [f"{name}.__class__" for name in scalars]
    parts += [name for name in scalars if name in op.static]
    num_checked = len(parts)
    lines = []
    if replayed:
        at = {name: f"_at_{name}" for name in tensors}
        for name, address in at.items():
            absent = f"0 if {name} is None else " if name in optional else ""
            lines.append(f"{address} = {absent}{name}.data_ptr()")
        remainders = "".join(f"{address} & 15, " for address in at.values())
        parts.append(f"({' | '.join(at.values())}) & 15 and ({remainders})")
        # 0.0 and -0.0 are equal, as are 0 and False, but do not compute alike: what they are
        # written as differs. Integers may change from call to call, and are known by their type.
        floats = [name for name, kind in scalars.items() if kind in (float, float | None)]
        parts += [f"{name} or str({name})" for name in floats if name not in op.static]
    lines.append("key = (" + "".join(f"{part}, " for part in parts) + ")")
    lines.append("replay = admitted.get(key)")
    forwarded = ", ".join([*parameters, *(f"{name}={name}" for name in outs)])
    values = ", ".join(f"{name}={name}" for name in [*parameters, *outs])
    body = [
        "try:",
        *(f"    {line}" for line in lines),
        "except (AttributeError, TypeError, RuntimeError):",
        "    key = replay = None",
        "if replay is None:",
        f"    replay = admit(key, dict({values}))",
        *(f"call_rules[{i}]({', '.join(parameters)})" for i in range(len(op.call_rules))),
    ]
    if replayed:
        body += ["if replay:", f"    return replay({', '.join(replayed)})"]
    body.append(f"return implementation({forwarded})")
    signature = ", ".join([*declared, *(["*", "out=None"] if op.has_out else [])])
    lines = [f"def {op.name}({signature}):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n", num_checked


def _check(op: Op, arguments: dict[str, Any], device_type: str) -> None:
    """Check a call in full."""
    out = arguments.pop("out", None)
    op.contract.check(arguments, device_type)
    _check_scalars(op, arguments)
    for rule in op.shape_rules:
        rule(**arguments)
    if out is not None:
        for rule in op.call_rules:  # the fake below trusts its arguments
            rule(**arguments)
        _check_out(op, arguments, out)


def _tensor_key(name: str, optional: bool, device_key: str) -> list[str]:
    parts = [f"{name}.shape", f"{name}.stride()", f"{name}.dtype", device_key.format(name)]
    return [f"({', '.join(parts)}) if {name} is not None else None"] if optional else parts


def _out_key(out: Tensor | tuple[Tensor, ...], align: int) -> tuple:
    outs = (out,) if isinstance(out, Tensor) else out
    return tuple((o.shape, o.stride(), o.dtype, o.device, o.data_ptr() % align) for o in outs)


def _check_scalars(op: Op, arguments: Mapping[str, Any]) -> None:
    """Refuse a tensor, a string or a fraction where the op takes an integer, and so on."""
    accepted = {
        int: (int,),
        float: (int, float),
        bool: (bool,),
        str: (str,),
        torch.dtype: (torch.dtype,),
    }
    for name, parameter in op.signature.parameters.items():
        kinds = accepted.get(parameter.annotation)
        if kinds is not None and not isinstance(arguments[name], kinds):
            op.reject(name, repr(arguments[name]), parameter.annotation.__name__)


def _check_out(op: Op, arguments: Mapping[str, Any], out: Any) -> None:
    """Hold ``out`` against the shape, dtype and device that the op's fake says it returns."""
    with FakeTensorMode() as mode:
        fakes = {
            k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()
        }
        wanted = op.fake(**fakes)
    wanted = (wanted,) if isinstance(wanted, Tensor) else wanted
    outs = (out,) if isinstance(out, Tensor) else out
    if not isinstance(outs, tuple) or len(outs) != len(wanted):
        op.reject("out", repr(type(out)), f"{len(wanted)} tensor(s)", "Pass a tuple of tensors.")
    for got, want in zip(outs, wanted, strict=True):
        described = [f"{str(t.dtype)[6:]}{list(t.shape)} on {t.device}" for t in (got, want)]
        if described[0] != described[1]:
            op.reject("out", described[0], described[1], "Allocate it so.")
        if got.numel() and got.size(-1) > 1 and got.stride(-1) != 1:
            op.reject("out", f"of strides {list(got.stride())}", "stride 1 in the last dimension")
        if any(
            size > 1 and stride == 0 for size, stride in zip(got.shape, got.stride(), strict=True)
        ):
            op.reject("out", f"expanded (strides {list(got.stride())})", "memory of its own")
