"""Results of a slot's candidates, in arrays: there may be very many slots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

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
class Results:
    """The results of a slot's candidates, of which one at a time becomes an object.

    candidates: shared with other slots; bits: int64 (options,); accuracy, nats: fp64 (options,).
    Without `nats` not all costs are known.
    """

    candidates: tuple[Candidate, ...]
    bits: np.ndarray
    accuracy: np.ndarray
    nats: np.ndarray | None = None

    @classmethod
    def of(cls, items: Sequence[CandidateResult] = ()) -> Self:
        """Gather results of single candidates."""
        nats = [item.nats for item in items if item.nats is not None]
        return cls(
            candidates=tuple(item.params for item in items),
            bits=np.array([item.total_bits for item in items], np.int64),
            accuracy=np.array([item.accuracy for item in items], np.float64),
            nats=np.array(nats, np.float64) if len(nats) == len(items) else None,
        )

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> CandidateResult:
        return CandidateResult(
            accuracy=float(self.accuracy[index]),
            total_bits=int(self.bits[index]),
            params=self.candidates[index],
            nats=None if self.nats is None else float(self.nats[index]),
        )

    def __iter__(self) -> Iterator[CandidateResult]:
        return map(self.__getitem__, range(len(self)))

    def only(self, places: Sequence[int], candidates: tuple[Candidate, ...]) -> Self:
        """Return the results at `places`, whose candidates are given."""
        at = np.array(places, np.int64)
        nats = None if self.nats is None else self.nats[at]
        return replace(
            self, candidates=candidates, bits=self.bits[at], accuracy=self.accuracy[at], nats=nats
        )

    def scaled(self, factor: float) -> Self:
        """Return results whose costs in nats are multiplied; an unknown cost is 0."""
        return replace(self, nats=np.zeros(len(self)) if self.nats is None else factor * self.nats)


Slots = Mapping[str, Results]
