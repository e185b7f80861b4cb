"""Anthropic's Messages: its body as a chat, and blocks of answers as its events."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exl2flow.serve.answers.answer import RunningAnswer
from exl2flow.serve.apis.agents import (
    AgentBody,
    AgentDialect,
    Block,
    Json,
    bounded,
    call,
    conversation,
    objects,
    words_of,
)
from exl2flow.serve.errors import ApiError, messages_body
from exl2flow.serve.hosts.model_host import ModelHost

BILLING = re.compile(r"^x-anthropic-billing-header:.*\n*", re.MULTILINE)  # new in each request
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# what the vendor's own tools did within a conversation, and what they found
VENDORS = re.compile(r"(server|mcp)_tool_use|\w+_tool_result")
ENDS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
EMPTY: Mapping[str, Json] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "call": {"type": "tool_use", "input": {}},
}
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesBody(AgentBody):
    """A request for a message."""

    @classmethod
    def ours(cls, given: Json) -> Json:
        """See `Body.ours`; a last message of the assistant is continued."""
        more, choice = dict[str, Any](), given.get("tool_choice")
        if isinstance(choice, dict):
            name = {"name": choice.get("name")}
            more["tool_choice"] = CHOICES.get(str(choice.get("type")), name)
            more["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        tools = objects(given.get("tools") or [], "tools")
        told = conversation(_parts(given))
        messages = told["messages"]
        output = given.get("output_config")
        wishes = output if isinstance(output, dict) else {}
        more["response_format"] = wishes.get("format", given.get("output_format"))
        more["reasoning_effort"] = wishes.get("effort")
        hidden = ("system", "output_config", "output_format")
        return {
            **{k: v for k, v in given.items() if k not in hidden},
            **more,
            **told,
            "n": 1,
            "continue_final_message": bool(messages and "tool_calls" not in messages[-1]),
            "tools": [_function(tool) for tool in tools if "input_schema" in tool],
            "dropped": tuple(str(t.get("name")) for t in tools if "input_schema" not in t),
        }


def _parts(given: Json) -> Iterator[Json]:
    """Yield the texts, thoughts, calls and results of a conversation, and kinds that are not."""
    for part in objects(given.get("system") or [], "system"):
        if text := BILLING.sub("", words_of(part.get("text"))):
            yield {"role": "system", "content": text}
    for message in objects(bounded(given.get("messages")), "messages"):
        nothing = [] if message.get("role") == "system" else ""  # of others it is a turn
        for part in objects(message.get("content") or nothing, "content"):
            match part.get("type"):
                case "thinking":
                    thoughts = words_of(part.get("thinking"))
                    yield {"role": "assistant", "reasoning_content": thoughts}
                case "redacted_thinking":
                    pass
                case "tool_use":
                    yield call(part.get("id"), part.get("name"), part.get("input"))
                case "tool_result":
                    content = objects(part.get("content") or "", "content")
                    id_ = part.get("tool_use_id")
                    shown = [*map(_text_part, content)]
                    yield {"role": "tool", "tool_call_id": id_, "content": shown}
                case str(kind) if VENDORS.fullmatch(kind):
                    yield {"role": message.get("role"), "left_out": kind}
                case _:
                    yield {"role": message.get("role"), "content": [_text_part(part)]}


def _text_part(part: Json) -> Json:
    """Return a part that holds text in another form as a text; what holds none as it is."""
    source, about = part.get("source"), [part.get("title"), part.get("context")]
    match part.get("type"), source:
        case "document", {"type": "text", "data": str(data)}:
            found = [data]
        case "document", {"type": "content", "content": content}:
            found = [*map(_text, objects(content or "", "source"))]
        case "search_result", _:
            about = [part.get("title"), source]
            found = [*map(_text, objects(part.get("content") or "", "content"))]
        case "compaction", _:  # a summary of what came before
            about, found = [], [words_of(part.get("content"))]
        case _:
            return part
    texts = [words_of(text) for text in [*about, *found] if text]
    return {"type": "text", "text": "\n\n".join(texts)}


def _text(part: Json) -> str:
    """Return the text of a part within a document; raises `ValueError` if it is something else."""
    if part.get("type") != "text":
        what = f"a document has a part of type {part.get('type')!r:.40}"
        raise ValueError(f"{what}; only text is read")
    return words_of(part.get("text"))


def _function(tool: Json) -> Json:
    inner = {"name": tool.get("name"), "description": words_of(tool.get("description"))}
    return {"type": "function", "function": {**inner, "parameters": tool["input_schema"]}}


class MessagesDialect(AgentDialect):
    """A message."""

    prefix, ping = "msg_", b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, answer: RunningAnswer, body: MessagesBody, host: ModelHost) -> None:
        super().__init__(answer, body, host)
        self._stops = [body.stop] if isinstance(body.stop, str) else body.stop

    def opening_events(self) -> Sequence[Json]:
        counts = {"input_tokens": len(self.answer.plan.prompts[0]), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message({}, [], counts)}]

    def begun(self, block: Block) -> Sequence[Json]:
        shown = dict(EMPTY[block.kind])
        if block.kind == "call":
            shown |= {"id": block.id, "name": block.name}
        return [{"type": "content_block_start", "index": block.index, "content_block": shown}]

    def added(self, block: Block, text: str) -> Sequence[Json]:
        kind, field = DELTAS[block.kind]
        return [self._delta(block, {"type": kind, field: text})]

    def closed(self, block: Block) -> Sequence[Json]:
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind != "thinking":
            return [stop]
        return [self._delta(block, {"type": "signature_delta", "signature": ""}), stop]

    def closing_events(self) -> Sequence[Json]:
        last = {"type": "message_delta", "delta": self._ended(), "usage": self._usage()}
        return [last, {"type": "message_stop"}]

    def complete(self) -> Json:
        return self._message(self._ended(), [*map(_shown, self.blocks)], self._usage())

    def failed(self, error: ApiError) -> bytes:
        return self.event(messages_body(error))

    def _delta(self, block: Block, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _message(self, end: Json, content: list[Json], usage: Json) -> Json:
        head = {"id": self._head["id"], "type": "message", "role": "assistant"}
        end = {"stop_reason": None, "stop_sequence": None, **end}
        return {**head, "model": self._head["model"], "content": content, **end, "usage": usage}

    def _ended(self) -> Json:
        reason, trigger = self.end["finish_reason"], self.end["stop_reason"]
        if reason == "stop" and trigger in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": trigger}
        return {"stop_reason": ENDS[reason], "stop_sequence": None}

    def _usage(self) -> Json:
        counts = self.answer.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }


def _shown(block: Block) -> Json:
    if block.kind == "call":
        return {**EMPTY["call"], "id": block.id, "name": block.name, "input": block.arguments}
    return {**EMPTY[block.kind], block.kind: block.text}
