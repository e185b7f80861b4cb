"""Slots that choose together: experts of a layer, if they are to be stored alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeVar

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import Experts
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.compact import slot_projections
from exl2flow.quant.measure.results import Slots

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGroup:
    """slots: names; places: by common candidate, that of each slot; None: a slot by itself."""

    slots: list[str]
    places: list[tuple[int, ...]] | None = None

    def sums(self, numbers: Sequence[list[Number]]) -> list[Number]:
        """Return by common candidate the sum over slots, given lists by slot and candidate."""
        if self.places is None:
            return numbers[0]
        return [
            reduce(add, (row[at] for row, at in zip(numbers, places, strict=True)))
            for places in self.places
        ]

    def chosen(self, index: int) -> dict[str, int]:
        """Return slot → place of its candidate for the choice of a common one."""
        if self.places is None:
            return {self.slots[0]: index}
        return dict(zip(self.slots, self.places[index], strict=True))


def grouped(spec: ModelSpec, slots: Slots, experts: Experts) -> list[SlotGroup]:
    """Return groups of slots with one choice each, in the order of their first slots.

    Raises:
        ConfigError: experts of a layer have no candidate in common.
    """
    if experts == "each":
        return [SlotGroup(slots=[name]) for name in slots]
    projections = slot_projections(spec)
    layers = {p.key: s.layer_index for s in spec.sublayers for p in s.projections}
    members: dict[object, list[str]] = {}
    for name in slots:
        own = projections[name]
        key = (layers[own[0].key], *(p.role for p in own)) if own[0].is_routed else name
        members.setdefault(key, []).append(name)
    return [
        SlotGroup(
            slots=names, places=_common(names, slots, projections) if len(names) > 1 else None
        )
        for names in members.values()
    ]


def _common(
    names: Sequence[str], slots: Slots, projections: dict[str, tuple[ProjectionSpec, ...]]
) -> list[tuple[int, ...]]:
    """Return the places, by slot, of each candidate that all slots have, in order of the first."""
    places = [_places(slots, name, projections[name]) for name in names]
    common = [tuple(p[c] for p in places) for c in places[0] if all(c in p for p in places)]
    if not common:
        raise ConfigError(
            f"`{names[0]}` and `{names[-1]}` were measured with other candidates; leave out "
            "`--experts layer` or measure again"
        )
    return common


def _places(
    slots: Slots, name: str, projections: Sequence[ProjectionSpec]
) -> dict[tuple[QuantParams, ...], int]:
    """Return parameters in order of projections → place among a slot's candidates."""
    candidates = slots[name].candidates
    return {tuple(c[p.name] for p in projections): at for at, c in enumerate(candidates)}
