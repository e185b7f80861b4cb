"""Measured bits and cost of every candidate of every slot (`measurement.json`).

A slot is the unit of bit allocation: a part of a sublayer, as in exllamav2, or one projection (the
head included) with its cost in nats.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import MEASUREMENT_FILE as MEASUREMENT_FILE
from exl2flow.core.store.files import read_json
from exl2flow.model import ModelSpec, ProjectionSpec, Role
from exl2flow.model.files.exl2 import QuantParams, padded_columns
from exl2flow.model.files.measured import ARRAYS
from exl2flow.quant.measure.compact import experts_slot, read_compact
from exl2flow.quant.measure.compact import slot_projections as slot_projections
from exl2flow.quant.measure.results import Candidate as Candidate
from exl2flow.quant.measure.results import CandidateResult as CandidateResult
from exl2flow.quant.measure.results import Results, Slots

EXPERT_ROLES: dict[str, Role] = {"w1": "gate", "w3": "up", "w2": "down"}  # its names of matrices


def read_entries(path: Path) -> Any:
    """Read a file of entries, in which equal parameters are one object.

    Raises:
        CorruptCheckpoint: the file is missing or not JSON.
    """
    known: dict[str, dict[str, Any]] = {}

    def shared(entry: dict[str, Any]) -> dict[str, Any]:
        return known.setdefault(repr(entry), entry) if "bits_prop" in entry else entry

    return read_json(path, hook=shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """decoder: candidates of all slots but the head; head: its candidates, empty if unmeasured."""

    decoder: Slots
    head: Results = field(default_factory=Results.of)


def projection_bits(projection: ProjectionSpec, params: QuantParams) -> int:
    """Return all stored bits of a projection."""
    columns = padded_columns(projection.out_features)
    return params.total_bits(projection.in_features, columns, has_bias=projection.has_bias)


def candidate_bits(projections: Sequence[ProjectionSpec], candidate: Candidate) -> int:
    """Return all stored bits of a slot under a candidate."""
    return sum(projection_bits(p, candidate[p.name]) for p in projections)


def read_measurement(path: Path, spec: ModelSpec) -> Measurement:
    """Read a `measurement.json`, ours or exllamav2's, for this model, and the arrays beside it.

    Bits are computed from the parameters; a file that states others belongs to another model.

    Raises:
        ConfigError: the file is not a measurement, or not of this model.
    """
    try:
        data = read_entries(path)
        data["last_module_idx"]
        measured = data["measurement"]
        if ARRAYS in data:  # whose numbers and candidates are checked together
            arrays = read_compact(path, data[ARRAYS], spec)
            decoder = {name: arrays[name] for name in _slot_names(spec, arrays)}
            return Measurement(decoder=decoder, head=arrays.get(spec.head.key) or Results.of())
        entries = {name: _entries(measured[name]) for name in _slot_names(spec, measured)}
        projections = slot_projections(spec)
        for name in entries.keys() & {experts_slot(spec, i) for i in range(spec.num_layers)}:
            entries[name] = [_of_experts(result, projections[name]) for result in entries[name]]
        head = _entries(measured.get(spec.head.key) or ())
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"`{path}` is not a measurement of `{spec.source_dir}`: {words.cause(error)}; "
            "measure again or give the file that belongs to this model"
        ) from error
    for name, results in entries.items():
        if not results:
            raise ConfigError(f"`{path}`: `{name}` lists no candidates; measure again")
        _check_entries(path, name, projections[name], results)
    _check_entries(path, spec.head.key, (spec.head,), head)
    return Measurement(
        decoder={k: Results.of(v) for k, v in entries.items()}, head=Results.of(head)
    )


def _slot_names(spec: ModelSpec, measured: Container[str]) -> Iterator[str]:
    """Yield the slots of a file: projections, or parts of sublayers.

    exllamav2 measures all experts of a layer together, as one slot with a choice for each role.
    """
    if spec.sublayers[0].parts[0].name not in measured:
        yield from (p.key for p in spec.projections)
        return
    for sublayer in spec.sublayers:
        layer = experts_slot(spec, sublayer.layer_index)
        if sublayer.group is None or layer not in measured:
            yield from (part.name for part in sublayer.parts)
        elif sublayer.group.is_first:
            yield layer


def _of_experts(result: CandidateResult, projections: Sequence[ProjectionSpec]) -> CandidateResult:
    """Return a result with parameters by the projection instead of exllamav2's names."""
    by_role = {role: result.params[name] for name, role in EXPERT_ROLES.items()}
    return replace(result, params={p.name: by_role[p.role] for p in projections})


def _entries(entries: Sequence[Mapping[str, object]]) -> list[CandidateResult]:
    """Read the entries of a slot.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, AttributeError: they are none.
    """
    try:
        return [CandidateResult.from_json(entry) for entry in entries]
    except ConfigError as error:
        raise ValueError(str(error)) from error


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
