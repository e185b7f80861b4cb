"""Tables for people and plans."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.table import Table

from exl2flow.cli.output.console import plain

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
            # of a cell that is not cut, or of a header's longest word, which does not wrap
            min_width=max(
                map(len, column.split() if is_folded else [row[column] for row in rows]),
                default=None,
            ),
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
