"""The options that a record states: all that the fingerprint of `compile` and its inputs covers.

Others may differ between two runs of which the second finds everything finished: its options would
not be those of the record.
"""

from collections.abc import Container, Iterator
from typing import Any

from exl2flow.core.options.config import (
    PRESETS,
    ConversionConfig,
    RunOptions,
    SensitivityOptions,
)
from exl2flow.quant.allocate.stage import ALLOCATE

NOT_RECORDED = {  # places, what changes no file, and what other files record
    "out",
    "work_root",
    "token_block",
    "publish",
    "clean_after",
    "device",
    "gpus",
    "gpu_split",
    "reserve",
    "devices",
    "max_memory",
    "measurement",
    "lossy_source",
    "validate_options",
}


def recorded_options(config: RunOptions, *, without: Container[str] = ()) -> dict[str, Any]:
    """Return the options that decided the files of a run.

    Args:
        config: the run.
        without: further fields to leave out.
    """
    options = config.model_dump(mode="json", exclude=NOT_RECORDED)
    for group, name in _unused(config):
        options[group].pop(name, None)
    if config.calibration.file is not None:
        options["calibration"]["text"] = config.calibration.dataset
    return {name: value for name, value in options.items() if name not in without}


def recorded_conversion(config: ConversionConfig, *, has_block: bool = False) -> dict[str, Any]:
    """Return the options that decided the files of a conversion; `has_block`: its source has one.

    That is a block that drafts tokens (MTP).
    """
    options = recorded_options(config, without=() if has_block else {"mtp"})
    if has_block and config.mtp.block != "quantize":
        options["mtp"] = {"block": config.mtp.block}
    options["head_bits"] = config.fixed_head_bits
    options["allocate"].update(ALLOCATE.options(config)["allocate"])
    if not config.tune.steps:
        options["tune"] = {"steps": options["tune"]["steps"]}
    return options


def _unused(config: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield (group, option) of the options that another one switches off."""
    if not config.calibration.special_rows(1):
        yield "calibration", "share"
    if config.calibration.file is not None:
        yield "calibration", "seed"
    if not config.rounding.block_steps:
        yield "rounding", "block_rate"
    if config.sensitivity.kind == "error":
        yield from (
            ("sensitivity", name) for name in SensitivityOptions.model_fields if name != "kind"
        )


def name_of_text(config: RunOptions) -> dict[str, str]:
    """Return an entry for `compile`'s fingerprint: a file's name; others cover contents only."""
    return {} if config.calibration.file is None else {"dataset": config.calibration.dataset}


def name_of_preset(config: RunOptions) -> dict[str, str]:
    """Return an entry for `compile`'s fingerprint: a preset whose values are rather another's.

    Others cover the values only, from which the name follows in all other cases.
    """
    nearest = min(PRESETS, key=lambda name: _differing(config, name))
    return {} if config.quality == nearest else {"quality": config.quality}


def _differing(config: RunOptions, preset: str) -> int:
    """Return how many of the options that presets set differ from one of them."""
    options = {(g, name) for groups in PRESETS.values() for g in groups for name in groups[g]}
    count = 0
    for group, name in options:
        values = getattr(config, group, None)
        if values is not None:
            default = type(values).model_fields[name].default
            count += getattr(values, name) != PRESETS[preset].get(group, {}).get(name, default)
    return count
