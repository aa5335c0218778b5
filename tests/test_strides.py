"""One contract for strides: what the CPU backend takes, the kernels take, and the other way round.

Every tensor of a call is laid out anew in turn: in a slice of a larger tensor, with its leading
dimensions in another order, expanded, or off the 16-byte grid. The same call then goes to the
``cpu`` and the ``interpret`` backends, which both refuse it or agree on the result.
"""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.registry import OPS
from tests.harness import (
    DISTINCT_ROWS,
    as_tuple,
    assert_call_matches,
    clone,
    sample,
    tensors,
    typical_axes,
)

load_kernels("interpret")

LAYOUTS = ("misaligned", "slice", "reversed", "first expanded", "second expanded")
ROW_AXES = ("num_tokens", "num_rows", "batch", "m")


def lay_out(value, layout):
    """``value`` in memory of its own, or None where the layout means nothing for its shape."""
    leading = value.dim() - 1
    if value.numel() == 0 or leading < 0:
        return None
    if layout == "misaligned":
        memory = value.new_empty(value.numel() + 1)
        tensor = memory[1:].view(value.shape)
    elif layout == "slice":
        memory = value.new_empty([size + 3 for size in value.shape])
        tensor = memory[tuple(slice(1, 1 + size) for size in value.shape)]
    elif layout == "reversed":
        if leading < 2:
            return None
        order = [*range(leading)][::-1]
        memory = value.new_empty([value.shape[dim] for dim in order] + [value.shape[-1]])
        tensor = memory.permute([*order, leading])
    else:
        dim = ("first expanded", "second expanded").index(layout)
        if dim >= leading or value.shape[dim] == 1:
            return None
        return value.narrow(dim, 0, 1).clone().expand(value.shape)
    return tensor.copy_(value)


def draw(op, **narrowed):
    """Arguments of a call; rows are [2, 3] where an op takes any leading dimensions."""
    specs = op.contract.specs
    axes = typical_axes(op)
    free = not any(axis in spec.dims for spec in specs.values() for axis in ROW_AXES)
    if free:
        axes |= {name: 6 for name in ROW_AXES if name in axes}
    dtype = torch.float16 if torch.float16 in op.dtypes else op.dtypes[0]
    arguments = sample(op, dtype, "cpu", 1, **axes | narrowed)
    for name, value in tensors(arguments).items():
        is_rows = specs[name].any_leading and (len(specs[name].dims) == 1 or name == "ids")
        if free and is_rows and value.shape[0] == 6:
            arguments[name] = value.unflatten(0, (2, 3))
    return arguments


def call(backend_name, op, arguments, out=None):
    """What a call returns, or None where it is refused."""
    door = getattr(get_backend(backend_name), op.name)
    try:
        if out is None:
            return as_tuple(door(**arguments))
        door(**arguments, out=out if len(out) > 1 else out[0])
        return out
    except InputError:
        return None


REFUSED = "both refuse"


def disagreement(op, arguments, names, layout):
    """How the backends differ if some tensors are in a layout: nothing is the empty text."""
    results = {}
    for backend_name in ("cpu", "interpret"):
        fresh = clone(arguments)
        out = None
        for name in names:
            if name == "out":
                empty = [torch.zeros_like(t) for t in as_tuple(op.fake(**clone(arguments)))]
                laid_out = [lay_out(t, layout) for t in empty]
                out = tuple(e if t is None else t for e, t in zip(empty, laid_out, strict=True))
            else:
                fresh[name] = lay_out(arguments[name], layout)
        results[backend_name] = call(backend_name, op, fresh, out), fresh
    (want, left), (got, arguments) = results["cpu"], results["interpret"]
    if want is None and got is None:
        return REFUSED
    if want is None or got is None:
        return f"only {'cpu' if want is None else 'interpret'} refuses"
    left = {n: left[n] for n in op.mutates if left[n] is not None}
    try:
        assert_call_matches(op, got, arguments, want, left)
    except AssertionError as error:
        return str(error)
    return ""


def disagreements(op, arguments):
    """{argument: how the backends differ, by layout}"""
    found = {}
    values = tensors(arguments)
    if op.has_out:
        values["out"] = as_tuple(op.fake(**clone(arguments)))[0]
    own_rows = (*op.mutates, *DISTINCT_ROWS.get(op.name, ()), "out")
    for layout in LAYOUTS:
        names = [
            name
            for name, value in values.items()
            if lay_out(value, layout) is not None
            and not ("expanded" in layout and name in own_rows)
        ]
        # All at once, and one by one where they disagree or one refusal may hide another.
        together = names and disagreement(op, arguments, names, layout)
        for name in names if together else ():
            how = disagreement(op, arguments, [name], layout)
            if how not in ("", REFUSED):
                found.setdefault(name, {})[layout] = how
    return found


def drawn():
    """Every op, with packed weights of a file's format and in planes where it takes both."""
    params = []
    for op in OPS.values():
        if "triton" in op.impls:
            kinds = [str(kind) for kind in op.axes.get("kind", ())]
            planes = [kind for kind in kinds if kind.endswith(":planes")]
            params.append(pytest.param(op, {}, id=op.name))
            if planes and planes != kinds:
                params.append(pytest.param(op, {"kind": planes[-1]}, id=f"{op.name}-planes"))
    return params


@pytest.mark.parametrize(("op", "narrowed"), drawn())
def test_backends_take_the_same_strides(op, narrowed):
    assert disagreements(op, draw(op, **narrowed)) == {}
