"""Repairs: what templates refuse in a conversation, and the same conversation without that.

Templates are made for the turns that a model was trained on: some take no system turn, one call at
a time, ids of nine characters, or descriptions of functions that nobody has to give. A history
comes from other models and clients as well. So each repair rewrites one trait, and is used only
where a template refuses the conversation as it is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from pydantic_core import from_json

from exl2flow.core.errors import ConfigError
from exl2flow.model.text.messages import is_sound, text_of

Values = dict[str, Any]
ID_LETTERS = 9  # of a call, as Mistral's templates want them
CALL = "<tool_call>\n{}\n</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"


class Talk(NamedTuple):
    """Messages and functions, as `values_of` and `tools_of` return them."""

    messages: list[Values]
    tools: list[Values] | None


def joined(messages: list[Values]) -> list[Values]:
    """Return messages, of which plain neighbours of one role are one; contents are text."""
    found, texts = list[Values](), list[list[Any]]()
    for message in messages:
        last = found[-1] if found else {}
        is_plain = not {"tool_calls", "reasoning_content"} & (last.keys() | message.keys())
        role = message["role"]
        is_plain &= isinstance(last.get("content"), str) and isinstance(message["content"], str)
        if last.get("role") == role and role in ("system", "user", "assistant") and is_plain:
            texts[-1].append(message["content"])
        else:
            found.append(message)
            texts.append([message["content"]])
    return [
        {**message, "content": "\n\n".join(parts)} if len(parts) > 1 else message
        for message, parts in zip(found, texts, strict=True)
    ]


def _filled_tools(talk: Talk) -> Talk:
    """Give functions and their arguments the fields that the API leaves optional."""
    return Talk(talk.messages, talk.tools and [_filled(tool) for tool in talk.tools])


def _filled(tool: Values) -> Values:
    inner = tool.get("function", tool)
    schema = inner.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    given = schema.get("properties")
    rows = {
        key: {"type": "any", "description": "", **row} if isinstance(row, Mapping) else row
        for key, row in (given.items() if isinstance(given, Mapping) else ())
    }
    more = {"type": "object", "required": [], **schema, "properties": rows}
    function = {"description": "", **inner, "parameters": more}
    return {"type": "function", **tool, "function": function} if "function" in tool else function


def _mapped_arguments(talk: Talk) -> Talk:
    """Complete arguments that are no JSON object."""
    return _with_calls(talk, lambda function: {**function, "arguments": completed(function)})


def completed(function: Values) -> Values:
    """Return the arguments of a call as a mapping: what is there of it, or the text in one."""
    given = function.get("arguments") or {}
    if not isinstance(given, str):
        return dict(given)
    try:
        found = from_json(given, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) and is_sound(found) else {"arguments": given}


def _with_calls(talk: Talk, change: Callable[[Values], Values]) -> Talk:
    def changed(call: Values) -> Values:
        return (
            {**call, "function": change(call["function"])} if "function" in call else change(call)
        )

    messages = [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in talk.messages
    ]
    return Talk(messages, talk.tools)


def _text_contents(talk: Talk) -> Talk:
    """Write parts of contents as text, where all are text."""

    def content(message: Values) -> Any:
        try:
            return text_of(message["content"], "")
        except ConfigError:
            return message["content"]

    return Talk([{**m, "content": content(m)} for m in talk.messages], talk.tools)


def _inner_systems(talk: Talk) -> Talk:
    """Give system turns behind the first turn to the user."""
    moved = [
        {**m, "role": "user"} if m["role"] in ("system", "developer") and number else m
        for number, m in enumerate(talk.messages)
    ]
    return talk if moved == talk.messages else Talk(joined(moved), talk.tools)


def _joined_neighbours(talk: Talk) -> Talk:
    """Join turns of one role that follow each other."""
    return Talk(joined(talk.messages), talk.tools)


def _single_calls(talk: Talk) -> Talk:
    """Write several calls of a turn as a turn each, in front of its results."""
    found, groups = list[Values](), list[list[Values]]()
    for message in talk.messages:
        if groups and message["role"] == "tool":
            ids = [group[0]["tool_calls"][0].get("id", "") for group in groups]
            fewest = min(range(len(groups)), key=lambda number: len(groups[number]))
            id_ = message.get("tool_call_id")
            groups[ids.index(id_) if id_ in ids else fewest].append(message)
            continue
        found += chain(*groups)
        groups = []
        if len(calls := message.get("tool_calls", ())) < 2:
            found.append(message)
            continue
        turns = [message] + [{"role": message["role"], "content": ""}] * (len(calls) - 1)
        groups = [[{**t, "tool_calls": [c]}] for t, c in zip(turns, calls, strict=True)]
    return Talk([*found, *chain(*groups)], talk.tools)


def _short_ids(talk: Talk) -> Talk:
    """Give calls ids of nine letters and digits, and results the id and name of their call."""
    found, waiting = list[Values](), dict[str, Values]()
    for message in talk.messages:
        calls = list[Values]()
        for number, call in enumerate(message.get("tool_calls", ())):
            id_ = str(call.get("id", f"{len(found)}.{number}"))
            digest = hashlib.sha256(id_.encode()).hexdigest()[:ID_LETTERS]
            is_short = len(id_) == ID_LETTERS and id_.isascii() and id_.isalnum()
            calls.append({**call, "id": id_ if is_short else digest})
            waiting[id_] = calls[-1]
        if calls:
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            key = message.get("tool_call_id", next(iter(waiting), ""))
            call = waiting.pop(key, {"id": hashlib.sha256(key.encode()).hexdigest()[:ID_LETTERS]})
            name = call.get("function", call).get("name", "")
            message = {"name": name, **message, "tool_call_id": call["id"]}
        found.append(message)
    return Talk(found, talk.tools)


def _no_system(talk: Talk) -> Talk:
    """Put the system's text in front of the user's, with which the conversation begins."""
    systems = ("system", "developer")
    texts = [str(m["content"]) for m in talk.messages if m["role"] in systems]
    rest = [m for m in talk.messages if m["role"] not in systems]
    if not texts:
        return talk
    first: Values = {"role": "user"}
    if rest and rest[0]["role"] == "user":
        first = rest.pop(0)
        texts.append(str(first["content"]))
    return Talk([{**first, "content": "\n\n".join(texts)}, *rest], talk.tools)


def _plain_turns(talk: Talk) -> Talk:
    """Let user and assistant speak in turn, in text only; calls and results are text as well."""
    turns = list[Values]()
    for message in _no_system(_text_contents(talk)).messages:
        role, texts = message["role"], [message["content"]]
        for call in message.get("tool_calls", ()):
            inner = call.get("function", call)
            about = {"name": inner["name"], "arguments": inner["arguments"]}
            texts.append(CALL.format(json.dumps(about, ensure_ascii=False)))
        if role == "tool":
            texts = [RESULT.format(message["content"])]
        text = "\n".join(str(text) for text in texts if text)
        turns.append({"role": "assistant" if role == "assistant" else "user", "content": text})
    if turns and turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": ""})
    return Talk(joined(turns), talk.tools)


# each is kept if a template does not complain of the same any more
REPAIRS: tuple[Callable[[Talk], Talk], ...] = (
    _filled_tools,
    _mapped_arguments,
    _text_contents,
    _inner_systems,
    _joined_neighbours,
    _single_calls,
    _short_ids,
    _no_system,
    _plain_turns,
)
