"""Hashes of kernels' sources, by which Triton's compile cache finds their machine code.

Triton hashes a function with the functions that it calls, but takes in the constants of those alone
that it has hashed before. The hash then depends on which kernels a process compiled earlier, and a
cache that holds the machine code is asked for it by another name.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from triton.runtime.jit import JITCallable


def hash_source(function: JITCallable) -> None:
    """Have Triton hash what a function calls, and then the function."""
    if function.hash is None:
        for called in _called(function):
            hash_source(called)
        _ = function.cache_key


def _called(function: JITCallable) -> Iterator[JITCallable]:
    """The functions that another one's body names, by themselves or in a module."""
    nonlocals = inspect.getclosurevars(function.fn).nonlocals
    scope = {**function.fn.__globals__, **nonlocals}
    for node in ast.walk(function.parse()):
        value = None
        if isinstance(node, ast.Name):
            value = scope.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(scope.get(node.value.id), node.attr, None)
        if isinstance(value, JITCallable) and value is not function:
            yield value
