"""Reads of a text with tool calls: events as it comes, calls and content at the end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.engine.chat.tools import NAME


@dataclass(frozen=True, slots=True)
class ToolText:
    """Text beside calls. is_broken: it begins like a call, and is none."""

    text: str
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call has begun."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the JSON text of a call's arguments."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended. is_valid: if not, forget it; its source follows as text."""

    id: str
    is_valid: bool = True


ToolEvent = ToolText | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """A call of a function; arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """Content and calls of a text. is_broken: some content begins like a call, and is none."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    is_broken: bool = False


def functions_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return name → schema of its arguments; raises `ConfigError` for a tool without a name."""
    found: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools, 1):
        inner = tool.get("function", tool)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(
                f"tool {number} has the name {name!r}; it needs one of letters, digits and `_.:-`"
            )
        schema = inner.get("parameters") or {"type": "object", "properties": {}}
        kinds = {"properties": dict, "required": list}
        if not isinstance(schema, Mapping) or not all(
            isinstance(schema.get(key) or kind(), kind) for key, kind in kinds.items()
        ):
            raise ConfigError(
                f"`parameters` of `{name}` is not a JSON schema of an object; give it "
                "`properties`, a mapping, and `required`, a list"
            )
        found[name] = dict(schema)
    return found
