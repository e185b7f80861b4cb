"""Calls, their results, thoughts and functions reach templates, in the styles that models use."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from transformers import PreTrainedTokenizerFast

from exl2flow.core.errors import ChatTemplateError, ConfigError
from exl2flow.model import ChatTemplate, Message

ARGUMENTS = {"city": 'São "Paulo"', "days": 2, "units": None, "hours": [1.5, True]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather < forecast >",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need a tool.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "weather"},
]

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}
{%- set thoughts = m.reasoning_content %}
{%- if thoughts is string %}{{- '<think>' + thoughts + '</think>' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% set call = call.function %}
{{- '<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}' }}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""
LLAMA3_JSON = """\
{{- bos_token }}
{%- if tools is not none %}{% for t in tools %}{{- t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|header|>assistant<|end|>{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot|>' }}
{%- elif m.role == 'tool' %}
{{- '<|header|>ipython<|end|>' }}
{{- m.content | tojson if m.content is mapping else m.content }}{{- '<|eot|>' }}
{%- else %}{{- '<|header|>' + m.role + '<|end|>' + m.content + '<|eot|>' }}{% endif %}
{%- endfor %}"""
MISTRAL_ARGS = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}
{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
GLM45 = """\
{%- for m in messages %}
{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' }}
{%- set thoughts = m.reasoning_content or '' %}
{%- if thoughts %}{{- '<think>' + thoughts.strip() + '</think>\\n' }}{% endif %}
{{- m.content.strip() }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '<tool_call>' + call.name }}
{%- for key, value in call.arguments.items() %}
{{- '\\n<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}{{- '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}"""
CHANNELS = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- for tool in tools or [] %}{% set f = tool.function %}
{{- 'type ' + f.name + ' = (_: {' + f.parameters.properties.keys() | join(', ') + '})' }}
{%- endfor %}
{%- set last = namespace(name='') %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>' }}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|message|>' ~ (m.content | tojson) }}
{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}"""
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
STYLES = {
    "hermes": (
        HERMES,
        ["Weather < forecast >", "<think>I need a tool.</think>", f'"arguments": {AS_JSON}' + "}"],
    ),
    "llama3-json": (
        LLAMA3_JSON,
        ['        "name": "weather"', f'"parameters": {AS_JSON}' + "}<|eot|>", ">sunny<"],
    ),
    "mistral-args": (
        MISTRAL_ARGS,
        [f"weather[CALL_ID]call00001[ARGS]{AS_JSON}</s>", "call00001[TOOL_CONTENT]sunny"],
    ),
    "glm4.5": (
        GLM45,
        ['city</arg_key>\n<arg_value>São "Paulo"</arg_value>', "units</arg_key>\n<arg_value>null"],
    ),
    "gpt-oss": (
        CHANNELS,
        ["Reasoning: medium", "weather = (_: {city})", f"{AS_JSON}<|call|>", '"sunny"<|end|>'],
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tools") / "model")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def compiled(text: str) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(text, special_tokens=tokens, origin=Path("a.jinja"))


def with_call(**function: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "weather"} | function}]}]


@pytest.mark.parametrize("style", STYLES)
def test_calls_are_written_as_by_transformers(
    style: str, reference: PreTrainedTokenizerFast
) -> None:
    text, parts = STYLES[style]
    function = {**CALL["function"], "arguments": ARGUMENTS}
    parsed = [*TALK[:2], {**TALK[2], "tool_calls": [{**CALL, "function": function}]}, TALK[3]]
    template = compiled(text)

    made = template.render(TALK, tools=TOOLS)

    assert made == template.render(parsed, tools=TOOLS)
    assert made == reference.apply_chat_template(
        parsed, tools=TOOLS, chat_template=text, tokenize=False
    )
    assert all(part in made for part in parts), made
    assert isinstance(TALK[2]["tool_calls"][0]["function"]["arguments"], str)  # as it was


def test_messages_of_both_kinds_make_the_same_text() -> None:
    template = compiled("{{ messages | tojson }}{{ tools is none }}")
    talk = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    mapped = [{"role": m.role, "content": m.content} for m in talk]

    assert template.render(talk) == template.render(mapped, tools=[])
    assert template.render([talk[0], mapped[1]]) == template.render(talk)


def test_values_of_a_mapping_stay_as_they_are() -> None:
    talk = [{"role": "developer", "content": None, "thinking": "x", "tool_calls": None}]

    assert json.loads(compiled("{{ messages | tojson }}").render(talk)) == talk


@pytest.mark.parametrize("given", [None, "", " ", "{}", {}])
def test_call_without_arguments_has_an_empty_mapping(given: object) -> None:
    template = compiled("{{ messages[0].tool_calls[0].function.arguments | tojson }}")

    assert template.render(with_call(arguments=given)) == "{}"
    assert template.render(with_call()) == "{}"


def test_call_may_be_the_function_itself() -> None:
    template = compiled("{% set c = messages[0].tool_calls[0] %}{{ c.name }}{{ c.arguments.a }}")

    talk = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}]

    assert template.render(talk) == "f1"


