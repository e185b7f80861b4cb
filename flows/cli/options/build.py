"""Turns rows of the table into a command's parameters, and what was given into a configuration."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig, ValidateOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows.cli.options.common import RUNNING
from exl2flow.flows.cli.options.rare import help_all
from exl2flow.flows.cli.options.setting import Panel
from exl2flow.flows.cli.options.table import CONVERSION, EVALUATION, SWEEP

Model = TypeVar("Model", bound=BaseModel)
Values = Mapping[str, object]  # dotted field → value, of the options that are given


def with_settings(*panels: Panel) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `values` with the options of these panels.

    The command receives `Values`, for `build` and the like. If some of the options are rare, the
    command also gets `--help-all`.
    """
    settings = [(panel, setting) for panel, members in panels for setting in members]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "values"]
        last = [p for p in own if _panel(p) == RUNNING]  # how it runs, after what it makes
        first = [p for p in own if p not in last]
        added = [setting.parameter(panel) for panel, setting in settings]
        rare = [help_all()] if any(setting.is_rare for _, setting in settings) else []

        @wraps(command)
        def wrapper(**given: Any) -> None:
            given.pop("help_all", None)
            values = {setting.field: given.pop(setting.name) for _, setting in settings}
            command(values={k: v for k, v in values.items() if v is not None}, **given)

        wrapper.__signature__ = signature.replace(parameters=[*first, *rare, *added, *last])  # type: ignore[attr-defined]  # read by typer
        return wrapper

    return decorate


def _panel(parameter: inspect.Parameter) -> str | None:
    """Return the help panel that a command's own parameter names."""
    [info] = getattr(parameter.annotation, "__metadata__", [None])
    return getattr(info, "rich_help_panel", None)


def build(source: Path, out: Path, values: Values) -> ConversionConfig:
    """Return the configuration that the options of a conversion describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    nested = _nested({"source": source, "out": out, **values})
    return validated(ConversionConfig, nested, flags(fit="--fit"))


def build_measurement(source: Path, out: Path, values: Values) -> MeasureConfig:
    """Return the configuration that the options of a measurement describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    return validated(MeasureConfig, _nested({"source": source, "out": out, **values}), flags())


def build_refinement(model: Path, reference: Path, out: Path, values: Values) -> RefinementConfig:
    """Return the configuration that the options of a refinement describe.

    Raises:
        ConfigError: naming the options that are out of range.
    """
    nested = _nested({"model": model, "source": reference, "out": out, **values})
    return validated(RefinementConfig, nested, flags(source="--reference"))


def flags(**more: str) -> dict[str, str]:
    """Return field → option of a conversion, for messages."""
    found = {s.field: s.flag for _, members in CONVERSION for s in members}
    return {**found, "out": "--out", **more}


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
