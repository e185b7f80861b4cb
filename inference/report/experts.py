"""Experts in reports: how many tokens each one had, and how many routes rounding changed.

The figures are those of a record's summary, which is written once per conversion.
"""

from collections.abc import Sequence

from exl2flow.core import words
from exl2flow.core.reports import LayerExperts

MOST_NAMED = 8  # experts that no token chose, by name

Row = dict[str, str]


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
    names = [words.short(f"{x.name}.{expert}") for x in layers for expert in x.never_routed]
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
