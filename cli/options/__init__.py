"""Options of commands, made from the fields that they set."""

from exl2flow.cli.options.build import Values, build, flags, validated, with_options
from exl2flow.cli.options.common import NAMED, AsJson, FlowSwitches, ModelFolder, RunSwitches
from exl2flow.cli.options.named import local, named
from exl2flow.cli.options.setting import Setting, settings_of, words_of

__all__ = [
    "NAMED",
    "AsJson",
    "FlowSwitches",
    "ModelFolder",
    "RunSwitches",
    "Setting",
    "Values",
    "build",
    "flags",
    "local",
    "named",
    "settings_of",
    "validated",
    "with_options",
    "words_of",
]
