"""The table of a campaign, and the state file of those that keep a dataclass of their own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
