"""Whatever a history holds, every template writes it: as it is, or in another way."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_styles import STYLES, TALK, TOOLS

from exl2flow.model import ChatTemplate

Talk = list[dict[str, Any]]
Change = Callable[[Talk, list[dict[str, Any]]], dict[str, Any]]
STRICT = """\
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{- raise_exception('unknown role') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
READS_ALL = """\
{%- for t in tools or [] %}{{- '// ' + t.function.description + '\\n' + t.function.name }}
{%- for name, p in t.function.parameters.properties.items() %}
{{- name + ': ' + p.type + ' // ' + p.description }}
{%- endfor %}{% endfor %}
{%- for m in messages %}{{- m.role + ': ' + m.content }}{% endfor %}"""
TEMPLATES = {name: text for name, (text, _) in STYLES.items()}
TEMPLATES |= {"strict": STRICT, "reads-all": READS_ALL}


@cache
def compiled(name: str) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(TEMPLATES[name], special_tokens=tokens, origin=Path("a.jinja"))


# where an optional field stands, and what is empty there
FIELDS: list[tuple[str, Callable[[Talk, Any], dict[str, Any]], object]] = [
    *((name, lambda talk, _: talk[2], "") for name in ("content", "reasoning_content", "name")),
    *((name, lambda talk, _: talk[2], "") for name in ("reasoning", "refusal")),
    *((name, lambda talk, _: talk[2], {}) for name in ("function_call", "audio")),
    *((name, lambda talk, _: talk[4], []) for name in ("tool_calls", "annotations")),
    *((name, lambda talk, _: talk[3], "") for name in ("content", "name", "tool_call_id")),
    *((name, lambda talk, _: talk[1], "") for name in ("content", "name")),
    *((name, lambda talk, _: talk[2]["tool_calls"][0], "") for name in ("id", "type")),
    ("arguments", lambda talk, _: talk[2]["tool_calls"][0]["function"], ""),
    ("description", lambda _, tools: tools[0]["function"], ""),
    ("parameters", lambda _, tools: tools[0]["function"], {}),
    ("strict", lambda _, tools: tools[0]["function"], {}),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_absent_null_and_empty_are_one_thing(name: str) -> None:
    template = compiled(name)
    for field, find, empty in FIELDS:
        texts = list[str]()
        for value in ("absent", None, empty):
            talk, tools = (
                deepcopy([*TALK, {"role": "assistant", "content": "Sun."}]),
                deepcopy(TOOLS),
            )
            at = find(talk, tools)
            at.pop(field, None)
            at |= {} if value == "absent" else {field: value}
            texts.append(template.render(talk, tools=tools))

        assert texts[0] == texts[1] == texts[2], field


TEXTS = st.sampled_from(["", "a", "<s>", "{{ x }}", "é\n"])
OPTIONAL = st.none() | TEXTS
ARGUMENTS = st.none() | st.sampled_from(["", "{}", '{"a": [1, {"b": nul', "[1]", '{"a": 1}', "x"])
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": ARGUMENTS})},
    optional={"id": OPTIONAL, "type": st.just("function")},
)
CUSTOM = st.fixed_dictionaries(
    {"custom": st.fixed_dictionaries({"name": st.just("p")}, optional={"input": OPTIONAL})},
    optional={"id": OPTIONAL, "type": st.just("custom")},
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": OPTIONAL}), max_size=2)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": OPTIONAL | PARTS,
        "tool_calls": st.none() | st.lists(CALLS | CUSTOM, max_size=3),
        "function_call": st.none()
        | st.fixed_dictionaries({"name": st.just("f"), "arguments": ARGUMENTS}),
        "tool_call_id": OPTIONAL,
        "name": OPTIONAL,
        "reasoning_content": OPTIONAL,
        "reasoning": OPTIONAL,
        "refusal": OPTIONAL,
    },
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20)
@given(talk=st.lists(MESSAGES, min_size=1, max_size=6), has_tools=st.booleans())
def test_no_history_is_an_error(name: str, talk: Talk, has_tools: bool) -> None:
    before = deepcopy(talk)

    compiled(name).render(talk, tools=TOOLS if has_tools else None)

    assert talk == before


def user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}


def calls(*names: str) -> dict[str, Any]:
    made = [{"id": f"call_{name}", "function": {"name": name}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"of {name}"}


def test_several_calls_are_written_one_at_a_time_before_their_results() -> None:
    text = compiled("llama3-json").render([user("a"), calls("f", "g"), result("g"), result("f")])

    places = [text.index(part) for part in ('"name": "f"', "of f", '"name": "g"', "of g")]
    assert places == sorted(places)


def test_ids_of_other_models_are_shortened_alike_in_calls_and_results() -> None:
    text = compiled("mistral-args").render([user("a"), calls("f", "g"), result("g"), result("f")])

    first, second = (text.split(f"[TOOL_CALLS]{name}[CALL_ID]")[1][:9] for name in "fg")
    assert f"[TOOL_RESULTS]{first}[TOOL_CONTENT]of f" in text
    assert f"[TOOL_RESULTS]{second}[TOOL_CONTENT]of g" in text
    assert first != second


def test_a_template_of_two_roles_gets_all_texts() -> None:
    talk = [{"role": "system", "content": "S"}, calls("f"), result("f"), user("b")]

    text = compiled("strict").render(talk)

    assert text.startswith("<user>S")
    assert '{"name": "f", "arguments": {}}' in text
    assert text.endswith("of f\n</tool_response>\n\nb")


def test_the_system_text_joins_the_first_message_where_there_is_no_system_turn() -> None:
    talk = [{"role": "system", "content": "S"}, user("a"), {"role": "assistant", "content": "b"}]

    assert compiled("strict").render(talk) == "<user>S\n\na<assistant>b"
