"""Calls, their results, thoughts and functions reach templates, in the styles that models use."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from tool_styles import ARGUMENTS, CALL, CHANNELS, STYLES, TALK, TOOLS
from transformers import PreTrainedTokenizerFast

from exl2flow.core.errors import ChatTemplateError, ConfigError
from exl2flow.model import ChatTemplate, Message


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tools") / "model")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


@cache
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
    talk = [{"role": "developer", "content": "a", "thinking": "x", "step": 0, "done": False}]

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
    ("given", "text", "mapping"),
    [
        ('{"city": "Bo', '{"city": "Bo', {"city": "Bo"}),
        ('{"city": "Bonn", "days": ', '{"city": "Bonn", "days": ', {"city": "Bonn"}),
        ("[1]", "[1]", {"arguments": "[1]"}),
        ("null", "null", {"arguments": "null"}),
        ("{'a': 1}", "{'a': 1}", {"arguments": "{'a': 1}"}),
        ('{"a": NaN}', '{"a": NaN}', {"arguments": '{"a": NaN}'}),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}', {"arguments": r'{"a": "\ud800"}'}),
        ([1], "[1]", {"arguments": "[1]"}),
        (3, "3", {"arguments": "3"}),
    ],
)
def test_arguments_that_are_no_object_are_text_or_what_is_there_of_them(
    given: object, text: str, mapping: dict[str, Any]
) -> None:
    as_text = compiled("{{ messages[0].tool_calls[0].function.arguments }}")
    as_mapping = compiled(
        "{% set given = messages[0].tool_calls[0].function.arguments %}"
        "{% for key, value in given.items() %}{% endfor %}{{ given | tojson }}"
    )

    assert as_text.render(with_call(arguments=given)) == text
    assert json.loads(as_mapping.render(with_call(arguments=given))) == mapping


@pytest.mark.parametrize("given", ["[" * 10**5, "1" * 5000, '{"a": ' + "1" * 5000 + "}"])
def test_arguments_that_json_cannot_read_are_no_error(given: str) -> None:
    text = compiled(STYLES["glm4.5"][0]).render(with_call(arguments=given))

    assert text.endswith("</tool_call>")


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
    with pytest.raises(ChatTemplateError, match="turns of system, user, assistant, tool: no;"):
        compiled("{{ raise_exception('no') }}").render(TALK)


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
    with pytest.raises(ConfigError, match=f"`{name}` is not a variable"):
        compiled("a").render(TALK, variables={name: []})
