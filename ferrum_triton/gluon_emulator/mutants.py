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
from ferrum_triton.gluon_emulator.hopper import emulated_name
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
    for function, node, reason in _statements(kernel):
        if reason is None:
            yield _without(function, node)


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
        str(_without(function, node)): reason
        for function, node, reason in _statements(kernel)
        if reason is not None
    }


def _statements(kernel: JITFunction) -> Iterator[tuple[JITFunction, ast.stmt, str | None]]:
    for function in reached(kernel):
        tree, scope = tree_of(function), function.get_capture_scope()
        lines = function.raw_src
        for node in ast.walk(tree):
            if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
                found = _named(node.value.func, scope)
                if emulated_name(found) in SYNCHRONISES or (
                    isinstance(node, ast.Expr) and _holds_assembly(found)
                ):
                    yield function, node, _reason(function, lines, node)


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


def _reason(function: JITFunction, lines: list[str], node: ast.stmt) -> str | None:
    """What a mark on the statement's lines, or alone on the line above, says."""
    first = function.starting_line_number
    inside = lines[node.lineno - first : (node.end_lineno or node.lineno) - first + 1]
    above = lines[node.lineno - first - 1].strip() if node.lineno > first else ""
    for line in [*inside, *([above] if above.startswith("#") else [])]:
        if match := _MARK.search(line):
            return match[1].strip()
    return None


class _Removal(ast.NodeTransformer):
    def __init__(self, line: int, column: int) -> None:
        self._at = (line, column)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == self._at:
            if isinstance(node, ast.Assign):
                node.value = _passed_through(node.value)
                return node
            if isinstance(node, ast.Expr):
                return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _passed_through(call: ast.expr) -> ast.expr:
    """The dependencies of a wait, as they were."""
    assert isinstance(call, ast.Call)
    named = {each.arg: each.value for each in call.keywords}
    deps = named.get("deps", call.args[1] if len(call.args) > 1 else None)
    assert deps is not None, ast.unparse(call)
    if isinstance(deps, (ast.Tuple, ast.List)) and len(deps.elts) == 1:
        return deps.elts[0]
    return deps


def _without(function: JITFunction, node: ast.stmt) -> Mutant:
    tree = tree_of(function)
    tree = _Removal(node.lineno, node.col_offset).visit(tree)
    text = ast.unparse(node)
    return Mutant(function, tree, function.fn.__code__.co_filename, node.lineno, text)
