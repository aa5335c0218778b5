"""The checked entry of one op on one backend: what ``backend.<op>`` is.

Checking a call in full costs tens of microseconds, a decode step makes hundreds of calls, and the
same few combinations of shapes, strides, dtypes and devices come back each time. So the door keeps
the combinations it has admitted, and a known one costs a dictionary look-up. Where kernels on a GPU
follow, that look-up finds the launches too: see :mod:`ferrum_triton.kernels.replay`. The door's
Python source is generated, as dataclasses generate ``__init__``, so that it has the op's own
signature.

At every call the door looks whether a gradient is wanted, which no op has, and tells autograd which
tensors are written. What it cannot know a call by, addresses among it, it looks at once for each
combination; a door for debugging looks at each call in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ferrum_triton.contract import DTYPES, LEAST, MAX_FLOAT
from ferrum_triton.quant.planes import has_part_of_rows
from ferrum_triton.registry import Op, has_tangent

# The types of what is passed for a parameter, by its annotation.
ACCEPTED: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    str: (str,),
    torch.dtype: (torch.dtype,),
    int | None: (int, NoneType),
    float | None: (int, float, NoneType),
}

INT64 = torch.iinfo(torch.int64)

# What torch.autograd.graph.increment_version calls, without its own look at what it is given: 250
# ns for four tensors, and 427 with it (python -m timeit
# -s "import torch; x = tuple(torch.empty(4) for _ in range(4))" "torch._C._increment_version(x)").
increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)

# Combinations one door remembers before it starts over: bounds memory under ever-changing shapes.
MAX_ADMITTED = 4096


def make_door(
    op: Op,
    implementation: Callable[..., Any],
    device_type: str,
    replays: bool | None = None,
    checks_all: bool = False,
) -> Callable[..., Any]:
    """Build ``backend.<op>`` around ``implementation``.

    Args:
        op: the op.
        implementation: a provider's.
        device_type: where tensors must lie.
        replays: repeat the launches of calls that are like earlier ones; if None, where launching
            costs more than finding that out: on a GPU.
        checks_all: check every call in full, for debugging.
    """
    launcher = op.impls.get("triton")
    if replays is None:
        replays = device_type == "cuda" and implementation is launcher
    if checks_all:
        replays = False
    if replays:
        from ferrum_triton.kernels import replay

        replays = replay.can_replay(op)
    admitted: dict[tuple, Callable[..., Any] | bool] = replay.ReplayTable() if replays else {}
    checked: set[tuple] = set()
    source, num_checked = _source_of(op, device_type, replay.arguments_of(op) if replays else None)

    def admit(key: tuple | None, arguments: dict[str, Any]) -> Callable[..., Any] | bool:
        if key is None or checks_all or key[:num_checked] not in checked:
            check(op, dict(arguments), device_type)
        if checks_all:
            arguments.pop("out", None)
            for rule in op.data_rules:
                rule(**arguments)
        if key is None or checks_all:
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
        "grad_enabled": torch.is_grad_enabled,
        "refuse_gradient": op.refuse_gradient,
        "forward_mode": forward_ad,
        "has_tangent": has_tangent,
        "has_part_of_rows": has_part_of_rows,
        # Autograd then knows that what it kept of a tensor is stale.
        "increment_version": increment_version,
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
    tensors = [*op.contract.specs, *(outs if op.num_outputs == 1 else [])]
    parts = [part for n in tensors for part in _tensor_key(n, n in optional, device_type)]
    # Of calls that are replayed, only the first of a kind is asked for negative views. They come
    # from complex numbers, and most are refused for their stride; asking takes 130 ns a tensor
    # (python -m timeit -s "import torch; x = torch.randn(4, 64)" "x.is_neg()").
    specs = op.contract.specs.items() if replayed is None else ()
    real = [name for name, spec in specs if DTYPES[spec.dtype_class][0].is_floating_point]
    parts += [f"{name} is not None and {name}.is_neg()" for name in real]
    parts += [f"{name} is not None and {name}.is_pinned()" for name in op.contract.in_host_memory]
    scalars = {name: p.annotation for name, p in parameters.items() if name not in tensors}
    if op.num_outputs > 1:
        parts.append(f"None if out is None else out_key(out, {16 if replayed else 1})")
    parts += [f"{name}.__class__" for name in scalars]
    parts += [name for name in scalars if name in op.static]
    # 0.0 and -0.0 are equal, as are 0 and False, but do not compute alike: what they are written as
    # differs.
    floats = {
        name: f"{name} or str({name})"
        for name, kind in scalars.items()
        if kind in (float, float | None) and name not in op.static
    }
    parts += [part for name, part in floats.items() if name in LEAST]
    # Planes are read in pieces of 16 bytes, which rules look at.
    packed = [name for name, spec in op.contract.specs.items() if spec.dtype_class == "uint8"]
    at = {name: f"_at_{name}" for name in (tensors if replayed else packed)}
    lines = []
    for name, address in at.items():
        absent = f"0 if {name} is None else " if name in optional else ""
        lines.append(f"{address} = {absent}{name}.data_ptr()")
    parts += [f"{at[name]} & 15" for name in packed]
    # Some rows of a matrix in planes may have the shape and the address of a whole one. Most
    # matrices are no views, which is known without a call.
    parts += [
        f"{name} is not None and {name}._base is not None and has_part_of_rows({name})"
        for name in packed
    ]
    num_checked = len(parts)
    if replayed:
        remainders = "".join(f"{address} & 15, " for address in at.values())
        parts.append(f"({' | '.join(at.values())}) & 15 and ({remainders})")
        # Integers may change from call to call, and are known by their type.
        parts += [part for name, part in floats.items() if name not in LEAST]
    lines.append("key = (" + "".join(f"{part}, " for part in parts) + ")")
    lines.append("replay = admitted.get(key)")
    forwarded = ", ".join([*parameters, *(f"{name}={name}" for name in outs)])
    values = ", ".join(f"{name}={name}" for name in [*parameters, *outs])
    wants = " or ".join(
        f"({name} is not None and {name}.requires_grad)"
        if name in optional
        else f"{name}.requires_grad"
        for name in tensors
    )
    body = [
        "try:",
        f"    wants_gradient = grad_enabled() and ({wants})",
        "    if forward_mode._current_level >= 0:",
        f"        wants_gradient |= any(map(has_tangent, ({', '.join(tensors)},)))",
        *(f"    {line}" for line in lines),
        "except (AttributeError, TypeError, RuntimeError):",
        "    key = replay = None",
        "    wants_gradient = False",
        "if wants_gradient:",
        f"    refuse_gradient(dict({values}))",
        "if replay is None:",
        f"    replay = admit(key, dict({values}))",
        *(f"call_rules[{i}]({', '.join(parameters)})" for i in range(len(op.call_rules))),
    ]
    body += _version_lines(op, optional)
    if replayed:
        body += ["if replay:", f"    return replay({', '.join(replayed)})"]
    body.append(f"return implementation({forwarded})")
    signature = ", ".join([*declared, *(["*", "out=None"] if op.has_out else [])])
    lines = [f"def {op.name}({signature}):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n", num_checked


def _version_lines(op: Op, optional: set[str]) -> list[str]:
    """The source that tells autograd what is written.

    All that is mutated takes one call: four tensors take 258 ns so, and 390 in three calls, timed
    as ``increment_version`` above. Where some of it is absent, each of the others takes its own.
    """
    always = [name for name in op.mutates if name not in optional]
    others = [name for name in op.mutates if name in optional]
    each = [f"increment_version(({', '.join(always)},))"] if always else []
    for name in others:
        each += [f"if {name} is not None:", f"    increment_version(({name},))"]
    lines = each
    if always and others:
        lines = [
            f"if {' and '.join(f'{name} is not None' for name in others)}:",
            f"    increment_version(({', '.join([*always, *others])},))",
            "else:",
            *(f"    {line}" for line in each),
        ]
    if op.has_out:
        outs = "out" if op.num_outputs > 1 else "(out,)"
        lines += ["if out is not None:", f"    increment_version({outs})"]
    return lines


def check(op: Op, arguments: dict[str, Any], device_type: str) -> None:
    """Check a call in full."""
    out = arguments.pop("out", None)
    op.contract.check(arguments, device_type)
    _check_scalars(op, arguments)
    for rule in op.shape_rules:
        rule(**arguments)
    op.contract.check_memory(arguments, ())
    if out is not None:
        for rule in op.call_rules:  # the fake below trusts its arguments
            rule(**arguments)
        _check_out(op, arguments, out)
        op.contract.check_memory(arguments, (out,) if isinstance(out, Tensor) else out)


def _tensor_key(name: str, optional: bool, device_type: str) -> list[str]:
    """What a tensor is known by; its class tells a FakeTensor, which has no memory.

    On CUDA an index names a device as well as a torch.device does, for a third of the time. And a
    contiguous tensor's strides follow from its shape, but for steps that nobody takes: to ask
    whether it is one costs 99 ns, and its strides 182 (as ``increment_version`` above, of a tensor
    of four sizes). Tensors of MKL-DNN, which say that they are, lie on CPUs.
    """
    if device_type == "cuda":
        strides, device = f"{name}.is_contiguous() or {name}.stride()", f"{name}.get_device()"
    else:
        strides, device = f"{name}.stride()", f"{name}.device"
    parts = [f"{name}.shape", strides, f"{name}.dtype", f"{name}.__class__", device]
    return [f"({', '.join(parts)}) if {name} is not None else None"] if optional else parts


def _out_key(out: Tensor | tuple[Tensor, ...], align: int) -> tuple:
    outs = (out,) if isinstance(out, Tensor) else out
    return tuple((o.shape, o.stride(), o.dtype, o.device, o.data_ptr() % align) for o in outs)


def _check_scalars(op: Op, arguments: Mapping[str, Any]) -> None:
    """Refuse a tensor, a string or a fraction where the op takes an integer, and so on."""
    for name, parameter in op.signature.parameters.items():
        if parameter.annotation not in ACCEPTED:
            continue
        value, accepted = arguments[name], ACCEPTED[parameter.annotation]
        is_accepted = isinstance(value, accepted)
        if not is_accepted or (isinstance(value, bool) and bool not in accepted):
            words = [kind.__name__ for kind in accepted if kind is not NoneType]
            op.reject(name, repr(value), " or ".join(words + ["None"] * (NoneType in accepted)))
        is_int = type(value) is int
        if is_int and float not in accepted and not INT64.min <= value <= INT64.max:
            op.reject(name, f"{value!r:.40}", "an integer of 64 bits")
        # Floats of other names may be infinite or NaN, but an integer may be too large for a float.
        is_bounded = name in LEAST or (is_int and float in accepted)
        least = LEAST.get(name, -MAX_FLOAT)
        if is_bounded and value is not None and not least <= value <= MAX_FLOAT:
            bound = "" if least == -MAX_FLOAT else f", {least:g} or more"
            op.reject(name, f"{value!r:.40}", f"a finite float32{bound}")


def _check_out(op: Op, arguments: Mapping[str, Any], out: Any) -> None:
    """Hold ``out`` against the shape and dtype that the op's fake says it returns."""
    # Meta tensors, not fake ones, whose mode imports torch._dynamo at its first use: seconds.
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    metas = {
        k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        for k, v in tensors.items()
    }
    device = next(iter(tensors.values())).device
    wanted = op.fake(**{**arguments, **metas})
    wanted = (wanted,) if isinstance(wanted, Tensor) else wanted
    outs = (out,) if isinstance(out, Tensor) else out
    is_right = isinstance(out, Tensor) == (op.num_outputs == 1) and isinstance(outs, tuple)
    if not is_right or len(outs) != len(wanted) or not all(isinstance(o, Tensor) for o in outs):
        got = f"a {type(out).__name__}"
        got += f" of {len(out)}" if isinstance(out, tuple | list) else ""
        allowed = "a tensor" if len(wanted) == 1 else f"a tuple of {len(wanted)} tensors"
        op.reject("out", got, allowed, "Pass what the call without out would return.")
    for got, want in zip(outs, wanted, strict=True):
        described = [
            f"{str(t.dtype)[6:]}{list(t.shape)} on {on}"
            for t, on in ((got, got.device), (want, device))
        ]
        if described[0] != described[1]:
            op.reject("out", described[0], described[1], "Allocate it so.")
        if got.numel() and got.dim() and got.size(-1) > 1 and got.stride(-1) != 1:
            op.reject("out", f"of strides {list(got.stride())}", "stride 1 in the last dimension")
