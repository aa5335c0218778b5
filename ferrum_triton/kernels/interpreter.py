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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from ferrum_triton.errors import InputError

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
    namespace["interpreter_semantic"] = interpreter.interpreter_semantic
    namespace["__triton_core__"] = tl.core  # makes Triton patch tl.core along with tl
    for name in source.__code__.co_names:
        helper = namespace.get(name)
        if isinstance(helper, JITFunction) and helper not in _KNOWN_COMBINES:
            namespace[name] = python_twin(helper)
    twin = _Rewriter(source, namespace).rewrite_ast()
    twin.fn = twin  # a custom combine function is called through this attribute
    return twin


@contextlib.contextmanager
def _standard_library() -> Iterator[None]:
    """``tl.sum``, ``tl.cdiv`` and their like as plain Python, for the length of one launch."""
    originals = {k: v for k, v in vars(tl).items() if isinstance(v, JITFunction)}
    try:
        for name, function in originals.items():
            setattr(tl, name, _deferred_twin(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(tl, name, function)


@functools.cache
def _deferred_twin(function: JITFunction) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return python_twin(function)(*args, **kwargs)

    return call


@contextlib.contextmanager
def _no_idle_work() -> Iterator[None]:
    """Leaves out work of the interpreter whose results nobody reads, for the length of one launch.

    Triton 3.6 repeats every addition, subtraction and multiplication of integers in 64 bits, to
    check for overflow, and then drops the check unless it debugs. It also builds its table of
    numpy's dtypes anew at every look-up. Together they are half of an interpreted product's time.
    """
    builder, look_up = interpreter.interpreter_builder, interpreter._get_np_dtype
    options = builder.options
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = _numpy_dtype
    try:
        yield
    finally:
        builder.options, interpreter._get_np_dtype = options, look_up


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
    # As on a GPU, inf and NaN are results.
    with _standard_library(), _no_idle_work(), np.errstate(all="ignore"):
        patches = interpreter._patch_lang(twin)
        # numpy 2.4 no longer turns an array of one element into an int by itself.
        patches.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        try:
            for program in itertools.product(range(x), range(y), range(z)):
                interpreter.interpreter_builder.set_grid_idx(*program)
                twin(**values)
        finally:
            patches.restore()


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
