"""Plans, reports and model contents as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from exl2flow.core.pace import clock
from exl2flow.core.sweep import REPORT_PAGE
from exl2flow.flows.cli.console import OUT, say, show
from exl2flow.flows.cli.wording import brief, number, percent, printable, short, size

if TYPE_CHECKING:
    from exl2flow.inference.report.comparison import Compared
    from exl2flow.inference.report.costs import PricedMatrix

CELLS_PER_LINE = 4  # sublayers beside each other in the compact list of bits
MOST_COSTLY = 6  # matrices that are listed by what their errors cost


def plan_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Return (what, value) pairs as a table without borders."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        table.add_row(what, escape(value))
    return table


def score_table(report: Mapping[str, Any]) -> Table:
    """Return source and result beside each other."""
    score, calibration = report["score"], report["calibration"]
    table = Table(title="Validation", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("source", "result"):
        table.add_column(name, justify="right")
    table.add_row(
        f"perplexity, {score['tokens']:,} held-out tokens",
        number(score["reference_perplexity"]),
        number(score["perplexity"]),
    )
    if calibration is not None:
        table.add_row(
            f"perplexity, {calibration['tokens']:,} calibration tokens",
            number(calibration["reference_perplexity"]),
            number(calibration["perplexity"]),
        )
    table.add_row("KL divergence, mean (nats)", "", number(score["kl_divergence"], 5))
    for what, value in _other_divergences(report):
        table.add_row(f"KL divergence, {what}", "", number(value, 5))
    table.add_row("KL divergence, median", "", number(score["kl_median"], 5))
    table.add_row("KL divergence, 99th percentile", "", number(score["kl_p99"], 5))
    table.add_row("top-1 agreement", "", percent(score["top1_agreement"]))
    table.add_row("weights on disk", size(report["source_bytes"]), size(score["bytes"]))
    return table


def _other_divergences(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return what else is known of the divergence; the estimate is for the calibration text."""
    calibration = report["calibration"]
    found = {
        "mean on calibration tokens": calibration and calibration["kl_divergence"],
        "estimated, sum over matrices": report.get("predicted_kl"),
    }
    return [(what, value) for what, value in found.items() if value is not None]


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Return bits per weight of every sublayer, several in a line."""
    table = Table(title="Bits per weight", title_justify="left", box=None, show_header=False)
    cells = [f"[dim]{short(layer['name'])}[/dim] {layer['bpw']:.2f}" for layer in layers]
    for begin in range(0, len(cells), CELLS_PER_LINE):
        table.add_row(*cells[begin : begin + CELLS_PER_LINE])
    return table


def cost_table(items: Sequence["PricedMatrix"]) -> Table | None:
    """Return the matrices that cost most under a title on their share; None if it is unknown."""
    from exl2flow.inference.report.costs import concentration, dominant, share, total_nats

    total = total_nats(items)
    if not total:
        return None
    costly = dominant(items, MOST_COSTLY)
    title = f"Where the divergence comes from: {concentration(items)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = [short(item.key) for item in costly]
    table.add_column("matrix", no_wrap=True, min_width=max(map(len, names)))
    table.add_column("parameters", justify="right", overflow="fold")
    for column in ("bpw", "nats", "share", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, item in zip(names, costly, strict=True):
        table.add_row(
            name,
            item.params or "",
            number(item.bpw, 3),
            brief(item.nats),
            percent(share(item, total), 1),
            number(item.rel_err),
        )
    return table


def print_report(report: Mapping[str, Any], seconds: float) -> None:
    """Print the outcome of a conversion."""
    from exl2flow.inference.report.costs import matrix_costs

    show(score_table(report))
    show(layer_table(report["layers"]))
    costly = cost_table(matrix_costs(report["layers"]))
    if costly is not None:
        show(costly)
    if report["sample"]:
        show(Panel(escape(printable(report["sample"])), title="sample of the result", expand=False))
    for text in report["warnings"]:
        OUT.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)
    OUT.print(f"model   {report['model']}", markup=False, soft_wrap=True)
    OUT.print(f"report  {report['report_folder']}/report.md", markup=False, soft_wrap=True)
    OUT.print(f"time    {clock(seconds)}", markup=False)


def comparison_table(scores: Sequence[Mapping[str, Any]], models: Sequence["Compared"]) -> Table:
    """Return one line per validated model; `models` are the same ones, with what they hold."""
    first = scores[0]
    title = f"{first['tokens']:,} tokens"
    if first["reference_perplexity"] is not None:
        title += f", perplexity of the reference {number(first['reference_perplexity'])}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("model", overflow="fold")
    for name in ("bpw", "size", "perplexity", "KL mean", "estimated", "KL p99", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for score, model in zip(scores, models, strict=True):
        table.add_row(
            escape(model.label),
            number(model.bpw, 3),
            size(score["bytes"]),
            number(score["perplexity"]),
            number(score["kl_divergence"], 5),
            number(model.predicted_kl, 5),
            number(score["kl_p99"], 5),
            percent(score["top1_agreement"]),
        )
    return table


def print_sweep(out: Path, content: Mapping[str, Any]) -> None:
    """Print the outcome of a sweep: its models beside each other, and where everything lies."""
    from exl2flow.inference.report.comparison import check_bitrates, compared, known_score

    scores = [s for name in content["bitrates"] if (s := known_score(out / name)) is not None]
    if scores:
        models = compared(scores)
        show(comparison_table([asdict(score) for score in scores], models))
        if sound := check_bitrates(models)[0]:
            OUT.print(sound, markup=False, soft_wrap=True)
    for text in content["warnings"]:
        OUT.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)
    OUT.print(f"models  {out}", markup=False, soft_wrap=True)
    OUT.print(f"report  {out / REPORT_PAGE}", markup=False, soft_wrap=True)


def print_published(published: Mapping[str, Any]) -> None:
    """Print what lies on the Hub, and where."""
    for branch, commit in published["branches"].items():
        OUT.print(f"{branch:<10} {commit}", markup=False, soft_wrap=True)
    visible = "private" if published["private"] else "public"
    OUT.print(f"{visible:<10} {published['url']}", markup=False, soft_wrap=True)
    for note in published["notes"]:
        say(f"warning: published in spite of: {note}", style="yellow")
