"""Tokens of experts and routes that changed: words for the log, and a summary for the record.

Every group of a layer's experts has a part of the figures in its report. The summary has one entry
per layer, so that no reader has to put groups together again.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from exl2flow.core import words

log = logging.getLogger(__name__)

EXPERTS = "experts"  # the key of these figures, in a group's report and in a record
MOST_TOPPED_UP = 0.05  # of a layer's experts; above it there is a warning

Report = Mapping[str, Any]  # of a sublayer, as `quantize` or `refine` wrote it


def experts_in_log(report: Report) -> str:
    """Return what a report says of a group's experts, to append to other words; "" without any."""
    figures = report.get(EXPERTS)
    counts = list(figures["tokens"].values()) if figures else []
    if not figures or not counts:
        return ""
    said = f" tokens={min(counts)}..{max(counts)}"
    if figures["topped_up"]:
        said += f" topped_up={len(figures['topped_up'])}/{len(counts)}"
    if never := counts.count(0):
        said += f" never_routed={never}"
    if (changed := figures.get("changed_routes")) is not None:
        said += f" changed_routes={changed:.4f}"
    return said


def experts_entry(layers: Sequence[Report]) -> dict[str, object]:
    """Return the entry of a record on experts, and log its warnings; {} for a dense model."""
    summary = experts_summary(layers)
    if summary is None:
        return {}
    for text in summary["warnings"]:
        log.warning(text)
    return {EXPERTS: summary}


def experts_summary(layers: Iterable[Report]) -> dict[str, Any] | None:
    """Summarize the experts of each layer, and warn of text that too few of them read.

    Args:
        layers: reports of all sublayers.

    Returns:
        `layers`: for each layer with experts its `name`, the `tokens` of every expert, the `least`,
        `median` and `most` of them, `least_tokens` below which an expert is topped up, how many
        were `topped_up`, the experts `never_routed`, and the share of `changed_routes`, None if
        unknown; `warnings`: sentences. None: no layer has experts.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        if EXPERTS in layer:
            block = str(layer["name"]).rpartition(".")[0]
            groups.setdefault(block, []).append(layer[EXPERTS])
    if not groups:
        return None
    entries = [_of_layer(name, members) for name, members in groups.items()]
    return {"layers": entries, "warnings": _warnings(entries)}


def _of_layer(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a layer, whose groups all see the same routes."""
    tokens = {int(e): count for group in groups for e, count in group["tokens"].items()}
    counts = [tokens[expert] for expert in sorted(tokens)]
    changed = [group["changed_routes"] for group in groups if "changed_routes" in group]
    return {
        "name": name,
        "tokens": counts,
        "least": min(counts),
        "median": median(counts),
        "most": max(counts),
        "least_tokens": groups[0]["least_tokens"],
        "topped_up": sum(len(group["topped_up"]) for group in groups),
        "never_routed": [expert for expert in sorted(tokens) if not tokens[expert]],
        "changed_routes": changed[0] if changed else None,
    }


def _warnings(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    def share(entry: Mapping[str, Any]) -> float:
        return float(entry["topped_up"] / len(entry["tokens"]))

    starved = [entry for entry in entries if share(entry) > MOST_TOPPED_UP]
    if not starved:
        return []
    worst = max(starved, key=share)
    most = f"{worst['topped_up']} of {len(worst['tokens'])}"
    return [
        f"in {len(starved)} of {len(entries)} layers with experts, more than "
        f"{words.percent(MOST_TOPPED_UP, 0)} of the experts had too few calibration tokens and "
        f"were topped up with others, most of all in `{words.short(worst['name'])}` ({most}); "
        "give more calibration rows (`--rows`), or text that these experts read (`--calibration`)"
    ]
