"""Bodies of all dialects become chats, whatever their optional fields and histories are."""

from copy import deepcopy
from functools import reduce
from operator import getitem
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2flow.core.errors import ConfigError
from exl2flow.serve.answers.fields import ChatBody, CompletionBody
from exl2flow.serve.apis.chat_tools import tools_of
from exl2flow.serve.apis.chats import messages_of
from exl2flow.serve.apis.messages import MessagesBody
from exl2flow.serve.apis.responses import ResponsesBody

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"role": "user", "content": "a"}
CHAT: Json = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "c",
            "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "d"},
        {"role": "assistant", "content": "e"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
}
MESSAGES: Json = {
    "system": "s",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "d"}]},
    ],
    "tools": [{"name": "f", "description": "F", "input_schema": SCHEMA}],
}
RESPONSES: Json = {
    "instructions": "s",
    "input": [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": "d"},
    ],
    "tools": [{"type": "function", "name": "f", "description": "F", "parameters": SCHEMA}],
}
# kind, body, names of fields, where they are, what is empty there
FIELDS: list[tuple[type[ChatBody], Json, str, tuple[str | int, ...], object]] = [
    (ChatBody, CHAT, "content refusal name reasoning_content", ("messages", 1), ""),
    (ChatBody, CHAT, "tool_calls annotations", ("messages", 1), []),
    (ChatBody, CHAT, "tool_calls content", ("messages", 3), []),
    (ChatBody, CHAT, "function_call audio", ("messages", 3), {}),
    (ChatBody, CHAT, "content tool_call_id", ("messages", 2), ""),
    (ChatBody, CHAT, "arguments", ("messages", 1, "tool_calls", 0, "function"), ""),
    (ChatBody, CHAT, "id type", ("messages", 1, "tool_calls", 0), ""),
    (MessagesBody, MESSAGES, "system", (), ""),
    (MessagesBody, MESSAGES, "content", ("messages", 0), []),
    (MessagesBody, MESSAGES, "text", ("messages", 0, "content", 0), ""),
    (MessagesBody, MESSAGES, "thinking", ("messages", 1, "content", 0), ""),
    (MessagesBody, MESSAGES, "input", ("messages", 1, "content", 2), {}),
    (MessagesBody, MESSAGES, "content", ("messages", 2, "content", 0), []),
    (MessagesBody, MESSAGES, "description", ("tools", 0), ""),
    (ResponsesBody, RESPONSES, "instructions", (), ""),
    (ResponsesBody, RESPONSES, "type", ("input", 0), ""),
    (ResponsesBody, RESPONSES, "content", ("input", 1), []),
    (ResponsesBody, RESPONSES, "text", ("input", 1, "content", 0), ""),
    (ResponsesBody, RESPONSES, "content", ("input", 2), ""),
    (ResponsesBody, RESPONSES, "arguments", ("input", 3), ""),
    (ResponsesBody, RESPONSES, "output", ("input", 4), ""),
    (ResponsesBody, RESPONSES, "description", ("tools", 0), ""),
]


def chat_of(kind: type[ChatBody], body: Json) -> tuple[Any, Any]:
    """Return messages and functions of a body."""
    read = kind.model_validate(body)
    return messages_of(read.messages), tools_of(read).offered


@pytest.mark.parametrize(("kind", "body", "names", "place", "empty"), FIELDS)
def test_absent_null_and_empty_are_one_thing(
    kind: type[ChatBody], body: Json, names: str, place: tuple[str | int, ...], empty: object
) -> None:
    for field in names.split():
        found = []
        for value in ("absent", None, empty):
            changed = deepcopy(body)
            at: Any = reduce(getitem, place, changed)  # type: ignore[arg-type]  # of any form
            at.pop(field, None)
            at |= {} if value == "absent" else {field: value}
            found.append(chat_of(kind, changed))

        assert found[0] == found[1] == found[2], field
        assert "None" not in str([m["content"] for m in found[0][0]])


def test_what_official_clients_write_back_is_the_message_itself() -> None:
    empty = {"tool_calls": None, "function_call": None, "refusal": None, "audio": None}
    old = {"role": "assistant", "content": "x", **empty, "annotations": []}

    assert messages_of([USER, old]) == [USER, {"role": "assistant", "content": "x"}]


def test_older_and_custom_calls_are_calls() -> None:
    older = {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "x", "type": "custom", "custom": {"name": "p", "input": "text"}}
    talk = [older, {"role": "function", "name": "f", "content": "b"}]

    first, second = messages_of(talk)
    [third] = messages_of([{"role": "assistant", "tool_calls": [custom]}])

    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert second == {"role": "tool", "content": "b", "name": "f"}
    assert third["tool_calls"][0]["function"] == {"name": "p", "arguments": {"input": "text"}}


def test_a_refusal_is_what_the_assistant_said() -> None:
    [told] = messages_of([{"role": "assistant", "content": None, "refusal": "No."}])

    assert told == {"role": "assistant", "content": "No."}


DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "abc"}
PARTS = {"type": "content", "content": [{"type": "text", "text": "abc"}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": DOCUMENT}, "abc"),
        ({"type": "document", "source": DOCUMENT, "title": "T", "context": None}, "T\n\nabc"),
        ({"type": "document", "source": PARTS}, "abc"),
        (
            {"type": "search_result", "source": "s", "title": "T", "content": PARTS["content"]},
            "T\n\ns\n\nabc",
        ),
        ({"type": "compaction", "content": "abc"}, "abc"),
    ],
)
@pytest.mark.parametrize("is_result", [False, True])
def test_blocks_that_hold_text_are_read(block: Json, text: str, is_result: bool) -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": [block]}
    body = {"messages": [{"role": "user", "content": [result if is_result else block]}]}

    assert chat_of(MessagesBody, body)[0][0]["content"] == text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
        {"type": "document", "source": {"type": "url", "url": "http://x"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
        {"type": "container_upload", "file_id": "f"},
        {"type": "image", "source": {"type": "base64"}},
    ],
)
def test_blocks_without_text_are_refused_by_type(block: Json) -> None:
    body = {"messages": [{"role": "user", "content": [block]}]}

    with pytest.raises(Exception, match=r"part of type '(document|container_upload|image)'"):
        chat_of(MessagesBody, body)


