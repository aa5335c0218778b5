"""Hostile chat templates: they reach nothing but data, and come to a quick end."""

import functools
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton.errors import FileError
from ferrum_triton.files import chat, chat_syntax
from ferrum_triton.files.chat import ChatTemplate
from ferrum_triton.files.chat_meter import Meter

pytest.importorskip("jinja2", reason="needs the extra [cli]")

USER = {"role": "user", "content": "Hi"}
NS = "{% set ns = namespace(l=[1], s='ab', n=3) %}"


def doubling(step, use, rounds=60):
    return f"{NS}{{% for i in range({rounds}) %}}{step}{{% endfor %}}{use}"


NESTING = "{% set ns.l = [ns.l, ns.l] %}"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}{{ ''['__class__'].x }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ ([''] | map(attribute='__class__') | first).x }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.x }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{{ range.__class__ }}{{ range.__class__.x }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0[__class__].x}'.format('') }}",
    "{{ '{a.__class__.x}'.format_map({'a': 1}) }}",
    "{{ 'x'.encode() }}",
    "{{ (1).to_bytes(9, 'big') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].clear() }}",
    "{{ messages.__len__() }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}{{ m._func.x }}",
    "{% for x in [1] %}{{ loop._iterator.x }}{{ loop.__class__.x }}{% endfor %}",
    "{% set ns = namespace() %}{{ ns.__class__.x }}{{ ns._Namespace__attrs.x }}",
    "{{ ''.join.__self__.x }}",
    "{{ messages|map('#loop', -10**6)|list }}",
    "{{ messages|map('#literal')|list }}",
    "{{ messages | #loop(1) }}",
    "{{ 1|random }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% block a %}{% endblock %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
]
BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set s = 'a' * 99999 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ range(99999)|map('string')|map('length')|sum }}" * 40,
    "{{ range(-2**63, 2**63)|length }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ ('a' * 10**6) * 10**6 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ 99 ** 99 ** 99 }}",
    doubling("{% set ns.n = ns.n * ns.n %}", "{{ ns.n }}"),
    "{% set x = ('f' * 10**6)|int(base=16) %}{{ x // 3 }}",
    "{% for i in range(99999) %}{% set y = 0x"
    + "f" * 40_000
    + " // 0x"
    + "e" * 20_000
    + " %}{% endfor %}",
    "{{ 1.5|round(10**9) }}",
    "{{ 1.5|round(10**9, 'floor') }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%.999999999f' % 1.5 }}",
    "{{ '%(a)s' * 10**5 % {'a': 'x' * 10**5} }}",
    "{{ ('%(a)999s' * 10**5) % {'a': 'x'} }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ ('{0:>999}' * 10**5).format(1) }}",
    "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ 'x\\t'.expandtabs(10**10) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6).join(['b'] * 10**5) }}",
    "{{ (['b'] * 10**5)|join('a' * 10**6) }}",
    "{{ ('a\\n' * 10**6)|indent(10**9) }}",
    "{{ ('\\n' * 10**6)|indent('x' * 32) }}",
    "{{ {'a': {'a': {'a': 1}}}|tojson(indent=10**9) }}",
    "{{ ([[[1]]] * 99999)|tojson(indent='x' * 10**6) }}",
    "{{ ([1] * 99999)|tojson(separators=('x' * 10**6, ':')) }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ (['a'] * 99999)|map(attribute='" + "0." * 10_000 + "0')|list }}",
    "{{ ('a' * 10**5)|map(attribute='" + "0." * 20_000 + "0')|list }}",
    "{{ ('a' * 8 * 10**6)|list|length }}",
    "{{ ('a ' * 4 * 10**6).split()|length }}",
    "{{ ('a' * 8 * 10**6).split('a')|length }}",
    "{{ ('\\n' * 8 * 10**6).splitlines()|length }}",
    "{{ [[1]] * 9999 | sum(start=[]) }}{{ ([[1] * 999] * 9999)|sum(start=[])|length }}",
    doubling("{% set ns.s = ns.s ~ ns.s %}", ""),
    doubling("{% set ns.s = ns.s + ns.s %}", ""),
    doubling("{% set ns.s = [ns.s, ns.s]|join %}", ""),
    doubling("{% set ns.s = ''.join([ns.s, ns.s]) %}", ""),
    doubling("{% set ns.s = '%s%s' % (ns.s, ns.s) %}", ""),
    doubling("{% set ns.s = '{0}{0}'.format(ns.s) %}", ""),
    doubling("{% set ns.s = ns.s|tojson|tojson %}", ""),
    doubling("{% set ns.s = ns.s|e|replace('a', 'aa') %}", ""),
    doubling("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", ""),
    doubling("{% set ns.s %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}", ""),
    doubling("{% set ns.l = ns.l + ns.l %}", ""),
    doubling(NESTING, "{{ ns.l }}"),
    doubling(NESTING, "{{ ns.l|string }}"),
    doubling(NESTING, "{{ ns.l|tojson }}"),
    doubling(NESTING, "{{ ns.l|join }}"),
    doubling(NESTING, "{{ ns.l ~ '' }}"),
    doubling(NESTING, "{{ '%s' % ns.l }}"),
    doubling(NESTING, "{{ '{}'.format(ns.l) }}"),
    doubling(NESTING, "{{ '{!r}'.format(ns.l) }}"),
    doubling(NESTING + "{% set ns.m = [ns.m, ns.m] %}", "{{ ns.l == ns.m }}"),
    doubling(NESTING, "{{ [0] in ns.l }}"),
    doubling(NESTING, "{{ [ns.l]|select('eq', [1])|list }}"),
    doubling(NESTING, "{{ [ns.l, ns.l]|sort }}"),
    doubling(NESTING, "{{ ns.l.index(1) }}"),
    doubling(NESTING, "{{ {'a': ns.l} }}"),
    doubling(NESTING, "{{ {'a': ns.l}.values() }}"),
    doubling("{% set ns.l = {'a': ns.l, 'b': ns.l} %}", "{{ ns.l }}"),
    doubling("{% set ns.l = (ns.l, ns.l) %}", "{{ {ns.l: 1} }}"),
    doubling("{% set ns.l = (ns.l, ns.l) %}", "{{ {}[ns.l] }}"),
    doubling("{% set ns.l = (ns.l, ns.l) %}", "{{ [ns.l]|unique|list }}"),
    doubling("{% set ns.l = [ns.l] %}", "{{ ns.l }}", 9999),
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "{% macro m() %}"
    + "{{ 1 }}" * 8000
    + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "{% for i in range(99999) %}{% if " + "1 and " * 9999 + "0 %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}" + "{% set x = messages[0].role %}" * 999 + "{% endfor %}",
    "{% for i in range(99999) %}{% set x = ('a' * 8 * 10**6)[1:] %}{% endfor %}",
    "{% set s = 'a' * 8 * 10**6 %}{% for i in range(99999) %}{% if s == s ~ '' %}{% endif %}"
    "{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set s = '🎉' * 8 * 10**6 %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = [ns.l, i ~ '🎉' * 10**4] %}{% endfor %}",
    "{% set s = 'a' * 8 * 10**6 %}{% for i in range(99999) %}{% set x = 'b' in s %}{% endfor %}",
    "{% set s = 'a' * 8 * 10**6 %}{% for i in range(99999) %}{% set x = s.upper() %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 1" + " + 1" * 15_000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "{{ 'a' " * 10,
    "".join(f"{{% set v{i} = 1 %}}" for i in range(1500)) + "{% if a %}{% endif %}" * 1500 + "{{ 1",
]
HOSTILE = ESCAPES + BOMBS
# Those that would make something large, rather than run long.
LARGE = [source for source in BOMBS if "10**" in source or "ns.s" in source]


