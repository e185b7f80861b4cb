"""A converted model's record and score, read from its folder.

Models from elsewhere have neither file; nothing is known about them, and nothing is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl2flow.core.options.config import DEFAULT_HEAD_BITS
from exl2flow.core.store.stage import NATS, RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.blocks import block_name, by_block, is_group
from exl2flow.inference.scoring.intervals import json_number
from exl2flow.model.config.fields import json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Divergences are nats per token.

    reports: sublayer, experts of a layer, or head → its report by `quantize`.
    blocks: matrix → the experts that it belongs to; matrices: its report. Only matrices of experts
    and of parallel blocks are listed, whose names do not tell.
    experts: tokens of experts by layer, empty if there are none.
    series: quality preset, plus the head's bits, the preference and the choice for experts where
    they differ from the preset's default.
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
    blocks: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one if the file is missing or foreign."""
    try:
        return json_object(path.read_bytes(), errors="replace")
    except (OSError, ValueError):
        return {}


def mapping(value: object) -> dict[str, Any]:
    """Return an object of a foreign JSON file; nothing if it is something else."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """Return a finite number of a foreign JSON file; None if it is something else."""
    known = json_number(value)
    return known if known is not None and abs(known) < 2**63 else None


def read_record(folder: Path) -> Record | None:
    """Return the record of a model, None if exl2flow did not write it."""
    record = read_object(folder / RECORD_FILE)
    if not record:
        return None
    scores = read_object(folder / SCORE_FILE)
    if scores.get("fingerprint") != record.get("fingerprint"):
        scores = {}  # of an earlier model in this folder
    allocation, layers = mapping(record.get("allocation")), record.get("layers")
    known = [
        _report(layer)
        for layer in (layers if isinstance(layers, list) else ())
        if "name" in mapping(layer)
    ]
    keyed = [(layer, item) for layer in known for item in _entries(layer) if item.get("key")]
    return Record(
        reports={str(block["name"]): block for block in by_block(known)},
        blocks={item["key"]: block_name(layer) for layer, item in keyed if is_group(layer)},
        matrices={item["key"]: item for _, item in keyed},
        experts=mapping(record.get("experts")),
        series=_series(
            mapping(record.get("options")), has_experts=bool(mapping(record.get("experts")))
        ),
        allocated_kl=number(allocation.get("value"))
        if allocation.get("objective") == NATS
        else None,
        predicted_kl=number(record.get("predicted_kl")),
        is_tuned=bool(record.get("tuning")),
        score=_score(mapping(scores.get("score"))),
        calibration=_score(mapping(scores.get("calibration"))),
    )


def _score(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a score, without counts and divergences that are no numbers."""
    numbers = ("tokens", "kl_divergence")
    return {k: v for k, v in fields.items() if k not in numbers or number(v) is not None} or None


def _report(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantize`'s report on a sublayer, without fields of an unexpected type."""
    known = dict(layer)
    if "projections" in layer:
        items = mapping(layer["projections"]).items()
        known["projections"] = {name: _numbers(mapping(entry)) for name, entry in items}
    return _numbers(known)


def _entries(layer: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the reports on a sublayer's matrices."""
    entries: Mapping[str, Mapping[str, Any]] = layer.get("projections", {})
    return entries.values()


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    texts, numbers = ("params", "key"), ("nats", "rel_err", "bpw", "bits")
    known = {k: v for k, v in values.items() if k not in texts or isinstance(v, str)}
    return {k: number(v) if k in numbers else v for k, v in known.items()}


def _series(options: Mapping[str, Any], *, has_experts: bool) -> str | None:
    """Return the options that conversions of one series share: all but their bits.

    Without experts it does not matter how their bits were to be chosen.
    """
    quality = options.get("quality")
    if quality is None:
        return None
    parts, head = [str(quality)], options.get("head_bits")
    if options.get("bpw") is None:
        parts.append(f"head {head or 'free'}")
    elif head not in (None, DEFAULT_HEAD_BITS):
        parts.append(f"head {head}")
    allocate = mapping(options.get("allocate"))
    if allocate.get("prefer") == "speed":
        parts.append("speed")
    if has_experts and allocate.get("experts") == "layer":
        parts.append("experts alike")
    return ", ".join(parts)