@pytest.mark.parametrize(
    "kind",
    [
        "server_tool_use",
        "web_search_tool_result",
        "code_execution_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ],
)
def test_what_the_vendors_tools_left_is_left_out_with_a_word(kind: str) -> None:
    block = {"type": kind, "id": "s", "content": []}
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "t"}]}

    read = MessagesBody.model_validate({"messages": [USER, turn, USER]})

    assert messages_of(read.messages) == [USER, {"role": "assistant", "content": "t"}, USER]
    assert read.left_out == (kind,)


@pytest.mark.parametrize("kind", ["web_search_call", "mcp_call", "compaction"])
def test_items_of_the_vendors_tools_are_left_out_with_a_word(kind: str) -> None:
    read = ResponsesBody.model_validate({"input": [USER, {"type": kind, "id": "s"}]})

    assert messages_of(read.messages) == [USER]
    assert read.left_out == (kind,)


def test_calls_of_tools_that_the_client_runs_are_calls() -> None:
    action = {"type": "exec", "command": ["ls"]}
    items = [
        {"type": "local_shell_call", "call_id": "x", "action": action},
        {"type": "local_shell_call_output", "call_id": "x", "output": "a.txt"},
        {"type": "shell_call_output", "call_id": "y", "output": [{"stdout": "b"}]},
    ]

    call, first, second = messages_of(ResponsesBody.model_validate({"input": items}).messages)

    assert call["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": action}
    assert (first["content"], second["content"]) == ("a.txt", '[{"stdout": "b"}]')


TEXT = st.sampled_from(["", "a", '{"a": "b', "[1]"])
BLOCKS = st.sampled_from(
    [
        *MESSAGES["messages"][1]["content"],
        *MESSAGES["messages"][2]["content"],
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "document", "source": DOCUMENT},
    ]
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant"]),
        "content": st.none() | TEXT | st.lists(BLOCKS, max_size=3),
    }
)
ITEMS = st.sampled_from([*RESPONSES["input"], {"type": "web_search_call", "id": "w"}]) | (
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "name": st.just("f"), "arguments": TEXT | st.none()}
    )
)


@settings(max_examples=50)
@given(turns=st.lists(TURNS, max_size=4), items=st.lists(ITEMS, max_size=5))
def test_no_history_is_an_error(turns: list[Json], items: list[Json]) -> None:
    chat_of(MessagesBody, {"messages": [USER, *turns]})
    chat_of(ResponsesBody, {"input": [USER, *items]})


@pytest.mark.parametrize("length", [-1, -2])
@pytest.mark.parametrize("field", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_a_length_without_an_end_is_all_that_fits(field: str, length: int) -> None:
    assert CompletionBody.model_validate({"prompt": "a", field: length}).max_tokens is None
    with pytest.raises(ValueError, match=field):
        CompletionBody.model_validate({"prompt": "a", field: -3})


TWO = [{"type": "function", "function": {"name": name}} for name in "fg"]
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
FLAT = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}


@pytest.mark.parametrize("choice", [{"type": "allowed_tools", "allowed_tools": ALLOWED}, FLAT])
def test_only_allowed_tools_may_be_called_and_all_are_shown(choice: Json) -> None:
    body = {"messages": [USER], "tools": TWO, "tool_choice": choice}

    found = tools_of(ChatBody.model_validate(body))

    assert (found.offered, found.allowed, found.choice) == (TWO, TWO[1:], "required")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": TWO, "tool_choice": {**FLAT, "tools": [{"name": "h"}]}}, "'h', which is not"),
        ({"tools": TWO, "tool_choice": {**FLAT, "tools": []}}, "allows no function"),
        ({"tools": TWO, "tool_choice": {**FLAT, "tools": "g"}}, "a list of objects"),
        ({"tools": TWO, "tool_choice": {**FLAT, "mode": "some"}}, "`tool_choice` is 'some'"),
        ({"tools": TWO, "functions": [{"name": "f"}]}, "`functions` and `tools`"),
        ({"functions": [{"name": "f"}], "function_call": {}}, "with a `name`"),
        ({"function_call": {"name": "f"}}, "needs `tools`"),
    ],
)
def test_what_cannot_be_chosen_is_refused(more: Json, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tools_of(ChatBody.model_validate({"messages": [USER], **more}))


def test_the_older_choice_names_a_function() -> None:
    body = {"messages": [USER], "functions": [{"name": "f"}], "function_call": {"name": "f"}}

    found = tools_of(ChatBody.model_validate(body))

    assert (found.choice, found.name) == ("named", "f")


def test_custom_tools_are_functions_with_one_text() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
    custom = {"type": "custom", "custom": {"name": "p", "description": "P.", "format": grammar}}
    body = {"messages": [USER], "tools": [custom]}
    body |= {"tool_choice": {"type": "custom", "custom": {"name": "p"}}}

    found = tools_of(ChatBody.model_validate(body))

    [function] = [tool["function"] for tool in found.offered]
    assert (found.choice, found.name, function["name"]) == ("named", "p", "p")
    assert function["description"] == "P.\n\nstart: /a/"
    assert [*function["parameters"]["properties"]] == ["input"]