def attack(source):
    """Compile and render a hostile template; True when it ends in FileError."""
    try:
        ChatTemplate(source, "<s>", "</s>").render([USER])
    except FileError:
        return True
    return False


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile(source):
    start = time.process_time()  # whatever else the machine does
    assert attack(source), source[:200]
    assert time.process_time() - start < 8.0, source[:200]


def test_hostile_templates_fill_no_memory():
    pytest.importorskip("resource", reason="the system has no memory limits")
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux enforces the limit")
    script = """
        import resource
        from tests.test_chat_hostile import LARGE, attack
        attack("warm up {{ 1 }}")
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for source in LARGE:
            try:
                ended = attack(source)
            except MemoryError:
                ended = False
            print(int(ended), end="")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("", peak >> 10)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert run.stdout.split()[0] == "1" * len(LARGE)


@pytest.mark.parametrize(
    "attribute",
    ["(1).real", "(1.5).hex", "'x'.encode", "{}.pop", "[].append", "range(3).stop", "m.arguments"],
)
def test_attributes_that_are_not_listed_do_not_exist(attribute):
    """Not even those that nothing could be done with."""
    macro = "{% macro m(a) %}{% endmacro %}"
    source = f"{macro}{{{{ {attribute} }}}}{{{{ {attribute} is defined }}}}"
    assert ChatTemplate(source, "", "").render([]) == "False"


def test_only_functions_of_the_sandbox_are_called():
    """Whatever a template got hold of."""
    sandbox = pytest.importorskip("ferrum_triton.files.chat_sandbox")
    environment = sandbox.MeteredEnvironment(100)
    template = environment.from_string("{{ f('1') }}")
    assert environment.run(template, {"f": "1".join}) == "1"
    for f in (int, lambda x: x, max, functools.partial(max, "0"), sandbox.Meter(1).integers):
        with pytest.raises(sandbox.SecurityError):
            environment.run(template, {"f": f})


NESTED = st.recursive(
    st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(st.integers(0, 9), inner)
)


@given(value=st.lists(NESTED), factor=st.integers(1, 9))
def test_going_through_values_costs_one_for_each(value, factor):
    def count(held):
        if isinstance(held, dict):
            return len(held) + len(held) + sum(map(count, held.values()))
        return len(held) + sum(map(count, held)) if isinstance(held, list) else 0

    costs = []
    for options in ({}, {"factor": factor}):
        meter = Meter(1)
        full = meter.fuel
        meter.walk(value, **options)
        costs.append(full - meter.fuel)
    assert costs == [1 + count(value), factor * (1 + count(value))]


def test_limits_of_values():
    """The largest there may be, and one more."""

    def refused(source, reason):
        with pytest.raises(FileError, match=reason):
            ChatTemplate(source, "", "").render([])

    assert ChatTemplate("{{ range(100000)|length }}", "", "").render([]) == "100000"
    for size in (100_001, 10**9, 2**70):
        refused(f"{{{{ range({size})|length }}}}", "a range is longer than 100000")
    nested = doubling("{% set ns.l = [ns.l] %}", "{{ ns.l }}", 63)
    assert ChatTemplate(nested, "", "").render([]) == "[" * 64 + "1" + "]" * 64
    refused(nested.replace("63", "64"), "nested more than 64 deep")
    for subscript in ("(1, 2)", "1, 2", "()"):
        refused(f"{{{{ {{}}[{subscript}] }}}}", "keys and subscripts must be strings or numbers")


@pytest.mark.parametrize(
    "around",
    [
        "{% for i in INNER %}{% endfor %}",
        "{% for i in x %}{{ INNER }}{% endfor %}",
        "{{ y ~ (INNER | trim) }}",
        "{{ y < (INNER) }}",
        "{{ x[INNER] }}",
        "{{ (INNER)[1:2] }}",
        "{{ [1, INNER] }}",
        "{{ (1, INNER) }}",
        "{{ {INNER: 1} }}",
        "{{ {1: INNER} }}",
    ],
)
def test_what_costs_is_metered_inside_of_whatever_costs(around):
    metered = {
        "a ~ b": chat_syntax.CONCAT,
        "[a]": chat_syntax.LITERAL,
        "a[1:]": chat_syntax.LITERAL,
        "a < b": chat_syntax.OPERAND,
    }
    plain = meter(around.replace("INNER", "a"))
    for inner, name in metered.items():
        names = meter(around.replace("INNER", inner))
        assert names.count(name) > plain.count(name)


def meter(source):
    """The names of a template's filters once it is metered."""
    tree = chat_syntax.meter_syntax(jinja2.Environment(autoescape=False).parse(source))
    return [node.name for node in tree.find_all(jinja2.nodes.Filter)]


def test_source_limit():
    # The bombs above are not just too long.
    assert max(map(len, HOSTILE)) <= chat.MAX_SOURCE_CHARS
    assert ChatTemplate("x" * chat.MAX_SOURCE_CHARS, "", "")
    with pytest.raises(FileError, match="longer than"):
        ChatTemplate("x" * (chat.MAX_SOURCE_CHARS + 1), "", "")


def test_output_limit(monkeypatch):
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARS", 10)
    assert ChatTemplate("{% for i in range(10) %}x{% endfor %}", "", "").render([]) == "x" * 10
    with pytest.raises(FileError, match="passes 10 characters"):
        ChatTemplate("{% for i in range(11) %}x{% endfor %}", "", "").render([])
