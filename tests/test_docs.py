"""What the pages say works as printed: examples, calls, names and links."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch

from ferrum_triton import OPS, get_backend

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# coverage.md is generated and has a test of its own.
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name != "coverage.md")
LINKED = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "bench" / "README.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def prose(page):
    """The text without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def named_ops(page):
    """Ops that the page names in backticks or in an example."""
    code = [body for _, body in FENCE.findall(page.read_text())] + INLINE.findall(prose(page))
    return {word for word in re.findall(r"\w+", " ".join(code)) if word in OPS}


@by_page
def test_examples_run(page):
    text, names = page.read_text(), {}
    blocks = [match for match in FENCE.finditer(text) if match[1] == "python"]
    assert blocks or page.stem == "README", f"{page.name} shows no example"
    for block in blocks:
        # At their lines in the page, so that tracebacks and Triton find the source there.
        above = "\n" * text.count("\n", 0, block.start(2))
        code = compile(above + block[2], str(page), "exec")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            exec(code, names)


@by_page
def test_examples_check_something(page):
    for _, block in (match for match in FENCE.findall(page.read_text()) if match[0] == "python"):
        checks = re.findall(r"^ *(?:assert\b|torch\.testing\.assert_close)", block, re.M)
        assert checks, f"{page.name}: an example without an assertion"


@by_page
def test_names_exist(page):
    backend = get_backend("cpu")
    for name in re.findall(r"\bbackend\.(\w+)", page.read_text()):
        assert hasattr(backend, name), f"{page.name} names backend.{name}"


@by_page
def test_calls_follow_signatures(page):
    """Positional arguments in order and keywords by name, with the defaults the op has."""
    for quoted in INLINE.findall(prose(page)):
        match = re.match(r"backend\.(\w+)\(", quoted)
        if match is None:
            continue
        call = ast.parse(quoted, mode="eval").body
        parameters = OPS[match[1]].signature.parameters
        assert len(call.args) <= len(parameters), quoted
        required = [name for name, p in parameters.items() if p.default is p.empty]
        given = {*itertools.islice(parameters, len(call.args)), *(k.arg for k in call.keywords)}
        assert given >= set(required), f"{quoted} lacks {set(required) - given}"
        for keyword in call.keywords:
            assert keyword.arg in parameters, quoted
            default = parameters[keyword.arg].default
            assert ast.literal_eval(keyword.value) == default, f"{quoted}: {keyword.arg}"


@by_page
def test_tables_give_parameters_their_names(page):
    """In a family's own table, the first cell of a row; elsewhere calls may rename arguments."""
    for quoted in re.findall(r"^\| `(backend\.\w+\([^`]*\))`", prose(page), re.M):
        call = ast.parse(quoted, mode="eval").body
        names = [argument.id for argument in call.args]
        assert names == list(OPS[call.func.attr].signature.parameters)[: len(names)], quoted


def test_the_engine_to_copy_stays_short():
    code = [
        body for kind, body in FENCE.findall((DOCS / "engine.md").read_text()) if kind == "python"
    ]
    assert sum(len(body.splitlines()) for body in code) <= 150
    assert "ferrum_triton.models" not in "".join(code)


def test_every_op_is_on_a_page():
    found = set().union(*(named_ops(page) for page in PAGES))
    declared = {
        name: op for name, op in OPS.items() if op.__module__.startswith("ferrum_triton.ops")
    }
    if not (DOCS / "attention.md").exists():
        declared = {name: op for name, op in declared.items() if ".attention" not in op.__module__}
    assert not set(declared) - found, f"on no page: {sorted(set(declared) - found)}"


def test_index_lists_every_page():
    listed = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(p.name for p in DOCS.glob("*.md") if p.name != "README.md")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).is_file(), f"{page.name}: {target}"
