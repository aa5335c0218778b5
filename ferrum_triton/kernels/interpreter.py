"""Runs a Triton kernel's Python body on CPU tensors, beside compiled kernels in one process.

Triton decides between compiler and interpreter when ``@triton.jit`` decorates, for the whole
process. Here the choice is made per launch instead: a kernel's source is rewritten once more, with
every ``@triton.jit`` helper it reaches (its own and Triton's standard library) replaced by a plain
Python twin, and Triton's own interpreter executes the result. Nothing is left patched afterwards,
so a compiled launch may follow an interpreted one.

numpy, which the interpreter computes with, has neither bfloat16 nor 8-bit floats: Triton 3.6 keeps
them as raw bits there and computes on the bits. So such tensors are widened to float32 on the
host, the kernel runs in float32, and torch rounds the results back; one that still reaches the
interpreter is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.jit import ConstexprFunction, JITFunction

from ferrum_triton.errors import InputError
from ferrum_triton.kernels.shortcuts import Semantic, shortcuts

# The dtypes numpy lacks, which the interpreter would treat as integers.
RAW_BITS = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

# Triton's interpreter recognises these by identity and reduces with numpy instead.
_KNOWN_COMBINES = (
    tl.standard._argmin_combine_tie_break_left,
    tl.standard._argmax_combine_tie_break_left,
    tl.standard._elementwise_max,
    tl.standard._elementwise_min,
    tl.standard._sum_combine,
    tl.standard._prod_combine,
)


# Triton's interpreter has one grid position and one set of patches for all threads.
_ONE_AT_A_TIME = threading.RLock()


_semantic = Semantic(interpreter.interpreter_builder)


class _Rewriter(interpreter.FunctionRewriter):
    """Triton's rewriting of a kernel body, executed in globals of our choosing."""

    def __init__(self, fn: Callable[..., Any], namespace: dict[str, Any]) -> None:
        super().__init__(fn)
        self._namespace = namespace

    def _compile_and_exec(self, transformed_ast: Any) -> Callable[..., Any]:
        code = compile(transformed_ast, filename=self.filename, mode="exec")
        # The kernel's own decorator would wrap the twin again.
        exec(code, self._namespace)
        return self._namespace[self.fn.__name__]


@functools.cache
def python_twin(kernel: JITFunction) -> Callable[..., Any]:
    """The plain Python function that does what ``kernel`` does, one program at a time."""
    source = kernel.fn
    namespace = dict(source.__globals__)
    namespace["interpreter_semantic"] = _semantic
    for name in source.__code__.co_names:
        helper = namespace.get(name)
        if isinstance(helper, JITFunction) and helper not in _KNOWN_COMBINES:
            namespace[name] = python_twin(helper)
        elif isinstance(helper, ConstexprFunction):
            namespace[name] = _of_plain_values(helper)
    twin = _Rewriter(source, namespace).rewrite_ast()
    twin.fn = twin  # a custom combine function is called through this attribute
    return twin


def _of_plain_values(helper: ConstexprFunction) -> Callable[..., Any]:
    """The Python function of a constexpr function; only its module's constants are wrapped here."""

    def call(*args: Any) -> Any:
        return helper.fn(*(arg.value if type(arg) is tl.constexpr else arg for arg in args))

    return call


def _standard_library() -> list[Patch]:
    """``tl.sum``, ``tl.cdiv`` and their like as plain Python."""
    functions = [
        (name, value) for name, value in vars(tl).items() if isinstance(value, JITFunction)
    ]
    return [(tl, name, _deferred_twin(function)) for name, function in functions]


@functools.cache
def _deferred_twin(function: JITFunction) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return python_twin(function)(*args, **kwargs)

    return call


def _without_idle_work() -> list[Patch]:
    """Leaves out work of the interpreter whose results nobody reads.

    Triton 3.6 repeats every addition, subtraction and multiplication of integers in 64 bits, to
    check for overflow, and then drops the check unless it debugs. It builds its table of numpy's
    dtypes anew at every look-up, and the type of every block and of its shape, with their names as
    text, at every operation. Together they are three quarters of an interpreted product's time.
    """
    builder = interpreter.interpreter_builder
    options = builder.options
    if not options.debug:
        options = dataclasses.replace(options, sanitize_overflow=False)
    return [
        (builder, "options", options),
        (interpreter, "_get_np_dtype", _numpy_dtype),
        (tl.core, "_type_for_tuple_values", _type_of_tuple),
        (tl.block_type, "__init__", _make_block_type),
        (tl.tensor, "__init__", _make_tensor),
    ]


def _fma(x: Any, y: Any, z: Any) -> Any:
    """x · y + z rounded once, where Triton's interpreter rounds the product as well.

    A product of two float32 is exact in float64.
    """
    if z.data.dtype != np.float32:
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    total = np.multiply(x.data, y.data, dtype=np.float64) + z.data
    return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


def _arithmetic_of_gpus() -> list[Patch]:
    """Multiply-adds rounded once; of a number and a NaN, minimum and maximum are the number.

    Triton 3.6 interprets the latter as numpy's ``minimum`` and ``maximum``, which give the NaN.
    """
    builder = interpreter.interpreter_builder
    return [
        (builder, "create_fma", _fma),
        (builder, "create_minnumf", lambda a, b: builder.binary_op(a, b, np.fmin)),
        (builder, "create_maxnumf", lambda a, b: builder.binary_op(a, b, np.fmax)),
    ]


