"""The options of `exl2flow chat`, in panels, and what they are where they are not given.

An option is what the command line says, else the profile, else the model's
`generation_config.json`, else the default here.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exl2flow.cli.options.build import Values, build
from exl2flow.cli.options.layers import options_in, read_toml
from exl2flow.cli.options.setting import PANELS, Setting, settings_of
from exl2flow.core import words
from exl2flow.core.errors import NO_JSON, ConfigError, CorruptCheckpoint, ReadFailed
from exl2flow.core.options.chat import PROFILES, ChatOptions
from exl2flow.core.options.generation import ModelOptions
from exl2flow.core.options.sampling import SamplingSettings

# of `exl2flow generate`; a chat reserves tokens, not memory
SHARED = ModelOptions.model_fields.keys() - ChatOptions.model_fields.keys()
SAMPLER = tuple(setting.field for setting in settings_of(SamplingSettings))
DEFAULTS: Mapping[str, Any] = {"temperature": 0.95, "repetition_penalty": 1.01}
# keys of `generation_config.json` with another name here
OF_MODEL = {"typical_p": "typical"}
REMEMBERED = "chat.json"  # names of profiles by the folders of models


def _settings() -> Iterator[Setting]:
    yield from settings_of(ChatOptions)
    for setting in settings_of(SamplingSettings):
        default = str(DEFAULTS.get(setting.field, setting.default or ""))
        yield dataclasses.replace(setting, default=default or None)
    yield from (setting for setting in settings_of(ModelOptions) if setting.field in SHARED)


CHAT = tuple(sorted(_settings(), key=lambda setting: PANELS.index(setting.panel)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """All options of a chat, by whom they concern."""

    chat: ChatOptions
    sampling: SamplingSettings
    generation: ModelOptions


def build_chat(values: Values, model: Path) -> ChatConfig:
    """Return the configuration of a chat with a model.

    Raises:
        ConfigError: naming the option that is out of range.
    """
    of_chat, of_sampler, of_generation = (
        {field: value for field, value in values.items() if field in fields}
        for fields in (ChatOptions.model_fields, SAMPLER, SHARED)
    )
    chat = build(ChatOptions, of_chat)
    settings = build(SamplingSettings, {**DEFAULTS, **of_model(model), **of_sampler})
    return ChatConfig(
        chat=chat,
        sampling=SamplingSettings.greedy() if chat.greedy else settings,
        generation=build(ModelOptions, of_generation),
    )


def of_model(model: Path) -> dict[str, Any]:
    """Return the settings that a model's `generation_config.json` recommends, those in range.

    `do_sample: false` is temperature 0.
    """
    try:
        config = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    except NO_JSON:
        return {}
    if not isinstance(config, dict):
        return {}
    settings = {}
    for key, value in config.items():
        name = OF_MODEL.get(key, key)
        if name not in SAMPLER or value is None or isinstance(value, bool):
            continue
        try:
            SamplingSettings(**{name: value})
        except ConfigError:
            continue
        settings[name] = value
    return {**settings, "temperature": 0.0} if config.get("do_sample") is False else settings


def read_profile(path: Path, name: str) -> dict[str, Any]:
    """Return the options of a profile: a table of a TOML file, with the names of options as keys.

    Raises:
        ConfigError: the file cannot be read, or has no such profile or option.
    """
    profiles = read_toml(path, "the profiles")
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        raise ConfigError(f"`{path}` has no profile `{name}`{words.nearest(name, profiles)}")
    known = {setting.field for setting in CHAT}
    return options_in(profile, known, f"profile `{name}` in `{path}`", of="a chat")


def home(variable: str, default: str) -> Path:
    """Return our folder of a kind, by the XDG rules."""
    return Path(os.environ.get(variable) or Path.home() / default) / "exl2flow"


def profile_of(key: str, name: str | None, *, remember: bool) -> tuple[dict[str, Any], str]:
    """Return the options of a profile, or of the one remembered for the model, and its origin.

    Args:
        key: the model's folder, or its name on the Hub.
        name: of the profile; None: the one remembered.
        remember: whether to remember this one.

    Raises:
        ConfigError: no such profile, or it has no such option; or a file is damaged.
        CorruptCheckpoint, ReadFailed: the names that are remembered cannot be read.
    """
    folder = home("XDG_CONFIG_HOME", ".config")
    used = _all_remembered(folder / REMEMBERED).get(key) if name is None else name
    values = read_profile(folder / PROFILES, used) if isinstance(used, str) else {}
    if remember and name is not None:
        from exl2flow.core.store.files import write_json  # imports torch

        write_json(folder / REMEMBERED, {**_all_remembered(folder / REMEMBERED), key: name})
    return values, f"profile `{used}` in `{folder / PROFILES}`"


def _all_remembered(path: Path) -> dict[str, Any]:
    """Return the names of profiles by the folders of models; see `profile_of`.

    The first line of a chat waits for this, so it does without `core.files`, which imports torch.
    """
    try:
        profiles = json.loads(path.read_bytes()) if path.is_file() else {}
    except OSError as error:
        remedy = "check the disk, the network share and the permissions, then repeat the command"
        raise ReadFailed(f"cannot read `{path}`: {words.cause(error)}; {remedy}") from error
    except NO_JSON as error:
        why = f"cannot read `{path}`: {words.cause(error)}"
        raise CorruptCheckpoint(f"{why}; delete it and repeat") from error
    if not isinstance(profiles, dict):
        raise ConfigError(f"`{path}` holds no JSON object; delete it, and use `--remember` again")
    return profiles
