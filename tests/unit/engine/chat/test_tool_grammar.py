import json
import re
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from constrained import ids_of, text_of
from tool_calls import ONE_CALL, TOOLS, rendered

from exl2flow.core.errors import ConfigError
from exl2flow.engine.chat.tool_events import Parsed
from exl2flow.engine.chat.tool_grammar import Choice, tool_grammar
from exl2flow.engine.chat.tool_parser import parse_calls
from exl2flow.engine.chat.tools import ToolFormat, all_tool_formats, named_tool_format
from exl2flow.engine.filters import Constraint, GrammarFilter
from exl2flow.model import Tokenizer

WIDTH = 4128
ROWS = all_tool_formats()
OF_KIND = {row.kind: row.name for row in reversed(ROWS.values())}
FORCED = [
    *sorted(OF_KIND.values()),
    "hermes",
    "glm4.5",
    "olmo3",
    "command-r7b",
    "mistral-list",
    "minimax-m2",
]


@cache
def demo() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[4] / "demo" / "model")


def state(
    name: str, choice: Choice = "auto", *, parallel: bool = True, function: str = ""
) -> Constraint:
    fmt = named_tool_format(name)
    found = tool_grammar(fmt, TOOLS, demo(), choice=choice, name=function, parallel=parallel)
    assert found.warnings == ()
    return found.filter.start(demo(), WIDTH)


def generated(name: str, choice: Choice, seed: int, **options: Any) -> tuple[str, Parsed]:
    """Return a random text under the grammar, and what it says."""
    text, random, ids = state(name, choice, **options), Random(seed), list[int]()
    for _ in range(5000):
        allowed = text.allowed()
        if allowed.must_end or (allowed.may_end and random.random() < 0.5):
            break
        choices = [i for i in ids_of(allowed.words, demo().vocab_size) if i not in allowed.ends]
        ids.append(random.choice(choices))
        text.accept(ids[-1])
    assert text.allowed().may_end
    source = text_of(demo(), ids)
    return source, parse_calls(named_tool_format(name), source, TOOLS)


def accepts(text: Constraint, source: str) -> bool:
    """Return whether the grammar allows a whole text."""
    for token in demo().encode(source):
        if token not in ids_of(text.allowed().words, WIDTH):
            return False
        text.accept(token)
    return text.allowed().may_end


def allowed_up_to(text: Constraint, source: str) -> str:
    """Return how much of a text the grammar allows."""
    ids = demo().encode(source)
    for count, token in enumerate(ids):
        if token not in ids_of(text.allowed().words, WIDTH):
            return demo().decode(ids[:count])
        text.accept(token)
    return source


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "stop":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert {"city"} <= set(arguments) <= {"city", "days", "metric", "hours"}
    assert isinstance(arguments["city"], str)
    assert len(arguments["city"]) <= 12
    assert arguments.get("days", 0) in range(10)
    assert isinstance(arguments.get("metric", True), bool)
    assert all(isinstance(hour, int) for hour in arguments.get("hours", []))
    assert len(arguments.get("hours", [])) <= 3


def check_generated(name: str, seeds: range) -> None:
    names = Counter[str]()
    for seed in seeds:
        _, parsed = generated(name, "required", seed, parallel=seed % 4 == 0)
        assert parsed.calls
        assert not parsed.is_broken
        assert parsed.content.strip() == ""
        for call in parsed.calls:
            check(call.name, json.loads(call.arguments))
            names[call.name] += 1
    assert set(names) == {"get_weather", "stop"}


@pytest.mark.parametrize("name", FORCED)
def test_generated_calls_fit_their_schema(name: str) -> None:
    check_generated(name, range(8))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Bonn"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def test_auto_leaves_text_free_and_forces_calls() -> None:
    for text in ("No call.", "", f"Well. {CALL}", f"{CALL}\n{OTHER} Done.", OTHER, "a < b <tool"):
        assert accepts(state("hermes"), text), text
    wrong = CALL.replace("Bonn", "Bonn" * 4)
    assert "</tool_call>" not in allowed_up_to(state("hermes"), wrong)
    assert "rain" not in allowed_up_to(state("hermes"), CALL.replace("get_weather", "rain"))
    assert not accepts(state("hermes"), CALL.removesuffix("\n</tool_call>"))
    assert not accepts(state("hermes"), "<tool_call>")


def test_other_choices_bound_the_number_of_calls() -> None:
    for choice in ("required", "named"):
        options: dict[str, Any] = {"function": "stop"} if choice == "named" else {}
        assert not accepts(state("hermes", choice, **options), "No.")
        assert accepts(state("hermes", choice, **options), OTHER)
        assert accepts(state("hermes", choice, **options), CALL) == (choice == "required")
        two = f"{OTHER}\n{OTHER}"
        assert accepts(state("hermes", choice, **options), two) == (choice == "required")
        assert not accepts(state("hermes", choice, parallel=False, **options), two)
    assert accepts(state("hermes", parallel=False), f"I see. {CALL}")
    assert accepts(state("hermes", parallel=False), "I see.")
    assert not accepts(state("hermes", parallel=False), f"{CALL}\n{OTHER}")
    assert accepts(state("hermes", "none"), "I see.")
    assert not accepts(state("hermes", "none"), OTHER)


