"""Markdown that is shown while it comes.

CommonMark is parsed line by line: once a block at the top level is closed, later lines never change
it. Closed blocks are printed once, into the terminal's scrollback; only the rows of the open one
are drawn again. Link definitions, which work backwards, and HTML, which would vanish, are plain
text; line breaks are kept.
"""

import re
import time
from collections.abc import Callable

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from exl2flow.cli.output.console import printable

DRAWS_PER_SECOND = 30
DRAWING_SHARE = 0.02  # of the time at most: long blocks are drawn less often
UNDECIDED = re.compile(r"[\s`~#*+=|>:.()\d_-]*")  # may still become a fence, a heading or an item
CLOSED = ("heading_open", "hr")
CLOSED_BY_BLANK = ("paragraph_open", "table_open", "blockquote_open")
LONGEST_PARSED = 20_000  # characters
THEME = "monokai"
# control sequences; without wrapping, a row that the terminal finds wider than we do stays one row
UP, TO_START, ERASE_BELOW = "\x1b[{}A", "\r", "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"

_BLOCKS = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["reference", "inline"])
_SPANS = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")


class SafeMarkdown(Markdown):
    """Markdown as a renderable, whose text commands no terminal."""

    def __init__(self, text: str) -> None:
        """Parse a text."""
        super().__init__("", code_theme=THEME, hyperlinks=False)
        self.parsed = _BLOCKS.parse(text)
        for token in self.parsed:
            if token.type == "inline":
                token.children = _spans(token.content)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich; entities such as `&#13;` become text after parsing, so it is checked here."""
        for part in super().__rich_console__(console, options):
            for segment in [part] if isinstance(part, Segment) else console.render(part, options):
                yield Segment(printable(segment.text), segment.style)


def _spans(content: str) -> list[Token]:
    """Return the spans of a paragraph or the like; a hostile long one could take minutes."""
    if len(content) <= LONGEST_PARSED:
        spans = _SPANS.parseInline(content)[0].children or []
    else:
        spans = [Token("text", "", 0, content=content)]
    for span in spans:
        if span.type == "softbreak":
            span.type = "hardbreak"
    return spans


def closed_lines(text: str) -> list[int]:
    """Return the lines on which the closed blocks of a text end, in order.

    Only complete lines count, because the last one can still become anything.
    """
    lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
    blocks = [(t, t.map[1]) for t in _BLOCKS.parse("".join(lines)) if t.level == 0 and t.map]
    is_open = bool(blocks) and not _is_closed(blocks[-1][0], lines)
    return [end for _, end in blocks[: len(blocks) - is_open]]


def _is_closed(last: Token, lines: list[str]) -> bool:
    """Return whether no further line can belong to the last block."""
    if last.type == "fence" and last.map is not None:
        start, end = last.map
        closing = rf" {{0,3}}{last.markup[0]}{{{len(last.markup)},}}\s*"
        return end - start > 1 and re.fullmatch(closing, lines[end - 1]) is not None
    is_blank = not lines[-1].strip(" \t\n")
    return last.type in CLOSED or (is_blank and last.type in CLOSED_BY_BLANK)


class MarkdownStream:
    """Shows a text that comes in pieces; `finish` ends it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin where the cursor stands, which is the start of a row."""
        self._console, self._clock = console, clock
        self._open = ""  # source of what is not printed for good
        self._rows: list[str] = []  # that show it; the cursor is at the end of the last one
        self._width = console.width  # for which they were drawn
        self._has_blocks = False
        self._next_draw = 0.0

    def feed(self, text: str) -> None:
        """Add a piece."""
        self._open += printable(text.replace("\r", ""))
        if (began := self._clock()) < self._next_draw:
            return
        self._close_blocks()
        head, _, line = self._open.rpartition("\n")
        is_open = UNDECIDED.fullmatch(line) is None
        self._draw(self._rendered(self._open if is_open else head)[-self._console.height :])
        took = self._clock() - began
        self._next_draw = began + max(1 / DRAWS_PER_SECOND, took / DRAWING_SHARE)

    def finish(self) -> None:
        """Print the open block for good."""
        self._close_blocks()
        self._print(self._open)
        self._open = ""

    def _close_blocks(self) -> None:
        start, lines = 0, self._open.splitlines(keepends=True)
        for end in closed_lines(self._open):
            self._print("".join(lines[start:end]))
            start = end
        self._open = "".join(lines[start:])

    def _print(self, text: str) -> None:
        """Erase the rows that show a block, and print it for good."""
        rows = self._rendered(text)
        erased = self._back_to(0) if self._rows else ""
        self._rows = []
        self._write(erased + "".join(f"{row}\n" for row in rows))
        if rows:
            self._has_blocks = True

    def _rendered(self, text: str) -> list[str]:
        """Return the rows of a block, the blank one between it and the one before it included."""
        if not text.strip():
            return []
        rows = self._rows_of(SafeMarkdown(text))
        if not rows and any(c.isalpha() for c in text):  # quotes in quotes, wider than the terminal
            rows = self._rows_of(Text(text))
        return ["", *rows] if rows and self._has_blocks else rows

    def _rows_of(self, what: RenderableType) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(what, end="")
        rows = "\n".join(row.rstrip(" ") for row in captured.get().split("\n")).strip("\n")
        return rows.split("\n") if rows else []

    def _draw(self, rows: list[str]) -> None:
        """Replace the rows shown by these, from the first that differs."""
        if self._width != self._console.width:
            same = 0
        else:
            pairs = zip(self._rows, rows, strict=False)
            differing = (i for i, (old, new) in enumerate(pairs) if old != new)
            same = next(differing, min(len(self._rows), len(rows)))
        if same == len(self._rows) == len(rows):
            return
        same = min(same, max(0, len(rows) - 1))  # so that the cursor ends behind the last row
        start = self._back_to(same) if same < len(self._rows) else "\n" * bool(self._rows)
        self._write(NO_WRAP + start + "\n".join(rows[same:]) + WRAP)
        self._rows, self._width = rows, self._console.width

    def _back_to(self, row: int) -> str:
        """Return what erases the rows shown from this one on.

        A terminal that was made narrower may show each as several: then their beginnings stay, but
        nothing else is ever erased.
        """
        up = len(self._rows) - 1 - row
        return (UP.format(up) if up > 0 else "") + TO_START + ERASE_BELOW

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
