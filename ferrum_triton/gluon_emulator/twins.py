"""Python twins of Gluon functions: the same source, with the language replaced by its emulation.

A twin is compiled from the function's source, at its lines. What it names of its module is replaced
by identity, whatever it is called there: Gluon's functions, other Gluon functions, modules that
hold them. And it does what Triton's compiler does to a function: a constant that is assigned to a
variable becomes a scalar, unless it is annotated, and so does one that is returned.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import triton.experimental.gluon.language as gluon_language
from triton.compiler.code_generator import get_jit_fn_file_line
from triton.experimental.gluon.language.nvidia import hopper as gluon_hopper
from triton.language import core as tl
from triton.language import standard
from triton.runtime.jit import ConstexprFunction, JITFunction

from ferrum_triton.gluon_emulator import language
from ferrum_triton.gluon_emulator.clocks import here
from ferrum_triton.gluon_emulator.errors import Misuse
from ferrum_triton.gluon_emulator.hopper import EMULATED
from ferrum_triton.gluon_emulator.language import emulated_name
from ferrum_triton.gluon_emulator.memory import View
from ferrum_triton.gluon_emulator.schedule import current
from ferrum_triton.gluon_emulator.tensors import Descriptor
from ferrum_triton.gluon_emulator.values import TRITON_TYPES, Value, to_value


def unwrapped(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


_BUILTINS = {
    "range": language.counted,
    "min": language.builtin_extreme("min"),
    "max": language.builtin_extreme("max"),
    "print": language.ignored,
}
# Classes that kernels call or ask of, by identity.
_CLASSES: list[tuple[Any, Any]] = [
    (builtins.range, language.counted),
    (tl.range, language.counted),
    (tl.static_range, EMULATED["static_range"]),
    (tl.constexpr, unwrapped),
    (tl.tensor, Value),
    (tl.tuple, tuple),
    (gluon_language.shared_memory_descriptor, View),
    (gluon_hopper.tma.tensor_descriptor, Descriptor),
    (gluon_hopper.warpgroup_mma_accumulator, Value),
]


def tree_of(function: JITFunction) -> ast.Module:
    """A function's syntax, at its lines in its file."""
    tree = function.parse()
    _, line = get_jit_fn_file_line(function)
    ast.increment_lineno(tree, line - tree.body[0].lineno)
    return tree


class _AsTriton(ast.NodeTransformer):
    """What Triton's compiler does and Python does not."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list, node.returns = [], None
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            each.annotation = None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        target, values = node.targets[0], getattr(node.value, "elts", [node.value])
        targets = getattr(target, "elts", [target])
        made = [isinstance(each, ast.Call) for each in values] * (len(targets) // len(values))
        names = [ast.unparse(each) if new else "" for each, new in zip(targets, made, strict=False)]
        node.value = _call("__assigned", node.value, *(ast.Constant(name) for name in names))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return node
        plain = ast.copy_location(ast.Assign([node.target], node.value), node)
        if ast.unparse(node.annotation).rpartition(".")[2] == "constexpr":
            return self.generic_visit(plain)
        return self.visit_Assign(plain)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        value = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _call("__returned", node.value)
        return node

    def visit_List(self, node: ast.List) -> Any:
        self.generic_visit(node)
        # Lists are tuples in Triton, and add to them.
        return ast.copy_location(ast.Tuple(node.elts, node.ctx), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        kind = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        result = node.values[0]
        for each in node.values[1:]:
            later = ast.Lambda(ast.arguments([], [], None, [], [], None, []), each)
            result = _call("__logical", kind, result, later)
        return ast.copy_location(result, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.copy_location(_call("__negated", node.operand), node)
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _decayed(x: Any) -> Any:
    """Constants as the scalars that Triton makes of them."""
    x = unwrapped(x)
    if isinstance(x, tuple):
        items = [_decayed(each) for each in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return to_value(x) if isinstance(x, (bool, int, float)) else x


def _assigned(x: Any, *names: str) -> Any:
    """What is assigned, where calls made shared memory that the variables' names are given to."""
    for each, name in zip(x if len(names) > 1 else (x,), names, strict=False):
        if name and isinstance(each, View) and not each.path:
            each.allocation.name = name
    return _decayed(x)


_HELPERS = {
    "__assigned": _assigned,
    "__returned": _decayed,
    "__logical": language.logical,
    "__negated": language.negated,
}


def compiled(function: JITFunction, tree: ast.Module) -> CodeType:
    tree = ast.fix_missing_locations(_AsTriton().visit(copy.deepcopy(tree)))
    return compile(tree, function.fn.__code__.co_filename, "exec")


@functools.cache
def _code(function: JITFunction) -> CodeType:
    return compiled(function, tree_of(function))


@functools.cache
def _names(function: JITFunction) -> set[str]:
    return {node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name)}


