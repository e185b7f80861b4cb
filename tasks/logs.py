"""Show our log lines on a run's page."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler


@contextmanager
def logged() -> Iterator[None]:
    """Send our log lines to the run's page while the block runs."""
    logger = logging.getLogger("exl2flow")
    if any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        yield  # Prefect's own setting `extra_loggers` includes us
        return
    level, handler = logger.level, APILogHandler()
    logger.addHandler(handler)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
