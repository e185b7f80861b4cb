"""Formats of tool calls: a row of `tools.toml` each, found by a model's template and vocabulary."""

import difflib
import re
import secrets
import string
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from exl2flow.core.errors import ConfigError

ROWS = Path(__file__).with_name("tools.toml")
GENERIC = "hermes"  # for templates that show the model no tools
LETTERS = string.ascii_letters + string.digits
NAME = re.compile(r"[A-Za-z0-9_.:-]+")  # of a function

Kind = Literal["json", "json_list", "name_json", "parameters", "pythonic", "channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The form in which a model writes calls of functions.

    kind: which code reads and forces it.
    marks, without: strings by which it is found.
    begin: what comes before calls; empty: the text begins with them. others: what else may.
    end: what comes behind calls; a text that ends without it has ended as well.
    call_begin, call_end: around each of several calls between `begin` and `end`.
    name_key, arguments_key, id_key: of JSON objects; an empty `id_key`: they have none.
    id_is_first: the model writes a number as id before the name; else letters at the end.
    name_begin, name_end: around a function's name outside of JSON. between: what a model writes
        between the two, such as the kind of arguments.
    key_begin, key_end, value_end: around the names and values of `parameters`.
    brackets: calls of `pythonic` are a list; otherwise each has a line.
    id_prefix, id_length: the ids that calls get, a prefix and letters and digits.
    is_generic: the template shows no tools; they belong into the system prompt.
    """

    name: str
    kind: Kind
    marks: tuple[str, ...]
    without: tuple[str, ...] = ()
    begin: str
    others: tuple[str, ...] = ()
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_is_first: bool = False
    name_begin: str = ""
    name_end: str = ""
    between: str = ""
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    brackets: bool = False
    id_prefix: str = "call_"
    id_length: int = 24
    is_generic: bool = False

    def new_id(self) -> str:
        """Return an id for a call."""
        return self.id_prefix + "".join(secrets.choice(LETTERS) for _ in range(self.id_length))


@cache
def all_tool_formats() -> dict[str, ToolFormat]:
    """Return all formats by name."""
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return {name: _row(name, fields) for name, fields in rows.items()}


def _row(name: str, fields: dict[str, object]) -> ToolFormat:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return ToolFormat(name=name, **values)  # type: ignore[arg-type]  # the rows are ours


def named_tool_format(name: str) -> ToolFormat:
    """Return the format of a name; raises `ConfigError` if there is none."""
    rows = all_tool_formats()
    if name not in rows:
        near = difflib.get_close_matches(name.lower(), rows, n=3, cutoff=0.5)
        names = ", ".join(f"`{row}`" for row in near or rows)
        raise ConfigError(f"`{name}` is not a format of tool calls; take one of {names}")
    return rows[name]


def tool_format(template: str, vocabulary: Collection[str] = ()) -> ToolFormat:
    """Return the format in which a model calls functions.

    Args:
        template: Jinja source of the model's chat template.
        vocabulary: names of its special and added tokens. They count as well where the template
            alone has no row's marks.

    Returns:
        A row of `tools.toml`, or `hermes` with `is_generic` where the template reads no tools or
        no row is found.
    """
    found = list[ToolFormat]()
    if re.search(r"\btools\b|\btool_calls\b", template):
        found = _matching(template, ()) or _matching(template, vocabulary)
    if not found:
        return replace(all_tool_formats()[GENERIC], is_generic=True)
    return max(found, key=lambda row: len(row.marks))


def _matching(template: str, vocabulary: Collection[str]) -> list[ToolFormat]:
    def has(mark: str) -> bool:
        return mark in template or mark in vocabulary

    def is_match(row: ToolFormat) -> bool:
        return all(map(has, row.marks)) and not any(mark in template for mark in row.without)

    return [row for row in all_tool_formats().values() if is_match(row)]
