"""What commands print with: results on stdout, everything else on stderr."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

PIPED_WIDTH = 160  # columns of tables that do not go to a terminal
OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def show(*parts: RenderableType) -> None:
    """Print tables on stdout; a pipe gets them wide enough that nothing is cut."""
    console = OUT if OUT.is_terminal else Console(highlight=False, width=PIPED_WIDTH)
    console.print(*parts)


def say(text: str, *, style: str = "") -> None:
    """Print a message for people on stderr, unwrapped, so that paths can be copied."""
    ERR.print(text, style=style, markup=False, soft_wrap=True)


def emit_json(value: object) -> None:
    """Print one JSON object as one line on stdout; NaN and infinity become null."""
    text = json.dumps(_finite(value), ensure_ascii=False)
    OUT.print(text, markup=False, soft_wrap=True)


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
