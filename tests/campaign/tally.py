"""The table at the end of a campaign: what was tried, how often it failed, what that shows."""

from collections import Counter
from collections.abc import Iterable, Mapping

CONFIDENCE = 0.95


def bound(count: int) -> float:
    """Return the rate of failures that `count` trials without one exclude with 95 % confidence."""
    return 1.0 if count == 0 else 1 - (1 - CONFIDENCE) ** (1 / count)


def table(title: str, tried: Mapping[str, int], failed: Mapping[str, int]) -> str:
    """Return a Markdown table of names, with the 95 % bound where nothing failed."""
    lines = [f"| {title} | tried | failed | rate (95 %) |", "|---|---|---|---|"]
    for name, count in tried.items():
        failures = failed.get(name, 0)
        rate = f"{failures / count:.2%} seen" if failures else f"< {bound(count):.2%}"
        lines.append(f"| {name} | {count:,} | {failures} | {rate} |")
    return "\n".join(lines)


def spread(names: Iterable[str]) -> str:
    """Return how often each name occurs, most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common())
