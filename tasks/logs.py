"""Show our log lines on a run's page, and known errors there in a line each."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler

from exl2flow.core.errors import Exl2FlowError, Interrupted

PREFECTS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
CANCELLED = "Finished in state Cancelled("  # an error in the eyes of Prefect's tasks


class _KnownErrors(logging.Filter):
    """Turns the tracebacks of a known error into one line, of level INFO if a signal is the cause.

    A task, its flow and its process each log the error on its way out: the first line is enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Interrupted) or CANCELLED in record.getMessage():
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        if not isinstance(error, Exl2FlowError):
            return True
        is_new, self._logged = error is not self._logged, error
        record.msg, record.args = str(error), ()
        record.exc_info = record.exc_text = None
        return is_new


_known_errors = _KnownErrors()


@contextmanager
def logged() -> Iterator[None]:
    """Send our log lines to the run's page while the block runs.

    Prefect's own lines about known errors stay short afterwards, because it logs how a run ended
    after the run.
    """
    for name in PREFECTS:
        logging.getLogger(name).addFilter(_known_errors)  # no more than once
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
