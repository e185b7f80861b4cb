"""Cost of each matrix's error, as `quantize` estimated it, and which matrices cost most.

A cost is the KL divergence in nats per token that an error alone causes on the calibration text.
Errors interact, and other text differs, so costs rank matrices; only measurement judges a model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from exl2flow.core import words

LARGE_SHARE = 0.5  # of all costs: how many matrices cause it is stated


Item = TypeVar("Item", bound="MatrixCost")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCost:
    """Bits, error and cost of a matrix; unknown values are None or empty.

    sublayer: its name, or the head's; name: of the projection; params: the chosen parameters;
    nats: what the error alone costs.
    key_in_model: the matrix's name in the model, where sublayer and name do not make it up.
    """

    sublayer: str
    name: str
    params: str | None
    bpw: float | None
    nats: float | None
    rel_err: float | None
    key_in_model: str | None = None

    @property
    def key(self) -> str:
        """The matrix's name in the model."""
        if self.key_in_model is not None:
            return self.key_in_model
        return self.name if self.name == self.sublayer else f"{self.sublayer}.{self.name}"


def matrix_costs(layers: Sequence[Mapping[str, Any]]) -> list[MatrixCost]:
    """Return the matrices of all sublayers and of the head, in model order."""
    return [
        MatrixCost(
            sublayer=str(layer["name"]),
            name=name,
            params=str(item.get("params", "")),
            bpw=item.get("bpw"),
            nats=item.get("nats"),
            rel_err=item.get("rel_err"),
            key_in_model=item.get("key"),
        )
        for layer in layers
        for name, item in layer.get("projections", {}).items()
    ]


def total_nats(items: Sequence[MatrixCost]) -> float | None:
    """Return the sum of all costs, None if one is unknown or there are none."""
    known = [item.nats for item in items if item.nats is not None]
    return math.fsum(known) if known and len(known) == len(items) else None


def share(item: MatrixCost, total: float | None) -> float | None:
    """Return the share of an item in a total, None if either is unknown."""
    return None if item.nats is None or not total else item.nats / total


def dominant(items: Sequence[Item], count: int) -> list[Item]:
    """Return the `count` items that cost most, falling; none if costs are unknown."""
    if total_nats(items) is None:
        return []
    return sorted(items, key=lambda item: -(item.nats or 0.0))[:count]


def concentration(items: Sequence[MatrixCost]) -> str:
    """Say how few matrices cause half of all costs; nothing if costs are unknown or zero."""
    total = total_nats(items)
    if not total:
        return ""
    count, reached = 0, 0.0
    for item in dominant(items, len(items)):
        count, reached = count + 1, reached + (item.nats or 0.0)
        if reached >= LARGE_SHARE * total:
            break
    part = words.percent(reached / total, 0)
    return f"{count} of {len(items)} matrices cause {part} of the estimate"
