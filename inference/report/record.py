"""A converted model's record and score, read from its folder.

Models from elsewhere have neither file; nothing is known about them, and nothing is refused.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from exl2flow.core.options.config import DEFAULT_HEAD_BITS
from exl2flow.core.reports import (
    AllocationReport,
    CalibrationReport,
    CarriedReport,
    ExpertsReport,
    Json,
    SublayerReport,
    mapping,
    number,
    sublayer_reports,
)
from exl2flow.core.store.stage import NATS, RECORD_FILE, SCORE_FILE
from exl2flow.model.config.fields import json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Divergences are nats per token.

    content: the file, for what is published or listed as it is.
    series: quality preset, plus the head's bits, the preference and the choice for experts where
    they differ from the preset's default.
    predicted_kl: sum of the costs of all final matrices, before any tuning.
    block: reports on its own block that drafts tokens (MTP), if that is quantized; block_bpw: its
    bits per weight.
    score: validation's fields of `Score` for these very files; calibration: the same for the
    calibration text.
    """

    content: Json
    layers: tuple[SublayerReport, ...]
    series: str | None
    allocation: AllocationReport
    predicted_kl: float | None
    is_tuned: bool
    calibrated_on: CalibrationReport | None = None
    not_quantized: CarriedReport | None = None
    experts: ExpertsReport = field(default_factory=ExpertsReport)
    block: tuple[SublayerReport, ...] = ()
    block_bpw: float | None = None
    score: Json | None = None
    calibration: Json | None = None

    @classmethod
    def from_json(cls, content: Json, scores: Json | None = None) -> Self:
        """Read a record and the scores beside it, which may be of an earlier model there."""
        if scores is None or scores.get("fingerprint") != content.get("fingerprint"):
            scores = {}
        experts, block = mapping(content.get("experts")), mapping(content.get("mtp"))
        return cls(
            content=content,
            layers=sublayer_reports(content.get("layers")),
            series=_series(mapping(content.get("options")), has_experts=bool(experts)),
            allocation=AllocationReport.from_json(mapping(content.get("allocation"))),
            predicted_kl=number(content.get("predicted_kl")),
            is_tuned=bool(content.get("tuning")),
            calibrated_on=CalibrationReport.from_json(content.get("calibration")),
            not_quantized=CarriedReport.from_json(content.get("not_quantized")),
            experts=ExpertsReport.from_json(experts),
            block=sublayer_reports(block.get("layers")),
            block_bpw=number(block.get("bpw")),
            score=_score(mapping(scores.get("score"))),
            calibration=_score(mapping(scores.get("calibration"))),
        )

    @property
    def allocated_kl(self) -> float | None:
        """The expectation of allocation for the matrices whose bits it chose."""
        return self.allocation.value if self.allocation.objective == NATS else None


def read_object(path: Path) -> Json:
    """Return a JSON object, an empty one if the file is missing or foreign."""
    try:
        return json_object(path.read_bytes(), errors="replace")
    except (OSError, ValueError):
        return {}


def read_record(folder: Path) -> Record | None:
    """Return the record of a model, None if exl2flow did not write it."""
    content = read_object(folder / RECORD_FILE)
    return Record.from_json(content, read_object(folder / SCORE_FILE)) if content else None


def _score(fields: Json) -> Json | None:
    """Return the fields of a score, without counts and divergences that are no numbers."""
    numbers = ("tokens", "kl_divergence")
    return {k: v for k, v in fields.items() if k not in numbers or number(v) is not None} or None


def _series(options: Json, *, has_experts: bool) -> str | None:
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
