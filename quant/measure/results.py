"""Results of a slot's candidates: one by one, or in arrays if there are very many slots."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self, overload

import numpy as np

from exl2flow.model.files.exl2 import QuantParams

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


@cache
def _params(text: str) -> QuantParams:
    """Read parameters, the same object for the same text: all slots list the same ones."""
    return QuantParams.from_json(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayResults(Sequence[CandidateResult]):
    """The results of a slot, of which one at a time becomes an object.

    candidates: shared with other slots; bits: int64 (options,); accuracy, nats: fp64 (options,).
    """

    candidates: tuple[Candidate, ...]
    bits: np.ndarray
    accuracy: np.ndarray
    nats: np.ndarray | None

    def __len__(self) -> int:
        return len(self.candidates)

    @overload
    def __getitem__(self, index: int) -> CandidateResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[CandidateResult]: ...
    def __getitem__(self, index: int | slice) -> CandidateResult | list[CandidateResult]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return CandidateResult(
            accuracy=float(self.accuracy[index]),
            total_bits=int(self.bits[index]),
            params=self.candidates[index],
            nats=None if self.nats is None else float(self.nats[index]),
        )

    def only(self, candidates: tuple[Candidate, ...], places: Sequence[int]) -> Self:
        """Return some of the results: those at `places`, whose candidates are given."""
        at = np.array(places, np.int64)
        nats = None if self.nats is None else self.nats[at]
        return replace(
            self, candidates=candidates, bits=self.bits[at], accuracy=self.accuracy[at], nats=nats
        )


Results = Sequence[CandidateResult]
Slots = Mapping[str, Results]


def candidates_of(results: Results) -> tuple[Candidate, ...]:
    """Return the candidates of a slot."""
    if isinstance(results, ArrayResults):
        return results.candidates
    return tuple(result.params for result in results)


def bits_of(results: Results) -> list[int]:
    """Return the stored bits of a slot's candidates."""
    if isinstance(results, ArrayResults):
        return list(results.bits.tolist())
    return [result.total_bits for result in results]


def accuracies_of(results: Results) -> list[float]:
    """Return the accuracies of a slot's candidates."""
    if isinstance(results, ArrayResults):
        return list(results.accuracy.tolist())
    return [result.accuracy for result in results]


def nats_of(results: Results) -> list[float] | None:
    """Return the costs of a slot's candidates in nats; None if one is unknown."""
    if isinstance(results, ArrayResults):
        return None if results.nats is None else list(results.nats.tolist())
    nats = [result.nats for result in results if result.nats is not None]
    return nats if len(nats) == len(results) else None


def scaled(results: Results, factor: float) -> Results:
    """Return results whose costs in nats are multiplied; an unknown cost is 0."""
    if isinstance(results, ArrayResults):
        nats = np.zeros(len(results)) if results.nats is None else results.nats
        return replace(results, nats=factor * nats)
    return [replace(result, nats=factor * (result.nats or 0.0)) for result in results]


def to_entries(results: Slots) -> dict[str, object]:
    """Return slot → entries of `measurement.json`."""
    return {slot: [r.to_json() for r in candidates] for slot, candidates in results.items()}
