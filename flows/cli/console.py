"""What commands print with: results on stdout, everything else on stderr."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


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


def size(count: float) -> str:
    """Return bytes for people: decimal kB, MB or GB."""
    for unit, width in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= width:
            return f"{count / width:.2f} {unit}"
    return f"{count:.0f} B"


class _Handler(logging.Handler):
    """Prints log records above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        say(f"{record.levelname.lower()}: {self.format(record)}", style="yellow")


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
