"""The options that set a field of `SamplingSettings`: one row per field that holds one value."""

from dataclasses import Field, fields
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.flows.cli.options.build import Values
from exl2flow.flows.cli.options.setting import Panel, Setting

COMMON = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _row(field: "Field[Any]") -> Setting:
    return Setting(
        flag=f"--{field.name.replace('_', '-')}",
        field=field.name,
        metavar=field.metadata["metavar"],
        help=field.metadata["help"],
        default="off" if field.default is None else None,
        is_rare=field.name not in COMMON,
        model=SamplingSettings,
    )


SAMPLING: Panel = (
    "Sampling",
    tuple(_row(field) for field in fields(SamplingSettings) if field.metadata),
)


def build_sampling(values: Values) -> SamplingSettings:
    """Return the settings that the options of sampling describe.

    Raises:
        ConfigError: naming the option that is out of range.
    """
    try:
        own = {s.field: values[s.field] for s in SAMPLING[1] if s.field in values}
        return SamplingSettings(**own)  # type: ignore[arg-type]  # the options have its types
    except ConfigError as error:
        message = str(error)
        for setting in SAMPLING[1]:
            message = message.replace(f"`{setting.field}`", f"`{setting.flag}`")
        raise ConfigError(message) from error
