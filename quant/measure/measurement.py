"""Measured bits and cost of every candidate of every slot (`measurement.json`).

A slot is the unit of bit allocation: a part of a sublayer, as in exllamav2, or one projection (the
head included) with its cost in nats.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.store.files import read_json
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import QuantParams, padded_columns

MEASUREMENT_FILE = "measurement.json"
Candidate = dict[str, QuantParams]  # projection name → its parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult:
    """accuracy: 1 - relative error; total_bits: of all projections; nats: what the error costs.

    Of a sublayer the relative error is that of its output, of a projection its own output's.
    """

    accuracy: float
    total_bits: int
    params: Candidate
    nats: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return the entry of `measurement.json`."""
        params = {name: value.to_json() for name, value in self.params.items()}
        nats = {} if self.nats is None else {"nats": self.nats}
        return {"accuracy": self.accuracy, "total_bits": self.total_bits, **nats, **params}

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> "CandidateResult":
        """Read an entry, also one that exllamav2 wrote."""
        params = {k: _params(json.dumps(v)) for k, v in entry.items() if isinstance(v, dict)}
        nats = entry.get("nats")
        return cls(
            accuracy=float(entry["accuracy"]),  # type: ignore[arg-type]  # JSON
            total_bits=int(entry["total_bits"]),  # type: ignore[call-overload]  # JSON
            params=params,
            nats=None if nats is None else float(nats),  # type: ignore[arg-type]  # JSON
        )


def to_entries(results: Mapping[str, Sequence[CandidateResult]]) -> dict[str, object]:
    """Return slot → entries of `measurement.json`."""
    return {slot: [r.to_json() for r in candidates] for slot, candidates in results.items()}


@cache
def _params(text: str) -> QuantParams:
    """Read parameters, the same object for the same text: all slots list the same ones."""
    return QuantParams.from_json(json.loads(text))


def read_entries(path: Path) -> Any:
    """Read a file of entries, in which equal parameters are one object.

    Raises:
        CorruptCheckpoint: the file is missing or not JSON.
    """
    known: dict[str, dict[str, Any]] = {}

    def shared(entry: dict[str, Any]) -> dict[str, Any]:
        return known.setdefault(repr(entry), entry) if "bits_prop" in entry else entry

    return read_json(path, hook=shared)


Slots = Mapping[str, Sequence[CandidateResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """decoder: candidates of all slots but the head; head: its candidates, empty if unmeasured."""

    decoder: Slots
    head: Sequence[CandidateResult] = ()


def slot_projections(spec: ModelSpec) -> dict[str, tuple[ProjectionSpec, ...]]:
    """Return every possible slot: name → projections it chooses for."""
    slots = {part.name: part.projections for s in spec.sublayers for part in s.parts}
    return slots | {p.key: (p,) for p in (*spec.projections, spec.head)}


def projection_bits(projection: ProjectionSpec, params: QuantParams) -> int:
    """Return all stored bits of a projection."""
    columns = padded_columns(projection.out_features)
    return params.total_bits(projection.in_features, columns, has_bias=projection.has_bias)


def candidate_bits(projections: Sequence[ProjectionSpec], candidate: Candidate) -> int:
    """Return all stored bits of a slot under a candidate."""
    return sum(projection_bits(p, candidate[p.name]) for p in projections)


def read_measurement(path: Path, spec: ModelSpec) -> Measurement:
    """Read a `measurement.json`, ours or exllamav2's, for this model.

    Bits are computed from the parameters; a file that states others belongs to another model.

    Raises:
        ConfigError: the file is not a measurement, or not of this model.
    """
    try:
        data = read_entries(path)
        data["last_module_idx"]
        measured = data["measurement"]
        names = [part.name for sublayer in spec.sublayers for part in sublayer.parts]
        if names[0] not in measured:
            names = [p.key for p in spec.projections]
        decoder = {name: _results(measured[name]) for name in names}
        head = _results(measured.get(spec.head.key) or ())
    except (
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        ConfigError,
    ) as error:
        raise ConfigError(
            f"`{path}` is not a measurement of `{spec.source_dir}`: {words.cause(error)}; "
            "measure again or give the file that belongs to this model"
        ) from error
    projections = slot_projections(spec)
    for name, results in decoder.items():
        if not results:
            raise ConfigError(f"`{path}`: `{name}` lists no candidates; measure again")
        _check_entries(path, name, projections[name], results)
    _check_entries(path, spec.head.key, (spec.head,), head)
    return Measurement(decoder=decoder, head=head)


def _results(entries: Sequence[Mapping[str, object]]) -> list[CandidateResult]:
    return [CandidateResult.from_json(entry) for entry in entries]


def _check_entries(
    path: Path,
    slot: str,
    projections: Sequence[ProjectionSpec],
    results: Sequence[CandidateResult],
) -> None:
    """Ask that measured candidates can be those of a slot.

    Raises:
        ConfigError: naming file and slot.
    """
    names = {projection.name for projection in projections}
    for result in results:
        if result.nats is not None and not 0 <= result.nats < math.inf:
            raise ConfigError(
                f"`{path}`: `{slot}` has a cost of {result.nats} nats, which is not a finite "
                "number from 0 on; measure again"
            )
        if set(result.params) != names:
            raise ConfigError(f"`{path}`: `{slot}` lists {sorted(result.params)}")
        if not 0 <= result.accuracy <= 1:
            raise ConfigError(
                f"`{path}`: `{slot}` has an accuracy of {result.accuracy}, which is not "
                "between 0 and 1; measure again"
            )
        bits = candidate_bits(projections, result.params)
        if bits != result.total_bits:
            raise ConfigError(
                f"`{path}` states {result.total_bits} bits for `{slot}`, this model has {bits}; "
                "it is of another model"
            )
    if len({result.nats is None for result in results}) > 1:
        raise ConfigError(
            f"`{path}`: only some candidates of `{slot}` have a cost in nats; measure again"
        )
