import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_calls import ONE_CALL, TEMPLATES, TOOLS, rendered, template_of

from exl2flow.core.errors import ConfigError
from exl2flow.engine.chat.tool_events import CallArguments, CallBegin, Parsed
from exl2flow.engine.chat.tool_parser import ToolParser, parse_calls
from exl2flow.engine.chat.tools import all_tool_formats, named_tool_format, tool_format

WEATHER = {"city": 'Bonn "am Rhein"', "days": 3, "metric": True, "hours": [6, 12]}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", WEATHER), ("stop", {})]
NAMES = sorted(TEMPLATES)
ONE_EACH = ["hermes", "hunyuan", "deepseek-v3.1", "qwen3-coder", "glm4.5", "olmo3", "gpt-oss"]
ONE_EACH += ["llama3-json", "llama4-pythonic"]
BARE = {name for name, row in all_tool_formats().items() if not row.begin}


TEXTS = {name: rendered(name, CALLS[: 1 if name in ONE_CALL else 2]) for name in NAMES}


def facts(parsed: Parsed) -> tuple[str, list[tuple[str, str]], bool]:
    return parsed.content, [(c.name, c.arguments) for c in parsed.calls], parsed.is_broken


def called(parsed: Parsed) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def test_every_row_has_a_template_and_every_kind_is_tried() -> None:
    rows = all_tool_formats()

    assert sorted(rows) == NAMES
    assert {rows[name].kind for name in ONE_EACH} == {row.kind for row in rows.values()}


@pytest.mark.parametrize("name", NAMES)
def test_template_is_found_and_its_calls_come_back(name: str) -> None:
    fmt = tool_format(template_of(name))
    parsed = parse_calls(fmt, TEXTS[name], TOOLS)

    assert fmt == named_tool_format(name)
    assert called(parsed) == CALLS[: len(parsed.calls)]
    assert len(parsed.calls) == (1 if name in ONE_CALL else 2)
    assert (parsed.content.strip(), parsed.is_broken) == ("", False)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_keep_their_types_without_schemas(name: str) -> None:
    parsed = parse_calls(named_tool_format(name), TEXTS[name])

    assert called(parsed)[0] == CALLS[0]


@pytest.mark.parametrize("name", sorted(set(NAMES) - BARE))
def test_text_around_calls_stays(name: str) -> None:
    text = f"First, I look.{TEXTS[name]} And then?"

    parsed = parse_calls(named_tool_format(name), text, TOOLS)

    assert len(parsed.calls) == (1 if name in ONE_CALL else 2)
    assert "".join(parsed.content.split()) == "First,Ilook.Andthen?"
    assert not parsed.is_broken


def test_vocabulary_counts_where_the_template_has_no_marks() -> None:
    template = "{{ tools }}{{ '<tool_calls>' }}"

    assert tool_format(template, {"<tool_calls>", "</tool_calls>"}).name == "hunyuan"
    listed = template_of("mistral-list")
    assert tool_format(listed, {"[TOOL_CALLS]", "[ARGS]"}).name == "mistral-list"


def test_template_without_tools_has_the_generic_format() -> None:
    for template in ("{{ messages }}", "{{ messages }}<tool_call></tool_call>", "{{ tools }}"):
        fmt = tool_format(template)
        assert (fmt.name, fmt.is_generic) == ("hermes", True)


def test_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="`hermes`"):
        named_tool_format("hermess")


@pytest.mark.parametrize("name", ONE_EACH)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12), end=st.integers(0, 2000))
def test_any_split_gives_the_same(name: str, cuts: list[int], end: int) -> None:
    fmt, text = named_tool_format(name), f"{TEXTS[name]}\nmore{TEXTS[name]}"[:end]

    whole = parse_calls(fmt, text, TOOLS)

    assert facts(parse_calls(fmt, pieces(text, cuts), TOOLS)) == facts(whole)
    assert facts(parse_calls(fmt, iter(text), TOOLS)) == facts(whole)


ALPHABET = ["{", "}", "[", "]", '"', "'", ",", ":", "(", ")", "=", "\n", " ", "a", "\\", "stop"]


