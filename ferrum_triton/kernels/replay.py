"""Calls of an op that are like an earlier one, made without asking its launcher again.

The door of an op (:mod:`ferrum_triton.backends.door`) knows a call by the shapes, strides, dtypes
and device of its tensors, the remainders of their addresses by 16, and its scalars: all that a
launcher may decide by. The second call of a kind is rehearsed, made in the ordinary way, and held
against the rehearsal. If both did the same, later calls run Python that is written out for it:
allocate, add offsets to addresses, hand them to Triton's C launcher. Anything else, and whatever a
rehearsal cannot follow, goes the ordinary way for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ferrum_triton.kernels import compiled
from ferrum_triton.kernels.jit import INT32, OPTIONS, RECORDINGS, Launch, ReplayTable, note_launches
from ferrum_triton.kernels.rehearsal import (
    Allocation,
    Described,
    NotReplayable,
    Passed,
    Place,
    Recipe,
    ScalarUsed,
    Step,
    Zero,
    is_descriptor,
    rehearse,
)
from ferrum_triton.registry import Op

# Values of integers that one kind of call remembers before it starts over.
MAX_VALUES = 256

# Bytes that scratch memory of one call is cut by: what torch's allocator on GPUs aligns to.
SCRATCH_ALIGN = 512


def can_replay(op: Op) -> bool:
    """Whether a door can tell calls of ``op`` apart by its tensors and scalars."""
    scalars = (int, float, bool, str, torch.dtype, int | None, float | None, str | None)
    return all(
        name in op.contract.specs or parameter.annotation in scalars
        for name, parameter in op.signature.parameters.items()
    )


def _in_key(op: Op) -> frozenset[str]:
    """The scalars whose values a door's key has: all but integers that may change at every call."""
    parameters = op.signature.parameters
    changing = {name for name, p in parameters.items() if p.annotation in (int, int | None)}
    return frozenset(parameters.keys() - changing | {*op.static})


def arguments_of(op: Op) -> list[str]:
    """What a replay of ``op`` is called with: all parameters, then addresses of the tensors.

    The address of x is named ``_at_x``, and is 0 where there is no tensor. Of several outputs there
    are none.
    """
    outs = ["out"] if op.has_out else []
    tensors = [*op.contract.specs, *(outs if op.num_outputs == 1 else [])]
    return [*op.signature.parameters, *outs, *(f"_at_{name}" for name in tensors)]


class Trial:
    """A kind of call that has not been replayed yet.

    Called as a replay is. The first call goes the ordinary way, so that kernels are compiled; a
    second one decides what the table will have for this kind.
    """

    def __init__(
        self,
        op: Op,
        launcher: Callable[..., Any],
        table: ReplayTable,
        key: Any,
        by_value: frozenset[str] = frozenset(),
    ) -> None:
        self._op, self._launcher, self._table, self._key = op, launcher, table, key
        self._by_value = by_value | _in_key(op)
        self._names = [*op.signature.parameters, *(["out"] if op.has_out else [])]
        self._calls = 0

    def __call__(self, *values: Any) -> Any:
        arguments = dict(zip(self._names, values, strict=False))
        self._calls += 1
        if self._calls == 1 or RECORDINGS or compiled.is_watched():
            return self._launcher(**arguments)
        try:
            recipe = rehearse(self._launcher, arguments, self._by_value)
        except ScalarUsed as used:
            self._decide(_ByValue(self._op, self._launcher, self._by_value | {used.name}))
            return self._launcher(**arguments)
        except Exception:  # whatever stand-ins cannot do
            self._decide(False)
            return self._launcher(**arguments)
        with note_launches(runs=True) as launches:
            result = self._launcher(**arguments)
        replay: Callable[..., Any] | bool = False
        # A call that was made does not fail for the sake of those to come.
        with contextlib.suppress(Exception):
            if _agrees(recipe, launches, arguments, result):
                replay = _build(self._op, self._launcher, recipe, launches, arguments)
        self._decide(replay)
        return result

    def _decide(self, replay: Callable[..., Any] | bool) -> None:
        # A table that was emptied since is about launchers that would choose otherwise now.
        if self._table.get(self._key) is self:
            self._table[self._key] = replay


