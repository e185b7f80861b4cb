"""Prints a chat: answers as they come, thoughts, notes, errors and statistics."""

import signal
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event as Flag
from types import FrameType

from rich.console import Console

from exl2flow.cli.output.console import printable
from exl2flow.cli.terminal.markdown import MarkdownStream
from exl2flow.engine.chat import ChatStatistics, Piece

MARK_PASTES = "\x1b[?2004h"  # those during an answer, too; the prompt ends it
DIM, NAME, NOTE, ERROR = "dim", "bold blue", "yellow", "red"


class Screen:
    """The terminal of a chat.

    thinking: `show`, `fold` or `hide`; plain: without Markdown; stats: put behind answers; name:
    put before them, if any.
    """

    def __init__(self, console: Console) -> None:
        """Print to a console."""
        self.console = console
        self.thinking, self.plain, self.stats, self.name = "show", False, False, ""
        self._kind = ""  # of the pieces that are being shown
        self._markdown: MarkdownStream | None = None
        self._is_line_open, self._thought_since = False, 0.0

    def say(self, text: str, style: str = "") -> None:
        """Print a line of the program's own, which may quote anything, wrapped at its spaces."""
        self.console.print(printable(text), style=style, markup=False)

    def print(self, text: str) -> None:
        """Print an answer that is there already."""
        if self.plain:
            self.say(text)
        else:
            markdown = MarkdownStream(self.console)
            markdown.feed(text)
            markdown.finish()

    def show(self, pieces: Iterable[Piece]) -> None:
        """Show an answer; its pieces end at the first Ctrl-C, a second one raises."""
        # it is heard between two pieces, and, where it can be, while the next one is awaited
        with _interruptible(getattr(pieces, "abort_event", None) or Flag()) as stop:
            self.console.file.write(MARK_PASTES)
            try:
                if self.name:
                    self.say(f"{self.name}:", NAME)
                iterator = iter(pieces)
                for piece in iterator:
                    self._piece(piece)
                    if stop.is_set():
                        iterator.close()  # type: ignore[attr-defined]  # of a generator
                        break
            finally:
                self._change("")
        if stop.is_set():
            self.say("stopped", NOTE)

    def _piece(self, piece: Piece) -> None:
        if piece.kind != self._kind:
            self._change(piece.kind)
        if piece.kind == "note":
            self.say(piece.text, NOTE)
        elif self._markdown is not None:
            self._markdown.feed(piece.text)
        elif piece.kind == "answer" or self.thinking == "show":
            style = DIM if piece.kind == "thinking" else ""
            text = printable(piece.text.replace("\r", ""))
            self.console.print(text, style=style, markup=False, end="", soft_wrap=True)
            self._is_line_open = not text.endswith("\n")

    def _change(self, kind: str) -> None:
        """End what is being shown, and begin with another kind."""
        if self._markdown is not None:
            self._markdown.finish()
        if self._is_line_open:
            self.console.print()
        if self._kind == "thinking" and self.thinking == "fold":
            self.say(f"thought for {time.monotonic() - self._thought_since:.1f} s", DIM)
        self._markdown, self._is_line_open, self._kind = None, False, kind
        if kind == "answer" and not self.plain:
            self._markdown = MarkdownStream(self.console)
        if kind == "thinking":
            self._thought_since = time.monotonic()
            if self.thinking == "fold":
                self.say("thinking …", DIM)


def counted(number: int, noun: str) -> str:
    """Return how many there are."""
    return f"{number} {noun}{'s' * (number != 1)}"


def summary(counts: ChatStatistics) -> str:
    """Return the statistics of an answer as a line."""
    parts = [
        f"context {counts.context_tokens} tokens, {counts.cached_tokens} cached",
        f"answer {counts.answer_tokens} tokens",
        f"first after {counts.first_token_seconds:.2f} s",
        f"{counts.tokens_per_second:.1f} tokens/s",
    ]
    if counts.drafts:
        rates = (f"{kind} {made / drafted:.0%}" for kind, (drafted, made) in counts.drafts.items())
        parts.append(f"draft tokens accepted: {', '.join(rates)}")
        parts.append(f"{counts.answer_tokens / max(1, counts.steps):.2f} tokens a step")
    return "; ".join(parts)


@contextmanager
def _interruptible(stop: Flag) -> Iterator[Flag]:
    """Have the first Ctrl-C set a flag; the second one raises, as usual."""

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def without_echo() -> Iterator[None]:
    """Turn echo off for the block, so that typed text and `^C` do not mix with its output."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    changed = termios.tcgetattr(sys.stdin)
    changed[0] &= ~termios.ICRNL  # what is typed ahead reaches the next prompt as it is
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
