"""A short hash of the code behind a row: what it launches, and the source of every kernel reached.

A row stores the fingerprint of the code that ran, ``<arch>/<hash>``. :mod:`bench.check` computes it
again, on meta tensors and so without a GPU, and prints the row as stale where the two differ.
Comments, docstrings and the place of a function in its file are not part of it; the versions of
torch and triton stand in the row itself.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITCallable

from bench.launches import Recorded
from ferrum_triton.kernels.jit import Kernel, Launch

DIGITS = 12
# Objects of other packages are told apart by their versions.
OURS = ("ferrum_triton", "bench", "tests")


def fingerprint(recorded: Recorded, arch: str) -> str:
    """``<arch>/<hash>`` of what a call launches."""
    digest = hashlib.sha256()
    for launch in recorded.launches:
        digest.update(_launch_text(launch).encode())
    for operation in recorded.operations:
        digest.update(operation.encode())
    return f"{arch}/{digest.hexdigest()[:DIGITS]}"


def _launch_text(launch: Launch) -> str:
    meta = sorted((name, _value(value)) for name, value in launch.meta.items())
    # A format or a pool comes with what its properties compute.
    classes = {type(value) for value in (*launch.args, *launch.meta.values())}
    described = sorted(source_hash(each) for each in classes if _has_source(each))
    source = source_hash(launch.kernel.jit)
    return repr((source, described, launch.grid, *map(_value, launch.args), meta))


@functools.cache
def source_hash(kernel: JITCallable | type) -> str:
    """Hash of the source of a kernel, or a class, and of all that it reaches by name."""
    reached: dict[str, str] = {}
    pending: list[tuple[str, Any]] = [("", kernel)]
    while pending:
        name, value = pending.pop()
        if not _has_source(value):
            reached.setdefault(name, _value(value))
            continue
        function = value.fn if isinstance(value, JITCallable) else value
        where = f"{function.__module__}.{function.__qualname__}"
        if where in reached:
            continue
        tree = _tree(function)
        reached[where] = _syntax(tree)
        pending += _named(tree, function)
    return hashlib.sha256(repr(sorted(reached.items())).encode()).hexdigest()


def _has_source(value: Any) -> bool:
    """Whether a value is a function or a class of this repository."""
    function = value.fn if isinstance(value, JITCallable) else value
    named = inspect.isfunction(function) or inspect.isclass(function)
    return named and function.__module__.split(".")[0] in OURS


def _tree(function: Any) -> ast.Module:
    """The syntax of a function or a class, without decorators and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    return tree


def _syntax(node: Any) -> str:
    """A syntax tree as text. ``ast.dump`` writes another with each version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(_syntax, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return f"{type(node).__name__}({', '.join(f'{n}={_syntax(v)}' for n, v in fields)})"


def _named(tree: ast.Module, function: Any) -> Iterator[tuple[str, Any]]:
    """The values of the global names that a function or a class reads."""
    if inspect.isclass(function):
        space = vars(inspect.getmodule(function))
    else:
        space = function.__globals__ | inspect.getclosurevars(function).nonlocals
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(names & space.keys()):
        if not inspect.ismodule(space[name]):
            yield name, space[name]


def _value(value: Any) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, Kernel | JITCallable) or inspect.isroutine(value):
        return getattr(value, "__name__", type(value).__name__)
    if hasattr(value, "block_shape") and hasattr(value, "base"):  # a host tensor descriptor
        return repr((str(value.base.dtype), list(value.shape), list(value.block_shape)))
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
