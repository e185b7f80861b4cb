"""Options of commands, made from the fields that they set."""

from exl2flow.flows.cli.options.build import Values, build, flags, validated, with_options
from exl2flow.flows.cli.options.common import AsJson, DryRun, NoPrefect, Restart
from exl2flow.flows.cli.options.setting import Setting, settings_of

__all__ = [
    "AsJson",
    "DryRun",
    "NoPrefect",
    "Restart",
    "Setting",
    "Values",
    "build",
    "flags",
    "settings_of",
    "validated",
    "with_options",
]
