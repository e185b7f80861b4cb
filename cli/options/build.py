"""Gives commands the options of their models, and builds the models from what is given."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from exl2flow.cli.options.setting import Setting, flags_of, settings_of, with_flags
from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.sampling import SamplingSettings

Made = TypeVar("Made")
Model = TypeVar("Model", bound=BaseModel)
Values = Mapping[str, object]  # dotted field → value, of the options that are given


def _show_all(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    for parameter in context.command.params:
        parameter.hidden = False  # type: ignore[attr-defined]  # arguments and options have it
    typer.echo(context.get_help(), nl=False, color=context.color)
    raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            callback=_show_all,
            is_eager=True,
            help="Show every option, the rare ones too, and exit.",
        ),
    ],
    default=False,
)


def with_options(
    *settings: Setting, panel: str | None = None, hides: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameters that are models with the options of their fields.

    If some of the options are rare, the command also gets `--help-all`.

    Args:
        settings: these come as `values`, for a command that makes its models itself.
        panel: shows the options instead of those of the fields.
        hides: whether `--help` leaves out the rare ones.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        settings_by_name = {"values": settings} if settings else {}
        parameters = list[inspect.Parameter]()
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel | SamplingSettings):
                settings_by_name[name] = settings_of(parameter.annotation)
            if name not in settings_by_name:
                parameters.append(parameter)
            for setting in settings_by_name.get(name, ()):
                place = setting.panel and (panel or setting.panel)
                shown = replace(setting, panel=place, is_rare=setting.is_rare and hides)
                parameters.append(shown.parameter())
        if hides and any(s.is_rare for taken in settings_by_name.values() for s in taken):
            parameters.append(HELP_ALL)

        @wraps(command)
        def wrapper(**given: Any) -> None:
            given.pop("help_all", None)
            for name, taken in settings_by_name.items():
                values = {s.field: given.pop(s.name) for s in taken}
                values = {field: v for field, v in values.items() if v is not None}
                model = signature.parameters[name].annotation
                given[name] = values if name == "values" else build(model, values)
            command(**given)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by typer
        return wrapper

    return decorate


def flags(model: type = ConversionConfig) -> dict[str, str]:
    """Return field → option of a model, for messages."""
    return flags_of(settings_of(model))


def build(model: type[Made], values: Values) -> Made:
    """Return the model that the options given describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    if issubclass(model, BaseModel):
        return validated(model, _nested(values), flags(model))
    try:
        return model(**values)
    except ConfigError as error:  # of the sampler's settings
        raise ConfigError(with_flags(str(error), flags(model))) from error


def _nested(values: Values) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for field, value in values.items():
        *groups, last = field.split(".")
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[last] = value
    return nested


def validated(model: type[Model], nested: dict[str, Any], flags: Mapping[str, str]) -> Model:
    """Return the pydantic model of these values.

    Raises:
        ConfigError: naming the options that are out of range; `flags` maps fields to them.
    """
    try:
        return model.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(item, flags) for item in error.errors())) from error


def _in_words(problem: ErrorDetails, flags: Mapping[str, str]) -> str:
    """Return a validation problem in terms of options; `flags` maps fields to them."""
    message = with_flags(problem["msg"].removeprefix("Value error, "), flags)
    if not problem["loc"]:
        return message
    field = ".".join(part for part in problem["loc"] if isinstance(part, str))
    if problem["type"] == "missing":
        group = field.rpartition(".")[0]
        others = [f"`{flags.get(f'{group}.{name}', name)}`" for name in problem["input"]]
        return f"{', '.join(others)}: only together with `{flags.get(field, field)}`"
    given = words.as_typed(problem["input"])
    return f"`{flags.get(field, field)}` is {given}: {message[:1].lower()}{message[1:]}"
