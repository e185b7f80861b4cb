"""Turns of a conversation as templates read them: plain values, arguments of calls as mappings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.images import refuse_images

Role = Literal["system", "user", "assistant"]

TEXTS = ("name", "tool_call_id", "reasoning_content")  # text or None, where a mapping has them
MOST_SHOWN = 60  # characters of a refused value


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


AnyMessage = Message | Mapping[str, object]


def values_of(messages: Sequence[AnyMessage]) -> list[dict[str, object]]:
    """Return messages as a template reads them.

    Raises:
        ConfigError: a message is not one, holds an image, or calls a function with something else
            than a JSON object; it names the message.
    """
    return [_values(message, f"message {number}") for number, message in enumerate(messages, 1)]


def roles_of(messages: Sequence[AnyMessage]) -> list[str]:
    """Return who speaks in each of the messages."""
    return [str(m.role if isinstance(m, Message) else m["role"]) for m in messages]


def tools_of(tools: Sequence[Mapping[str, object]] | None) -> list[dict[str, object]] | None:
    """Return the functions that a template offers to the model; None: no function.

    Raises:
        ConfigError: one of them is no mapping, or has no name.
    """
    for number, tool in enumerate(tools or (), 1):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ConfigError(
                f"tool {number} is {_shown(tool)}; it must be the JSON schema of a function, with "
                "`name` and `parameters`"
            )
    return [dict(tool) for tool in tools] if tools else None


def _values(message: AnyMessage, where: str) -> dict[str, object]:
    if isinstance(message, Message):
        refuse_images(message.content, where)
        return {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} is {_shown(message)}; it must be a mapping with a `role`")
    values = dict(message)
    if not isinstance(values.get("content"), str | list | tuple | Mapping | None):
        raise ConfigError(
            f"`content` of {where} is {_shown(values['content'])}; it must be text or parts"
        )
    refuse_images(values.get("content"), where)
    for name in TEXTS:
        if not isinstance(values.get(name), str | None):
            raise ConfigError(f"`{name}` of {where} is {_shown(values[name])}; it must be text")
    if (calls := values.get("tool_calls")) is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ConfigError(f"`tool_calls` of {where} is {_shown(calls)}; it must be a list")
        values["tool_calls"] = [_call(call, where) for call in calls]
    return values


def _call(call: object, where: str) -> dict[str, object]:
    """Return a call, which is a function or has one, with its arguments as a mapping."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(
            f"{where} calls {_shown(call)}; a call must be a mapping whose `function` has a `name`"
        )
    function = {**inner, "arguments": _arguments(inner.get("arguments"), inner["name"], where)}
    assert isinstance(call, Mapping)
    return {**call, "function": function} if "function" in call else function


def _arguments(given: object, name: str, where: str) -> dict[str, Any]:
    """Return the arguments of a call; clients write those of a function without any as "" or None.

    Raises:
        ConfigError: they are no JSON object.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given, parse_constant=_refuse)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the arguments of `{name[:MOST_SHOWN]}`, which {where} calls, are {_shown(given)}; "
            "they must be a JSON object"
        )
    return dict(found)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and infinities are not JSON


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
