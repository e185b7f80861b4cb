"""What a converted model's own files tell of it: how it was made, and how good it was found.

A model that comes from elsewhere has neither file; then nothing is known, and nothing is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.core.config import DEFAULT_HEAD_BITS
from exl2flow.core.stage import NATS, RECORD_FILE, SCORE_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Divergences are nats per token.

    reports: sublayer or head → what `quantize` said of it.
    series: quality preset, and what of the head distinguishes it from others of that preset.
    allocated_kl: what allocation expected of the matrices that it chose for.
    predicted_kl: sum of the costs of all final matrices; before tuning if there was any.
    score: what validation found of these very files, by the fields of `Score`; calibration: the
    same on the text that they were made with.
    """

    reports: Mapping[str, Mapping[str, Any]]
    series: str | None
    allocated_kl: float | None
    predicted_kl: float | None
    is_tuned: bool
    score: Mapping[str, Any] | None
    calibration: Mapping[str, Any] | None


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; of an absent or foreign file nothing."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_record(folder: Path) -> Record | None:
    """Return what is known of a model, None if exl2flow did not write it."""
    record = read_object(folder / RECORD_FILE)
    if not record:
        return None
    found = read_object(folder / SCORE_FILE)
    if found.get("fingerprint") != record.get("fingerprint"):
        found = {}  # of an earlier model in this folder
    allocation = record.get("allocation") or {}
    return Record(
        reports={str(layer.get("name")): layer for layer in record.get("layers") or ()},
        series=_series(record.get("options") or {}),
        allocated_kl=allocation.get("value") if allocation.get("objective") == NATS else None,
        predicted_kl=record.get("predicted_kl"),
        is_tuned=bool(record.get("tuning")),
        score=found.get("score"),
        calibration=found.get("calibration"),
    )


def _series(options: Mapping[str, Any]) -> str | None:
    """Return what conversions share of which only the bits differ."""
    quality = options.get("quality")
    if quality is None:
        return None
    head = options.get("head_bits")
    if options.get("bpw") is None:
        return f"{quality}, head {head or 'free'}"
    return str(quality) if head in (None, DEFAULT_HEAD_BITS) else f"{quality}, head {head}"
