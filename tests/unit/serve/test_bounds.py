"""Every text, list and number of every request has a bound, and beyond it the client's own name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from request_bounds import HI, INTERNAL, REQUESTS, bounds, names_of, table
from sources import ROOT

from exl2flow.serve.answers.bounds import (
    MOST_CONTAINERS,
    MOST_MESSAGES,
    MOST_TEXTS,
    MOST_TOOLS,
    MOST_VALUES,
    check_body,
)
from exl2flow.serve.answers.fields import Body, ChatBody, CompletionBody, TokenizeBody
from exl2flow.serve.apis.agents import AgentBody, turns
from exl2flow.serve.apis.chats import messages_of
from exl2flow.serve.apis.messages import MessagesBody
from exl2flow.serve.apis.responses import ResponsesBody
from exl2flow.serve.apis.tabby import LlamaBody
from exl2flow.serve.errors import ApiError

MODELS = [*dict.fromkeys(model for model, _ in REQUESTS.values())]
LEAST = dict(REQUESTS.values())
FIELDS = [
    (model, field)
    for model in MODELS
    for field in model.model_fields
    if (model is CompletionBody or field not in Body.model_fields)
    and not (issubclass(model, AgentBody) and field in ChatBody.model_fields)
    and not (model is LlamaBody and field in CompletionBody.model_fields)
    and field not in INTERNAL
]


def problem(model: type[BaseModel], body: dict[str, Any]) -> tuple[Any, str]:
    """Return the field that is refused, and why."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    [row] = caught.value.errors()
    return (*row["loc"], None)[0], row["msg"]


@pytest.mark.parametrize("model", MODELS)
def test_every_part_of_every_field_has_a_bound(model: type[BaseModel]) -> None:
    for field in model.model_fields:
        bounds(model, field)


@pytest.mark.parametrize(("model", "field"), FIELDS)
def test_beyond_a_bound_the_clients_name_is_refused(model: type[BaseModel], field: str) -> None:
    for bound in bounds(model, field):
        for name in names_of(model, field):
            least = {n: v for n, v in LEAST[model].items() if n != field}

            assert problem(model, {**least, name: bound.beyond})[0] == name, bound.words


@pytest.mark.parametrize(
    ("model", "body", "name"),
    [
        (MessagesBody, {"messages": HI * (MOST_MESSAGES + 1)}, "messages"),
        (MessagesBody, {"messages": HI, "stop_sequences": ["a"] * 65}, "stop_sequences"),
        (MessagesBody, {"messages": HI, "tools": [{"name": "a"}] * (MOST_TOOLS + 1)}, "tools"),
        (
            MessagesBody,
            {
                "messages": HI,
                "output_config": {
                    "format": {"type": "json_schema", "schema": {"a": "b" * (256 << 10)}}
                },
            },
            "output_config",
        ),
        (ResponsesBody, {"input": HI * (MOST_MESSAGES + 1)}, "input"),
        (ResponsesBody, {"input": "a" * (8 << 20)}, "input"),
        (ResponsesBody, {"input": "a", "tools": [{"type": "x"}] * (MOST_TOOLS + 1)}, "tools"),
        (ResponsesBody, {"input": "a", "max_output_tokens": 2**60}, "max_output_tokens"),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"regex": "a" * (1 << 19)}}, None),
        (LlamaBody, {"prompt": "a", "n_probs": 21}, "n_probs"),
        (TokenizeBody, {"content": "a" * (4 << 20) + "a"}, "content"),
        (CompletionBody, {"prompt": "a", "dry_sequence_breakers": json.dumps(["a"] * 65)}, None),
        (CompletionBody, {"prompt": "a", "custom_token_bans": "7 " * (1 << 19)}, None),
        (CompletionBody, {"prompt": "a", **{f"x{n}": 1 for n in range(256)}}, ""),
    ],
)
def test_what_a_dialect_makes_of_fields_is_bounded_by_their_names(
    model: type[BaseModel], body: dict[str, Any], name: str | None
) -> None:
    expected = [*body][-1] if name is None else name or None

    assert problem(model, body)[0] == expected


@pytest.mark.parametrize(
    ("model", "body"),
    [(MessagesBody, {"messages": HI * 100_000}), (ResponsesBody, {"input": HI * 100_000})],
)
def test_a_dialect_looks_at_no_more_turns_than_it_may_have(
    model: type[BaseModel], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[model.__module__]
    parts, seen = module._parts, [0]

    def counted(given: dict[str, Any]) -> Iterator[Any]:
        for part in parts(given):
            seen[0] += 1
            yield part

    monkeypatch.setattr(module, "_parts", counted)

    assert problem(model, body)[0] == next(iter(body))
    assert seen[0] <= MOST_MESSAGES + 1


def test_long_conversations_and_lists_of_ids_are_within_the_bounds() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turn += [{"role": "tool", "tool_call_id": "a", "content": "b" * 300}]
    chat = {"messages": turn * 3333, "tools": [{"type": "function", "function": {"name": "f"}}]}
    ids = {"prompt": [199_999] * 1_000_000, "banned_strings": ["a phrase to ban"] * 500}

    for model, body in ((ChatBody, chat), (CompletionBody, ids)):
        model.model_validate(json.loads(check_body(json.dumps(body).encode())))


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MOST_CONTAINERS + b"[]]",
        b"[" + b"1," * MOST_VALUES + b"1]",
        b"[" + b'"",' * MOST_TEXTS + b'""]',
        json.dumps([{}] * (MOST_CONTAINERS + 1)).encode("utf-16"),
    ],
    ids=["lists", "numbers", "texts", "utf-16"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body has") as caught:
        check_body(body)

    assert caught.value.status == 400


@pytest.mark.parametrize("text", ['{,["' * 300_000, '\\"' * 300_000, "\\" * 600_001 + '"'])
def test_marks_within_texts_do_not_count(text: str) -> None:
    for code in ("utf-8", "utf-16"):
        body = json.dumps({"prompt": text, "n": [1]}).encode(code)

        assert check_body(body) == body


def test_neighbours_of_one_role_are_joined_in_order() -> None:
    parts = [{"role": "assistant", "reasoning_content": c} for c in "ab"]
    parts += [{"role": "assistant", "content": [{"type": "text", "text": c}]} for c in "cd"]
    parts += [{"role": "user", "content": "e"}, {"role": "user", "content": "f"}]

    [first, *others] = turns(iter(parts))

    assert first["reasoning_content"] == "ab"
    assert messages_of([first])[0]["content"] == "c\nd"
    assert messages_of(others) == [{"role": "user", "content": "e\n\nf"}]


def test_the_page_lists_the_bounds() -> None:
    page = Path(ROOT / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")

    assert table() in page
