"""The files' own words on a model's GPTQ matrices; the data may say otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from exl2flow.model.config.fields import Fields

QUANTIZE_FILE = "quantize_config.json"  # where AutoGPTQ wrote it first


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLabel:
    """The entries of a quantization block that say how to read GPTQ tensors; None: not said.

    checkpoint_format: how zeros are stored. is_symmetric: every zero is half the range of codes.
    is_act_ordered: in-features have groups of their own, in `g_idx`.
    """

    checkpoint_format: str | None = None
    is_symmetric: bool | None = None
    is_act_ordered: bool | None = None

    @classmethod
    def of(cls, declared: Mapping[str, object]) -> Self:
        """Read a quantization block; with `dynamic`, single matrices may be other than it says."""
        stored_as = declared.get("checkpoint_format")
        is_for_all = not declared.get("dynamic")
        symmetric, act_ordered = (
            value if is_for_all and isinstance(value := declared.get(key), bool) else None
            for key in ("sym", "desc_act")
        )
        return cls(
            checkpoint_format=str(stored_as) if stored_as else None,
            is_symmetric=symmetric,
            is_act_ordered=act_ordered,
        )


UNLABELLED = GptqLabel()


def declared_quantization(folder: Path, *configs: Mapping[str, object]) -> Mapping[str, object]:
    """Return the quantization block of the first config that has one, else that of its own file.

    Raises:
        SourceModelError: that file is damaged.
    """
    for config in configs:
        block = config.get("quantization_config")
        if isinstance(block, Mapping):
            return block
    path = folder / QUANTIZE_FILE
    return Fields.load(path).values if path.is_file() else {}
