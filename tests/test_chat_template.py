"""Chat templates render as in transformers, cannot leave the sandbox, and fail in one line."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from npu_llm.chat_template import ChatTemplate
from npu_llm.errors import ChatTemplateError, PromptError

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "You may call these functions:\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model calls one tool at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.content is string %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

MISTRAL = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools and loop.index0 == ns.last_user %}
            {{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'system' %}
        {%- continue %}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

GENERATION = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|assistant|>
{% generation %}
{%- set marker = '*' %}
{{ marker }}{{ message.content }}{{ loop.index }}<|end|>
{% endgeneration %}
{% else %}
<|{{ message.role }}|>{{ message.content }}{{ marker is defined }}
{% endif %}
{%- if loop.index > 4 %}{% break %}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "generation": GENERATION,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells <b>today's</b> weather & more: größer, 天气, 🙂",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "  Is 1 < 2 & 'three'? 世界 🙂 {{ 7 * 7 }}\n"}
ANSWER = {"role": "assistant", "content": "Yes, <b>of course</b>."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ANSWER],
    [USER, ANSWER, USER],
    [USER, ANSWER] * 4,
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, USER],
]


def roles(messages: list[dict[str, Any]]) -> str:
    return "-".join(message["role"] for message in messages)


def transformers_render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    text: str = render_jinja_template([messages], chat_template=source, **variables)[0][0]
    return text


def render(source: str, messages: Any = (USER,), **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(list(messages), **variables)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=roles)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_prompt_is_that_of_transformers(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any
) -> None:
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    try:
        expected = transformers_render(source, messages, **options, **SPECIAL)
    except jinja2.TemplateError as refusal:
        expected = f"the chat template refuses these messages: {refusal}"
    try:
        actual = render(source, messages, **options)
    except ChatTemplateError as refusal:
        actual = str(refusal)
    assert actual == expected


def test_the_generation_prompt_is_there_unless_declined() -> None:
    assert render(CHATML).rstrip().endswith("<|im_start|>assistant")
    assert "assistant\n" not in render(CHATML, add_generation_prompt=False)


def test_tool_calls_and_lists_of_parts_render_as_in_transformers() -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Köln", "n": [1, None]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    expected = transformers_render(LLAMA3, messages, tools=TOOLS, **SPECIAL)
    assert render(LLAMA3, messages, tools=TOOLS, add_generation_prompt=False) == expected
    del messages[1]["content"]
    assert render(LLAMA3, messages, tools=TOOLS, add_generation_prompt=False) == expected


def test_the_users_text_is_never_itself_a_template() -> None:
    assert "{{ 7 * 7 }}" in render(CHATML)


def test_variables_reach_the_template_and_win_over_special_tokens() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ tools is none }}{{ documents is defined }}"
    assert render(source, enable_thinking=False) == "<s>FalseTrueTrue"
    assert render(source, enable_thinking=1, bos_token="B", tools=[]) == "B1FalseTrue"


@pytest.mark.parametrize(
    "call", ["tojson", "tojson(indent=2)", "tojson(ensure_ascii=True)", "tojson(sort_keys=true)"]
)
def test_tojson_writes_what_transformers_writes(call: str) -> None:
    source = "{{ messages | " + call + " }}{{ {'b': 1, 'a': '<é&'} | " + call + " }}"
    assert render(source) == transformers_render(source, [USER])


def test_strftime_now_is_the_local_time() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == datetime.now().strftime("%Y-%m-%d")


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        render("{{ messages.append(1) }}", messages)
    assert messages == [USER]


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}",
        "{{ messages",
        "{% nonsense %}",
        "{{ 1 | no_such_filter }}",
        "{% generation %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=["unclosed", "cut", "tag", "filter", "generation", "deep"],
)
def test_a_template_that_is_not_jinja_is_damaged(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template is damaged: ") as error:
        ChatTemplate(source, {})
    assert "\n" not in str(error.value)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ChatTemplateError, match=r"unknown tag 'oops'.* \(line 3\)"):
        ChatTemplate("a\nb\n{% oops %}", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ 'a' + 1 }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        ("{{ nothing | tojson }}", "TypeError: .*Undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{% include 'other' %}", "no loader"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError: "),
        ("{{ nothing() }}", "'nothing' is undefined"),
    ],
)
def test_a_template_that_fails_is_an_error_of_one_line(source: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"the chat template failed: .*{said}") as error:
        render(source)
    assert "\n" not in str(error.value)


def test_a_refusal_says_in_one_short_line_what_the_template_said() -> None:
    with pytest.raises(ChatTemplateError) as error:
        render("{{ raise_exception('two\n\n  lines' + 'x' * 1000) }}")
    assert str(error.value).startswith("the chat template refuses these messages: two linesxxx")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{% set x = messages.__setitem__(0, 1) %}{{ x }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"unsafe|undefined|not safely"):
        render(source)


@pytest.mark.parametrize("hidden", ["''.__class__", "''['__class__']", "strftime_now.__globals__"])
def test_what_the_sandbox_hides_is_empty(hidden: str) -> None:
    assert render("{{ " + hidden + " }}") == ""


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (None, "non-empty list"),
        (["hello"], "message 0 .* dict"),
        ([{"content": "x"}], 'message 0 .* no "role"'),
        ([{"role": 1, "content": "x"}], 'message 0 .* no "role"'),
        ([USER, {"role": "user"}], 'message 1 .* no "content"'),
        ([USER, {"role": "user", "content": None}], 'message 1 .* no "content"'),
        ([USER, {"role": "user", "content": b"x"}], 'message 1 .* no "content"'),
        ([USER, {"role": "user", "content": {"text": "x"}}], 'message 1 .* no "content"'),
    ],
)
def test_what_is_not_a_conversation_is_a_prompt_error(messages: Any, problem: str) -> None:
    with pytest.raises(PromptError, match=problem) as error:
        ChatTemplate(CHATML, {}).render(messages)
    assert "\n" not in str(error.value)


def test_the_runtime_needs_neither_torch_nor_transformers_and_jinja_only_when_rendering() -> None:
    script = (
        "import sys, npu_llm.sampling, npu_llm.tokenizer, npu_llm.chat_template as c\n"
        "assert not {'torch', 'transformers', 'jinja2'} & set(sys.modules)\n"
        "assert c.ChatTemplate('{{ bos_token }}', {'bos_token': 'x'}).render("
        "[{'role': 'user', 'content': ''}]) == 'x'\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