def test_lists_hold_one_call_without_parallel() -> None:
    one = '<tool_calls>[{"name": "stop", "arguments": {}}]</tool_calls>'
    two = one.replace("}]", '}, {"name": "stop", "arguments": {}}]')
    for text, parallel, is_valid in ((one, False, True), (two, True, True), (two, False, False)):
        assert accepts(state("hunyuan", "required", parallel=parallel), text) == is_valid


def test_format_without_a_mark_holds_text_or_a_call() -> None:
    call = '{"name": "stop", "parameters": {}}'
    for text, is_valid in ((call, True), ("Hello {", True), ('{"a": 1}', False), ("", True)):
        assert accepts(state("llama3-json"), text) == is_valid
    assert accepts(state("llama3-json", "none"), '{"a": 1}')
    assert accepts(state("llama4-pythonic"), "[stop(), stop()]")


@pytest.mark.parametrize("name", ["hermes", "glm4.5", "mistral-args"])
def test_calls_behind_free_text_fit_their_schema(name: str) -> None:
    fmt = named_tool_format(name)
    for seed in range(4):
        source, _ = generated(name, "required", seed, parallel=False)
        text = f"I look. {source}"
        assert accepts(state(name), text)
        assert len(parse_calls(fmt, text, TOOLS).calls) == 1


def with_special(*names: str, eos: str = "") -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(demo().backend.to_str())
    backend.add_special_tokens(list(names))
    ends = [*demo().eos_token_ids, *([backend.token_to_id(eos)] if eos else [])]
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=ends)


def test_special_tokens_are_forced_as_tokens() -> None:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    tokenizer = with_special(*marks, eos="<|call|>")
    call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>Hello."
    cases: list[tuple[Choice, str, bool]] = [
        ("auto", call, True),
        ("auto", thought + call, True),
        ("auto", thought + answer, True),
        ("auto", call.replace("stop", "go"), False),
        ("required", thought + call, True),
        ("required", answer, False),
        ("none", answer, False),
    ]
    for choice, text, is_valid in cases:
        grammar = tool_grammar(named_tool_format("gpt-oss"), TOOLS, tokenizer, choice=choice)
        started = grammar.filter.start(tokenizer, WIDTH)
        ids, done = tokenizer.encode(text, special=True), True
        for token in ids:
            done = done and token in ids_of(started.allowed().words, WIDTH)
            started.accept(token)
        assert (done and started.allowed().may_end) == is_valid, (choice, text)


@pytest.mark.parametrize("is_special", [True, False])
def test_mark_that_is_one_token_is_forced_as_one(is_special: bool) -> None:
    backend = tokenizers.Tokenizer.from_str(demo().backend.to_str())
    marks = [tokenizers.AddedToken(m, special=is_special) for m in ("<tool_call>", "</tool_call>")]
    backend.add_tokens(marks)
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=demo().eos_token_ids)
    for text, is_valid in ((CALL, True), (CALL.replace("city", "town"), False)):
        filter_ = tool_grammar(named_tool_format("hermes"), TOOLS, tokenizer).filter
        started, is_allowed = filter_.start(tokenizer, WIDTH), True
        for token in tokenizer.encode(f"I look. {text} Then {OTHER}", special=True):
            is_allowed = is_allowed and token in ids_of(started.allowed().words, WIDTH)
            started.accept(token)
        assert (is_allowed and started.allowed().may_end) == is_valid
    spelled = [token for letter in "<tool_call>" for token in demo().encode(letter)]
    started = filter_.start(tokenizer, WIDTH)
    for token in spelled[:-1]:
        started.accept(token)
    assert spelled[-1] not in ids_of(started.allowed().words, WIDTH)


MARK = re.compile(r"<[^<>= ]+>|\[[A-Z_]+\]")


@cache
def marked() -> Tokenizer:
    """Return a tokenizer that has all marks of all formats as special tokens."""
    texts = [text for row in ROWS.values() for text in vars_of(row) if isinstance(text, str)]
    return with_special(*sorted({mark for text in texts for mark in MARK.findall(text)}))


def vars_of(row: ToolFormat) -> list[object]:
    return [getattr(row, field.name) for field in fields(row)]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", sorted(set(ROWS) - {"gpt-oss"}))
def test_what_templates_write_is_allowed(name: str, is_special: bool) -> None:
    tokenizer = marked() if is_special else demo()
    weather = {"city": 'Bo"nn\n', "days": 3, "metric": True, "hours": [6, 12]}
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", weather), ("stop", {})]
    text = rendered(name, calls[: 1 if name in ONE_CALL else 2])
    grammar = tool_grammar(named_tool_format(name), TOOLS, tokenizer)
    for source, is_valid in ((text, True), (text.replace("get_weather", "get_wether"), False)):
        started, seen = grammar.filter.start(tokenizer, tokenizer.vocab_size), []
        for token in tokenizer.encode(source, special=True):
            if token not in ids_of(started.allowed().words, tokenizer.vocab_size):
                break
            started.accept(token)
            seen.append(token)
        else:
            seen.append(-1)
        is_whole = seen[-1:] == [-1] and started.allowed().may_end
        assert is_whole == is_valid, tokenizer.decode(seen[:-1], special=True)