class Twins:
    """The twins of one run, in which assembly and a mutated function may be replaced.

    ``replaced`` has Python functions of tensors for Gluon functions, ``trees`` other syntax.
    """

    def __init__(self, replaced: dict[Any, Callable], trees: dict[Any, ast.Module]) -> None:
        self.replaced, self.trees = replaced, trees
        self._made: dict[Any, Callable] = {}
        self._classes: dict[Any, Any] = {}

    def call(self, function: JITFunction, args: tuple, options: dict[str, Any]) -> Any:
        if function in self.replaced:
            return _through_tensors(self.replaced[function], args, options)
        if function not in self._made:
            self._made[function] = self._make(function)
        for parameter, arg in zip(function.params, args, strict=False):
            _check_constant(function, parameter.name, parameter.is_constexpr, arg)
        return self._made[function](*args, **options)

    def _make(self, function: JITFunction) -> Callable:
        tree = self.trees.get(function)
        code = _code(function) if tree is None else compiled(function, tree)
        scope = function.get_capture_scope()
        namespace = dict(_BUILTINS) | _HELPERS
        for name in _names(function) & set(scope):
            namespace[name] = self.translate(scope[name])
        exec(code, namespace)
        return namespace[function.fn.__name__]

    def translate(self, x: Any) -> Any:
        """What a kernel finds under a name of its module, instead of what is there."""
        if isinstance(x, JITFunction):
            return Helper(self, x)
        if isinstance(x, ConstexprFunction):
            return _of_constants(x)
        if isinstance(x, tl.constexpr):
            return self.translate(x.value)
        if isinstance(x, ModuleType):
            return _Module(self, x)
        for known, emulation in _CLASSES:
            if x is known:
                return emulation
        if getattr(x, "__triton_aggregate__", False):
            if x not in self._classes:
                self._classes[x] = self._aggregate(x)
            return self._classes[x]
        if name := emulated_name(x):
            return EMULATED.get(name) or _refused(name)
        return x

    def _aggregate(self, cls: Any) -> type:
        """A class that ``aggregate`` decorated, whose methods are twins."""
        constructor = cls.hash_attrs[0]
        # One of constants is called with values too.
        plain = isinstance(constructor, ConstexprFunction)
        constructor = constructor.fn if plain else self._method(constructor)

        class Aggregate:
            __init__ = constructor

            def __setattr__(self, name: str, value: Any) -> None:
                object.__setattr__(self, name, unwrapped(value))

        Aggregate.__name__ = cls.__name__
        for name, member in vars(cls).items():
            if not name.startswith("__") and callable(member):
                setattr(Aggregate, name, self._method(member))
        return Aggregate

    def _method(self, member: Any) -> Callable:
        function = self.translate(member)
        return lambda *args, **options: function(*args, **options)


class Helper:
    """A Gluon function that a kernel calls."""

    def __init__(self, twins: Twins, kernel: JITFunction) -> None:
        self._twins, self.kernel = twins, kernel
        self.__name__ = kernel.fn.__name__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._twins.call(self.kernel, args, options)


class _Module:
    """A module, seen by a kernel."""

    def __init__(self, twins: Twins, module: ModuleType) -> None:
        self._twins, self._module = twins, module

    def __getattr__(self, name: str) -> Any:
        found = self._twins.translate(getattr(self._module, name))
        setattr(self, name, found)
        return found


def _refused(name: str) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        raise Misuse(f"{name} at {here()} is not emulated")

    return call


def _of_constants(function: ConstexprFunction) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        for name, arg in [*enumerate(args), *options.items()]:
            if isinstance(arg, Value):
                raise Misuse(
                    f"argument {name} of {function.fn.__name__} at {here()} is no constant, and "
                    "the function is one of constants"
                )
        return unwrapped(function.fn(*args, **options))

    return call


def _check_constant(function: JITFunction, name: str, is_constexpr: bool, arg: Any) -> None:
    if is_constexpr and isinstance(arg, Value):
        raise Misuse(
            f"argument {name} of {function.fn.__name__} at {here()} is declared gl.constexpr, and "
            "given a value of the kernel's: a constant that was assigned to a variable is no "
            "constant any more, unless the variable is annotated"
        )


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _through_tensors(twin: Callable, args: tuple, options: dict[str, Any]) -> Any:
    """Call a twin that takes and gives torch tensors."""
    results = twin(*map(_plain, args), **{name: _plain(arg) for name, arg in options.items()})
    layout = next((arg.layout for arg in args if isinstance(arg, Value)), None)

    def wrapped(result: Any) -> Value:
        return Value(result, TRITON_TYPES[result.dtype], layout)

    return tuple(map(wrapped, results)) if isinstance(results, tuple) else wrapped(results)


def member(value: Value, name: str) -> Callable:
    """A function of the language as a method of its first argument."""
    if name in EMULATED and not name.startswith("_"):
        return functools.partial(EMULATED[name], value)
    function = getattr(standard, name, None)
    if not isinstance(function, JITFunction):
        raise AttributeError(f"a value of a Gluon kernel has no attribute {name}")
    return functools.partial(Helper(current().program.settings.twins, function), value)
