"""What needs no wire: aliases, parts of texts, failures of the generator, errors as data."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hosts import make_host
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core import errors
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.conversation import Thinking
from exl2flow.core.requests.request import Request
from exl2flow.engine.chat import CallArguments, CallBegin, all_tool_formats
from exl2flow.engine.generate import Event
from exl2flow.inference import LoadedModel
from exl2flow.serve.answers.answer import AnswerPlan, Choice, RunningAnswer, Text, Update
from exl2flow.serve.answers.fields import ALIASES, ChatBody, CompletionBody
from exl2flow.serve.apis.completions import plan_of
from exl2flow.serve.apis.mapping import settings_of
from exl2flow.serve.apis.messages import MessagesDialect
from exl2flow.serve.apis.openai import ChatDialect
from exl2flow.serve.apis.responses import ResponsesBody, ResponsesDialect
from exl2flow.serve.errors import STATUSES, as_api_error
from exl2flow.serve.hosts.model_host import ModelHost

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
TEXT = '<think>\nA thought.</think>\n\nText. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
TEXT += "</tool_call>"


PLAN = AnswerPlan(
    requests=(),
    prompts=(),
    marks=Thinking("<think>", "</think>"),
    tools=TOOLS,
    tool_format=all_tool_formats()["hermes"],
)


@pytest.fixture(scope="module")
def host(model: LoadedModel) -> ModelHost:
    return make_host(model)


@pytest.mark.parametrize(
    ("field", "alias"), [(field, alias) for field, names in ALIASES.items() for alias in names]
)
def test_every_alias_has_a_field(field: str, alias: str) -> None:
    kind = ChatBody if field in ChatBody.model_fields else CompletionBody

    assert field in kind.model_fields
    assert alias not in {*ChatBody.model_fields, *CompletionBody.model_fields}


RANGES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 3),
    "top_k": st.integers(0, 100),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "typical": st.floats(0, 1),
    "skew": st.floats(-1, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "repetition_range": st.integers(-1, 100),
    "frequency_penalty": st.floats(-2, 2),
    "dry_multiplier": st.floats(0, 2),
    "xtc_probability": st.floats(0, 1),
}


@given(st.data(), st.fixed_dictionaries({}, optional=RANGES))
def test_fields_become_the_settings_of_their_names(
    host: ModelHost, data: st.DataObject, values: dict[str, Any]
) -> None:
    body = {data.draw(st.sampled_from((k, *ALIASES.get(k, ())))): v for k, v in values.items()}

    settings = settings_of(CompletionBody.model_validate({"prompt": "a", **body}), host)

    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert settings == SamplingSettings(**{**neutral, **values})


def test_switches_of_other_servers_become_ours(host: ModelHost) -> None:
    body = CompletionBody.model_validate(
        {
            "prompt": "a",
            "top_k": -1,
            "dry_penalty_last_n": -1,
            "mirostat": 2,
            "dynatemp_range": 0.5,
            "logit_bias": {"5": -100, "7": 3},
            "seed": None,
            "stop": ["</s>", "text"],
            "allowed_token_ids": [3, 4],
        }
    )
    settings, [request] = settings_of(body, host), plan_of(body, host).requests

    assert (settings.top_k, settings.dry_range, settings.mirostat) == (0, 0, True)
    assert (settings.min_temp, settings.max_temp) == (0.5, 1.5)
    assert settings.token_bias == ((7, 3.0),)
    assert request.stops == (1, "text")  # `</s>` is a token
    assert {*range(host.width)} - {*request.excluded} == {3, 4}


def read(pieces: list[str], *, is_forced: bool) -> tuple[str, str, str, list[str]]:
    """Return thoughts, content, arguments and names of a text in pieces."""
    choice, parts = Choice(replace(PLAN, shows_calls=is_forced)), list[Any]()
    for piece in pieces:
        parts += choice.parts(Event(stage="text", text=piece))
    parts += choice.parts(Event(stage="text", reason="stop_token"))
    thoughts, content = (
        "".join(p.text for p in parts if isinstance(p, Text) and p.is_thought == is_thought)
        for is_thought in (True, False)
    )
    arguments = "".join(p.text for p in parts if isinstance(p, CallArguments))
    return thoughts, content, arguments, [p.name for p in parts if isinstance(p, CallBegin)]


PIECES = st.lists(st.integers(0, len(TEXT)), max_size=12).map(
    lambda cuts: [TEXT[a:b] for a, b in pairwise([0, *sorted(cuts), len(TEXT)])]
)


@given(pieces=PIECES, is_forced=st.booleans())
def test_any_split_of_a_text_gives_the_same_parts(pieces: list[str], is_forced: bool) -> None:
    thoughts, content, arguments, names = read(pieces, is_forced=is_forced)

    assert (thoughts, content.strip(), names) == ("A thought.", "Text.", ["f"])
    assert json.loads(arguments) == {"a": 1}


class Batched(RunningAnswer):
    """An answer whose events come in given batches."""

    batches: list[list[Event]]

    async def updates(self) -> AsyncIterator[list[Update]]:
        for batch in self.batches:
            yield [update for event in batch for update in self._read(event)]


def running(
    pieces: list[str], reason: Any, plan: AnswerPlan = PLAN, sizes: Sequence[int] = (1,) * 9
) -> RunningAnswer:
    """Return an answer in pieces that ends for a reason; its events come in batches."""
    more: Any = {"tag": 0, "ids": (5,), "probabilities": (0.5,)}
    events = [Event(stage="text", text=piece, **more) for piece in pieces]
    events.append(Event(stage="text", tag=0, reason=reason))
    plan = replace(plan, requests=(Request("a"),), prompts=((1,),))
    answer, ends = Batched(plan, [], asyncio.Queue(), began=0.0, waited=0.0), [*accumulate(sizes)]
    answer.batches = [events[a:b] for a, b in pairwise([0, *ends, None])]
    return answer


def streamed(dialect: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""

    async def whole() -> str:
        return b"".join([piece async for piece in dialect.stream()]).decode()

    rows = asyncio.run(whole()).split("\n")
    return [json.loads(row.removeprefix("data: ")) for row in rows if row.startswith("data: {")]


def accumulated(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join chunks as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "logs": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning_content"):
            found[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            function = found["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            for name in function:
                function[name] += call["function"].get(name, "")
        found["logs"] += (choice["logprobs"] or {}).get("content", [])
        found["finish_reason"] = choice["finish_reason"]
    return found


SIZES = st.lists(st.integers(0, 4), max_size=5)


@given(pieces=PIECES, sizes=SIZES, shows_calls=st.booleans())
def test_streams_join_to_the_plain_answer(
    host: ModelHost, pieces: list[str], sizes: list[int], shows_calls: bool
) -> None:
    body = ChatBody.model_validate({"messages": [{}], "logprobs": True})

    def made() -> ChatDialect:
        plan = replace(PLAN, shows_calls=shows_calls)
        return ChatDialect(running(pieces, "stop_token", plan, sizes), body, host)

    [choice] = asyncio.run(made().whole())["choices"]
    joined = accumulated(streamed(made()))

    message = choice["message"]
    assert joined["content"] == message["content"] == "Text. "
    assert joined["reasoning_content"] == message["reasoning_content"] == "A thought."
    assert [*joined["calls"].values()] == [call["function"] for call in message["tool_calls"]]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert len(joined["logs"]) == len(choice["logprobs"]["content"]) == len(pieces)
    assert joined["finish_reason"] == choice["finish_reason"] == "tool_calls"


def joined_events(events: list[dict[str, Any]]) -> dict[int, str]:
    """Join the deltas of blocks, which both dialects number."""
    found = dict[int, str]()
    for event in events:
        if "delta" in event and event["type"] != "message_delta":
            index, delta = event.get("output_index", event.get("index")), event["delta"]
            is_text = isinstance(delta, str)
            text = delta if is_text else next(v for k, v in delta.items() if k != "type")
            found[index] = found.get(index, "") + text
    return found


def shown(block: dict[str, Any]) -> str:
    """Return the text of a block or an item of a plain answer."""
    [inner] = block.get("content", [block])
    fields = ("text", "thinking", "arguments")
    return next((str(inner[f]) for f in fields if f in inner), "") or json.dumps(block["input"])


@given(
    pieces=PIECES,
    sizes=SIZES,
    shows_calls=st.booleans(),
    dialect=st.sampled_from([MessagesDialect, ResponsesDialect]),
)
def test_blocks_of_streams_join_to_the_plain_answer(
    host: ModelHost, pieces: list[str], sizes: list[int], shows_calls: bool, dialect: Any
) -> None:
    body: Any = ResponsesBody.model_validate({"input": "a"})

    def made() -> Any:
        plan = replace(PLAN, shows_calls=shows_calls)
        return dialect(running(pieces, "stop_token", plan, sizes), body, host)

    whole, deltas = asyncio.run(made().whole()), joined_events(streamed(made()))

    blocks = whole["content" if dialect is MessagesDialect else "output"]
    assert [shown(block).strip() for block in blocks[:2]] == ["A thought.", "Text."]
    assert [deltas[0], deltas[1]] == [shown(block) for block in blocks[:2]]
    assert json.loads(deltas[2]) == json.loads(shown(blocks[2])) == {"a": 1}


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        (["Text, and"], ["incomplete"]),
        (["<think>", "\nA thought"], ["incomplete"]),
        (["<think>\nA thought.</think>\n\n", "Text"], ["completed", "incomplete"]),
        ([TEXT], ["completed", "completed", "completed"]),
    ],
)
def test_an_item_that_is_cut_off_is_incomplete(
    host: ModelHost, pieces: list[str], statuses: list[str]
) -> None:
    body: Any = ResponsesBody.model_validate({"input": "a"})

    def made() -> ResponsesDialect:
        return ResponsesDialect(running(pieces, "max_new_tokens"), body, host)

    whole, events = asyncio.run(made().whole()), streamed(made())

    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert whole["status"] == "incomplete"
    assert [item["status"] for item in whole["output"]] == statuses
    assert [item["status"] for item in done] == statuses
    assert [item["status"] for item in events[-1]["response"]["output"]] == statuses


CALL = TEXT[TEXT.index("<tool_call>") :]


def test_who_gives_functions_gets_a_function_call(host: ModelHost) -> None:
    body = ChatBody.model_validate({"messages": [{}], "functions": [{"name": "f"}]})

    def made() -> ChatDialect:
        return ChatDialect(running([CALL[:50], CALL[50:]], "stop_token"), body, host)

    [choice] = asyncio.run(made().whole())["choices"]
    chunks = [event["choices"][0] for event in streamed(made())]

    joined = {"name": "", "arguments": ""}
    for delta in (chunk["delta"] for chunk in chunks):
        for name, text in delta.get("function_call", {}).items():
            joined[name] += text
    assert choice["message"]["function_call"] == joined == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "function_call"


def test_calls_of_custom_tools_have_their_text(host: ModelHost) -> None:
    text = CALL.replace('{"a": 1}', '{"input": "a } b"}')
    custom = {"type": "custom", "custom": {"name": "f"}}
    body = ChatBody.model_validate({"messages": [{}], "tools": [custom]})
    plan = replace(PLAN, shows_calls=True)

    def made() -> ChatDialect:
        return ChatDialect(running([*text], "stop_token", plan), body, host)

    [call] = asyncio.run(made().whole())["choices"][0]["message"]["tool_calls"]
    deltas = [event["choices"][0]["delta"] for event in streamed(made())]

    assert (call["type"], call["custom"]) == ("custom", {"name": "f", "input": "a } b"})
    pieces = [c["custom"]["input"] for d in deltas for c in d.get("tool_calls", ())]
    assert "".join(pieces) == "a } b"


def test_a_call_that_does_not_parse_stays_text() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": \n</tool_call>'

    assert read([text], is_forced=False) == ("", text, "", [])


@pytest.mark.parametrize(("kind", "status", "code"), STATUSES)
def test_errors_have_their_status(kind: Any, status: int, code: str | None) -> None:
    told = as_api_error(kind("`field` is wrong"), "req_1")

    assert (told.status, told.code, told.param) == (status, code, "field")


def test_other_errors_tell_nothing() -> None:
    for error in (errors.OutOfDeviceMemory("secret"), ValueError("secret")):
        told = as_api_error(error, "req_1")
        assert told.status == 500
        assert "req_1" in str(told)
        assert "secret" not in str(told)
