"""OpenAI's Responses: its body as a chat, and blocks of answers as its items. Nothing is stored."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from exl2flow.serve.answers.answer import RunningAnswer
from exl2flow.serve.answers.bounds import MOST_TOOLS, Name, most
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
from exl2flow.serve.apis.chat_tools import KINDS, as_function
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.model_host import ModelHost

STORED = "this server stores no answers; send the whole conversation as `input`"
# calls of tools that the client runs, and the field with their arguments
CALLS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
RESULTS = {"function_call_output", "custom_tool_call_output", *(f"{kind}_output" for kind in CALLS)}
# what the vendor's own tools did within a conversation
VENDORS = {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
VENDORS |= {"mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"}
VENDORS |= {"tool_search_call", "tool_search_output", "compaction"}
PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}
NAMES = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}
ENDS = {"length": "incomplete"}  # of others, `completed`


class ResponsesBody(AgentBody):
    """A request for a response. custom: tools whose only argument is a text."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), STORED),
        "background": "every answer is sent to the client that asks for it",
    }

    dialect: ClassVar = {"custom": "tools", "dropped": "tools", "messages": "input"}
    custom: Annotated[tuple[Name, ...], most(MOST_TOOLS)] = ()

    @classmethod
    def ours(cls, given: Json) -> Json:
        """See `Body.ours`."""
        tools, text = objects(given.get("tools") or [], "tools"), given.get("text")
        hidden = {"instructions", "input", "text"}
        if not given.get("background"):
            hidden.add("background")
        return {
            **{k: v for k, v in given.items() if k not in hidden},
            **conversation(_parts(given)),
            "n": 1,
            "response_format": text.get("format") if isinstance(text, dict) else None,
            "tools": [_function(tool) for tool in tools if tool.get("type") in KINDS],
            "custom": tuple(str(t.get("name")) for t in tools if t.get("type") == "custom"),
            "dropped": tuple(str(t.get("type")) for t in tools if t.get("type") not in KINDS),
        }


def _parts(given: Json) -> Iterator[Json]:
    """Yield the texts, thoughts, calls and results of a conversation, and kinds that are not."""
    if given.get("instructions"):
        yield {"role": "system", "content": given["instructions"]}
    source = given.get("input")
    if isinstance(source, str):
        yield {"role": "user", "content": source}
        return
    for number, item in enumerate(objects(bounded(source), "input")):
        match item.get("type") or "message":
            case "message":
                content = objects(item.get("content") or "", "content")
                yield {"role": item.get("role"), "content": content}
            case "reasoning":
                texts = objects(item.get("content") or item.get("summary") or [], "content")
                thoughts = "\n".join(words_of(part.get("text")) for part in texts)
                yield {"role": "assistant", "reasoning_content": thoughts}
            case "function_call":
                yield call(item.get("call_id"), item.get("name"), item.get("arguments"))
            case "custom_tool_call":
                yield call(item.get("call_id"), item.get("name"), {"input": item.get("input")})
            case str(kind) if kind in CALLS:
                name, arguments = kind.removesuffix("_call"), item.get(CALLS[kind])
                yield call(item.get("call_id") or item.get("id"), name, arguments)
            case str(kind) if kind in RESULTS:
                output, id_ = objects(item.get("output") or "", "output"), item.get("call_id")
                if any("type" not in part for part in output):  # exit codes and the like
                    output = objects(json.dumps(output, ensure_ascii=False), "output")
                yield {"role": "tool", "tool_call_id": id_ or item.get("id"), "content": output}
            case str(kind) if kind in VENDORS:
                yield {"role": "assistant", "left_out": kind}
            case kind:
                raise ValueError(f"`input` [{number}] has the type {kind!r:.40}, which is not read")


def _function(tool: Json) -> Json:
    if tool["type"] == "custom":
        return as_function(tool)
    about = words_of(tool.get("description"))
    inner = {"name": tool.get("name"), "description": about, "parameters": tool.get("parameters")}
    return {"type": "function", "function": inner}