_type_of_values = tl.core._type_for_tuple_values
_types_of_numbers: dict[int, tl.core.tuple_type] = {}


def _type_of_tuple(values: Sequence[Any], fields: Sequence[str] | None = None) -> Any:
    """One type for all tuples of so many numbers, as shapes are."""
    for value in values:
        if type(value) is not int and type(value) is not tl.constexpr:
            return _type_of_values(values, fields)
    if fields is not None:
        return _type_of_values(values, fields)
    count = len(values)
    if count not in _types_of_numbers:
        _types_of_numbers[count] = _type_of_values([0] * count)
    return _types_of_numbers[count]


_new_block_type = tl.block_type.__init__
_block_types: dict[tuple, dict[str, Any]] = {}


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
    sizes = (getattr(size, "value", size) for size in shape)
    space, const = getattr(element_ty, "address_space", 0), getattr(element_ty, "const", False)
    key = (element_ty.name, space, const, *sizes)
    if key not in _block_types:
        _new_block_type(self, element_ty, shape)
        _block_types[key] = self.__dict__.copy()
    self.__dict__.update(_block_types[key])


_new_tensor = tl.tensor.__init__
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _make_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    if sizes not in _shapes:
        _new_tensor(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[sizes]


_numpy_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _numpy_dtype(dtype: tl.dtype) -> np.dtype:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_dtype_of_scalar(scalar)


def run_raw(kernel: JITFunction, grid: tuple[int, ...], args: Sequence[Any], meta: dict) -> None:
    """Interpret ``kernel`` on tensors as they are; other threads wait for their turn.

    Raises:
        InputError: a tensor has a dtype the interpreter would compute wrongly with.
    """
    for name, arg in zip(kernel.arg_names, args, strict=False):
        if isinstance(arg, Tensor) and arg.dtype in RAW_BITS:
            raise InputError(
                kernel.fn.__name__,
                name,
                f"a raw {str(arg.dtype)[6:]} tensor",
                "dtypes that numpy has",
                "Triton's interpreter computes on its bits; widen it to float32 first.",
            )
    with _ONE_AT_A_TIME:
        _interpret(kernel, grid, args, meta)


def _interpret(kernel: JITFunction, grid: tuple[int, ...], args: Sequence[Any], meta: dict) -> None:
    twin = python_twin(kernel)
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    bound = inspect.getcallargs(twin, *args, **meta)
    values = {k: v if k in constexprs else interpreter._implicit_cvt(v) for k, v in bound.items()}
    x, y, z = (*grid, 1, 1)[:3]
    interpreter.interpreter_builder.set_grid_dim(x, y, z)
    with interpreted_language():
        for program in itertools.product(range(x), range(y), range(z)):
            interpreter.interpreter_builder.set_grid_idx(*program)
            twin(**values)


@contextlib.contextmanager
def interpreted_language() -> Iterator[None]:
    """``triton.language`` computes inside the block; one thread at a time may be in it."""
    patches = (
        *_standard_library(),
        *_without_idle_work(),
        *_arithmetic_of_gpus(),
        *_tritons_patches(),
    )
    # As on a GPU, inf and NaN are results.
    with _patched(patches), np.errstate(all="ignore"):
        yield


Patch: TypeAlias = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and what that is for the length of one launch."""


@contextlib.contextmanager
def _patched(patches: Iterable[Patch]) -> Iterator[None]:
    scope = interpreter._LangPatchScope()
    try:
        for patch in patches:
            scope.set_attr(*patch)
        yield
    finally:
        scope.restore()


@functools.cache
def _tritons_patches() -> list[Patch]:
    """What Triton patches; to find that out takes longer than most launches."""
    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with _patched([(interpreter, "TritonSemantic", Semantic)]):
        scope = interpreter._patch_lang(everything)
    try:
        patches = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
    finally:
        scope.restore()
    operators = {name: value for owner, name, value in patches if owner is tl.tensor}
    patches += [(tl.tensor, name, value) for name, value in shortcuts(operators).items()]
    # numpy 2.4 no longer turns an array of one element into an int by itself.
    return [*patches, (tl.tensor, "__index__", lambda self: int(self.handle.data.item()))]


def run(kernel: JITFunction, grid: tuple[int, ...], args: Sequence[Any], meta: dict) -> None:
    """Interpret ``kernel``, with 16-bit brain floats and 8-bit floats computed in float32."""
    wide: dict[int, tuple[Tensor, Tensor]] = {}
    widened = [_widen(arg, wide) if isinstance(arg, Tensor) else arg for arg in args]
    before = [wider.clone() for _, wider in wide.values()]
    run_raw(kernel, grid, widened, meta)
    for (narrow, wider), old in zip(wide.values(), before, strict=True):
        # Only what the kernel wrote: rounding back may change the bits of a NaN it never touched.
        written = wider.view(torch.int32) != old.view(torch.int32)
        narrow.copy_(torch.where(written, wider.to(narrow.dtype), narrow))


def _widen(tensor: Tensor, wide: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """A float32 view over a widened copy of the tensor's whole storage.

    Whole storages, so that views that share memory still do, and strides stay what they were.
    """
    if tensor.dtype not in RAW_BITS:
        return tensor
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in wide:
        flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
        wide[storage.data_ptr()] = (flat, flat.float())
    copy = wide[storage.data_ptr()][1]
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
