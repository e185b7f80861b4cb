"""Options that a run does not read because of others: they are named before any work."""

import logging
from collections.abc import Iterator
from typing import Any

from exl2flow.core.options.config import (
    PRESETS,
    AllocateOptions,
    RunOptions,
)

log = logging.getLogger(__name__)


def tell_ignored(config: RunOptions, device: str) -> None:
    """Log a warning for each option that has no effect.

    Args:
        config: the run.
        device: of the run; not `auto`.
    """
    for text in ignored(config, device):
        log.warning("%s", text)


def ignored(config: RunOptions, device: str) -> list[str]:
    """Return a sentence for each option that is given and has no effect."""
    calibration, kind = config.calibration, config.sensitivity.kind
    rows = [
        (
            config.max_memory is not None and device == "cpu",
            "`--max-memory` limits the memory of a GPU, and this run is on the CPU",
        ),
        (
            _is_given(config, "calibration", "share") and not calibration.special_rows(1),
            "`--calibration-share` is the share of `--calibration chat` or `self`",
        ),
        (
            _is_given(config, "calibration", "seed") and calibration.file is not None,
            "`--seed` draws no rows of a Parquet file",
        ),
        (
            _is_given(config, "sensitivity", "rows") and kind == "error",
            "`--sensitivity-rows` are for gradients, and `--sensitivity error` takes none",
        ),
        (
            config.is_split and not config.writes and not config.writes_sample,
            "`--gpu-split` (`--reserve`, `--devices`) is for a model that writes rows of "
            "`--calibration self` or a sample, and here none does",
        ),
    ]
    found = [text for has_no_effect, text in rows if has_no_effect]
    found += _of_allocation(config)
    return [f"{text}: it has no effect" for text in found]


def has_costs_in_nats(config: RunOptions) -> bool:
    """Return whether costs are in nats whatever the objective; a given measurement decides."""
    return config.sensitivity.kind == "fisher" and config.measurement_file is None


def objective_read(options: AllocateOptions) -> dict[str, object]:
    """Return the objective of costs that are not in nats, with its power if it has one."""
    power = options.power if options.objective == "power" else AllocateOptions().power
    return {"objective": options.objective, "power": power}


def _of_allocation(config: RunOptions) -> Iterator[str]:
    """Yield what the allocation does not read."""
    has_power = _is_given(config, "allocate", "power")
    if has_costs_in_nats(config):
        costs = "is for `--sensitivity error`: costs in nats are summed"
        if _is_given(config, "allocate", "objective"):
            yield f"`--objective` {costs}"
        if has_power:
            yield f"`--objective-power` {costs}"
    elif has_power and config.allocation.objective != "power":
        yield "`--objective-power` is the exponent of `--objective power`"


def _is_given(config: RunOptions, group: str, name: str) -> bool:
    """Return whether an option differs from the preset's value, or from the default."""
    options: Any = getattr(config, group, None)
    if options is None:
        return False
    preset = PRESETS.get(config.quality, {}).get(group, {})
    usual = preset.get(name, type(options).model_fields[name].default)
    return bool(getattr(options, name) != usual)
