"""Experts in reports: how many tokens each one had, and how many routes rounding changed.

The figures are those of a record's summary, which is written once per conversion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl2flow.core import words
from exl2flow.inference.report.record import mapping, number

MOST_NAMED = 8  # experts that no token chose, by name

Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """The experts of a layer.

    tokens: calibration tokens that chose each expert; median: of them.
    topped_up: experts that also got tokens which did not choose them.
    changed_routes: share of the choices of experts that are not the source's, None if unknown.
    """

    name: str
    tokens: tuple[int, ...]
    median: float
    topped_up: int
    changed_routes: float | None

    @property
    def never_routed(self) -> list[str]:
        """Names of the experts that no token chose."""
        return [f"{self.name}.{expert}" for expert, count in enumerate(self.tokens) if not count]


def expert_layers(summary: object) -> list[LayerExperts]:
    """Return the layers of the summary in a record or a report, in order; [] without one."""
    listed = mapping(summary).get("layers")
    found = map(_layer, map(mapping, listed if isinstance(listed, list) else ()))
    return [layer for layer in found if layer is not None]


def _layer(entry: Mapping[str, Any]) -> LayerExperts | None:
    """Return a layer of a summary; None if it is not what we write."""
    tokens, counted = entry.get("tokens"), number(entry.get("topped_up"))
    middle = number(entry.get("median"))
    if not isinstance(tokens, list) or not tokens or counted is None or middle is None:
        return None
    counts = [number(count) for count in tokens]
    if any(count is None or count < 0 for count in counts):
        return None
    return LayerExperts(
        name=str(entry.get("name")),
        tokens=tuple(int(count or 0) for count in counts),
        median=middle,
        topped_up=int(counted),
        changed_routes=number(entry.get("changed_routes")),
    )


def expert_rows(layers: Sequence[LayerExperts]) -> list[Row]:
    """Return a row per layer."""
    return [
        {
            "layer": words.short(layer.name),
            "experts": str(len(layer.tokens)),
            "fewest tokens": f"{min(layer.tokens):,}",
            "median": f"{layer.median:,.0f}",
            "most": f"{max(layer.tokens):,}",
            "topped up": str(layer.topped_up),
            "never routed": str(len(layer.never_routed)),
            "changed routes": words.percent(layer.changed_routes),
        }
        for layer in layers
    ]


def never_routed(layers: Sequence[LayerExperts]) -> str:
    """Name the experts that no token chose, `MOST_NAMED` at most; "" if there are none."""
    names = [words.short(name) for layer in layers for name in layer.never_routed]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def mean_changed_routes(layers: Sequence[LayerExperts]) -> float | None:
    """Return the share of changed routes, mean over the layers; None if one is unknown."""
    known = [layer.changed_routes for layer in layers if layer.changed_routes is not None]
    return sum(known) / len(known) if known and len(known) == len(layers) else None


def coverage_in_words(layers: Sequence[LayerExperts]) -> str:
    """Say in a sentence, without its full stop, how well a text covered all experts."""
    counts = sorted(count for layer in layers for count in layer.tokens)
    topped_up = sum(layer.topped_up for layer in layers)
    unused = sum(len(layer.never_routed) for layer in layers)
    text = (
        f"Each of the {len(counts):,} experts in {len(layers)} layers was chosen by "
        f"{counts[0]:,} to {counts[-1]:,} calibration tokens, half of them by at least "
        f"{counts[len(counts) // 2]:,}"
    )
    if topped_up:
        text += f"; {topped_up:,} had too few and were topped up with tokens that nearly chose them"
    return f"{text}; {unused:,} were never chosen" if unused else text
