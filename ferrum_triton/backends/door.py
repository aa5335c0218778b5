"""The checked entry of one op on one backend: what ``backend.<op>`` is.

Checking a call in full costs tens of microseconds, a decode step makes hundreds of calls, and the
same few combinations of shapes, strides, dtypes and devices come back each time. So the door keeps
the combinations it has admitted, and a known one costs a dictionary look-up. Its Python source is
generated, as dataclasses generate ``__init__``, so that it has the op's own signature.
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


def make_door(op: Op, implementation: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Build ``backend.<op>`` around ``implementation``."""
    parameters = op.signature.parameters
    declared = [
        f"{name}=defaults[{name!r}]" if p.default is not p.empty else name
        for name, p in parameters.items()
    ]
    if op.has_out:
        declared += ["*", "out=None"]
    # An index names a CUDA device as well as a torch.device does, for a third of the time.
    device_key = "{}.get_device()" if device_type == "cuda" else "{}.device"
    out_key = "None if out is None else out_key(out)"
    if op.num_outputs == 1:
        out_key = _tensor_key("out", True, device_key)
    forwarded = ", ".join([*parameters, *(["out=out"] if op.has_out else [])])
    key = ", ".join(
        [
            *(
                _tensor_key(name, parameters[name].annotation is not Tensor, device_key)
                for name in op.contract.specs
            ),
            *op.static,
            *([out_key] if op.has_out else []),
        ]
    )
    rules = "".join(
        f"    call_rules[{i}]({', '.join(parameters)})\n" for i in range(len(op.call_rules))
    )
    values = ", ".join(f"{name}={name}" for name in [*parameters, *(["out"] if op.has_out else [])])
    source = (
        f"def {op.name}({', '.join(declared)}):\n"
        f"    try:\n"
        f"        key = ({key},)\n"
        f"        known = key in admitted\n"
        f"    except (AttributeError, TypeError):\n"
        f"        key, known = None, False\n"
        f"    if not known:\n"
        f"        admit(key, dict({values}))\n"
        f"{rules}"
        f"    return implementation({forwarded})\n"
    )
    admitted: set[tuple] = set()

    def admit(key: tuple | None, arguments: dict[str, Any]) -> None:
        out = arguments.pop("out", None)
        op.contract.check(arguments, device_type)
        _check_scalars(op, arguments)
        for rule in op.shape_rules:
            rule(**arguments)
        if out is not None:
            for rule in op.call_rules:  # the fake below trusts its arguments
                rule(**arguments)
            _check_out(op, arguments, out)
        if key is not None:
            if len(admitted) >= MAX_ADMITTED:
                admitted.clear()
            admitted.add(key)

    namespace: dict[str, Any] = {
        "defaults": {name: p.default for name, p in parameters.items()},
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


def _tensor_key(name: str, optional: bool, device_key: str) -> str:
    key = f"{name}.shape, {name}.stride(), {name}.dtype, {device_key.format(name)}"
    return f"({key}) if {name} is not None else None" if optional else key


def _out_key(out: Tensor | tuple[Tensor, ...]) -> tuple:
    outs = (out,) if isinstance(out, Tensor) else out
    return tuple((o.shape, o.stride(), o.dtype, o.device) for o in outs)


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
