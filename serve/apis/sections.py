"""Tables of the configuration: settings of the sampler, and names for the model."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.model_name import name_of
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.options.serving import ServeOptions
from exl2flow.serve.answers.fields import NAMES, Body

SAMPLER = tuple(each.name for each in fields(SamplingSettings))
OFF = -1  # of fields that others switch off so
OF_REQUESTS = {"cfg_scale"}  # goes with a second prompt


def sampler_of(body: Body) -> dict[str, Any]:
    """Return the sampler's settings that a body has.

    Raises:
        ConfigError: `mirostat` is the first version.
    """
    given = {name: v for name in SAMPLER if (v := getattr(body, name, None)) is not None}
    for name in ("top_k", "dry_range"):
        if given.get(name) == OFF:
            given[name] = 0
    if "mirostat" in given:
        if given["mirostat"] not in (0, 2):
            raise ConfigError(f"`mirostat` is {given['mirostat']}; it must be 0 or 2")
        given["mirostat"] = bool(given["mirostat"])
    return given


def checked(options: ServeOptions, path: Path | None) -> ServeOptions:
    """Return options whose tables have our names and kinds of values.

    Raises:
        ConfigError: naming the table in `path` and the key.
    """
    update = {
        name: _settings(getattr(options, name), f"[{name}] in `{path}`")
        for name in ("defaults", "forced")
    }
    if "temperature" in update["forced"]:  # nor a dynamic one instead
        update["forced"] = {"min_temp": 0.0, "max_temp": 0.0, **update["forced"]}
    names = names_of(options)
    for alias, target in options.aliases.items():
        if target not in names:
            why = f"`{alias}` for `{target}`, which is not a model{words.nearest(target, names)}"
            raise ConfigError(f"[aliases] in `{path}` has {why}")
    return options.model_copy(update=update)


def names_of(options: ServeOptions) -> list[str]:
    """Return the names of the model, alone and with each adapter, of `also` and of `models`."""
    name = "" if options.model is None else name_of(options.model)
    others = [] if options.models is None else options.models.glob("*/config.json")
    adapters = (f"{name}:{folder.name}" for folder in options.lora)
    return [
        name,
        *adapters,
        *map(name_of, options.also),
        *(config.parent.name for config in others),
    ]


def _settings(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {name for name in Body.model_fields if name in SAMPLER} - OF_REQUESTS
    known |= {alias for alias, field in NAMES.items() if field in known}
    for key in table:
        if key not in known:
            why = f"`{key}`, which is not a setting of the sampler{words.nearest(key, known)}"
            raise ConfigError(f"{where} has {why}")
    try:
        given = sampler_of(Body.model_validate(table))
        SamplingSettings(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        key = "".join(f"`{part}`: " for part in problem["loc"])
        raise ConfigError(f"{where}: {key}{problem['msg']}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return given