class _ByValue:
    """A kind of call whose launcher looks at some integers: a replay for each of their values."""

    def __init__(self, op: Op, launcher: Callable[..., Any], names: frozenset[str]) -> None:
        self._op, self._launcher, self._names = op, launcher, names
        parameters = list(op.signature.parameters)
        self._places = [parameters.index(name) for name in sorted(names - _in_key(op))]
        self._table = ReplayTable()

    def __call__(self, *values: Any) -> Any:
        key = tuple([values[place] for place in self._places])
        replay = self._table.get(key)
        if replay is None:
            if len(self._table) >= MAX_VALUES:
                self._table.clear()
            replay = Trial(self._op, self._launcher, self._table, key, self._names)
            self._table[key] = replay
        if replay is False:
            replay = _ordinary(self._op, self._launcher)
        return replay(*values)


def _ordinary(op: Op, launcher: Callable[..., Any]) -> Callable[..., Any]:
    names = [*op.signature.parameters, *(["out"] if op.has_out else [])]
    return lambda *values: launcher(**dict(zip(names, values, strict=False)))


def _tensors_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the names that a recipe has for them."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}{i}": part for i, part in enumerate(value)}
    return found


def _agrees(
    recipe: Recipe, launches: Sequence[Launch], arguments: Mapping[str, Any], result: Any
) -> bool:
    """Whether a call made these launches and returned this as its rehearsal said."""
    steps = [step for step in recipe.steps if isinstance(step, Step)]
    tensors = _tensors_of(arguments)
    starts: dict[str | int, int] = {name: t.data_ptr() for name, t in tensors.items()}

    def is_at(place: Place, tensor: Any, shape: Sequence[int], strides: Sequence[int]) -> bool:
        same = (tuple(shape), tuple(strides), tensor.dtype) == (
            place.shape,
            place.strides,
            place.dtype,
        )
        start = tensor.data_ptr() - place.offset
        return same and starts.setdefault(place.base, start) == start

    def is_same(expected: Any, got: Any) -> bool:
        if isinstance(expected, Place):
            return isinstance(got, Tensor) and is_at(expected, got, got.shape, got.stride())
        if isinstance(expected, Described):
            return (
                is_descriptor(got)
                and is_at(expected.place, got.base, got.shape, got.strides)
                and (tuple(got.block_shape), got.padding) == (expected.block, expected.padding)
                and getattr(got, "layout", None) == expected.layout
            )
        if isinstance(expected, Passed):
            return got is arguments[expected.name]
        return type(got) is type(expected) and got == expected

    def is_result(expected: Any, got: Any) -> bool:
        if isinstance(expected, int):
            made = recipe.allocations[expected]
            whole = Place(expected, 0, made.shape, made.strides, made.dtype)
            return is_at(whole, got, got.shape, got.stride())
        return got is (None if expected is None else (tensors | arguments)[expected])

    if isinstance(recipe.result, tuple):
        returned = isinstance(result, tuple) and len(result) == len(recipe.result)
        returned = returned and all(map(is_result, recipe.result, result))
    else:
        returned = is_result(recipe.result, result)
    return (
        returned
        and len(steps) == len(launches)
        and all(
            (step.kernel, step.grid, step.meta) == (launch.kernel, launch.grid, launch.meta)
            and len(step.args) == len(launch.args)
            and all(map(is_same, step.args, launch.args))
            for step, launch in zip(steps, launches, strict=True)
        )
    )


def _build(
    op: Op,
    launcher: Callable[..., Any],
    recipe: Recipe,
    launches: Sequence[Launch],
    arguments: Mapping[str, Any],
) -> Callable[..., Any] | bool:
    """The function that does what a recipe says, or False where it cannot be made."""
    if not launches:
        return False
    writer = (_GpuWriter if launches[0].args[0].is_cuda else _CpuWriter)(op, recipe, arguments)
    return writer.write(launcher, launches)


