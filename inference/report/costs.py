"""Cost of each matrix's error, as `quantize` estimated it, and which matrices cost most.

A cost is the KL divergence in nats per token that an error alone causes on the calibration text.
Errors interact, and other text differs, so costs rank matrices; only measurement judges a model.
"""

from collections.abc import Sequence
from typing import TypeVar

from exl2flow.core import words
from exl2flow.core.reports import MatrixReport, total_nats

LARGE_SHARE = 0.5  # of all costs: how many matrices cause it is stated

Item = TypeVar("Item", bound=MatrixReport)


def share(item: MatrixReport, total: float | None) -> float | None:
    """Return the share of an item in a total, None if either is unknown."""
    return None if item.nats is None or not total else item.nats / total


def dominant(items: Sequence[Item], count: int) -> list[Item]:
    """Return the `count` items that cost most, falling; none if costs are unknown."""
    if total_nats(items) is None:
        return []
    return sorted(items, key=lambda item: -(item.nats or 0.0))[:count]


def concentration(items: Sequence[MatrixReport]) -> str:
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
