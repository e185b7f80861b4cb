"""A converted model's record and score, read from its folder.

Models from elsewhere have neither file; nothing is known about them, and nothing is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.core.config import DEFAULT_HEAD_BITS
from exl2flow.core.stage import RECORD_FILE, SCORE_FILE

NATS = "nats"  # the allocation objective whose value is a divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Divergences are nats per token.

    reports: sublayer or head → its report by `quantize`.
    series: quality preset, plus the head's bits where they differ from the preset's default.
    allocated_kl: what allocation expected for the matrices whose bits it chose.
    predicted_kl: sum of the costs of all final matrices, before any tuning.
    score: validation's fields of `Score` for these very files; calibration: the same for the
    calibration text.
    """

    reports: Mapping[str, Mapping[str, Any]]
    series: str | None
    allocated_kl: float | None
    predicted_kl: float | None
    is_tuned: bool
    score: Mapping[str, Any] | None
    calibration: Mapping[str, Any] | None


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one if the file is missing or foreign."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_record(folder: Path) -> Record | None:
    """Return the record of a model, None if exl2flow did not write it."""
    record = read_object(folder / RECORD_FILE)
    if not record:
        return None
    found = read_object(folder / SCORE_FILE)
    if found.get("fingerprint") != record.get("fingerprint"):
        found = {}  # belongs to an earlier model in this folder
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
    """Return what conversions that differ in nothing but their bits have in common."""
    quality = options.get("quality")
    if quality is None:
        return None
    head = options.get("head_bits")
    if options.get("bpw") is None:
        return f"{quality}, head {head or 'free'}"
    return str(quality) if head in (None, DEFAULT_HEAD_BITS) else f"{quality}, head {head}"
