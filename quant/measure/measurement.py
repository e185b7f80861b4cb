"""Measured bits and cost of every candidate of every slot (`measurement.json`).

A slot is the unit of bit allocation: a part of a sublayer, as in exllamav2, or one projection (the
head included) with its cost in nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import MEASUREMENT_FILE as MEASUREMENT_FILE
from exl2flow.core.store.files import read_json
from exl2flow.model import ModelSpec, ProjectionSpec, Role
from exl2flow.model.files.exl2 import QuantParams, padded_columns
from exl2flow.model.files.measured import ARRAYS
from exl2flow.quant.measure.compact import read_compact
from exl2flow.quant.measure.compact import slot_projections as slot_projections
from exl2flow.quant.measure.results import ArrayResults, Results, Slots
from exl2flow.quant.measure.results import Candidate as Candidate
from exl2flow.quant.measure.results import CandidateResult as CandidateResult
from exl2flow.quant.measure.results import to_entries as to_entries

EXPERTS = ".block_sparse_moe"  # end of exllamav2's name of a layer's experts, a slot of its own
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
    head: Results = ()


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
        if ARRAYS in data:
            measured = read_compact(path, data[ARRAYS], spec)
        names = [part.name for sublayer in spec.sublayers for part in sublayer.parts]
        if names[0] not in measured:
            names = [p.key for p in spec.projections]
        decoder = {name: _results(measured[name]) for name in names}
        head = _results(measured.get(spec.head.key) or ())
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"`{path}` is not a measurement of `{spec.source_dir}`: {words.cause(error)}; "
            "measure again or give the file that belongs to this model"
        ) from error
    if ARRAYS in data:  # whose numbers and candidates were checked together
        return Measurement(decoder=decoder, head=head)
    projections = slot_projections(spec)
    for name, results in decoder.items():
        if not results:
            raise ConfigError(f"`{path}`: `{name}` lists no candidates; measure again")
        _check_entries(path, name, projections[name], results)
    _check_entries(path, spec.head.key, (spec.head,), head)
    return Measurement(decoder=decoder, head=head)


def expert_results(measured: Mapping[str, Any]) -> dict[int, list[CandidateResult]]:
    """Read what exllamav2 measured of experts: one choice for all experts of a layer.

    Args:
        measured: its slots and their entries.

    Returns:
        layer → results for all its experts together, with parameters by role.

    Raises:
        KeyError, ValueError: an entry lacks a matrix, or a name has no number of a layer.
    """
    layers: dict[int, list[CandidateResult]] = {}
    for slot, entries in measured.items():
        if slot.endswith(EXPERTS):
            layer = int(slot.removesuffix(EXPERTS).rpartition(".")[2])
            layers[layer] = [
                replace(r, params={role: r.params[name] for name, role in EXPERT_ROLES.items()})
                for r in _results(entries)
            ]
    return layers


def _results(entries: Results | Sequence[Mapping[str, object]]) -> Results:
    """Read the entries of a slot, unless they are results already.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, AttributeError: they are none.
    """
    if isinstance(entries, ArrayResults):
        return entries
    try:
        return [CandidateResult.from_json(entry) for entry in entries]  # type: ignore[arg-type]
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