@pytest.mark.parametrize(
    "given",
    [
        "[1]",
        "3",
        '"a"',
        "null",
        '{"a": ',
        "{'a': 1}",
        '{"a": NaN}',
        "[" * 10**5,
        [1],
        3,
        "1" * 5000,
    ],
)
def test_arguments_that_are_no_object_are_refused_by_name(given: object) -> None:
    talk = [{"role": "user", "content": "a"}, *with_call(arguments=given)]

    with pytest.raises(ConfigError, match=r"arguments of `weather`, which message 2 calls, are "):
        compiled("a").render(talk)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "message 1 is .* a mapping with a `role`"),
        ("a", "message 1 is 'a'; it must be"),
        ({"role": 3, "content": "a"}, "a mapping with a `role`"),
        ({"role": "user", "content": 3}, "`content` of message 1 is 3"),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "`tool_call_id` of message 1 is 7"),
        ({"role": "assistant", "reasoning_content": ["a"]}, "`reasoning_content` of message 1"),
        ({"role": "assistant", "tool_calls": "f()"}, "`tool_calls` of message 1 is 'f"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "message 1 calls 'f"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "message 1 calls {"),
        ({"role": "user", "content": "a", "at": float("nan")}, "what JSON cannot"),
        ({"role": "user", "content": "a", "at": {1, 2}}, "what JSON cannot"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compiled("a").render([message])


@pytest.mark.parametrize("tool", ["f", {}, {"function": "f"}, {"function": {"name": 1}}])
def test_what_is_no_function_is_refused(tool: Any) -> None:
    with pytest.raises(ConfigError, match=r"tool 2 is .* the JSON schema of a function"):
        compiled("a").render(TALK, tools=[{"name": "g", "parameters": {}}, tool])


def test_refusal_of_a_template_names_all_roles() -> None:
    with pytest.raises(ChatTemplateError, match="turns of system, user, assistant, tool: one call"):
        compiled(LLAMA3_JSON).render([*TALK[:2], {**TALK[2], "tool_calls": [CALL, CALL]}, TALK[3]])


def test_variables_that_a_template_mentions_are_known() -> None:
    template = compiled(
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% set ns = namespace(a=budget) %}{% set own = 1 %}{{ own }}{{ ns.a }}"
        "{% for m in messages %}{{ m.name }}{% endfor %}{{ strftime_now('%Y') }}"
    )

    assert template.mentioned == {"enable_thinking", "budget", "messages"}
    assert "reasoning_effort" in compiled(CHANNELS).mentioned
    low = compiled(CHANNELS).render(TALK, variables={"reasoning_effort": "low"})
    assert "Reasoning: low" in low


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_do_not_replace_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is no variable"):
        compiled("a").render(TALK, variables={name: []})
