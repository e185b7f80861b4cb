"""Options that set a field of a configuration: a table, and how commands take them from it."""

from exl2flow.flows.cli.options.build import (
    Values,
    build,
    build_measurement,
    build_refinement,
    build_sweep,
    build_validation,
    flags,
    validated,
    with_settings,
)
from exl2flow.flows.cli.options.common import AsJson, DryRun, NoPrefect, Restart, Source
from exl2flow.flows.cli.options.setting import Panel, Setting, one_of

__all__ = [
    "AsJson",
    "DryRun",
    "NoPrefect",
    "Panel",
    "Restart",
    "Setting",
    "Source",
    "Values",
    "build",
    "build_measurement",
    "build_refinement",
    "build_sweep",
    "build_validation",
    "flags",
    "one_of",
    "validated",
    "with_settings",
]