class _Writer:
    """The source of a replay, and the objects that it names.

    A tensor of a recipe is the variable ``x`` if it is the argument x, ``_out1`` if it is the
    second of several outputs that were passed, ``_new0`` if the call allocates it, ``_scratch`` if
    it is cut from scratch memory. ``_at_x`` and so on are their addresses.
    """

    def __init__(self, op: Op, recipe: Recipe, arguments: Mapping[str, Any]) -> None:
        self.op, self.recipe = op, recipe
        self.tensors = _tensors_of(arguments)
        self.device = next(iter(self.tensors.values())).device
        self.objects: dict[str, Any] = {}
        self.lines: list[str] = []
        zeroed = {s.place.base for s in recipe.steps if isinstance(s, Zero)}
        returned = recipe.result if isinstance(recipe.result, tuple) else (recipe.result,)
        # What kernels alone see is cut from one piece of memory.
        self.scratch: dict[str | int, int] = {}
        self.scratch_size = 0
        for i, made in enumerate(recipe.allocations):
            if i not in zeroed and i not in returned:
                self.scratch[i] = self.scratch_size
                size = made.num_bytes()
                self.scratch_size += -(-size // SCRATCH_ALIGN) * SCRATCH_ALIGN

    def write(self, launcher: Callable[..., Any], launches: Sequence[Launch]) -> Callable[..., Any]:
        """Compile the function.

        Args:
            launcher: what is called instead where a replay will not do.
            launches: those of the ordinary call that agreed with the recipe.
        """
        op, recipe = self.op, self.recipe
        steps = [step for step in recipe.steps if isinstance(step, Step)]
        passed = {arg.name for step in steps for arg in step.args if isinstance(arg, Passed)}
        # Compiled code takes longer integers in 64 bits.
        too_long = [f"not {INT32.format(name)}" for name in sorted(passed)]
        forwarded = [*op.signature.parameters, *(["out=out"] if op.has_out else [])]
        self.line(f"if {' or '.join([*self.watched(), *too_long])}:")
        self.line(f"    return {self.constant(launcher)}({', '.join(forwarded)})")
        self.begin()
        if "out0" in self.tensors:
            outs = [f"_out{i}" for i in range(op.num_outputs)]
            self.line(f"{', '.join(outs)}, = out")
            for name in outs:
                self.line(f"_at{name} = {name}.data_ptr()")
        for i, made in enumerate(recipe.allocations):
            if i not in self.scratch:
                self.allocate(f"_new{i}", made)
        if self.scratch:
            self.allocate("_scratch", Allocation((self.scratch_size,), (1,), torch.uint8))
        made_launches = iter(launches)
        for step in recipe.steps:
            if isinstance(step, Zero):
                self.line(f"{self.whole(step.place)}.zero_()")
            else:
                self.launch(step, next(made_launches))
        if isinstance(recipe.result, tuple):
            self.line(f"return {', '.join(map(self.variable, recipe.result))},")
        elif recipe.result is not None:
            self.line(f"return {self.variable(recipe.result)}")
        source = f"def replay({', '.join(arguments_of(op))}):\n" + "\n".join(self.lines) + "\n"
        exec(compile(source, f"<replay of {op.name}>", "exec"), self.objects)
        replay = self.objects["replay"]
        replay.__doc__ = source
        return replay

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def constant(self, value: Any) -> str:
        """The name of an object; a number stands for itself."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"_c{len(self.objects)}"
        self.objects[name] = value
        return name

    def variable(self, base: str | int) -> str:
        if isinstance(base, int):
            return "_scratch" if base in self.scratch else f"_new{base}"
        return base if base == "out" or base in self.op.signature.parameters else f"_{base}"

    def offset(self, place: Place) -> int:
        """Bytes from the variable's first element to the place's."""
        return place.offset + self.scratch.get(place.base, 0)

    def whole(self, place: Place) -> str:
        """The variable that a place is all of."""
        if isinstance(place.base, int):
            made = self.recipe.allocations[place.base]
            layout: tuple = made.shape, made.strides, made.dtype
        else:
            tensor = self.tensors[place.base]
            layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if place.offset or layout != (place.shape, place.strides, place.dtype):
            raise NotReplayable("part of a tensor is filled")
        return self.variable(place.base)

    def watched(self) -> list[str]:
        """Conditions under which somebody wants to see each launch."""
        return [self.constant(RECORDINGS)]

    def begin(self) -> None:
        """Write what comes before everything else."""

    def allocate(self, name: str, made: Allocation) -> None:
        raise NotImplementedError

    def launch(self, step: Step, launch: Launch) -> None:
        raise NotImplementedError


class _GpuWriter(_Writer):
    """A replay by addresses, through Triton's C launcher."""

    def watched(self) -> list[str]:
        hooks = self.constant(compiled.HOOKS)
        enter, leave = map(self.constant, (compiled.NO_ENTER_HOOK, compiled.NO_EXIT_HOOK))
        return [
            *super().watched(),
            f"{hooks}.launch_enter_hook is not {enter}",
            f"{hooks}.launch_exit_hook is not {leave}",
            f"{enter}.calls",
            f"{leave}.calls",
        ]

    def begin(self) -> None:
        index = self.device.index
        self.line(f"if {self.constant(compiled.current_device)}() != {index}:")
        self.line(f"    with {self.constant(torch.cuda.device)}({index}):")
        self.line(f"        return replay({', '.join(arguments_of(self.op))})")
        self.line(f"_stream = {self.constant(compiled.current_stream)}({index})")

    def allocate(self, name: str, made: Allocation) -> None:
        layout = ", ".join(map(self.constant, (made.shape, made.strides, made.dtype)))
        self.line(f"{name} = {self.constant(empty_on_gpu)}({layout})")
        self.line(f"_at{name} = {name}.data_ptr()")

    def address(self, place: Place) -> str:
        name = f"_at_{self.variable(place.base).removeprefix('_')}"
        offset = self.offset(place)
        return f"{name} + {offset}" if offset else name

    def launch(self, step: Step, launch: Launch) -> None:
        entry = step.kernel.find(step.grid, *launch.args, **step.meta)
        inner = entry and compiled.without_encoding(entry)
        if not inner:
            raise NotReplayable(f"{step.kernel.name} is launched by Triton alone")
        run, encodings = inner
        described = [arg for arg in step.args if isinstance(arg, Described)]
        if len(described) != len(encodings):
            raise NotReplayable("descriptors are encoded in another way")
        encoding = iter(encodings)
        args: list[str] = []
        for arg in step.args:
            if isinstance(arg, Place):
                args.append(self.address(arg))
            elif isinstance(arg, Passed):
                args.append(arg.name)
            elif isinstance(arg, Described):
                args += self.describe(arg, next(encoding))
            else:
                args.append(self.constant(arg))
        x, y, z = (*step.grid, 1, 1)[:3]
        before = [
            *map(str, (x, y, z, "_stream")),
            *map(self.constant, (entry.function, entry.cooperative, entry.overlapped)),
            *("None", "None", self.constant(entry.metadata), "None", "None", "None"),
        ]
        constexprs = ["None"] * len(step.kernel.constexprs)
        self.line(f"{self.constant(run)}({', '.join([*before, *args, *constexprs])})")

    def describe(self, arg: Described, encoding: Any) -> list[str]:
        """The arguments that a descriptor becomes."""
        place, address = arg.place, self.address(arg.place)
        sizes = [*map(str, place.shape), *map(str, place.strides)]
        if encoding is None:  # a GPU that has no tensor maps
            return [address, *sizes, str(arg.padding == "nan"), *sizes]
        maps = compiled.TensorMaps(encoding, place.shape, place.strides, arg.padding)
        return [f"{self.constant(maps)}[{address}]", *sizes]


class _CpuWriter(_Writer):
    """A replay through the interpreter, on views of the same bytes."""

    def allocate(self, name: str, made: Allocation) -> None:
        layout = ", ".join(map(self.constant, (made.shape, made.strides)))
        dtype, empty = self.constant(made.dtype), self.constant(torch.empty_strided)
        self.line(f"{name} = {empty}({layout}, dtype={dtype})")

    def launch(self, step: Step, launch: Launch) -> None:
        args = "".join(f"{self.argument(arg)}, " for arg in step.args)
        constexprs = {k: v for k, v in step.meta.items() if k not in OPTIONS}
        run, grid, meta = map(self.constant, (step.kernel.run_on_cpu, step.grid, constexprs))
        self.line(f"{run}({grid}, ({args}), {meta})")

    def argument(self, arg: Any) -> str:
        if isinstance(arg, Passed):
            return arg.name
        if isinstance(arg, Place):
            return self.view(arg)
        if isinstance(arg, Described):
            if arg.layout is not None:
                raise NotReplayable("Gluon's kernels are emulated on CPU tensors, never replayed")
            shape, strides = [*arg.place.shape], [*arg.place.strides]
            rest = map(self.constant, (shape, strides, [*arg.block], arg.padding))
            make = self.constant(TensorDescriptor)
            return f"{make}({self.view(arg.place)}, {', '.join(rest)})"
        return self.constant(arg)

    def view(self, place: Place) -> str:
        layout = map(self.constant, (place.dtype, place.shape, place.strides))
        base = self.variable(place.base)
        return f"{self.constant(_view)}({base}, {self.offset(place)}, {', '.join(layout)})"


def empty_on_gpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory on the current GPU."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# The same without torch.empty's parsing of arguments: what torch.compile's own host code calls.
empty_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty_on_gpu)


def _view(
    tensor: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple
) -> Tensor:
    """A tensor of any dtype that begins so many bytes after the first element of another."""
    first = tensor.storage_offset() * tensor.element_size() + offset
    view = torch.empty(0, dtype=dtype)
    return view.set_(tensor.untyped_storage(), first // dtype.itemsize, shape, strides)
