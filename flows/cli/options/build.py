"""How rows of the table in `settings.py` become a command's parameters and a configuration."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from exl2flow.core.config import ConversionConfig, ValidateOptions
from exl2flow.core.errors import ConfigError
from exl2flow.core.sweep import SweepConfig
from exl2flow.flows.cli.setting import Panel
from exl2flow.flows.cli.settings import CONVERSION, EVALUATION, SWEEP

Model = TypeVar("Model", bound=BaseModel)
Values = Mapping[str, object]  # dotted field → value, of the options that are given

Source = Annotated[
    Path,
    typer.Argument(
        help="Folder of a Hugging Face model: config.json, tokenizer.json or tokenizer.model, "
        "*.safetensors in fp16, bf16 or fp32. Or org/name, org/name@revision: a model on the "
        "Hugging Face Hub, which is fetched.",
        metavar="SOURCE",
        show_default=False,
    ),
]


def with_settings(*panels: Panel) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `values` by the options of these panels.

    The command receives `Values`, for `build` or `build_validation`.
    """
    settings = [(panel, setting) for panel, members in panels for setting in members]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "values"]
        added = [setting.parameter(panel) for panel, setting in settings]

        @wraps(command)
        def wrapper(**given: Any) -> None:
            values = {setting.field: given.pop(setting.name) for _, setting in settings}
            command(values={k: v for k, v in values.items() if v is not None}, **given)

        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]  # read by typer
        return wrapper

    return decorate


def build(source: Path, out: Path, values: Values) -> ConversionConfig:
    """Return the configuration that the options of a conversion describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    flags = {s.field: s.flag for _, members in CONVERSION for s in members}
    flags |= {"out": "--out", "fit": "--fit"}
    nested = _nested({"source": source, "out": out, **values})
    return validated(ConversionConfig, nested, flags)


def build_sweep(source: Path, out: Path, values: Values) -> SweepConfig:
    """Return the configuration that the options of a sweep describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    flags = {s.field: s.flag for _, members in SWEEP for s in members}
    flags |= {name: f"--{name}" for name in ("out", "bpw", "runner", "workers", "cluster")}
    return validated(SweepConfig, _nested({"source": source, "out": out, **values}), flags)


def build_validation(values: Values) -> ValidateOptions:
    """Return the options of `exl2flow validate`.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    flags = {s.field.rpartition(".")[2]: s.flag for s in EVALUATION[1]}
    return validated(ValidateOptions, _nested(values).get("validate_options", {}), flags)


def _nested(values: Values) -> dict[str, Any]:
    """Turn dotted names into groups."""
    nested: dict[str, Any] = {}
    for field, value in values.items():
        *groups, last = field.split(".")
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[last] = value
    return nested


def validated(model: type[Model], nested: dict[str, Any], flags: Mapping[str, str]) -> Model:
    """Return the model of these values.

    Raises:
        ConfigError: naming the options that are out of range; `flags` maps fields to them.
    """
    try:
        return model.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(item, flags) for item in error.errors())) from error


def _in_words(problem: ErrorDetails, flags: Mapping[str, str]) -> str:
    """Return a validation problem in terms of options; `flags` maps fields to them."""
    message = problem["msg"].removeprefix("Value error, ")
    for field, flag in flags.items():
        message = message.replace(f"`{field}`", f"`{flag}`")
    if not problem["loc"]:
        return message
    field = ".".join(part for part in problem["loc"] if isinstance(part, str))
    if problem["type"] == "missing":
        group = field.rpartition(".")[0]
        others = [f"`{flags.get(f'{group}.{name}', name)}`" for name in problem["input"]]
        return f"{', '.join(others)}: only together with `{flags.get(field, field)}`"
    return f"`{flags.get(field, field)}` is {problem['input']}: {message[:1].lower()}{message[1:]}"
