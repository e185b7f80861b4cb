"""Plans, reports and model contents as tables for people."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.panel import Panel
from rich.table import Table

from exl2flow.core import words
from exl2flow.core.options.sweep import REPORT_PAGE
from exl2flow.flows.cli.console import OUT, plain, say, show, tell

if TYPE_CHECKING:
    from exl2flow.inference.report.comparison import Compared
    from exl2flow.inference.report.costs import Priced
    from exl2flow.inference.scoring.evaluate import Score

CELLS_PER_LINE = 4  # sublayers per line in the compact list of bits
MOST_COSTLY = 6  # matrices listed
HEADER_WIDTH = 6  # columns of the terminal at which the words of a header wrap
FOLDED = ("", "model", "parameters", "what", "why")  # columns whose cells wrap, not cut



def table_of(rows: Sequence[Mapping[str, str]], title: str = "") -> Table:
    """Return rows of the same columns, at least one; neither names nor numbers are cut."""
    table = Table(title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title = plain(title) or None
    for index, column in enumerate(rows[0]):
        is_folded = column in FOLDED
        table.add_column(
            fill(column, HEADER_WIDTH, break_long_words=False, break_on_hyphens=False),
            justify="right" if index and not is_folded else "left",
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "ellipsis",
            min_width=None if is_folded else max(len(row[column]) for row in rows),
        )
    for row in rows:
        table.add_row(*map(plain, row.values()))
    return table


def plan_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Return (name, value) pairs as a table without borders."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        table.add_row(plain(what), plain(value))
    return table


def score_table(report: Mapping[str, Any]) -> Table:
    """Return source and result beside each other, titled by how sure they are."""
    from exl2flow.inference.report.tables import report_rows_in_words, score_rows

    return table_of(score_rows(report), f"Validation: {report_rows_in_words(report)}")


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Return bits per weight of every sublayer, several per line."""
    table = Table(title="Bits per weight", title_justify="left", box=None, show_header=False)
    cells = [
        f"[dim]{plain(words.short(layer['name']))}[/dim] {words.bits(layer['bpw'])}"
        for layer in layers
    ]
    for begin in range(0, len(cells), CELLS_PER_LINE):
        table.add_row(*cells[begin : begin + CELLS_PER_LINE])
    return table


def cost_table(items: Sequence["Priced"]) -> Table | None:
    """Return the most costly matrices, titled by their share; None if costs are unknown."""
    from exl2flow.inference.report.costs import concentration, dominant, total_nats
    from exl2flow.inference.report.tables import cost_rows

    total = total_nats(items)
    if not total:
        return None
    title = f"Where the divergence comes from: {concentration(items)}"
    return table_of(cost_rows(dominant(items, MOST_COSTLY), total), title)


def print_report(report: Mapping[str, Any]) -> None:
    """Print the result of a conversion."""
    from exl2flow.inference.report.costs import matrix_costs

    show(score_table(report))
    show(layer_table(report["layers"]))
    costly = cost_table(matrix_costs(report["layers"]))
    if costly is not None:
        show(costly)
    if report["sample"]:
        show(Panel(plain(report["sample"]), title="sample of the result", expand=False))
    _print_warnings(report["warnings"])
    tell(f"model   {report['model']}")
    tell(f"report  {report['report_folder']}/report.md")
    tell(f"page    exl2flow report {quote(str(report['model']))}")


def _print_warnings(texts: Iterable[str]) -> None:
    for text in texts:
        OUT.print(f"[yellow]warning:[/yellow] {plain(text)}", soft_wrap=True)


def comparison_table(scores: Sequence[Mapping[str, Any]], models: Sequence["Compared"]) -> Table:
    """Return one line per scored model; `models` describes the same ones."""
    from exl2flow.inference.report.tables import bitrate_row, scored_on

    rows = [bitrate_row(model, score) for score, model in zip(scores, models, strict=True)]
    return table_of(rows, scored_on(scores[0]))


def certainty_table(models: Sequence["Compared"]) -> Table | None:
    """Return the intervals of models and of their differences; None if none is known."""
    from exl2flow.inference.report.tables import certainty_rows

    rows = certainty_rows(models)
    return table_of(rows, "95 % intervals") if rows else None


def show_comparison(scores: Sequence["Score"], models: Sequence["Compared"]) -> None:
    """Print the figures of scored models and how sure they are."""
    show(comparison_table([asdict(score) for score in scores], models))
    if (table := certainty_table(models)) is not None:
        show(table)


def print_sweep(out: Path, content: Mapping[str, Any]) -> None:
    """Print the result of a sweep: its models compared, and where they are."""
    from exl2flow.inference.report.comparison import check_bitrates, compared, known_score

    scores = [s for name in content["bitrates"] if (s := known_score(out / name)) is not None]
    if scores:
        models = compared(scores)
        show_comparison(scores, models)
        if sound := check_bitrates(models)[0]:
            tell(sound)
    _print_warnings(content["warnings"])
    tell(f"models  {out}")
    tell(f"report  {out / REPORT_PAGE}")


def print_draft(draft: Mapping[str, Any]) -> None:
    """Print the card on stdout; on stderr the files of each branch and what was not checked."""
    tell(draft["card"])
    for branch, files in draft["branches"].items():
        say(f"{branch:<10} {', '.join(files)}")
    for note in draft["notes"]:
        say(f"warning: would be published despite: {note}", style="yellow")
    for what in draft["unchecked"]:
        say(f"not checked: {what}")


def print_published(published: Mapping[str, Any]) -> None:
    """Print the branches on the Hub, with their commits and address."""
    for branch, commit in published["branches"].items():
        tell(f"{branch:<10} {commit}")
    visible = "private" if published["private"] else "public"
    tell(f"{visible:<10} {published['url']}")
    for note in published["notes"]:
        say(f"warning: published despite: {note}", style="yellow")