def test_schemas_beyond_the_grammar_are_loosened_with_a_warning() -> None:
    def warned(schema: dict[str, Any]) -> tuple[str, ...]:
        tools = [{"name": "f", "parameters": schema}]
        return tool_grammar(named_tool_format("hermes"), tools, demo()).warnings

    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert warned({"type": "object", "properties": {"a": {"type": "string"}}}) == ()
    assert "oneOf" in warned({"type": "object", "properties": {"a": either}})[0]
    assert "any object" in warned({"type": "object", "not": {"required": ["a"]}})[0]


def test_raw_text_is_held_to_its_length_where_that_is_possible() -> None:
    def found(schema: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
        parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}}
        tools = [{"name": "f", "parameters": parameters}]
        grammar = tool_grammar(named_tool_format("seed-oss"), tools, demo(), choice="required")
        text = "<seed:tool_call>\n<function=f>\n<parameter=a>abc</parameter>\n</function>\n"
        is_valid = accepts(grammar.filter.start(demo(), WIDTH), text + "</seed:tool_call>")
        return grammar.warnings, is_valid

    assert found({"minLength": 3, "maxLength": 3}) == ((), True)
    assert found({"maxLength": 2}) == ((), False)
    assert found({"minLength": 4}) == ((), False)
    assert found({"maxLength": 50}) == ((), True)
    for beyond in ({"maxLength": 10**7}, {"minLength": 4, "maxLength": 2}, {"minLength": "x"}):
        assert found(beyond) == (("`f.a`: raw text is not held to its length",), True)
    assert found({"enum": ["abc", "d"]}) == ((), True)
    assert found({"const": "d"}) == ((), False)
    assert "pattern" in found({"pattern": "^a"})[0][0]


def test_several_long_texts_stay_within_what_the_grammar_can_count() -> None:
    strings = {key: {"type": "string", "maxLength": 20} for key in "abc"}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": strings}}]
    found = tool_grammar(named_tool_format("seed-oss"), tools, demo(), choice="required")
    text = rendered(
        "seed-oss", [("f", {"a": "Some", "b": "text", "c": "Some text. " * 30})]
    ).lstrip()

    assert found.warnings == ("`f.c`: raw text is not held to its length",)
    assert accepts(found.filter.start(demo(), WIDTH), text)


def test_arguments_are_an_object_even_where_the_schema_does_not_say() -> None:
    tools = [{"name": "f", "parameters": {"description": "anything"}}]
    grammar = tool_grammar(named_tool_format("hermes"), tools, demo(), choice="required")
    for arguments, is_valid in (('{"a": 1}', True), ("5", False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(grammar.filter.start(demo(), WIDTH), text) == is_valid


def test_references_of_parameters_are_followed() -> None:
    size = {"enum": [1, 2]}
    schema = {"properties": {"a": {"$ref": "#/$defs/size"}}, "required": ["a"]}
    tools = [{"name": "f", "parameters": {"type": "object", "$defs": {"size": size}, **schema}}]
    fmt = named_tool_format("glm4.5")

    found = tool_grammar(fmt, tools, demo(), choice="required")

    assert found.warnings == ()
    for value, is_valid in (("2", True), ("3", False)):
        text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        assert accepts(found.filter.start(demo(), WIDTH), text) == is_valid


def test_choices_that_cannot_be_are_refused() -> None:
    fmt = named_tool_format("hermes")
    with pytest.raises(ConfigError, match="no function `go`; there are get_weather, stop"):
        tool_grammar(fmt, TOOLS, demo(), choice="named", name="go")
    with pytest.raises(ConfigError, match="needs functions"):
        tool_grammar(fmt, [], demo(), choice="required")
    with pytest.raises(ConfigError, match="`parameters` of `f` is not a JSON schema"):
        tool_grammar(fmt, [{"name": "f", "parameters": {"properties": ["a"]}}], demo())
    with pytest.raises(ConfigError, match="tool 1 has the name"):
        tool_grammar(fmt, [{"name": "a b"}], demo())


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(OF_KIND))
def test_2000_generated_calls_of_each_kind_fit_their_schema(kind: str) -> None:
    check_generated(OF_KIND[kind], range(2000))


@pytest.mark.parametrize("name", sorted(OF_KIND.values()))
def test_an_answer_without_calls_can_be_held_to_a_grammar(name: str) -> None:
    answer = GrammarFilter(json_schema={"type": "object", "required": ["a"]})
    given = tool_grammar(named_tool_format(name), TOOLS, demo(), answer=answer).filter
    source = rendered(name, [("get_weather", {"city": "Rome"})])

    assert accepts(given.start(demo(), WIDTH), '{"a": 1}')
    assert not accepts(given.start(demo(), WIDTH), "Text.")
    is_call = accepts(state(name, "required"), source.lstrip())
    assert accepts(given.start(demo(), WIDTH), source) == is_call