class ResponsesDialect(AgentDialect):
    """A response. Events are numbered."""

    prefix, ping = "resp_", b": ping\n\n"

    def __init__(self, answer: RunningAnswer, body: ResponsesBody, host: ModelHost) -> None:
        super().__init__(answer, body, host)
        self._body, self._number = body, -1

    def event(self, value: Json) -> bytes:
        self._number += 1
        return super().event({**value, "sequence_number": self._number})

    def opening_events(self) -> Sequence[Json]:
        response = self._response("in_progress")
        return [{"type": f"response.{n}", "response": response} for n in ("created", "in_progress")]

    def begun(self, block: Block) -> Sequence[Json]:
        item = self._item(block, "in_progress")
        first = {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind == "call":
            return [first]
        return [first, self._at(block, "content_part.added", part=_part(block))]

    def added(self, block: Block, text: str) -> Sequence[Json]:
        if block.name in self._body.custom:  # whose text is known when the JSON around it ends
            return []
        return [self._at(block, f"{NAMES[block.kind]}.delta", delta=text, **_logs(block))]

    def closed(self, block: Block) -> Sequence[Json]:
        if block.arguments is None:  # cut off; its source follows as text
            return []
        item = self._item(block, _status(block))
        last = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        if block.name in self._body.custom:
            kind, text = "custom_tool_call_input", item["input"]
            delta = self._at(block, f"{kind}.delta", delta=text)
            return [delta, self._at(block, f"{kind}.done", input=text), last]
        if block.kind == "call":
            end = {"name": block.name, "arguments": block.text}
            return [self._at(block, f"{NAMES[block.kind]}.done", **end), last]
        done = self._at(block, f"{NAMES[block.kind]}.done", text=block.text, **_logs(block))
        return [done, self._at(block, "content_part.done", part=_part(block)), last]

    def closing_events(self) -> Sequence[Json]:
        response = self.complete()
        return [{"type": f"response.{response['status']}", "response": response}]

    def complete(self) -> Json:
        status = ENDS.get(self.end["finish_reason"], "completed")
        counts = self.answer.usage()
        details = counts["completion_tokens_details"]
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details["reasoning_tokens"]},
            "total_tokens": counts["total_tokens"],
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status) | {"usage": usage, "incomplete_details": why}

    def failed(self, error: ApiError) -> bytes:
        self._cut(is_cut=True)
        row = {"code": error.code or "server_error", "message": str(error)}
        response = self._response("failed") | {"error": row}
        return self.event({"type": "response.failed", "response": response})

    def _response(self, status: str) -> Json:
        body, whole = self._body, [b for b in self.blocks if b.arguments is not None]
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [self._item(block, _status(block)) for block in whole],
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": body.tool_choice,
            "tools": [],  # the client's, who knows them
            "usage": None,
        }

    def _at(self, block: Block, name: str, /, **more: Any) -> Json:
        place = {"item_id": self._id(block), "output_index": block.index}
        inner = {} if block.kind == "call" else {"content_index": 0}
        return {"type": f"response.{name}", **place, **inner, **more}

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{str(self._head['id'])[-24:]}_{block.index}"

    def _item(self, block: Block, status: str) -> Json:
        head = {"id": self._id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        if block.kind == "thinking":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        head |= {"call_id": block.id, "name": block.name}
        if block.name not in self._body.custom:
            return {**head, "type": "function_call", "arguments": block.text}
        text = (block.arguments or {}).get("input", block.text)
        return {**head, "type": "custom_tool_call", "input": text}


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _part(block: Block) -> Json:
    more: Json = {"annotations": []} if block.kind == "text" else {}
    return {"type": NAMES[block.kind], "text": block.text, **more, **_logs(block)}


def _logs(block: Block) -> Json:
    return {"logprobs": []} if block.kind == "text" else {}
