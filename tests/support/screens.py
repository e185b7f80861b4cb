"""A terminal in memory, which shows what was written to it, scrolled-off rows included."""

import io
import os
import time

import pexpect
import pyte
from rich.console import Console

from exl2flow.cli.terminal.input import Leave, Typed


def rows_of(screen: pyte.HistoryScreen) -> list[str]:
    """Return all rows, scrolled-off ones first, without blanks at their ends or at the end."""
    above = ["".join(row[x].data for x in range(screen.columns)) for row in screen.history.top]
    rows = [row.rstrip() for row in (*above, *screen.display)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


class Screen:
    """A `pyte` screen with its scrollback, and a console that writes to it."""

    def __init__(self, width: int = 60, height: int = 12) -> None:
        self.screen = pyte.HistoryScreen(width, height, history=100_000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)  # the kernel's terminal sends \r\n for \n
        self._stream = pyte.Stream(self.screen)
        self.written = ""
        self.console = Console(
            file=_Into(self),
            force_terminal=True,
            width=width,
            height=height,
            highlight=False,
            color_system="truecolor",
            emoji=False,
            legacy_windows=False,
        )

    def feed(self, text: str) -> None:
        self.written += text
        self._stream.feed(text)

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self.console.size = (width, height)

    def rows(self) -> list[str]:
        return rows_of(self.screen)


class Reflowing(Screen):
    """A terminal that wraps its rows anew when it becomes narrower, as most with windows do."""

    def resize(self, width: int, height: int) -> None:
        buffer = [self.screen.buffer[y] for y in range(self.screen.cursor.y + 1)]
        rows = [
            "".join(row[x].data for x in range(max(row, default=-1) + 1))
            for row in (*self.screen.history.top, *buffer)
        ]
        super().resize(width, height)
        self.screen.reset()
        self.screen.set_mode(pyte.modes.LNM)
        wrapped = [row[i : i + width] for row in rows for i in range(0, max(1, len(row)), width)]
        self._stream.feed("\n".join(wrapped))


class _Into(io.StringIO):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        self._screen.feed(text)
        return len(text)


class Script(Typed):
    """Stands for the keyboard."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.defaults = [*lines], list[str]()

    def read(self, default: str = "") -> str:
        self.defaults.append(default)
        if not self.lines:
            raise Leave
        return self.lines.pop(0)


class Program:
    """A program in a pseudo-terminal, whose screen is read."""

    def __init__(self, *command: str, width: int = 80, height: int = 24, **env: str) -> None:
        self.screen = pyte.HistoryScreen(width, height, history=100_000, ratio=0.5)
        self._stream, self._taken = pyte.ByteStream(self.screen), 0
        words = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
        words.pop("NO_COLOR", None)
        self.child = pexpect.spawn(
            command[0], [*command[1:]], dimensions=(height, width), env=words, timeout=60
        )
        self.child.delaybeforesend = None

    def type(self, *keys: str | bytes) -> None:
        for each in keys:
            self.child.send(each)

    def enter(self, text: str) -> None:
        self.type(text, "\r")

    def read(self, seconds: float = 0.05) -> bool:
        """Take what comes; False: the program has closed its end."""
        try:
            data = self.child.read_nonblocking(65536, timeout=seconds)
            self._taken += len(data)
            self._stream.feed(data)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        return True

    def wait(self, text: str, *, count: int = 1, seconds: float = 30) -> str:
        """Wait until a text stands on the screen so many times, and return all rows."""
        end = time.monotonic() + seconds
        while (shown := "\n".join(self.rows())).count(text) < count:
            before = self._taken
            while self._taken == before:
                if not self.read() or time.monotonic() > end:
                    raise AssertionError(f"{text!r} does not come:\n{shown}")
        return shown

    def leave(self, *keys: str | bytes) -> int:
        """Type, wait for the end, and return the exit status."""
        self.type(*keys)
        while self.read(1):
            pass
        self.child.close()
        return -self.child.signalstatus if self.child.signalstatus else self.child.exitstatus

    def rows(self) -> list[str]:
        return rows_of(self.screen)

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self.child.setwinsize(height, width)
