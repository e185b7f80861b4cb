"""Published models, their configs and parameter counts: `published.toml` explains and has them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.model.config.families import FAMILIES

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model.

    count: exact, or as published, such as "7.6B". tower: its part outside the text model.
    has_embedding: False: the count leaves out embedding and head.
    """

    config: dict[str, Any]
    count: int | str
    tower: int
    has_embedding: bool


def _published(architecture: str, row: dict[str, Any], shared: dict[str, Any]) -> Published:
    (count,) = row.pop("count").values()
    tower, has_embedding = row.pop("tower", 0), row.pop("has_embedding", True)
    is_wrapper, groups = row.pop("wraps", False), row.pop("shared", ())
    config: dict[str, Any] = {}
    if sizes := row.pop("sizes", None):
        config = dict(zip(SIZES, sizes, strict=True)) | {"max_position_embeddings": 4096}
    for values in (*(shared[group] for group in groups), row):
        config |= values
        config |= dict.fromkeys(config.pop("null", ()))
    for key, values in config.pop("repeated", {}).items():
        config[key] = values * (config["num_hidden_layers"] // len(values))
    if is_wrapper:
        config = {"text_config": config, "vision_config": {}}
    return Published(
        config=config | {"architectures": [architecture]},
        count=count,
        tower=tower,
        has_embedding=has_embedding,
    )


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_SHARED = _TABLES.pop("shared")
PUBLISHED = {
    name: _published(architecture, row, _SHARED)
    for architecture, rows in _TABLES.items()
    for name, row in rows.items()
}


def row_of(name: str) -> tuple[str, str | None]:
    """Return the key of a model's row in the table of families."""
    config = PUBLISHED[name].config
    (architecture,) = config["architectures"]
    kind = config.get("text_config", {}).get("model_type")
    flat = {row.architecture: row.text_type for row in FAMILIES.values() if row.is_flat_too}
    return architecture, kind or flat.get(architecture)
