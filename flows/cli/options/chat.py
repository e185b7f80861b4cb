"""The options of `exl2flow chat`, in panels, and what they are where they are not given.

An option is what the command line says, else the profile, else the model's
`generation_config.json`, else the default here.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import NO_JSON, ConfigError, CorruptCheckpoint, ReadFailed
from exl2flow.core.options.chat import ChatOptions
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.flows.cli.options.build import Values, validated
from exl2flow.flows.cli.options.generation import GENERATION, build_generation
from exl2flow.flows.cli.options.sampling import SAMPLING, build_sampling
from exl2flow.flows.cli.options.setting import Panel, Setting

ROWS: Mapping[str, Mapping[str, tuple[str, str | None]]] = {
    "Conversation": {
        "format": ("NAME|FILE", "the model's template, else by its vocabulary"),
        "system": ("TEXT", "the format's"),
        "no_system": ("", None),
        "user_name": ("NAME", None),
        "bot_name": ("NAME", None),
        "max_answer": ("N", None),
        "reserve": ("N", None),
        "amnesia": ("", None),
        "keep_thinking": ("", None),
    },
    "What is shown": {
        "thinking": ("show|fold|hide", None),
        "plain": ("", None),
        "stats": ("", None),
    },
}
SAMPLER_ROWS = {"seed": ("N", "a new one every time"), "greedy": ("", None)}
# of `exl2flow generate`
SHARED = (
    "ban",
    "json_schema",
    "regex",
    "grammar",
    "device",
    "gpu_split",
    "devices",
    "cache",
    "max_tokens",
    "rope_scale",
    "rope_alpha",
    "rope_yarn",
    "lora",
    "draft",
    "ngram",
    "draft_tokens",
)
DEFAULTS: Mapping[str, Any] = {"temperature": 0.95, "repetition_penalty": 1.01}
# keys of `generation_config.json` with another name here
OF_MODEL = {"typical_p": "typical"}
LIKE = 0.65  # similarity from which a name may have been meant: `/tokn`, but not `/nonsense`


def _row(field: str, metavar: str, default: str | None) -> Setting:
    text = str(ChatOptions.model_fields[field].description)
    return Setting(
        flag=f"--{field.replace('_', '-')}",
        field=field,
        metavar=metavar,
        help=f"{text[0].upper()}{text[1:]}.",
        default=default,
        model=ChatOptions,
    )


def _panels() -> tuple[Panel, ...]:
    own = [(name, [_row(f, *row) for f, row in rows.items()]) for name, rows in ROWS.items()]
    sampling = [_row(field, *row) for field, row in SAMPLER_ROWS.items()]
    for row in SAMPLING[1]:
        default = DEFAULTS.get(row.field)
        shown = row.default if default is None else str(default)
        sampling.append(dataclasses.replace(row, default=shown))
    shared = [(name, [r for r in rows if r.field in SHARED]) for name, rows in GENERATION]
    panels = [*own, ("Sampling", sampling), *shared]
    return tuple((name, tuple(rows)) for name, rows in panels if rows)


CHAT = _panels()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """All options of a chat, by whom they concern."""

    chat: ChatOptions
    sampling: SamplingSettings
    generation: GenerationOptions


def build_chat(values: Values, model: Path) -> ChatConfig:
    """Return the configuration of a chat with a model.

    Raises:
        ConfigError: naming the option that is out of range.
    """
    own = {f: v for f, v in values.items() if f in ChatOptions.model_fields}
    flags = {s.field: s.flag for _, members in CHAT for s in members}
    shared = {f: v for f, v in values.items() if f in SHARED}
    chat = validated(ChatOptions, own, flags)
    settings = build_sampling({**DEFAULTS, **of_model(model), **values})
    return ChatConfig(
        chat=chat,
        sampling=SamplingSettings.greedy() if chat.greedy else settings,
        generation=build_generation(shared),
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
    known = {field.name for field in dataclasses.fields(SamplingSettings) if field.metadata}
    found = {}
    for key, value in config.items():
        name = OF_MODEL.get(key, key)
        if name not in known or value is None or isinstance(value, bool):
            continue
        try:
            SamplingSettings(**{name: value})
        except ConfigError:
            continue
        found[name] = value
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found


def read_profile(path: Path, name: str) -> dict[str, Any]:
    """Return the options of a profile: a table of a TOML file, with the names of options as keys.

    Raises:
        ConfigError: the file cannot be read, or has no such profile or option.
    """
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the profiles in `{path}`: {words.cause(error)}") from error
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        raise ConfigError(f"`{path}` has no profile `{name}`{nearest(name, profiles)}")
    known = {s.field for _, members in CHAT for s in members}
    values = {key.replace("-", "_"): value for key, value in profile.items()}
    if unknown := [key for key in values if key not in known]:
        raise ConfigError(
            f"profile `{name}` in `{path}` has `{unknown[0]}`, which is no option of a chat"
            + nearest(unknown[0], known)
        )
    return values


def nearest(name: str, names: Collection[str]) -> str:
    """Return which of the names may have been meant, else all, as the end of a message."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=LIKE)
    found = ", ".join(f"`{each}`" for each in near or sorted(names))
    return f"; {'near' if near else 'there'} are {found}" if found else ""


def remembered(path: Path, model: Path) -> str | None:
    """Return the name of the profile that a model was last used with, if it was to be kept."""
    profile = _all_remembered(path).get(str(model.resolve()))
    return profile if isinstance(profile, str) else None


def remember(path: Path, model: Path, profile: str) -> None:
    """Keep the name of a profile for a model."""
    from exl2flow.core.store.files import write_json  # which imports torch

    write_json(path, {**_all_remembered(path), str(model.resolve()): profile})


def _all_remembered(path: Path) -> dict[str, Any]:
    """Return the names of profiles by the folders of models.

    The first line of a chat waits for this, so it does without `core.files`, which imports torch.

    Raises:
        ConfigError: the file holds something else.
        CorruptCheckpoint: it is not JSON.
        ReadFailed: it cannot be read.
    """
    try:
        kept = json.loads(path.read_bytes()) if path.is_file() else {}
    except OSError as error:
        raise ReadFailed(
            f"cannot read `{path}`: {words.cause(error)}; check the disk, the network share and "
            "the permissions, then repeat the command"
        ) from error
    except NO_JSON as error:
        raise CorruptCheckpoint(
            f"cannot read `{path}`: {words.cause(error)}; delete it and repeat"
        ) from error
    if not isinstance(kept, dict):
        raise ConfigError(f"`{path}` holds no JSON object; delete it, and use `--remember` again")
    return kept
