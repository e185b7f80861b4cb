"""Turns of a conversation as templates read them: one form for what clients write in several.

A history is data, of a model's own making in part: what the API leaves optional may be absent,
null or empty, and arguments of a call may be cut off. Only what is not a message at all is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.images import refuse_images

Role = Literal["system", "user", "assistant"]

TEXTS = ("name", "tool_call_id", "reasoning_content")  # text, where a mapping has them
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MOST_SHOWN = 60  # characters of a refused value
DEPTH = 64  # of values within each other in arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


AnyMessage = Message | Mapping[str, object]


def values_of(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    Fields that are null or empty are left out, `content` is there. The older `function_call` and
    its role `function` become `tool_calls` and `tool`, `reasoning` becomes `reasoning_content`, a
    refusal is what the assistant said. Arguments of a call are a mapping, or text if they are no
    JSON object.

    Raises:
        ConfigError: a message is not one, or holds an image; it names the message.
    """
    return [_values(message, f"message {number}") for number, message in enumerate(messages, 1)]


def roles_of(messages: Sequence[AnyMessage]) -> list[str]:
    """Return who speaks in each of the messages."""
    return [str(m.role if isinstance(m, Message) else m["role"]) for m in messages]


def tools_of(tools: Sequence[Mapping[str, object]] | None) -> list[dict[str, Any]] | None:
    """Return the functions that a template offers to the model; None: no function.

    Raises:
        ConfigError: one of them is not a mapping, or has no name.
    """
    return [_tool(tool, number) for number, tool in enumerate(tools, 1)] if tools else None


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say something: to clients, absent, null and empty are one thing."""
    return {k: v for k, v in values.items() if not is_empty(v)}


def is_empty(value: object) -> bool:
    """Return whether a field says nothing: numbers and truth values always do say something."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def text_of(content: object, where: str) -> str:
    """Return a content as text, its parts as lines.

    Raises:
        ConfigError: a part is not text; it names `where`.
    """
    parts = content if isinstance(content, list | tuple) else [content or ""]
    texts = list[str]()
    for part in parts:
        shown: Any = part
        kind: Any = type(part).__name__
        if isinstance(part, Mapping):
            kind, shown = part.get("type"), part.get("text") or part.get("refusal") or ""
        if not isinstance(shown, str) or (shown is not part and kind not in TEXT_PARTS):
            raise ConfigError(f"{where} has a part of type {kind!r:.40}; only text is read")
        texts.append(shown)
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    inner = (tool.get("function") or tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(
            f"tool {number} is {_shown(tool)}; it must be the JSON schema of a function, with "
            "`name` and `parameters`"
        )
    found = present(tool)
    return {**found, "function": present(inner)} if "function" in found else found


def _values(message: AnyMessage, where: str) -> dict[str, Any]:
    if isinstance(message, Message):
        refuse_images(message.content, where)
        return {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} is {_shown(message)}; it must be a mapping with a `role`")
    given = present(message)
    content, refusal = given.pop("content", ""), given.pop("refusal", "")
    if not isinstance(content, str | list | tuple | Mapping):
        raise ConfigError(f"`content` of {where} is {_shown(content)}; it must be text or parts")
    refuse_images(content, where)
    values = {"role": message["role"], "content": content or refusal, **given}
    if isinstance(thoughts := given.get("reasoning"), str):
        values.setdefault("reasoning_content", thoughts)
    for name in TEXTS:
        if not isinstance(values.get(name, ""), str):
            raise ConfigError(f"`{name}` of {where} is {_shown(values[name])}; it must be text")
    return _with_calls(values, where)


def _with_calls(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message whose calls, and the results of calls, have their newer form."""
    values["role"] = "tool" if values["role"] == "function" else values["role"]
    if older := values.pop("function_call", None):
        values.setdefault("tool_calls", [{"type": "function", "function": older}])
    if calls := values.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ConfigError(f"`tool_calls` of {where} is {_shown(calls)}; it must be a list")
        values["tool_calls"] = [_call(call, where) for call in calls]
    return values


def _call(call: object, where: str) -> dict[str, Any]:
    """Return a call, which is a function or has one, or a custom tool with its one argument."""
    given = present(call) if isinstance(call, Mapping) else {}
    if isinstance(custom := given.pop("custom", None), Mapping):
        arguments = {"input": custom.get("input") or ""}
        given |= {"type": "function", "function": {"name": custom.get("name")}}
        given["function"] |= {"arguments": arguments}
    inner = given.get("function", given)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(
            f"{where} calls {_shown(call)}; a call must be a mapping whose `function` has a `name`"
        )
    function = {**present(inner), "name": inner["name"]}
    function["arguments"] = arguments_of(inner.get("arguments"))
    return {**given, "function": function} if "function" in given else function


def arguments_of(given: object) -> dict[str, Any] | str:
    """Return the arguments of a call as a mapping, or as text where they are no JSON object.

    Clients write those of a function without any as "" or null; those of a call that was cut off
    are the beginning of an object.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False, default=str)
    try:
        found = json.loads(given, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return given
    return dict(found) if isinstance(found, Mapping) and is_sound(found) else given


def is_sound(value: object) -> bool:
    """Return whether a value can be written as JSON and encoded: not too deep, whole characters."""
    level: list[Any] = [value]
    for _ in range(DEPTH):
        items = [v.values() if isinstance(v, dict) else v for v in level]
        level = [inner for each in items for inner in each if isinstance(inner, dict | list)]
    if level:
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):  # an integer of thousands of digits, half of a surrogate pair
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and infinities are not JSON


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
