"""An option of the command line that sets a field of a configuration.

Types, bounds and defaults are the field's, so that none of them is written twice.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from exl2flow.core.options.config import ConversionConfig


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`--flag` sets `field` of `model`: a dotted path in a pydantic model, a name in a dataclass.

    default: for people, in place of the field's; is_rare: only `--help-all` lists it.
    """

    flag: str
    field: str
    help: str
    metavar: str | None = None
    default: str | None = None
    is_rare: bool = False
    model: type = ConversionConfig

    @property
    def name(self) -> str:
        """The parameter's name in Python."""
        return self.flag.removeprefix("--").replace("-", "_")

    def field_info(self) -> FieldInfo:
        """Return the field of the configuration that this sets."""
        if is_dataclass(self.model):
            default = {field.name: field.default for field in fields(self.model)}[self.field]
            return FieldInfo.from_annotated_attribute(
                get_type_hints(self.model)[self.field], default
            )
        model: type[BaseModel] = self.model
        *groups, last = self.field.split(".")
        for group in groups:
            found = group_of(model.model_fields[group])
            assert found is not None
            model = found
        return model.model_fields[last]

    def parameter(self, panel: str) -> inspect.Parameter:
        """Return the command's parameter, None unless given: presets fill the others."""
        field = self.field_info()
        kinds = (field.annotation, *get_args(field.annotation))  # that of a union, too
        choices = next((kind for kind in kinds if get_origin(kind) is Literal), None)
        is_off = field.default is False or field.default == []
        shown = self.default or (None if is_off else field.default)
        is_on = field.default is True  # then it needs a name to switch it off
        option = typer.Option(
            f"{self.flag}/--no-{self.flag[2:]}" if is_on else self.flag,
            help=self.help,
            metavar=self.metavar,
            parser=None if choices is None else one_of(choices),
            show_default=False
            if any(shown is x for x in (None, False)) or shown == []
            else str(shown),
            rich_help_panel=panel,
            hidden=self.is_rare,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[Optional[field.annotation], option],  # noqa: UP045  # a value
            default=None,
        )


Panel = tuple[str, tuple[Setting, ...]]
