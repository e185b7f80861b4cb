"""Options and arguments of commands, made from the fields that they set.

Names, texts, types, bounds and defaults are the field's, so that none of them is written twice.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import Option, Panel
from exl2flow.core.options.config import RunOptions, in_form_order

PANELS = (None, *get_args(Panel))
EMPTY = "; empty: "  # in a description, before the default in words


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the group of options that a field holds, None if it holds a value."""
    for kind in (*get_args(field.annotation), field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def one_of(kind: Any) -> Callable[[str], str]:
    """Return the parser of an option with the choices of a `Literal`.

    Typer's own puts the name of pydantic's error before what it says.
    """
    choices = get_args(kind)

    def parse(value: str) -> str:
        if value not in choices:
            listed = ", ".join(f"'{choice}'" for choice in choices)
            raise typer.BadParameter(f"'{value}' is not one of {listed}")
        return value

    return parse


def words_in(metavar: str | None) -> list[str]:
    """Return the words that a metavar such as `auto|cpu|cuda` or `MODEL|mtp` names as values."""
    parts = (metavar or "").split("|")
    return [part for part in parts if part.isalpha() and part.islower()] if parts[1:] else []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option or argument that sets `field`, a dotted path from a command's model.

    default: as help shows it; is_rare: only `--help-all` lists it.
    """

    field: str
    info: FieldInfo
    option: Option
    flag: str
    help: str
    default: str | None
    panel: str | None
    is_rare: bool

    @property
    def name(self) -> str:
        """The parameter's name in Python."""
        name = self.field if self.option.is_argument else self.flag.removeprefix("--")
        return name.replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """Return the command's parameter, None unless given: presets fill the others."""
        kind: Any = self.info.annotation
        kinds = (kind, *get_args(kind))  # that of a union, too
        choices = next((each for each in kinds if get_origin(each) is Literal), None)
        limited = next((each for each in kinds if get_origin(each) is Annotated), None)
        parser: Any = None if choices is None else one_of(choices)
        if get_origin(kind) is tuple and get_args(kind)[0] is Path:
            kind = list[Path]
        elif get_origin(kind) is tuple:
            kind, parser = str, self._numbers
        elif limited is not None:
            kind = get_args(limited)[0]  # the model's check has the better message
        shown: dict[str, Any] = {
            "help": self.help,
            "metavar": self.option.metavar,
            "parser": parser,
            "autocompletion": self._completion() if choices is None else None,
            "show_default": self.default or False,
            "rich_help_panel": self.panel,
            "hidden": self.is_rare,
        }
        is_on = self.info.default is True  # then it needs a name to switch it off
        flag = f"{self.flag}/--no-{self.flag[2:]}" if is_on else self.flag
        marker = typer.Argument(**shown) if self.option.is_argument else typer.Option(flag, **shown)
        is_needed = self.info.is_required() and "." not in self.field
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind if is_needed else kind | None, marker],
            default=inspect.Parameter.empty if is_needed else None,
        )

    def _completion(self) -> Callable[[str], list[str]] | None:
        """Return what completes a value in a shell; None: files do."""
        named = words_in(self.option.metavar)
        if not named:
            return None

        def complete(incomplete: str) -> list[str]:
            return [word for word in named if word.startswith(incomplete)]

        return complete

    def _numbers(self, text: str) -> tuple[float, ...]:
        """Return the numbers in a comma-separated list; raises `ConfigError`."""
        try:
            return tuple(float(word) for word in text.split(",") if word.strip())
        except ValueError:
            raise ConfigError(
                f"`{self.flag} {text}` is not a comma-separated list of numbers, such as `2.5,3,4`"
            ) from None


@cache
def settings_of(model: type) -> tuple[Setting, ...]:
    """Return the settings of a model and of its groups, in the order of help."""
    settings = [*_settings(model)]
    flags = flags_of(settings)
    settings = [
        dataclasses.replace(
            setting,
            help=with_flags(setting.help, flags),
            default=setting.default and with_flags(setting.default, flags),
        )
        for setting in settings
    ]
    return tuple(sorted(settings, key=lambda setting: PANELS.index(setting.panel)))


def flags_of(settings: Iterable[Setting]) -> dict[str, str]:
    """Return field → option, for messages; a group's is the one that it needs."""
    flags = dict[str, str]()
    for setting in settings:
        group = setting.field.rpartition(".")[0]
        if group and setting.info.is_required():
            flags[group] = setting.flag
        if not setting.option.is_argument:
            flags[setting.field] = setting.flag
    return flags


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return a text with options instead of the fields that it names in backticks."""
    for field, flag in flags.items():
        text = text.replace(f"`{field}`", f"`{flag}`")
    return text


def _fields(model: Any) -> dict[str, FieldInfo]:
    """Return the fields of a pydantic model, or of a dataclass those with an option."""
    if issubclass(model, BaseModel):
        names = in_form_order(model.model_fields) if issubclass(model, RunOptions) else None
        return {name: model.model_fields[name] for name in names or model.model_fields}
    hints = get_type_hints(model)
    infos = dict[str, FieldInfo]()
    for field in dataclasses.fields(model):
        if field.metadata:
            kind: Any = Annotated[hints[field.name], field.metadata["option"]]
            default = Field(default=field.default, description=field.metadata["description"])
            infos[field.name] = FieldInfo.from_annotated_attribute(kind, default)
    return infos


def _of_group(model: type, group: str, default: str) -> Iterator[Setting]:
    """Yield the settings of a group; if it needs one of them, the others go with that one."""
    settings = [*_settings(model, group)]
    needed = next((setting for setting in settings if setting.info.is_required()), None)
    for setting in settings:
        if needed is None:
            yield setting
        elif setting is needed:
            yield dataclasses.replace(setting, default=default or None)
        else:
            text = f"With `{needed.flag}`: {setting.help[0].lower()}{setting.help[1:]}"
            yield dataclasses.replace(setting, help=text)


def _capitalized(text: str) -> str:
    """Return a text with a capital at the beginning, unless it begins with a value or a file."""
    return text[0].upper() + text[1:] if text.split()[0].isalpha() else text


def _settings(model: type, group: str = "") -> Iterator[Setting]:
    """Yield the settings of a model, or of a group with this prefix."""
    for name, info in _fields(model).items():
        text, _, words = (info.description or "").partition(EMPTY)
        if (inner := group_of(info)) is not None:
            yield from _of_group(inner, f"{group}{name}.", words)
        marks = [each for each in info.metadata if isinstance(each, Option)]
        if not marks or (marks[-1].only_grouped and not group):
            continue
        option = marks[-1]  # an alias's own comes first
        flag = (option.grouped if group else None) or option.flag or name
        is_off = any(info.default is each for each in (None, False)) or info.default == []
        more = "; may be repeated" if get_origin(info.annotation) is list else ""
        yield Setting(
            field=group + name,
            info=info,
            option=option,
            flag=option.metavar if option.is_argument else f"--{flag.replace('_', '-')}",
            help=f"{_capitalized(text)}{more}.",
            default=words or (None if is_off or info.is_required() else str(info.default)),
            panel=option.panel,
            is_rare=bool(group) if option.rare is None else option.rare,
        )


def words_of(settings: Iterable[Setting], values: Mapping[str, Any]) -> list[str]:
    """Return the words that give values, by field, on another command line; None: not given."""
    words = list[str]()
    for setting in settings:
        value = values.get(setting.field)
        if isinstance(value, bool):
            words += [setting.flag] if value else []
        elif value is not None:
            rows = value if isinstance(value, list) else [value]
            words += [word for row in rows for word in (setting.flag, str(row))]
    return words
