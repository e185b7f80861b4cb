"""How long a campaign may take, and its table: what failed how often, and what that shows."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from state import bound as bound
from state import rate

from exl2flow.core.store.files import replacing


def table(title: str, tried: Mapping[str, int], failed: Mapping[str, int]) -> str:
    """Return a Markdown table of names, with the 95 % bound where nothing failed."""
    lines = [f"| {title} | tried | failed | rate (95 %) |", "|---|---|---|---|"]
    for name, count in tried.items():
        failures = failed.get(name, 0)
        lines.append(f"| {name} | {count:,} | {failures} | {rate(count, failures)} |")
    return "\n".join(lines)


def save(found: Any, path: Path | None) -> None:
    """Write what a run has shown, a dataclass with slots, to its state file, if there is one."""
    if path is not None:
        values = {name: getattr(found, name) for name in found.__slots__}
        with replacing(path) as file:
            file.write(json.dumps(values, indent=1).encode())


def spread(names: Iterable[str]) -> str:
    """Return how often each name occurs, most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common())


def ends(parts: int, seconds: float) -> Iterator[float]:
    """Yield when each part of a campaign ends: equal shares of the time that is left then."""
    end = time.monotonic() + seconds
    for left in range(parts, 0, -1):
        now = time.monotonic()
        yield now + (end - now) / left


def within(count: int, end: float) -> Iterator[int]:
    """Yield numbers up to `count`, until the time is over."""
    for number in range(count):
        if time.monotonic() > end:
            return
        yield number
