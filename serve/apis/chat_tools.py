"""Tools of a chat's body: which functions are shown to the model, and which it may call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exl2flow.core.errors import ConfigError
from exl2flow.engine.chat.tool_grammar import Choice
from exl2flow.serve.answers.fields import ChatBody

Json = dict[str, Any]
CHOICES: dict[str, Choice] = {"auto": "auto", "required": "required", "none": "none"}
CHOICES["any"] = "required"
INPUT: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
INPUT |= {"additionalProperties": False}
KINDS = ("function", "custom")  # others are the vendor's


class Tools(NamedTuple):
    """The functions that a model sees, those that it may call, and which it must."""

    offered: list[Json]
    allowed: list[Json]
    choice: Choice
    name: str = ""


def tools_of(body: ChatBody) -> Tools:
    """Return the tools of a body; raises `ConfigError` if they or the choice are wrong."""
    if body.tools and body.functions:
        raise ConfigError("`functions` and `tools` are two lists of functions; give `tools` only")
    older: list[Json] = [{"type": "function", "function": f} for f in body.functions]
    tools = [as_function(tool) for tool in body.tools or older]
    given, allowed = body.tool_choice, tools
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        inner = given.get("allowed_tools") or given
        allowed, given = _allowed(inner, tools), inner.get("mode") or "auto"
    if isinstance(given, Mapping):
        name = name_of(given)
        if not isinstance(name, str):
            raise ConfigError("`tool_choice` has no `function` with a `name`")
        if not tools:
            raise ConfigError("`tool_choice` needs `tools`")
        return Tools(tools, tools, "named", name)
    if given not in CHOICES:
        raise ConfigError(f"`tool_choice` is {given!r:.40}; it takes {', '.join(CHOICES)}")
    choice = CHOICES[given]
    if choice == "required" and not allowed:
        raise ConfigError("`tool_choice` needs `tools`")
    return Tools([], [], choice) if choice == "none" else Tools(tools, allowed, choice)


def _allowed(given: object, tools: Sequence[Json]) -> list[Json]:
    """Return the tools of a choice, without the vendor's; raises `ConfigError` if none is left."""
    rows = given.get("tools") if isinstance(given, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError("`tool_choice` of type `allowed_tools` takes `tools`, a list of objects")
    names = [name_of(row) for row in rows if (row.get("type") or KINDS[0]) in KINDS]
    known = {name_of(tool): tool for tool in tools}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"`tool_choice` allows {unknown[0]!r:.80}, which is not among `tools`")
    if not names:
        raise ConfigError("`tool_choice` allows no function; choose `none`")
    return [known[name] for name in dict.fromkeys(names)]


def name_of(tool: Mapping[str, Any]) -> Any:
    """Return the name of a tool, or of a choice of one, in the form of any dialect."""
    inner = tool.get("function") or tool.get("custom") or tool
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def customs_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the tools whose only argument is a text."""
    return frozenset(str(name_of(tool)) for tool in tools if tool.get("type") == "custom")


def as_function(tool: Json) -> Json:
    """Return a custom tool as a function with one text, `input`; any other as it is."""
    if tool.get("type") != "custom":
        return tool
    inner = tool.get("custom") or tool
    if not isinstance(inner, Mapping):
        raise ConfigError("`tools` has a custom tool that is not an object with a `name`")
    about = f"{inner.get('description') or ''}\n\n{_syntax(inner.get('format'))}".strip()
    function = {"name": inner.get("name"), "description": about, "parameters": INPUT}
    return {"type": "function", "function": function}


def _syntax(form: object) -> str:
    """Return the grammar of a custom tool, which is described to the model."""
    inner = (form.get("grammar") or form) if isinstance(form, Mapping) else {}
    return str(inner.get("definition") or "") if isinstance(inner, Mapping) else ""


def has_grammar(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is a custom one with a grammar."""
    inner = tool.get("custom") or tool
    form = inner.get("format") if isinstance(inner, Mapping) else None
    return tool.get("type") == "custom" and bool(_syntax(form))
