"""Rewriting of a parsed chat template, so that whatever costs goes through the meter.

Loops, concatenations, comparisons, literals and slices compile to plain Python that no hook of
Jinja sees. Here they become calls of internal filters, whose names begin with ``#`` and so cannot
be written in a template.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

LOOP, CONCAT, OPERAND, LITERAL, KEY = "#loop", "#concat", "#operand", "#literal", "#key"

_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.EvalContextModifier,
)


def meter_syntax(tree: nodes.Template) -> nodes.Template:
    """Rewrite a template's syntax tree, in place.

    Raises:
        TemplateAssertionError: it uses other templates, blocks, autoescape or recursive loops.
    """
    for node in tree.find_all(_REFUSED):
        kind = type(node).__name__.lower()
        raise TemplateAssertionError(f"{kind!r} is not available in chat templates", node.lineno)
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            # Their inner rounds would not pass the rewritten expression.
            reason = "recursive loops are not available in chat templates"
            raise TemplateAssertionError(reason, loop.lineno)
    return _Rewriter().visit(tree)


def longest_macro(tree: nodes.Template) -> int:
    """Number of nodes of the longest macro or call block, 1 where there is none."""
    bodies = tree.find_all((nodes.Macro, nodes.CallBlock))
    return max((_num_nodes(body) for body in bodies), default=1)


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = nodes.Const(_num_nodes(node), lineno=node.lineno)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, LOOP, [cost])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        holders: tuple[Any, ...] = (node, *node.ops)
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = _filtered(holder.expr, OPERAND)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, LITERAL) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, LITERAL)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, LITERAL) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _filtered(node.key, KEY)
        return node


def _filtered(node: Any, name: str, args: Iterable[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _num_nodes(root: nodes.Node) -> int:
    return 1 + sum(1 for _ in root.find_all(nodes.Node))
