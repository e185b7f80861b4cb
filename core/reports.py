"""Scores, and reports on quantized matrices and whole models, as stages write and people read them.

Readers are tolerant: what a file of another version lacks, or has in another form, is unknown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from exl2flow.core.errors import CorruptCheckpoint

Json = dict[str, Any]  # an object of a JSON file
Interval = tuple[float, float]
REFINED = ("start", "losses", "before")  # entries that `refine` adds to those of a matrix


def mapping(value: object) -> Json:
    """Return an object of a foreign JSON file; nothing if it is something else."""
    return value if isinstance(value, dict) else {}


def json_number(value: object) -> float | None:
    """Return a number from a JSON file, including infinity; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < 2**63 else None


def number(value: object) -> float | None:
    """Return a finite number of a foreign JSON file; None if it is something else."""
    known = json_number(value)
    return known if known is not None and abs(known) < 2**63 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """Sums over the positions of each row of a text; the last two are None without a reference.

    losses: -ln p(next); divergences: nats; agreements: positions with the same first token.
    """

    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    divergences: tuple[float, ...] | None
    agreements: tuple[int, ...] | None

    @classmethod
    def of(cls, value: object) -> Self | None:
        """Read sums from a file; None for anything else."""
        if not isinstance(value, Mapping):
            return None
        sums = {field.name: _numbers(value.get(field.name)) for field in fields(cls)}
        tokens, losses = sums["tokens"], sums["losses"]
        lengths = {len(numbers) for numbers in sums.values() if numbers is not None}
        if not tokens or losses is None or len(lengths) > 1 or min(tokens) <= 0:
            return None
        return cls(**sums)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals of the figures of a score, or of their differences; None where not known."""

    perplexity: Interval | None
    kl_divergence: Interval | None
    top1_agreement: Interval | None

    @classmethod
    def of(cls, value: object) -> Self | None:
        """Read intervals from a file; None for anything else."""
        if not isinstance(value, Mapping):
            return None
        return cls(**{field.name: _pair(value.get(field.name)) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model's results on the rows; the divergence fields are None without a reference.

    text: SHA-256 of the scored ids, rows: sums of each row; both None in files of older versions.
    intervals: at 95 %, None if there are too few rows.
    """

    model: str
    perplexity: float
    reference_perplexity: float | None
    kl_divergence: float | None
    kl_median: float | None
    kl_p99: float | None
    top1_agreement: float | None
    tokens: int
    bytes: int
    text: str | None = None
    rows: RowSums | None = None
    intervals: Intervals | None = None

    @classmethod
    def of(cls, model: str, values: Mapping[str, object]) -> Self | None:
        """Read a score from a file of any version; None if it lacks perplexity or sizes.

        Unknown fields are ignored; missing ones are None.
        """
        names = [
            name for name in cls.__slots__ if name not in ("model", "text", "rows", "intervals")
        ]
        numbers: Json = {name: json_number(values.get(name)) for name in names}
        counts = numbers["tokens"], numbers["bytes"]
        if numbers["perplexity"] is None or not all(isinstance(count, int) for count in counts):
            return None
        text = values.get("text")
        return cls(
            model=model,
            text=text if isinstance(text, str) else None,
            rows=RowSums.of(values.get("rows")),
            intervals=Intervals.of(values.get("intervals")),
            **numbers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixReport:
    """Bits, error and cost of a quantized matrix; what is unknown is None.

    name: of the projection; key: the matrix's name in the model; params: the chosen parameters;
    nats: the KL divergence per token that the error alone causes on the calibration text.
    bits: all stored; sha256: of the dequantized matrix; refined: what only `refine` writes.
    """

    name: str
    key: str
    params: str | None = None
    rel_err: float | None = None
    nats: float | None = None
    bits: float | None = None
    bpw: float | None = None
    sha256: str | None = None
    refined: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, name: str, key: str, value: Json) -> Self:
        """Read the report on a projection; `key`: its matrix's name unless the report has one."""
        return cls(
            name=name,
            key=_text(value.get("key")) or key,
            params=_text(value.get("params")),
            sha256=_text(value.get("sha256")),
            refined={entry: value[entry] for entry in REFINED if entry in value},
            **{n: json_number(value.get(n)) for n in ("rel_err", "nats", "bits", "bpw")},
        )

    def to_json(self) -> Json:
        """Return the report without its name and key; the cost of what was rounded is listed."""
        rounded = None if self.sha256 is None else {"nats": self.nats}
        return {
            **({} if self.params is None else {"params": self.params}),
            "rel_err": self.rel_err,
            **(rounded or {}),
            "bits": self.bits,
            "bpw": self.bpw,
            **({} if rounded is None else {"sha256": self.sha256}),
            **self.refined,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTokens:
    """Calibration tokens of a group of a layer's experts, by the expert's number.

    topped_up: experts that also got tokens which did not choose them, as they had fewer than
    `least_tokens`. changed_routes: share of the layer's choices that are not the source's.
    """

    tokens: Mapping[int, int] = field(default_factory=dict)
    topped_up: tuple[int, ...] = ()
    least_tokens: int = 0
    changed_routes: float | None = None

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read the figures of a group."""
        tokens, topped_up = mapping(value.get("tokens")), value.get("topped_up")
        return cls(
            tokens={int(e): n for e, n in tokens.items() if len(e) < 10 and e.isdecimal()},
            topped_up=tuple(topped_up) if isinstance(topped_up, list) else (),
            least_tokens=int(number(value.get("least_tokens")) or 0),
            changed_routes=json_number(value.get("changed_routes")),
        )

    def to_json(self) -> Json:
        """Return the entry of a group's report."""
        changed = self.changed_routes
        return {
            "tokens": {str(expert): count for expert, count in self.tokens.items()},
            "topped_up": list(self.topped_up),
            "least_tokens": self.least_tokens,
            **({} if changed is None else {"changed_routes": changed}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerReport:
    """A sublayer, some or all experts of a layer, or the head; what is unknown is None.

    rel_err: of its output. experts: of experts only. before: errors that `refine` started from.
    trained: error on rows that judge over the one before training; None: it is not trained.
    """

    name: str
    matrices: tuple[MatrixReport, ...] = ()
    bits: float | None = None
    bpw: float | None = None
    rel_err: float | None = None
    before: Json | None = None
    experts: ExpertTokens | None = None
    trained: float | None = None

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read a report, of which at least the name is known."""
        name, experts = str(value["name"]), value.get("experts")
        return cls(
            name=name,
            matrices=tuple(
                MatrixReport.from_json(item, _key(name, item), mapping(entry))
                for item, entry in mapping(value.get("projections")).items()
            ),
            before=mapping(value.get("before")) or None,
            experts=ExpertTokens.from_json(experts) if isinstance(experts, dict) else None,
            **{n: json_number(value.get(n)) for n in ("bits", "bpw", "rel_err", "trained")},
        )

    def to_json(self) -> Json:
        """Return the report; matrices have their keys if their names do not begin with its own."""
        return {
            "name": self.name,
            "bits": self.bits,
            "bpw": self.bpw,
            "projections": {
                item.name: item.to_json()
                if item.key in (self.name, f"{self.name}.{item.name}")
                else {"key": item.key, **item.to_json()}
                for item in self.matrices
            },
            "rel_err": self.rel_err,
            **({} if self.before is None else {"before": self.before}),
            **({} if self.experts is None else {"experts": self.experts.to_json()}),
            **({} if self.trained is None else {"trained": self.trained}),
        }


def sublayer_reports(value: object) -> tuple[SublayerReport, ...]:
    """Return the reports that a record or a report lists, in model order."""
    listed = map(mapping, value if isinstance(value, list) else ())
    return tuple(SublayerReport.from_json(entry) for entry in listed if "name" in entry)


def matrices_of(layers: Iterable[SublayerReport]) -> list[MatrixReport]:
    """Return the matrices of all sublayers and of the head, in model order."""
    return [matrix for layer in layers for matrix in layer.matrices]


def total_nats(items: Sequence[MatrixReport]) -> float | None:
    """Return the sum of all costs, None if one is unknown or there are none."""
    known = [item.nats for item in items if item.nats is not None]
    return math.fsum(known) if known and len(known) == len(items) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """All experts of a layer.

    tokens: calibration tokens that chose each expert; median: of them.
    topped_up: experts that also got tokens which did not choose them, having under `least_tokens`.
    changed_routes: share of the choices of experts that are not the source's, None if unknown.
    """

    name: str
    tokens: tuple[int, ...]
    median: float
    topped_up: int
    changed_routes: float | None
    least_tokens: int = 0

    @classmethod
    def from_json(cls, value: Json) -> Self | None:
        """Read a layer; None if it is not what we write."""
        tokens, topped_up = value.get("tokens"), number(value.get("topped_up"))
        middle = number(value.get("median"))
        if not isinstance(tokens, list) or not tokens or topped_up is None or middle is None:
            return None
        counts = [number(count) for count in tokens]
        if any(count is None or count < 0 for count in counts):
            return None
        return cls(
            name=str(value.get("name")),
            tokens=tuple(int(count or 0) for count in counts),
            median=middle,
            topped_up=int(topped_up),
            changed_routes=number(value.get("changed_routes")),
            least_tokens=int(number(value.get("least_tokens")) or 0),
        )

    @property
    def never_routed(self) -> list[int]:
        """The experts that no token chose."""
        return [expert for expert, count in enumerate(self.tokens) if not count]

    def to_json(self) -> Json:
        """Return the layer, with what follows from its tokens."""
        return {
            "name": self.name,
            "tokens": list(self.tokens),
            "least": min(self.tokens),
            "median": self.median,
            "most": max(self.tokens),
            "least_tokens": self.least_tokens,
            "topped_up": self.topped_up,
            "never_routed": self.never_routed,
            "changed_routes": self.changed_routes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReport:
    """The experts of all layers, and warnings of text that too few of them read."""

    layers: tuple[LayerExperts, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read the entry of a record or a report, empty if there is none."""
        listed = mapping(value).get("layers")
        known = map(mapping, listed if isinstance(listed, list) else ())
        found = map(LayerExperts.from_json, known)
        return cls(
            layers=tuple(layer for layer in found if layer is not None),
            warnings=_texts(mapping(value).get("warnings")),
        )

    def to_json(self) -> Json:
        """Return the entry."""
        layers = [layer.to_json() for layer in self.layers]
        return {"layers": layers, "warnings": list(self.warnings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationReport:
    """An allocation; nats, accuracies: slot → of its chosen candidate, where known.

    value: of the objective.
    """

    bpw: float | None
    objective: str
    value: float | None
    nats: Mapping[str, float] = field(default_factory=dict)
    accuracies: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read `allocation.json` or the entry of a record, which lacks the candidates."""
        chosen = {key: mapping(entry) for key, entry in mapping(value.get("choice")).items()}
        nats, accuracies = (
            {
                key: known
                for key, entry in chosen.items()
                if (known := number(entry.get(name))) is not None
            }
            for name in ("nats", "accuracy")
        )
        return cls(
            bpw=number(value.get("bpw")),
            objective=str(value.get("objective")),
            value=number(value.get("value")),
            nats=nats,
            accuracies=accuracies,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The rows that quantization was calibrated on: rows by kind, and notes on them."""

    dataset: str | None
    sha256: str | None
    kinds: Mapping[str, int]
    notes: tuple[str, ...]

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Read the entry of a record or a report; None without one."""
        if not mapping(value):
            return None
        rows = mapping(mapping(value).get("quantize"))
        return cls(
            dataset=_text(mapping(value).get("dataset")),
            sha256=_text(mapping(value).get("sha256")),
            kinds=mapping(rows.get("kinds")),
            notes=_texts(rows.get("notes")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedReport:
    """The tensors that are stored as in the source: their parts in words, number and size."""

    parts: str
    tensors: float | None
    bytes: float | None

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Read the entry of a record or a report; None without one."""
        known = mapping(value)
        size, count = number(known.get("bytes")), number(known.get("tensors"))
        return cls(parts=str(known.get("parts")), tensors=count, bytes=size) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """A distillation: steps, and divergences on rows held back, in nats.

    texts: text → divergences before and after on its rows; refused: why a lower one was not taken.
    """

    steps: float | None
    first_kl: float | None
    best_kl: float | None
    texts: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    refused: str = ""

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Read the entry of a record or a report; None without one."""
        known = mapping(value)
        if not known:
            return None
        found = {text: mapping(kl) for text, kl in mapping(known.get("texts")).items()}
        texts = {
            text: (json_number(kl.get("first_kl")), json_number(kl.get("best_kl")))
            for text, kl in found.items()
        }
        names = ("steps", "first_kl", "best_kl")
        divergences = {name: json_number(known.get(name)) for name in names}
        return cls(**divergences, texts=texts, refused=str(known.get("refused") or ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgementReport:
    """KL divergence of old and refined matrices on rows held out, and whether the new ones won."""

    rows: int
    kl_before: float
    kl_after: float
    refined: bool

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read `judgement.json`."""
        return cls(**{name: value[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A validation: the model's score on held-out and calibration text, how it was made, verdict.

    predicted_kl: sum of the costs of all matrices, before tuning. prefer: of the allocation.
    block_bpw: bits per weight of the model's own block that drafts tokens (MTP), if quantized.
    """

    model: str
    source: str
    bpw: float | None
    score: Score
    calibration: Score | None
    source_bytes: float
    layers: tuple[SublayerReport, ...]
    predicted_kl: float | None = None
    prefer: str | None = None
    tuning: TuningReport | None = None
    calibration_rows: CalibrationReport | None = None
    not_quantized: CarriedReport | None = None
    block_bpw: float | None = None
    experts: ExpertsReport = field(default_factory=ExpertsReport)
    sample: str = ""
    warnings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read `report.json` of any version.

        Raises:
            CorruptCheckpoint: it has no score.
        """
        model = str(value.get("model") or "")
        score = Score.of(model, mapping(value.get("score")))
        if score is None:
            raise CorruptCheckpoint(
                f"the report on `{model}` has no score; validate the model again"
            )
        return cls(
            model=model,
            source=str(value.get("source") or ""),
            bpw=json_number(value.get("bpw")),
            score=score,
            calibration=Score.of(model, mapping(value.get("calibration"))),
            source_bytes=number(value.get("source_bytes")) or 0,
            layers=sublayer_reports(value.get("layers")),
            predicted_kl=json_number(value.get("predicted_kl")),
            prefer=_text(value.get("prefer")),
            tuning=TuningReport.from_json(value.get("tuning")),
            calibration_rows=CalibrationReport.from_json(value.get("calibration_rows")),
            not_quantized=CarriedReport.from_json(value.get("not_quantized")),
            block_bpw=json_number(value.get("mtp_bpw")),
            experts=ExpertsReport.from_json(value.get("experts")),
            sample=_text(value.get("sample")) or "",
            warnings=_texts(value.get("warnings")),
            failures=_texts(value.get("failures")),
        )


def _key(sublayer: str, name: str) -> str:
    """Return the name in the model that sublayer and projection make up."""
    return name if name == sublayer else f"{sublayer}.{name}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...]:
    listed = value if isinstance(value, list | tuple) else ()
    return tuple(text for text in listed if isinstance(text, str))


def _numbers(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple) or any(json_number(item) is None for item in value):
        return None
    return tuple(value)


def _pair(value: object) -> Interval | None:
    ends = _numbers(value)
    return (ends[0], ends[1]) if ends is not None and len(ends) == 2 else None
