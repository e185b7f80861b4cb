"""A terminal in memory, which shows what was written to it, scrolled-off rows included."""

import io

import pyte
from rich.console import Console


class Screen:
    """A `pyte` screen with its scrollback, and a console that writes to it."""

    def __init__(self, width: int = 60, height: int = 12) -> None:
        self.screen = pyte.HistoryScreen(width, height, history=100_000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)  # the kernel's terminal sends \r\n for \n
        self._stream = pyte.Stream(self.screen)
        self.written = ""
        self.console = Console(
            file=_Into(self), force_terminal=True, width=width, height=height, highlight=False,
            color_system="truecolor", emoji=False, legacy_windows=False,
        )  # fmt: skip

    def feed(self, text: str) -> None:
        self.written += text
        self._stream.feed(text)

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self.console.size = (width, height)

    def rows(self) -> list[str]:
        """Return all rows, scrolled-off ones first, without blanks at their ends or at the end."""
        width = self.screen.columns
        above = ["".join(row[x].data for x in range(width)) for row in self.screen.history.top]
        rows = [row.rstrip() for row in (*above, *self.screen.display)]
        while rows and not rows[-1]:
            rows.pop()
        return rows


class _Into(io.StringIO):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        self._screen.feed(text)
        return len(text)
