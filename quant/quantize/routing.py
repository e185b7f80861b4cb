"""Tokens of experts and routes that changed: words for the log, and a summary for the record.

Every group of a layer's experts has a part of the figures in its report. The summary has one entry
per layer, so that no reader has to put groups together again.
"""

import logging
from collections.abc import Iterable, Sequence
from statistics import median

from exl2flow.core import words
from exl2flow.core.reports import ExpertsReport, ExpertTokens, Json, LayerExperts, SublayerReport

log = logging.getLogger(__name__)

EXPERTS = "experts"  # the key of these figures, in a group's report and in a record
MOST_TOPPED_UP = 0.05  # of a layer's experts; above it there is a warning


def experts_in_log(report: SublayerReport) -> str:
    """Return what a report says of a group's experts, to append to other words; "" without any."""
    figures = report.experts
    if figures is None or not figures.tokens:
        return ""
    counts = list(figures.tokens.values())
    said = f" tokens={min(counts)}..{max(counts)}"
    if figures.topped_up:
        said += f" topped_up={len(figures.topped_up)}/{len(counts)}"
    if never := counts.count(0):
        said += f" never_routed={never}"
    if figures.changed_routes is not None:
        said += f" changed_routes={figures.changed_routes:.4f}"
    return said


def experts_entry(layers: Sequence[SublayerReport]) -> Json:
    """Return the entry of a record on experts, and log its warnings; {} for a dense model."""
    summary = experts_summary(layers)
    for text in summary.warnings:
        log.warning(text)
    return {EXPERTS: summary.to_json()} if summary.layers else {}


def experts_summary(layers: Iterable[SublayerReport]) -> ExpertsReport:
    """Summarize the experts of each layer, and warn of text that too few of them read.

    Args:
        layers: reports of all sublayers.
    """
    groups: dict[str, list[ExpertTokens]] = {}
    for layer in layers:
        if layer.experts is not None:
            groups.setdefault(layer.name.rpartition(".")[0], []).append(layer.experts)
    entries = tuple(_of_layer(name, members) for name, members in groups.items())
    return ExpertsReport(layers=entries, warnings=_warnings(entries))


def _of_layer(name: str, groups: Sequence[ExpertTokens]) -> LayerExperts:
    """Return the entry of a layer, whose groups all see the same routes."""
    tokens = {expert: count for group in groups for expert, count in group.tokens.items()}
    counts = [tokens[expert] for expert in sorted(tokens)]
    changed = [g.changed_routes for g in groups if g.changed_routes is not None]
    return LayerExperts(
        name=name,
        tokens=tuple(counts),
        median=median(counts),
        topped_up=sum(len(group.topped_up) for group in groups),
        changed_routes=changed[0] if changed else None,
        least_tokens=groups[0].least_tokens,
    )


def _warnings(entries: Sequence[LayerExperts]) -> tuple[str, ...]:
    def share(entry: LayerExperts) -> float:
        return entry.topped_up / len(entry.tokens)

    starved = [entry for entry in entries if share(entry) > MOST_TOPPED_UP]
    if not starved:
        return ()
    worst = max(starved, key=share)
    most = f"{worst.topped_up} of {len(worst.tokens)}"
    return (
        f"in {len(starved)} of {len(entries)} layers with experts, more than "
        f"{words.percent(MOST_TOPPED_UP, 0)} of the experts had too few calibration tokens and "
        f"were topped up with others, most of all in `{words.short(worst.name)}` ({most}); "
        "give more calibration rows (`--rows`), or text that these experts read (`--calibration`)",
    )
