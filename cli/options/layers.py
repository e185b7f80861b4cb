"""Options that a TOML file and the environment set, where the command line does not."""

import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

from exl2flow.cli.options.build import Model, Values, flags, validated
from exl2flow.cli.options.setting import settings_of
from exl2flow.cli.output.console import json_line
from exl2flow.core import words
from exl2flow.core.errors import ConfigError


def layered(
    model: type[Model], values: Values, *, path: Path | None, prefix: str, of: str
) -> Model:
    """Return a model without groups: of options given, else the environment, the file, defaults.

    Args:
        model: its fields are the keys of the file, and behind `prefix` the environment's names.
        values: of the command line.
        path: a TOML file.
        prefix: how variables begin; lists in them have commas, empty ones count as absent.
        of: the command, for messages.

    Raises:
        ConfigError: naming the option, variable or key that is unknown or out of range.
    """
    own, found = flags(model), dict[str, Any]()
    shown = {**own}
    if path is not None:
        table = read_toml(path, "the configuration")
        found = options_in(table, model.model_fields, f"`{path}`", of=of)
        inner = {f"{name}.{key}" for name, v in found.items() if isinstance(v, dict) for key in v}
        shown |= {name: f"{name}` in `{path}" for name in {*found, *inner}}
    lists = {s.field: get_origin(s.info.annotation) is list for s in settings_of(model)}
    for variable, text in os.environ.items():
        if not variable.startswith(prefix):
            continue
        field = variable.removeprefix(prefix).lower()
        if field not in lists:
            raise ConfigError(f"`{variable}` is not an option of {of}{words.nearest(field, lists)}")
        if text:
            found[field] = text.split(",") if lists[field] else text
            shown[field] = variable
    return validated(model, found | {**values}, shown | {f: own[f] for f in values if f in own})


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {what} in `{path}`: {words.cause(error)}") from error


def options_in(
    table: Mapping[str, Any], known: Collection[str], where: str, *, of: str
) -> dict[str, Any]:
    """Return field → value of a table, whose keys may be spelled as options are.

    Raises:
        ConfigError: a key is not an option, with the names that are near.
    """
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for key in values:
        if key not in known:
            why = f"`{key}`, which is not an option of {of}{words.nearest(key, known)}"
            raise ConfigError(f"{where} has {why}")
    return values


def as_toml(options: BaseModel) -> str:
    """Return options as a TOML file that sets them all, but for empty ones."""
    values = options.model_dump(mode="json", exclude_none=True)
    lines = [f"{name} = {_value(v)}" for name, v in values.items() if not isinstance(v, dict)]
    for name, table in values.items():
        if isinstance(table, dict) and table:
            lines += ["", f"[{name}]", *(f"{json_line(k)} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines)


def _value(value: object) -> str:
    return repr(value) if isinstance(value, float) else json_line(value)
