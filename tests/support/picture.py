"""Record a chat as a picture for the tutorial: a real run in a terminal in memory.

python tests/support/picture.py demo-exl2 docs/images/chat.svg
"""

import io
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.color import ANSI_COLOR_NAMES
from rich.console import Console
from rich.style import Style
from rich.text import Text
from screens import Program

WIDTH, HEIGHT = 100, 36
LINES = (  # what is typed, and what is the last of what is shown
    ("One morning, Gwen went to the market.", "tokens/s"),
    ("/retry", "tokens/s"),
    ("/set temperature 1", "temperature 1.0"),
    ("/tokens And then?", "of 2048 tokens"),
)
OPTIONS = ("--temperature", "0.3", "--max-answer", "40", "--seed", "3", "--stats")
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # which a reader would have to fetch


def recorded(model: str) -> pyte.HistoryScreen:
    """Return the screen of a chat with a model."""
    program = (sys.executable, "-P", "-m", "exl2flow.flows.cli", "chat", model)
    with tempfile.TemporaryDirectory() as home:
        homes = {"XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home}
        chat = Program(*program, *OPTIONS, width=WIDTH, height=HEIGHT, **homes)
        chat.wait("User:")
        for prompts, (line, last) in enumerate(LINES, start=2):
            count = chat.wait("").count(last) + 1
            chat.enter(line)
            chat.wait(last, count=count)
            chat.wait("User:", count=prompts)
        chat.child.close(force=True)
        return chat.screen


def colour(name: str) -> str | None:
    """Return what rich calls a colour of `pyte`."""
    if name == "default":
        return None
    name = {"brown": "yellow"}.get(name, name.replace("bright", "bright_"))
    return name if name in ANSI_COLOR_NAMES else f"#{name}"


def style(char: Char) -> Style:
    """Return how rich shows a character."""
    return Style(
        color=colour(char.fg), bgcolor=colour(char.bg), bold=char.bold, italic=char.italics
    )


def picture(screen: pyte.HistoryScreen, title: str) -> str:
    """Return the rows of a screen as SVG."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True)
    for y in range(screen.cursor.y + 1):
        row = groupby((screen.buffer[y][x] for x in range(WIDTH)), style)
        console.print(Text.assemble(*(("".join(c.data for c in run), how) for how, run in row)))
    return FONTS.sub("", console.export_svg(title=title, unique_id="chat"))


if __name__ == "__main__":
    model, out = sys.argv[1:]
    svg = picture(recorded(model), " ".join(["exl2flow chat", model, *OPTIONS]))
    Path(out).write_text(svg, encoding="utf-8")
