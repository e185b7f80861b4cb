"""Output of commands: results on stdout, everything else on stderr."""

import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from rich.console import Console, RenderableType
from rich.markup import escape

SPACES, SURROGATES = range(0x2000, 0x200B), range(0xD800, 0xE000)
KEPT = "\n\t\u200c\u200d\xa0\u202f\u3000" + "".join(map(chr, (*SPACES, *SURROGATES)))
C1_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}  # json.dumps leaves them
PIPED_WIDTH = 160  # columns of tables that do not go to a terminal
# `emoji`: rich would replace `:on:` in paths and JSON, even without markup
OUT = Console(highlight=False, emoji=False)
ERR = Console(stderr=True, highlight=False, emoji=False)


def escape_what_cannot_be_encoded() -> None:
    """Print characters that stdout and stderr cannot encode as `\\udc80`; JSON stays exact."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # what stands behind it may change place, as a file does
                stream.reconfigure(errors="backslashreplace")


def show(*parts: RenderableType) -> None:
    """Print tables on stdout, wide enough in a pipe that nothing is cut."""
    wide = Console(highlight=False, emoji=False, width=PIPED_WIDTH)
    (OUT if OUT.is_terminal else wide).print(*parts)


def say(text: str, *, style: str = "") -> None:
    """Print a message for people on stderr, unwrapped, so that paths can be copied."""
    ERR.print(printable(text), style=style, markup=False, soft_wrap=True)


def tell(text: str, *, style: str = "") -> None:
    """Print a line of the result on stdout, unwrapped, so that paths can be copied."""
    OUT.print(printable(text), style=style, markup=False, soft_wrap=True)


def plain(text: str) -> str:
    """Return text for a cell or title of rich, which reads neither markup nor controls in it."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Replace control characters; models and their files may hold anything.

    Spaces of all kinds, the joiners of emoji and of scripts, and lone surrogates, which stdout and
    stderr escape, stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in KEPT else "\ufffd" for c in text)


def emit_json(value: object) -> None:
    """Print one JSON object as one line on stdout; NaN and infinity become null."""
    OUT.print(json_line(value), markup=False, soft_wrap=True)


def json_line(value: object) -> str:
    """Return one JSON object as one line; NaN and infinity become null, controls are escaped.

    `json.dumps` escapes U+0000 to U+001F only, but terminals also obey U+007F to U+009F: U+009B
    means the same as `ESC [`.
    """
    return json.dumps(_finite(value), ensure_ascii=False).translate(C1_CONTROLS)


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
    return value


class _Handler(logging.Handler):
    """Prints log records above a progress bar instead of through it, each warning once."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        line = f"{record.levelname.lower()}: {self.format(record)}"
        if record.levelno < logging.WARNING or line not in self._shown:
            self._shown.add(line)
            say(line, style="yellow")


@contextmanager
def logging_to_stderr(level: int) -> Iterator[None]:
    """Show this package's log records from `level` on while the block runs."""
    logger = logging.getLogger("exl2flow")
    before = (logger.level, logger.propagate)
    handler = _Handler(level)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # Prefect puts a handler of its own on the root logger
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
