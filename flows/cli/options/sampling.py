"""The options that set a field of `SamplingSettings`: one row per field."""

from exl2flow.core.errors import ConfigError
from exl2flow.core.sampling import SamplingSettings
from exl2flow.flows.cli.options.build import Values
from exl2flow.flows.cli.options.setting import Panel, Setting


def _row(field: str, metavar: str, help: str) -> Setting:
    flag = f"--{field.replace('_', '-')}"
    return Setting(flag=flag, field=field, metavar=metavar, help=help, model=SamplingSettings)


SAMPLING: Panel = (
    "Sampling",
    (
        _row("temperature", "T", "Divide logits by T; below 0.01: always the likeliest token."),
        _row("top_k", "K", "Draw from the K likeliest tokens; 0: from all."),
        _row(
            "top_p", "P", "Draw from the fewest tokens whose probabilities sum to P; 0 or 1: off."
        ),
        _row("min_p", "P", "Drop tokens less likely than P times the likeliest; 0: off."),
    ),
)


def build_sampling(values: Values) -> SamplingSettings:
    """Return the settings that the options of sampling describe.

    Raises:
        ConfigError: naming the option that is out of range.
    """
    try:
        return SamplingSettings(**values)  # type: ignore[arg-type]  # the options have its types
    except ConfigError as error:
        message = str(error)
        for setting in SAMPLING[1]:
            message = message.replace(f"`{setting.field}`", f"`{setting.flag}`")
        raise ConfigError(message) from error