@pytest.mark.parametrize("name", ONE_EACH)
@given(data=st.data())
def test_nothing_is_lost_of_damaged_calls(name: str, data: st.DataObject) -> None:
    fmt, text = named_tool_format(name), TEXTS[name]
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(begin + 20, len(text))))
    noise = "".join(data.draw(st.lists(st.sampled_from(ALPHABET), max_size=4)))
    damaged = text[:begin] + noise + text[end:]

    parsed = parse_calls(fmt, damaged, TOOLS)

    cuts = data.draw(st.lists(st.integers(0, 2000), max_size=5))
    assert facts(parse_calls(fmt, pieces(damaged, cuts), TOOLS)) == facts(parsed)
    assert all(isinstance(arguments, dict) for _, arguments in called(parsed))
    if not parsed.calls:
        assert parsed.content == damaged or parsed.content == damaged.rstrip()


@pytest.mark.parametrize("name", sorted(set(NAMES) - BARE))
def test_what_does_not_parse_stays_text_with_a_warning(name: str) -> None:
    fmt, text = named_tool_format(name), TEXTS[name]
    for broken in (text[: len(text) // 3], text.replace("get_weather", "unknown")):
        parsed = parse_calls(fmt, broken, TOOLS)
        assert parsed.is_broken
        assert [call.name for call in parsed.calls] in ([], ["stop"])
        assert broken[: len(text) // 3] in parsed.content


@pytest.mark.parametrize("name", sorted(BARE))
def test_answer_that_begins_like_a_call_is_text(name: str) -> None:
    for text in ('{"city": "Bonn"}', "[1] is a source.", "[a](b)", " {", "", "Good."):
        parsed = parse_calls(named_tool_format(name), text, TOOLS)
        assert facts(parsed) == (text, [], False)


def test_arguments_come_in_fragments() -> None:
    parser = ToolParser(named_tool_format("hermes"), TOOLS)
    events = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bo')
    assert [type(event) for event in events] == [CallBegin, CallArguments]
    assert parser.feed("nn")[0] == CallArguments(events[0].id, "nn")  # type: ignore[union-attr]


def test_keys_of_a_call_come_in_any_order() -> None:
    given = '{"city": "Bonn"}'
    for arguments in (given, json.dumps(given)):
        text = f'<tool_call>{{ "arguments": {arguments}, "name": "get_weather"}} </tool_call> '
        parsed = parse_calls(named_tool_format("hermes"), text, TOOLS)
        assert called(parsed) == [("get_weather", {"city": "Bonn"})]
        assert parsed.content == ""


def test_ids_have_the_format_of_the_row() -> None:
    assert all(len(named_tool_format("mistral-args").new_id()) == 9 for _ in range(20))
    assert named_tool_format("hermes").new_id().startswith("call_")


def test_values_of_parameters_have_the_types_of_their_schemas() -> None:
    fmt = named_tool_format("glm4.5")

    def read(text: str, schema: dict[str, Any]) -> Any:
        tools = [{"name": "f", "parameters": {"properties": {"a": schema}}}]
        source = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        calls = parse_calls(fmt, source, tools).calls
        return json.loads(calls[0].arguments)["a"] if calls else ...

    assert read("12", {"type": "string"}) == "12"
    assert read("12", {"type": "integer"}) == 12
    assert read("True", {"type": "boolean"}) is True
    assert read("null", {"type": ["string", "null"]}) is None
    assert read("no", {"type": ["string", "null"]}) == "no"
    assert read("NaN", {"type": "number"}) is ...
    assert read("x", {"type": "integer"}) is ...
    assert read("3", {"enum": ["3", "4"]}) == "3"


def test_python_literals_are_read() -> None:
    fmt = named_tool_format("olmo3")
    source = r"""<function_calls>
stop(a='it\'s, (a) "b"\d', b=[1, {'c': None}], d=-2.5, e=true)
</function_calls>"""

    assert called(parse_calls(fmt, source)) == [
        ("stop", {"a": 'it\'s, (a) "b"\\d', "b": [1, {"c": None}], "d": -2.5, "e": True})
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}",
        " to=functions.stop<|channel|>commentary<|message|>{}<|call|>",
    ],
)
def test_channels_may_name_the_function_before_or_behind(text: str) -> None:
    assert called(parse_calls(named_tool_format("gpt-oss"), text, TOOLS)) == [("stop", {})]


def test_mistral_may_write_an_id_behind_the_name() -> None:
    text = "[TOOL_CALLS]stop[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]stop[ARGS]{}"

    parsed = parse_calls(named_tool_format("mistral-args"), text, TOOLS)

    assert called(parsed) == [("stop", {}), ("stop", {})]
    assert not parsed.content
