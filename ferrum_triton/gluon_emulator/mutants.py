"""Kernels with one statement of synchronisation removed, to prove that each is needed.

A test runs every mutant of a kernel and expects each to fail. A statement that is there for another
reason, say to hold the assembler's order, is marked by a comment that begins with ``redundant:``
and says why; it is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from ferrum_triton.gluon_emulator.errors import EmulationError
from ferrum_triton.gluon_emulator.language import emulated_name
from ferrum_triton.gluon_emulator.twins import tree_of, unwrapped

SYNCHRONISES = {
    "mbarrier.init",
    "mbarrier.expect",
    "mbarrier.arrive",
    "mbarrier.wait",
    "fence_async_shared",
    "thread_barrier",
    "warpgroup_mma_wait",
    "tma.store_wait",
    "async_copy.commit_group",
    "async_copy.wait_group",
    "async_copy.mbarrier_arrive",
}
_MARK = re.compile(r"#.*?\bredundant: *(.*)")


@dataclass(frozen=True)
class Mutant:
    """A kernel without one of its statements, for ``run(..., mutant=...)``."""

    function: JITFunction
    tree: ast.Module
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function.fn.__name__}: without {self.text}"


def mutants(kernel: JITFunction) -> Iterator[Mutant]:
    """One for each statement that synchronises, in the kernel and in the functions it calls."""
    for function, call, reason in _calls(kernel):
        if reason is None:
            yield _without(function, call)


def survivors(kernel: JITFunction, *launches: Callable[..., Any]) -> list[str]:
    """The mutants that no launch notices.

    Args:
        kernel: the kernel that is launched.
        launches: functions that run it with ``mutant=`` and compare its results. Every mutant has
            to make one of them raise an ``EmulationError`` or an ``AssertionError``: a kernel of
            which constants choose the parts takes a launch for each part.
    """
    return [str(each) for each in mutants(kernel) if not any(_fails(f, each) for f in launches)]


def _fails(launch: Callable[..., Any], mutant: Mutant) -> bool:
    try:
        launch(mutant=mutant)
    except (EmulationError, AssertionError):
        return True
    return False


def redundant(kernel: JITFunction) -> dict[str, str]:
    """The statements that are marked as redundant, and the reason of each."""
    return {
        str(_without(function, call)): reason
        for function, call, reason in _calls(kernel)
        if reason is not None
    }


def _calls(kernel: JITFunction) -> Iterator[tuple[JITFunction, ast.Call, str | None]]:
    for function in reached(kernel):
        tree, scope = tree_of(function), function.get_capture_scope()
        statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = _named(node.func, scope)
                wrapper = node in statements and _holds_assembly(called)
                if wrapper or emulated_name(called) in SYNCHRONISES:
                    yield function, node, _reason(function, node)


def reached(kernel: JITFunction) -> list[JITFunction]:
    """The kernel and the Gluon functions that it names, and that those name; not Triton's own."""
    found = [kernel]
    for function in found:
        scope = function.get_capture_scope()
        for node in ast.walk(function.parse()):
            if isinstance(node, (ast.Name, ast.Attribute)):
                other = _named(node, scope)
                for each in (other, *_methods(other)):
                    if isinstance(each, JITFunction) and each not in found and _is_own(each):
                        found.append(each)
    return found


def _is_own(function: JITFunction) -> bool:
    return not function.fn.__module__.startswith("triton.")


def _methods(x: Any) -> list[Any]:
    if not getattr(x, "__triton_aggregate__", False):
        return []
    return [*vars(x).values(), x.hash_attrs[0]]


def _named(node: ast.expr, scope: dict[str, Any]) -> Any:
    """What an expression of names and dots stands for, or None."""
    if isinstance(node, ast.Name):
        return unwrapped(scope.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _named(node.value, scope)
        if isinstance(owner, ModuleType) or getattr(owner, "__triton_aggregate__", False):
            return unwrapped(getattr(owner, node.attr, None))
    return None


def _holds_assembly(x: Any) -> bool:
    """Whether a function wraps assembly: a statement that calls it does so for its effect."""
    if not isinstance(x, JITFunction) or not _is_own(x):
        return False
    scope = x.get_capture_scope()
    called = [node.func for node in ast.walk(x.parse()) if isinstance(node, ast.Call)]
    return any(emulated_name(_named(each, scope)) == "inline_asm_elementwise" for each in called)


def _reason(function: JITFunction, node: ast.Call) -> str | None:
    """What a mark on the statement's lines, or alone on the line above, says."""
    lines, first = function.raw_src, function.starting_line_number
    inside = lines[node.lineno - first : (node.end_lineno or node.lineno) - first + 1]
    above = lines[node.lineno - first - 1].strip() if node.lineno > first else ""
    for line in [*inside, *([above] if above.startswith("#") else [])]:
        if match := _MARK.search(line):
            return match[1].strip()
    return None


class _Removal(ast.NodeTransformer):
    """A call replaced by nothing, or that of a wait by what it hands back."""

    def __init__(self, call: ast.Call) -> None:
        self._at = (call.lineno, call.col_offset, call.end_lineno, call.end_col_offset)

    def visit_Call(self, node: ast.Call) -> Any:
        if self._at != (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset):
            return self.generic_visit(node)
        named = {each.arg: each.value for each in node.keywords}
        deps = named.get("deps", node.args[1] if len(node.args) > 1 else None)
        if not ast.unparse(node.func).endswith("warpgroup_mma_wait") or deps is None:
            return ast.copy_location(ast.Constant(None), node)
        each = getattr(deps, "elts", [])
        return each[0] if len(each) == 1 else deps


def _without(function: JITFunction, call: ast.Call) -> Mutant:
    tree = _Removal(call).visit(tree_of(function))
    file = function.fn.__code__.co_filename
    return Mutant(function, tree, file, call.lineno, ast.unparse(call))
