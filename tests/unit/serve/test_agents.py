"""Messages and Responses through the wire: official clients, and bodies of the form agents send."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import openai
import pytest
from serving import Served, serving
from sources import ROOT

from exl2flow.serve.apis.messages import MessagesBody
from exl2flow.serve.apis.responses import ResponsesBody

GOLDEN = ROOT / "tests" / "golden" / "serve" / "agents"
AGENTS: dict[str, Any] = {
    name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("claude_code", "codex")
}
HI: Any = [{"role": "user", "content": "What is a cat?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Changes a file."}
DEAD_END = {"regex_pattern": "cat", "banned_strings": ["t"]}
KEY = "a key"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--format", str(GOLDEN / "agent.jinja"), "--slots", "2", "--waiting", "0")
    with serving(*flags, "--tokens", "4096", env={"EXL2FLOW_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with served.anthropic(KEY) as client:
        yield client


@pytest.fixture
def gpt(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai(KEY) as client:
        yield client


def sent(served: Served, agent: str, *, path: str = "", **fields: Any) -> httpx.Response:
    """Send what an agent sends, with some fields changed."""
    row = AGENTS[agent]
    with served.http() as client:
        headers = row["headers"] | {"authorization": f"Bearer {KEY}"}
        return client.post(
            path or row["path"], json=row["body"] | {"seed": 1} | fields, headers=headers
        )


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    assert answer.status_code == 200, answer.text
    found = list[dict[str, Any]]()
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


CALLS = {"max_tokens": 200, "tools": [WEATHER], "extra_body": {"seed": 3}}
ONE: Any = {"type": "tool", "name": "get_weather"}
THINKING = {"type": "enabled", "budget_tokens": 3}


@pytest.mark.parametrize(
    ("options", "kinds", "end"),
    [
        ({"max_tokens": 20, "extra_body": {"seed": 5}}, ["text"], "max_tokens"),
        ({**CALLS, "tool_choice": ONE}, ["tool_use"], "tool_use"),
        ({**CALLS, "tool_choice": ONE, "thinking": THINKING}, ["thinking", "tool_use"], "tool_use"),
        (
            {"max_tokens": 50, "extra_body": {"seed": 5}, "stop_sequences": ["e"]},
            ["text"],
            "stop_sequence",
        ),
        ({**CALLS, "max_tokens": 4, "tool_choice": {"type": "none"}}, ["text"], "max_tokens"),
    ],
)
def test_streams_of_messages_join_to_the_plain_answer(
    claude: anthropic.Anthropic, options: Any, kinds: list[str], end: str
) -> None:
    options = {"model": "m", "messages": HI, **options}
    plain = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        whole = stream.get_final_message()

    shown, streamed = ([{**b.to_dict(), "id": ""} for b in m.content] for m in (plain, whole))
    assert shown == streamed
    assert [block.type for block in plain.content] == kinds
    assert plain.stop_reason == whole.stop_reason == end
    assert plain.stop_sequence == ("e" if end == "stop_sequence" else None)
    assert plain.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.cache_read_input_tokens
    read = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    fields = ("tools", "tool_choice", "thinking")
    given = {name: options[name] for name in fields if name in options}
    assert claude.messages.count_tokens(model="m", messages=HI, **given).input_tokens == read


CUSTOM_CALL = {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "apply_patch"}}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"extra_body": {"guided_regex": "yes|no", "thinking_budget": 0, "seed": 3}}, ["message"]),
        ({"tools": [FUNCTION], "tool_choice": "required"}, ["function_call"]),
        (CUSTOM_CALL, ["custom_tool_call"]),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": "required",
                "extra_body": {"enable_thinking": True, "thinking_budget": 3, "seed": 3},
            },
            ["reasoning", "function_call"],
        ),
    ],
)
def test_streams_of_responses_join_to_the_plain_answer(
    gpt: openai.OpenAI, options: Any, kinds: list[str]
) -> None:
    options = {"extra_body": {"seed": 3}, "parallel_tool_calls": False, **options}
    options = {"model": "m", "input": "What is a cat?", "max_output_tokens": 400, **options}
    plain = gpt.responses.create(**options)
    done, text = list[Any](), ""
    with gpt.responses.stream(**options) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            if event.type == "response.output_item.done":
                done.append(event.item)
            text += event.delta if event.type == "response.output_text.delta" else ""
        whole = stream.get_final_response()

    def shown(items: Any) -> list[dict[str, Any]]:
        fields = ("type", "name", "arguments", "input", "content")
        return [{f: v for f, v in item.to_dict().items() if f in fields} for item in items]

    assert shown(plain.output) == shown(done)
    assert [item["type"] for item in shown(whole.output)][-len(kinds) :] == kinds
    assert text == plain.output_text
    assert plain.usage
    assert whole.usage
    assert plain.usage.output_tokens == whole.usage.output_tokens
    counted = gpt.responses.input_tokens.count(
        model="m", input=options["input"], tools=options.get("tools", [])
    )
    assert counted.input_tokens <= whole.usage.input_tokens


def test_an_answer_that_is_cut_is_incomplete(gpt: openai.OpenAI) -> None:
    options: Any = {"model": "m", "input": "a", "max_output_tokens": 3, "extra_body": {"seed": 1}}
    plain = gpt.responses.create(**options)
    *_, last = gpt.responses.create(**options, stream=True)

    assert plain.incomplete_details
    assert plain.incomplete_details.reason == "max_output_tokens"
    assert plain.status == "incomplete"
    assert last.type == "response.incomplete"


def test_answers_match_the_schema_of_both_dialects(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    form: Any = {"type": "json_schema", "schema": SCHEMA}
    closed = {"thinking_budget": 0, "seed": 1}
    message = claude.messages.create(
        model="m", messages=HI, max_tokens=200, output_config={"format": form}, extra_body=closed
    )
    response = gpt.responses.create(
        model="m",
        input="a",
        max_output_tokens=200,
        text={"format": {**form, "name": "place"}},
        extra_body=closed,
    )

    block = message.content[-1]
    assert block.type == "text"
    for text in (block.text, response.output_text):
        assert set(json.loads(text)) == {"city"}


def test_a_last_message_of_the_assistant_goes_on(served: Served) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "A cat is"}], "max_tokens": 1}
    with served.http(headers={"x-api-key": KEY}) as client:
        count = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        body["messages"] += HI
        assert client.post("/messages/count_tokens", json=body).json()["input_tokens"] > count + 8


def test_bodies_of_agents_become_chats() -> None:
    claude = MessagesBody.model_validate(AGENTS["claude_code"]["body"])
    codex = ResponsesBody.model_validate(AGENTS["codex"]["body"])

    for body, roles in ((claude, "ssuuattus"), (codex, "sduuattu")):
        [turn] = [m for m in body.messages if m["role"] == "assistant"]
        assert turn["reasoning_content"] == "The bowl comes first."
        assert turn["content"][0]["text"] == "I look at the bowl."
        assert [call["id"] for call in turn["tool_calls"]] == ["call_a", "call_b"]
        results = [m["tool_call_id"] for m in body.messages if m["role"] == "tool"]
        assert results == ["call_a", "call_b"]
        assert len(body.tools) == 2
        assert "".join(m["role"][0] for m in body.messages) == roles
    assert not any("billing" in str(m["content"]) for m in claude.messages)
    assert claude.ignored == {"metadata", "context_management", "diagnostics"}
    assert claude.dropped == ("web_search",)
    assert codex.custom == ("apply_patch",)
    assert codex.dropped == ("namespace", "web_search")
    assert codex.tools[1]["function"]["description"].endswith("%import common.LF")


def test_the_turn_of_claude_code_is_answered(served: Served) -> None:
    answer = sent(
        served, "claude_code", tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    *events, last = events_of(answer)

    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks[0] == "thinking"
    assert set(blocks[1:]) == {"tool_use"}
    assert events[0]["type"] == "message_start"
    assert last == {"type": "message_stop"}
    assert "web_search" in answer.headers["x-exl2flow-warnings"]
    assert "x-exl2flow-ignored" not in answer.headers


def test_a_line_that_changes_in_each_turn_spoils_no_cache(served: Served) -> None:
    system = AGENTS["claude_code"]["body"]["system"]
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=9; cch=12345;"}
    sent(served, "claude_code", max_tokens=1)
    answer = sent(served, "claude_code", max_tokens=1, system=[line, *system[1:]], stream=False)

    usage = answer.json()["usage"]
    assert usage["input_tokens"] == 1
    assert usage["cache_read_input_tokens"] > 300


def test_the_turn_of_codex_is_answered(served: Served) -> None:
    answer = sent(served, "codex", tool_choice={"type": "custom", "name": "apply_patch"})
    events = events_of(answer)

    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:3] == ["created", "in_progress", "output_item.added"]
    assert types[-2:] == ["output_item.done", "completed"]
    [item] = events[-1]["response"]["output"]
    assert item["type"] == "custom_tool_call"
    assert item["input"] == events[-3]["input"]
    assert "namespace" in answer.headers["x-exl2flow-warnings"]


@pytest.mark.parametrize("agent", [*AGENTS])
def test_bodies_of_200_kb_are_counted_or_refused_by_name(served: Served, agent: str) -> None:
    tools = json.loads(json.dumps(AGENTS[agent]["body"]["tools"]))
    tools[0]["description"] = "How cats are fed. " * 12_000
    count = {"claude_code": "/v1/messages/count_tokens", "codex": "/v1/responses/input_tokens"}
    counted = sent(served, agent, path=count[agent], tools=tools).json()["input_tokens"]
    refused = sent(served, agent, tools=tools)

    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == f"prompt is too long: {counted} tokens > 2048 maximum"


def test_errors_of_messages_have_their_classes(served: Served, claude: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "messages": HI, "max_tokens": 1500}
    wrong, refusal = served.anthropic("wrong"), pytest.raises(anthropic.AuthenticationError)
    with wrong, refusal as refused:
        wrong.messages.create(**options)
    assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**options, extra_body={"temperature": -1})
    part: Any = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(**options | {"messages": [{"role": "user", "content": [part]}]})
    with ExitStack() as streams:
        for seed in range(2):
            more = {"seed": seed, "ignore_eos": True}
            stream = streams.enter_context(claude.messages.stream(**options, extra_body=more))
            next(iter(stream))
        with pytest.raises(anthropic.APIStatusError) as overloaded:
            claude.messages.create(**options)
    assert overloaded.value.status_code == 529
    assert overloaded.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, "`previous_response_id`"),
        ({"input": "a", "conversation": "conv_1"}, "`conversation`"),
        ({"input": "a", "background": True}, "`background`"),
        ({}, "`input`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [5]}, "`input`"),
        ({"input": "a", "tools": {"type": "function"}}, "`tools`"),
    ],
)
def test_bad_responses_are_refused_by_name(served: Served, body: Any, words: str) -> None:
    with served.http(headers={"x-api-key": KEY}) as client:
        answer = client.post("/v1/responses", json=body)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_null_of_a_stateful_field_is_no_field(gpt: openai.OpenAI) -> None:
    answer = gpt.responses.create(
        model="m", input="a", max_output_tokens=1, background=False, extra_body={"seed": 1}
    )

    assert answer.status == "incomplete"


def test_errors_within_streams_have_events(served: Served, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="no token is left"):
        list(
            claude.messages.create(
                model="m", messages=HI, max_tokens=9, stream=True, extra_body=DEAD_END
            )
        )
    with served.http(headers={"x-api-key": KEY}) as client:
        body = {"input": "a", "stream": True, **DEAD_END}
        *_, last = events_of(client.post("/v1/responses", json=body))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "filter_dead_end"


def test_the_root_answers_without_a_key(served: Served) -> None:
    with served.http() as client:
        assert client.head("/").status_code == 200
